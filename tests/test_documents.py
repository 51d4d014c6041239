"""The documents' commands, examples and links: every one is tried, or its test is named here."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from shardtrain.bench import settings as bench_settings
from shardtrain.doctor import __main__ as doctor
from shardtrain.job.hydra_app import compose, from_hydra
from shardtrain.plan import __main__ as plan
from shardtrain.train import sweep

from programs import ended

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]

# Commands that are tried elsewhere: what tries them.
ELSEWHERE = {
    "python3 -m venv .venv && . .venv/bin/activate": ".ci/run",
    'pip install -e ".[dev]"': ".ci/run",
    "bash .ci/check": ".ci/run",
    "python -m pytest": ".ci/run",
    "python -m pytest --long": ".ci/run",
    "python -m pytest tests/test_layout.py": ".ci/run",
    "tensorboard --logdir outputs": "tests/test_monitor.py",
    "sbatch --nodes 4 configs/slurm/train.sbatch +recipe=resnet50_imagenet_v1 data.root=/data/imagenet": (
        "tests/test_cli.py"
    ),
    "python -m shardtrain.export run=outputs/digits out=digits.safetensors": "tests/test_export.py",
    "python -m shardtrain.export run=outputs/head out=head.pth": "tests/test_export.py",
}


def blocks(language: str) -> list[tuple[Path, str]]:
    pattern = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [(file, found) for file in DOCUMENTS for found in pattern.findall(file.read_text())]


COMMANDS = sorted({line for _, block in blocks("bash") for line in block.splitlines() if line})


def module_of(words: list[str]) -> tuple[str, list[str]]:
    """The module or file that a command starts, and its arguments; without torchrun's options."""
    at = words.index("-m") + 1 if "-m" in words else next(i for i, w in enumerate(words) if w.endswith(".py"))
    return words[at], words[at + 1 :]


def read(module: str, arguments: list[str]) -> object:
    """What ``module`` makes of its arguments; a mistake in them raises `UserError`."""
    if module == "shardtrain.train" and "-m" in arguments:
        return sweep.read(arguments, speak=False)
    if module == "shardtrain.train":
        raw = compose(arguments, speak=False)
        return raw and from_hydra(raw)
    return READERS[module](arguments, False)


READERS: dict[str, Callable[[list[str], bool], object]] = {
    "shardtrain.plan": plan.read,
    "shardtrain.bench": lambda words, speak: bench_settings.read([w for w in words if "=" in w], speak),
    "shardtrain.doctor": doctor.read,
}
# Their parts are tests of their own.
PROGRAMS = ["tests/behaviours.py"]


@pytest.mark.parametrize("command", [c for c in COMMANDS if "shardtrain." in c and c not in ELSEWHERE])
def test_a_command_of_the_documents_is_understood(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(ROOT)
    module, arguments = module_of(shlex.split(os.path.expandvars(command)))
    if module in ("shardtrain.recipes.walk", "shardtrain.recipes.digits"):
        pytest.skip("run below, or in tests/test_recipes.py")
    assert read(module, arguments)


def test_every_command_is_tried_somewhere() -> None:
    known = [c for c in COMMANDS if "shardtrain." in c or c in ELSEWHERE]
    rest = [c for c in COMMANDS if c not in known and module_of(shlex.split(c))[0] not in PROGRAMS]
    assert rest == []
    assert set(ELSEWHERE) <= set(COMMANDS)


def on_two_ranks(*command: str, folder: Path) -> str:
    program = ended(2, *command, folder=folder)
    assert program.codes == [0, 0], program.errors
    return program.output


@pytest.mark.parametrize("document", ["README.md", "from-fsdp2.md"])
def test_the_example_of_a_document_trains(document: str, tmp_path: Path) -> None:
    (example,) = [text for file, text in blocks("python") if file.name == document and "import " in text]
    shorter = example.replace("range(10)", "range(2)").replace("(16, 3", "(4, 3").replace("(16,)", "(4,)")
    (tmp_path / "mine.py").write_text(shorter)
    said = on_two_ranks("mine.py", folder=tmp_path)
    assert document != "README.md" or len(re.findall(r"step [01]: loss \d\.\d{3}", said)) == 4


@pytest.mark.parametrize("package", ["accelerate", "lightning_fabric"])
def test_a_sharded_model_trains_in_another_loop(package: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    (example,) = [text for _, text in blocks("python") if f"import {package}" in text]
    (tmp_path / "theirs.py").write_text(example)
    on_two_ranks("theirs.py", folder=tmp_path)


def test_the_walk_tells_what_the_document_says(tmp_path: Path) -> None:
    said = on_two_ranks("-m", "shardtrain.recipes.walk", folder=tmp_path)
    for line in (
        "rank 0  1.weight [[1] [1]]",
        "rank 1  1.weight []",
        "rank 0  inside 1: 0.weight [[1] [1] [1] [1]], 1.weight [[1 1]]",
        "rank 1  inside 1: 0.weight [[1] [1]], 1.weight [[1 1]]",
        "rank 0  0.weight [[1] [1] [1] [1]]  gradient [[30] [30] [30] [30]]",  # means of 12 and 48
        "rank 1  1.weight []  gradient []",
        "rank 1  0.weight [[-2 -2 -2] [-2 -2 -2]]",
    ):
        assert line in said, said
    sent = "sent {'all_gather': 64, 'reduce_scatter': 32} bytes in {'all_gather': 4, 'reduce_scatter': 2}"
    assert said.count(sent) == 2, said


def test_the_recipe_shown_is_the_one_that_is_tried() -> None:
    (shown,) = [text for file, text in blocks("yaml") if file.name == "extending.md"]
    assert (ROOT / "docs/example/recipe/mine.yaml").read_text() == shown


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.name)
def test_no_link_is_dead(file: Path) -> None:
    text = file.read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    quoted = re.findall(r"`((?:shardtrain|tests|configs|recipes|docs)/[a-z\d_./-]*)`", text)
    missing = [
        link for link in [*links, *quoted] if not (file.parent / link).exists() and not (ROOT / link).exists()
    ]
    assert missing == []

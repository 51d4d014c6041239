"""What the documents show: every command and example is run, printed output is compared, no link is dead."""

import csv
import importlib.util
import json
import os
import re
import shlex
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
import yaml
from PIL import Image

from shardtrain.job.data import load
from shardtrain.recipes import api

import tiny
from pool import ended
from tiny import composed

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]

ELSEWHERE = {  # what is not run here, by a part of it, and why
    "-m venv|pip install|.ci/check|-m pytest": ".ci/run does",
    "GLOO_SOCKET_IFNAME|--nnodes": "tests/test_hosts.py does",
    "sbatch": "tests/test_cli.py runs the script with commands that stand for Slurm's",
    "data.download=true": "takes a network",
    "bench/steps.py device=cuda": "takes a GPU; tests/test_bench.py runs it dry",
    "perf record|perf report": "takes perf",
    "myhub": "the test of data sets of other packages does",
}
PARTS = [part for parts in ELSEWHERE for part in parts.split("|")]
SHORT = {  # what makes a program short
    "shardtrain.train": "train.max_steps=2 train.batch_size=8 data.limit=24 data.image_size=96",
    "tests/bench/steps.py": "rounds=1 warmup=0 image_size=32 batch_size=2",
    "tensorboard.main": "--inspect",
}


def blocks(language: str, *files: Path) -> list[str]:
    """The blocks of a language; of none, what commands print."""
    fences = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
    return [code for file in files for _, name, code in fences.findall(file.read_text()) if name == language]


def not_installed(text: str) -> list[str]:
    packages = ("accelerate", "lightning_fabric", "timm")
    return [name for name in packages if name in text and importlib.util.find_spec(name) is None]


def commands(*files: Path) -> list[str]:
    lines = [line for block in blocks("bash", *files) for line in block.splitlines()]
    return [line for line in lines if line and not any(part in line for part in PARTS)]


def parsed(command: str) -> tuple[int, str, list[str]]:
    """How many ranks a command starts, of which module or file, and with which arguments."""
    words = shlex.split(os.path.expandvars(command))
    if words[0] == "tensorboard":
        return 1, "tensorboard.main", words[1:]
    ranks = int(words[words.index("--nproc-per-node") + 1]) if words[0] == "torchrun" else 1
    files = [number for number, word in enumerate(words) if word.startswith("tests/bench/")]
    at = files[0] if files else words.index("-m") + 1
    return ranks, words[at], words[at + 1 :]


def run(ranks: int, *command: str, folder: Path) -> str:
    done = ended(ranks, *command, folder=folder, timeout=500)
    assert set(done.codes) == {0}, (command, done.output, done.errors)
    return done.output


def test_what_is_not_run_is_known() -> None:
    text = "".join(file.read_text() for file in DOCUMENTS)
    assert [part for part in PARTS if part not in text] == []
    others = [block for block in blocks("python", *DOCUMENTS) if not block.startswith(("import ", "# "))]
    assert re.findall(r"class (\w+)", "".join(others)) == ["Mine", "ShardedTrainer"]  # test_config.py, _wild


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", [file for file in DOCUMENTS if commands(file)], ids=lambda file: file.name)
def test_the_commands_of_a_document_run_and_print_what_it_shows(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other in one folder, with the photographs and the weights that they start from."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in ("docs", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "images").symlink_to(tmp_path / "photos")
    for number in range(24):
        folder = tmp_path / "photos" / ("train", "val")[number % 2] / ("cat", "dog")[number // 12]
        folder.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(number).integers(256, size=(40, 40, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{number}.jpg")
    if "resnet50.pth" in file.read_text():
        torch.save(torchvision.models.resnet50().state_dict(), tmp_path / "resnet50.pth")
    for module in (text for text in blocks("python", file) if text.startswith("# ")):
        (tmp_path / module.split()[1]).write_text(module)
    said = ""
    for command in (line for line in commands(file) if not not_installed(line)):
        ranks, module, arguments = parsed(command)
        short = SHORT.get(module, "").split()
        if module == "shardtrain.train" and "docs/example" not in command:  # whose ranks start workers
            short.append("data.workers=0")
        program = [module] if module.endswith(".py") else ["-m", module]
        said += run(ranks, *program, *arguments, *short, folder=tmp_path)
    lines = [line for block in blocks("", file) for line in block.splitlines()]
    assert [line for line in lines if line not in said] == [], said


def test_data_sets_of_other_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `docs/extending.md` reads them: a folder as on the hub, and tar files."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    (text,) = [block for block in blocks("python", ROOT / "docs/extending.md") if block.startswith("# myhub")]
    (tmp_path / "myhub.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "shards").mkdir()
    for part, name in (("train", "train"), ("val", "validation")):
        with tarfile.open(tmp_path / f"shards/{part}-0.tar", "w") as tar:
            for label in range(2):
                folder = tmp_path / "photos" / name / ("cat", "dog")[label]
                folder.mkdir(parents=True)
                Image.new("L", (9, 12), 100 * label).save(folder / "0.jpg")
                tar.add(folder / "0.jpg", f"{label}.jpg")
                (folder / "0.cls").write_text(str(label))
                tar.add(folder / "0.cls", f"{label}.cls")
                (folder / "0.cls").unlink()
    for target, place in (("hub", f"data.path={tmp_path}/photos"), ("tars", f"data.root={tmp_path}/shards")):
        config = composed(f"data._target_=myhub.{target}", place, "data.image_size=8", "allow=[myhub]")
        found = load(config.data, config.allow)
        for images, labels in (found.train[[1, 0]], found.val[[1, 0]]):
            assert images.shape == (2, 3, 8, 8)
            assert labels.tolist() == [1, 0]
            assert images[1].max() < 10 < images[0].min()


EXAMPLES = [text for text in blocks("python", *DOCUMENTS) if text.startswith("import ")]


@pytest.mark.long
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda text: text.partition("\n")[0])
def test_an_example_runs_on_two_ranks(example: str, tmp_path: Path) -> None:
    if not_installed(example):
        pytest.skip(f"{not_installed(example)[0]} is not installed")
    (tmp_path / "mine.py").write_text(example)
    said = run(2, "mine.py", folder=tmp_path)
    assert said.count("loss") == (20 if "print(" in example else 0)


FILES = {file.stem: file for file in sorted((ROOT / "docs/example").glob("*.py"))}
# seconds for their imports
ON_FOUR = "hsdp"
SLOW = ("dcp_to_fsdp2", "hugging_face", "own_loop")
RUN = [name for name in FILES if name not in ("resume", "writers")]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long if n in SLOW else ()) for n in RUN])
def test_an_example_s_file_runs(name: str, tmp_path: Path) -> None:
    text = FILES[name].read_text()
    assert text.count("\n") < 60
    if name == "hugging_face" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    run(4 if name == ON_FOUR else 2, str(FILES[name]), folder=tmp_path)


@pytest.mark.long
def test_a_loop_with_our_sampler_continues_exactly(tmp_path: Path) -> None:
    example = FILES["resume"].read_text()
    (tmp_path / "mine.py").write_text(example)
    (tmp_path / "killed.py").write_text(example.replace("    loss =", "    assert step < 7\n    loss ="))
    losses = []
    for name, programs in (("whole", ["mine.py"]), ("parts", ["killed.py", "mine.py"])):
        (tmp_path / name).mkdir()
        said = [ended(2, str(tmp_path / each), folder=tmp_path / name).output for each in programs]
        losses.append(sorted({*re.findall(r"step .*", "".join(said))}))
    assert losses[0] == losses[1]
    assert len(losses[0]) == 20  # two ranks' own


# Stands for Weights & Biases where it is not installed.
WANDB = """
import json
from types import SimpleNamespace

def write(*event, **keywords):
    with open("wandb.jsonl", "a") as file:
        file.write(json.dumps([*event, keywords], default=str) + "\\n")

def init(**settings):
    write("init", settings["name"], settings["config"]["seed"])
    summary = SimpleNamespace(update=lambda facts: write("facts", facts.get("status")))
    log = lambda content, step: write("log", step, [*content])
    return SimpleNamespace(log=log, summary=summary, finish=lambda exit_code: write("finish", exit_code))

def Image(array):
    assert array.dtype == "uint8" and array.ndim == 3
"""


def test_the_examples_of_writers_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights & Biases is a stand-in here unless it is installed, and then it writes into the folder only."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "mywriters.py").write_text(FILES["writers"].read_text())
    stands_in = importlib.util.find_spec("wandb") is None
    if stands_in:
        (tmp_path / "wandb.py").write_text(WANDB)
    own = ("monitor.writers=[mywriters.Csv,mywriters.WeightsAndBiases]", "allow=[mywriters]")
    result = tiny.run("mine", *own, "monitor.tensorboard=false")
    with Path("mine/scores.csv").open(newline="") as file:
        lines = list(csv.reader(file))
    assert ["10", "val/acc1", str(result["val/acc1"])] in lines
    assert [step for step, tag, _ in lines if tag == "train/loss"] == ["5", "10"]
    if stands_in:
        events = [json.loads(line) for line in (tmp_path / "wandb.jsonl").read_text().splitlines()]
        assert [event[0] for event in events[:3]] == ["init", "facts", "log"]
        assert events[0][1:3] == ["mine", 0]
        assert events[2][1:3] == [0, ["samples/as_trained"]]
        assert events[-2:] == [["facts", "finished", {}], ["finish", 0, {}]]


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Jupyter: its cells, one after the other."""
    monkeypatch.setenv("MPLBACKEND", "Agg")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    names: dict[str, object] = {}
    for cell in json.loads((ROOT / "docs/fsdp.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert len(pyplot.get_fignums()) == 2
    pyplot.close("all")
    assert [title.partition(".")[0] for title in names["moments"]] == list("123456789")


def test_public_names_are_those_of_the_docstrings() -> None:
    assert (ROOT / "docs/api.md").read_text() == f"{api.text()}\n", (
        "python -m shardtrain.recipes.api > docs/api.md"
    )


def test_what_is_cited_is_what_is_built() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert f'name = "{cited["title"]}"\nversion = "{cited["version"]}"' in project
    assert f'license = "{cited["license"]}"' in project


def test_the_recipe_shown_is_the_one_that_is_tried() -> None:
    shown, _ = blocks("yaml", ROOT / "docs/extending.md")
    assert (ROOT / "docs/example/recipe/mine.yaml").read_text() == shown


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.name)
def test_no_link_is_dead(file: Path) -> None:
    text = file.read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    quoted = re.findall(r"`((?:shardtrain|tests|configs|recipes|docs)/[a-z\d_./-]*)`", text)
    for link in [*links, *quoted]:
        assert (file.parent / link).exists() or (ROOT / link).exists(), link

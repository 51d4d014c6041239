"""What the documents show: every command and example is run, printed output is compared, no link is dead."""

import ast
import csv
import functools
import importlib.util
import json
import keyword
import os
import pydoc
import re
import shlex
import tarfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import api
import numpy as np
import pytest
import torch
import torchvision
import why_shard
import yaml
from PIL import Image

import shardtrain
from shardtrain.config.config import Config
from shardtrain.config.schema import flat
from shardtrain.data import load
from shardtrain.engine.schedule import Schedule

import tiny
from key_table import keys_of
from pool import ended

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]

ELSEWHERE = {  # what is not run here, by a part of it, and why
    "-m venv|pip install|.ci/check|-m pytest": ".ci/run does",
    "GLOO_SOCKET_IFNAME|--nnodes": "needs two hosts",
    "sbatch": "tests/train/test_cli.py runs the script with commands that stand for Slurm's",
    "data=cifar10 data.root": "takes a network",
    "bench/steps.py device=cuda": "takes a GPU; tests/test_bench.py runs it dry",
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
    packages = ("accelerate", "lightning_fabric", "optuna", "timm", "transformers")
    return [name for name in packages if name in text and importlib.util.find_spec(name) is None]


def commands(*files: Path) -> list[str]:
    lines = [line for block in blocks("bash", *files) for line in block.replace("\\\n", "").splitlines()]
    return [line for line in lines if line and not any(part in line for part in PARTS)]


def parsed(command: str) -> tuple[int, str, list[str]]:
    """How many ranks a command starts, of which module or file, and with which arguments."""
    words = shlex.split(os.path.expandvars(command))
    if words[0] == "tensorboard":
        return 1, "tensorboard.main", words[1:]
    ranks = int(words[words.index("--nproc-per-node") + 1]) if words[0] == "torchrun" else 1
    files = [number for number, word in enumerate(words) if word.endswith(".py")]
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


@pytest.mark.release
@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", [file for file in DOCUMENTS if commands(file)], ids=lambda file: file.name)
def test_the_commands_of_a_document_run_and_print_what_it_shows(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other in one folder, with the photographs and the weights that they start from."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in ("docs", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    for folder in ("images", "new"):
        (tmp_path / folder).symlink_to(tmp_path / "photos")
    Image.new("RGB", (9, 12), "white").save(tmp_path / "image.png")
    for number in range(24):
        folder = tmp_path / "photos" / ("train", "val")[number % 2] / ("cat", "dog")[number // 12]
        folder.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(number).integers(256, size=(40, 40, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{number}.jpg")
    for name in {*re.findall(r"=(resnet\d+)\.pth", file.read_text())}:
        torch.save(getattr(torchvision.models, name)().state_dict(), tmp_path / f"{name}.pth")
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


EXAMPLES = [text for text in blocks("python", *DOCUMENTS) if text.startswith("import ")]


@pytest.mark.long
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda text: text.partition("\n")[0])
def test_an_example_runs_on_two_ranks(example: str, tmp_path: Path) -> None:
    if not_installed(example):
        pytest.skip(f"{not_installed(example)[0]} is not installed")
    (tmp_path / "mine.py").write_text(example)
    said = run(2, "mine.py", folder=tmp_path)
    if "print(" in example:
        assert blocks("text", ROOT / "README.md") == [said]


FILES = {file.stem: file for file in sorted((ROOT / "docs/example").glob("*.py"))}
ON_FOUR = "hsdp"
# Seconds for their imports, or more.
SLOW = "accumulate bf16 bytes captured dcp_to_fsdp2 export hsdp hugging_face own_loop pretrained"
SLOW += " with_accelerate with_fabric"
RUN = [name for name in FILES if name not in ("classify", "resume", "writers")]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long if n in SLOW.split() else ()) for n in RUN]
)
def test_an_example_s_file_runs(name: str, tmp_path: Path) -> None:
    text = FILES[name].read_text()
    assert text.count("\n") < 60
    if not_installed(text):
        pytest.skip(f"{not_installed(text)[0]} is not installed")
    run(4 if name == ON_FOUR else 2, str(FILES[name]), folder=tmp_path)
    if name in ("bytes", "trainer"):
        (tmp_path / "alone").mkdir()
        run(1, str(FILES[name]), folder=tmp_path / "alone")


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


# Stands for Weights & Biases.
WANDB = """
from types import SimpleNamespace

EVENTS = []

def init(**settings):
    EVENTS.append(("init", settings["name"], settings["config"]["seed"]))
    summary = SimpleNamespace(update=lambda facts: EVENTS.append(("facts", facts.get("status"))))
    log = lambda content, step: EVENTS.append(("log", step, *content))
    return SimpleNamespace(log=log, summary=summary, finish=lambda exit_code: EVENTS.append(exit_code))

def Image(array):
    assert array.dtype == "uint8" and array.ndim == 3
"""


def test_the_examples_of_writers_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mywriters.py").write_text(FILES["writers"].read_text())
    (tmp_path / "wandb.py").write_text(WANDB)
    own = ("monitor.writers=[mywriters.Csv,mywriters.WeightsAndBiases]", "allow=[mywriters]")
    result = tiny.run("mine", *own)
    with Path("mine/scores.csv").open(newline="") as file:
        lines = list(csv.reader(file))
    assert ["10", "acc1/val", str(result["acc1/val"])] in lines
    assert [step for step, tag, _ in lines if tag == "loss/train"] == ["5", "10"]
    first, _, shown, *_, facts, last = importlib.import_module("wandb").EVENTS
    assert (first, shown) == (("init", "mine", 0), ("log", 0, "samples/as_trained"))
    assert (facts, last) == (("facts", "finished"), 0)


@pytest.mark.long
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
    numbers = [title.partition(".")[0] for title in names["moments"]]
    assert numbers == [str(number) for number in range(1, 11)]


def test_public_names_are_those_of_the_docstrings() -> None:
    assert (ROOT / "docs/api.md").read_text() == f"{api.text()}\n", "python docs/api.py > docs/api.md"


def test_the_pictures_of_why_shard_are_those_of_its_command() -> None:
    for name in ("memory", "collectives"):
        assert (ROOT / f"docs/pictures/{name}.svg").read_text() == getattr(why_shard, name)(), (
            "python docs/course/why_shard.py docs/pictures"
        )


def test_what_is_cited_is_what_is_built() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert f'name = "{cited["title"]}"\ndynamic = ["version"]' in project
    assert 'version = {attr = "shardtrain.__version__"}' in project
    assert cited["version"] == shardtrain.__version__
    newest = re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == shardtrain.__version__
    assert f'license = "{cited["license"]}"' in project


def test_the_recipe_shown_is_the_one_that_is_tried() -> None:
    [shown] = blocks("yaml", ROOT / "docs/extending.md")
    assert (ROOT / "docs/example/recipe/mine.yaml").read_text() == shown


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.name)
def test_no_link_is_dead(file: Path) -> None:
    text = file.read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    quoted = re.findall(r"`((?:shardtrain|tests|configs|recipes|docs)/[a-z\d_./-]*)`", text)
    for link in [*links, *quoted]:
        assert (file.parent / link).exists() or (ROOT / link).exists(), link
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", text):
        headings = re.findall(r"^#+ (.*)", (file.parent / link if link else file).read_text(), re.MULTILINE)
        assert anchor in [re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings], (
            anchor
        )


# Names between backticks exist. What is gone has no backticks.

FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)*(?:\.(?:py|md|yaml|json|txt|svg|png|ipynb|sbatch)|/)")
NAME = re.compile(r"\+?([A-Za-z_]\w*(?:\.\w+)*)(?:(=)|\(.*\)|\[.*\])?")
OUTSIDE = """
    builtins torch torch.Tensor torch.autograd.graph torch.func torch.nn torch.nn.Module torch.nn.functional
    torch.distributed torch.distributed.checkpoint torch.distributed.checkpoint.format_utils
    torch.distributed.checkpoint.state_dict torch.distributed.fsdp torch.distributed.tensor
    torch.distributed.tensor.DTensor torch.optim.swa_utils
    """
OTHERS = """
    FOLDER/recipe/NAME.yaml logit_scale mine.yaml model.KEY
    PostLocalSGDOptimizer apply_fsdp cpu_ram_efficient_loading empty_init load_state merge_and_unload
    _post_backward_hook_state
    .hydra/ checkpoints/ config.yaml log.txt result.json digits.safetensors.json photos/ traces/ val/
    """  # of users, of other packages, torch's private names, a run's files
KNOWN = {*OTHERS.split()}


def spans(file: Path) -> set[str]:
    """Return what stands between backticks outside of code blocks; of several settings, each."""
    text = re.sub(r"^( *)```.*?^\1```$", "", file.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = {span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", text)}
    settings = {word for span in found if "=" in span and "(" not in span for word in span.split()}
    return found | settings


@functools.cache
def used() -> set[str]:
    """Return the names that our sources define or use, and words of theirs that are names."""
    names = {path.stem for path in ROOT.glob("configs/**/*") if path.suffix in ("", ".yaml")}
    for folder in ("shardtrain", "recipes", "docs", "tests"):
        for path in ROOT.glob(f"{folder}/**/*.py"):
            names.add(path.stem)
            for node in ast.walk(ast.parse(path.read_text())):
                words = (
                    getattr(node, field, None) for field in ("name", "id", "attr", "arg", "module", "value")
                )
                for word in words:
                    names |= {*word.split(".")} if isinstance(word, str) else set()
    return names


@functools.cache
def keys() -> set[str]:
    """Return every key of the training program."""
    keys = {"train.loss._target_", "model._target_", *keys_of(Config)}
    for path in ROOT.glob("configs/**/*.yaml"):
        group = {"models": "model", "classifier": "model"}.get(path.stem, path.parent.name)
        above = path.stem == "config" or group in ("recipe", "debug")
        if path.stem != "hints":
            values = flat(yaml.safe_load(path.read_text()) or {})
            keys |= {key if above else f"{group}.{key}" for key in values}
    return keys


def is_file(name: str, beside: Path) -> bool:
    places = [beside.parent / name, ROOT / name, ROOT / "shardtrain" / name]
    return any(place.exists() for place in places) or ("/" not in name and name[:-3] in used())


def is_known(name: str, setting: bool) -> bool:
    """Return whether a name, dotted or not, is a key, or made of names of our sources or of torch's."""
    if name in keys() or name.isupper():  # a variable of the environment
        return True
    first, *rest = name.split(".")
    if setting and rest and first in Config.__dataclass_fields__:
        return False
    places = [pydoc.locate(place) for place in OUTSIDE.split()]
    unknown = {first, *rest} - used() - {*keyword.kwlist}
    return all(any(hasattr(place, word) for place in places) for word in unknown)


@pytest.mark.parametrize(
    "file",
    [file for file in DOCUMENTS if file.name not in ("CHANGELOG.md", "SECURITY.md")],
    ids=lambda file: file.name,
)
def test_names_between_backticks_exist(file: Path) -> None:
    missing = []
    for span in sorted(spans(file) - KNOWN):
        match = NAME.fullmatch(span) or re.match(r"\+?([\w.]+)(=)", span)
        if FILE.fullmatch(span):
            there = is_file(span, file)
        else:
            there = match is None or match[1] in KNOWN or is_known(match[1], match[2] == "=")
        missing += [] if there else [span]
    assert missing == []


class Facts(NamedTuple):
    name: str
    gradient_bytes: int = 8
    keeps: bool = False


class Verbs:
    """An actor that writes down the schedule's verbs. `hide` is left out: a release follows."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def __getattr__(self, verb: str) -> Callable[[Facts], None]:
        return lambda unit: self.said.append(f"{verb} {unit.name}")


def test_the_picture_of_descent_is_what_the_schedule_does() -> None:
    (picture,) = (block for block in blocks("text", ROOT / "docs/engine.md") if "backward, upward" in block)
    sides = [line.split("|") for line in picture.splitlines()]
    verb = re.compile(r"(?:gather|show|take|release|reduce) \d")
    down = [verb.findall(left) for left, _ in sides]
    up = [verb.findall(right) for _, right in reversed(sides)]

    acting = Verbs()
    units = [Facts("root"), Facts("0"), Facts("1")]
    schedule = Schedule(units, acting)
    schedule.begin_forward({*units})
    schedule.enter(units[0])
    moments = []
    for unit in units[1:]:
        schedule.enter(unit)
        moments.append(schedule.moment)
        schedule.leave(unit, learns=True)
    schedule.leave(units[0], learns=True)
    schedule.end_forward(failed=False)
    schedule.begin_backward(schedule.forward, {*units}, room=8)
    for moment in reversed(moments):
        schedule.reach(schedule.forward, moment)
    schedule.end_backward()

    said = [text for text in acting.said if verb.fullmatch(text)]
    assert [*chain.from_iterable([*down, *up])] == said
    assert [re.findall(r"\d", line)[0] for line in picture.splitlines() if "hook" in line] == ["0", "1"]
    assert re.findall(r'hook, "(\d)"', picture) == [*map(str, moments)]


def test_the_course_says_how_long_its_files_are() -> None:
    text = (ROOT / "docs/engine.md").read_text()
    rows = re.findall(r"^\| \d+ \| (\[`.*) \| (\d+) \|", text, re.MULTILINE)
    assert len(rows) == 7
    for named, lines in rows:
        first, *others = re.findall(r"`([\w./]+\.py)`", named)
        files = [ROOT / first, *((ROOT / first).parent / name for name in others)]
        counted = sum(file.read_text().count("\n") for file in files)
        assert counted == pytest.approx(int(lines), rel=0.1), named


def test_data_sets_of_other_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `docs/example/data/myhub.py` reads them: a folder as on the hub, and tar files."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    monkeypatch.syspath_prepend(ROOT / "docs/example/data")
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
        config = tiny.composed(f"data._target_=myhub.{target}", place, "data.image_size=8", "allow=[myhub]")
        found = load(config.data, config.allow)
        for images, labels in (found.train[[1, 0]], found.val[[1, 0]]):
            assert images.shape == (2, 3, 8, 8)
            assert labels.tolist() == [1, 0]
            assert images[1].max() < 10 < images[0].min()

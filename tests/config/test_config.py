"""From the command line to the typed configuration, and every complaint on the way."""

import os
import re
import textwrap
from collections.abc import Callable
from importlib.machinery import PathFinder
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torchvision import models
from torchvision.models import list_models

import shardtrain
from shardtrain.config import config as config_module
from shardtrain.config.command import Program, compose, read_command
from shardtrain.config.config import Digits
from shardtrain.config.errors import UserError, program_configs
from shardtrain.config.help import group_choices
from shardtrain.config.schema import defaults_of, typed
from shardtrain.evaluate.__main__ import EvaluateKeys
from shardtrain.export.__main__ import ExportSettings
from shardtrain.job.build import build, require_equal_parts
from shardtrain.plan.__main__ import PlanKeys
from shardtrain.predict.__main__ import PredictKeys

from tiny import CPU, composed


@pytest.mark.long
@pytest.mark.smoke
def test_groups_are_chosen_by_name_and_numbers_become_floats() -> None:
    """In a frozen, typed configuration. Augmentation follows the data set, unless it is chosen."""
    config = composed("optim=adamw", "optim.lr=1", "model=vgg11")
    assert config.optim._target_ == "torch.optim.AdamW"
    assert (repr(config.optim.lr), config.optim.betas) == ("1.0", (0.9, 0.999))
    assert config.model["name"] == "vgg11"
    assert program_configs().torchvision_models() == list_models(module=models)
    config = composed("+recipe=resnet", "seed=3", "train.max_steps=7")
    assert (type(config.data), config.optim.name) == (Digits, "adamw")
    assert (config.seed, config.train.max_steps, config.train.label_smoothing) == (3, 7, 0.05)
    assert "rotate" in config.augment
    assert composed("+recipe=resnet", "data=cifar10").augment["pad"] == 4
    assert composed("+recipe=resnet", "augment=none").augment["_target_"] is None


@pytest.mark.long
def test_debugging_has_the_last_word_over_the_recipe() -> None:
    config = composed("+recipe=resnet", "debug=fdr")
    assert (config.train.max_steps, config.data.limit, config.checkpoint.keep) == (2, 48, 0)
    config = composed("+recipe=resnet", "debug=overfit", "train.batch_size=32")
    assert (config.data.limit, config.train.label_smoothing, config.augment) == (32, 0, {"_target_": None})


MISTAKES = (Path(__file__).parents[1] / "mistakes.txt").read_text().splitlines()


def require_told(line: str, start: Callable[[list[str]], object]) -> None:
    arguments, _, expected = line.partition(" | ")
    with pytest.raises(UserError) as caught:
        start(arguments.split(" "))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_mistakes_are_named(part: int) -> None:
    """What people type and what they are told before a first step: `ARGUMENTS | WORDS OF THE MESSAGE`."""
    for line in MISTAKES[part::4]:
        require_told(line, lambda words: build(composed(*words), 0, 1, CPU))


def test_a_choice_with_a_dot_is_taken_for_a_target() -> None:
    for group, path in (("model", "mynet.Net"), ("data", "nets.sets.load")):
        meant = f'did you mean {group}._target_={path} "allow=[{path.partition(".")[0]}]"?'
        require_told(f"{group}={path} | unknown {group} {path!r}; {meant}", compose)


def test_batches_that_ranks_do_not_divide() -> None:
    config = composed("train.batch_size=100", "train.accumulate=40")
    told = "train.batch_size=100 is not divisible by 3 ranks × train.accumulate=40; 120 would fit"
    with pytest.raises(UserError, match=told):
        require_equal_parts(config, 3)
    for mixing in ("train.mixup=1", "train.cutmix=1"):  # a pair in two parts would be other pairs
        config = composed("train.batch_size=6", mixing)
        require_equal_parts(config, 1)
        require_equal_parts(config, 3)
        with pytest.raises(UserError, match=r"2 images that .* mixes; 4 or 8 would fit"):
            require_equal_parts(config, 2)
    with pytest.raises(UserError, match=r"not divisible by parallel\.virtual_ranks=8; 96 or 104 would fit"):
        require_equal_parts(composed("train.batch_size=100", "parallel.virtual_ranks=8"), 2)


def test_help_fits_one_screen(own: Path, capsys: Any) -> None:
    (own / "recipe/long.yaml").write_text("# @package _global_\n# " + "A recipe of many words. " * 8)
    assert compose(["--help", "--config-dir", str(own)]) is None
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert len(lines) <= 34
    assert max(map(len, lines)) <= 120
    shown = "resume= seed= allow= config=RUN .evaluate .predict .export hydra/sweeper=optuna"
    assert [word for word in shown.split() if word not in said] == []
    usual = composed()
    assert f"train.epochs={usual.train.epochs} optim.lr={usual.optim.lr} " in said


def test_help_lists_the_choices_of_a_group(capsys: Any) -> None:
    assert compose(["--help", "data", "debug", "model"]) is None
    said = capsys.readouterr().out
    for words in ("data=NAME:\n  arrays  ", "  imagefolder  Photographs, a", "\n  fdr      A fast dry"):
        assert words in said
    assert said.count("=NAME:") == 3


@pytest.mark.parametrize("keys", [None, PlanKeys, EvaluateKeys, ExportSettings, PredictKeys], ids=str)
def test_help_explains_every_key(keys: type | None, capsys: Any, own: Path) -> None:
    """Of every choice of every group; one odd file of the user's changes nothing."""
    (own / "notes.yaml").write_text("- a\n\t- b")
    groups = ("data", "optim", "sched", "parallel") if keys is None else ()
    choices = [f"{group}={name}" for group in groups for name in group_choices(group)]
    for choice in ["", *choices]:
        section = [choice.partition("=")[0], choice] if choice else ["all"] * (keys is None)
        compose(["--help", *section, "--config-dir", str(own)], Program(keys))
        said = capsys.readouterr().out
        assert re.findall(r"^ *(\w+): (?!\n).*", said, re.M)
        lines = said.splitlines()
        for above, line in pairwise(lines):
            if re.match(r" *(?!name|_target_|#)\w+: .", line):
                assert above.lstrip().startswith("#"), (choice, line)
        assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("name", ["configs", "recipes"])
def test_a_checkout_that_is_not_installed_finds_its_neighbours(name: str) -> None:
    """By the path alone, without what an editable installation adds."""
    assert PathFinder.find_spec(f"shardtrain.{name}", shardtrain.__path__) is not None


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with one recipe, as a user would write it."""
    (tmp_path / "own/recipe").mkdir(parents=True)
    (tmp_path / "own/recipe/mine.yaml").write_text(
        "# @package _global_\n"
        "# Small and short.\n"
        "# What else there is to say.\n"
        "defaults: [{override /model: squeezenet1_1}, {override /data: fake}]\n"
        "train: {epochs: 2}\n"
    )
    return tmp_path / "own"


def test_a_recipe_folder_of_ones_own(own: Path) -> None:
    config = composed("+recipe=mine", "--config-dir", str(own), "train.max_steps=3")
    assert (config.model["name"], config.data.name, config.train.epochs) == ("squeezenet1_1", "fake", 2)
    assert config.train.max_steps == 3
    with pytest.raises(UserError, match=r"unknown recipe 'min'; did you mean mine\?"):
        compose(["--config-dir", str(own), "+recipe=min"])


def test_a_data_set_of_ones_own_needs_no_augmentation(own: Path) -> None:
    """As `docs/extending.md` says: a dataclass."""
    _, _, page = (Path(__file__).parents[2] / "docs/extending.md").read_text().partition("## A data set")
    (shown,) = re.findall(r"```python\n( +@dataclass.*?)```", page.partition("\n## ")[0], re.DOTALL)
    names = dict(vars(config_module))
    exec(compile(textwrap.dedent(shown), "extending.md", "exec", dont_inherit=True), names)
    section = {**defaults_of(names["Mine"]), "name": "mine"}
    with pytest.raises(UserError, match=r"data\.root is missing: add data\.root=VALUE"):
        typed(Digits | names["Mine"], section, "data")
    mine = typed(Digits | names["Mine"], {**section, "root": "here"}, "data")
    assert (mine.root, mine.image_size, mine.workers) == ("here", 32, 0)
    (own / "data").mkdir()
    (own / "data/mine.yaml").write_text("defaults: [digits]\n")
    assert compose(["data=mine", "--config-dir", str(own)]).values.augment == {"_target_": None}


def test_a_name_that_looks_like_a_number_is_quoted() -> None:
    for name in ("007", "20261129", "a1"):
        assert composed(f"run.name={name}").run.name == name
    for name, value in {"1e3": "1000.0", "true": "True", "5e10234": "inf"}.items():
        told = f"run.name={name} | run.name={value}: expected a text, quoted: 'run.name=\"{value}\"'"
        require_told(told, read_command)
        assert composed(f"run.name='{name}'").run.name == name


@pytest.mark.long
def test_a_file_of_ones_own_builds_on_one_of_the_programs(own: Path) -> None:
    (own / "optim").mkdir()
    (own / "optim/mine.yaml").write_text("defaults: [adamw, _self_]\nlr: 0.5\n")
    (own / "optim/ours.yaml").write_text("defaults: [mine, _self_]\n")
    (own / "optim/new.yaml").write_text("lr: 1\n")
    found = composed("optim=ours", "--config-dir", str(own)).optim
    assert (found.name, found.lr, found.layout) == ("adamw", 0.5, "even")
    told = "optim has no name; a file of your own has the one it changes in i"
    require_told(f"--config-dir {own} optim=new | {told}", lambda words: composed(*words))


UNREADABLE = {
    "train:\n\tepochs: 3": "found character '\\t' that cannot start any token in",
    "train: {epochs: 3}\ntrain: {epochs: 4}": "found duplicate key train",
    "data: &a {limit: *a}": "maximum recursion depth exceeded",
    "defaults: [mine]": ": a defaults list contains its own file",
    "caf\xe9: 1": "codec can't decode byte 0xe9",
}


def test_a_recipe_that_cannot_be_read_is_named(own: Path) -> None:
    for text, told in UNREADABLE.items():
        (own / "recipe/mine.yaml").write_bytes(f"# @package _global_\n{text}\n".encode("latin1"))
        require_told(f"--config-dir {own} +recipe=mine | {told}", compose)
        # A command that has not chosen it does not read it.
        others = composed("--config-dir", str(own), "+recipe=resnet")
        assert others == composed("+recipe=resnet")


def test_help_lists_files_that_it_cannot_read(own: Path, capsys: Any) -> None:
    (own / "recipe/mine.yaml").unlink()
    os.mkfifo(own / "recipe/mine.yaml")
    (own / "recipe/latin.yaml").write_bytes(b"# caf\xe9\nseed: 1\n")
    assert compose(["--help", "--config-dir", str(own)]) is None
    assert re.search(r" latin +caf", capsys.readouterr().out)


def test_a_file_of_ones_own_that_a_choice_leads_to_is_named(tmp_path: Path) -> None:
    for name, text in (("data", "defaults: [digits]"), ("augment", "pad: 'a")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mixed.yaml").write_text(f"{text}\n")
    require_told(f"--config-dir {tmp_path} data=mixed | augment/mixed.yaml", compose)


def test_a_model_file_may_have_its_function_alone(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/tiny.yaml").write_text("_target_: test_config.one_layer\n")
    words = ("--config-dir", str(tmp_path), "model=tiny", "allow=[test_config]")
    job, config = build(composed(*words), 0, 1, CPU)
    assert (config.model["num_classes"], sum(p.numel() for p in job.model.parameters())) == (10, 650)


def one_layer() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def test_a_text_of_the_environment_is_a_number_where_the_command_says_so(monkeypatch: Any) -> None:
    monkeypatch.setenv("TEXT", "1e3")
    config = read_command(["optim.lr='${oc.decode:${oc.env:TEXT}}'", "run.name=${oc.env:TEXT}"]).config
    assert (config.optim.lr, config.run.name) == (1000.0, "1e3")
    require_told(
        "optim.lr=${oc.env:TEXT} | optim.lr=1e3: expected a number, not a text; ${oc.decode", read_command
    )

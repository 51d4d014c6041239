"""From the command line to the typed configuration, and every complaint on the way."""

from __future__ import annotations

import io
import re
import sys
import textwrap
from contextlib import redirect_stdout
from dataclasses import FrozenInstanceError, dataclass, replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import shardtrain
from shardtrain.job import hydra_app
from shardtrain.job.build import require_equal_parts
from shardtrain.job.config import AdamWConfig, Digits, Images, SgdConfig, from_hydra
from shardtrain.job.hydra_app import compose
from shardtrain.job.schema import UserError, one_of, typed

from tiny import composed


def test_recipe_gives_a_frozen_typed_config() -> None:
    config = composed("+recipe=resnet", "seed=3", "train.max_steps=7")
    assert isinstance(config.data, Digits)
    assert isinstance(config.optim, SgdConfig)
    assert (config.seed, config.train.max_steps, config.train.label_smoothing) == (3, 7, 0.05)
    with pytest.raises(FrozenInstanceError):
        config.seed = 4  # type: ignore[misc]


def test_groups_are_chosen_by_name_and_numbers_become_floats() -> None:
    config = composed("optim=adamw", "optim.lr=1", "model=vgg11")
    assert isinstance(config.optim, AdamWConfig)
    assert (repr(config.optim.lr), config.optim.betas) == ("1.0", (0.9, 0.999))
    assert config.model["name"] == "vgg11"


def test_augmentation_follows_the_data_set_unless_chosen() -> None:
    assert composed("+recipe=resnet", "data=cifar10").augment["pad"] == 4
    assert composed("+recipe=resnet", "augment=none").augment["_target_"] is None
    assert "rotate" in composed("+recipe=resnet").augment


def test_debugging_has_the_last_word_over_the_recipe() -> None:
    config = composed("+recipe=resnet", "debug=fdr")
    assert (config.train.max_steps, config.data.limit, config.checkpoint.keep) == (2, 48, 0)
    config = composed("+recipe=resnet", "debug=overfit", "train.batch_size=32")
    assert (config.data.limit, config.train.label_smoothing, config.augment) == (32, 0, {"_target_": None})
    assert composed("+recipe=vit_cifar10", "debug=overfit").augment["_target_"] is None
    assert composed("recipe=resnet", "debug=overfit", "train.label_smoothing=0.2").train == replace(
        config.train, label_smoothing=0.2, batch_size=48
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "+recipe=resnt",
            r"unknown recipe 'resnt'; did you mean resnet\? \(valid: resnet, resnet18_cifar10, ",
        ),
        ("+recipes=resnet", r"unknown key recipes; did you mean recipe\?"),
        ("model=resnet81", r"unknown model 'resnet81'; did you mean resnet18\?.*…"),
        ("train.epoch=3", r"unknown key train.epoch; did you mean train.epochs\? \(valid: train.epochs, "),
        ("sed=1", r"unknown key sed; did you mean seed\?"),
        ("optim=adamw optim.momentum=0.9", r"unknown key optim.momentum.*optim.betas"),
        ("data.root=/x", r"unknown key data.root.*data.image_size"),
        ("++optim.name=lamb", r"optim.name=lamb \(valid: sgd, adamw, muon\)"),
        ("~optim", r"optim is missing|unknown key optim"),
        ("~train.epochs", r"train.epochs is missing"),
        ("foo", r"cannot read 'foo': expected key=value"),
        ("train.epochs=[", r"cannot read 'train.epochs=\[': expected key=value"),
        ("optim.lr=0.1,0.2", r"Ambiguous value for argument 'optim.lr=0.1,0.2'"),
        ("--epochs 3", r"unrecognized arguments: --epochs"),
        ("train.epochs=-1", r"train.epochs=-1: expected at least 1"),
        ("train.epochs=many", r"train.epochs=many: expected a whole number"),
        ("data.grow={from:3}", r"Error merging override data.grow={from:3}: Cannot merge DictConfig"),
        ("data=imagefolder data.crop_area=2", r"data.crop_area=2.0: expected at most 1"),
        ("data.grow=3", r"data.grow=3: expected a list, as in data.grow=\[a,b\]"),
        ("train.label_smoothing=1", r"train.label_smoothing=1.0: expected less than 1"),
        ("optim.lr=0", r"optim.lr=0.0: expected more than 0"),
        ("optim.lr=nan", r"optim.lr=nan: expected a finite number"),
        ("optim.nesterov=1", r"optim.nesterov=1: expected true or false"),
        ("optim=adamw optim.betas=3", r"optim.betas=3: expected a list of 2 numbers"),
        ("device=gpu", r"device=gpu.*\(valid: auto, cpu, cuda\)"),
        ("parallel.transport=mpi", r"parallel.transport=mpi \(valid: auto, process_group, shared_memory\)"),
        (
            "parallel.traffic=int4",
            r"parallel.traffic=int4.*\(valid: int8, int8_gathers, int8_reductions\)",
        ),
        *(
            (
                f"parallel.traffic=int8 {other}",
                r"parallel.traffic=int8 is for messages in one shard group: choose parallel.replicate=1 and "
                r"parallel.transport=process_group, or parallel.traffic=null",
            )
            for other in ("parallel.replicate=2", "parallel.transport=shared_memory")
        ),
        ("resume=null", r"resume=null: expected a text"),
        ("train=3", r"train=3: expected a group of keys"),
        ("optim=3", r"Config group override must be a string or a list"),
        ("train.epochs=${nope}", r"train.epochs: Interpolation key 'nope' not found"),
    ],
)
def test_mistakes_are_named(arguments: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        composed(*arguments.split())
    assert "\n" not in str(caught.value)


def test_batches_that_ranks_do_not_divide() -> None:
    for accumulate, fitting in ((1, "99 or 102"), (40, "120")):
        train = replace(composed().train, batch_size=100, accumulate=accumulate)
        what = f"100 is not divisible by 3 ranks × train.accumulate={accumulate}; {fitting} would fit"
        with pytest.raises(UserError, match=f"train.batch_size={what}"):
            require_equal_parts(train, 3)
    for world_size in (1, 2, 3, 4):
        require_equal_parts(composed("+recipe=resnet").train, world_size)


@pytest.mark.parametrize("flags", [["--cfg", "job"], ["--info", "config"]])
def test_what_hydra_prints_appears_only_where_asked(flags: list[str]) -> None:
    for speak in (True, False):
        output = io.StringIO()
        with redirect_stdout(output):
            assert compose(flags, speak=speak) is None
        assert bool(output.getvalue()) == speak


def test_composing_leaves_the_process_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    argv = list(sys.argv)
    for setting in (None, "0"):
        if setting is not None:
            monkeypatch.setenv("HYDRA_FULL_ERROR", setting)
        composed("+recipe=resnet")
        assert hydra_app.os.environ.get("HYDRA_FULL_ERROR") == setting
    assert sys.argv == argv
    assert list(tmp_path.iterdir()) == []


def test_a_checkout_that_is_not_installed_finds_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shardtrain, "__path__", list(shardtrain.__path__))
    monkeypatch.setattr(hydra_app.importlib.util, "find_spec", lambda name: None)
    assert composed("+recipe=resnet").seed == 0
    assert str(Path(hydra_app.__file__).parents[1]) in shardtrain.__path__


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


def printed(*arguments: str) -> str:
    said = io.StringIO()
    with redirect_stdout(said):
        assert compose(arguments) is None
    return said.getvalue()


def test_a_recipe_folder_of_ones_own(own: Path) -> None:
    raw = compose(["+recipe=mine", "--config-dir", str(own), "train.max_steps=3"])
    assert raw is not None
    config = from_hydra(raw)
    assert (config.model["name"], config.data.name, config.train.epochs) == ("squeezenet1_1", "fake", 2)
    assert config.train.max_steps == 3
    with pytest.raises(UserError, match=r"unknown recipe 'min'; did you mean mine\?"):
        compose(["--config-dir", str(own), "+recipe=min"])
    with pytest.raises(UserError, match=r"Additional config directory '.*/none' not found"):
        compose(["--config-dir", str(own.parent / "none"), "seed=1"])


def test_a_data_set_of_ones_own_needs_no_augmentation(own: Path) -> None:
    """As `docs/extending.md` says: a dataclass, and a file with its keys."""

    @dataclass(frozen=True, kw_only=True)
    class Mine(Images):
        name: str = one_of("mine")
        root: str

    _, _, page = (Path(__file__).parents[1] / "docs/extending.md").read_text().partition("## A data set")
    (keys,) = re.findall(r"```yaml\n(.*?)```", page.partition("\n## ")[0], re.DOTALL)
    (own / "data").mkdir()
    (own / "data/mine.yaml").write_text(textwrap.dedent(keys))
    raw = compose(["data=mine", "data.root=here", "--config-dir", str(own)])
    assert raw is not None
    assert raw.augment == {"_target_": None}
    section = OmegaConf.to_container(raw.data)
    assert isinstance(typed(Digits | Mine, section, "data"), Mine)
    (own / "augment").mkdir()
    (own / "augment/mine.yaml").write_text("defaults: [photo]\n")
    raw = compose(["data=mine", "data.root=here", "--config-dir", str(own)])
    assert raw is not None
    assert raw.augment.pad == 0


def test_help_lists_the_recipes(own: Path) -> None:
    said = printed("--help", "--config-dir", str(own))
    assert re.search(r"^  mine +Small and short\.$", said, re.MULTILINE)
    assert re.search(r"^  resnet18_cifar10 +\d\d\.\d\d %  ", said, re.MULTILINE)

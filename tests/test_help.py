"""Recipes of one's own, and the table of recipes."""

from __future__ import annotations

import io
import re
import textwrap
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from shardtrain.job.config import Digits, Images, from_hydra
from shardtrain.job.hydra_app import compose
from shardtrain.job.schema import UserError, one_of, typed


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

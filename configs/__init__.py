"""Hydra's config groups: the YAML files here, the program's dataclasses, and torchvision's list of models."""

import functools
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

FOLDER = Path(__file__).resolve().parent
PRIMARY = "program"  # the name of the configuration with which Hydra begins
# Sections of which one of several is chosen. Those without files are dataclasses of the program.
GROUPS = ("model", "data", "optim", "sched", "augment", "parallel", "checkpoint", "monitor")


@contextmanager
def registered(primary: DictConfig) -> Iterator[str]:
    """Give the name of ``primary``; inside, Hydra knows it, and torchvision's classifiers as `model=NAME`.

    Hydra closes what it has composed against new keys. Sections stay open, since the program's dataclasses
    have the better messages. Hydra's store is one for the whole process.
    """
    store = ConfigStore.instance()
    store.repo.update(_stored())
    store.store(name=PRIMARY, node=primary)
    node = store.repo[f"{PRIMARY}.yaml"].node
    for name in GROUPS if "seed" in primary else ():
        node.setdefault(name, {})
    for name in map(str, node):
        section = None if name in ("hydra", "defaults") else node._get_node(name)
        if isinstance(section, DictConfig):
            OmegaConf.set_struct(section, False)
    try:
        yield PRIMARY
    finally:
        for name in _stored():
            store.repo.pop(name)
        store.repo.pop(f"{PRIMARY}.yaml")


def groups_in(folders: Sequence[Path]) -> set[str]:
    """Return the names of all groups, and register what `config.yaml` asks of the files in ``folders``."""
    files = [file for folder in folders for file in folder.glob("*/*.yaml")]
    choices = {(file.parent.name, file.stem) for file in files}
    help_texts = importlib.import_module("shardtrain.config.help")
    for name, resolver in {
        "own_or_none": lambda group, name: name if (group, name) in choices else "none",
        "bf16_or_fp32": lambda: importlib.import_module("shardtrain.device").fastest_precision(),
        "recipes": lambda: help_texts.choice_table(folders, "recipe"),
    }.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    return {*GROUPS, *(group for group, _ in choices)} - {"common"}


@functools.cache  # storing them takes a third of the time in which Hydra composes
def _stored() -> dict[str, Any]:
    """Return what Hydra's store holds of groups without files. Hydra copies what it reads there."""
    schema = importlib.import_module("shardtrain.config.schema")
    help_texts = importlib.import_module("shardtrain.config.help")
    store = ConfigStore.instance()
    for group in GROUPS:
        for choice, kind in help_texts.group_choices(group).items():
            values = schema.defaults_of(kind)
            node = {**values, "name": choice} if "name" in values else values
            store.store(group=group, name=choice, node=node)
    _store_models()
    return {name: store.repo.pop(name) for name in GROUPS if name in store.repo}


def _store_models() -> None:
    """Store torchvision's classifiers, and the models of recipes that have a name."""
    shared, own = (OmegaConf.load(FOLDER / "common" / f"{name}.yaml") for name in ("models", "classifier"))
    for name in torchvision_models():
        _store(name, "models.classifier", shared, name=name, **own)
    _store("own", "models.classifier", {**shared, "_target_": "???"})
    _store("vit_cifar", "models.vit", shared, patch=4, layers=7, heads=12, width=384, mlp_width=384)
    _store("resnet20", "models.resnet_cifar", shared, depth=20)
    _store("resnet9", "resnet9_cifar10.Resnet9", shared, widths=[64, 256, 256], views=False)


def stored(group: str) -> list[str]:
    """Return the choices of ``group`` that no file has."""
    return [name.removesuffix(".yaml") for name in _stored()["model"]] if group == "model" else []


def torchvision_models() -> list[str]:
    """Return torchvision's registered classifiers, read from its files: importing them takes seconds."""
    (folder,) = find_spec("torchvision").submodule_search_locations  # type: ignore[union-attr, misc]
    registered = re.compile(r"^@register_model\(\)\n(?:@.*\n)*def (\w+)\(", re.MULTILINE)
    return sorted(
        name for file in Path(folder, "models").glob("*.py") for name in registered.findall(file.read_text())
    )


def _store(model: str, function: str, shared: Mapping[Any, Any], **keys: Any) -> None:
    node = {"_target_": f"shardtrain.recipes.{function}", **keys, **shared}
    ConfigStore.instance().store(group="model", name=model, node=node)

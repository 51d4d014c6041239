"""Hydra's config groups: the YAML files here, and `model`, which is torchvision's own list."""

import functools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf


@contextmanager
def registered() -> Iterator[Path]:
    """Give this folder; inside, `model=NAME` is valid for torchvision's classifiers and small transformers.

    Hydra's store is one for the whole process; other programs have keys of that name.
    """
    ConfigStore.instance().repo["model"] = _models()
    try:
        yield Path(__file__).resolve().parent
    finally:
        ConfigStore.instance().repo.pop("model")


@functools.cache  # storing them takes a third of the time in which Hydra composes
def _models() -> Any:
    """Return what Hydra's store holds as the group `model`. Hydra copies what it reads there."""
    shared, own = (
        OmegaConf.load(Path(__file__).with_name("common") / f"{name}.yaml")
        for name in ("models", "classifier")
    )
    for name in torchvision_models():
        _store(name, "models.classifier", shared, name=name, **own)
    _store("own", "models.classifier", {**shared, "_target_": "???"})
    _store("vit_cifar", "models.vit", shared, patch=4, layers=7, heads=12, width=384, mlp_width=384)
    _store("resnet20", "models.resnet_cifar", shared, depth=20)
    _store("resnet9", "resnet9_cifar10.Resnet9", shared, widths=[64, 256, 256])
    return ConfigStore.instance().repo.pop("model")


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

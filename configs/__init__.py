"""Hydra's config groups: the YAML files here, and `model`, which is torchvision's own list."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from torchvision import models


@contextmanager
def registered() -> Iterator[None]:
    """Inside, `model=NAME` is valid for every classification model of torchvision and small transformers.

    Hydra's store is one for the whole process; other programs have keys of that name.
    """
    shared = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_name("models.yaml")))
    assert isinstance(shared, dict)
    for name in models.list_models(module=models):
        _store(name, "classifier", shared, name=name, stem="auto", zero_init_residual=False)
    _store("own", "classifier", {**shared, "_target_": "???"})
    _store("vit_cifar", "vit", shared, patch=4, layers=7, heads=12, width=384, mlp_width=384)
    try:
        yield
    finally:
        ConfigStore.instance().repo.pop("model")


def _store(model: str, function: str, shared: Mapping[Any, Any], **keys: Any) -> None:
    node = {"_target_": f"shardtrain.recipes.models.{function}", **keys, **shared}
    ConfigStore.instance().store(group="model", name=model, node=node)

"""Hydra's config groups: the YAML files beside this one, and `model`, which is torchvision's own list."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra.core.config_store import ConfigStore
from torchvision import models


@contextmanager
def registered() -> Iterator[None]:
    """Inside, `model=NAME` is valid for every classification model of torchvision and small transformers.

    Hydra's store is one for the whole process; other programs have keys of that name.
    """
    for name in models.list_models(module=models):
        choices = {
            "stem": "auto",  # of ResNets: standard, small (3x3, stride 1, no pooling), auto (by image size)
            "zero_init_residual": False,  # of ResNets: blocks start as the identity
        }
        _store(name, "classifier", {"name": name}, choices)
    size = {"patch": 4, "layers": 7, "heads": 12, "width": 384, "mlp_width": 384}
    _store("vit_cifar", "vit", {}, size)
    try:
        yield
    finally:
        ConfigStore.instance().repo.pop("model")


def _store(name: str, function: str, first: dict[str, Any], last: dict[str, Any]) -> None:
    node = {
        "_target_": f"shardtrain.recipes.models.{function}",
        **first,
        "num_classes": None,  # None: as many as the data set has
        "in_channels": None,  # None: as the data set's images
        "image_size": None,  # None: as the data set's images
        "weights": None,  # FILE.safetensors or FILE.pth to start from, as shardtrain.export writes them
        **last,
    }
    ConfigStore.instance().store(group="model", name=name, node=node)

"""Hydra's config groups: the YAML files beside this one, and the `model` group, which is torchvision's own list."""

from hydra.core.config_store import ConfigStore
from torchvision import models


def register() -> None:
    """Makes `model=NAME` valid for every classification model of torchvision."""
    for name in models.list_models(module=models):
        node = {
            "_target_": "shardtrain.recipes.models.classifier",
            "name": name,
            "num_classes": None,  # None: as many as the data set has
            "in_channels": None,  # None: as the data set's images
            "image_size": None,  # None: as the data set's images
            "stem": "auto",  # ResNets: standard (7x7, stride 4 in all), small (3x3, stride 1), auto (by image size)
        }
        ConfigStore.instance().store(group="model", name=name, node=node)

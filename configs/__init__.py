"""Hydra's config groups: the YAML files beside this one, and `model`, which is torchvision's own list."""

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
            "weights": None,  # FILE.safetensors or FILE.pth to start from, as shardtrain.export writes them
            "stem": "auto",  # of ResNets: standard, small (3x3, stride 1, no pooling), auto (by image size)
        }
        ConfigStore.instance().store(group="model", name=name, node=node)

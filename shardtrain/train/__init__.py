"""Train a model: ``python -m shardtrain.train +recipe=resnet``, alone or under torchrun.

`Trainer` does so from Python, with a model and data of one's own. `Hook` is the base of hooks of one's own.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardtrain.train.steps import Hook as Hook
    from shardtrain.train.trainer import Trainer as Trainer

FILES = {"Hook": "steps", "Trainer": "trainer"}


def __getattr__(name: str) -> Any:
    if name in FILES:  # imported here, since they import torch
        return getattr(import_module(f"shardtrain.train.{FILES[name]}"), name)
    raise AttributeError(f"module 'shardtrain.train' has no attribute {name!r}")

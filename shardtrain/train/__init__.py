"""Train a model: ``python -m shardtrain.train +recipe=resnet``, alone or under torchrun.

`Hook` is what a subclass of `train.hooks` overrides.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "Hook":  # here, since it imports torch
        from shardtrain.train.trainer import Hook

        return Hook
    raise AttributeError(f"module 'shardtrain.train' has no attribute {name!r}")

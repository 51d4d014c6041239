"""Deferred initialization: a model is built on rank 0 alone, and `shard` distributes its values.

::

    deferred(build)   rank 0 builds in host memory; other ranks build on the meta device, without values
    shard(model)      for each unit: rank 0 broadcasts its values, and each rank keeps its interval of them

No device holds more than its shards and one full unit. Rank 0's host memory holds one whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardtrain import comm, torch_private

_MARK = "_shardtrain_deferred"

Model = TypeVar("Model", bound=nn.Module)


def deferred(build: Callable[..., Model], *args: Any, **kwargs: Any) -> Model:
    """Return ``build(*args, **kwargs)`` for `shard`: with values on rank 0, on the meta device elsewhere.

    After `shard` every parameter and buffer has rank 0's value. Until then parameters can be converted
    (``.to(dtype)``, channels_last), in the same way on all ranks. Changes of values count on rank 0 only.
    Call it when the process group exists: without one every rank builds with values.

    Other ranks draw no random numbers: seed again where generators of all ranks must agree. If a constructor
    needs values (``.item()``), or keeps tensors that are neither parameters nor buffers, every rank builds
    with values, and holds a whole copy until `shard`.
    """
    model = None if comm.rank() == 0 else _on_meta(build, *args, **kwargs)
    if model is None:
        with torch.device("cpu"):
            model = build(*args, **kwargs)
    model.__dict__[_MARK] = True
    return model


def _on_meta(build: Callable[..., Model], *args: Any, **kwargs: Any) -> Model | None:
    """Return the model on the meta device; None if it cannot be built there."""
    try:
        with torch.device("meta"):
            model = build(*args, **kwargs)
    except Exception:  # the build with values raises again whatever has another cause
        return None
    state = {*model.parameters(), *model.buffers()}
    attributes = torch_private.tree_leaves([vars(module) for module in model.modules()])
    plain = (leaf for leaf in attributes if isinstance(leaf, Tensor) and leaf.is_meta and leaf not in state)
    return model if next(plain, None) is None else None


class InitialValues:
    """The device on which each tensor of a model is placed. Deferred tensors get rank 0's values.

    ``target``: the device for all; None keeps tensors where they are, and places deferred ones on the CPU.
    """

    def __init__(self, module: nn.Module, target: torch.device | None) -> None:
        self.deferred = set[Tensor]()
        for part in module.modules():
            if _MARK in part.__dict__:
                self.deferred.update(part.parameters(), part.buffers())
        self._target = target

    def device(self, tensor: Tensor) -> torch.device:
        """Return the device for ``tensor``: the meta device if no rank has values for it."""
        if tensor.is_meta and tensor not in self.deferred:
            return tensor.device
        return self._target or (torch.device("cpu") if tensor.is_meta else tensor.device)

    def placed(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` on its `device`, with undefined values if this rank has none."""
        device = self.device(tensor)
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)

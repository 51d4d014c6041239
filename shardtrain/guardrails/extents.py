"""What `shard` refuses for its memory: ties by `.data`, unknown to PyTorch."""

from __future__ import annotations

import torch
from torch import nn


def require_apart(module: nn.Module, left_alone: set[nn.Parameter]) -> None:
    """Raise ValueError if a parameter that is to be sharded lies where another one does, or a buffer.

    Each gets memory of its own, so what was tied by `.data` would no longer be.
    """
    cut = set(module.parameters()).difference(left_alone)
    first: dict[tuple[torch.device, int], tuple[str, torch.Tensor]] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        data = tensor.data
        if type(data) is torch.Tensor and data.layout is torch.strided and data.numel() and not data.is_meta:
            other_name, other = first.setdefault((data.device, data.data_ptr()), (name, tensor))
            if other is not tensor and not cut.isdisjoint((tensor, other)):
                raise ValueError(
                    f"{other_name} and {name} share memory, and sharding would give each its own: tie them "
                    "as one object (b.weight = a.weight, not b.weight.data = a.weight.data), or clone one"
                )

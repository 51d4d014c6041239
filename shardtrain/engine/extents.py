"""Refuse memory that cannot be sharded: a tie by `.data`, of which PyTorch knows nothing; sparse buffers.

Its own file, since only `shard` asks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn


class Extent(NamedTuple):
    """Say between which addresses a tensor lies, and what it is."""

    device: str
    start: int
    stop: int
    words: str
    is_cut: bool


def require_apart(module: nn.Module, left_alone: set[nn.Parameter]) -> None:
    """Raise ValueError if a parameter that is to be sharded lies in another one's memory, or in a buffer's.

    Each gets memory of its own, so what was tied by `.data` would no longer be.
    """
    named = [("buffer", *item) for item in module.named_buffers()]
    named += [("parameter", *item) for item in module.named_parameters()]
    extents = []
    for kind, name, tensor in named:
        data = tensor.data
        if type(data) is torch.Tensor and data.layout is torch.strided and data.numel() and not data.is_meta:
            last = sum((size - 1) * step for size, step in zip(data.shape, data.stride(), strict=True))
            start = data.data_ptr()
            stop = start + (last + 1) * data.itemsize
            is_cut = kind == "parameter" and tensor not in left_alone
            extents.append(Extent(str(data.device), start, stop, f"{kind} {name}", is_cut))
    furthest: dict[tuple[str, bool], Extent] = {}  # so far: by device, of all or of those that are cut
    for extent in sorted(extents):
        before = furthest.get((extent.device, not extent.is_cut))
        if before is not None and extent.start < before.stop:
            raise ValueError(
                f"{before.words} and {extent.words} share memory, and sharding would give each its own: tie "
                "them as one object (b.weight = a.weight, not b.weight.data = a.weight.data), or clone one"
            )
        for only_cut in (False, True) if extent.is_cut else (False,):
            other = furthest.setdefault((extent.device, only_cut), extent)
            if other.stop < extent.stop:
                furthest[extent.device, only_cut] = extent


def require_dense_buffers(module: nn.Module, ranks: int) -> None:
    """Raise ValueError if a buffer cannot get the values of another of the ``ranks``, real or virtual."""
    if ranks <= 1:
        return
    for name, buffer in module.named_buffers():
        if buffer.layout is not torch.strided:
            raise ValueError(
                f"buffer {name} is sparse, and ranks exchange dense buffers only: make it a plain attribute "
                "of its module, which stays each rank's own"
            )
        if any(step == 0 and size > 1 for step, size in zip(buffer.stride(), buffer.shape, strict=True)):
            raise ValueError(
                f"buffer {name} is expanded: several of its elements are one in memory, which cannot get "
                f"another rank's values. Register {name}.contiguous(), or what was expanded, and expand that "
                "in forward"
            )

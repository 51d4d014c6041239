"""Strides: how a parameter of some shape lies in flat memory, and back.

A piece of a parameter is 1-D, in the order of the parameter's memory, which channels_last makes another than
that of its shape. So there are two forms of everything, and two functions between them::

    flattened   1-D, in the order of the memory: what moves between ranks and into files
    shown       in the shape that a parameter has at rest: what an optimizer and its state have
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether ``stride`` visits each element of ``shape`` once, without gaps, as channels_last does."""
    if 0 in shape:
        return len(stride) == len(shape)
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1 and step != expected:
            return False
        expected *= size
    return True


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """``tensor``'s strides if they are dense, else row-major."""
    dense = is_dense(tensor.shape, tensor.stride())
    return tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()


def in_memory_order(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """``tensor`` as 1-D, in the order of ``stride``; a view when it already lies that way."""
    if tensor.stride() != stride:
        ordered = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
        tensor = ordered.copy_(tensor)
    return tensor if stride == (1,) else tensor.as_strided((tensor.numel(),), (1,))


def shown(piece: torch.Tensor, shape: Sequence[int], stride: tuple[int, ...]) -> torch.Tensor:
    """``piece`` (1-D, in the order of ``stride``) in ``shape``; in ``(0, *shape[1:])`` if empty; a view."""
    if len(shape) == 1:
        return piece
    if piece.numel() == math.prod(shape):
        return piece.as_strided(shape, stride)
    return piece.view(0, *shape[1:])


def flattened(tensor: torch.Tensor, shape: Sequence[int], stride: tuple[int, ...]) -> torch.Tensor:
    """The reverse, of a whole ``shape`` or a piece of it: 1-D; a view if ``tensor`` lies that way."""
    return in_memory_order(tensor, stride) if tensor.shape == torch.Size(shape) else tensor.reshape(-1)

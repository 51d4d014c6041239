"""Which elements of a tensor a rank holds, and the two forms that they have.

A parameter has an order of memory of its own (channels_last differs from contiguous), so there are two::

    flattened   1-D, in the order of the parameter's memory: what is sent and what files hold
    at rest     in the shape that the parameter has between steps: what an optimizer and its state have

At rest a piece of n elements has as many dimensions as its parameter, (n, 1, 1, 1) for a filter. So groups
chosen by ``p.ndim`` are the same before and after `shard`. A scalar's piece may be empty, so it has one
dimension. The owner of a whole parameter shows it in its own shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, empty_like, empty_strided

Index = tuple[int, ...]  # one number per dimension


@dataclass(frozen=True)
class Part:
    """The elements ``start:stop`` of the tensor ``name``, in the order of ``stride``, which is dense."""

    name: str
    shape: Index
    stride: Index
    start: int
    stop: int
    whole: bool = False  # whether the tensor is never cut, so that its owner may show it in its own shape

    @cached_property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def elements(self) -> tuple[object, ...]:
        """Tell which elements of which shape these are; of a tensor that is never cut, of which tensor."""
        return (self.name,) if self.whole else (self.shape, self.stride, self.start, self.stop)

    @cached_property
    def local_shape(self) -> Index:
        """The shape at rest."""
        if self.whole and self.shape and self.numel == math.prod(self.shape):
            return self.shape
        return self.numel, *(1 for _ in self.shape[1:])

    @cached_property
    def local_stride(self) -> Index:
        """The strides of `local_shape`."""
        return self.stride if self.local_shape == self.shape else tuple(1 for _ in self.local_shape)

    def of(self, tensor: Tensor) -> Tensor:
        """Return this part of the whole ``tensor``: 1-D, a view if the tensor has the strides ``stride``."""
        return in_memory_order(tensor, self.stride)[self.start : self.stop]

    def at_rest(self, memory: Tensor, offset: int = 0) -> Tensor:
        """Return a view of this part in the shape at rest. It begins at ``offset`` in dense ``memory``."""
        return memory.as_strided(self.local_shape, self.local_stride, memory.storage_offset() + offset)

    def all_at_rest(self, whole: Tensor) -> Tensor:
        """Return ``whole``, all of which is this part, in the shape at rest: itself, or a view of it."""
        return whole if self.local_shape == self.shape else self.at_rest(whole)

    def flattened(self, piece: Tensor) -> Tensor:
        """Undo `at_rest`: return ``piece`` as 1-D, a view if it lies in memory order."""
        return in_memory_order(piece, self.stride) if piece.shape == self.shape else piece.reshape(-1)

    def padded(self, piece: Tensor, padding: float) -> Tensor:
        """Return a whole tensor that holds ``piece``, in its shape at rest, and ``padding`` elsewhere."""
        whole = empty_strided(self.shape, self.stride, dtype=piece.dtype, device=piece.device)
        whole.fill_(padding)
        self.of(whole).copy_(self.flattened(piece))
        return whole

    def boxes(self, piece: Tensor) -> dict[Index, Tensor]:
        """Cut ``piece``, in its shape at rest, into boxes: views by their offsets in the whole tensor.

        Boxes come in the order of memory. Each is the largest that fits after the one before.
        """
        if 0 in self.shape or (self.stop and piece.shape == self.shape):  # DCP must find empty tensors, too
            return {(0,) * len(self.shape): piece.view(self.shape)}
        long = [dim for dim, size in enumerate(self.shape) if size > 1]
        flat = piece.reshape(-1)
        boxes = {}
        position = self.start
        while position < self.stop:
            offsets = [0] * len(self.shape)
            sizes = list(self.shape)
            for dim in sorted(long, key=lambda dim: -self.stride[dim]):
                row, rest = divmod(position, self.stride[dim])
                offsets[dim] = row % self.shape[dim]
                fitting = (self.stop - position) // self.stride[dim]
                if rest == 0 and fitting:  # a row begins here: take all complete rows
                    sizes[dim] = min(fitting, self.shape[dim] - offsets[dim])
                    break
                sizes[dim] = 1
            lies_at = flat.storage_offset() + position - self.start
            boxes[tuple(offsets)] = flat.as_strided(sizes, self.stride, lies_at)
            position += math.prod(sizes)
        return boxes


def dense_stride(tensor: Tensor) -> Index:
    """Return ``tensor``'s strides, or dense ones in the same order if they have gaps."""
    return empty_like(tensor, device="meta").stride()


def strided(tensor: Tensor, stride: Index) -> Tensor:
    """Return ``tensor`` with the strides ``stride``: a copy unless it has them.

    Gradients from autograd have their parameter's strides. What users assign may have others.
    """
    if tensor.stride() == stride:
        return tensor
    ordered = empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return ordered.copy_(tensor)


def in_memory_order(tensor: Tensor, stride: Index) -> Tensor:
    """Return ``tensor`` as 1-D in the order of ``stride``: a view if it has these strides, else a copy."""
    tensor = strided(tensor, stride)
    return tensor if stride == (1,) else tensor.as_strided((tensor.numel(),), (1,))

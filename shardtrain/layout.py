"""Where parameters lie in a unit's flat vector, and which interval of it each rank owns.

Pure arithmetic on integers: parameters are laid end to end, and the vector is cut into one contiguous
interval per rank. Worked numbers for parameters of 3, 4 and 6 elements, two ranks, alignment 4::

    flat vector   a a a b b b b c c c c c c . . .      13 elements, padded to 16
    rank 0        a a a b b b b c                      interval [0, 8):  a[0:3] b[0:4] c[0:1]
    rank 1                        c c c c c . . .      interval [8, 16): c[1:6]

A rank's interval is rounded up to the alignment, so it holds less than one alignment unit more than
total / world. All padding sits at the end of the vector and belongs to no parameter, so an optimizer
never sees it. Cutting every parameter on its first dimension instead would pad every parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, repeat
from typing import NamedTuple


class Piece(NamedTuple):
    """The part of one parameter that one rank owns, in elements.

    ``start:stop`` counts from the parameter's first element, ``offset`` from the start of the rank's
    interval. An empty piece has ``start == stop``.
    """

    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """The flat vector of one unit: ``sizes`` elements per parameter, cut at ``bounds``.

    ``bounds`` holds ``world + 1`` cut points; rank ``r`` owns ``[bounds[r], bounds[r + 1])``.
    ``bounds[-1] >= numel``: what lies beyond ``numel`` is padding.
    """

    sizes: tuple[int, ...]
    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.sizes):
            raise ValueError(f"parameter sizes must not be negative, got {self.sizes}")
        increasing = list(self.bounds) == sorted(self.bounds)
        if len(self.bounds) < 2 or self.bounds[0] != 0 or not increasing or self.bounds[-1] < self.numel:
            raise ValueError(f"bounds {self.bounds} do not cut a vector of {self.numel} elements")

    @property
    def world(self) -> int:
        return len(self.bounds) - 1

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(self.sizes)

    @property
    def padded(self) -> int:
        """Length of the flat vector, padding included."""
        return self.bounds[-1]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each parameter starts in the flat vector."""
        return tuple(accumulate(self.sizes, initial=0))[:-1]

    def interval(self, rank: int) -> slice:
        """Rank ``rank``'s interval of the flat vector, padding included."""
        return slice(self.bounds[rank], self.bounds[rank + 1])

    def length(self, rank: int) -> int:
        """Elements in rank ``rank``'s interval, padding included."""
        return self.bounds[rank + 1] - self.bounds[rank]

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What rank ``rank`` owns of each parameter, in the order of ``sizes``."""
        low, high = self.bounds[rank], self.bounds[rank + 1]
        pieces = []
        for offset, size in zip(self.offsets, self.sizes, strict=True):
            start = min(max(low - offset, 0), size)
            stop = min(max(high - offset, start), size)
            pieces.append(Piece(start, stop, offset + start - low if stop > start else 0))
        return tuple(pieces)


def even(sizes: Sequence[int], world: int, align: int) -> Layout:
    """Cut the vector into ``world`` intervals of one length, a multiple of ``align`` elements."""
    if world < 1 or align < 1:
        raise ValueError(f"world and align must be at least 1, got {world} and {align}")
    per_rank = -(-sum(sizes) // world)
    length = -(-per_rank // align) * align
    return Layout(tuple(sizes), tuple(accumulate(repeat(length, world), initial=0)))

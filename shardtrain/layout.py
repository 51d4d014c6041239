"""Where parameters lie in a segment's flat vector, and which interval of it each rank owns.

Pure arithmetic on integers. Each rank owns one contiguous interval; a policy chooses the cut points. Worked
numbers for parameters a, b, c of 3, 5 and 2 elements, two ranks, alignment 4::

    even          a a a . b b b b b . . . c c . .      10 elements, padded to 16
    rank 0        a a a . b b b b                      interval [0, 8):  a[0:3] b[0:4]
    rank 1                        b . . . c c . .      interval [8, 16): b[4:5] c[0:2]

    whole         b b b b b . . . a a a . c c . .      the largest first, to the least loaded rank
    rank 0        b b b b b . . .                      interval [0, 8):  b[0:5]
    rank 1                        a a a . c c . .      interval [8, 16): a[0:3] c[0:2]

Every parameter begins at a multiple of the alignment, as it would in memory of its own: at other addresses
kernels compute other bits, and some are slower. That pads a parameter by less than the alignment, at any
world size. (Cuts on the first dimension, as FSDP2's, pad it by up to a row per rank.) ``even`` cuts at any
multiple of the alignment. A rank holds less than the alignment more than padded total / world. ``whole``
never cuts a parameter, so that an optimizer may look at all of it. Over all units a rank holds at most total
/ world plus the largest parameter, without padding. Padding belongs to no parameter: an optimizer never sees
it.

With V virtual ranks (`parallel.virtual_ranks`) a vector is cut as for V ranks, and each of N ranks owns V / N
consecutive intervals. So what is computed per interval does not depend on N.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, repeat
from typing import Literal, NamedTuple


class Span(NamedTuple):
    """The elements of one parameter that one rank owns.

    ``start:stop`` counts from the parameter's first element. ``offset`` is where the span begins in the
    rank's interval. An empty span has ``start == stop``.
    """

    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """The flat vector of one segment: parameter i has ``sizes[i]`` elements from ``offsets[i]`` on.

    ``bounds`` holds ``world + 1`` cut points: rank ``r`` owns ``[bounds[r], bounds[r + 1])``, which may be
    empty. ``whole``: no cut falls into a parameter, so its owner may show it in its own shape. ``cuts``: the
    ``virtual + 1`` cut points of virtual ranks' intervals; empty without virtual ranks.
    """

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    bounds: tuple[int, ...]
    whole: bool = False
    cuts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert min(self.sizes, default=0) >= 0, self.sizes
        assert self.bounds[0] == 0 <= self.end <= self.bounds[-1], (self.bounds, self.end)
        assert list(self.bounds) == sorted(self.bounds), self.bounds

    @cached_property
    def end(self) -> int:
        """End of the last parameter, in elements."""
        ends = (offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))
        return max(ends, default=0)

    @property
    def world(self) -> int:
        return len(self.bounds) - 1

    @property
    def virtual(self) -> int:
        """Number of virtual ranks; 0 without."""
        return max(0, len(self.cuts) - 1)

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(self.sizes)

    @property
    def padded(self) -> int:
        """Length of the flat vector, padding included."""
        return self.bounds[-1]

    @cached_property
    def equal(self) -> bool:
        """Whether all intervals have the same length."""
        return len({self.length(rank) for rank in range(self.world)}) == 1

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Positions at which a rank's span of a parameter begins; with virtual ranks, a virtual rank's."""
        places = {*self.offsets, *(self.cuts or self.bounds)}
        return tuple(sorted(place for place in places if place < self.end))

    def interval(self, rank: int) -> slice:
        """Return rank ``rank``'s interval of the flat vector, padding included."""
        return slice(self.bounds[rank], self.bounds[rank + 1])

    def length(self, rank: int) -> int:
        """Return the number of elements in rank ``rank``'s interval, padding included."""
        return self.bounds[rank + 1] - self.bounds[rank]

    def spans(self, rank: int) -> tuple[Span, ...]:
        """Return rank ``rank``'s span of each parameter, in the order of ``sizes``."""
        low = self.bounds[rank]
        high = self.bounds[rank + 1]
        spans = []
        for offset, size in zip(self.offsets, self.sizes, strict=True):
            start = min(max(low - offset, 0), size)
            stop = min(max(high - offset, start), size)
            spans.append(Span(start, stop, offset + start - low if stop > start else 0))
        return tuple(spans)

    def virtual_spans(self, span: Span, rank: int) -> list[tuple[int, slice]]:
        """Return the virtual ranks whose intervals rank ``rank``'s ``span`` meets, with its part in each.

        A part is a slice of the span, in elements.
        """
        position = self.bounds[rank] + span.offset
        parts = []
        for virtual, (low, high) in enumerate(pairwise(self.cuts)):
            start = max(low - position, 0)
            stop = min(high - position, span.numel)
            if start < stop:
                parts.append((virtual, slice(start, stop)))
        return parts


Policy = Literal["even", "whole"]

# `cut(sizes, align)` returns a segment's layout. Offsets and bounds are multiples of ``align`` elements.
Cut = Callable[[Sequence[int], int], Layout]


def cut_of(policy: Policy, world: int, virtual: int = 0) -> Cut:
    """Return the function that cuts a model's segments by ``policy``.

    ``whole`` counts what each rank has of earlier ones, so all ranks must cut the same ones in one order.
    ``virtual``: the number of virtual ranks, a multiple of ``world``; 0 without.

    Raises ValueError for an unknown policy.
    """
    if virtual:
        finer = cut_of(policy, virtual)

        def cut(sizes: Sequence[int], align: int) -> Layout:
            fine = finer(sizes, align)
            return replace(fine, bounds=fine.bounds[:: virtual // world], cuts=fine.bounds)

        return cut
    if policy == "even":
        return lambda sizes, align: even(sizes, world, align)
    if policy == "whole":
        return WholeCut(world)
    raise ValueError(f"layout must be 'even' or 'whole', got {policy!r}")


def even(sizes: Sequence[int], world: int, align: int) -> Layout:
    """Cut the vector into ``world`` intervals of the same length, a multiple of ``align`` elements."""
    assert min(world, align) >= 1, (world, align)
    *offsets, end = accumulate((_aligned(size, align) for size in sizes), initial=0)
    length = _aligned(-(-end // world), align)
    return Layout(tuple(sizes), tuple(offsets), tuple(accumulate(repeat(length, world), initial=0)))


def _aligned(size: int, align: int) -> int:
    return -(-size // align) * align


class WholeCut:
    """A cut in which each parameter lies on one rank: the largest first, to the least loaded rank.

    ``loads``: elements given to each rank so far, over all units. This is list scheduling (Graham, 1966,
    https://doi.org/10.1002/j.1538-7305.1966.tb01709.x).
    """

    def __init__(self, world: int) -> None:
        self.loads = [0] * world

    def __call__(self, sizes: Sequence[int], align: int) -> Layout:
        world = len(self.loads)
        owned: list[list[int]] = [[] for _ in range(world)]
        for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
            rank = self.loads.index(min(self.loads))
            self.loads[rank] += sizes[index]
            owned[rank].append(index)
        offsets = [0] * len(sizes)
        bounds = [0]
        for indices in owned:
            offset = bounds[-1]
            for index in sorted(indices):
                offsets[index] = offset
                offset += _aligned(sizes[index], align)
            bounds.append(offset)
        return Layout(tuple(sizes), tuple(offsets), tuple(bounds), whole=True)

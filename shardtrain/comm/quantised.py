"""Gathers and reductions as int8 in blocks: a quarter of fp32's bytes, with a bound on the error.

After ZeRO++ (Wang et al., 2023, https://arxiv.org/abs/2306.10209). An interval is cut into blocks of
``BLOCK`` elements, the last one shorter. A block travels as one fp32 scale, its largest magnitude over 127,
and a code of 8 bits for each element, x / scale rounded to the nearest. So an element is off by at most
half a scale, max|block| / 254, besides fp32's own rounding. What is quantised on its way into a gather is
each rank's interval; what is not quantised (norms, vectors) lies beside it in the same *parcel*, of which a
rank sends one per movement. Two ranks, a block of two elements::

    gather   rank 0 owns 12.7 3.14    scale 0.1, codes 127 31     every rank computes with 12.7 3.1
    reduce   rank 0 has  -1.0 0.30    rank 1 owns both, its own gradient is  0.5 0.1
             scale 1 / 127, codes -127 38: it arrives as -1.0 0.2992, within 1 / 254
             mean  -0.25 0.1996       off by at most the mean of the ranks' bounds, (1 / 254 + 0) / 2

A rank replaces its own interval, too, by what the others decode: replicas must compute with equal weights,
or their gradients would belong to different models. Shards stay exact, and so does all that is gathered for
users. A reduction is an exchange of parcels: each rank decodes what came and adds it up in rank order in
fp32, its own gradient exactly as it was.

Codes go from -127 to 127. ``ABSENT`` stands for -0.0, which means that a rank has no gradient here (see
``reduce.py``); what rounds to nothing arrives as +0.0. A block with an inf or a nan has no scale to speak
of, so all of it arrives as inf or nan, except for what is absent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.distributed import ReduceOp

from shardtrain.comm.arithmetic import merge
from shardtrain.comm.meter import count
from shardtrain.comm.movement import REDUCE
from shardtrain.comm.transport import (
    Carrier,
    Flat,
    Gradient,
    Pending,
    Tag,
    Transport,
    TransportWrapper,
    pack_own,
)
from shardtrain.layout import Layout

BLOCK = 256  # elements; a scale adds 1.6 % to their codes
ABSENT = -128
_LARGEST = 127
_ALIGN = 16  # bytes; where each part of a parcel starts, so that it may be seen as any dtype


class Part(NamedTuple):
    """How a rank's interval of one flat vector travels: ``quantised``, or in its ``dtype``."""

    layout: Layout
    dtype: torch.dtype
    quantised: bool

    def bytes(self, rank: int) -> int:
        elements = self.layout.length(rank)
        size = elements + 4 * blocks(elements) if self.quantised else elements * self.dtype.itemsize
        return -(-size // _ALIGN) * _ALIGN


class Parcels:
    """Where in one vector of bytes every rank's parcel lies, and every part in its parcel.

    Ranks whose intervals are of equal lengths, which is all of them as a rule, are treated together: their
    parcels are the rows of a matrix.
    """

    def __init__(self, parts: Sequence[Part], world: int) -> None:
        self.parts = tuple(parts)
        self.sizes = [sum(part.bytes(rank) for part in parts) for rank in range(world)]
        self.layout = Layout(
            (sum(self.sizes),), (0,), tuple(accumulate(self.sizes, initial=0))
        )  # of the bytes
        even = all(len({part.layout.length(rank) for rank in range(world)}) == 1 for part in parts)
        self._alike = [range(world)] if even else [range(rank, rank + 1) for rank in range(world)]

    def columns(self, parcels: torch.Tensor, index: int) -> Iterator[tuple[range, torch.Tensor]]:
        """Part ``index`` in all ranks' ``parcels`` (uint8, 1-D): ranks, and their bytes [rank, byte]."""
        for ranks in self._alike:
            rows = rows_of(parcels, self.layout, ranks)
            yield ranks, self.column(rows, index, ranks.start)

    def column(self, parcels: torch.Tensor, index: int, rank: int) -> torch.Tensor:
        """Part ``index`` in ``parcels`` [any, byte], all of rank ``rank``'s intervals."""
        start = sum(part.bytes(rank) for part in self.parts[:index])
        return parcels[:, start : start + self.parts[index].bytes(rank)]


def rows_of(full: torch.Tensor, layout: Layout, ranks: range) -> torch.Tensor:
    """The intervals of ``ranks``, which are of one length, as [rank, element]."""
    span = slice(layout.bounds[ranks.start], layout.bounds[ranks.stop])
    return full[span].view(len(ranks), layout.length(ranks.start))


def blocks(elements: int) -> int:
    return -(-elements // BLOCK)


def encode(rows: torch.Tensor, into: torch.Tensor, quantised: bool) -> None:
    """Write ``rows`` [row, element] into their bytes ``into`` [row, byte]."""
    elements = rows.shape[1]
    if not elements:
        return
    if not quantised:
        into[:, : elements * rows.element_size()].view(rows.dtype).copy_(rows)
        return
    for span, scales, codes in _blocks_of(into, elements):
        values = rows[:, span].unflatten(1, codes.shape[1:]).to(torch.float32)
        scales.copy_(values.abs().amax(-1).div_(_LARGEST))
        exact = values / scales.unsqueeze(-1)
        # 0 / 0, and all of a block that has no finite scale: any code but a rounded nan, which is none.
        # x / 0, where x is so small that its scale underflows: nothing, whose sign must not be -0.0's.
        exact.nan_to_num_(nan=1.0, posinf=0.0, neginf=0.0).round_().clamp_(-_LARGEST, _LARGEST)
        codes.copy_(exact.masked_fill_(values.eq(0).logical_and_(values.signbit()), ABSENT))


def decode(parcels: torch.Tensor, into: torch.Tensor, quantised: bool) -> None:
    """The reverse: fill ``into`` [row, element] from its bytes ``parcels`` [row, byte]."""
    elements = into.shape[1]
    if not elements:
        return
    if not quantised:
        into.copy_(parcels[:, : elements * into.element_size()].view(into.dtype))
        return
    for span, scales, codes in _blocks_of(parcels, elements):
        values = into[:, span].unflatten(1, codes.shape[1:])
        torch.mul(codes, scales.unsqueeze(-1), out=values)
        values.masked_fill_(codes == ABSENT, -0.0)


def _blocks_of(column: torch.Tensor, elements: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """The whole blocks of an interval, then the shorter one: their elements, scales and codes.

    scales: fp32 [row, block]; codes: int8 [row, block, element].
    """
    whole, scales = elements // BLOCK, column[:, : 4 * blocks(elements)].view(torch.float32)
    codes = column[:, 4 * blocks(elements) :].view(torch.int8)
    for first, last, length in ((0, whole, BLOCK), (whole, blocks(elements), elements % BLOCK)):
        if first < last:
            span = slice(first * BLOCK, first * BLOCK + (last - first) * length)
            yield span, scales[:, first:last], codes[:, span].unflatten(1, (last - first, length))


class Quantised(TransportWrapper):
    """``inner``, with int8 for what may be quantised (`Flat.quantised`); the rest as ever."""

    def __init__(self, inner: Transport) -> None:
        """
        Raises:
            ValueError: ``inner`` is no `Carrier`, or its ranks share memory.
        """
        if inner.all_ranks.world > inner.world:
            raise ValueError("int8 gathers and reductions are for one shard group; use a 1-D mesh with them")
        if not isinstance(inner, Carrier) or inner.in_place:
            raise ValueError(
                f"int8 gathers and reductions need transport='process_group', got {type(inner).__name__}: "
                "ranks that share memory send nothing that could be quantised"
            )
        super().__init__(inner)
        self._carrier = inner
        self._known: dict[tuple[Part, ...], Parcels] = {}

    def gather(self, tag: Tag, flats: Sequence[Flat]) -> Pending:
        if not any(flat.quantised for flat in flats):
            return self.inner.gather(tag, flats)
        packed = self._packed(flats)
        parcels = flats[0].local.new_empty(sum(packed.sizes), dtype=torch.uint8)
        own = parcels.new_empty(packed.sizes[self.rank])

        def start() -> Pending:
            for index, flat in enumerate(flats):
                column = packed.column(own.unsqueeze(0), index, self.rank)
                encode(flat.local.unsqueeze(0), column, flat.quantised)
            return self.inner.gather(tag, [Flat(parcels, own, packed.layout)])

        def finish() -> None:
            for index, flat in enumerate(flats):
                for ranks, column in packed.columns(parcels, index):
                    decode(column, rows_of(flat.full, flat.layout, ranks), flat.quantised)

        return self._carrier.staged(own.device, start, finish)

    def reduce(self, tag: Tag, gradients: Sequence[Gradient]) -> Pending:
        if not any(gradient.quantised for gradient in gradients):
            return self.inner.reduce(tag, gradients)
        packed = self._packed(gradients)
        count(REDUCE, [sum(packed.sizes) - packed.sizes[self.rank]])
        going = gradients[0].full.new_empty(sum(packed.sizes), dtype=torch.uint8)
        coming = going.new_empty(self.world * packed.sizes[self.rank])
        means = [pack_own(gradient, self.rank) for gradient in gradients]

        def start() -> Pending:
            for index, gradient in enumerate(gradients):
                for gap in gradient.layout.gaps:  # whatever is there must not make a scale
                    gradient.full[gap].zero_()
                for ranks, column in packed.columns(going, index):
                    encode(rows_of(gradient.full, gradient.layout, ranks), column, gradient.quantised)
            return self._carrier.exchange(tag, going, packed.sizes, coming)

        def finish() -> None:
            came = coming.view(self.world, packed.sizes[self.rank])
            for index, (gradient, mean) in enumerate(zip(gradients, means, strict=True)):
                column = packed.column(came, index, self.rank)
                self._average(column, gradient.full.dtype, mean, gradient.quantised)

        return self._carrier.staged(going.device, start, finish)

    def _average(
        self, parcels: torch.Tensor, dtype: torch.dtype, mean: torch.Tensor, quantised: bool
    ) -> None:
        """Make ``mean``, this rank's own gradient, the mean of it and of the others' in ``parcels``."""
        values = mean.new_empty((self.world, mean.numel()), dtype=torch.float32 if quantised else dtype)
        decode(parcels, values, quantised)
        parts = [mean if rank == self.rank else value for rank, value in enumerate(values)]
        merge(parts, mean, ReduceOp.AVG)

    def _packed(self, moving: Sequence[Flat] | Sequence[Gradient]) -> Parcels:
        parts = tuple(Part(item.layout, item.full.dtype, item.quantised) for item in moving)
        if parts not in self._known:
            self._known[parts] = Parcels(parts, self.world)
        return self._known[parts]

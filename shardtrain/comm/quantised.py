"""Gathers and reductions as int8 in blocks: a quarter of fp32's bytes, with a bound on the error.

After ZeRO++ (Wang et al., 2023, https://arxiv.org/abs/2306.10209). An interval is cut into blocks of
``BLOCK`` elements, the last one shorter. A block is sent as one fp32 scale, its largest magnitude over 127,
and an 8-bit code per element, x / scale rounded to the nearest. So an element is off by at most half a scale,
max|block| / 254, besides fp32's own rounding. Two ranks, a block of two elements::

    gather   rank 0 owns 12.7 3.14    scale 0.1, codes 127 31     every rank computes with 12.7 3.1
    reduce   rank 0 has  -1.0 0.30    rank 1 owns both, its own gradient is  0.5 0.1
             scale 1 / 127, codes -127 38: it arrives as -1.0 0.2992, within 1 / 254
             mean  -0.25 0.1996       off by at most the mean of the ranks' bounds, (1 / 254 + 0) / 2

What is not quantised (norms, vectors) is sent beside it, in the same packet: one per rank and collective.

In a gather the rank replaces its own interval, too, by what the others decode: replicas must compute with
equal weights. Shards stay exact, and so does all that is gathered for users. In a reduction each rank decodes
the packets that it received and adds them up in rank order in fp32, with its own gradient as it was.

Codes go from -127 to 127. ``ABSENT`` stands for -0.0, which means that a rank has no gradient here (see
``reduce.py``); what rounds to nothing arrives as +0.0. A block with an inf or a nan has no finite scale, so
all of it arrives as inf or nan, except for what is absent.
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
_ALIGN = 16  # bytes; where each part of a packet starts, so that it may be viewed as any dtype


class Part(NamedTuple):
    """How a rank's interval of one flat vector is sent: ``quantised``, or in its ``dtype``."""

    layout: Layout
    dtype: torch.dtype
    quantised: bool

    def bytes(self, rank: int) -> int:
        elements = self.layout.length(rank)
        size = elements + 4 * blocks(elements) if self.quantised else elements * self.dtype.itemsize
        return -(-size // _ALIGN) * _ALIGN


class Packets:
    """Where every rank's packet lies in one vector of bytes, and every part in its packet.

    Ranks whose intervals are of equal lengths, usually all of them, are treated together: their packets are
    the rows of a matrix.
    """

    def __init__(self, parts: Sequence[Part], world: int) -> None:
        self.parts = parts
        self.sizes = [sum(part.bytes(rank) for part in parts) for rank in range(world)]  # bytes
        self.layout = Layout((sum(self.sizes),), (0,), tuple(accumulate(self.sizes, initial=0)))
        equal = all(len({part.layout.length(rank) for rank in range(world)}) == 1 for part in parts)
        self._equal = [range(world)] if equal else [range(rank, rank + 1) for rank in range(world)]

    def columns(self, packets: torch.Tensor, index: int) -> Iterator[tuple[range, torch.Tensor]]:
        """Yield groups of ranks with their bytes [rank, byte] of part ``index`` of ``packets`` (uint8)."""
        for ranks in self._equal:
            rows = rows_of(packets, self.layout, ranks)
            yield ranks, self.column(rows, index, ranks.start)

    def column(self, packets: torch.Tensor, index: int, rank: int) -> torch.Tensor:
        """Return part ``index`` of ``packets`` [any, byte], all of rank ``rank``'s intervals."""
        start = sum(part.bytes(rank) for part in self.parts[:index])
        return packets[:, start : start + self.parts[index].bytes(rank)]


def rows_of(full: torch.Tensor, layout: Layout, ranks: range) -> torch.Tensor:
    """Return the intervals of ``ranks``, which are of one length, as [rank, element]."""
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


def decode(packets: torch.Tensor, into: torch.Tensor, quantised: bool) -> None:
    """Fill ``into`` [row, element] from its bytes ``packets`` [row, byte]: the reverse of `encode`."""
    elements = into.shape[1]
    if not elements:
        return
    if not quantised:
        into.copy_(packets[:, : elements * into.element_size()].view(into.dtype))
        return
    for span, scales, codes in _blocks_of(packets, elements):
        values = into[:, span].unflatten(1, codes.shape[1:])
        torch.mul(codes, scales.unsqueeze(-1), out=values)
        values.masked_fill_(codes == ABSENT, -0.0)


def _blocks_of(column: torch.Tensor, elements: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield the full blocks of an interval, then the shorter one: their elements, scales and codes.

    scales: fp32 [row, block]; codes: int8 [row, block, element].
    """
    full, scales = elements // BLOCK, column[:, : 4 * blocks(elements)].view(torch.float32)
    codes = column[:, 4 * blocks(elements) :].view(torch.int8)
    for first, last, length in ((0, full, BLOCK), (full, blocks(elements), elements % BLOCK)):
        if first < last:
            span = slice(first * BLOCK, first * BLOCK + (last - first) * length)
            yield span, scales[:, first:last], codes[:, span].unflatten(1, (last - first, length))


class Quantised(TransportWrapper):
    """``inner``, with int8 for what may be quantised (`Flat.quantised`)."""

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
        self._known: dict[tuple[Part, ...], Packets] = {}

    def gather(self, tag: Tag, flats: Sequence[Flat]) -> Pending:
        if not any(flat.quantised for flat in flats):
            return self.inner.gather(tag, flats)
        packets = self._packets(flats)
        data = flats[0].local.new_empty(sum(packets.sizes), dtype=torch.uint8)
        own = data.new_empty(packets.sizes[self.rank])

        def start() -> Pending:
            for index, flat in enumerate(flats):
                column = packets.column(own.unsqueeze(0), index, self.rank)
                encode(flat.local.unsqueeze(0), column, flat.quantised)
            return self.inner.gather(tag, [Flat(data, own, packets.layout)])

        def finish() -> None:
            for index, flat in enumerate(flats):
                for ranks, column in packets.columns(data, index):
                    decode(column, rows_of(flat.full, flat.layout, ranks), flat.quantised)

        return self._carrier.staged(own.device, start, finish)

    def reduce(self, tag: Tag, gradients: Sequence[Gradient]) -> Pending:
        if not any(gradient.quantised for gradient in gradients):
            return self.inner.reduce(tag, gradients)
        packets = self._packets(gradients)
        own_bytes = packets.sizes[self.rank]
        count(REDUCE, [sum(packets.sizes) - own_bytes])
        outgoing = gradients[0].full.new_empty(sum(packets.sizes), dtype=torch.uint8)
        incoming = outgoing.new_empty(self.world * own_bytes)
        means = [pack_own(gradient, self.rank) for gradient in gradients]

        def start() -> Pending:
            for index, gradient in enumerate(gradients):
                for gap in gradient.layout.gaps:  # whatever is there must not make a scale
                    gradient.full[gap].zero_()
                for ranks, column in packets.columns(outgoing, index):
                    encode(rows_of(gradient.full, gradient.layout, ranks), column, gradient.quantised)
            return self._carrier.exchange(tag, outgoing, packets.sizes, incoming)

        def finish() -> None:
            rows = incoming.view(self.world, own_bytes)
            for index, (gradient, mean) in enumerate(zip(gradients, means, strict=True)):
                column = packets.column(rows, index, self.rank)
                self._average(column, gradient.full.dtype, mean, gradient.quantised)

        return self._carrier.staged(outgoing.device, start, finish)

    def _average(
        self, packets: torch.Tensor, dtype: torch.dtype, mean: torch.Tensor, quantised: bool
    ) -> None:
        """Make ``mean``, this rank's own gradient, the mean of it and of the others' in ``packets``."""
        values = mean.new_empty((self.world, mean.numel()), dtype=torch.float32 if quantised else dtype)
        decode(packets, values, quantised)
        parts = [mean if rank == self.rank else value for rank, value in enumerate(values)]
        merge(parts, mean, ReduceOp.AVG)

    def _packets(self, items: Sequence[Flat] | Sequence[Gradient]) -> Packets:
        parts = tuple(Part(item.layout, item.full.dtype, item.quantised) for item in items)
        if parts not in self._known:
            self._known[parts] = Packets(parts, self.world)
        return self._known[parts]

"""Gather and reduce in int8 by blocks: a quarter of fp32's bytes, with a bounded error.

After ZeRO++ (Wang et al., 2023, https://arxiv.org/abs/2306.10209). A rank's interval is sent as a packet. For
each block of ``BLOCK`` elements it has one fp32 scale, the block's largest magnitude over 127, and an 8-bit
code per element, x / scale rounded to the nearest. So an element's error is at most half a scale,
max|block| / 254, besides fp32's own rounding. Two ranks, a block of two elements::

    gather   rank 0 owns 12.7 3.14    scale 0.1, codes 127 31     every rank computes with 12.7 3.1
    reduce   rank 0 has  -1.0 0.30    rank 1 owns both, its own gradient is  0.5 0.1
             scale 1 / 127, codes -127 38: it arrives as -1.0 0.2992, within 1 / 254
             mean  -0.25 0.1996       error at most the mean of the ranks' bounds, (1 / 254 + 0) / 2

Norms and vectors are not quantised. In a gather a rank replaces its own interval, too, by the values that
others decode: all ranks must compute with equal weights. Shards stay exact, and so does all that is gathered
for users. A reduction sums in rank order in fp32, with this rank's own gradient unquantised.

Codes are -127 to 127. ``ABSENT`` stands for -0.0, which means that a rank has no gradient here (see
``reduce.py``). Values that round to zero arrive as +0.0. A block with an inf or a nan has no finite scale, so
all its elements but the absent ones arrive as inf or nan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate

import torch
from torch.distributed import ReduceOp

from shardtrain.comm.arithmetic import merge
from shardtrain.comm.meter import count
from shardtrain.comm.trace import REDUCE
from shardtrain.comm.transport import Flat, Gradient, Pending, Shipment, Tag, Transport, TransportWrapper
from shardtrain.layout import Layout

BLOCK = 256  # elements; the scale adds 1.6 % to the bytes of their codes
ABSENT = -128
_LARGEST = 127
_ALIGN = 16  # bytes; each packet starts at a multiple, so that its scales can be viewed as fp32


@cache
def packets_of(layout: Layout) -> Layout:
    """Return the layout, in bytes, of every rank's packet: its interval's scales, then its codes."""
    lengths = [layout.length(rank) for rank in range(layout.world)]
    sizes = [-(-(length + 4 * -(-length // BLOCK)) // _ALIGN) * _ALIGN for length in lengths]
    return Layout((sum(sizes),), (0,), tuple(accumulate(sizes, initial=0)))


def _rows(full: torch.Tensor, layout: Layout, packets: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the intervals of ``full`` [rank, element] with their packets [rank, byte].

    Intervals of one length, usually all of them, come together.
    """
    packed = packets_of(layout)
    if layout.equal:
        yield full.view(layout.world, layout.length(0)), packets.view(layout.world, packed.length(0))
        return
    for rank in range(layout.world):
        yield full[None, layout.interval(rank)], packets[None, packed.interval(rank)]


def encode(rows: torch.Tensor, packets: torch.Tensor) -> None:
    """Write ``rows`` [row, element] into their ``packets`` [row, byte]."""
    for span, scales, codes in _blocks_of(packets, rows.shape[1]):
        values = rows[:, span].unflatten(1, codes.shape[1:]).to(torch.float32)
        scales.copy_(values.abs().amax(-1).div_(_LARGEST))
        exact = values / scales.unsqueeze(-1)
        # nan: 0 / 0, or a block without a finite scale. Any code will do, but a nan has none.
        # inf: x / 0, where x is so small that its scale underflows. It becomes +0.0, since -0.0 means absent.
        exact.nan_to_num_(nan=1.0, posinf=0.0, neginf=0.0).round_().clamp_(-_LARGEST, _LARGEST)
        codes.copy_(exact.masked_fill_(values.eq(0).logical_and_(values.signbit()), ABSENT))


def decode(packets: torch.Tensor, rows: torch.Tensor) -> None:
    """Fill ``rows`` [row, element] from their ``packets`` [row, byte]: the inverse of `encode`."""
    for span, scales, codes in _blocks_of(packets, rows.shape[1]):
        values = rows[:, span].unflatten(1, codes.shape[1:])
        torch.mul(codes, scales.unsqueeze(-1), out=values)
        values.masked_fill_(codes == ABSENT, -0.0)


def _blocks_of(packets: torch.Tensor, elements: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield elements, scales and codes of the full blocks of ``packets``, then those of the shorter one.

    Elements are a slice of each row; scales are fp32 [row, block], codes int8 [row, block, element].
    """
    if not elements:
        return
    full, blocks = elements // BLOCK, -(-elements // BLOCK)
    scales, codes = packets[:, : 4 * blocks].view(torch.float32), packets[:, 4 * blocks :].view(torch.int8)
    for first, last, length in ((0, full, BLOCK), (full, blocks, elements % BLOCK)):
        if first < last:
            span = slice(first * BLOCK, first * BLOCK + (last - first) * length)
            yield span, scales[:, first:last], codes[:, span].unflatten(1, (last - first, length))


class Quantised(TransportWrapper):
    """Wrap ``inner``, and send as int8 what may be quantised (`Flat.quantised`)."""

    def __init__(self, inner: Transport) -> None:
        """
        Raises:
            ValueError: ``inner`` has several shard groups, or its ranks share memory.
        """
        if inner.all_ranks.world > inner.world:
            raise ValueError("int8 gathers and reductions are for one shard group; use a 1-D mesh with them")
        if inner.in_place:
            raise ValueError(
                f"int8 gathers and reductions need transport='process_group', got {type(inner).__name__}: "
                "ranks that share memory send nothing that could be quantised"
            )
        super().__init__(inner)

    def gather(self, tag: Tag, flats: Sequence[Flat]) -> Pending:
        if not any(flat.quantised for flat in flats):
            return self.inner.gather(tag, flats)
        moved = [self._packed(flat) if flat.quantised else flat for flat in flats]
        packed = [(flat, packets) for flat, packets in zip(flats, moved, strict=True) if flat.quantised]
        for flat, packets in packed:
            encode(flat.local.unsqueeze(0), packets.local.unsqueeze(0))
        moving = self.inner.gather(tag, moved)

        def finish() -> None:
            for flat, packets in packed:
                for interval, packet in _rows(flat.full, flat.layout, packets.full):
                    decode(packet, interval)

        return moving.then(finish)

    def _packed(self, flat: Flat) -> Flat:
        """Allocate the packets of all ranks; the caller fills this rank's own."""
        layout = packets_of(flat.layout)
        packets = flat.full.new_empty(layout.padded, dtype=torch.uint8)
        return Flat(packets, packets[layout.interval(self.rank)], layout)

    def reduce(self, tag: Tag, gradients: Sequence[Gradient]) -> Pending:
        if not any(gradient.quantised for gradient in gradients):
            return self.inner.reduce(tag, gradients)
        means = [gradient.pack_own(self.rank) for gradient in gradients]
        shipments = [self._shipment(gradient) for gradient in gradients]
        count(REDUCE, (full.nbytes - incoming[0].nbytes for full, _, incoming in shipments))
        moving = self.inner.exchange(tag, shipments)

        def finish() -> None:
            for gradient, shipment, mean in zip(gradients, shipments, means, strict=True):
                values = shipment.incoming
                if gradient.quantised:
                    values = mean.new_empty((self.world, mean.numel()), dtype=torch.float32)
                    decode(shipment.incoming, values)
                parts = [mean if rank == self.rank else value for rank, value in enumerate(values)]
                merge(parts, mean, ReduceOp.AVG)

        return moving.then(finish)

    def _shipment(self, gradient: Gradient) -> Shipment:
        """Return what this rank sends to all ranks, and memory for what they send to it."""
        full, layout = gradient.full, gradient.layout
        if gradient.quantised:
            for gap in layout.gaps:  # padding must not influence a scale
                full[gap].zero_()
            packets = full.new_empty(packets_of(layout).padded, dtype=torch.uint8)
            for interval, packet in _rows(full, layout, packets):
                encode(interval, packet)
            full, layout = packets, packets_of(layout)
        return Shipment(full, layout, full.new_empty((self.world, layout.length(self.rank))))

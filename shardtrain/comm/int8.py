"""Quantise what is sent as int8. Only a `Precision` that asks for int8 needs this file.

Int8 is sent in packets, one per interval, after ZeRO++ (Wang et al., 2023,
https://arxiv.org/abs/2306.10209). For each block of ``BLOCK`` elements a packet has one fp32 scale, the
block's largest magnitude over 127, and an 8-bit code per element, x / scale rounded to the nearest. So an
element's error is at most half a scale, max|block| / 254, besides fp32's own rounding. Two ranks, a block of
two elements::

    gather   rank 0 owns 12.7 3.14    scale 0.1, codes 127 31     every rank computes with 12.7 3.1
    reduce   rank 0 has  -1.0 0.30    rank 1 owns both, its own gradient is  0.5 0.1
             scale 1 / 127, codes -127 38: it arrives as -1.0 0.2992, within 1 / 254
             mean  -0.25 0.1996       error at most the mean of the ranks' bounds, (1 / 254 + 0) / 2

Norms and vectors are not quantised. In a gather a rank replaces its own interval, too, by the values that
others decode: all ranks must compute with equal weights. Shards stay exact, and so does all that is gathered
for users. A reduction sums in fp32, with this rank's own gradient unquantised.

Codes are -127 to 127. ``ABSENT`` stands for -0.0, which means that a rank has no gradient here (see
``reduce.py``). Values that round to zero arrive as +0.0. A block with an inf or a nan has the largest fp32 as
its scale and codes beyond 1, so all its elements but the absent ones arrive as infinities.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ReduceOp

from shardtrain.comm.arithmetic import SPAN, merge

BLOCK = 256  # elements of int8 that share a scale, which adds 1.6 % to their bytes
_ALIGN = 16  # bytes; each packet starts at a multiple, so that its scales can be viewed as fp32
ABSENT = -128
_LARGEST = 127

_FP32 = torch.finfo(torch.float32)
_MINUS_ZERO = torch.iinfo(torch.int32).min  # the bits of -0.0, less than those of any other number
# fp32 numbers in [2**23, 2**24) are the whole numbers. So adding this rounds x to the nearest integer, ties
# to even, and the low 8 bits of the sum are that integer as int8.
_ROUND = 1.5 * 2**23
_ROUND_BITS = 0x4B400000  # those of _ROUND


def packet_bytes(elements: int) -> int:
    """Return the bytes of ``elements`` elements as int8."""
    return -(-(elements + 4 * -(-elements // BLOCK)) // _ALIGN) * _ALIGN


def encode(values: Tensor, packet: Tensor) -> None:
    """Write ``values`` (1-D) into their ``packet`` (uint8, 1-D).

    On the CPU a comparison or a selection costs as much as eight arithmetic operations, so none is done per
    element.
    """
    for span, scales, codes in _chunks(packet, values.numel()):
        given = values[span].view(codes.shape).to(torch.float32)
        exact = given.abs()
        bits = exact.view(torch.int32)
        largest = exact.amax(-1, keepdim=True)
        finite = largest.isfinite()
        # At least the smallest normal number: less would be too inexact, and zero could not divide.
        scales.copy_(largest.div_(_LARGEST).clamp_(min=_FP32.tiny).where(finite, _FP32.max))
        # The largest code of each element: ABSENT for -0.0, else 127.
        highest = torch.clamp(given.view(torch.int32), max=_MINUS_ZERO + 1, out=bits).to(torch.int8)
        highest.neg_().bitwise_xor_(ABSENT)
        torch.div(given, scales, out=exact).add_(torch.where(finite, _ROUND, _ROUND + _LARGEST))
        codes.copy_(bits.clamp_(_ROUND_BITS - _LARGEST, _ROUND_BITS + _LARGEST))
        torch.minimum(codes, highest, out=codes)


def decode(packet: Tensor, values: Tensor) -> None:
    """Fill ``values`` (1-D) from their ``packet``: the inverse of `encode`."""
    for span, scales, codes in _chunks(packet, values.numel()):
        torch.mul(_signed(codes), scales, out=values[span].view(codes.shape))


def _signed(codes: Tensor) -> Tensor:
    """Return ``codes`` as fp32, with -0.0 for ``ABSENT``."""
    return F.threshold(codes.to(torch.float32), ABSENT, -0.0, inplace=True)


def _chunks(packet: Tensor, elements: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield elements, scales and codes of the full blocks of ``packet``, then those of the shorter one.

    Scales are fp32 [block, 1], codes int8 [block, element]. On the CPU they come in chunks that stay in the
    cache; on a GPU, where operations are launches, at once.
    """
    full, blocks = elements // BLOCK, -(-elements // BLOCK)
    scales = packet[: 4 * blocks].view(torch.float32).unsqueeze(-1)
    codes = packet[4 * blocks : 4 * blocks + elements].view(torch.int8)
    chunk = SPAN // BLOCK if packet.is_cpu else max(full, 1)
    for first, last in pairwise([*range(0, full, chunk), full, blocks]):
        if first < last:
            span = slice(first * BLOCK, min(last * BLOCK, elements))
            yield span, scales[first:last], codes[span].view(last - first, -1)


def new_packets(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return packets for ``parts``, uninitialized, in one vector."""
    sizes = [packet_bytes(part.numel()) for part in parts]
    return list(parts[0].new_empty(sum(sizes), dtype=torch.uint8).split(sizes))


def pack_others(parts: Sequence[Tensor], rank: int) -> list[Tensor]:
    """Return packets of ``parts``; that of rank ``rank`` itself is uninitialized."""
    packets = new_packets(parts)
    for other, (part, packet) in enumerate(zip(parts, packets, strict=True)):
        if other != rank:
            encode(part, packet)
    return packets


def merge_packets(incoming: Sequence[Tensor], mean: Tensor, rank: int) -> None:
    """Turn ``mean``, rank ``rank``'s own values, into the mean of them and of other ranks' packets."""
    others = [packet for other, packet in enumerate(incoming) if other != rank]
    for chunks in zip(*(_chunks(packet, mean.numel()) for packet in others), strict=True):
        own = mean[chunks[0][0]]
        parts = [torch.mul(_signed(codes), scales).view(-1) for _, scales, codes in chunks]
        merge([*parts[:rank], own, *parts[rank:]], own, ReduceOp.AVG)

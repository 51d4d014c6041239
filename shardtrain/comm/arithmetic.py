"""Merge the parts of a reduction that the backend does not sum, and quantise what is sent as int8.

Values of fp16, bf16 and fp8 are merged in fp32 and rounded once at the end. Integers stay integers. Parts
are merged in rank order, so the result is the same bit for bit every time.

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
for users. A reduction sums in rank order in fp32, with this rank's own gradient unquantised.

Codes are -127 to 127. ``ABSENT`` stands for -0.0, which means that a rank has no gradient here (see
``reduce.py``). Values that round to zero arrive as +0.0. A block with an inf or a nan has the largest fp32 as
its scale and codes beyond 1, so all its elements but the absent ones arrive as infinities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ReduceOp

_MERGES: dict[object, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
# Elements merged at a time: 512 KiB of fp32 per part. Sum and mean of 2.4 million elements take 0.78 of the
# time of two passes over the whole vector (2 MiB of L2 cache per core). Half or twice the size is no faster.
SPAN = 1 << 17

_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_LINEAR = (ReduceOp.SUM, ReduceOp.AVG)

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


def check_op(op: object, dtype: torch.dtype) -> None:
    """Raise ValueError for an operation that is unknown or undefined for ``dtype``."""
    if op not in _MERGES:
        raise ValueError(f"expected op to be one of {', '.join(map(op_name, _MERGES))}, found {op}")
    if dtype.is_complex and op not in _LINEAR:
        raise ValueError(f"expected SUM or AVG for {dtype}, found {op_name(op)}")
    if op in _BITWISE and dtype.is_floating_point:
        raise ValueError(f"expected integers or bool for {op_name(op)}, found {dtype}")
    if op == ReduceOp.AVG and dtype == torch.bool:
        raise ValueError(f"expected numbers for AVG, found {dtype}")


def op_name(op: object) -> str:
    """Return ``SUM`` for ``ReduceOp.SUM``."""
    return str(op).rpartition(".")[2]


def merge(parts: Sequence[Tensor], out: Tensor, op: object) -> None:
    """Merge ``out = ((parts[0] op parts[1]) op parts[2]) ...``, divided by ``len(parts)`` for AVG.

    ``parts``: 1-D, of one length; floating-point parts may differ in dtype. ``out``: as long, of the widest
    of their dtypes or a wider one; it may be one of them. Two ranks, AVG, bf16: ``[1.0 2.0]`` and ``[3.0
    5.0]`` give ``[2.0 3.5]``.

    On the CPU long parts are merged in spans that stay in the cache through all operations; on a GPU, where
    each operation is a launch, at once.
    """
    if out.is_complex():  # a complex quotient would lose the sign of zero, which means "no gradient"
        parts, out = [torch.view_as_real(part).flatten() for part in parts], torch.view_as_real(out).view(-1)
    wide = torch.float32 if out.is_floating_point() and out.itemsize < 4 else out.dtype
    length = SPAN if out.device.type == "cpu" else max(out.numel(), 1)
    for start in range(0, out.numel(), length):
        span = slice(start, start + length)
        _merge_span([part[span] for part in parts], out[span], op, wide)


def _merge_span(parts: Sequence[Tensor], out: Tensor, op: object, wide: torch.dtype) -> None:
    needed_later = any(part.data_ptr() == out.data_ptr() for part in parts[2:])
    total = torch.empty_like(out, dtype=wide) if needed_later or out.dtype != wide else out
    combine = _MERGES[op]
    # fp8 has no arithmetic of its own; other types are widened inside the operation.
    is_fp8 = [part.element_size() == 1 and part.is_floating_point() for part in parts]
    first, *others = [part.to(wide) if fp8 else part for part, fp8 in zip(parts, is_fp8, strict=True)]
    if others:
        combine(first.to(wide), others[0], out=total)
    else:
        total.copy_(first)
    for part in others[1:]:
        combine(total, part, out=total)
    if op == ReduceOp.AVG:
        total.div_(len(parts), rounding_mode=None if wide.is_floating_point else "trunc")
    if total is not out:
        out.copy_(total)


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

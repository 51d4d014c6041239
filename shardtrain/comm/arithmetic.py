"""Merge the parts of a reduction that the backend does not sum.

Values of fp16, bf16 and fp8 are merged in fp32 and rounded once at the end. Integers stay integers. Parts
are merged in rank order, so the result is the same bit for bit every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
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

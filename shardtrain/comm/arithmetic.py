"""Sums that the backend does not make, always taken in the same binary tree.

The left half of a tree has the largest power of two of parts that leaves some for the right half::

    2 parts   0 + 1                        3 parts   (0 + 1) + 2
    4 parts   (0 + 1) + (2 + 3)            6 parts   ((0 + 1) + (2 + 3)) + (4 + 5)

So if each replica or rank holds a power of two of the parts, it can sum its own first: two replicas of two
ranks compute the tree of four ranks. A mean is divided once, at the end. In fp32, where numbers from 2**24 on
are even, the parts 2**24, 1, 1, 1 have the sum 2**24 + 2 in the tree, and 2**24 in rank order.

With virtual ranks each part may be the sum of several gradients. ``terms`` is then the number of gradients in
all parts. With ``terms=1`` parts are only summed, and a later stage divides.

Values of fp16, bf16 and fp8 are merged in fp32 and rounded once at the end. Integers stay integers. A sum is
-0.0 only if all its parts are.
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
# Elements merged at a time on the CPU, to stay in the cache: 512 KiB of fp32 per part. Sum and mean of 2.4
# million elements take 0.78 of the time of two passes over the whole vector (2 MiB of L2 cache per core).
# Half or twice the size is no faster.
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


def merge(parts: Sequence[Tensor], out: Tensor, op: object, terms: int = 0) -> None:
    """Merge ``parts`` into ``out`` with ``op``; for AVG, divide by ``terms`` (0: by the number of parts).

    ``parts``: 1-D, of one length; floating-point parts may differ in dtype. ``out``: as long, of the widest
    of their dtypes or a wider one; it may be one of them. Two ranks, AVG, bf16: ``[1.0 2.0]`` and ``[3.0
    5.0]`` give ``[2.0 3.5]``.
    """
    if out.is_complex():  # a complex quotient would lose the sign of zero, which means "no gradient"
        parts = [torch.view_as_real(part).flatten() for part in parts]
        out = torch.view_as_real(out).view(-1)
    # On a GPU at once, since each operation is a launch.
    length = SPAN if out.device.type == "cpu" else max(out.numel(), 1)
    by = divisor(terms or len(parts), out) if op == ReduceOp.AVG else None
    for start in range(0, out.numel(), length):
        span = slice(start, start + length)
        _merge_span([part[span] for part in parts], out[span], _MERGES[op], by)


def _merge_span(
    parts: Sequence[Tensor], out: Tensor, combine: Callable[..., Tensor], by: Tensor | int | None
) -> None:
    wide = torch.float32 if out.is_floating_point() and out.itemsize < 4 else out.dtype
    total = out if out.dtype == wide else torch.empty_like(out, dtype=wide)

    def join(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
        return combine(left.to(wide), right.to(wide), out=out)

    if len(parts) > 1:
        left, right = _halves(parts)
        join(_tree(left, join), _tree(right, join), total)
    else:
        total.copy_(parts[0])
    if by is not None:
        total.div_(by, rounding_mode=None if wide.is_floating_point else "trunc")
    if total is not out:
        out.copy_(total)


def _tree(parts: Sequence[Tensor], join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Join ``parts`` pairwise, and their results again, as this file's docstring shows."""
    if len(parts) == 1:
        return parts[0]
    left, right = _halves(parts)
    return join(_tree(left, join), _tree(right, join))


def _halves(parts: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    half = 1 << (len(parts) - 1).bit_length() - 1
    return parts[:half], parts[half:]


def divisor(count: int, like: Tensor) -> Tensor | int:
    """Return ``count``, for the CPU as a tensor: dividing by one takes a third of the time of a number."""
    fast = like.is_floating_point() and like.device.type == "cpu"
    return torch.tensor(float(count), device="cpu") if fast else count

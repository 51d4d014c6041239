"""Norms of the whole, the same on all ranks, from the norms of what each rank holds.

A norm of order p of several parts is that of their norms, so one all-reduce of one number makes it::

    rank 0   norms 3, 4 -> 3² + 4² = 25 \\
                                         sum 169 -> 13 on both ranks
    rank 1   norm 12    -> 12²    = 144 /

With V virtual ranks a norm does not depend on where cuts between ranks fall. A norm of a piece has V norms
beside it, one per virtual rank's interval. The rank that owns an interval joins its norms. The V sums are
then exchanged beside zeros, which change none of them, and added in one order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from shardtrain.comm.channel import Channel
from shardtrain.comm.trace import ALL_REDUCE, waiting

Intervals = Sequence[tuple[int, slice]]  # virtual ranks, each with its slice of a piece

_ROWS = 1 << 12  # norms of one interval are padded to a multiple of this


def local_norms(tensors: Sequence[Tensor], order: float) -> list[Tensor]:
    """Return the norm of each of ``tensors``; 0 for an empty one."""
    present = [tensor for tensor in tensors if tensor.numel()]
    norms = iter(torch._foreach_norm(present, order) if present else ())
    return [next(norms) if t.numel() else t.new_zeros((), dtype=t.real.dtype) for t in tensors]


def interval_norms(
    tensors: Sequence[Tensor], intervals: Sequence[Intervals], order: float, virtual: int
) -> Tensor:
    """Return the norms of each of ``tensors`` by virtual rank, [tensors, virtual].

    One without intervals, or of another length than these, counts as its first virtual rank's.
    """
    present = list[Tensor]()
    runs = list[tuple[int, int]]()  # zeros before a run, and its length
    position = 0
    for index, (tensor, parts) in enumerate(zip(tensors, intervals, strict=True)):
        flat = tensor.flatten()
        if not parts or parts[-1][1].stop != len(flat):
            parts = [(parts[0][0] if parts else 0, slice(None))]
        if len(flat):
            first = index * virtual + parts[0][0]
            runs.append((first - position, len(parts)))
            position = first + len(parts)
            present += [flat[part] for _, part in parts]
    like = tensors[0].real
    zeros = like.new_zeros(len(tensors) * virtual, dtype=torch.promote_types(like.dtype, torch.float32))
    run_norms = torch.stack(torch._foreach_norm(present, order)).to(zeros.dtype) if present else zeros
    blocks = list[Tensor]()
    taken = 0
    for gap, length in runs:
        blocks += [zeros[:gap], run_norms[taken : taken + length]]
        taken += length
    return torch.cat([*blocks, zeros[position:]]).view(len(tensors), virtual)


def _by_interval(norms: Tensor, order: float, virtual: int) -> Tensor:
    """Join ``norms`` [..., virtual] of each interval, the largest first, and padded with zeros.

    Ranks may have different numbers of zeros, for empty pieces, but must sum equally many numbers.
    """
    columns = norms.reshape(-1, virtual).T.sort(dim=1, descending=True).values
    padded = F.pad(columns, (0, -columns.shape[1] % _ROWS))
    joined: Tensor = torch.linalg.vector_norm(padded, order, dim=1)
    return joined


def over_all_ranks(
    norms: Tensor, order: float, channel: Channel, device: torch.device, virtual: int = 0
) -> Tensor:
    """Return the norm of all ranks' ``norms``: 0-dim, fp32 or fp64, the same on all ranks. Collective.

    ``virtual``: ``norms`` are [..., virtual], by virtual rank.
    """
    dtype = torch.promote_types(norms.dtype, torch.float32)
    by_interval = virtual and order != math.inf
    local = _by_interval(norms, order, virtual) if by_interval else torch.linalg.vector_norm(norms, order)
    # A copy, since autograd may need the norms: a loss of parameters at rest is refused in backward.
    local = local.to(device, dtype, non_blocking=True, copy=True)
    all_ranks = channel.all_ranks
    if all_ranks.rank not in channel.primary_ranks:
        local.zero_()  # the gradients of replicas are equal and count once
    with waiting(ALL_REDUCE, "the gradient's norm", device):
        if order == math.inf:  # gloo's maximum of a nan and a number is the number
            both = torch.stack([local.nan_to_num(torch.inf, torch.inf), local.isnan().float()])
            all_ranks.all_reduce(both, "max")
            return torch.where(both[1] > 0, torch.nan, both[0])
        all_ranks.all_reduce(local.pow_(order))
        return local.sum().pow_(1.0 / order)

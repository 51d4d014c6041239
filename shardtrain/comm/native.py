"""The backend's own collectives, and what a process group can do. Only this file knows torch's renaming."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

# Its functions have the default group of the moment of their import as a default argument. Dynamo imports
# them, so the first step of any torch optimizer: a group opened before would live to the interpreter's end,
# and gloo's threads with it, which now and then abort the process there. Now there is no group yet.
import torch.distributed.nn

# Renamed in torch 2.13, where the old names warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(
    output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """torch's ``all_gather_into_tensor``."""
    work: dist.Work | None = _all_gather(output, input, group=group, async_op=async_op)
    return work


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    async_op: bool = False,
) -> dist.Work | None:
    """torch's ``reduce_scatter_tensor``."""
    work: dist.Work | None = _reduce_scatter(output, input, op=op, group=group, async_op=async_op)
    return work


def all_to_all(
    output: torch.Tensor, input: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup
) -> None:
    """torch's ``all_to_all_single``: ``sizes[r]`` elements of ``input`` to rank r, equally many from each."""
    equal = [output.numel() // len(sizes)] * len(sizes)
    dist.all_to_all_single(output, input, equal, [*sizes], group=group)


def has_gloo(group: dist.ProcessGroup) -> bool:
    """Whether CPU tensors can be sent point to point over gloo."""
    return "cpu:gloo" in dist.get_backend_config(group)


def moves_bytes(group: dist.ProcessGroup) -> bool:
    """False for torch's fake process group, whose collectives return at once and move nothing."""
    return "fake" not in dist.get_backend_config(group)


def device_types(group: dist.ProcessGroup) -> list[str]:
    """The types of device whose tensors the group's backends move, such as ``["cpu", "cuda"]``."""
    return [part.partition(":")[0] for part in dist.get_backend_config(group).split(",")]

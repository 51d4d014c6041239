"""The backend's own collectives, and what a process group can do. Only this file knows torch's renaming."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist

# Its functions have the default group of the moment of their import as a default argument. Dynamo imports
# them, so the first step of any torch optimizer: a group opened before would live to the interpreter's end,
# and gloo's threads with it, which now and then abort the process there. Now there is no group yet.
import torch.distributed.nn
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

# Renamed in torch 2.13. The group's own methods: the functions around them take a third as long again, and
# every unit of every step makes three such calls.
_all_gather = getattr(dist.ProcessGroup, "all_gather_single", None) or dist.ProcessGroup._allgather_base
_reduce_scatter = (
    getattr(dist.ProcessGroup, "reduce_scatter_single", None) or dist.ProcessGroup._reduce_scatter_base
)

# Public since torch 2.15.
_set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout


def all_gather(
    output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """torch's ``all_gather_into_tensor``."""
    if input.is_complex():
        output, input = torch.view_as_real(output), torch.view_as_real(input)
    return _finished(_all_gather(group, output, input, _gather_options(async_op)), async_op)


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    async_op: bool = False,
) -> dist.Work | None:
    """torch's ``reduce_scatter_tensor``."""
    return _finished(_reduce_scatter(group, output, input, _reduce_options(op, async_op)), async_op)


@cache
def _gather_options(async_op: bool) -> AllgatherOptions:
    options = AllgatherOptions()
    options.asyncOp = async_op
    return options


@cache
def _reduce_options(op: dist.ReduceOp.RedOpType, async_op: bool) -> ReduceScatterOptions:
    options = ReduceScatterOptions()
    options.reduceOp, options.asyncOp = op, async_op
    return options


def _finished(work: dist.Work | None, async_op: bool) -> dist.Work | None:
    """``work`` for those who wait themselves; else None, once the current stream may read the results."""
    if async_op or work is None:
        return work
    work.wait()
    return None


def all_to_all(
    output: torch.Tensor, input: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup
) -> None:
    """torch's ``all_to_all_single``: ``sizes[r]`` elements of ``input`` to rank r, equally many from each."""
    equal = [output.numel() // len(sizes)] * len(sizes)
    dist.all_to_all_single(output, input, equal, [*sizes], group=group)


def all_gather_uneven(outputs: Sequence[torch.Tensor], input: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``outputs[r]`` with rank ``r``'s ``input``, of any length: on NCCL one group of broadcasts."""
    if moves_bytes(group):  # the fake one would copy the input to every output
        dist.all_gather(list(outputs), input, group=group)


def reduce_scatter_uneven(
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> None:
    """Reduce every rank's ``inputs[r]``, of any length, to rank ``r``'s ``output``."""
    if moves_bytes(group):
        dist.reduce_scatter(output, list(inputs), op=op, group=group)


def set_time_out(time_out: timedelta) -> None:
    """Of whatever any group of this rank begins from now on."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if moves_bytes(group):
            _set_timeout(time_out, group)


def has_gloo(group: dist.ProcessGroup) -> bool:
    """Whether CPU tensors can be sent point to point over gloo."""
    return "cpu:gloo" in dist.get_backend_config(group)


def moves_bytes(group: dist.ProcessGroup) -> bool:
    """False for torch's fake process group, whose collectives return at once and move nothing."""
    return "fake" not in dist.get_backend_config(group)


def device_types(group: dist.ProcessGroup) -> list[str]:
    """The types of device whose tensors the group's backends move, such as ``["cpu", "cuda"]``."""
    return [part.partition(":")[0] for part in dist.get_backend_config(group).split(",")]

"""What a process group can do, under names that differ between versions of torch."""

from __future__ import annotations

import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

# Import this before any process group exists: its functions capture the default group as a default argument,
# and Dynamo imports it at an optimizer's first step. A captured group would live until the interpreter exits,
# where gloo's threads can abort the process.
import torch.distributed.nn
from torch.distributed.constants import default_pg_timeout

from shardtrain import torch_private

# Renamed in torch 2.13.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Backends that average, launch several collectives as one, and move intervals of different lengths. Others,
# such as gloo, are asked for sums of equal intervals only. torch's fake backend moves nothing.
COMPLETE = ("nccl", "xccl", "fake")


def set_time_out(time_out: timedelta) -> None:
    """Set the time-out of all later collectives of all process groups of this rank."""
    # Public from torch 2.14 on.
    set_timeout = getattr(dist, "set_timeout", None) or torch_private.set_pg_timeout
    for group in list(torch_private.pg_map):
        if moves_bytes(group):
            set_timeout(time_out, group)


def time_out_s(group: dist.ProcessGroup) -> float:
    """Return the current time-out of ``group``'s backend for the CPU, in seconds."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    time_out: timedelta = getattr(options, "_timeout", default_pg_timeout)
    return time_out.total_seconds()


def has_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether CPU tensors can be sent point to point over gloo."""
    return "cpu:gloo" in dist.get_backend_config(group)


def moves_bytes(group: dist.ProcessGroup) -> bool:
    """Return False for torch's fake process group, whose collectives return at once and move nothing."""
    return "fake" not in dist.get_backend_config(group)


def device_types(group: dist.ProcessGroup) -> list[str]:
    """Return the types of device whose tensors the group's backends move, such as ``["cpu"]``."""
    return [part.partition(":")[0] for part in dist.get_backend_config(group).split(",")]


def living(group: weakref.ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    """Return ``group``. Raises ValueError if it has been destroyed.

    A model may outlive its group, and must not keep it alive: gloo's threads would live on with it.
    """
    alive = group()
    if alive is None:
        raise ValueError(
            "the process group over which this model was sharded has been destroyed; finish with the "
            "model before torch.distributed.destroy_process_group()"
        )
    return alive

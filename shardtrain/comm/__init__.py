"""Everything that moves between ranks goes through this package, and nothing else calls a collective.

Read in this order; imports point upwards:

- ``trace``, ``meter``: which movements there are, and when; what moves, and what is waited for
- ``transport``: what the engine asks of a transport
- ``arithmetic``, ``messages``, ``native``: sums; movements by messages, and by the backend's own collectives
- ``guard``, ``reports``: who takes another path through the model, and who is lost
- ``process_group``; ``signals``, ``shared_memory``: the two transports, and messages between hosts
- ``replicated``, ``quantised``, ``offload``: around these, and without other ranks
- ``opening``: which of these it is to be
- ``agreement``, ``public``: texts between ranks; collectives for everybody, under torch's names

The functions below serve the code around the engine, over the default process group. Without one they act as
a single rank. ``from shardtrain import comm as dist`` serves programs written for ``torch.distributed``: the
few other names that these need are torch's own, and their traffic is not metered.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (
    ReduceOp,
    Work,
    all_gather,
    destroy_process_group,
    gather,
    get_rank,
    get_world_size,
    init_process_group,
    is_initialized,
    new_group,
    recv,
    reduce_op,
    scatter,
    send,
)

from shardtrain.comm import native
from shardtrain.comm.agreement import broadcast_text, gather_texts, require_same
from shardtrain.comm.arithmetic import op_name
from shardtrain.comm.guard import Diverged, PeerLost
from shardtrain.comm.meter import Meter, Wait, count, meter
from shardtrain.comm.native import set_time_out
from shardtrain.comm.offload import Offloaded
from shardtrain.comm.opening import TRANSPORTS, open_replicated, open_transport
from shardtrain.comm.process_group import ProcessGroupTransport
from shardtrain.comm.public import (
    all_gather_into_tensor,
    all_to_all,
    all_to_all_single,
    reduce_scatter,
    reduce_scatter_tensor,
)
from shardtrain.comm.quantised import Quantised
from shardtrain.comm.replicated import Simulated, simulated
from shardtrain.comm.shared_memory import HostsTransport, SharedMemoryTransport
from shardtrain.comm.trace import ALL_REDUCE, BROADCAST
from shardtrain.comm.transport import Alone, Flat, Gradient, Pending, Ranks, Tag, Transport

Op = str | ReduceOp.RedOpType
Group = dist.ProcessGroup

# What torch calls them from 2.13 on.
all_gather_single = all_gather_into_tensor
reduce_scatter_single = reduce_scatter_tensor


def rank() -> int:
    """Return this rank in the default process group; 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the ranks in the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def all_reduce(tensor: Tensor, op: Op = "sum", group: Group | None = None, async_op: bool = False) -> Any:
    """Overwrite ``tensor`` with its ``sum``, ``max`` or ``min`` over all ranks of ``group``.

    Returns:
        ``tensor``; with ``async_op``, at once, torch's ``Work``.

    Raises:
        ValueError: ``op`` is neither one of these, nor the ``ReduceOp`` of that name.
    """
    name = op if isinstance(op, str) else op_name(op).lower()
    if name not in ("sum", "max", "min"):
        raise ValueError(f"expected op to be ReduceOp.SUM, MAX or MIN, found {op}")
    if async_op:
        world = dist.get_world_size(group)
        count(ALL_REDUCE, [2 * tensor.nbytes * (world - 1) // world])
        return dist.all_reduce(tensor, getattr(ReduceOp, name.upper()), group, async_op=True)
    plain_transport(group).all_reduce(tensor, name)
    return tensor


def broadcast(tensor: Tensor, src: int = 0, group: Group | None = None, async_op: bool = False) -> Any:
    """Overwrite ``tensor`` with rank ``src``'s on every rank of ``group``. Returns as `all_reduce`."""
    if async_op:
        count(BROADCAST, [tensor.nbytes * (dist.get_world_size(group) - 1) if dist.get_rank() == src else 0])
        return dist.broadcast(tensor, src, group, async_op=True)
    plain_transport(group).broadcast(tensor, src if group is None else dist.get_group_rank(group, src))
    return tensor


def plain_transport(group: Group | None = None) -> Ranks:
    """Return movements over ``group`` (default: the world), for use outside the engine: without a guard."""
    group = group or dist.group.WORLD
    return Alone() if group is None or group.size() == 1 else ProcessGroupTransport(group)


def barrier(*args: Any, **keywords: Any) -> Any:
    """Do as torch's, and nothing without a process group."""
    return dist.barrier(*args, **keywords) if dist.is_initialized() else None

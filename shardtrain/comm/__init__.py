"""Everything that moves between ranks goes through this package, and nothing else calls a collective.

Read in this order; imports point upwards:

- ``movement``, ``transport``: which movements there are, and what the engine asks of a transport
- ``trace``, ``meter``: when things happen; what moves, and what is waited for
- ``arithmetic``, ``messages``, ``native``: how values are added up; movements made of messages, and of the
  backend's own collectives
- ``guard``: which path every rank takes through the model, and who takes another; ranks tell one another by
  ``signals`` on one host, by ``reports`` over gloo
- ``process_group``: the transport over a process group
- ``shared_memory``: the transport inside a host; ``hosts``: that one inside hosts, messages between them
- ``replicated``: several shard groups
- ``quantised``, ``offload``: around another transport: int8, and shards in host memory
- ``simulated``: without other ranks
- ``opening``: which of these it is to be
- ``agreement``, ``public``: texts between ranks; collectives for everybody, under torch's names

The functions below serve the code around the engine. They work on the default process group, and without
one they act as a single rank: nothing moves.

``from shardtrain import comm as dist`` serves programs written for ``torch.distributed``: beside the
collectives, the few names that such programs need are passed on as they are. Their traffic is not metered.
"""

from __future__ import annotations

from typing import overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (
    ReduceOp,
    Work,
    destroy_process_group,
    get_rank,
    get_world_size,
    init_process_group,
    is_initialized,
    new_group,
    reduce_op,
    scatter,
)

from shardtrain.comm import native
from shardtrain.comm.agreement import broadcast_text, gather_texts, require_same
from shardtrain.comm.guard import Diverged, PeerLost
from shardtrain.comm.meter import Meter, Wait, count, meter
from shardtrain.comm.movement import ALL_REDUCE, BROADCAST
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
from shardtrain.comm.shared_memory import HostsTransport, SharedMemoryTransport
from shardtrain.comm.simulated import Simulated, simulated
from shardtrain.comm.transport import Alone, Flat, Gradient, Pending, Ranks, Tag, Transport

Op = str | ReduceOp.RedOpType
Group = dist.ProcessGroup
Moved = Tensor | Work | None

# What torch calls them from 2.13 on.
all_gather_single = all_gather_into_tensor
reduce_scatter_single = reduce_scatter_tensor

_OPS: dict[Op, str] = {
    **{name: name for name in ("sum", "max", "min")},
    ReduceOp.SUM: "sum",
    ReduceOp.MAX: "max",
    ReduceOp.MIN: "min",
}


def rank() -> int:
    """Return this rank in the default process group; 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the ranks in the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


@overload
def all_reduce(tensor: Tensor, op: Op = ..., group: Group | None = ...) -> Tensor: ...
@overload
def all_reduce(tensor: Tensor, op: Op = ..., group: Group | None = ..., *, async_op: bool) -> Moved: ...
def all_reduce(tensor: Tensor, op: Op = "sum", group: Group | None = None, async_op: bool = False) -> Moved:
    """Overwrite ``tensor`` with its ``sum``, ``max`` or ``min`` over all ranks of ``group``, and return it.

    With ``async_op`` torch's ``Work`` is returned at once.

    Raises:
        ValueError: ``op`` is neither one of these, nor the ``ReduceOp`` of that name.
    """
    name = _OPS.get(op)
    if name is None:
        raise ValueError(f"expected op to be ReduceOp.SUM, MAX or MIN, found {op}")
    if async_op:
        world = dist.get_world_size(group)
        count(ALL_REDUCE, [2 * tensor.nbytes * (world - 1) // world])
        return dist.all_reduce(tensor, getattr(ReduceOp, name.upper()), group, async_op=True)
    plain_transport(group).all_reduce(tensor, name)
    return tensor


@overload
def broadcast(tensor: Tensor, src: int = ..., group: Group | None = ...) -> Tensor: ...
@overload
def broadcast(tensor: Tensor, src: int = ..., group: Group | None = ..., *, async_op: bool) -> Moved: ...
def broadcast(tensor: Tensor, src: int = 0, group: Group | None = None, async_op: bool = False) -> Moved:
    """Overwrite ``tensor`` with rank ``src``'s on every rank of ``group``; return it, or a ``Work``."""
    if async_op:
        count(BROADCAST, [tensor.nbytes * (dist.get_world_size(group) - 1) if dist.get_rank() == src else 0])
        return dist.broadcast(tensor, src, group, async_op=True)
    plain_transport(group).broadcast(tensor, src if group is None else dist.get_group_rank(group, src))
    return tensor


def plain_transport(group: Group | None = None) -> Ranks:
    """Return movements over ``group`` (default: the world), for use outside the engine: without a guard."""
    group = group or (dist.group.WORLD if dist.is_initialized() else None)
    return Alone() if group is None or group.size() == 1 else ProcessGroupTransport(group)


def control_device(group: Group | None = None) -> torch.device:
    """Return where a small tensor must lie that ranks of ``group`` (default: the world) exchange."""
    group = group or (dist.group.WORLD if dist.is_initialized() else None)
    return torch.device("cpu" if group is None else native.device_types(group)[0])


def barrier() -> None:
    """Return once every rank has come here."""
    if world_size() > 1:
        dist.barrier()

"""Everything that moves between ranks goes through this package, and nothing else calls a collective.

Read in this order; imports point upwards:

- ``transport``: what the engine asks for, two movements and memory for flat vectors
- ``trace``, ``meter``: when things happen; what moves, and what is waited for
- ``intervals``, ``arithmetic``: what is moved, and how it is added up
- ``messages``, ``tags``: movements made of messages, and how these are told apart
- ``native``, ``natively``: the backend's own collectives, and movements made of them
- ``guard``: which path every rank takes through the model, and who strays; ranks tell one another by
  ``signals`` (on one host), by ``ring`` and ``reports`` (over gloo) and by ``digests`` (elsewhere)
- ``process_group``: the transport over a process group
- ``host_memory``, ``shared_memory``: the transport inside a host, over ``signals``
- ``column``, ``replicated``: several shard groups
- ``quantised``, ``offload``: around another transport: int8, and shards in host memory
- ``simulated``: without other ranks
- ``opening``: which of these it is to be
- ``texts``, ``host_scatter``: for the code around the engine: texts, and tensors handed out on each host
- ``public``: collectives for all_ranks, under torch's names
- ``clocks``: how far the ranks' clocks are apart

A movement has a name in each of three tables, by what is asked of it::

    what the engine starts    meter, as torch says    trace, what a rank does    guard, what it is doing
    gather                    all_gather              gather                     gathering
    reduce                    reduce_scatter          reduce                     reducing
    average, of replicas      all_reduce              (in reduce)                averaging

The functions below serve the code around the engine. They work on the default process group, and without
one they act as a single rank: nothing moves.

``from shardtrain import comm as dist`` serves programs written for ``torch.distributed``: beside the
collectives, the few names that such programs need are passed on as they are. Their traffic is not metered.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import (
    ReduceOp,
    destroy_process_group,
    get_rank,
    get_world_size,
    init_process_group,
    is_initialized,
    new_group,
    scatter,
)

from shardtrain.comm import native
from shardtrain.comm.guard import Diverged, PeerLost
from shardtrain.comm.meter import Meter, Wait, meter
from shardtrain.comm.native import set_time_out
from shardtrain.comm.offload import Offloaded
from shardtrain.comm.opening import host_key, open_replicated, open_transport
from shardtrain.comm.process_group import ProcessGroupTransport
from shardtrain.comm.public.collectives import (
    Work,
    all_gather_into_tensor,
    all_to_all,
    all_to_all_single,
    reduce_scatter,
    reduce_scatter_tensor,
)
from shardtrain.comm.quantised import Quantised
from shardtrain.comm.replicated import Replicated
from shardtrain.comm.shared_memory import HostsTransport, SharedMemoryTransport
from shardtrain.comm.simulated import Simulated, simulated
from shardtrain.comm.texts import HostScatter, broadcast_text, gather_texts, require_same
from shardtrain.comm.transport import Alone, Flat, Gradient, Pending, Ranks, Tag, Transport

# What torch calls them from 2.13 on.
all_gather_single = all_gather_into_tensor
reduce_scatter_single = reduce_scatter_tensor

__all__ = [
    "Alone",
    "Diverged",
    "Flat",
    "Gradient",
    "HostScatter",
    "HostsTransport",
    "Meter",
    "Offloaded",
    "PeerLost",
    "Pending",
    "ProcessGroupTransport",
    "Quantised",
    "Ranks",
    "ReduceOp",
    "Replicated",
    "SharedMemoryTransport",
    "Simulated",
    "Tag",
    "Transport",
    "Wait",
    "Work",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_text",
    "control_device",
    "destroy_process_group",
    "gather_texts",
    "get_rank",
    "get_world_size",
    "host_scatter",
    "init_process_group",
    "is_initialized",
    "meter",
    "new_group",
    "open_replicated",
    "open_transport",
    "plain_transport",
    "rank",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "require_same",
    "scatter",
    "set_time_out",
    "simulated",
    "world_size",
]


_OPS: dict[str | ReduceOp.RedOpType, str] = {
    **{name: name for name in ("sum", "max", "min")},
    ReduceOp.SUM: "sum",
    ReduceOp.MAX: "max",
    ReduceOp.MIN: "min",
}


def rank() -> int:
    """This rank in the default process group; 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Ranks in the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def all_reduce(tensor: torch.Tensor, op: str | ReduceOp.RedOpType = "sum") -> torch.Tensor:
    """Overwrite ``tensor`` with its ``sum``, ``max`` or ``min`` over all ranks, and return it.

    Raises:
        ValueError: ``op`` is neither one of these, nor the ``ReduceOp`` of that name.
    """
    name = _OPS.get(op)
    if name is None:
        raise ValueError(f"expected op to be ReduceOp.SUM, MAX or MIN, found {op}")
    plain_transport().all_reduce(tensor, name)
    return tensor


def broadcast(tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
    """Overwrite ``tensor`` with rank ``src``'s on every rank, and return it."""
    plain_transport().broadcast(tensor, src)
    return tensor


def plain_transport() -> Ranks:
    """Over the default group, for a few movements outside the engine: nobody watches over them."""
    group = dist.group.WORLD if world_size() > 1 else None
    return Alone() if group is None else ProcessGroupTransport(group)


def host_scatter() -> HostScatter | None:
    """Between the ranks of each host; None for a single rank. Collective."""
    if world_size() == 1:
        return None
    return HostScatter(gather_texts(host_key(), plain_transport(), control_device()))


def control_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where a small tensor must lie that ranks of ``group`` (default: the world) exchange."""
    group = group or (dist.group.WORLD if dist.is_initialized() else None)
    return torch.device("cpu" if group is None else native.device_types(group)[0])


def barrier() -> None:
    """Return once every rank has come here."""
    if world_size() > 1:
        dist.barrier()

"""Move bytes between ranks. No other package calls a collective.

Read the files in this order. Each imports only from those before it:

- ``trace``: the kinds of collectives, bytes sent, seconds waited
- ``arithmetic``: sums; ``guard``: ranks that diverge
- ``transport``: what a transport is; ``channel``: the collectives of a model, over any transport
- ``messages``, ``native``: collectives by messages, and the backend's own
- ``reports``: the guard over gloo, and ranks that are lost
- ``element_wise``, ``norms``: gradients' pieces, and what is right on them
- ``process_group``: the transport between any ranks; ``agreement``: texts and verdicts of all ranks
- ``signals``, ``shared_memory``: ranks of one host that share memory
- ``wrappers``: offload and replicas, around any of these; simulated ranks
- ``opening``: the choice among them
- ``public``: public collectives, under torch's names

The functions below serve code outside the engine, over the default process group. Without one they act as
a single rank. ``from shardtrain import comm as dist`` serves programs written for ``torch.distributed``.
Names that are not defined here are torch's own, and the meter does not count their traffic.
"""

from __future__ import annotations

from typing import Any

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
    recv,
    reduce_op,
    send,
)

from shardtrain.comm import public
from shardtrain.comm.agreement import gather_texts, require_same
from shardtrain.comm.arithmetic import op_name
from shardtrain.comm.channel import Channel, Ranks
from shardtrain.comm.guard import Diverged, PeerLost
from shardtrain.comm.native import set_time_out
from shardtrain.comm.norms import refuse_pieces
from shardtrain.comm.opening import TRANSPORTS, open_transport, ranks_by_host
from shardtrain.comm.process_group import ProcessGroupTransport, guard_world
from shardtrain.comm.public import (
    Background,
    Group,
    all_gather,
    all_gather_into_tensor,
    all_to_all,
    all_to_all_single,
    gather,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
)
from shardtrain.comm.shared_memory import SharedMemoryTransport
from shardtrain.comm.trace import ALL_REDUCE, BROADCAST, Meter, Wait, count, meter
from shardtrain.comm.transport import Alone, Flat, Gradient, Pending, Transport
from shardtrain.comm.wrappers import Offloaded, Simulated, simulated

Op = str | ReduceOp.RedOpType

# Their names in torch from 2.13 on.
all_gather_single = all_gather_into_tensor
reduce_scatter_single = reduce_scatter_tensor


def rank() -> int:
    """Return this process's rank in the default process group; 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks in the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def all_reduce(tensor: Tensor, op: Op = "sum", group: Group | None = None, async_op: bool = False) -> Any:
    """Overwrite ``tensor`` with its ``sum``, ``max`` or ``min`` over all ranks of ``group``.

    Returns:
        ``tensor``; with ``async_op``, torch's ``Work``, at once.

    Raises:
        ValueError: ``op`` is neither one of these names nor the ``ReduceOp`` of one.
    """
    refuse_pieces("all_reduce", [tensor])
    name = op if isinstance(op, str) else op_name(op).lower()
    if name not in ("sum", "max", "min"):
        raise ValueError(f"expected op to be ReduceOp.SUM, MAX or MIN, found {op}")
    ranks = plain_transport(group)
    if async_op and ranks.world > 1:
        _require_contiguous(tensor)
        count(ALL_REDUCE, [2 * tensor.nbytes * (ranks.world - 1) // ranks.world])
        return dist.all_reduce(tensor, getattr(ReduceOp, name.upper()), group, async_op=True)
    ranks.all_reduce(tensor, name)
    return Background(lambda: None) if async_op else tensor


def broadcast(tensor: Tensor, src: int = 0, group: Group | None = None, async_op: bool = False) -> Any:
    """Overwrite ``tensor`` with rank ``src``'s on every rank of ``group``. Returns as `all_reduce`."""
    refuse_pieces("broadcast", [tensor])
    ranks = plain_transport(group)
    if async_op and ranks.world > 1:
        _require_contiguous(tensor)
        count(BROADCAST, [tensor.nbytes * (ranks.world - 1) if dist.get_rank() == src else 0])
        return dist.broadcast(tensor, src, group, async_op=True)
    if ranks.world > 1:
        ranks.broadcast(tensor, src if group is None else dist.get_group_rank(group, src))
    return Background(lambda: None) if async_op else tensor


def _require_contiguous(tensor: Tensor) -> None:
    """Raise ValueError where gloo would read and write elements between those of ``tensor``."""
    if not tensor.is_contiguous():
        raise ValueError(f"expected a contiguous tensor with async_op, found strides {tensor.stride()}")


def plain_transport(group: Group | None = None) -> Ranks:
    """Return a channel over ``group`` (default: the world) for use outside the engine."""
    group = group or dist.group.WORLD
    if group is None or dist.get_world_size(group) < 2:
        return Channel(Alone())
    return Channel(ProcessGroupTransport(group))


def barrier(*args: Any, **keywords: Any) -> Any:
    """Call torch's ``barrier``; do nothing without a process group."""
    return public.barrier(*args, **keywords) if dist.is_initialized() else None

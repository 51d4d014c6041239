"""``torch.distributed``'s collectives for users' programs: names, arguments and results are torch's.

They are the names of `shardtrain.comm`: ``from shardtrain import comm as dist`` runs torch's documented
examples. The engine needs none of this. Without a process group they act as a single rank.

``agreement`` compares what the ranks call; ``calls`` has the collectives that are checked so. Of the others
the meter counts `all_reduce` and `broadcast`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

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

from shardtrain.collectives.calls import (
    Background,
    Group,
    all_gather_into_tensor,
    all_to_all,
    all_to_all_single,
    reduce_scatter,
    reduce_scatter_tensor,
)
from shardtrain.comm.arithmetic import op_name
from shardtrain.comm.opening import plain_transport
from shardtrain.comm.process_group import guarded
from shardtrain.comm.trace import ALL_REDUCE, BROADCAST, count
from shardtrain.pieces.piece import refuse_pieces

__all__ = [
    "Group",
    "ReduceOp",
    "Work",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "destroy_process_group",
    "gather",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "new_group",
    "recv",
    "reduce_op",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]

Op = str | ReduceOp.RedOpType
P = ParamSpec("P")
R = TypeVar("R")

# Their names in torch from 2.13 on.
all_gather_single = all_gather_into_tensor
reduce_scatter_single = reduce_scatter_tensor


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


def _guarded(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap torch's ``function``, so that a rank that is lost meanwhile is named."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        groups = (arg for arg in (*args, *kwargs.values()) if isinstance(arg, Group))
        with guarded(next(groups, dist.group.WORLD)):
            return function(*args, **kwargs)

    return call


all_gather = _guarded(dist.all_gather)
_barrier = _guarded(dist.barrier)
gather = _guarded(dist.gather)
scatter = _guarded(dist.scatter)


def barrier(*args: Any, **keywords: Any) -> Any:
    """Call torch's ``barrier``; do nothing without a process group."""
    return _barrier(*args, **keywords) if dist.is_initialized() else None

"""The public collectives: ``torch.distributed``'s names, arguments and results.

``from shardtrain import comm as dist`` runs torch's documented examples. What is different:

- on gloo they are built from messages (``messages.py``), with sums in rank order and fp32 accumulation:
  about twice as fast as gloo's own at tens of megabytes; below one the agreement outweighs that. Stacked
  outputs and uneven lists, which gloo refuses, work;
- arguments that do not fit, on any rank, raise one ``ValueError`` with the same text on every rank
  (``agreement.py``); what the outputs then hold is undefined, those of other calls under way on that
  group too, and the group remains usable;
- inputs may be strided; outputs must be contiguous.

Each call has the same three steps: look at this rank's arguments (``calls.py``), agree with the others,
move; on gloo the last two go on together. With ``async_op=True`` a thread completes them on gloo, so that
they proceed while the caller computes, and ``wait()`` raises what they raise. On other backends the
agreement is reached inside the call, and the backend's own ``Work`` is returned.

The meter counts the payload that this rank sends, not the agreement: two ranks gathering 8 bytes in all
send 4 each.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from shardtrain.comm.messages import WINDOW, Mailbox
from shardtrain.comm.meter import count
from shardtrain.comm.public import calls
from shardtrain.comm.public.agreement import Agreement, Claim
from shardtrain.comm.public.calls import Call, Op
from shardtrain.comm.transport import Pending

# Calls under way at the same time may have one size and so one tag: all their receives are posted at
# once, in the order of the calls, and none later.
_EVERYTHING = sys.maxsize


def all_gather_into_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Fill ``output`` with the ``input`` of all ranks, in rank order.

    ``input``: the same shape ``[n, ...]`` and dtype on every rank. ``output``: ``world`` times as many
    elements, as the concatenation ``[world * n, ...]``, the stack ``[world, n, ...]``, or flat.
    Two ranks with ``[1 2]`` and ``[3 4]`` get ``[1 2 3 4]`` or ``[[1 2] [3 4]]``.
    """
    return _run("all_gather_into_tensor", partial(calls.gather, output, input), group, async_op)


def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Op = ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Merge ``input_list[r]`` of all ranks with ``op`` into the ``output`` of rank ``r``.

    ``input_list``: ``world`` tensors of one dtype, of the same sizes on every rank but not necessarily
    alike. ``output``: as many elements as ``input_list[rank]``. ``op``: ``SUM``, ``AVG``, ``PRODUCT``,
    ``MIN``, ``MAX`` and, for integers, ``BAND``, ``BOR``, ``BXOR``.
    Two ranks with ``[1] [2 3]`` and ``[10] [20 30]``: rank 0 gets ``[11]``, rank 1 ``[22 33]``.
    """
    return _run("reduce_scatter", partial(calls.reduce_list, output, input_list, op), group, async_op)


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Op = ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Merge the ``input`` of all ranks with ``op``; rank ``r`` gets the ``r``-th part of it.

    ``input``: ``[world * n, ...]`` or ``[world, n, ...]``, the same on every rank. ``output``: ``[n, ...]``.
    Two ranks with ``[1 2 3 4]`` and ``[10 20 30 40]``: rank 0 gets ``[11 22]``, rank 1 ``[33 44]``.
    """
    return _run("reduce_scatter_tensor", partial(calls.reduce_tensor, output, input, op), group, async_op)


def all_to_all(
    output_list: list[torch.Tensor],
    input_list: list[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Send ``input_list[r]`` to rank ``r`` and fill ``output_list[r]`` with what rank ``r`` sends here.

    Both lists hold ``world`` tensors of one dtype; what one rank sends has as many elements as the other
    expects. Two ranks with ``[1] [2 3]`` and ``[4 5] [6]``: rank 0 gets ``[1] [4 5]``, rank 1
    ``[2 3] [6]``.
    """
    return _run("all_to_all", partial(calls.to_all, output_list, input_list), group, async_op)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Split ``input`` by rows, send the ``r``-th part to rank ``r``, and concatenate what comes.

    Split sizes count rows (first dimension), one per rank; without them all parts have as many rows.
    Two ranks with ``[1 2 3]`` split 1, 2 and ``[4 5 6]`` split 2, 1: rank 0 gets ``[1 4 5]`` into output
    splits 1, 2 and rank 1 ``[2 3 6]`` into 2, 1.
    """
    build = partial(calls.to_all_single, output, input, output_split_sizes, input_split_sizes)
    return _run("all_to_all_single", build, group, async_op)


def _run(
    name: str, build: Callable[[Mailbox], Call], group: dist.ProcessGroup | None, async_op: bool
) -> Work | None:
    mailbox = _open_mailbox(group)
    if mailbox.rank < 0:
        warnings.warn(f"{name} called on a rank that does not belong to the given group", stacklevel=3)
        return None
    call: Call | None = None
    try:
        call = build(mailbox)
        claim = call.claim
    # Whatever it is, the others must hear of it, or they would wait for this rank until the time-out.
    except Exception as error:
        claim = _fault(str(error), mailbox.world)
    agreement = Agreement(mailbox, claim)
    moving = Pending()
    if call is not None and claim.posted:
        moving = call.by_messages(_EVERYTHING if async_op else WINDOW)
        count(call.movement, [_sent(claim, mailbox.rank)])

    def finish() -> None:
        try:
            agreement.settle(moving)
        except ValueError as refusal:
            raise ValueError(f"{name} {refusal}") from None
        moving.wait()

    if call is not None and not claim.posted:
        finish()
        count(call.movement, [_sent(claim, mailbox.rank)])
        return call.natively(group=mailbox.group, async_op=async_op)
    if async_op:
        return Background(finish)
    finish()
    return None


def _fault(text: str, world: int) -> Claim:
    return Claim((), [0] * world, [0] * world, lambda: text, fault=True)


def _sent(claim: Claim, rank: int) -> int:
    return sum(claim.sends) - claim.sends[rank]


def _open_mailbox(group: dist.ProcessGroup | None) -> Mailbox:
    """This rank's place in ``group`` (default: the world); alone without a process group."""
    if not dist.is_initialized():
        return Mailbox(None, rank=0, world=1)
    group = group or dist.group.WORLD
    rank = dist.get_rank(group)
    return Mailbox(group, rank, world=dist.get_world_size(group) if rank >= 0 else 0)


# What ``async_op=True`` returns.


class Work(Protocol):
    """A collective under way, as torch's own ``Work``: ours or the backend's."""

    def wait(self) -> bool:
        """Return once the results may be read; raise what went wrong."""

    def is_completed(self) -> bool:
        """Whether ``wait()`` would return at once."""


class Background:
    """Runs ``move`` in a thread of its own.

    gloo's messages do not say whether they have arrived except to a thread that waits for them, so the
    thread is what makes ``is_completed()`` true without a ``wait()``, and merges what arrives while the
    caller computes.
    """

    def __init__(self, move: Callable[[], None]) -> None:
        self._move: Callable[[], None] | None = move
        self._error: BaseException | None = None
        self._inference = torch.is_inference_mode_enabled()
        self._thread = Thread(target=self._run, name="shardtrain-collective", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        move, self._move = self._move, None
        assert move is not None, "a thread runs once"
        try:
            # Inference mode belongs to a thread, and tensors made in it may only be written in it.
            with torch.inference_mode(self._inference):
                move()
        except BaseException as error:
            self._error = error

    def wait(self) -> bool:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

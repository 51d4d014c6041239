"""The process-group transport: NCCL's own collectives, and on gloo point-to-point messages.

Gloo's own collectives take about twice as long as messages sent straight to the rank that needs them;
``messages.py`` tells how that goes.

On CUDA both movements run on a stream of their own. That stream waits for the compute stream when a
movement starts, and the compute stream waits for an event when its result is needed; until then whatever
the movement uses is held. So memory is allocated and freed in the compute stream's order alone,
``record_stream`` is not needed, and a host that is far ahead of the device takes no more memory than one
that is not: what a release gives back is at once there for the next gather, which the device starts later.
Gathers and reductions share the stream: one communicator runs one at a time anyway, in the order of starting.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from shardtrain.comm import native
from shardtrain.comm.arithmetic import merge
from shardtrain.comm.digests import Digests
from shardtrain.comm.messages import Mailbox, TagOf, start_exchange, start_reduce_scatter
from shardtrain.comm.meter import count
from shardtrain.comm.reports import Reports, meeting_tag, open_reports, tag_of
from shardtrain.comm.transport import Flat, Gradient, Pending, Tag, sent_by, staged
from shardtrain.layout import Layout


class Whole(NamedTuple):
    """A gradient as backends want it: own interval in place, and room of the same dtype for the mean."""

    full: torch.Tensor
    layout: Layout
    out: torch.Tensor
    interval: torch.Tensor  # where the mean belongs, ``out`` itself unless it has a wider dtype


Moved = TypeVar("Moved", Flat, Whole)

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class ProcessGroupTransport:
    """Movements between the ranks of ``group``."""

    in_place = False
    silent = False
    reserved = 0

    def __init__(self, group: dist.ProcessGroup, reports: Reports | None = None) -> None:
        # A model may outlive its group, and must not keep it: gloo's threads would live on with it.
        self._group = weakref.ref(group)
        self._reports = reports
        self._digests = Digests(group)
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.has_gloo = native.has_gloo(group)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise ValueError(
                "the process group over which this model was sharded has been destroyed; finish with the "
                "model before torch.distributed.destroy_process_group()"
            )
        return group

    @property
    def _mailbox(self) -> Mailbox:
        return Mailbox(self.group, self.rank, self.world)

    def peers(self) -> list[int]:
        return self._mailbox.peers()

    def allocate(
        self, layout: Layout, like: torch.Tensor, reduced: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return like.new_empty(layout.padded), like.new_empty(layout.length(self.rank))

    def gradient(self, layout: Layout, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(layout.padded)

    def discard(self, gradient: torch.Tensor) -> None:
        pass

    def fence(self, what: str) -> None:
        """Nothing here is shared, so nobody waits; steps are counted."""
        if self._reports is not None and what == "entering":
            self._reports.enter()
        self._digests.fence(what)

    def gather(self, tag: Tag, flats: Sequence[Flat]) -> Pending:
        count("all_gather", sum(flat.local.nbytes for flat in flats) * (self.world - 1))
        if self._by_messages([flat.full for flat in flats]):
            spread = [(flat.local, _intervals(flat.full, flat.layout)) for flat in flats]
            return self.spread(tag, spread)
        self._digests.add("gathering", tag)
        return self._start(self._gather_natively, flats, flats[0].full.device)

    def reduce(self, tag: Tag, gradients: Sequence[Gradient]) -> Pending:
        count("reduce_scatter", sum(sent_by(gradient, self.rank) for gradient in gradients))
        if self._by_messages([gradient.full for gradient in gradients]):
            return self.combine(tag, [self._parts(gradient) for gradient in gradients])
        self._digests.add("reducing", tag)
        native_ones = [self._whole(gradient) for gradient in gradients]
        return self._start(self._reduce_natively, native_ones, gradients[0].full.device)

    def exchange(
        self, tag: Tag, outgoing: torch.Tensor, sizes: Sequence[int], incoming: torch.Tensor
    ) -> Pending:
        """Start sending ``sizes[r]`` elements of ``outgoing`` to rank r, and filling ``incoming`` from all.

        Both are 1-D, in rank order; from every rank come equally many. This carries a reduction: whoever
        asks for that counts it.
        """
        if self._by_messages([outgoing, incoming]):
            parts, into = outgoing.split([*sizes]), incoming.chunk(self.world)
            return self._watched(
                "reducing", tag, lambda number: start_exchange(self._mailbox, _fixed(number), parts, into)
            )
        self._digests.add("reducing", tag)
        native.all_to_all(incoming, outgoing, sizes, self.group)
        return Pending()

    def staged(
        self, device: torch.device, start: Callable[[], Pending], finish: Callable[[], None]
    ) -> Pending:
        """``start`` a movement and ``finish`` it: by whoever waits, or on the communication stream."""
        if device.type != "cuda":
            return staged(start, finish)

        def both() -> None:
            start().wait()
            finish()

        return self._run(both, device)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> None:
        count("broadcast", tensor.nbytes * (self.world - 1) if self.rank == src else 0)
        with self._met("broadcasting", tensor):
            dist.broadcast(tensor, group=self.group, group_src=src)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        count("all_reduce", 2 * tensor.nbytes * (self.world - 1) // self.world)
        with self._met("all-reducing", tensor):
            dist.all_reduce(tensor, _OPS[op], group=self.group)

    def spread(
        self,
        tag: Tag,
        spread: Sequence[tuple[torch.Tensor, Sequence[torch.Tensor]]],
        members: Sequence[int] | None = None,
    ) -> Pending:
        """By messages: start sending each ``local`` to every rank and filling ``intervals`` from all ranks'.

        ``spread``: (``local``, ``intervals``) pairs. ``members``: only these ranks take part, of which there
        is an interval each; the other ranks spread among themselves under the same tag.
        """
        mailbox = self._mailbox_of(members)

        def start(number: int) -> Pending:
            moving = [
                start_exchange(mailbox, _fixed(number + index), [local] * len(intervals), intervals)
                for index, (local, intervals) in enumerate(spread)
            ]
            return _all(moving)

        return self._watched("gathering", tag, start)

    def combine(
        self, tag: Tag, sets: Sequence[list[torch.Tensor]], members: Sequence[int] | None = None
    ) -> Pending:
        """By messages: start sending ``parts[r]`` to rank r, and making this rank's own the mean over ranks.

        ``sets``: of each movement the ``parts``, one for each rank, or each of ``members``.
        """
        mailbox = self._mailbox_of(members)

        def start(number: int) -> Pending:
            moving = [
                start_reduce_scatter(mailbox, _fixed(number + index), parts, parts[mailbox.rank], _mean)
                for index, parts in enumerate(sets)
            ]
            return _all(moving)

        return self._watched("reducing", tag, start)

    def _mailbox_of(self, members: Sequence[int] | None) -> Mailbox:
        if members is None:
            return self._mailbox
        return Mailbox(self.group, members.index(self.rank), len(members), members)

    def _watched(self, kind: str, tag: Tag, start: Callable[[int], Pending]) -> Pending:
        """A movement made of messages, started with their tag, with an eye on where the other ranks are."""
        if self._reports is None:
            return start(tag_of(0, tag.number))
        position = self._reports.post(kind, tag)
        with self._reports.waiting(position):
            moving = start(tag_of(position, tag.number))
        return self._reports.watch(position, moving)

    @contextmanager
    def _met(self, kind: str, tensor: torch.Tensor) -> Iterator[None]:
        """In here the backend's own collective runs, which does not ask whether all ranks mean the same one.

        So they meet first, by messages that only those who do can exchange.
        """
        tag = Tag(tensor.nbytes, f"{tensor.nbytes} bytes")
        if self._reports is None:
            self._digests.add(kind, tag)
            yield
            return
        position = self._reports.post(kind, tag)
        number, token = meeting_tag(position, kind, tensor.nbytes), torch.zeros(self.world, 1)
        with self._reports.waiting(position):
            start_exchange(self._mailbox, _fixed(number), [token[self.rank]] * self.world, list(token)).wait()
            yield

    def _by_messages(self, fulls: Sequence[torch.Tensor]) -> bool:
        return self.has_gloo and all(full.device.type == "cpu" for full in fulls)

    def _parts(self, gradient: Gradient) -> list[torch.Tensor]:
        parts = _intervals(gradient.full, gradient.layout)
        parts[self.rank] = own_interval(gradient, self.rank)
        return parts

    def _gather_natively(self, flat: Flat) -> None:
        if flat.layout.equal:
            native.all_gather(flat.full, flat.local, self.group)
        else:
            native.all_gather_uneven(_intervals(flat.full, flat.layout), flat.local, self.group)

    def _whole(self, gradient: Gradient) -> Whole:
        interval = own_interval(gradient, self.rank)
        gradient.full[gradient.layout.interval(self.rank)].copy_(interval)
        return Whole(gradient.full, gradient.layout, interval.to(gradient.full.dtype), interval)

    def _reduce_natively(self, whole: Whole) -> None:
        full, layout, out, interval = whole
        op = dist.ReduceOp.AVG if full.device.type == "cuda" else dist.ReduceOp.SUM
        if layout.equal:
            native.reduce_scatter(out, full, self.group, op)
        else:
            native.reduce_scatter_uneven(out, _intervals(full, layout), self.group, op)
        if op == dist.ReduceOp.SUM:
            out.div_(self.world)
        if out is not interval:
            interval.copy_(out)

    def _start(
        self, movement: Callable[[Moved], None], items: Sequence[Moved], device: torch.device
    ) -> Pending:
        """Run ``movement`` on each item, on the communication stream or at once where there is none."""

        def all_of_them() -> None:
            for item in items:
                movement(item)

        return self._run(all_of_them, device)

    def _run(self, movements: Callable[[], None], device: torch.device) -> Pending:
        """Run ``movements``; on CUDA, on the communication stream.

        The result holds ``movements``, and so the memory that they use, until it is waited for: given back
        before, the compute stream would write to it while it is still on its way.
        """
        if device.type != "cuda":
            movements()
            return Pending()
        if device not in self._streams:
            # Of high priority, so that copies around a collective do not queue behind computation.
            self._streams[device] = torch.cuda.Stream(device, priority=-1)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            movements()
            done = stream.record_event()

        def finish(held: object = movements) -> None:
            torch.cuda.current_stream(device).wait_event(done)

        return Pending(finish)


def own_interval(gradient: Gradient, rank: int) -> torch.Tensor:
    """A new interval of rank ``rank`` with the values of ``gradient.own``, which then lies in it.

    Empty pieces stay as they are: on many ranks most are.
    """
    full, own, layout, pieces, _ = gradient
    dtype = own[0].dtype if own else full.dtype
    interval = full.new_empty(layout.length(rank), dtype=dtype)
    for index, piece in enumerate(pieces):
        if piece.numel:
            own[index] = interval[piece.offset : piece.offset + piece.numel].copy_(own[index])
    return interval


def _intervals(full: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    return [full[layout.interval(rank)] for rank in range(layout.world)]


def guarded(inner: ProcessGroupTransport) -> ProcessGroupTransport:
    """``inner``'s group with a guard over its messages. Collective; without gloo there are no messages."""
    if not inner.has_gloo:
        return inner
    return ProcessGroupTransport(inner.group, open_reports(inner.group, inner.peers()))


def _fixed(tag: int) -> TagOf:
    return lambda _: tag


def _mean(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    merge(parts, out, dist.ReduceOp.AVG)


def _all(moving: Sequence[Pending]) -> Pending:
    def finish() -> None:
        for pending in moving:
            pending.wait()

    return Pending(finish)

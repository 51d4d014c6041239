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

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from shardtrain.comm import native
from shardtrain.comm.arithmetic import merge
from shardtrain.comm.digests import Digests
from shardtrain.comm.messages import Mailbox, TagOf, start_exchange, start_reduce_scatter
from shardtrain.comm.meter import count
from shardtrain.comm.reports import Reports, meeting_tag, open_reports, tag_of
from shardtrain.comm.transport import Flat, Gradient, OneGroup, Pending, Tag, sent_by, staged
from shardtrain.layout import Layout, Piece


class Whole(NamedTuple):
    """A gradient as backends want it: own interval in place, and room of the same dtype for the mean."""

    full: torch.Tensor
    layout: Layout
    out: torch.Tensor
    interval: torch.Tensor  # where the mean belongs, ``out`` itself unless it has a wider dtype


class Interval(NamedTuple):
    """Values that are to be averaged in place; ``wire``: the dtype in which they move."""

    values: torch.Tensor
    wire: torch.dtype


Moved = TypeVar("Moved", Flat, Whole, Interval)

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class ProcessGroupTransport(OneGroup):
    """Movements between the ranks of ``group``, or a `part` of it."""

    in_place = False
    silent = False
    reserved = 0

    def __init__(self, group: dist.ProcessGroup, reports: Reports | None = None) -> None:
        # A model may outlive its group, and must not keep it: gloo's threads would live on with it.
        self._group = self._backend = weakref.ref(group)
        self._members: Sequence[int] | None = None  # of a part, their ranks in the group
        self._reports = reports
        self._digests = Digests(group)
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.has_gloo = native.has_gloo(group)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def part(self, members: Sequence[int], backend: dist.ProcessGroup | None = None) -> ProcessGroupTransport:
        """Movements between some ranks of the group, this one among them, under the group's guard.

        All ranks of the group make these movements alike, each within a part. Messages need no group of
        ``members``' own, the backend's collectives need ``backend``.
        """
        part = copy.copy(self)
        part._members = members
        part.rank, part.world = members.index(self.rank), len(members)
        part._backend = weakref.ref(self.group if backend is None else backend)
        return part

    @property
    def group(self) -> dist.ProcessGroup:
        return _living(self._group)

    @property
    def _mailbox(self) -> Mailbox:
        return Mailbox(self.group, self.rank, self.world, self._members)

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
        native.all_to_all(incoming, outgoing, sizes, _living(self._backend))
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

    def average(self, tag: Tag, intervals: Sequence[Interval]) -> Pending:
        """Start turning each interval, which every rank has, into its mean over ranks, alike on all."""
        sizes = [values.numel() * wire.itemsize for values, wire in intervals]
        count("all_reduce", sum(2 * size * (self.world - 1) // self.world for size in sizes))
        if not self._by_messages([values for values, _ in intervals]):
            self._digests.add("averaging", tag)
            return self._start(self._average_natively, intervals, intervals[0].values.device)
        return self._swap(tag, intervals) if self.world == 2 else self._average_by_messages(tag, intervals)

    def note(self, kind: str, tag: Tag) -> None:
        """Let the guard know of a movement that is made by other means."""
        if self._reports is not None:
            self._reports.post(kind, tag)
        else:
            self._digests.add(kind, tag)

    def telling(self) -> AbstractContextManager[None]:
        """In here this rank moves by means that may find others gone or astray: everyone is told of that."""
        return contextlib.nullcontext() if self._reports is None else self._reports.telling()

    def spread(
        self,
        tag: Tag,
        spread: Sequence[tuple[torch.Tensor, Sequence[torch.Tensor]]],
        kind: str = "gathering",
    ) -> Pending:
        """By messages: start sending each ``local`` to every rank and filling ``intervals`` from all ranks'.

        ``spread``: (``local``, ``intervals``) pairs. ``kind``: what the guard calls it.
        """
        mailbox = self._mailbox

        def start(number: int) -> Pending:
            moving = [
                start_exchange(mailbox, _fixed(number + index), [local] * len(intervals), intervals)
                for index, (local, intervals) in enumerate(spread)
            ]
            return _all(moving)

        return self._watched(kind, tag, start)

    def combine(self, tag: Tag, sets: Sequence[list[torch.Tensor]], kind: str = "reducing") -> Pending:
        """By messages: start sending ``parts[r]`` to rank r, and making this rank's own the mean over ranks.

        ``sets``: of each movement the ``parts``, one for each rank. ``kind``: what the guard calls it.
        """
        mailbox = self._mailbox

        def start(number: int) -> Pending:
            moving = [
                start_reduce_scatter(mailbox, _fixed(number + index), parts, parts[mailbox.rank], _mean)
                for index, parts in enumerate(sets)
            ]
            return _all(moving)

        return self._watched(kind, tag, start)

    def _swap(self, tag: Tag, intervals: Sequence[Interval]) -> Pending:
        """Two ranks send each other everything, which is as many bytes as halves twice, and one wait less."""
        sets = []
        for values, wire in intervals:
            sent = values.to(wire, copy=True)
            if wire != values.dtype:
                values.copy_(sent)  # so that both ranks add the same numbers
            sets.append([values, sent] if self.rank == 0 else [sent, values])
        return self.combine(tag, sets, "averaging")

    def _average_by_messages(self, tag: Tag, intervals: Sequence[Interval]) -> Pending:
        """Each rank makes the mean of its part of every interval, and sends it to the others."""
        moved = [values.to(wire) for values, wire in intervals]
        parts = [list(each.tensor_split(self.world)) for each in moved]
        own = [values.tensor_split(self.world)[self.rank] for values, _ in intervals]
        sets = [
            [*each[: self.rank], mine, *each[self.rank + 1 :]] for each, mine in zip(parts, own, strict=True)
        ]
        halfway = self.combine(tag, sets, "averaging")

        def finish() -> None:
            halfway.wait()
            for each, mine in zip(parts, own, strict=True):
                each[self.rank].copy_(mine)
            self.spread(tag, [(each[self.rank], each) for each in parts], "averaging").wait()
            for (values, _), all_parts in zip(intervals, moved, strict=True):
                values.copy_(all_parts)

        return Pending(finish)

    def _average_natively(self, interval: Interval) -> None:
        values, group = interval.values.to(interval.wire), _living(self._backend)
        on_cuda = values.device.type == "cuda"
        dist.all_reduce(values, dist.ReduceOp.AVG if on_cuda else dist.ReduceOp.SUM, group=group)
        interval.values.copy_(values if on_cuda else values.div_(self.world))

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
        assert self._members is None, "a part of a group moves by messages and between shards only"
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
        group = _living(self._backend)
        if flat.layout.equal:
            native.all_gather(flat.full, flat.local, group)
        else:
            native.all_gather_uneven(_intervals(flat.full, flat.layout), flat.local, group)

    def _whole(self, gradient: Gradient) -> Whole:
        interval = own_interval(gradient, self.rank)
        gradient.full[gradient.layout.interval(self.rank)].copy_(interval)
        return Whole(gradient.full, gradient.layout, interval.to(gradient.full.dtype), interval)

    def _reduce_natively(self, whole: Whole) -> None:
        full, layout, out, interval = whole
        group = _living(self._backend)
        op = dist.ReduceOp.AVG if full.device.type == "cuda" else dist.ReduceOp.SUM
        if layout.equal:
            native.reduce_scatter(out, full, group, op)
        else:
            native.reduce_scatter_uneven(out, _intervals(full, layout), group, op)
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


def _living(group: weakref.ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    found = group()
    if found is None:
        raise ValueError(
            "the process group over which this model was sharded has been destroyed; finish with the "
            "model before torch.distributed.destroy_process_group()"
        )
    return found


def own_interval(gradient: Gradient, rank: int) -> torch.Tensor:
    """The interval of rank ``rank`` with the values of ``gradient.own``, which lies in it, or does then.

    Empty pieces stay as they are: on many ranks most are.
    """
    full, own, layout, pieces, _ = gradient
    length = layout.length(rank)
    interval = _laid_out(own, pieces, length)
    if interval is not None:
        return interval
    interval = full.new_empty(length, dtype=own[0].dtype if own else full.dtype)
    for index, piece in enumerate(pieces):
        if piece.numel:
            own[index] = interval[piece.offset : piece.offset + piece.numel].copy_(own[index])
    return interval


def _laid_out(own: Sequence[torch.Tensor], pieces: Sequence[Piece], length: int) -> torch.Tensor | None:
    """The interval that the pieces are views of, if there is one that is alone in its memory."""
    held = [(part, piece.offset) for part, piece in zip(own, pieces, strict=True) if piece.numel]
    if not held or held[0][0].untyped_storage().nbytes() != length * held[0][0].element_size():
        return None
    first = held[0][0]
    memory = first.untyped_storage()._cdata
    if any(p.untyped_storage()._cdata != memory or p.storage_offset() != offset for p, offset in held):
        return None
    return first.as_strided((length,), (1,), 0)


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

"""The process-group transport: NCCL's own collectives, and on gloo point-to-point messages.

Gloo's own collectives take about twice as long as messages sent straight to the rank that needs them:
``messages.py`` has these, and ``reports.py`` guards them. ``native.py`` has the backend's own collectives,
which `Digests` guards.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
import torch.distributed as dist

from shardtrain.comm import native
from shardtrain.comm.arithmetic import merge
from shardtrain.comm.guard import Digests
from shardtrain.comm.messages import (
    Mailbox,
    TagOf,
    collective_tag,
    handshake_tag,
    segment_number,
    start_exchange,
    start_reduce_scatter,
)
from shardtrain.comm.meter import count
from shardtrain.comm.movement import ALL_REDUCE, BROADCAST, ENTER, GATHER, REDUCE, STEP, Movement
from shardtrain.comm.native import Backend, Streams, living
from shardtrain.comm.reports import Reports
from shardtrain.comm.transport import (
    Carrier,
    Flat,
    Gradient,
    Pending,
    Tag,
    all_of,
    intervals,
    pack_own,
    sent_by,
)

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class ProcessGroupTransport(Carrier):
    """Collectives between the ranks of ``group``, or a `part` of it."""

    def __init__(self, group: dist.ProcessGroup, reports: Reports | None = None) -> None:
        self._group = weakref.ref(group)
        self._members: Sequence[int] | None = None  # of a part, their ranks in the group
        self._reports = reports
        self._number = 0 if reports is None else reports.number  # in the tags of all messages
        self._digests = Digests(group)
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.has_gloo = native.has_gloo(group)
        self._backend = Backend(group, Streams())

    def part(self, members: Sequence[int], backend: dist.ProcessGroup | None = None) -> ProcessGroupTransport:
        """Return a transport between some ranks of the group, this one among them, under the group's guard.

        All ranks of the group make its collectives alike, each within a part. Messages need no group of
        ``members``' own, the backend's collectives need ``backend``.
        """
        part = copy.copy(self)
        part._members = members
        part.rank, part.world = members.index(self.rank), len(members)
        part._backend = self._backend if backend is None else self._backend.of(backend)
        return part

    @property
    def group(self) -> dist.ProcessGroup:
        return living(self._group)

    @property
    def _mailbox(self) -> Mailbox:
        return Mailbox(self.group, self.rank, self.world, self._members, self._reports is not None)

    def fence(self, what: Movement) -> None:
        """Count steps. No rank waits, because nothing is shared."""
        if what is STEP:
            self.note(STEP, Tag(0, "the optimizer"))
            return
        if self._reports is not None and what is ENTER:
            self._reports.paths.step += 1
        self._digests.fence(what)

    def gather(self, tag: Tag, flats: Sequence[Flat]) -> Pending:
        count(GATHER, (flat.local.nbytes * (self.world - 1) for flat in flats))
        if self.by_messages([flat.full for flat in flats]):
            return self.send_to_all(tag, [(flat.local, intervals(flat.full, flat.layout)) for flat in flats])
        return self.backend_for(GATHER, tag).gather(flats)

    def reduce(self, tag: Tag, gradients: Sequence[Gradient]) -> Pending:
        count(REDUCE, (sent_by(gradient, self.rank) for gradient in gradients))
        if self.by_messages([gradient.full for gradient in gradients]):
            return self.combine(tag, [self._parts(gradient) for gradient in gradients])
        return self.backend_for(REDUCE, tag).reduce(gradients)

    def exchange(
        self, tag: Tag, outgoing: torch.Tensor, sizes: Sequence[int], incoming: torch.Tensor
    ) -> Pending:
        if self.by_messages([outgoing, incoming]):
            parts, into = outgoing.split([*sizes]), incoming.chunk(self.world)
            return self._watched(
                REDUCE, tag, [partial(start_exchange, self._mailbox, outgoing=parts, incoming=into)]
            )
        return self.backend_for(REDUCE, tag).exchange(outgoing, sizes, incoming)

    def staged(
        self, device: torch.device, start: Callable[[], Pending], finish: Callable[[], None]
    ) -> Pending:
        return self._backend.staged(device, start, finish)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> None:
        count(BROADCAST, [tensor.nbytes * (self.world - 1) if self.rank == src else 0])
        with self._handshake(BROADCAST, tensor):
            dist.broadcast(tensor, group=self.group, group_src=src)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        count(ALL_REDUCE, [2 * tensor.nbytes * (self.world - 1) // self.world])
        with self._handshake(ALL_REDUCE, tensor):
            dist.all_reduce(tensor, _OPS[op], group=self.group)

    def note(self, kind: Movement, tag: Tag) -> None:
        if self._reports is not None:
            self._reports.post(kind, tag)
        else:
            self._digests.add(kind, tag)

    def sharing(self) -> AbstractContextManager[None]:
        return super().sharing() if self._reports is None else self._reports.sharing()

    def backend_for(self, kind: Movement, tag: Tag) -> Backend:
        """Return the backend's own collectives, for a collective that the guard then knows of."""
        self._digests.add(kind, tag)
        return self._backend

    def by_messages(self, fulls: Sequence[torch.Tensor]) -> bool:
        """Return whether ``fulls`` move by messages, not by the backend's own collectives."""
        return self.has_gloo and all(full.device.type == "cpu" for full in fulls)

    def send_to_all(
        self,
        tag: Tag,
        pairs: Sequence[tuple[torch.Tensor, Sequence[torch.Tensor]]],
        kind: Movement = GATHER,
    ) -> Pending:
        """By messages: start sending each ``local`` to every rank, and filling ``parts`` from all ranks'.

        ``pairs``: of ``local`` and ``parts``, one for each rank. ``kind``: what the guard calls it.
        """
        starts = [
            partial(start_exchange, self._mailbox, outgoing=[local] * len(parts), incoming=parts)
            for local, parts in pairs
        ]
        return self._watched(kind, tag, starts)

    def combine(self, tag: Tag, sets: Sequence[list[torch.Tensor]], kind: Movement = REDUCE) -> Pending:
        """By messages: start sending ``parts[r]`` to rank r, and making this rank's own the mean over ranks.

        ``sets``: of each segment the ``parts``, one for each rank. ``kind``: what the guard calls it.
        """
        mean = partial(merge, op=dist.ReduceOp.AVG)
        starts = [
            partial(start_reduce_scatter, self._mailbox, parts=parts, out=parts[self.rank], merge=mean)
            for parts in sets
        ]
        return self._watched(kind, tag, starts)

    def _watched(self, kind: Movement, tag: Tag, starts: Sequence[Callable[[TagOf], Pending]]) -> Pending:
        """Start the messages of every segment, each under a tag of its own, and guard them."""

        first = tag.number + self._number

        def tag_of(position: int, segment: int) -> TagOf:
            number = collective_tag(position, segment_number(first, segment))
            return lambda _: number

        def start(position: int) -> Pending:
            moving = [each(tag_of(position, index)) for index, each in enumerate(starts)]
            return all_of(moving)

        if self._reports is None:
            return start(0)
        position = self._reports.post(kind, tag)
        with self._reports.waiting(position):
            moving = start(position)
        return self._reports.watch(position, moving)

    @contextmanager
    def _handshake(self, kind: Movement, tensor: torch.Tensor) -> Iterator[None]:
        """Inside, all ranks call the same collective of the backend.

        Gloo does not check that. So all ranks exchange messages first, whose tags only meet where it is so.
        """
        assert self._members is None, "a part of a group moves by messages and between shards only"
        tag = Tag(tensor.nbytes, f"{tensor.nbytes} bytes")
        if self._reports is None:
            self._digests.add(kind, tag)
            yield
            return
        position = self._reports.post(kind, tag)
        handshake = handshake_tag(position, kind.doing, tensor.nbytes + self._number)
        token = torch.zeros(self.world, 1)
        with self._reports.waiting(position):
            parts = [token[self.rank]] * self.world
            start_exchange(self._mailbox, lambda _: handshake, parts, list(token)).wait()
            yield

    def _parts(self, gradient: Gradient) -> list[torch.Tensor]:
        parts = intervals(gradient.full, gradient.layout)
        parts[self.rank] = pack_own(gradient, self.rank)
        return parts

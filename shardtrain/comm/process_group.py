"""Move bytes over a process group: by NCCL's own collectives, on gloo by point-to-point messages.

Messages are in ``messages.py``, guarded by ``reports.py``, and the backend's own collectives in
``native.py``, guarded by a hash of each rank's path.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain.comm import native
from shardtrain.comm.arithmetic import merge
from shardtrain.comm.guard import Paths
from shardtrain.comm.messages import Mailbox, collective_tag, start_exchange, start_reduce_scatter
from shardtrain.comm.native import Backend, living
from shardtrain.comm.reports import Reports
from shardtrain.comm.trace import ALL_REDUCE, AVERAGE, BROADCAST, ENTER, GATHER, REDUCE, STEP, Movement, count
from shardtrain.comm.transport import Flat, Gradient, Interval, Move, Pending, Transport, intervals

_guards: weakref.WeakKeyDictionary[dist.ProcessGroup, Reports] = weakref.WeakKeyDictionary()


def guard_world() -> None:
    """Guard collectives outside of models, too, if the default process group has gloo. Collective."""
    group = dist.group.WORLD
    if group is not None and group.size() > 1 and native.has_gloo(group):
        _guards[group] = Reports(group)


class ProcessGroupTransport(Transport):
    """Run collectives between the ranks of ``group``, or between those of a `part` of it."""

    def __init__(self, group: dist.ProcessGroup, reports: Reports | None = None) -> None:
        reports = reports or _guards.get(group)  # a model has its own
        self.reports = reports
        self._group = weakref.ref(group)
        self._members: Sequence[int] | None = None  # of a part, its ranks' numbers in the group
        self.rank = dist.get_rank(group)
        self._paths = Paths(self.rank, ()) if reports is None else reports.paths
        self._paths.untagged |= reports is None
        self._post = self._paths.add if reports is None else reports.post
        self.world = dist.get_world_size(group)
        self.has_gloo = native.has_gloo(group)
        self._device_types = native.device_types(group)
        self._backend = Backend(group)

    def part(self, members: Sequence[int], backend: dist.ProcessGroup | None = None) -> ProcessGroupTransport:
        """Return a transport between the ranks ``members`` of the group, this one included, with its guard.

        All ranks of the group make the same collectives, each within its part. ``backend``: a process group
        of the members, for the backend's own collectives; messages need none.
        """
        part = copy.copy(self)
        part._members = members
        part.rank = members.index(self.rank)
        part.world = len(members)
        part._backend = self._backend if backend is None else Backend(backend)
        return part

    @property
    def group(self) -> dist.ProcessGroup:
        return living(self._group)

    @property
    def _mailbox(self) -> Mailbox:
        return Mailbox(self.group, self.rank, self.world, self._members, self.reports is not None)

    def fence(self, what: Movement, name: str = "the model") -> None:
        """Count steps. No rank waits for shared memory; see `Paths.compare_hashes`."""
        if what is STEP:
            self._post(STEP, name)
        elif what is ENTER:
            self._paths.step += 1
        else:
            self._paths.compare_hashes(self.group)

    def gather(self, name: str, flats: Sequence[Flat]) -> Pending:
        count(GATHER, (flat.sent for flat in flats))
        if self.by_messages([f.full for f in flats]):
            return self.send_to_all(name, [(f.local, intervals(f.full, f.layout)) for f in flats])
        return self.backend_for(GATHER, name).gather(flats)

    def reduce(self, name: str, gradients: Sequence[Gradient]) -> Pending:
        count(REDUCE, (gradient.sent_by(self.rank) for gradient in gradients))
        by_tree = any(each.terms for each in gradients)
        if not by_tree and not self.by_messages([each.full for each in gradients]):
            return self.backend_for(REDUCE, name).reduce(gradients)
        return self.combine(name, [self._parts(each) for each in gradients], terms=gradients[0].terms)

    def average(self, name: str, intervals: Sequence[Interval], after: Pending, terms: int) -> Pending:
        sizes = [values.numel() * wire.itemsize for values, wire in intervals]
        count(AVERAGE, (2 * size * (self.world - 1) // self.world for size in sizes))
        if not (terms or self.by_messages([values for values, _ in intervals])):
            return self.backend_for(AVERAGE, name).average(intervals, after)
        return self._average_in_two_stages(name, intervals, terms)

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        count(BROADCAST, [tensor.nbytes * (self.world - 1) if self.rank == src else 0])
        target = tensor.detach()
        dense = target.contiguous()
        # As bytes, since gloo does not know all dtypes: neither int16 nor fp8.
        with self._handshake(BROADCAST, dense.view(-1).view(torch.uint8)) as moved:
            dist.broadcast(moved, group=self.group, group_src=src)
        if dense is not target:
            target.copy_(dense)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        count(ALL_REDUCE, [2 * tensor.nbytes * (self.world - 1) // self.world])
        with self._handshake(ALL_REDUCE, tensor) as moved:
            dist.all_reduce(moved, getattr(dist.ReduceOp, op.upper()), group=self.group)

    def backend_for(self, kind: Movement, name: str) -> Backend:
        """Return the backend's own collectives, after adding this one, which carries no tag, to the path."""
        self._paths.untagged = True
        self._post(kind, name)
        return self._backend

    def by_messages(self, fulls: Sequence[Tensor]) -> bool:
        """Return whether ``fulls`` are sent as messages, not by the backend's own collectives."""
        return self.has_gloo and all(full.is_cpu for full in fulls)

    def send_to_all(
        self, name: str, vectors: Sequence[tuple[Tensor, Sequence[Tensor]]], kind: Movement = GATHER
    ) -> Pending:
        """Start sending each ``local`` to every rank, and filling ``parts`` from all ranks'.

        ``vectors``: for each segment ``local``, and its ``parts``, one per rank. ``kind``: its name for the
        guard.
        """
        moves = [([local] * self.world, parts) for local, parts in vectors]
        return self._exchange(kind, name, moves, [])

    def combine(
        self,
        name: str,
        sets: Sequence[list[Tensor]],
        kind: Movement = REDUCE,
        terms: int = 0,
    ) -> Pending:
        """Start sending ``parts[r]`` to rank r, and turning ``parts[rank]`` into the mean.

        ``sets``: for each segment the ``parts``, one per rank. ``kind``: as above. ``terms``: as of
        `Gradient`.
        """
        op = dist.ReduceOp.AVG
        if self.by_messages([parts[0] for parts in sets]):
            start = partial(start_reduce_scatter, op=op, terms=terms)
            return self._watched(
                kind, name, [partial(start, parts=parts, out=parts[self.rank]) for parts in sets]
            )
        moves = list[Move]()
        steps = list[Callable[[], None]]()
        for parts in sets:
            mean = parts[self.rank]
            like = parts[self.rank - 1]
            incoming = [mean if r == self.rank else like.new_empty(len(mean)) for r in range(self.world)]
            moves.append((parts, incoming))
            steps.append(partial(merge, incoming, mean, op, terms))
        return self._exchange(kind, name, moves, steps)

    def _exchange(
        self, kind: Movement, name: str, moves: Sequence[Move], steps: Sequence[Callable[[], None]]
    ) -> Pending:
        """Start ``moves``; ``steps`` complete their results."""
        if self.by_messages([outgoing[0] for outgoing, _ in moves]):
            starts = [partial(start_exchange, outgoing=a, incoming=b) for a, b in moves]
            moving = self._watched(kind, name, starts)
        else:
            moving = self.backend_for(kind, name).exchange(moves)
        return Pending(moving.wait, *steps)

    def _watched(
        self, kind: Movement, name: str, starts: Sequence[Callable[[Mailbox, int], Pending]]
    ) -> Pending:
        """Start the messages of every segment, each with its own tag, under the guard."""
        reports = self.reports
        mailbox = self._mailbox
        position = self._post(kind, name)
        tags = [collective_tag(position, self._paths.digest, index) for index in range(len(starts))]
        with nullcontext() if reports is None else reports.waiting(position):
            waits = [start(mailbox, each).wait for start, each in zip(starts, tags, strict=True)]
        return Pending(*waits) if reports is None else reports.watch(position, Pending(*waits))

    @contextmanager
    def _handshake(self, kind: Movement, tensor: Tensor) -> Iterator[Tensor]:
        """Make sure that all ranks call the same collective of the backend, on the yielded tensor.

        Gloo does not check that, so ranks first exchange messages, whose tags match only if the calls do.
        The yielded tensor is ``tensor``, or a copy of it on a device that the backend supports.
        """
        assert self._members is None, "a part of a group moves by messages and between shards only"
        moved = tensor if tensor.device.type in self._device_types else tensor.to(self._device_types[0])
        name = f"{tensor.nbytes} bytes"
        if self.reports is None:
            self._post(kind, name)
            yield moved
        else:
            token = torch.zeros(self.world, 1)
            self.send_to_all(name, [(token[self.rank], list(token))], kind).wait()
            with self.reports.waiting(self._paths.end - 1):
                yield moved
        if moved is not tensor:
            tensor.copy_(moved)

    def _average_in_two_stages(self, name: str, intervals: Sequence[Interval], terms: int) -> Pending:
        """Average a part of every interval on each rank, which then sends it to the others."""
        moved = [values.to(wire) for values, wire in intervals]
        parts = [list(each.tensor_split(self.world)) for each in moved]
        own = [values.tensor_split(self.world)[self.rank] for values, _ in intervals]
        pairs = zip(parts, own, strict=True)
        sets = [[*each[: self.rank], mine, *each[self.rank + 1 :]] for each, mine in pairs]

        def finish() -> None:
            for each, mine in zip(parts, own, strict=True):
                each[self.rank].copy_(mine)
            self.send_to_all(name, [(each[self.rank], each) for each in parts], AVERAGE).wait()
            for (values, _), all_parts in zip(intervals, moved, strict=True):
                values.copy_(all_parts)

        return self.combine(name, sets, AVERAGE, terms).then(finish)

    def _parts(self, gradient: Gradient) -> list[Tensor]:
        parts = intervals(gradient.full, gradient.layout)
        parts[self.rank] = gradient.pack_own(self.rank)
        return parts

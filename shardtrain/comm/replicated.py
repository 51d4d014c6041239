"""Hybrid sharding (HSDP): several shard groups, each with a whole copy of the model, train as one.

A rank exchanges parameters inside its shard group only. Gradients are averaged there first. Then the ranks
with the same interval, a *replica group*, average that. Two replicas of two ranks, intervals ``[a b]``::

    replica 0    rank 0  owns a    rank 1  owns b
    replica 1    rank 2  owns a    rank 3  owns b

    gather   ranks 0 and 1 by themselves, ranks 2 and 3 by themselves
    reduce   rank 0: (a0 + a1) / 2, rank 2: (a2 + a3) / 2; then both the mean of the two, to the same bits

Shard groups are equally large, so a mean of means is the mean over all ranks. Of K bytes in all, a rank of S
in a group sends (S-1)/S * K inside it, and of its interval, K/S, 2 (R-1)/R across R replicas.

Where a group shares memory, messages across travel while the next unit computes. Where it exchanges messages,
the second stage begins when the first is waited for; on an accelerator it has a stream of its own. On gloo
there is one guard for all ranks: they make the same collectives, whichever group they are in.

After Zhao et al., 2023, https://arxiv.org/abs/2304.11277, 3.2.2.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardtrain import device
from shardtrain.comm.meter import count
from shardtrain.comm.process_group import ProcessGroupTransport
from shardtrain.comm.trace import AVERAGE, Movement
from shardtrain.comm.transport import Flat, Gradient, Interval, Pending, Tag, Transport, TransportWrapper


class Replicated(TransportWrapper):
    """Collectives ``inside`` a shard group and ``across`` the replicas, under the guard of ``all_ranks``."""

    def __init__(
        self, inside: Transport, across: ReplicaGroup, all_ranks: Transport, primary_ranks: Sequence[int]
    ) -> None:
        super().__init__(inside)
        self.across, self._guard, self._primary_ranks = across, all_ranks, primary_ranks
        self.silent = across.silent

    @property
    def all_ranks(self) -> Transport:
        return self._guard

    @property
    def primary_ranks(self) -> Sequence[int]:
        return self._primary_ranks

    def gather(self, tag: Tag, flats: Sequence[Flat]) -> Pending:
        return self.inner.gather(tag, flats)

    def reduce(self, tag: Tag, gradients: Sequence[Gradient]) -> Pending:
        moving = self.inner.reduce(tag, gradients)
        if self.in_place:
            moving.wait()
        elif not device.on_accelerator(gradients[0].full):
            return Pending(moving.wait, lambda: self._average(tag, gradients, moving).wait())
        return self._average(tag, gradients, moving)

    def fence(self, what: Movement) -> None:
        (self.inner if self.world > 1 else self._guard).fence(what)

    def _average(self, tag: Tag, gradients: Sequence[Gradient], after: Pending) -> Pending:
        intervals = [Interval(each.pack_own(self.rank), each.full.dtype) for each in gradients]
        return self.across.average(tag, intervals, after)


class ReplicaGroup:
    """The ranks of ``part``, one of each replica, which hold the same interval."""

    silent = False

    def __init__(self, part: ProcessGroupTransport) -> None:
        self.part = part

    def average(self, tag: Tag, intervals: Sequence[Interval], after: Pending) -> Pending:
        """Start turning each interval, which ``after`` makes on every rank, into its mean over ranks."""
        sizes = [values.numel() * wire.itemsize for values, wire in intervals]
        count(AVERAGE, (2 * size * (self.part.world - 1) // self.part.world for size in sizes))
        if not self.part.by_messages([values for values, _ in intervals]):
            return self.part.backend_for(AVERAGE, tag).average(intervals, after)
        return self._swap(tag, intervals) if self.part.world == 2 else self._in_two_stages(tag, intervals)

    def _swap(self, tag: Tag, intervals: Sequence[Interval]) -> Pending:
        """Let two ranks send each other everything: as many bytes as halves twice, and one wait less."""
        sets = []
        for values, wire in intervals:
            sent = values.to(wire, copy=True)
            if wire != values.dtype:
                values.copy_(sent)  # so that both ranks add the same numbers
            sets.append([values, sent] if self.part.rank == 0 else [sent, values])
        return self.part.combine(tag, sets, AVERAGE)

    def _in_two_stages(self, tag: Tag, intervals: Sequence[Interval]) -> Pending:
        """Let each rank average its part of every interval, and send it to the others."""
        rank, world = self.part.rank, self.part.world
        moved = [values.to(wire) for values, wire in intervals]
        parts = [list(each.tensor_split(world)) for each in moved]
        own = [values.tensor_split(world)[rank] for values, _ in intervals]
        sets = [[*each[:rank], mine, *each[rank + 1 :]] for each, mine in zip(parts, own, strict=True)]

        def finish() -> None:
            for each, mine in zip(parts, own, strict=True):
                each[rank].copy_(mine)
            self.part.send_to_all(tag, [(each[rank], each) for each in parts], AVERAGE).wait()
            for (values, _), all_parts in zip(intervals, moved, strict=True):
                values.copy_(all_parts)

        return Pending(self.part.combine(tag, sets, AVERAGE).wait, finish)

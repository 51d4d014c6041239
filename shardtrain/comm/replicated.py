"""Several shard groups, each with a whole copy of the model: replicas that are trained as one.

A rank exchanges parameters inside its shard group only. Gradients are averaged there first, so that each rank
has the mean of its own interval; then ranks with the same interval, a column, average that. Two replicas of
two ranks, intervals ``[a b]``::

    replica 0    rank 0  owns a    rank 1  owns b
    replica 1    rank 2  owns a    rank 3  owns b

    gather   ranks 0 and 1 by themselves, ranks 2 and 3 by themselves
    reduce   rank 0: (a0 + a1) / 2, rank 2: (a2 + a3) / 2; then both the mean of the two, to the same bits

Shard groups are equally large, so a mean of means is the mean over everyone. Of K bytes in all, a rank of S
in a group sends (S-1)/S * K inside it as ever, and of its interval, K/S, 2 (R-1)/R across R replicas.

Where a group shares memory, means are made inside it at once and messages across travel while the next unit
computes; on CUDA both stages follow one another on the communication stream. Between processes that exchange
messages inside the group, too, the second stage is not hidden: it begins when the first is asked for.

On gloo there is one guard for everyone: all ranks make the same movements, whichever group they are in.

The scheme is hybrid sharding (Zhao et al., 2023, https://arxiv.org/abs/2304.11277, 3.2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from shardtrain.comm.intervals import pack_own
from shardtrain.comm.transport import Around, Flat, Gradient, Interval, Pending, Ranks, Tag, Transport


class Across(Protocol):
    """A `Column` of ranks, one of each replica, that hold the same interval."""

    silent: bool

    def average(self, tag: Tag, intervals: Sequence[Interval]) -> Pending:
        """Start turning each interval, which every rank has, into its mean over ranks, alike on all."""


class Everyone(Ranks, Protocol):
    """All ranks, and their guard: see `ProcessGroupTransport`."""

    def note(self, kind: str, tag: Tag) -> None: ...

    def telling(self) -> AbstractContextManager[None]: ...

    def fence(self, what: str) -> None: ...


class Replicated(Around):
    """Movements ``inside`` a shard group and ``across`` the replicas, with an eye on ``everyone``."""

    def __init__(
        self, inside: Transport, across: Across, everyone: Everyone, speakers: Sequence[int]
    ) -> None:
        super().__init__(inside)
        self.across, self._guard = across, everyone
        self.everyone, self.speakers = everyone, speakers
        self.silent = across.silent

    def gather(self, tag: Tag, flats: Sequence[Flat]) -> Pending:
        if self.in_place:
            self._guard.note("gathering", tag)
        with self._guard.telling():
            return self.inner.gather(tag, flats)

    def reduce(self, tag: Tag, gradients: Sequence[Gradient]) -> Pending:
        if self.in_place:
            self._guard.note("reducing", tag)
            with self._guard.telling():
                self.inner.reduce(tag, gradients).wait()
            return self._average(tag, gradients)
        moving = self.inner.reduce(tag, gradients)
        if gradients[0].full.device.type == "cuda":
            return self._average(tag, gradients)  # behind it in the same stream

        def finish() -> None:
            moving.wait()
            self._average(tag, gradients).wait()

        return Pending(finish)

    def fence(self, what: str) -> None:
        self._guard.fence(what)
        if self.in_place and self.world > 1:
            self._guard.note(what, Tag(0, "the model"))
            with self._guard.telling():
                self.inner.fence(what)

    def _average(self, tag: Tag, gradients: Sequence[Gradient]) -> Pending:
        intervals = [Interval(pack_own(each, self.rank), each.full.dtype) for each in gradients]
        return self.across.average(tag, intervals)

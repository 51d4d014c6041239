"""Ranks of several hosts: shared memory inside a host, messages between hosts.

Each host holds one copy of every full vector, shared by its ranks. Ranks at the same place on their hosts
form a *column*, and only they exchange messages. Two hosts of two ranks, intervals ``[a b c d]``::

    host 0   rank 0  owns a        column 0: ranks 0 and 2, intervals a and c
             rank 1  owns b        column 1: ranks 1 and 3, intervals b and d
    host 1   rank 2  owns c
             rank 3  owns d

    gather   rank 0 sends a to rank 2, which receives it into host 1's vector, and so on; the vector is
             complete when every rank of the host has received from its column
    reduce   rank 0 averages a and c over its host's gradients, sends c to rank 2, and averages its own a
             with what rank 2 sends

So every interval reaches a host once, however many ranks it has, and the bytes between two hosts are those
of two ranks. A mean of means rounds otherwise than a sum in rank order: the bits are the same in every run
on such hosts, but may differ from those of one host in the last place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardtrain.comm.guard import PeerLost
from shardtrain.comm.meter import count
from shardtrain.comm.movement import GATHER, REDUCE, Movement
from shardtrain.comm.process_group import ProcessGroupTransport
from shardtrain.comm.shared_memory import Offer, SharedMemoryTransport
from shardtrain.comm.signals import Signals
from shardtrain.comm.transport import Flat, Gradient, Pending, Tag, pack_own, sent_by


class HostsTransport(SharedMemoryTransport):
    """Collectives between the ranks of hosts that have equally many; ``inner`` is guarded."""

    def __init__(
        self, inner: ProcessGroupTransport, signals: Signals, hosts: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(inner, signals)
        place = self.host.index(self.rank)
        self._column = [ranks[place] for ranks in hosts]
        self._between = inner.part(self._column)

    def reduce(self, tag: Tag, gradients: Sequence[Gradient]) -> Pending:
        """Average over the host at once, so that messages travel while the next unit computes."""
        count(REDUCE, (sent_by(gradient, self.rank) for gradient in gradients))
        with self.inner.sharing():
            turns = self._offered(tag, gradients)
            sets = [self._host_means(offer, gradient) for turn in turns for offer, gradient in turn]
        moving = self._between.combine(tag, sets)
        return Pending(lambda: self._wait_for(moving))

    def _host_means(self, offer: Offer, gradient: Gradient) -> list[torch.Tensor]:
        """Return the host's means of the column's intervals, in its order."""
        others = [gradient.layout.interval(rank) for rank in self._column if rank != self.rank]
        means = self._average(offer, gradient, others)
        means.insert(self._column.index(self.rank), pack_own(gradient, self.rank))
        return means

    def fence(self, what: Movement) -> None:
        self.inner.fence(what)
        with self.inner.sharing():
            super().fence(what)

    def _gather_in_place(self, tag: Tag, flats: Sequence[Flat]) -> Pending:
        position = self.signals.post(GATHER, tag.number, tag.name)
        pairs = [(flat.local, [flat.full[flat.layout.interval(r)] for r in self._column]) for flat in flats]
        moving = self._between.send_to_all(tag, pairs)

        def finish() -> None:
            self._wait_for(moving)
            with self.inner.sharing():
                self.signals.done(position)
                self.signals.wait_done(position)

        return Pending(finish)

    def _meet(self, kind: Movement, number: int, name: str) -> None:
        """All hosts meet, in ``inner``."""

    def _wait_for(self, moving: Pending) -> None:
        """Wait for messages. If another host is gone, perhaps because this one diverged: that comes first."""
        try:
            moving.wait()
        except PeerLost:
            self.signals.compare()
            raise

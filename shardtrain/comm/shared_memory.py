"""Share memory between CPU ranks of one host, or of several hosts with messages between them.

The full flat vector of a unit exists once per host, and every rank maps it. A rank's interval *is* that part
of the vector. So a gather moves nothing, and what the optimizer writes to an interval is what the others read
in the next forward. Two barriers keep owners from writing while others read::

    entering forward            every rank has left its optimizer step, so all intervals are final
    leaving forward, backward   every rank has finished reading, so owners may write again

Gradients are collected in an arena: memory of each rank that all others map. To reduce a unit, a rank posts
where in its arena the unit's gradient lies, and waits for the posts of all ranks. Then it averages its
interval directly from all arenas: each gradient is written once and read once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from shardtrain.comm.arithmetic import merge, merge_pieces
from shardtrain.comm.process_group import ProcessGroupTransport
from shardtrain.comm.signals import Signals
from shardtrain.comm.trace import ENTER, GATHER, REDUCE, STEP, Movement, count
from shardtrain.comm.transport import Flat, Gradient, Pending, TransportWrapper
from shardtrain.layout import Layout

_ALIGN = 64  # bytes of a cache line, so that no two ranks write to the same one


class Arena:
    """Allocate a rank's memory for gradients (uint8, 1-D), first fit.

    It is far larger than ever used: pages that nobody has written take no physical memory.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._used: dict[int, int] = {}  # offset → bytes

    def take(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Allocate a vector."""
        size, start = _aligned(elements * dtype.itemsize), 0
        for offset, used in sorted(self._used.items()):
            if offset - start >= size:
                break
            start = offset + used
        assert start + size <= self.memory.numel(), "a unit has one gradient, and one that others still read"
        self._used[start] = size
        return self.memory[start : start + elements * dtype.itemsize].view(dtype)

    def free(self, tensor: Tensor) -> None:
        del self._used[self.offset_of(tensor)]

    def offset_of(self, tensor: Tensor) -> int:
        """Return the offset of ``tensor``, which lies in this arena. An empty one has no address."""
        offset = int(tensor.storage_offset()) * tensor.itemsize
        assert offset in self._used, "`Transport.gradient` gave it"
        return offset


def _aligned(size: int) -> int:
    """Return ``size`` rounded up to ``_ALIGN``, and not to 0, since offsets must differ."""
    return max(1, -(-size // _ALIGN)) * _ALIGN


class View(NamedTuple):
    """View another rank's gradient, and this rank's pieces of it. ``layout``: kept, since its id is a key."""

    full: Tensor
    pieces: list[Tensor]
    layout: Layout


class SharedMemoryTransport(TransportWrapper):
    """Run collectives between ranks that share memory; ``inner``, guarded, moves what is not shared.

    ``signals`` connects the ranks of this host. ``host``: their numbers, ascending.
    """

    def __init__(self, inner: ProcessGroupTransport, signals: Signals) -> None:
        super().__init__(inner)
        self.in_place, self.sends, self.signals = True, False, signals
        self.host = sorted([signals.rank, *(peer.rank for peer in signals.peers)])
        self._largest = self._size = 0  # bytes of the largest gradient, and of all
        self._arena: Arena | None = None  # see `_open_arena`
        self._theirs: dict[int, Tensor] = {}  # every other rank's arena memory
        self._unread: dict[int, Tensor] = {}  # by position, gradients that others may still read
        self._views: dict[object, View] = {}  # kept, since gradients lie in few places

    @property
    def reserved(self) -> int:
        """Bytes of this rank's arena that a step usually uses: three times the largest gradient."""
        return 3 * self._largest

    def allocate(self, layout: Layout, like: Tensor, reduced: torch.dtype) -> tuple[Tensor, Tensor]:
        if like.is_meta:
            full = like.new_empty(layout.padded)
        elif like.device.type != "cpu":
            raise ValueError(f"transport='shared_memory' needs parameters on the CPU, got {like.device}")
        else:
            while self._unread:
                self._free_oldest()
            self._arena = None
            size = _aligned(layout.padded * reduced.itemsize)
            self._largest, self._size = max(self._largest, size), self._size + size
            full = self.signals.share(self.host[0], layout.padded * like.element_size()).view(like.dtype)
        return full, full[layout.interval(self.rank)]

    def gradient(self, layout: Layout, like: Tensor) -> Tensor:
        arena = self._open_arena()
        while self._unread and self.signals.is_done(next(iter(self._unread))):
            self._free_oldest()
        return arena.take(layout.padded, like.dtype)

    def discard(self, gradient: Tensor) -> None:
        self._open_arena().free(gradient)

    def gather(self, name: str, flats: Sequence[Flat]) -> Pending:
        if any(full.untyped_storage()._cdata != local.untyped_storage()._cdata for full, local, _ in flats):
            return self.inner.gather(name, flats)
        count(GATHER, (flat.sent for flat in flats))
        return self._gather_in_place(name, flats)

    def reduce(self, name: str, gradients: Sequence[Gradient]) -> Pending:
        count(REDUCE, (gradient.sent_by(self.rank) for gradient in gradients))
        offered = zip(self._offer(name, gradients), gradients, strict=True)
        return Pending(*[partial(self._average, *each) for each in offered])

    def fence(self, what: Movement) -> None:
        """Wait until every rank of the host is at the same barrier; do not wait at ``STEP``."""
        if what is STEP:
            self.signals.post(STEP, "the optimizer")
            return
        self.inner.fence(what)
        if what is ENTER:
            self._open_arena()  # here, since it is collective: not every rank needs every gradient
        self.signals.wait(self.signals.post(what, "the model"))

    def _gather_in_place(self, name: str, flats: Sequence[Flat]) -> Pending:
        self.signals.post(GATHER, name)
        return Pending()

    def _offer(self, name: str, gradients: Sequence[Gradient]) -> list[int]:
        """Post to the other ranks where each of ``gradients`` lies. Return the collectives' positions."""
        positions = []
        for gradient in gradients:
            offset = self._open_arena().offset_of(gradient.full)
            positions.append(self.signals.post(REDUCE, name, offset))
        return positions

    def _average(self, position: int, gradient: Gradient, others: Sequence[slice] = ()) -> list[Tensor]:
        """Wait for all ranks' gradients, and turn ``own`` into the mean over the host.

        Returns the means of the intervals ``others``, each a new tensor of ``full``'s dtype.
        """
        offsets, mine = self.signals.wait(position), self.host.index(self.signals.rank)
        views = [self._view(rank, offset, gradient) for rank, offset in sorted(offsets.items())]
        own = [part for part, piece in zip(gradient.own, gradient.pieces, strict=True) if piece.numel]
        pieces, fulls = [view.pieces for view in views], [view.full for view in views]
        pieces.insert(mine, own)
        fulls.insert(mine, gradient.full)
        merge_pieces(pieces, mine, gradient.terms)
        means = []
        for span in others:
            means.append(torch.empty_like(gradient.full[span]))
            merge([full[span] for full in fulls], means[-1], ReduceOp.AVG, gradient.terms)
        self.signals.done(position)
        self._unread[position] = gradient.full
        return means

    def _view(self, rank: int, offset: int, gradient: Gradient) -> View:
        """Return rank ``rank``'s gradient, which lies at ``offset`` in its arena."""
        full, layout = gradient.full, gradient.layout
        key = rank, offset, full.dtype, id(layout)
        if key not in self._views:
            theirs = self._theirs[rank][offset : offset + full.nbytes].view(full.dtype)
            mine = theirs[layout.interval(self.rank)]
            pieces = [mine[at : at + stop - start] for start, stop, at in gradient.pieces if start < stop]
            self._views[key] = View(theirs, pieces, layout)
        return self._views[key]

    def _free_oldest(self) -> None:
        position = next(iter(self._unread))
        self.signals.wait_done(position)
        self._open_arena().free(self._unread.pop(position))

    def _open_arena(self) -> Arena:
        """Return this rank's arena. Collective the first time: in the first forward, when sizes are known.

        It has room for two gradients of each unit, since others may still read one, and as much again for
        fragmentation.
        """
        if self._arena is None:
            self._theirs = {owner: self.signals.share(owner, 4 * self._size) for owner in self.host}
            self._arena = Arena(self._theirs.pop(self.signals.rank))
            self._views.clear()
        return self._arena


class HostsTransport(SharedMemoryTransport):
    """Share memory inside a host, and send messages between hosts of equally many ranks.

    Each host holds one copy of every full vector. Ranks with the same index on their hosts form a *column*,
    and only they exchange messages. Two hosts of two ranks, intervals ``[a b c d]``::

        host 0   rank 0  owns a        column 0: ranks 0 and 2, intervals a and c
                 rank 1  owns b        column 1: ranks 1 and 3, intervals b and d
        host 1   rank 2  owns c
                 rank 3  owns d

        gather   rank 0 sends a to rank 2, which receives it into host 1's vector, and so on; the vector is
                 complete when every rank of the host has received from its column
        reduce   rank 0 averages a and c over its host's gradients, sends c to rank 2, and averages its own
                 a with what rank 2 sends

    So every interval reaches a host once, however many ranks it has: two hosts exchange as many bytes as two
    ranks. If each host has a power of two of ranks that follow one another, the mean of its means is the mean
    of one host bit for bit in fp32: they sum in one tree (``arithmetic.py``), and dividing by a power of two
    is exact, except for numbers that underflow. Other hosts, and narrower dtypes, may differ in the last bit.
    """

    def __init__(
        self, inner: ProcessGroupTransport, signals: Signals, hosts: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(inner, signals)
        place = self.host.index(self.rank)
        self._column = [ranks[place] for ranks in hosts]
        self._between, self.sends, self.stages = inner.part(self._column), True, hosts
        self._gathers: deque[Pending] = deque()  # under way, the oldest first

    def reduce(self, name: str, gradients: Sequence[Gradient]) -> Pending:
        """Average over the host at once, so that messages travel while the next unit computes."""
        count(REDUCE, (gradient.sent_by(self.rank) for gradient in gradients))
        offered = zip(self._offer(name, gradients), gradients, strict=True)
        sets = [self._host_means(*each) for each in offered]
        return self._between.combine(name, sets, terms=gradients[0].terms)

    def _host_means(self, position: int, gradient: Gradient) -> list[Tensor]:
        """Return the host's means of the column's intervals, in the column's order."""
        others = [gradient.layout.interval(rank) for rank in self._column if rank != self.rank]
        means = self._average(position, gradient.of_a_stage(), others)
        means.insert(self._column.index(self.rank), gradient.pack_own(self.rank))
        return means

    def _gather_in_place(self, name: str, flats: Sequence[Flat]) -> Pending:
        position = self.signals.post(GATHER, name)
        vectors = [
            (flat.local, [flat.full[flat.layout.interval(rank)] for rank in self._column]) for flat in flats
        ]
        done, wait_done = (partial(act, position) for act in (self.signals.done, self.signals.wait_done))
        gather = self._between.send_to_all(name, vectors).then(done).then(wait_done)
        self._gathers.append(gather)

        def finish() -> None:
            # All ranks of the host wait in one order, even if one takes another path through the units.
            while gather in self._gathers:
                self._gathers.popleft().wait()

        return Pending(finish)

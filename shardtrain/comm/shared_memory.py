"""The shared-memory transport, for CPU ranks of one host, or of several hosts with messages between them.

The full flat vector of a unit exists once per host, and every rank maps it. A rank's interval *is* that part
of the vector. So a gather moves nothing, and what the optimizer writes to an interval is what the others read
in the next forward. Two fences keep writers from readers::

    entering forward            every rank has left its optimizer step, so all intervals are final
    leaving forward, backward   every rank is through, so owners may write again

Gradients are collected in an arena: memory of each rank that all others map. To reduce a unit, a rank says
where in its arena the unit's gradient lies, and waits until all have said so. Then it averages its interval
straight from everyone's arena, in rank order: each gradient is written once and read once.

Memory comes from ``memfd_create``. It has no name in any file system, so nothing is left behind however a
rank ends, and the size of ``/dev/shm`` does not matter.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch.distributed import ReduceOp

from shardtrain.comm.arithmetic import merge
from shardtrain.comm.guard import PeerLost
from shardtrain.comm.messages import segment_number
from shardtrain.comm.meter import count
from shardtrain.comm.movement import ALL_REDUCE, BROADCAST, COPY, ENTER, GATHER, REDUCE, STEP, Movement
from shardtrain.comm.process_group import ProcessGroupTransport
from shardtrain.comm.signals import Signals
from shardtrain.comm.transport import Flat, Gradient, Pending, Tag, Transport, is_in_place, pack_own, sent_by
from shardtrain.layout import Layout

_ALIGN = 64  # bytes; a cache line, so that no two ranks write to the same one


class Offer(NamedTuple):
    """A gradient that the other ranks may read.

    ``position``: of the collective that offers it. ``offset``: where in the arena it lies.
    """

    position: int
    offset: int


class Arena:
    """Part ``[low, high)`` of a rank's memory for gradients, given out first fit; uint8, 1-D."""

    def __init__(self, memory: torch.Tensor, low: int, high: int) -> None:
        self.memory = memory
        self._low, self._high = low, high
        self._used: dict[int, int] = {}  # offset → bytes

    def take(self, size: int) -> int | None:
        """Return the offset of ``size`` free bytes, or None."""
        size = _aligned(size)
        start = self._low
        for offset, used in sorted(self._used.items()):
            if offset - start >= size:
                break
            start = offset + used
        if start + size > self._high:
            return None
        self._used[start] = size
        return start

    def give_back(self, offset: int | None) -> None:
        if offset is not None:
            self._used.pop(offset, None)

    def view(self, offset: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return self.memory[offset : offset + elements * dtype.itemsize].view(dtype)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Return where ``tensor`` lies in this arena; None if elsewhere."""
        offset = tensor.data_ptr() - self.memory.data_ptr()
        return offset if offset in self._used else None


def _aligned(size: int) -> int:
    """Return the bytes that ``size`` bytes take: some even for none, since offsets must differ."""
    return max(1, -(-size // _ALIGN)) * _ALIGN


class SharedMemoryTransport(Transport):
    """Collectives between ranks that share memory; what is not shared goes through ``inner``.

    ``signals`` connects the ranks of this host, and gives them their numbers: those in ``host``.
    """

    in_place = True

    def __init__(self, inner: ProcessGroupTransport, signals: Signals) -> None:
        self.inner, self.signals = inner, signals
        self.rank, self.world = inner.rank, inner.world
        self.host = sorted([signals.rank, *(peer.rank for peer in signals.peers)])
        signals.board = self._share(signals.board.nbytes, self.host[0]).view(signals.board.dtype)
        self._largest = 0  # bytes of the largest gradient
        self._arenas: tuple[Arena, Arena] | None = None  # see `_open_arenas`
        self._theirs: dict[int, torch.Tensor] = {}  # every other rank's arena memory
        self._unread: list[Offer] = []  # averaged here, but not yet read by all

    @property
    def reserved(self) -> int:
        """Bytes of this rank's arenas: room for three of the largest gradients."""
        return 3 * _aligned(self._largest)

    def allocate(
        self, layout: Layout, like: torch.Tensor, reduced: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if like.is_meta:
            full = like.new_empty(layout.padded)
        elif like.device.type != "cpu":
            raise ValueError(f"transport='shared_memory' needs parameters on the CPU, got {like.device}")
        else:
            if layout.padded * reduced.itemsize > self._largest:
                self._largest = layout.padded * reduced.itemsize
                while self._unread:
                    self._free_oldest()
                self._arenas = None
            full = self._share(layout.padded * like.element_size(), self.host[0]).view(like.dtype)
        return full, full[layout.interval(self.rank)]

    def gradient(self, layout: Layout, like: torch.Tensor) -> torch.Tensor:
        """Give memory from the arena if there is room, else private memory."""
        arena, _ = self._open_arenas()
        while self._unread and self.signals.is_done(self._unread[0].position):
            self._free_oldest()
        offset = arena.take(layout.padded * like.element_size())
        if offset is None:
            return like.new_empty(layout.padded)
        return arena.view(offset, layout.padded, like.dtype)

    def discard(self, gradient: torch.Tensor) -> None:
        arena, _ = self._open_arenas()
        arena.give_back(arena.offset_of(gradient))

    def gather(self, tag: Tag, flats: Sequence[Flat]) -> Pending:
        if not is_in_place(flats):
            self._meet(COPY, tag.number, tag.name)
            return self.inner.gather(tag, flats)
        count(GATHER, (flat.local.nbytes * (self.world - 1) for flat in flats))
        return self._gather_in_place(tag, flats)

    def reduce(self, tag: Tag, gradients: Sequence[Gradient]) -> Pending:
        count(REDUCE, (sent_by(gradient, self.rank) for gradient in gradients))
        turns = self._offered(tag, gradients)
        first = next(turns)

        def finish() -> None:
            for offer, gradient in chain(first, chain.from_iterable(turns)):
                self._average(offer, gradient)

        return Pending(finish)

    def fence(self, what: Movement) -> None:
        """Return when every rank of the host is at the same fence."""
        if what is STEP:
            self.signals.post(STEP, 0, "the optimizer")
            return
        if what is ENTER:
            self.signals.paths.step += 1
            self._open_arenas()  # all ranks come here alike; not all of them ask for a unit's first gradient
        self._wait_at(what, 0, "the model")

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> None:
        self._meet(BROADCAST, tensor.nbytes, f"{tensor.nbytes} bytes")
        self.inner.broadcast(tensor, src)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        self._meet(ALL_REDUCE, tensor.nbytes, f"{tensor.nbytes} bytes")
        self.inner.all_reduce(tensor, op)

    def _gather_in_place(self, tag: Tag, flats: Sequence[Flat]) -> Pending:
        self.signals.post(GATHER, tag.number, tag.name)
        return Pending()

    def _meet(self, kind: Movement, number: int, name: str) -> None:
        """Return when every rank is at the same collective, which the group itself does not check."""
        self._wait_at(kind, number, name)

    def _wait_at(self, kind: Movement, number: int, name: str) -> None:
        self.signals.wait(self.signals.post(kind, number, name))

    def _offered(self, tag: Tag, gradients: Sequence[Gradient]) -> Iterator[list[tuple[Offer, Gradient]]]:
        """Offer ``gradients`` to the other ranks, in turns: the next turn once this one has been averaged.

        Those of one turn may all have to be copied, and there is room for copies of the largest. Sizes alone
        decide, so all ranks offer the same ones together. Nearly always one turn has all of them.
        """
        turn: list[tuple[Offer, Gradient]] = []
        room = _aligned(self._largest)
        for index, gradient in enumerate(gradients):
            size = _aligned(gradient.full.nbytes)
            if turn and size > room:
                yield turn
                turn, room = [], _aligned(self._largest)
            room -= size
            offset = self._in_arena(gradient.full)
            number = segment_number(tag.number, index)
            turn.append((Offer(self.signals.post(REDUCE, number, tag.name, offset), offset), gradient))
        yield turn

    def _average(self, offer: Offer, gradient: Gradient, others: Sequence[slice] = ()) -> list[torch.Tensor]:
        """Turn ``own`` into the mean over the host, once all ranks offer theirs.

        Returns the means of the intervals ``others`` too, each in new memory and of ``full``'s dtype.
        """
        full, own, layout, pieces, _ = gradient
        flats = {
            rank: self._theirs[rank][offset : offset + full.nbytes].view(full.dtype)
            for rank, offset in self.signals.wait(offer.position).items()
        }
        begin = layout.bounds[self.rank]
        for mine, piece in zip(own, pieces, strict=True):
            span = slice(begin + piece.offset, begin + piece.offset + piece.numel)
            parts = [flats[rank][span] if rank in flats else mine for rank in self.host]
            merge(parts, mine, ReduceOp.AVG)
        flats[self.signals.rank] = full
        means = []
        for span in others:
            parts = [flats[rank][span] for rank in self.host]
            means.append(torch.empty_like(parts[0]))
            merge(parts, means[-1], ReduceOp.AVG)
        self.signals.done(offer.position)
        self._unread.append(offer)
        return means

    def _in_arena(self, full: torch.Tensor) -> int:
        """Return the offset of a gradient in this rank's memory; copy it there if it lies elsewhere."""
        arena, copies = self._open_arenas()
        offset = arena.offset_of(full)
        if offset is not None:
            return offset
        while (offset := copies.take(full.nbytes)) is None:
            self._free_oldest()  # then there is room for all of a turn
        copies.view(offset, full.numel(), full.dtype).copy_(full)
        return offset

    def _free_oldest(self) -> None:
        offer = self._unread.pop(0)
        self.signals.wait_done(offer.position)
        for arena in self._open_arenas():
            arena.give_back(offer.offset)

    def _open_arenas(self) -> tuple[Arena, Arena]:
        """Return where gradients are collected, and where one is copied that was collected elsewhere.

        Collective the first time: in the first forward, when all sizes are known.
        """
        if self._arenas is None:
            memories = {owner: self._share(self.reserved, owner) for owner in self.host}
            own, third = memories.pop(self.signals.rank), self.reserved // 3
            self._arenas = Arena(own, third, 3 * third), Arena(own, 0, third)
            self._theirs = memories
        return self._arenas

    def _share(self, size: int, owner: int) -> torch.Tensor:
        """Return ``size`` bytes that ``owner`` makes and every rank of the host maps; uint8."""
        handle = os.memfd_create("shardtrain") if self.signals.rank == owner else None
        try:
            if handle is not None:
                os.ftruncate(handle, max(size, 1))
            handle = self.signals.share(owner, handle, size, f"{size} bytes")
            memory = mmap.mmap(handle, max(size, 1))
        finally:
            if handle is not None:
                os.close(handle)
        return torch.frombuffer(memory, dtype=torch.uint8)[:size]


class HostsTransport(SharedMemoryTransport):
    """Shared memory inside a host, messages between hosts of equally many ranks; ``inner`` is guarded.

    Each host holds one copy of every full vector. Ranks at the same place on their hosts form a *column*, and
    only they exchange messages. Two hosts of two ranks, intervals ``[a b c d]``::

        host 0   rank 0  owns a        column 0: ranks 0 and 2, intervals a and c
                 rank 1  owns b        column 1: ranks 1 and 3, intervals b and d
        host 1   rank 2  owns c
                 rank 3  owns d

        gather   rank 0 sends a to rank 2, which receives it into host 1's vector, and so on; the vector is
                 complete when every rank of the host has received from its column
        reduce   rank 0 averages a and c over its host's gradients, sends c to rank 2, and averages its own
                 a with what rank 2 sends

    So every interval reaches a host once, however many ranks it has, and the bytes between two hosts are
    those of two ranks. A mean of means rounds otherwise than a sum in rank order: the bits are the same in
    every run on such hosts, but may differ from those of one host in the last place.
    """

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
        self.signals.send(position)  # other hosts wait for this rank meanwhile
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

"""The shared-memory transport, for CPU ranks of one host.

A rank's interval *is* that part of the full vector, which all ranks of the host share (``host_memory.py``):
a gather moves nothing, and the optimizer's update of an interval is what the others read in the next
forward. Two fences keep writers from readers::

    entering forward            every rank has left its optimizer step, so all intervals are final
    leaving forward, backward   every rank is through, so owners may write again

A reduction waits until all ranks offer their gradients, and each averages its own interval of them.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed import ReduceOp

from shardtrain.comm.arithmetic import merge
from shardtrain.comm.messages import segment_number
from shardtrain.comm.meter import count
from shardtrain.comm.movement import ALL_REDUCE, BROADCAST, COPY, ENTER, GATHER, REDUCE, SHARE, Movement
from shardtrain.comm.process_group import ProcessGroupTransport
from shardtrain.comm.signals import Signals
from shardtrain.comm.transport import Flat, Gradient, OneGroup, Pending, Tag, is_in_place, sent_by
from shardtrain.layout import Layout


class SharedMemoryTransport(OneGroup):
    """Movements between ranks that share memory; what is not shared goes through ``inner``."""

    in_place = True
    silent = False

    def __init__(self, inner: ProcessGroupTransport, memory: HostMemory) -> None:
        self.inner = inner
        self.memory = memory
        self.rank, self.world = inner.rank, inner.world

    @property
    def reserved(self) -> int:
        return self.memory.reserved

    def allocate(
        self, layout: Layout, like: torch.Tensor, reduced: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        full = self.memory.vector(layout, like, reduced)
        return full, full[layout.interval(self.rank)]

    def gradient(self, layout: Layout, like: torch.Tensor) -> torch.Tensor:
        return self.memory.gradient(layout, like)

    def discard(self, gradient: torch.Tensor) -> None:
        self.memory.discard(gradient)

    def gather(self, tag: Tag, flats: Sequence[Flat]) -> Pending:
        if not is_in_place(flats):
            self._meet(COPY, tag.number, tag.name)
            return self.inner.gather(tag, flats)
        count(GATHER, (flat.local.nbytes * (self.world - 1) for flat in flats))
        return self._gather_in_place(tag, flats)

    def reduce(self, tag: Tag, gradients: Sequence[Gradient]) -> Pending:
        count(REDUCE, (sent_by(gradient, self.rank) for gradient in gradients))
        first, *later = self.memory.turns(tag, gradients)
        offers = self.memory.offer(first)

        def finish() -> None:
            self._average(first, offers)
            for turn in later:
                self._average(turn, self.memory.offer(turn))

        return Pending(finish)

    def _average(self, turn: Sequence[Numbered], offers: Sequence[Offer]) -> None:
        for (_, gradient), offer in zip(turn, offers, strict=True):
            self.memory.average(offer, gradient, gradient.layout.interval(self.rank))

    def fence(self, what: Movement) -> None:
        self.memory.fence(what)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> None:
        self._meet(BROADCAST, tensor.nbytes, f"{tensor.nbytes} bytes")
        self.inner.broadcast(tensor, src)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        self._meet(ALL_REDUCE, tensor.nbytes, f"{tensor.nbytes} bytes")
        self.inner.all_reduce(tensor, op)

    def _gather_in_place(self, tag: Tag, flats: Sequence[Flat]) -> Pending:
        self.memory.signals.post(GATHER, tag.number, tag.name)
        return Pending()

    def _meet(self, kind: Movement, number: int, name: str) -> None:
        """Return when every rank means to make the same movement, which the group itself does not ask."""
        signals = self.memory.signals
        signals.wait(signals.post(kind, number, name))


# What the ranks of one host share: the flat vectors of their units, and each other's gradients.
#
# The full flat vector of a unit exists once per host, and every rank maps it. Gradients come together in an
# arena, memory of each rank that all others map. To reduce a unit, a rank says where in its arena the unit's
# gradient lies, waits until all have said so, and adds up what it answers for straight from everyone's arena,
# in rank order: each gradient is written once and read once.
#
# Memory comes from ``memfd_create``: it has no name in any file system, so nothing is left behind however a
# rank ends, and the size of ``/dev/shm`` does not matter.

_ALIGN = 64  # bytes; a cache line, so that no two ranks write to the same one


class Offer(NamedTuple):
    """A gradient that the other ranks may read: the movement that says so, and where it lies."""

    position: int
    offset: int


class Numbered(NamedTuple):
    """A gradient of a movement, with a number of its own."""

    tag: Tag
    gradient: Gradient


class Arena:
    """Part ``[low, high)`` of a rank's memory for gradients, given out first fit; uint8, 1-D."""

    def __init__(self, memory: torch.Tensor, low: int, high: int) -> None:
        self.memory = memory
        self._low, self._high = low, high
        self._used: dict[int, int] = {}  # offset → bytes

    def take(self, size: int) -> int | None:
        """The offset of ``size`` free bytes, or None."""
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

    def give_back(self, offset: int) -> None:
        self._used.pop(offset, None)

    def view(self, offset: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return self.memory[offset : offset + elements * dtype.itemsize].view(dtype)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Where ``tensor`` lies in this arena; None if elsewhere."""
        offset = tensor.data_ptr() - self.memory.data_ptr()
        return offset if offset in self._used else None


def _aligned(size: int) -> int:
    """The bytes that ``size`` bytes take: something even for nothing, since offsets must differ."""
    return max(1, -(-size // _ALIGN)) * _ALIGN


class HostMemory:
    """This rank's view of what its host shares. Ranks have the numbers that `signals` gives them."""

    def __init__(self, signals: Signals) -> None:
        self.signals = signals
        self.ranks = sorted([signals.rank, *(peer.rank for peer in signals.peers)])
        self._largest = 0  # bytes of the largest gradient
        self._collecting: Arena | None = None  # where gradients come together
        self._launching: Arena | None = None  # where one is copied that came together elsewhere
        self._theirs: dict[int, torch.Tensor] = {}  # every other rank's arena memory
        self._unread: list[Offer] = []  # not yet read by all

    @property
    def reserved(self) -> int:
        """Bytes of this rank's arenas: room for three of the largest gradients."""
        return 3 * _aligned(self._largest)

    def vector(self, layout: Layout, like: torch.Tensor, reduced: torch.dtype) -> torch.Tensor:
        """A full vector that all ranks of the host share; see `Transport.allocate`."""
        if like.is_meta:
            return like.new_empty(layout.padded)
        if like.device.type != "cpu":
            raise ValueError(f"transport='shared_memory' needs parameters on the CPU, got {like.device}")
        if layout.padded * reduced.itemsize > self._largest:
            self._largest = layout.padded * reduced.itemsize
            self._close_arenas()
        return self._share(layout.padded * like.element_size(), self.ranks[0]).view(like.dtype)

    def gradient(self, layout: Layout, like: torch.Tensor) -> torch.Tensor:
        """From the arena if there is room, else private memory."""
        arena, _ = self._open_arenas()
        while self._unread and self.signals.is_done(self._unread[0].position):
            self._free_oldest()
        offset = arena.take(layout.padded * like.element_size())
        if offset is None:
            return like.new_empty(layout.padded)
        return arena.view(offset, layout.padded, like.dtype)

    def discard(self, gradient: torch.Tensor) -> None:
        arena, _ = self._open_arenas()
        offset = arena.offset_of(gradient)
        if offset is not None:
            arena.give_back(offset)

    def fence(self, what: Movement) -> None:
        """Return when every rank of the host is at the same fence."""
        if what is ENTER:
            self.signals.paths.step += 1
            self._open_arenas()  # all ranks come here alike; not all of them ask for a unit's first gradient
        self.signals.wait(self.signals.post(what, 0, "the model"))

    def turns(self, tag: Tag, gradients: Sequence[Gradient]) -> list[list[Numbered]]:
        """``gradients`` in turns: those of one may all have to be copied, and there is room for the largest.

        Sizes alone decide, so all ranks offer the same ones together. Nearly always that is all of them.
        """
        turns: list[list[Numbered]] = []
        room = 0
        for index, gradient in enumerate(gradients):
            size = _aligned(gradient.full.nbytes)
            if not turns or size > room:
                turns.append([])
                room = _aligned(self._largest)
            room -= size
            turns[-1].append(Numbered(tag._replace(number=segment_number(tag.number, index)), gradient))
        return turns

    def offer(self, turn: Sequence[Numbered]) -> list[Offer]:
        """Let the other ranks read each ``full``. What this rank offered before, it has averaged."""
        offsets = [self._in_arena(gradient.full) for _, gradient in turn]
        return [
            Offer(self.signals.post(REDUCE, tag.number, tag.name, offset), offset)
            for (tag, _), offset in zip(turn, offsets, strict=True)
        ]

    def average(
        self, offer: Offer, gradient: Gradient, interval: slice, others: Sequence[slice] = ()
    ) -> list[torch.Tensor]:
        """Turn ``own``, which lies at ``interval``, into the mean over the host when all offer theirs.

        Returns the means of the intervals ``others`` too, each in new memory and of ``full``'s dtype.
        """
        full, own, _, pieces, _ = gradient
        flats = {
            rank: self._theirs[rank][offset : offset + full.nbytes].view(full.dtype)
            for rank, offset in self.signals.wait(offer.position).items()
        }
        for mine, piece in zip(own, pieces, strict=True):
            start = interval.start + piece.offset
            span = slice(start, start + piece.numel)
            parts = [flats[rank][span] if rank in flats else mine for rank in self.ranks]
            merge(parts, mine, ReduceOp.AVG)
        flats[self.signals.rank] = full
        means = []
        for span in others:
            parts = [flats[rank][span] for rank in self.ranks]
            means.append(torch.empty_like(parts[0]))
            merge(parts, means[-1], ReduceOp.AVG)
        self.signals.done(offer.position)
        self._unread.append(offer)
        return means

    def _in_arena(self, full: torch.Tensor) -> int:
        """The offset of a gradient in this rank's memory, moving it there if it came together elsewhere."""
        collecting, launching = self._open_arenas()
        offset = collecting.offset_of(full)
        if offset is not None:
            return offset
        while (offset := launching.take(full.nbytes)) is None:
            self._free_oldest()  # then there is room for all of a turn
        launching.view(offset, full.numel(), full.dtype).copy_(full)
        return offset

    def _free_oldest(self) -> None:
        offer = self._unread.pop(0)
        self.signals.wait_done(offer.position)
        for arena in self._open_arenas():
            arena.give_back(offer.offset)

    def _open_arenas(self) -> tuple[Arena, Arena]:
        """This rank's two arenas. Collective when opened: in the first forward, when all sizes are known."""
        if self._collecting is None or self._launching is None:
            memories = {owner: self._share(self.reserved, owner) for owner in self.ranks}
            own, third = memories.pop(self.signals.rank), self.reserved // 3
            self._collecting, self._launching = Arena(own, third, 3 * third), Arena(own, 0, third)
            self._theirs = memories
        return self._collecting, self._launching

    def _close_arenas(self) -> None:
        while self._unread:
            self._free_oldest()
        self._collecting = self._launching = None

    def _share(self, size: int, owner: int) -> torch.Tensor:
        """``size`` bytes that ``owner`` makes and every rank of the host maps; uint8."""
        position = self.signals.post(SHARE, size, f"{size} bytes", owner)
        self.signals.wait(position)  # nobody waits for memory that the owner does not mean to give
        if self.signals.rank == owner:
            handle = os.memfd_create("shardtrain")
            os.ftruncate(handle, max(size, 1))
            for peer in self.signals.peers:
                socket.send_fds(peer.handles, [b"m"], [handle])
        else:
            handle = self.signals.receive_handle(owner, position)
        memory = mmap.mmap(handle, max(size, 1))
        os.close(handle)
        return torch.frombuffer(memory, dtype=torch.uint8)[:size]

"""The shared-memory transport, for CPU ranks of one host.

The full flat vector of a unit exists once per host. Every rank maps it, and a rank's interval *is* that
part of it: a gather moves nothing, and the optimizer's update of an interval is what the others read in
the next forward. Two fences keep writers from readers::

    entering forward            every rank has left its optimizer step, so all intervals are final
    leaving forward, backward   every rank is through, so owners may write again

Gradients come together in an arena, memory of each rank that all others map. To reduce a unit, a rank
says where in its arena the unit's gradient lies, waits until all have said so, and adds up its own
interval straight from everyone's arena, in rank order: each gradient is written once and read once.

Memory comes from ``memfd_create``: it has no name in any file system, so nothing is left behind however a
rank ends, and the size of ``/dev/shm`` does not matter.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed import ReduceOp

from shardtrain.comm.arithmetic import merge
from shardtrain.comm.meter import count
from shardtrain.comm.process_group import ProcessGroupTransport
from shardtrain.comm.signals import Signals, connect
from shardtrain.comm.transport import Flat, Gradient, Pending, Tag, sent_by
from shardtrain.layout import Layout

_ALIGN = 64  # bytes; a cache line, so that no two ranks write to the same one


class Arena:
    """Part ``[low, high)`` of a rank's memory for gradients, given out first fit; uint8, 1-D."""

    def __init__(self, memory: torch.Tensor, low: int, high: int) -> None:
        self.memory = memory
        self._low, self._high = low, high
        self._used: dict[int, int] = {}  # offset → bytes

    def take(self, size: int) -> int | None:
        """The offset of ``size`` free bytes, or None."""
        size = max(1, -(-size // _ALIGN)) * _ALIGN  # something even for nothing: offsets must differ
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


class SharedMemoryTransport:
    """Movements between ranks that share memory; what is not shared goes through ``inner``."""

    in_place = True

    def __init__(self, inner: ProcessGroupTransport, signals: Signals) -> None:
        self.inner = inner
        self.rank, self.world = inner.rank, inner.world
        self._signals = signals
        self._largest = 0  # bytes of the largest gradient
        self._collecting: Arena | None = None  # where gradients come together
        self._launching: Arena | None = None  # where one is copied that came together elsewhere
        self._theirs: dict[int, torch.Tensor] = {}  # every other rank's arena memory
        self._unread: list[tuple[int, int]] = []  # (position, arena offset) not yet read by all

    def allocate(
        self, layout: Layout, like: torch.Tensor, reduced: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if like.is_meta:
            full = like.new_empty(layout.padded)
            return full, full[layout.interval(self.rank)]
        if like.device.type != "cpu":
            raise ValueError(f"transport='shared_memory' needs parameters on the CPU, got {like.device}")
        if layout.padded * reduced.itemsize > self._largest:
            self._largest = layout.padded * reduced.itemsize
            self._close_arenas()
        full = self._share(layout.padded * like.element_size(), owner=0).view(like.dtype)
        return full, full[layout.interval(self.rank)]

    def gradient(self, layout: Layout, like: torch.Tensor) -> torch.Tensor:
        """From the arena if there is room, else private memory."""
        arena, _ = self._open_arenas()
        while self._unread and self._signals.is_done(self._unread[0][0]):
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

    def gather(self, tag: Tag, flats: Sequence[Flat]) -> Pending:
        if any(
            flat.full.untyped_storage().data_ptr() != flat.local.untyped_storage().data_ptr()
            for flat in flats
        ):
            self._signals.wait(self._signals.post("copying", tag.number, tag.name))
            return self.inner.gather(tag, flats)
        count("all_gather", sum(flat.local.nbytes for flat in flats) * (self.world - 1))
        self._signals.post("gathering", tag.number, tag.name)
        return Pending()

    def reduce(self, tag: Tag, gradients: Sequence[Gradient]) -> Pending:
        count("reduce_scatter", sum(sent_by(gradient, self.rank) for gradient in gradients))
        offsets = [self._in_arena(gradient.full) for gradient in gradients]
        positions = [
            self._signals.post("reducing", tag.number + index, tag.name, offset)
            for index, offset in enumerate(offsets)
        ]

        def finish() -> None:
            for position, offset, gradient in zip(positions, offsets, gradients, strict=True):
                self._add_up(position, gradient)
                self._unread.append((position, offset))

        return Pending(finish)

    def _add_up(self, position: int, gradient: Gradient) -> None:
        full, own, layout, pieces = gradient
        theirs = self._signals.wait(position)
        flats = {
            rank: self._theirs[rank][offset : offset + full.nbytes].view(full.dtype)[
                layout.interval(self.rank)
            ]
            for rank, offset in theirs.items()
        }
        for mine, piece in zip(own, pieces, strict=True):
            span = slice(piece.offset, piece.offset + piece.numel)
            parts = [flats[rank][span] if rank in flats else mine for rank in range(self.world)]
            merge(parts, mine, ReduceOp.AVG)
        self._signals.done(position)

    def fence(self, what: str) -> None:
        if what == "entering":
            self._signals.paths.step += 1
            self._open_arenas()  # all ranks come here alike; not all of them ask for a unit's first gradient
        self._signals.wait(self._signals.post(what, 0, "the model"))

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> None:
        self._signals.wait(self._signals.post("broadcasting", tensor.nbytes, f"{tensor.nbytes} bytes"))
        self.inner.broadcast(tensor, src)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        self._signals.wait(self._signals.post("all-reducing", tensor.nbytes, f"{tensor.nbytes} bytes"))
        self.inner.all_reduce(tensor, op)

    def _in_arena(self, full: torch.Tensor) -> int:
        """The offset of a gradient in this rank's memory, moving it there if it came together elsewhere."""
        collecting, launching = self._open_arenas()
        offset = collecting.offset_of(full)
        if offset is not None:
            return offset
        while (offset := launching.take(full.nbytes)) is None:
            self._free_oldest()  # only reductions under way are there, and it holds the largest
        launching.view(offset, full.numel(), full.dtype).copy_(full)
        return offset

    def _free_oldest(self) -> None:
        position, offset = self._unread.pop(0)
        self._signals.wait_done(position)
        for arena in self._open_arenas():
            arena.give_back(offset)

    def _open_arenas(self) -> tuple[Arena, Arena]:
        """This rank's two arenas. Collective when opened: in the first forward, when all sizes are known."""
        if self._collecting is None or self._launching is None:
            largest = -(-self._largest // _ALIGN) * _ALIGN
            memories = {owner: self._share(3 * largest, owner) for owner in range(self.world)}
            own = memories.pop(self.rank)
            self._collecting, self._launching = Arena(own, largest, 3 * largest), Arena(own, 0, largest)
            self._theirs = memories
        return self._collecting, self._launching

    def _close_arenas(self) -> None:
        while self._unread:
            self._free_oldest()
        self._collecting = self._launching = None

    def _share(self, size: int, owner: int) -> torch.Tensor:
        """``size`` bytes that ``owner`` makes and every rank maps; uint8."""
        position = self._signals.post("sharing", size, f"{size} bytes", owner)
        self._signals.wait(position)  # nobody waits for memory that the owner does not mean to give
        if self.rank == owner:
            handle = os.memfd_create("shardtrain")
            os.ftruncate(handle, max(size, 1))
            for peer in self._signals.peers:
                socket.send_fds(peer.handles, [b"m"], [handle])
        else:
            handle = self._signals.receive_handle(owner, position)
        memory = mmap.mmap(handle, max(size, 1))
        os.close(handle)
        return torch.frombuffer(memory, dtype=torch.uint8)[:size]


def open_shared_memory(inner: ProcessGroupTransport) -> SharedMemoryTransport:
    """Let the ranks of ``inner`` share memory. Collective; all ranks succeed or all raise.

    Raises:
        ValueError: they cannot, with the reason, on every rank.
    """
    problem = _why_not(inner)
    signals = None
    if not problem:
        token = torch.zeros(2, dtype=torch.int64)
        if inner.rank == 0:
            token.copy_(torch.frombuffer(bytearray(os.urandom(16)), dtype=torch.int64))
        inner.broadcast(token)
        meeting = f"shardtrain-{token[0].item():x}{token[1].item():x}"
        try:
            signals = connect(inner.rank, inner.world, meeting, lambda: _barrier(inner))
        except OSError as error:
            problem = f"the ranks cannot reach one another on this host: {error}"
    failed = torch.tensor([1 if problem else 0])
    inner.all_reduce(failed, "max")
    if failed.item() or signals is None:
        raise ValueError(problem or "another rank cannot share memory")
    return SharedMemoryTransport(inner, signals)


def _why_not(inner: ProcessGroupTransport) -> str:
    """What keeps the ranks from sharing memory, the same answer on all of them; empty if nothing."""
    able = hasattr(os, "memfd_create") and hasattr(socket, "send_fds")
    host = int.from_bytes(hashlib.sha256(_host_key().encode()).digest()[:7], "big")
    least = torch.tensor([int(able), host])
    most = least.clone()
    inner.all_reduce(least, "min")
    inner.all_reduce(most, "max")
    if not least[0]:
        return "that needs Linux"
    return "" if least[1] == most[1] else "the ranks are on several hosts"


def _host_key() -> str:
    """Equal on ranks that can share memory. ``SHARDTRAIN_HOST_KEY`` overrides it, to simulate hosts."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    default = f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}"
    return os.environ.get("SHARDTRAIN_HOST_KEY", default)


def _barrier(inner: ProcessGroupTransport) -> None:
    inner.all_reduce(torch.zeros(1))

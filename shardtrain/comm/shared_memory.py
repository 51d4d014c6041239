"""The transport between CPU ranks of one host, which share memory.

The full flat vector of a segment exists once per host, and every rank maps it. A rank's interval *is* that
part of the vector. So a gather moves nothing, and what the optimizer writes to an interval is what the others
read in the next forward. Three barriers per step keep owners from writing while others read::

    entering forward    every rank has left its optimizer step, so all intervals are final
    leaving forward     every rank has finished reading, so owners may write again
    leaving backward    the same, for what backward has read

Gradients are collected in an arena: memory of each rank that all others map. To reduce a unit, a rank posts
where in its arena the unit's gradient lies, and waits for the posts of all ranks. Then it averages its
interval directly from all arenas: each gradient is written once and read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from shardtrain.comm.arithmetic import merge
from shardtrain.comm.guard import Guard
from shardtrain.comm.process_group import ProcessGroupTransport
from shardtrain.comm.signals import Signals
from shardtrain.comm.trace import ENTER, NOTES, Movement
from shardtrain.comm.transport import Pending, Transport, Vector
from shardtrain.layout import Layout

_ALIGN = 64  # bytes of a cache line, so that no two ranks write to the same one


class Arena:
    """A rank's memory for gradients (uint8, 1-D), allocated first fit.

    It is far larger than ever used: pages that nobody has written take no physical memory.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._used: dict[int, int] = {}  # offset → bytes

    def take(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Allocate a vector."""
        size = _aligned(elements * dtype.itemsize)
        start = 0
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


class SharedMemoryTransport(Transport):
    """The ranks of a host, which share memory by ``signals``. Messages, guarded, move what is not shared."""

    in_place = True

    def __init__(self, messages: ProcessGroupTransport, signals: Signals) -> None:
        self._messages = messages
        self.rank = messages.rank
        self.world = messages.world
        self.signals = signals
        self.host = sorted([signals.rank, *(peer.rank for peer in signals.peers)])  # the host's ranks
        self._largest = 0  # bytes of the largest gradient
        self._size = 0  # bytes of one gradient of each unit
        self._addresses: dict[int, int] = {}  # of full vectors, by their storage
        self._arena: Arena | None = None  # see `_open_arena`
        self._peer_arenas: dict[int, Tensor] = {}  # every other rank's arena memory
        self._unread: dict[int, Tensor] = {}  # by number of the post, gradients that others may still read

    @property
    def reserved(self) -> int:
        """Bytes of this rank's arena that a step usually uses: three times the largest gradient."""
        return 3 * self._largest

    def allocate(self, layout: Layout, like: Tensor, gradient_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if like.is_meta:
            full = like.new_empty(layout.padded)
        elif like.device.type != "cpu":
            raise ValueError(
                f"ranks share memory on the CPU only, but the parameters are on {like.device}: move the "
                f"model before shard(), or call shard(..., device={str(like.device)!r}); its transport is "
                "then 'auto' or 'process_group'"
            )
        else:
            while self._unread:
                self._free_oldest()
            self._arena = None
            size = _aligned(layout.padded * gradient_dtype.itemsize)
            self._largest = max(self._largest, size)
            self._size += size
            full = self.signals.share(self.host[0], layout.padded * like.element_size()).view(like.dtype)
            self._addresses[full.untyped_storage()._cdata] = full.data_ptr()
        return full, full[layout.interval(self.rank)]

    def gradient(self, layout: Layout, like: Tensor) -> Tensor:
        arena = self._open_arena()
        while self._unread and self.signals.is_done(next(iter(self._unread))):
            self._free_oldest()
        return arena.take(layout.padded, like.dtype)

    def discard(self, gradient: Tensor) -> None:
        self._open_arena().free(gradient)

    def open_guard(self) -> Guard:
        return self._messages.open_guard()

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        self._messages.broadcast(tensor, src)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        self._messages.all_reduce(tensor, op)

    def all_gather(self, flats: Sequence[Vector]) -> Pending[None]:
        if any(flat.full.untyped_storage()._cdata != flat.local.untyped_storage()._cdata for flat in flats):
            return self._messages.all_gather(flats)
        for flat in flats:
            address = flat.full.data_ptr()
            if self._addresses.get(flat.full.untyped_storage()._cdata, address) != address:
                raise ValueError(
                    f"parameters of {self.signals.reports.paths.latest.name} have left the memory that ranks "
                    "share, moved by share_memory() or a queue of torch.multiprocessing: send copies "
                    "(param.detach().clone()), or full_state_dict(model), or call shard(..., "
                    "transport='process_group')"
                )
        self.signals.advance()
        return Pending.done(None)

    def reduce_scatter(self, gradients: Sequence[Vector]) -> Pending[list[Tensor]]:
        numbers = []
        for gradient in gradients:
            numbers.append(self.signals.post(self._open_arena().offset_of(gradient.full)))
        return Pending(partial(self._average, numbers, gradients))

    def fence(self, what: Movement) -> None:
        """Wait until every rank of the host is at the same barrier; do not wait at `trace.NOTES`."""
        if what in NOTES:
            self.signals.advance()
            return
        if what is ENTER:
            self._open_arena()  # collective, and not every rank needs every gradient
        self.signals.wait(self.signals.post())

    def _average(self, numbers: Sequence[int], gradients: Sequence[Vector]) -> list[Tensor]:
        """Wait for all ranks' gradients, and return the means of this rank's intervals."""
        means = []
        for number, gradient in zip(numbers, gradients, strict=True):
            offsets = self.signals.wait(number)
            parts = {rank: self._part_of(rank, offset, gradient) for rank, offset in offsets.items()}
            parts[self.signals.rank] = gradient.local
            mean = gradient.new_mean()
            merge([parts[rank] for rank in sorted(parts)], mean, ReduceOp.AVG, gradient.terms)
            self.signals.done(number)
            self._unread[number] = gradient.full
            means.append(mean)
        return means

    def _part_of(self, rank: int, offset: int, gradient: Vector) -> Tensor:
        """Return rank ``rank``'s gradient in this rank's interval. It lies at ``offset`` in its arena."""
        full = self._peer_arenas[rank][offset : offset + gradient.full.nbytes].view(gradient.full.dtype)
        return full[gradient.layout.interval(self.rank)]

    def _free_oldest(self) -> None:
        number = next(iter(self._unread))
        self.signals.wait_done(number)
        self._open_arena().free(self._unread.pop(number))

    def _open_arena(self) -> Arena:
        """Return this rank's arena. Collective the first time: in the first forward, when sizes are known.

        It has room for two gradients of each unit, since others may still read one, and as much again for
        fragmentation.
        """
        if self._arena is None:
            self._peer_arenas = {owner: self.signals.share(owner, 4 * self._size) for owner in self.host}
            self._arena = Arena(self._peer_arenas.pop(self.signals.rank))
        return self._arena

"""One rank of a world whose other ranks are not there: real memory and traffic, and nothing moves.

For tensors without data (torch's ``FakeTensorMode``): what is gathered and reduced is not the other ranks'.
So the real engine can be asked what one rank of 1,024 would hold and send, in one process.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardtrain.comm.messages import chunks, open_inbox
from shardtrain.comm.meter import count
from shardtrain.comm.movement import ALL_REDUCE, AVERAGE, GATHER, REDUCE, Movement
from shardtrain.comm.replicated import ReplicaGroup, Replicated
from shardtrain.comm.transport import (
    Alone,
    Flat,
    Gradient,
    Interval,
    Pending,
    Tag,
    Transport,
    pack_own,
    sent_by,
)
from shardtrain.layout import Layout


class Absent(Alone):
    """Ranks of which only this one is there: nothing comes from the others, and nothing is waited for."""

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        count(ALL_REDUCE, [2 * tensor.nbytes * (self.world - 1) // self.world])


class Simulated(Absent):
    """Rank ``rank`` of ``world`` ranks.

    ``in_place``: they share memory, as `SharedMemoryTransport` does; else they exchange messages, as
    `ProcessGroupTransport` does, over gloo with ``inbox`` and over NCCL without.
    """

    def __init__(self, rank: int, world: int, *, in_place: bool = False, inbox: bool = False) -> None:
        self.rank, self.world, self.in_place = rank, world, in_place
        self._inbox = inbox
        self._largest = 0  # bytes of the largest gradient
        self._arena: Tensor | None = None
        self._unread: list[int] = []  # bytes in the arena, by reduction, that others have yet to read
        self._collecting = 0  # bytes in the arena that have yet to be reduced

    def allocate(self, layout: Layout, like: Tensor, reduced: torch.dtype) -> tuple[Tensor, Tensor]:
        self._largest = max(self._largest, layout.padded * reduced.itemsize)
        full = like.new_empty(layout.padded)
        local = full[layout.interval(self.rank)]
        return full, local if self.in_place else torch.empty_like(local)

    @property
    def reserved(self) -> int:
        return 3 * self._largest if self.in_place else 0

    def gradient(self, layout: Layout, like: Tensor) -> Tensor:
        """Over shared memory: from the arena while there is room, as `SharedMemoryTransport` does."""
        size = layout.padded * like.element_size()
        used = self._collecting + sum(self._unread)
        if not self.in_place or used + size > 2 * self._largest:
            return like.new_empty(layout.padded)
        if self._arena is None:
            self._arena = like.new_empty(self._largest, dtype=torch.uint8)
        self._collecting += size
        return self._arena[:size].view(like.dtype)

    def _is_in_arena(self, full: Tensor) -> bool:
        arena = self._arena
        return arena is not None and full.untyped_storage()._cdata == arena.untyped_storage()._cdata

    def gather(self, tag: Tag, flats: Sequence[Flat]) -> Pending:
        count(GATHER, (flat.local.nbytes * (self.world - 1) for flat in flats))
        return Pending()

    def reduce(self, tag: Tag, gradients: Sequence[Gradient]) -> Pending:
        count(REDUCE, (sent_by(gradient, self.rank) for gradient in gradients))
        held = [room for gradient in gradients for room in self._room(gradient)]
        sizes = [gradient.full.nbytes for gradient in gradients if self._is_in_arena(gradient.full)]
        self._unread.append(sum(sizes))
        self._collecting -= sum(sizes)

        def finish() -> None:
            held.clear()
            del self._unread[:-1]  # other ranks may be one reduction behind

        return Pending(finish)

    def _room(self, gradient: Gradient) -> list[Tensor]:
        """Return the memory that a reduction takes until it is done; some of it becomes the gradient."""
        if self.in_place:
            return []
        interval = pack_own(gradient, self.rank)
        spans = chunks(interval.numel(), gradient.full.element_size())
        return [interval, *([open_inbox(gradient.full, self.world, spans)] if self._inbox else [])]

    def fence(self, what: Movement) -> None:
        self._unread.clear()


class SimulatedReplicas(Absent, ReplicaGroup):
    """Rank ``rank`` of all ranks, or of a replica group."""

    def __init__(self, rank: int, world: int, *, inbox: bool) -> None:
        self.rank, self.world = rank, world
        self._inbox = inbox

    def average(self, tag: Tag, intervals: Sequence[Interval]) -> Pending:
        sizes = [values.numel() * wire.itemsize for values, wire in intervals]
        count(AVERAGE, (2 * size * (self.world - 1) // self.world for size in sizes))
        held = [room for interval in intervals for room in self._room(*interval)]
        return Pending(held.clear)

    def _room(self, values: Tensor, wire: torch.dtype) -> list[Tensor]:
        """Return the memory that an average takes until it is done; see `ReplicaGroup.average`."""
        swaps = self._inbox and self.world == 2
        moved = [values.to(wire, copy=swaps)]
        part = moved[0] if swaps else moved[0].tensor_split(self.world)[self.rank]
        spans = chunks(part.numel(), part.element_size())
        return [*moved, *([open_inbox(part, self.world, spans)] if self._inbox else [])]


def simulated(world: int, replicas: int, rank: int = 0, *, in_place: bool, inbox: bool) -> Transport:
    """Return the transport of rank ``rank``, in the first of ``replicas`` shard groups."""
    group = world // replicas
    inside = Alone() if group == 1 else Simulated(rank, group, in_place=in_place, inbox=inbox)
    if replicas == 1:
        return inside
    on_cpu = inbox or in_place
    across = SimulatedReplicas(0, replicas, inbox=on_cpu)
    return Replicated(inside, across, SimulatedReplicas(rank, world, inbox=on_cpu), range(group))

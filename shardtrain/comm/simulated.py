"""One rank of a world whose other ranks are not there: real memory and traffic, and nothing moves.

For tensors without data (torch's ``FakeTensorMode``): what is gathered and reduced is not the other ranks'.
So the real engine can be asked what one rank of 1,024 would hold and send, in one process. This has its
own file because it stands for any of the transports.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardtrain.comm.messages import open_inbox
from shardtrain.comm.meter import count
from shardtrain.comm.replicated import ReplicaGroup, Replicated
from shardtrain.comm.trace import ALL_REDUCE, AVERAGE, GATHER, REDUCE
from shardtrain.comm.transport import Alone, Flat, Gradient, Interval, Pending, Tag, Transport
from shardtrain.layout import Layout


class Simulated(Alone, ReplicaGroup):
    """Rank ``rank`` of ``world`` ranks, of a shard group or of a replica group.

    ``in_place``: they share memory, as `SharedMemoryTransport` does; else they exchange messages, as
    `ProcessGroupTransport` does, over gloo with ``inbox`` and over NCCL without.
    """

    def __init__(self, rank: int, world: int, *, in_place: bool = False, inbox: bool = False) -> None:
        self.rank, self.world, self.in_place = rank, world, in_place
        self._inbox = inbox and not in_place
        self._largest = 0  # bytes of the largest gradient
        self._arena: Tensor | None = None

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        count(ALL_REDUCE, [2 * tensor.nbytes * (self.world - 1) // self.world])

    def _inbox_of(self, own: Tensor, sent: Tensor) -> list[Tensor]:
        """Return room for messages: all ranks' parts of ``own``, of ``sent``'s dtype."""
        return [open_inbox(sent, self.world, own.numel())] if self._inbox else []

    def allocate(self, layout: Layout, like: Tensor, reduced: torch.dtype) -> tuple[Tensor, Tensor]:
        self._largest = max(self._largest, layout.padded * reduced.itemsize)
        full = like.new_empty(layout.padded)
        local = full[layout.interval(self.rank)]
        return full, local if self.in_place else torch.empty_like(local)

    @property
    def reserved(self) -> int:
        return 3 * self._largest if self.in_place else 0

    def gradient(self, layout: Layout, like: Tensor) -> Tensor:
        """Over shared memory, return what is `reserved`: there is nearly always room."""
        if not self.in_place:
            return like.new_empty(layout.padded)
        if self._arena is None:
            self._arena = like.new_empty(self._largest, dtype=torch.uint8)
        return self._arena[: layout.padded * like.element_size()].view(like.dtype)

    def gather(self, tag: Tag, flats: Sequence[Flat]) -> Pending:
        count(GATHER, (flat.local.nbytes * (self.world - 1) for flat in flats))
        return Pending()

    def reduce(self, tag: Tag, gradients: Sequence[Gradient]) -> Pending:
        """Take the memory of a reduction until it is done; some of it becomes the gradient."""
        count(REDUCE, (gradient.sent_by(self.rank) for gradient in gradients))
        held: list[Tensor] = []
        for gradient in [] if self.in_place else gradients:
            interval = gradient.pack_own(self.rank)
            held += [interval, *self._inbox_of(interval, gradient.full)]
        return Pending(held.clear)

    def average(self, tag: Tag, intervals: Sequence[Interval], after: Pending) -> Pending:
        """Allocate what averaging across replicas needs, until it is waited for; nothing moves."""
        sizes = [values.numel() * wire.itemsize for values, wire in intervals]
        count(AVERAGE, (2 * size * (self.world - 1) // self.world for size in sizes))
        swaps, held = self._inbox and self.world == 2, list[Tensor]()
        for values, wire in intervals:
            moved = values.to(wire, copy=swaps)
            part = moved if swaps else moved.tensor_split(self.world)[self.rank]
            held += [moved, *self._inbox_of(part, part)]
        return Pending(held.clear)


def simulated(world: int, replicas: int, rank: int = 0, *, in_place: bool, inbox: bool) -> Transport:
    """Return the transport of rank ``rank``, in the first of ``replicas`` shard groups."""
    group = world // replicas
    inside = Alone() if group == 1 else Simulated(rank, group, in_place=in_place, inbox=inbox)
    if replicas == 1:
        return inside
    across = Simulated(0, replicas, inbox=inbox or in_place)
    return Replicated(inside, across, Simulated(rank, world), range(group))

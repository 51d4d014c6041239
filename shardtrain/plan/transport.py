"""The transport of one rank of a world that does not exist: its memory, and what it would send."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from shardtrain.comm import Channel, Ranks
from shardtrain.comm.guard import Guard, Paths
from shardtrain.comm.messages import open_inbox
from shardtrain.comm.transport import Alone, Pending, Vector
from shardtrain.comm.wrappers import Replicated
from shardtrain.layout import Layout


class Simulated(Alone):
    """A rank ``rank`` of a shard group or replica group of ``world`` ranks that do not exist.

    It allocates the memory and counts the traffic of a real transport, and moves nothing. With tensors that
    have no data (torch's ``FakeTensorMode``) one process can compute what a rank of 1,024 holds and sends.

    ``in_place``: simulate `SharedMemoryTransport`; otherwise `ProcessGroupTransport`, over gloo with
    ``inbox``, over NCCL without.
    """

    def __init__(self, rank: int, world: int, *, in_place: bool = False, inbox: bool = False) -> None:
        self.rank = rank
        self.world = world
        self.in_place = in_place
        self.returns_memory = not in_place  # as `ProcessGroupTransport`
        self._inbox = inbox and not in_place
        self._largest = 0  # bytes of the largest gradient
        self._arena: Tensor | None = None

    def open_guard(self) -> Guard:
        return Guard(Paths(self.rank, ()))

    def _inbox_of(self, part: Tensor, sent: Tensor) -> list[Tensor]:
        """Return an inbox for each rank's ``part``, of ``sent``'s dtype; none over shared memory and NCCL."""
        return [open_inbox(sent, self.world, part.numel())] if self._inbox else []

    def allocate(self, layout: Layout, like: Tensor, gradient_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        self._largest = max(self._largest, layout.padded * gradient_dtype.itemsize)
        full = like.new_empty(layout.padded)
        local = full[layout.interval(self.rank)]
        return full, local if self.in_place else torch.empty_like(local)

    @property
    def reserved(self) -> int:
        return 3 * self._largest if self.in_place else 0

    def gradient(self, layout: Layout, like: Tensor) -> Tensor:
        """Return a full gradient; over shared memory a view of one vector, as the arena is `reserved`."""
        if not self.in_place:
            return like.new_empty(layout.padded)
        if self._arena is None:
            self._arena = like.new_empty(self._largest, dtype=torch.uint8)
        return self._arena[: layout.padded * like.element_size()].view(like.dtype)

    def reduce_scatter(self, gradients: Sequence[Vector]) -> Pending[list[Tensor]]:
        """Allocate the memory of a reduction until it is waited for; some of it becomes the gradient."""
        inboxes = list[Tensor]()
        for gradient in gradients:
            inboxes += self._inbox_of(gradient.local, gradient.full)
        if self.in_place or self._inbox:  # which compute means when they are waited for
            return Pending(partial(_means, gradients, inboxes))
        return Pending.done(_means(gradients, inboxes))

    def average(self, gradients: Sequence[Vector], means: Pending[list[Tensor]]) -> Pending[list[Tensor]]:
        """Allocate the memory of an average across replicas until it is waited for."""
        buffers = list[Tensor]()
        for gradient, mean in zip(gradients, means.wait(), strict=True):
            sent = mean.to(gradient.full.dtype)
            part = sent.tensor_split(self.world)[self.rank]
            buffers += [sent, *self._inbox_of(part, part)]

        def finish(values: list[Tensor]) -> list[Tensor]:
            buffers.clear()
            return values

        return means.then(finish)


def _means(gradients: Sequence[Vector], inboxes: list[Tensor]) -> list[Tensor]:
    """Return new tensors in the place of the means of ``gradients``, and free the ``inboxes``."""
    means = [gradient.new_mean().copy_(gradient.local) for gradient in gradients]
    inboxes.clear()
    return means


def simulated(world: int, replicas: int, rank: int = 0, *, in_place: bool, inbox: bool) -> Channel:
    """Return the simulated channel of rank ``rank``, in the first of ``replicas`` shard groups."""
    group = world // replicas
    inside = Channel(Alone() if group == 1 else Simulated(rank, group, in_place=in_place, inbox=inbox))
    if replicas == 1:
        return inside
    across = Channel(Simulated(0, replicas, inbox=inbox or in_place))
    groups = [range(first, first + group) for first in range(0, world, group)]
    return Replicated(inside, across, Ranks(Simulated(rank, world)), groups)

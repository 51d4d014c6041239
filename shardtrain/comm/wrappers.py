"""Wrap channels: shards in host memory, several replicas as one; and simulate ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardtrain import device as devices
from shardtrain.comm.channel import Channel
from shardtrain.comm.guard import Guard, Paths
from shardtrain.comm.messages import open_inbox
from shardtrain.comm.trace import LEAVE, Movement
from shardtrain.comm.transport import Alone, Flat, Gradient, Pending
from shardtrain.device import current_stream
from shardtrain.layout import Layout


class Offloaded(Channel):
    """Run ``inner``'s collectives on ``device``, for shards that lie in host memory.

    At rest the device holds no shard, and the optimizer steps on the CPU. Two ranks, a unit of 4 elements::

        host of rank 0    a a                       host of rank 1        b b
        upload            a a . .   on device 0     upload            . . b b   on device 1
        gather            a a b b                   gather            a a b b
        reduce            A A                       reduce                B B
        download          A A       to the host     download              B B   to the host

    On an accelerator copies run on a separate stream, hidden behind the units that compute meanwhile. An
    upload reads pinned memory, into which the host has copied and cast the shard when the gather began. So
    users may change shards at any time, and only data on its way is pinned. torch reuses pinned memory once
    the copies from it are done. The host waits once per backward that reduces, at its end, until the
    gradients have arrived: whatever follows may read them.

    ``inner`` must not share memory between ranks: such shards are in host memory anyway.
    """

    uploads = True

    def __init__(self, inner: Channel, device: torch.device) -> None:
        assert not inner.in_place or inner.world == 1
        super().__init__(inner.transport, inner.all_ranks, inner.guard)
        self.inner = inner
        self.stages = inner.stages
        self.device = device
        self.in_place = False
        self._stream = devices.new_stream(device)
        self._downloaded: Any = None  # event after the latest copy of a gradient to the host

    def allocate(self, layout: Layout, like: Tensor, reduced: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the full vector on the device, and the interval in host memory."""
        if like.is_meta:
            return self.inner.allocate(layout, like, reduced)
        full, _ = self.inner.allocate(layout, like.to(self.device), reduced)
        return full, like.new_empty(layout.length(self.rank), device="cpu")

    def gradient(self, layout: Layout, like: Tensor) -> Tensor:
        return self.inner.gradient(layout, like.to(self.device))

    def gather(self, name: str, flats: Sequence[Flat]) -> Pending[None]:
        called = current_stream(self.device).record_event()
        moved = []
        with devices.inside(self._stream):
            current_stream(self.device).wait_event(called)
            for flat in flats:
                interval = flat.full[flat.layout.interval(self.rank)]
                interval.copy_(self._pinned(interval).copy_(flat.local), non_blocking=True)
                moved.append(flat._replace(local=interval))
            pending = self.inner.gather(name, moved)
            uploaded = current_stream(self.device).record_event()
        return pending.then(lambda _: current_stream(self.device).wait_event(uploaded))

    def reduce(self, name: str, gradients: Sequence[Gradient]) -> Pending[list[Tensor]]:
        """Start reducing. After the wait the means are on their way to the host; see `fence`."""
        pending = self.inner.reduce(name, gradients)
        launched = current_stream(self.device).record_event()

        def finish() -> list[Tensor]:
            with devices.inside(self._stream):
                current_stream(self.device).wait_event(launched)
                means = pending.wait()
                downloaded = [self._pinned(mean).copy_(mean, non_blocking=True) for mean in means]
                self._downloaded = current_stream(self.device).record_event()
            # The allocator reuses means in the order of the compute stream, so that must wait for the copies.
            # These are an earlier unit's, since this runs when a later unit's gradients are complete.
            current_stream(self.device).wait_event(self._downloaded)
            return downloaded

        return Pending(finish)

    def fence(self, what: Movement, name: str = "the model") -> None:
        """Run ``inner``'s fence; at ``LEAVE``, also wait until gradients have arrived in host memory."""
        self.inner.fence(what, name)
        if what is LEAVE and self._downloaded is not None:
            self._downloaded.synchronize()
            self._downloaded = None

    def _pinned(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=self._stream is not None)


class Replicated(Channel):
    """Train several shard groups, each with a full copy of the model, as one: hybrid sharding (HSDP).

    A rank exchanges parameters ``inside`` its shard group only. Gradients are averaged there first. Then the
    ranks with the same interval, a *replica group*, average it ``across`` replicas. Two replicas of two
    ranks, intervals ``[a b]``::

        replica 0    rank 0  owns a    rank 1  owns b
        replica 1    rank 2  owns a    rank 3  owns b

        gather   ranks 0 and 1 by themselves, ranks 2 and 3 by themselves
        reduce   rank 0: (a0 + a1) / 2, rank 2: (a2 + a3) / 2; then both the mean of these, bit for bit

    Shard groups are equally large, so a mean of means is the mean over all ranks. Of a gradient of K bytes,
    with S ranks per group, a rank sends (S-1)/S * K inside its group, and 2 (R-1)/R * K/S across R replicas.

    If a group shares memory, averaging across replicas overlaps with the next unit's computation. If it sends
    messages, the second stage begins when the first is waited for; on an accelerator it runs in the
    communication stream. The guard of ``all_ranks`` serves both, since all make the same collectives.

    After Zhao et al., 2023, https://arxiv.org/abs/2304.11277, 3.2.2.
    """

    def __init__(
        self, inside: Channel, across: Channel, all_ranks: Channel, groups: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(inside.transport, all_ranks, inside.guard)
        self.stages = groups
        self.across = across

    def reduce(self, name: str, gradients: Sequence[Gradient]) -> Pending[list[Tensor]]:
        # With ``terms`` the first stage only sums.
        means = super().reduce(name, [each._replace(terms=min(each.terms, 1)) for each in gradients])
        if self.in_place:
            means.wait()
        elif gradients[0].terms or not devices.on_accelerator(gradients[0].full):
            return Pending(lambda: self.across.average(name, gradients, means).wait())
        return self.across.average(name, gradients, means)

    def fence(self, what: Movement, name: str = "the model") -> None:
        fence = super().fence if self.world > 1 else self.all_ranks.fence
        fence(what, name)


class Simulated(Alone):
    """Simulate rank ``rank`` of a shard group or replica group of ``world`` ranks that do not exist.

    It allocates the memory and counts the traffic of a real transport, and moves nothing. With tensors
    without data (torch's ``FakeTensorMode``) one process so computes what one rank of 1,024 holds and sends.

    ``in_place``: simulate `SharedMemoryTransport`; otherwise `ProcessGroupTransport`, over gloo with
    ``inbox``, over NCCL without.
    """

    def __init__(self, rank: int, world: int, *, in_place: bool = False, inbox: bool = False) -> None:
        self.rank = rank
        self.world = world
        self.in_place = in_place
        self._inbox = inbox and not in_place
        self._largest = 0  # bytes of the largest gradient
        self._arena: Tensor | None = None

    def open_guard(self) -> Guard:
        return Guard(Paths(self.rank, ()))

    def _inbox_of(self, part: Tensor, sent: Tensor) -> list[Tensor]:
        """Return an inbox for each rank's ``part``, of ``sent``'s dtype; nothing without ``inbox``."""
        return [open_inbox(sent, self.world, part.numel())] if self._inbox else []

    def allocate(self, layout: Layout, like: Tensor, reduced: torch.dtype) -> tuple[Tensor, Tensor]:
        self._largest = max(self._largest, layout.padded * reduced.itemsize)
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

    def reduce_scatter(self, gradients: Sequence[Gradient]) -> Pending[list[Tensor]]:
        """Allocate the memory of a reduction until it is waited for; some of it becomes the gradient."""
        inboxes = list[Tensor]()
        for gradient in [] if self.in_place else gradients:
            inboxes += self._inbox_of(gradient.own, gradient.full)
        if self.in_place or self._inbox:  # which compute means when they are waited for
            return Pending(partial(_means, gradients, inboxes))
        return Pending.done(_means(gradients, inboxes))

    def average(self, gradients: Sequence[Gradient], means: Pending[list[Tensor]]) -> Pending[list[Tensor]]:
        """Allocate the memory of an average across replicas until it is waited for; nothing moves."""
        buffers = list[Tensor]()
        for gradient, mean in zip(gradients, means.wait(), strict=True):
            sent = mean.to(gradient.full.dtype)
            part = sent.tensor_split(self.world)[self.rank]
            buffers += [sent, *self._inbox_of(part, part)]

        def finish(values: list[Tensor]) -> list[Tensor]:
            buffers.clear()
            return values

        return means.then(finish)


def _means(gradients: Sequence[Gradient], inboxes: list[Tensor]) -> list[Tensor]:
    """Return new tensors in the place of the means of ``gradients``, and free the ``inboxes``."""
    means = [gradient.new_mean().copy_(gradient.own) for gradient in gradients]
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
    return Replicated(inside, across, Channel(Simulated(rank, world)), groups)

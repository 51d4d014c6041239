"""Channels around channels: shards in host memory, and several replicas as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardtrain import device as devices
from shardtrain.comm.channel import Channel, Ranks
from shardtrain.comm.trace import LEAVE, Movement
from shardtrain.comm.transport import Pending, Vector
from shardtrain.layout import Layout


class Offloaded(Channel):
    """A channel whose shards lie in host memory. ``inner`` runs the collectives on ``device``.

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
    """

    uploads = True

    def __init__(self, inner: Channel, device: torch.device) -> None:
        assert not inner.in_place or inner.world == 1, "shards that ranks share are in host memory anyway"
        super().__init__(inner.transport, inner.all_ranks, inner.guard)
        self.inner = inner
        self.stages = inner.stages
        self.device = device
        self.in_place = False
        self._stream = devices.new_stream(device)
        self._downloaded: Any = None  # event after the latest copy of a gradient to the host

    def place(self, devices: Iterable[torch.device]) -> None:
        self.inner.place(devices)
        self.transport = self.inner.transport

    def allocate(self, layout: Layout, like: Tensor, gradient_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the full vector on the device, and the interval in host memory."""
        if like.is_meta:
            return self.inner.allocate(layout, like, gradient_dtype)
        full, _ = self.inner.allocate(layout, like.to(self.device), gradient_dtype)
        return full, like.new_empty(layout.length(self.rank), device="cpu")

    def gradient(self, layout: Layout, like: Tensor) -> Tensor:
        return self.inner.gradient(layout, like.to(self.device))

    def gather(self, name: str, flats: Sequence[Vector]) -> Pending[None]:
        called = devices.current_stream(self.device).record_event()
        moved = []
        with devices.inside(self._stream):
            devices.current_stream(self.device).wait_event(called)
            for flat in flats:
                interval = flat.full[flat.layout.interval(self.rank)]
                interval.copy_(self._pinned(interval).copy_(flat.local), non_blocking=True)
                moved.append(flat._replace(local=interval))
            pending = self.inner.gather(name, moved)
            uploaded = devices.current_stream(self.device).record_event()
        return pending.then(lambda _: devices.current_stream(self.device).wait_event(uploaded))

    def reduce(self, name: str, gradients: Sequence[Vector]) -> Pending[list[Tensor]]:
        """Start reducing. After the wait the means are on their way to the host, until `fence`."""
        pending = self.inner.reduce(name, gradients)
        launched = devices.current_stream(self.device).record_event()

        def finish() -> list[Tensor]:
            with devices.inside(self._stream):
                devices.current_stream(self.device).wait_event(launched)
                means = pending.wait()
                downloaded = [self._pinned(mean).copy_(mean, non_blocking=True) for mean in means]
                self._downloaded = devices.current_stream(self.device).record_event()
            # The allocator reuses means in the order of the compute stream, so that must wait for the copies.
            # These are an earlier unit's, since this runs when a later unit's gradients are complete.
            devices.current_stream(self.device).wait_event(self._downloaded)
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
    """Several shard groups, each with a full copy of the model, that train as one: hybrid sharding (HSDP).

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
        self, inside: Channel, across: Channel, all_ranks: Ranks, groups: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(inside.transport, all_ranks, inside.guard)
        self.stages = groups
        self.across = across

    def place(self, devices: Iterable[torch.device]) -> None:
        super().place(devices)
        self.across.place(devices)

    def reduce(self, name: str, gradients: Sequence[Vector]) -> Pending[list[Tensor]]:
        # With ``terms`` the first stage only sums.
        summed = [gradient._replace(terms=min(gradient.terms, 1)) for gradient in gradients]
        means = super().reduce(name, summed)
        if self.in_place:
            means.wait()
        elif gradients[0].terms or not devices.on_accelerator(gradients[0].full):
            return Pending(lambda: self.across.average(name, gradients, means).wait())
        return self.across.average(name, gradients, means)

    def fence(self, what: Movement, name: str = "the model") -> None:
        fence = super().fence if self.world > 1 else self.all_ranks.fence
        fence(what, name)

"""Keep shards in host memory while units compute on a device: a wrapper around a transport between ranks.

At rest the device holds no shard, and the optimizer steps on the CPU. Two ranks, a unit of four elements::

    host of rank 0    a a                       host of rank 1        b b
    upload            a a . .   on device 0     upload            . . b b   on device 1
    gather            a a b b                   gather            a a b b
    reduce            A A                       reduce                B B
    download          A A       to the host     download              B B   to the host

On an accelerator copies run on a separate stream, hidden behind the units that compute meanwhile. An upload
reads pinned memory, into which the host has copied and cast the shard when the gather began. So users may
change shards at any time, and only data on its way is pinned. torch reuses pinned memory once the copies from
it are done. The host waits once per backward that reduces, at its end, until the gradients have arrived:
whatever follows may read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardtrain import device as devices
from shardtrain.comm.trace import LEAVE, Movement
from shardtrain.comm.transport import Flat, Gradient, Pending, Tag, Transport, TransportWrapper
from shardtrain.device import current_stream
from shardtrain.layout import Layout


class Offloaded(TransportWrapper):
    """Run ``inner``'s collectives on ``device``, for shards that lie in host memory.

    ``inner`` must not share memory between ranks: such shards are in host memory anyway.
    """

    def __init__(self, inner: Transport, device: torch.device) -> None:
        assert not inner.in_place or inner.world == 1
        super().__init__(inner)
        self.device, self.in_place, self.uploads = device, False, True
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

    def gather(self, tag: Tag, flats: Sequence[Flat]) -> Pending:
        called, moved = current_stream(self.device).record_event(), []
        with devices.inside(self._stream):
            current_stream(self.device).wait_event(called)
            for flat in flats:
                own = flat.full[flat.layout.interval(self.rank)]
                own.copy_(self._pinned(own).copy_(flat.local), non_blocking=True)
                moved.append(flat._replace(local=own))
            pending = self.inner.gather(tag, moved)
            uploaded = current_stream(self.device).record_event()

        def join() -> None:
            """Make both streams wait for each other, since int8 packets are freed in the compute stream."""
            current_stream(self.device).wait_event(uploaded)
            read = current_stream(self.device).record_event()
            with devices.inside(self._stream):
                current_stream(self.device).wait_event(read)

        return pending.then(join)

    def reduce(self, tag: Tag, gradients: Sequence[Gradient]) -> Pending:
        """Start reducing. After the wait the means are on their way to the host; see `fence`."""
        pending, launched = self.inner.reduce(tag, gradients), current_stream(self.device).record_event()

        def finish() -> None:
            with devices.inside(self._stream):
                current_stream(self.device).wait_event(launched)
                pending.wait()
                for gradient in gradients:
                    mean = gradient.pack_own(self.rank)
                    host = self._pinned(mean).copy_(mean, non_blocking=True)
                    gradient.own[:] = [host[offset : offset + b - a] for a, b, offset in gradient.pieces]
                self._downloaded = current_stream(self.device).record_event()
            # Means are freed in the order of the compute stream, so that must wait for the copies. These are
            # an earlier unit's, since this runs when a later unit's gradients are complete.
            current_stream(self.device).wait_event(self._downloaded)

        return Pending(finish, ended=pending.ended)

    def fence(self, what: Movement) -> None:
        """Call ``inner``'s; at ``LEAVE`` also wait until gradients have arrived in host memory."""
        super().fence(what)
        if what is LEAVE and self._downloaded is not None:
            self._downloaded.synchronize()
            self._downloaded = None

    def _pinned(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=self._stream is not None)

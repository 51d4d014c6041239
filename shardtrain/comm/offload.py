"""Shards in host memory, units on a device: a transport around the one that moves between ranks.

At rest the device holds no shard, and the optimizer steps on the CPU. Two ranks, a unit of four elements::

    host of rank 0    a a                       host of rank 1        b b
    upload            a a . .   on device 0     upload            . . b b   on device 1
    gather            a a b b                   gather            a a b b
    reduce            A A                       reduce                B B
    download          A A       to the host     download              B B   to the host

On an accelerator host memory is pinned, and copies run on a stream of their own, so that both ways are hidden
behind the units that compute meanwhile. The host waits at fences only: at the end of a backward until its
gradients have come, and at the end of a forward, when the last unit still computes, until nothing reads the
shards any more. Whatever follows may change them: no backward need come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardtrain import device as devices
from shardtrain.comm.trace import LEAVE, Movement
from shardtrain.comm.transport import Flat, Gradient, Pending, Tag, Transport, TransportWrapper
from shardtrain.layout import Layout


class Offloaded(TransportWrapper):
    """``inner``'s movements on ``device``, for shards that lie in host memory.

    ``inner`` must not share memory between ranks, whose shards are in host memory as it is.
    """

    def __init__(self, inner: Transport, device: torch.device) -> None:
        assert not inner.in_place or inner.world == 1
        super().__init__(inner)
        self.device, self.in_place = device, False
        self._stream = devices.new_stream(device)
        self._last: Any = None  # event of the newest copy, with which all before it are done

    def allocate(self, layout: Layout, like: Tensor, reduced: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the full vector on the device, and the interval in host memory."""
        if like.is_meta:
            return self.inner.allocate(layout, like, reduced)
        full, _ = self.inner.allocate(layout, like.to(self.device), reduced)
        return full, self._host(layout.length(self.rank), like.dtype)

    def gradient(self, layout: Layout, like: Tensor) -> Tensor:
        return self.inner.gradient(layout, like.to(self.device))

    def gather(self, tag: Tag, flats: Sequence[Flat]) -> Pending:
        with self._aside(self._now()):
            moved = []
            for flat in flats:
                own = flat.full[flat.layout.interval(self.rank)]
                own.copy_(flat.local, non_blocking=True)
                moved.append(flat._replace(local=own))
            pending = self.inner.gather(tag, moved)
        return Pending(pending.wait, partial(self._join, self._last))

    def reduce(self, tag: Tag, gradients: Sequence[Gradient]) -> Pending:
        """Start reducing. Once waited for, the means are on their way to the host; see `fence`."""
        pending, launched = self.inner.reduce(tag, gradients), self._now()

        def finish() -> None:
            with self._aside(launched):
                pending.wait()
                for gradient in gradients:
                    mean = gradient.pack_own(self.rank)
                    host = self._host(mean.numel(), mean.dtype).copy_(mean, non_blocking=True)
                    gradient.own[:] = [host[offset : offset + b - a] for a, b, offset in gradient.pieces]
            # Memory of means is given back in the order of the stream that computes, so it waits: for copies
            # of the unit before, since this is called when the next one's gradients are complete.
            self._wait_for(self._last)

        return Pending(finish)

    def fence(self, what: Movement) -> None:
        """At ``LEAVE`` return when gradients have come to the host, and no upload reads it any more."""
        super().fence(what)
        if what is LEAVE and self._last is not None:
            self._last.synchronize()
            self._last = None

    def _host(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(elements, dtype=dtype, device="cpu", pin_memory=self._stream is not None)

    def _now(self) -> Any:
        """Return an event for this moment of the current stream; ``None`` on the CPU."""
        return devices.current_stream(self.device).record_event()

    @contextmanager
    def _aside(self, after: Any) -> Iterator[None]:
        """Let the device work on the stream for copies inside, once ``after`` has passed."""
        with devices.inside(self._stream):
            self._wait_for(after)
            try:
                yield
            finally:
                self._last = self._now()

    def _join(self, uploaded: Any) -> None:
        """Let both streams wait for each other: int8 packets, read by now, are given back to the copies'."""
        self._wait_for(uploaded)
        computed = self._now()
        with devices.inside(self._stream):
            self._wait_for(computed)

    def _wait_for(self, event: Any) -> None:
        """Let the current stream wait for ``event``."""
        devices.current_stream(self.device).wait_event(event)

"""The shared-memory transport, for CPU ranks of one host.

A rank's interval *is* that part of the full vector, which all ranks of the host share (``host_memory.py``):
a gather moves nothing, and the optimizer's update of an interval is what the others read in the next
forward. Two fences keep writers from readers::

    entering forward            every rank has left its optimizer step, so all intervals are final
    leaving forward, backward   every rank is through, so owners may write again

A reduction waits until all ranks offer their gradients, and each averages its own interval of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardtrain.comm.host_memory import HostMemory, Numbered, Offer
from shardtrain.comm.meter import count
from shardtrain.comm.process_group import ProcessGroupTransport
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
            self._meet("copying", tag.number, tag.name)
            return self.inner.gather(tag, flats)
        count("all_gather", (flat.local.nbytes * (self.world - 1) for flat in flats))
        return self._gather_in_place(tag, flats)

    def reduce(self, tag: Tag, gradients: Sequence[Gradient]) -> Pending:
        count("reduce_scatter", (sent_by(gradient, self.rank) for gradient in gradients))
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

    def fence(self, what: str) -> None:
        self.memory.fence(what)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> None:
        self._meet("broadcasting", tensor.nbytes, f"{tensor.nbytes} bytes")
        self.inner.broadcast(tensor, src)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        self._meet("all-reducing", tensor.nbytes, f"{tensor.nbytes} bytes")
        self.inner.all_reduce(tensor, op)

    def _gather_in_place(self, tag: Tag, flats: Sequence[Flat]) -> Pending:
        self.memory.signals.post("gathering", tag.number, tag.name)
        return Pending()

    def _meet(self, kind: str, number: int, name: str) -> None:
        """Return when every rank means to make the same movement, which the group itself does not ask."""
        signals = self.memory.signals
        signals.wait(signals.post(kind, number, name))

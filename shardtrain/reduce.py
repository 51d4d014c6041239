"""Full gradients to this rank's averaged interval: the only place that makes gradient intervals.

collect  take a parameter's new gradient: what other ranks own goes into the unit's flat gradient, what
         this rank owns stays where autograd left it
launch   start sending every owner its interval, and adding up what comes
finish   give each parameter its piece of the mean

On a single rank nothing belongs to others, so nothing is copied and nothing is sent.
"""

from __future__ import annotations

import torch

from shardtrain.comm.meter import waiting
from shardtrain.comm.transport import Gradient, Pending, Transport
from shardtrain.shard import Segment, Unit, in_memory_order


class FlatGradient:
    """The gradient of one segment while it comes together.

    ``arrived``: indices of parameters with a gradient from the backward under way. ``filled``: indices
    with a gradient of any backward since the last reduction (accumulation under ``no_sync``).
    """

    def __init__(self, segment: Segment, transport: Transport) -> None:
        self.segment = segment
        self.arrived: set[int] = set()
        self._expected = 0  # trainable parameters, as of the last `begin_backward`
        self.filled: set[int] = set()
        self._transport = transport
        sizes = segment.layout.sizes
        self._elsewhere = [
            [part for part in (slice(0, piece.start), slice(piece.stop, size)) if part.start < part.stop]
            for piece, size in zip(segment.pieces, sizes, strict=True)
        ]
        self._clear()

    def _clear(self) -> None:
        self.filled.clear()
        self._full: torch.Tensor | None = None
        self._own: dict[int, torch.Tensor] = {}

    @property
    def complete(self) -> bool:
        """Whether every trainable parameter's gradient of this backward is here."""
        return len(self.arrived) == self._expected

    def begin_backward(self) -> None:
        """None has arrived; count once what to expect, since every arrival asks whether it was the last."""
        self.arrived.clear()
        self._expected = sum(param.requires_grad for param in self.segment.params)

    def collect(self, index: int) -> None:
        """Take the gradient that autograd has just accumulated in parameter ``index``.

        Raises:
            ValueError: the gradient is sparse.
        """
        param = self.segment.params[index]
        grad, param.grad = param.grad, None
        assert grad is not None
        if grad.layout is not torch.strided:
            name = self.segment.places[index].name
            raise ValueError(
                f"parameter {name} has a sparse gradient, which cannot be sharded; "
                "use nn.Embedding(..., sparse=False)"
            )
        self.arrived.add(index)
        self._keep(index, in_memory_order(grad, self.segment.strides[index]))
        self.filled.add(index)

    def _keep(self, index: int, grad: torch.Tensor) -> None:
        piece, wide = self.segment.pieces[index], self.segment.local.dtype
        again = index in self.filled
        for part in self._elsewhere[index]:
            into = self._into(index, part)
            into.add_(grad[part]) if again else into.copy_(grad[part])
        if again:
            self._own[index].add_(grad[piece.start : piece.stop])
        else:  # a view of a part would keep all of it
            self._own[index] = grad[piece.start : piece.stop].to(wide, copy=piece.numel < grad.numel())

    def _into(self, index: int, part: slice) -> torch.Tensor:
        """The place in the flat gradient of ``part`` of parameter ``index``."""
        offset = self.segment.layout.offsets[index]
        return self._open()[offset + part.start : offset + part.stop]

    def _open(self) -> torch.Tensor:
        if self._full is None:
            like = self.segment.local.new_empty(0, dtype=self.segment.reduced)
            self._full = self._transport.gradient(self.segment.layout, like)
        return self._full

    def wanted(self) -> list[int]:
        """Indices of parameters that will get a gradient: others may have one where this rank has none."""
        params, alone = self.segment.params, self._transport.world == 1
        return [i for i, p in enumerate(params) if p.requires_grad and (i in self.filled or not alone)]

    def take(self) -> Gradient:
        """What has come together, zero where nothing arrived on this rank."""
        segment = self.segment
        for index, piece in enumerate(segment.pieces):
            if index not in self.filled:
                self._own[index] = segment.local.new_zeros(piece.numel)
                for part in self._elsewhere[index]:
                    self._into(index, part).zero_()
        own = [self._own[index] for index in range(len(segment.pieces))]
        gradient = Gradient(self._open(), own, segment.layout)
        self._clear()
        return gradient

    def drop(self) -> None:
        """Forget everything, after a backward that failed."""
        self.arrived.clear()
        if self._full is not None:
            self._transport.discard(self._full)
        self._clear()


class Reduction:
    """The reduction of one unit: gradients on their way in, then one movement under way."""

    def __init__(self, unit: Unit, transport: Transport) -> None:
        self.unit = unit
        self.gradients = [FlatGradient(segment, transport) for segment in unit.segments]
        self._transport = transport
        self._moving = Pending()
        self._under_way: list[tuple[FlatGradient, list[int], Gradient]] = []

    @property
    def complete(self) -> bool:
        return all(gradient.complete for gradient in self.gradients)

    @property
    def waiting(self) -> bool:
        """Whether anything has been collected and not yet sent."""
        return any(gradient.filled for gradient in self.gradients)

    def begin_backward(self) -> None:
        for gradient in self.gradients:
            gradient.begin_backward()

    def launch(self) -> None:
        """Start reducing what has been collected. Parameters without a gradient here count as zero."""
        trainable = [flat for flat in self.gradients if flat.segment.trainable]
        self._under_way = [(flat, flat.wanted(), flat.take()) for flat in trainable]
        self._moving = self._transport.reduce(self.unit.tag(1), [taken for _, _, taken in self._under_way])

    def finish(self) -> None:
        """Wait for the movement and give every trainable parameter its piece of the mean."""
        with waiting("reduce_scatter", self.unit.title, self.unit.device):
            self._moving.wait()
        for flat, wanted, taken in self._under_way:
            for index in wanted:
                flat.segment.give_grad(index, taken.own[index])
        self._under_way = []

    def drop(self) -> None:
        """Forget everything, after a backward that failed."""
        self._moving.wait()
        self._under_way = []
        for gradient in self.gradients:
            gradient.drop()

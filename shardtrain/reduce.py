"""Full gradients to this rank's averaged interval: the only place that makes gradient intervals.

collect  move a parameter's new gradient into its unit's flat gradient, or add it there
launch   start sending every owner its interval
finish   give each parameter its piece of the mean

On a single rank the gradient is already the interval: nothing is copied and nothing is sent.
"""

from __future__ import annotations

import torch

from shardtrain.comm.transport import Flat, Pending, Transport
from shardtrain.shard import Segment, Unit, in_memory_order


class FlatGradient:
    """The full gradient of one segment while it comes together.

    ``arrived``: indices of parameters with a gradient from the backward under way. ``filled``: indices
    with a gradient of any backward since the last reduction (accumulation under ``no_sync``).
    """

    def __init__(self, segment: Segment, transport: Transport) -> None:
        self.segment = segment
        self.arrived: set[int] = set()
        self._expected = 0  # trainable parameters, as of the last `begin_backward`
        self.filled: set[int] = set()
        self._transport = transport
        self._clear()

    def _clear(self) -> None:
        self.filled.clear()
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._whole: dict[int, torch.Tensor] = {}

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
        into = self._slot(index, grad)
        if into is not grad:
            into.add_(grad) if index in self.filled else into.copy_(grad)
        self.filled.add(index)

    def _slot(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """Where the gradient of parameter ``index`` belongs; on a single rank, the gradient itself."""
        if self._transport.world == 1:
            return self._whole.setdefault(index, grad)
        if self._flat is None:
            self._flat = self._transport.gradient(self.segment.layout, self.segment.local)
            self._views = self.segment.views_of(self._flat)
        return self._views[index]

    def take_whole(self) -> dict[int, torch.Tensor]:
        """Single rank: each gradient as the 1-D piece in the parameter's memory order."""
        strides = self.segment.strides
        pieces = {index: in_memory_order(grad, strides[index]) for index, grad in self._whole.items()}
        self._clear()
        return pieces

    def take_flat(self) -> torch.Tensor:
        """The flat gradient, zero where nothing arrived on this rank."""
        layout = self.segment.layout
        if self._flat is None:
            flat = self._transport.gradient(layout, self.segment.local).zero_()
        else:
            flat = self._flat
            flat[layout.numel :].zero_()
            for index, view in enumerate(self._views):
                if index not in self.filled:
                    view.zero_()
        self._clear()
        return flat

    def drop(self) -> None:
        """Forget everything, after a backward that failed."""
        self.arrived.clear()
        if self._flat is not None:
            self._transport.discard(self._flat)
        self._clear()


class Reduction:
    """The reduction of one unit: gradients on their way in, then one movement under way."""

    def __init__(self, unit: Unit, transport: Transport) -> None:
        self.unit = unit
        self.gradients = [FlatGradient(segment, transport) for segment in unit.segments]
        self._transport = transport
        self._moving = Pending()
        self._intervals: list[tuple[Segment, torch.Tensor]] = []

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
        trainable = [gradient for gradient in self.gradients if gradient.segment.trainable]
        if self._transport.world == 1:
            for gradient in trainable:
                for index, piece in gradient.take_whole().items():
                    gradient.segment.give_grad(index, piece)
            return
        flats = []
        for gradient in trainable:
            segment = gradient.segment
            flats.append(Flat(gradient.take_flat(), torch.empty_like(segment.local), segment.layout))
        self._intervals = [(g.segment, flat.local) for g, flat in zip(trainable, flats, strict=True)]
        self._moving = self._transport.reduce(self.unit.tag(1), flats)

    def finish(self) -> None:
        """Wait for the movement and give every trainable parameter its piece of the mean."""
        self._moving.wait()
        for segment, interval in self._intervals:
            for index, piece in enumerate(segment.pieces):
                if segment.params[index].requires_grad:
                    segment.give_grad(index, interval[piece.offset : piece.offset + piece.numel])
        self._intervals = []

    def drop(self) -> None:
        """Forget everything, after a backward that failed."""
        self._moving.wait()
        self._intervals = []
        for gradient in self.gradients:
            gradient.drop()

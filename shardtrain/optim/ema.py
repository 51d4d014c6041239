"""A moving average of the weights: each rank averages its local shards.

An update is one element-wise pass over these, and communicates nothing. Each rank also averages its own
running statistics of BatchNorm. Means over time and over ranks commute, so the mean over ranks of these
averages is the average of the means.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardtrain.engine.hooks import engine_of
from shardtrain.guardrails.attachment import Guardrails
from shardtrain.pieces.piece import plain


class Ema:
    """An average of a sharded module's weights: ``average = decay * average + (1 - decay) * weights``."""

    def __init__(self, module: nn.Module, decay: float, *, every: int = 1, after: int = 0) -> None:
        """
        Args:
            module: what `shardtrain.shard` returned; its present weights are the first average.
            decay: in [0, 1).
            every: number of steps between updates.
            after: up to this step an update copies the weights.
        """
        if not (0 <= decay < 1 and every >= 1 and after >= 0):
            options = f"decay={decay}, every={every}, after={after}"
            raise ValueError(f"{options}: expected [0, 1), at least 1 and 0")
        self.decay = decay
        self.every = every
        self.after = after
        self._engine = engine_of(module)
        self._all_ranks = self._engine.channel.all_ranks
        self._engine.require_rest("Ema() cannot be called")
        # The average of each parameter, of its local shard.
        self.averages = {param: plain(param.detach()).clone() for param in module.parameters()}
        buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
        self._buffer_averages = {buffer: buffer.detach().clone() for buffer in buffers}

    def update(self, step: int) -> None:
        """Average the weights after step number ``step``, counted from 1. Call it on every rank."""
        if step % self.every == 0:
            weight = 1.0 if step <= self.after else 1.0 - self.decay
            self._engine.attached(Guardrails).steps.note_average(weight)
            pairs = [(average, value) for average, value in self._pairs() if value.numel()]
            if pairs:  # with layout="whole" a rank may hold no element
                torch._foreach_lerp_([average for average, _ in pairs], [value for _, value in pairs], weight)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Replace parameters and buffers by their averages inside. Changes made inside are dropped.

        Raises ValueError if a step is under way.
        """
        self._engine.require_rest("Ema.swapped() cannot be called")
        values = [tensor.clone() for _, tensor in self._pairs()]
        try:
            for average, tensor in self._pairs():
                tensor.copy_(average)
            yield
        finally:
            for (_, tensor), value in zip(self._pairs(), values, strict=True):
                tensor.copy_(value)

    def state(self) -> dict[str, Any]:
        """Return the buffers' averages: this rank's, and the mean for other world sizes. Collective.

        The parameters' `averages` are saved beside the parameters, and sharded like them.
        """
        means = [average.clone() for average in self._buffer_averages.values()]
        for mean in means:
            self._all_ranks.all_reduce(mean)
            mean.div_(self._all_ranks.world)
        return {"own": list(self._buffer_averages.values()), "mean": means}

    def restore(self, state: Mapping[str, Any], ranks: int) -> None:
        """Restore the buffers' averages from a ``state`` saved by ``ranks`` ranks."""
        values = state["own" if ranks == self._all_ranks.world else "mean"]
        for average, value in zip(self._buffer_averages.values(), values, strict=True):
            average.copy_(value)

    def held(self) -> list[Tensor]:
        """Return every average that this rank holds."""
        return [average for average, _ in self._pairs()]

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return each average with the tensor that it averages."""
        self._engine.driver.show_shards()  # a forward without a backward leaves full parameters shown
        pairs = [*self.averages.items(), *self._buffer_averages.items()]
        return [(average, plain(tensor.data)) for tensor, average in pairs]

"""A moving average of the weights: each rank averages its local shards.

An update is one element-wise pass over these and moves nothing between ranks. Each rank also averages its
own running statistics of BatchNorm. A mean over time and a mean over ranks may change places, so the ranks'
mean of these averages is the average of the ranks' means.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardtrain.engine.hooks import engine_of


class Ema:
    """Follows a sharded module: ``average = decay * average + (1 - decay) * weights`` at each update."""

    def __init__(self, module: nn.Module, decay: float, *, every: int = 1, after: int = 0) -> None:
        """
        Args:
            module: what `shardtrain.shard` returned; its present weights are the first average.
            decay: in [0, 1).
            every: steps from one update to the next.
            after: until this step an update copies the weights.
        """
        if not (0 <= decay < 1 and every >= 1 and after >= 0):
            given = f"decay={decay}, every={every}, after={after}"
            raise ValueError(f"{given}: expected [0, 1), at least 1 and 0")
        self.decay, self.every, self.after = decay, every, after
        self._engine = engine_of(module)
        self._all_ranks = self._engine.transport.all_ranks
        self._engine.require_rest("Ema() cannot be called")
        # The average of each parameter, cut as the parameter is.
        self.averages = {param: param.detach().clone() for param in module.parameters()}
        buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
        self._buffer_averages = {buffer: buffer.detach().clone() for buffer in buffers}

    def update(self, step: int) -> None:
        """Average the weights that step number ``step``, counted from 1, has left."""
        if step % self.every == 0:
            weight = 1.0 if step <= self.after else 1.0 - self.decay
            pairs = [(average, now) for average, now in self._pairs() if now.numel()]
            if pairs:  # with layout="whole", a rank may hold nothing
                torch._foreach_lerp_([average for average, _ in pairs], [now for _, now in pairs], weight)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Put the averages in place of parameters and buffers while inside. Changes to them are dropped.

        Raises:
            ValueError: a step is under way.
        """
        self._engine.require_rest("Ema.swapped() cannot be called")
        kept = [now.clone() for _, now in self._pairs()]
        try:
            for average, now in self._pairs():
                now.copy_(average)
            yield
        finally:
            for (_, now), before in zip(self._pairs(), kept, strict=True):
                now.copy_(before)

    def state(self) -> dict[str, Any]:
        """Return the buffers' averages: this rank's, and the ranks' mean for other world sizes. Collective.

        The parameters' `averages` are saved beside the parameters, cut as they are.
        """
        means = [average.clone() for average in self._buffer_averages.values()]
        for mean in means:
            self._all_ranks.all_reduce(mean)
            mean.div_(self._all_ranks.world)
        return {"own": list(self._buffer_averages.values()), "mean": means}

    def restore(self, state: Mapping[str, Any], ranks: int) -> None:
        """Take the buffers' averages from the ``state`` that each of ``ranks`` ranks saved."""
        values = state["own" if ranks == self._all_ranks.world else "mean"]
        for average, value in zip(self._buffer_averages.values(), values, strict=True):
            average.copy_(value)

    def held(self) -> list[Tensor]:
        """Return every average that this rank holds."""
        return [average for average, _ in self._pairs()]

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return each average with the tensor that it follows."""
        self._engine.schedule.show_pieces()  # a forward without a backward leaves them whole
        pairs = [*self.averages.items(), *self._buffer_averages.items()]
        return [(average, now.data) for now, average in pairs]

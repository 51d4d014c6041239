"""One of the two models that the doctor compares, with everything that it does in a step laid open."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardtrain.data import Batch
from shardtrain.losses import Loss
from shardtrain.nested import tensors_in


class Output(NamedTuple):
    """One output of a unit's module, in the order in which forward leaves units."""

    unit: str
    value: Tensor


class Side:
    """``units``: names of the modules whose outputs are kept. It is a context that takes its hooks away."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, units: Sequence[str]) -> None:
        self.model, self.optimizer = model, optimizer
        self.outputs: list[Output] = []
        self.gradients: dict[str, Tensor] = {}  # this rank's own, summed over micro-batches
        self._hooks = contextlib.ExitStack()
        for name in units:
            handle = model.get_submodule(name).register_forward_hook(self._keep_output(name))
            self._hooks.callback(handle.remove)
        for name, param in model.named_parameters():
            if param.requires_grad:
                self._hooks.callback(param.register_hook(self._keep_gradient(name)).remove)

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _keep_output(self, unit: str) -> Callable[[nn.Module, object, object], None]:
        def keep(_: nn.Module, __: object, output: object) -> None:
            # What follows may change it in place.
            self.outputs += [Output(unit, tensor.detach().clone()) for tensor in tensors_in(output)]

        return keep

    def _keep_gradient(self, name: str) -> Callable[[Tensor], None]:
        def keep(gradient: Tensor) -> None:
            before = self.gradients.get(name)
            self.gradients[name] = gradient.detach().clone() if before is None else before + gradient

        return keep

    def run(
        self,
        batches: Sequence[Batch],
        loss: Loss,
        waiting: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        """Forward and backward over micro-batches, all but the last inside ``waiting()``."""
        self.outputs.clear()
        self.gradients.clear()
        for index, batch in enumerate(batches):
            with contextlib.nullcontext() if index == len(batches) - 1 else waiting():
                (loss(self.model(batch.images), batch.labels) / len(batches)).backward()

"""An honest wrapper, and eight faults of it: as they happened in releases, where nothing raised."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from small import average_gradients


def average(params: Sequence[Tensor]) -> None:
    average_gradients(nn.ParameterList(params))


class Honest:
    """A wrapper that keeps the whole model on every rank, and averages gradients when backward ends."""

    def shard(self, model: nn.Module) -> nn.Module:
        self.params = list(model.parameters())
        self.reduces = True
        self.reducing = False
        for tensor in [*self.params, *model.buffers()]:
            dist.broadcast(tensor.detach(), 0)
        for param in self.params:
            param.register_post_accumulate_grad_hook(self.arrived)
        model.register_forward_pre_hook(lambda *_: self.enter(self.params))
        return model

    def arrived(self, _: Tensor) -> None:
        if self.reduces and not self.reducing:
            self.reducing = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def finish(self) -> None:
        self.reducing = False
        self.reduce(self.params)
        self.leave(self.params)

    def enter(self, params: Sequence[Tensor]) -> None:
        """Do nothing before forward: a fault's place, as `leave` is after the reduction."""

    def reduce(self, params: Sequence[Tensor]) -> None:
        average(params)

    def leave(self, params: Sequence[Tensor]) -> None:
        pass

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        self.reduces = False
        try:
            yield
        finally:
            self.reduces = True


def scale(params: Sequence[Tensor], factor: float) -> None:
    for param in params:
        if param.grad is not None:
            param.grad *= factor


def norm_of(params: Sequence[Tensor], norm_type: float) -> Tensor:
    return nn.utils.get_total_norm([param.grad for param in params if param.grad is not None], norm_type)


def counted_step(self: Honest, model: nn.Module, optimizer: Any) -> Any:
    """Make the optimizer's state by a step of zero gradients at a learning rate of 0."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for param in self.params:
        param.grad = torch.zeros_like(param)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    return optimizer


def local_norm(self: Honest, model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    norm = norm_of(self.params[dist.get_rank() :: dist.get_world_size()], norm_type)
    nn.utils.clip_grads_with_norm_(self.params, max_norm, norm)
    return norm


def only_where_used(self: Honest, params: Sequence[Tensor]) -> None:
    unused = [param for param in params if param.grad is None]
    average(params)
    for param in unused:
        param.grad = None


TRAINING = "Training equals a replica's"
MICRO_BATCHES = "Two micro-batches, the first in `no_sync`"
CLIPPING = "Clipping by the norm: the norms, and what follows"
# By where a fault was reported and what it was: the row that notices it, and the methods that have it.
FAULTS: dict[str, tuple[str, dict[str, Callable[..., Any]]]] = {
    "verl#7493: gradients are never averaged": (TRAINING, {"reduce": lambda self, params: None}),
    "Megatron-LM#3023: the sum over ranks, not the mean": (
        TRAINING,
        {"leave": lambda self, params: scale(params, dist.get_world_size())},
    ),
    "Megatron-LM#6660: each micro-batch doubles what was there": (
        MICRO_BATCHES,
        {"enter": lambda self, params: scale(params, 2)},
    ),
    "Megatron-LM#5974: the step that makes state counts": ("AdamW", {"prepare": counted_step}),
    "pytorch#170862: clips by the norm of what this rank holds": (CLIPPING, {"clip_grad_norm_": local_norm}),
    "transformers#46113: clips nothing": (
        CLIPPING,
        {"clip_grad_norm_": lambda self, model, max_norm, norm_type=2.0: norm_of(self.params, norm_type)},
    ),
    "pytorch#148334: no gradient on ranks that did not use a parameter": (
        "A parameter used on one rank only",
        {"reduce": only_where_used},
    ),
    "pytorch#117421: a state dict is loaded without effect": (
        "A full state dict, loaded",
        {"load_full_state_dict": lambda *_: None},
    ),
}

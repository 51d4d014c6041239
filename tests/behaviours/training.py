"""Rows of wrapping, optimizers and accumulation."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

from behaviours.rows import (
    Wrong,
    advance,
    batch,
    conv_net,
    pair,
    require,
    row,
    same,
    scene,
    squares,
    three_steps,
    two_layers,
)
from behaviours.wrappers import Wrapper
from small import average_gradients, sgd

# wrapping


def scalar(net: nn.Module) -> None:
    net.scale = nn.Parameter(torch.tensor(0.5))


row("Wrapping", "Training equals a replica's")
row("Wrapping", "BatchNorm", make=conv_net)
row(
    "Wrapping",
    "Parameters smaller than the world",
    make=lambda: nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 1)),
)
row("Wrapping", "A 0-dim parameter", before=scalar)
to_last = partial(nn.Module.to, memory_format=torch.channels_last)
row("Wrapping", "channels_last convolutions", make=conv_net, before=to_last)


@scene("Wrapping")
def divergent_weights(api: Wrapper) -> None:
    """Initial weights that differ between ranks become rank 0's"""
    torch.manual_seed(dist.get_rank())
    model = api.shard(two_layers())
    torch.manual_seed(0)
    same(api, model, two_layers())


@scene("Failures", "differ")
def different_models(api: Wrapper) -> None:
    """Models that differ between ranks"""
    squares(api.shard(nn.Linear(5, 7 + 2 * dist.get_rank())), 0)
    raise Wrong("nothing is said")


# optimizers


def named(name: str, **options: Any) -> Callable[[nn.Module], Any]:
    return lambda net: getattr(torch.optim, name)(net.parameters(), lr=0.01, **options)


row("Optimizers", "AdamW", optimizer=named("AdamW"))
row("Optimizers", "`SGD(fused=True)`", "fused|SGD", optimizer=named("SGD", fused=True))
for name in ("Adafactor", "Muon"):
    row("Optimizers", name, name, make=two_layers, optimizer=named(name))


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation, by the norm of all gradients."""

    def __init__(self, params: Any, base: type[torch.optim.Optimizer]) -> None:
        super().__init__(params, {})
        self.base = base(self.param_groups, lr=0.05)  # type: ignore[call-arg]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [param for group in self.param_groups for param in group["params"]]
        if closure is not None:
            norm = torch.stack([param.grad.norm() for param in params]).norm()
            moves = [0.05 * param.grad / norm for param in params]
            torch._foreach_add_(params, moves)
            torch.enable_grad()(closure)()
            torch._foreach_sub_(params, moves)
        return self.base.step()


class Lars(torch.optim.SGD):
    """SGD in which norms scale each parameter's gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            param.grad.mul_(param.norm() / (param.grad.norm() + 1e-8))
        return super().step(closure)


def warming_up(net: nn.Module) -> Any:
    optimizer = Lars(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 9)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer


by_sam = lambda net: Sam(net.parameters(), torch.optim.SGD)  # noqa: E731
row("Optimizers", "SAM: moves by the norm of all gradients", "Sam", optimizer=by_sam)
row("Optimizers", "LARS in a warm-up that begins with a learning rate of 0", "Lars", optimizer=warming_up)


@scene("Optimizers")
def optimizer_in_backward(api: Wrapper) -> None:
    """One for each parameter, which steps in backward"""
    model, replica = pair(api)
    for param in model.parameters():
        own = torch.optim.SGD([param], 0.05)
        param.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    squares(model, 0)
    squares(replica, 0)
    average_gradients(replica)
    torch.optim.SGD(replica.parameters(), 0.05).step()
    same(api, model, replica)


@scene("Optimizers", role="optimizer")
def grouped(net: nn.Module) -> Any:
    """Groups chosen by `p.ndim` after wrapping"""
    decayed, others = ([p for p in net.parameters() if (p.ndim < 2) is flat] for flat in (False, True))
    return torch.optim.SGD([{"params": decayed, "weight_decay": 0.5}, {"params": others}], lr=0.05)


def spoil(net: Any, value: float) -> None:
    """Multiply one gradient, of a single element, which one rank owns where models are sharded."""
    if net.scale.grad is not None:
        net.scale.grad.mul_(value)


def scaled(net: nn.Module) -> Any:
    optimizer = sgd(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    step = lambda: (scaler.step(optimizer), scaler.update())  # noqa: E731
    return SimpleNamespace(zero_grad=optimizer.zero_grad, step=step)


def overflow(net: nn.Module, number: int) -> None:
    squares(net, number)
    spoil(net, torch.inf if number == 1 else 1.0)


title = "torch's `GradScaler`, where one rank's gradients overflow"
row("Optimizers", title, "GradScaler", step=overflow, optimizer=scaled)


@scene("Optimizers")
def optimizer_before(api: Wrapper) -> None:
    """Built before wrapping"""
    torch.manual_seed(0)
    model = two_layers()
    replica = copy.deepcopy(model)
    early = sgd(model)
    model = api.shard(model)
    advance(api, model, replica, optimizer=lambda net: early if net is model else sgd(net))


@scene("Optimizers")
def clipped(api: Wrapper) -> None:
    """Clipping by the norm: the norms, and what follows"""
    model, replica = pair(api)
    norms = []
    clip = lambda net: norms.append(api.clip_grad_norm_(net, 0.1))  # noqa: E731
    three_steps(model, api.prepare(model, sgd(model)), squares, clip)
    clip = lambda net: (average_gradients(net), norms.append(clip_grad_norm_(net.parameters(), 0.1)))  # noqa: E731
    three_steps(replica, sgd(replica), squares, clip)
    require(
        torch.allclose(torch.stack(norms[:3]), torch.stack(norms[3:]), rtol=1e-4),
        "another norm than the replica's",
    )
    same(api, model, replica)


@scene("Optimizers")
def clips_a_nan(api: Wrapper) -> None:
    """Clipping by the largest gradient, where one rank has a NaN"""
    model, _ = pair(api)
    squares(model, 0)
    spoil(model, torch.nan)
    require(api.clip_grad_norm_(model, 1.0, norm_type=torch.inf).isnan(), "the norm is a number")


# accumulation


@scene("Accumulation")
def micro_batches(api: Wrapper) -> None:
    """Two micro-batches, the first in `no_sync`"""
    model, replica = pair(api)

    def step(net: Any, number: int) -> None:
        with api.no_sync(net) if net is model else contextlib.nullcontext():
            squares(net, 2 * number)
        squares(net, 2 * number + 1)

    advance(api, model, replica, step)


@scene("Accumulation", role="step")
def three_backwards(net: nn.Module, number: int) -> None:
    """Three micro-batches, each of them reduced"""
    for micro in range(3):
        squares(net, 3 * number + micro)


@scene("Accumulation", role="step")
def two_forwards(net: nn.Module, number: int) -> None:
    """One backward of two forwards"""
    (net(batch(number)).square().mean() + net(batch(number + 9)).abs().mean()).backward()


@scene("Accumulation", role="step")
def uneven_batches(net: nn.Module, number: int) -> None:
    """Uneven and empty batches"""
    n = (dist.get_rank() + number) % 3  # one rank has nothing
    net(torch.randn(n, 5, generator=torch.Generator().manual_seed(number))).square().sum().backward()

"""What users' code does to a sharding wrapper: the rows that `shardtrain.judge` tries.

Models have odd sizes, which no world size divides.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributions import Normal
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, prune
from torch.utils.checkpoint import checkpoint

from shardtrain.judge import rows
from shardtrain.judge.rows import NAMED, Step, Wrong, average_gradients, require, same, three_steps
from shardtrain.judge.wrappers import Wrapper

Change = Callable[[Any], object]


# models, data, steps


class Unit(nn.Module):
    """A unit of odd sizes, whose forward a row may replace."""

    def __init__(self, forward: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.inside, self.norm = nn.Linear(7, 7), nn.LayerNorm(7)
        self.does = forward

    def forward(self, x: Any, *rest: Any) -> Any:
        return self.does(self, x, *rest) if self.does else self.plain(x)

    def plain(self, x: Tensor) -> Any:
        return self.norm(self.inside(x)).relu() + x


class Net(nn.Module):
    """Three units between parameters of the root; ``take`` makes the next input of a unit's output."""

    def __init__(
        self, unit: Any = None, root: Any = None, blocks: int = 3, take: Any = lambda out: out
    ) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, 7), nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor([0.5]))
        self.blocks = nn.ModuleList(Unit(unit) for _ in range(blocks))
        self.does, self.take = root, take

    def forward(self, x: Tensor) -> Any:
        out = self.does(self, x) if self.does else self.head(self.through(x, *range(len(self.blocks))))
        return out * self.scale if isinstance(out, Tensor) else out

    def through(self, x: Tensor, *blocks: int) -> Any:
        """Return what the stem and the blocks of these numbers make of ``x``."""
        x = self.stem(x)
        for index in blocks:
            x = self.take(self.blocks[index](x))
        return x

    def encode(self, x: Tensor) -> Any:
        return self.blocks[0].plain(self.stem(x)) * self.scale


class Outer(nn.Module):
    """A unit that calls units which are also called by themselves."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.own = nn.ModuleList(inner), nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        for inner in self.inner:
            x = inner(self.own(x))
        return x


class Parts(nn.Module):
    """A module of parts by name; ``forward`` gets it and the inputs."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.does = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any) -> Any:
        return self.does(self, *args)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7, bias=False), nn.ReLU(), nn.Linear(7, 6, bias=False))


def conv_net() -> nn.Module:
    layers = (nn.Conv2d(1, 7, 3, bias=False), nn.BatchNorm2d(7), nn.ReLU(inplace=True), nn.Flatten())
    return nn.Sequential(nn.Unflatten(1, (1, 1, 5)), nn.Upsample((5, 5)), *layers, nn.Linear(63, 5))


def batch(step: int) -> Tensor:
    """Return four rows of five numbers, others for each step and rank."""
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def squares(net: nn.Module, number: int) -> None:
    net(batch(number)).square().mean().backward()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def pair(api: Wrapper, make: Callable[[], Any] = Net) -> tuple[Any, Any]:
    return rows.pair(api, make)


def advance(api: Wrapper, model: Any, replica: Any, step: Step = squares, optimizer: Any = sgd) -> None:
    rows.advance(api, model, replica, step, optimizer)


def row(kind: str, name: str, named: str = NAMED, run: Any = None, **parts: Any) -> None:
    """Add a row; ``unit`` and ``root`` are forwards of a `Net`."""
    if run is None:
        unit, root = parts.pop("unit", None), parts.pop("root", None)
        parts = {"make": lambda: Net(unit, root), "step": squares, "optimizer": sgd, **parts}
    rows.row(kind, name, named, run, **parts)


def scene(kind: str, named: str = NAMED, role: str = "run") -> Callable[[Any], Any]:
    """Make a function a row, or a part of one, named by its docstring."""

    def register(function: Any) -> Any:
        row(kind, function.__doc__, named, **{role: function})
        return function

    return register


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
    """Sharpness-aware minimisation, of all parameters together. Cannot be built from groups alone."""

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
    """Scales each parameter's gradient by norms, from ``smallest`` × ``smallest`` upwards."""

    smallest = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if min(param.shape) >= self.smallest:
                param.grad.mul_(param.norm() / (param.grad.norm() + 1e-8))
        return super().step(closure)


class From32(Lars):
    smallest = 32


def warming_up(net: nn.Module) -> Any:
    optimizer = Lars(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 9)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer


by_sam = lambda net: Sam(net.parameters(), torch.optim.SGD)  # noqa: E731
row("Optimizers", "SAM: cannot be built from its groups alone", "Sam", optimizer=by_sam)
row("Optimizers", "LARS in a warm-up that begins with a learning rate of 0", "Lars", optimizer=warming_up)
row(
    "Optimizers",
    "One that looks at whole matrices from 32 × 32 upwards, as timm's Adafactor does",
    "From32",
    make=lambda: nn.Sequential(nn.Linear(5, 33, bias=False), nn.Linear(33, 33, bias=False)),
    optimizer=lambda net: From32(net.parameters(), 0.01),
)


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
    optimizer, scaler = sgd(net), torch.amp.GradScaler("cpu", init_scale=1.0)
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
    replica, early = copy.deepcopy(model), sgd(model)
    model = api.shard(model)
    advance(api, model, replica, optimizer=lambda net: early if net is model else sgd(net))


@scene("Optimizers")
def optimizer_after_a_forward(api: Wrapper) -> None:
    """Built after a forward"""
    model, replica = pair(api)
    model(batch(9))
    advance(api, model, replica)


@scene("Optimizers")
def clipped(api: Wrapper) -> None:
    """Clipping by the norm: the norms, and what follows"""
    (model, replica), norms = pair(api), []
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


# outputs, calls, edits

KIND = "Outputs, calls, edits"


def detached_beside(self: Any, x: Tensor) -> Tensor:
    weight = self.inside.weight
    return F.linear(F.linear(x, weight).tanh(), weight.detach()) + self.norm(x)


def gradient_penalty(net: nn.Module, number: int) -> None:
    x = batch(number).requires_grad_()
    (slope,) = torch.autograd.grad(net(x).tanh().sum(), x, create_graph=True)
    slope.square().sum().backward()


def autograd_grad(net: nn.Module, number: int) -> None:
    params = list(net.parameters())
    slopes = torch.autograd.grad(net(batch(number)).square().mean(), params, allow_unused=True)
    for param, slope in zip(params, slopes, strict=True):
        param.grad = slope


def distribution(self: Any, x: Tensor) -> Normal:
    return Normal(self.head(self.blocks[0](self.stem(x))), self.scale.exp())


def entropy(net: nn.Module, number: int) -> None:
    out = net(batch(number))
    for param in net.parameters():  # clears what an earlier step left, between forward and backward
        param.grad = None
    (-out.log_prob(torch.ones(3)).mean()).backward()


def ratio(net: nn.Module, number: int) -> None:
    """Compare with the distribution of another forward, as PPO does."""
    out = net(batch(number))
    with torch.no_grad():
        before = net(batch(number)).log_prob(torch.ones(3))
    (out.log_prob(torch.ones(3)) - before).exp().mean().backward()


def opaque_and_plain(self: Any, x: Tensor) -> tuple[Tensor, SimpleNamespace]:
    h = self.plain(x)
    return h.detach(), SimpleNamespace(h=h)


def remembers(self: Any, x: Tensor) -> Tensor:
    self.hidden = self.inside(x)
    normed: Tensor = self.norm(self.hidden)
    return normed


def loss_on_an_attribute(net: Any, number: int) -> None:
    """Of a unit in the middle, whose own output has no gradient."""
    net(batch(number))
    net.blocks[1].hidden.square().mean().backward()


def two_backwards(net: nn.Module, number: int) -> None:
    losses = [net(batch(2 * number + i)).square().mean() for i in range(2)]
    for loss in losses:
        loss.backward()


def one_graph_twice(net: nn.Module, number: int) -> None:
    loss = net(batch(number)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def a_child_by_itself(net: Any, number: int) -> None:
    (net(batch(number)).square().mean() + net.blocks[0](torch.ones(2, 7)).mean()).backward()
    with torch.no_grad():
        require(net.head(torch.ones(1, 7)).shape == (1, 3), "another shape")


def without_stem(self: Any, x: Tensor) -> Any:
    return self.head(nn.Sequential(*self.blocks)(F.pad(x, (0, 2))))


def constant() -> nn.Module:
    """No inputs, fp32 and fp64 parameters, and a part without any."""

    def forward(self: Any) -> Tensor:
        total: Tensor = self.act(self.wide).square().sum() + self.narrow.square().sum() + self.empty.sum()
        return total

    values = (torch.linspace(0, 1, 5, dtype=torch.float64), torch.linspace(0, 1, 3), torch.zeros(0, 4))
    wide, narrow, empty = map(nn.Parameter, values)
    return Parts(forward, act=nn.ReLU(), wide=wide, narrow=narrow, empty=empty)


def complex_numbers() -> nn.Module:
    used, unused = (nn.Parameter(torch.randn(5, 3, dtype=torch.complex64)) for _ in range(2))
    return Parts(lambda self, x: (x.to(torch.complex64) @ self.used).abs(), used=used, unused=unused)


def freezes_before_backward(net: Any, number: int) -> None:
    out = net(batch(number))
    net.blocks[1].requires_grad_(False)
    out.square().mean().backward()
    require(all(p.grad is None for p in net.blocks[1].parameters()), "a frozen parameter has a gradient")
    net.blocks[1].requires_grad_(True)


def momentum_encoder(replaced: bool, self: Any, x: Tensor) -> Any:
    """Update a key encoder as MoCo does: inside forward, or replaced there."""
    query, key = self.blocks[0], self.blocks[1]
    with torch.no_grad():
        for ours, theirs in zip(key.parameters(), query.parameters(), strict=True):
            if replaced:
                ours.data = 0.9 * ours.data + 0.1 * theirs.data
            else:
                ours.mul_(0.9).add_(theirs, alpha=0.1)
        x = self.stem(x)
        target = key(x)
    return self.head(query(x) - target)


def guided(self: Any, x: Tensor) -> Any:
    """Follow the gradient of an energy, as guidance does."""
    with torch.enable_grad():
        at = self.stem(x).detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.blocks[0](self.blocks[1](at)).square().sum(), at)
    return self.head(self.blocks[2](self.blocks[1](self.stem(x) - 0.1 * slope)))


def again_inside() -> nn.Module:
    net = Net(root=lambda self, x: self.head(self.outer[0](self.blocks[2](self.blocks[0](self.stem(x))))))
    net.outer = nn.ModuleList([Outer(net.blocks[0], net.blocks[1])])
    return net


def shared_between_units() -> nn.Module:
    net = Net(root=lambda self, x: self.head(self.outer[1](self.blocks[2](self.outer[0](self.stem(x))))))
    net.outer = nn.ModuleList([Outer(net.blocks[0]), Outer(net.blocks[0], net.blocks[1])])
    return net


CALLS: dict[str, Callable[[], nn.Module]] = {
    "a unit, and again inside another": again_inside,
    "a unit inside two others": shared_between_units,
    "a detached use of a weight beside a normal one": lambda: Net(detached_beside),
    "autograd.grad inside forward": lambda: Net(root=guided),
}
for name, make in CALLS.items():
    row(KIND, name, make=make)
row(KIND, "An object of the root", root=distribution, step=entropy)
row(KIND, "An object of the root, and another forward before backward", root=distribution, step=ratio)
row(
    KIND,
    "Objects of two forwards",
    make=lambda: Net(lambda self, x: SimpleNamespace(h=x @ self.inside.weight), take=lambda out: out.h),
    step=two_forwards,
)
row(KIND, "A loss on an inner activation", unit=remembers, step=loss_on_an_attribute)
row(KIND, "No inputs, empty parameters, mixed dtypes", make=constant, step=lambda net, _: net().backward())
row(
    KIND,
    "Units that compute on one rank only, in two forwards",
    make=lambda: Net(lambda self, x: x if dist.get_rank() else self.plain(x), without_stem),
    step=two_forwards,
)
row(
    KIND,
    "Unfreezing parameters later",
    before=lambda net: net.blocks.requires_grad_(False),
    step=lambda net, number: (net.blocks.requires_grad_(number > 0), squares(net, number)),
)
row(
    KIND,
    "An embedding with `max_norm`",
    make=lambda: nn.Sequential(nn.Embedding(11, 7, max_norm=0.01), nn.Linear(7, 3)),
    step=lambda net, number: net(torch.arange(9) + number % 2).square().mean().backward(),
)

# part of `like_a_replica`: names and values
PARTS: dict[str, dict[str, Any]] = {
    "make": {
        "Complex parameters": complex_numbers,
        "A tensor and an object": lambda: Net(opaque_and_plain, take=lambda out: out[1].h),
        "None, defaultdict": lambda: Net(
            lambda self, x: defaultdict(list, h=[self.plain(x)], none=None), take=lambda out: out["h"][0]
        ),
        "An object of a unit": lambda: Net(
            lambda self, x: SimpleNamespace(h=self.plain(x)), take=lambda out: out.h
        ),
        "Work in place on a view that a unit returned": lambda: Net(
            lambda self, x: F.linear(x, self.inside.weight)[:, :], take=lambda out: out.add_(1)
        ),
    },
    "unit": {
        "A unit's parameter": lambda self, x: self.inside.weight[:4],
        "A view of a unit's parameter": lambda self, x: self.inside.weight[:4] * 2.0,
        "A parameter used on one rank only": lambda self, x: self.norm(
            x if dist.get_rank() else self.inside(x)
        ),
        "A parameter used nowhere, in a unit that ran": lambda self, x: self.norm(x),
    },
    "root": {
        "A momentum encoder updated inside forward": partial(momentum_encoder, False),
        "A momentum encoder replaced inside forward": partial(momentum_encoder, True),
        "A unit called twice, another never": lambda self, x: self.head(self.through(x, 0, 0, 2)),
        "A unit whose output matters on one rank only": lambda self, x: [
            block(self.stem(x)) for block in self.blocks
        ][dist.get_rank() > 0],
        "The parent reads a unit's weight": lambda self, x: F.linear(
            self.through(x, 0, 1, 2), self.blocks[0].inside.weight
        ),
        "Reentrant activation checkpointing": lambda self, x: self.head(
            checkpoint(self.blocks[0], self.stem(x), use_reentrant=True)
        ),
    },
    "step": {
        "A root parameter used after forward": lambda net, n: (
            net(batch(n)).square().mean() * net.scale.exp().sum() + net.head.bias.sum()
        ).backward(),
        "`torch.compile(model)`": lambda net, n: squares(torch.compile(net, backend="eager"), n),
        "`vmap`": lambda net, n: torch.func.vmap(net)(batch(n)).mean().backward(),
        "`jvp`": lambda net, n: torch.func.jvp(net, (batch(n),), (batch(9),))[1].mean().backward(),
        "A penalty on parameters in the same backward": lambda net, n: (
            net(batch(n)).mean() + sum(param.norm() for param in net.parameters())
        ).backward(),
        "Two forwards, then two backwards": two_backwards,
        "`retain_graph`": one_graph_twice,
        "A child called by itself": a_child_by_itself,
        "Freezing between forward and backward": freezes_before_backward,
        "Double backward": gradient_penalty,
        "`autograd.grad` over parameters": autograd_grad,
    },
    "before": {
        "Weights tied across units": lambda net: setattr(
            net.blocks[2].inside, "weight", net.blocks[0].inside.weight
        ),
        "Units compiled before wrapping": lambda net: [b.compile(backend="eager") for b in net.blocks],
    },
    "change": {
        "`model.compile()`": lambda net: net.compile(backend="eager"),
        "`inference_mode`, then training": lambda net: torch.inference_mode()(lambda: net(batch(0)))(),
        "Pruning after wrapping": lambda net: prune.l1_unstructured(net.head, "weight", amount=0.3),
        "`layer.bias = None` after wrapping": lambda net: setattr(net.head, "bias", None),
        "A module attached after wrapping": lambda net: setattr(net, "head", nn.Linear(7, 3)),
    },
}
for part, of_part in PARTS.items():
    for name, value in of_part.items():
        row(KIND, name, f"{NAMED}|{name.strip('`')}", **{part: value})


@scene(KIND)
def other_methods(api: Wrapper) -> None:
    """A method other than `forward`, once it is declared"""
    model, replica = pair(api)
    api.forward_method(model, "encode")
    api.forward_method(model.blocks[0], "plain")
    advance(
        api, model, replica, lambda net, n: (net.encode(batch(n)) + net(batch(n)).mean()).sum().backward()
    )


def interrupted(api: Wrapper, where: str) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    model, replica = pair(api)
    handle = getattr(model.blocks[0].norm, f"register_{where}_hook")(interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        squares(model, 9)
    handle.remove()
    same(api, model, replica)
    advance(api, model, replica)


row(KIND, "Ctrl-C in forward, then a full state dict and steps", run=interrupted, where="forward")
row(KIND, "Ctrl-C in backward, then the same", run=interrupted, where="full_backward")


@scene(KIND)
def containers_in_bf16(api: Wrapper) -> None:
    """Lists and a `defaultdict` that a unit fills, in bf16"""

    def unit(self: Any, x: Tensor, kept: Any) -> Any:
        kept["h"].append(x)
        return self.plain(x)

    kept: Any = defaultdict(list)
    api.shard_in_bf16(Net(unit)).blocks[0](torch.ones(4, 7), kept)
    require(len(kept["h"]) == 1, "they stay empty")


row(KIND, "BatchNorm in bf16", run=lambda api: squares(api.shard_in_bf16(conv_net()), 0))


# state


@contextlib.contextmanager
def folder() -> Iterator[str]:
    """Yield a directory that all ranks see."""
    path = [tempfile.mkdtemp()]
    dist.broadcast_object_list(path, 0)
    yield path[0]
    dist.barrier()
    shutil.rmtree(path[0], ignore_errors=True)


@scene("State")
def resumed(api: Wrapper) -> None:
    """Saved, loaded into a new model, and trained on"""
    model, replica = pair(api)
    optimizer, theirs = sgd(model), sgd(replica)
    three_steps(model, api.prepare(model, optimizer), squares)
    three_steps(replica, theirs, squares, average_gradients)
    with folder() as path:
        api.save(f"{path}/one", model, optimizer)
        model = api.shard(Net())
        optimizer = sgd(model)
        api.load(f"{path}/one", model, optimizer)
    advance(api, model, replica, optimizer=lambda net: optimizer if net is model else theirs)


@scene("State")
def dcp_of_local_state(api: Wrapper) -> None:
    """`dcp.save(model.state_dict())`, loaded into a plain model"""
    model, plain = pair(api, two_layers)[0], two_layers()
    with folder() as path:
        dcp.save(model.state_dict(), checkpoint_id=path)
        dcp.load(plain.state_dict(), checkpoint_id=path)
    same(api, model, plain)


@scene("State")
def torch_save(api: Wrapper) -> None:
    """`torch.save(model.state_dict())` (`save_pretrained`), loaded into a plain model"""
    model, plain = pair(api, two_layers)[0], two_layers()
    stored = io.BytesIO()
    torch.save(model.state_dict(), stored)
    plain.load_state_dict(torch.load(io.BytesIO(stored.getvalue()), weights_only=False))
    same(api, model, plain)


def bad_state(api: Wrapper, dtype: torch.dtype | None) -> None:
    model, replica = pair(api)
    state = {name: value + 1 for name, value in replica.state_dict().items()}
    bias = state.pop("head.bias")
    state.update({"head.bias": bias.to(dtype)} if dtype else {})
    try:
        api.load_full_state_dict(model, state)
    except Exception:
        same(api, model, replica)
        raise
    raise Wrong("it was loaded without a word")


row("State", "Loading a full state dict without a key: nothing is loaded", "head.bias", bad_state, dtype=None)
row(
    "State",
    "Loading a full state dict in float64: nothing is loaded",
    "head.bias",
    bad_state,
    dtype=torch.float64,
)


@scene("State")
def loaded(api: Wrapper) -> None:
    """A full state dict, loaded"""
    model, replica = pair(api)
    state = {name: value + 1 for name, value in replica.state_dict().items()}
    replica.load_state_dict(state)
    api.load_full_state_dict(model, state)
    same(api, model, replica)


@scene("State")
def full_state(api: Wrapper) -> None:
    """`get_model_state_dict(full_state_dict=True)`"""
    model, replica = pair(api, two_layers)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    require(state["0.weight"].equal(replica[0].weight), "it returns pieces")


@scene("State")
def batch_norm_saves(api: Wrapper) -> None:
    """BatchNorm: a save does not depend on the rank"""
    model, _ = pair(api, conv_net)
    squares(model, 0)
    mean = api.full_state_dict(model)["3.running_mean"].contiguous()
    means = [torch.empty_like(mean) for _ in range(dist.get_world_size())]
    dist.all_gather(means, mean)
    require(torch.equal(means[0], means[1]), "what is saved depends on the rank")


# memory


def with_bias(self: Any, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    bias = self.inside(x).mean(0) if bias is None else bias
    return self.norm(self.inside(x) + bias), bias


def passes_through(self: Any, x: Tensor) -> Any:
    """T5's position bias is made by the first block, and returned by all."""
    h, bias = self.stem(x), None
    for block in self.blocks:
        h, bias = block(h, bias)
    return self.head(h)


def teacher(self: Any, x: Tensor) -> Any:
    h = self.through(x, *range(7))
    with torch.no_grad():
        target = self.through(x.flip(0), *range(7))
    return self.head(h - target)


def at_once(api: Wrapper, **forwards: Any) -> None:
    """Train a model of seven units, and count those that are whole while a unit computes."""
    model, replica = pair(api, lambda: Net(**forwards, blocks=7))
    counts = []

    def count(*args: Any) -> None:
        weights = [block.inside.weight for block in model.blocks]
        counts.append(sum(type(weight.data) is Tensor and weight.shape == (7, 7) for weight in weights))
        if args[-1].grad_fn:  # in forward
            args[-1].register_hook(count)

    for block in model.blocks:
        block.norm.register_forward_hook(count)
    advance(api, model, replica)
    require(max(counts) <= 3, f"{max(counts)} of 7 units are whole at once")


title = "A tensor that passes through all units (T5's position bias): three are whole at most"
row("Memory", title, run=at_once, unit=with_bias, root=passes_through)
title = "Trainable units run once more, last, without gradients (BYOL): the same"
row("Memory", title, run=at_once, root=teacher)


@scene("Memory")
def threads(api: Wrapper) -> None:
    """A model that is gone leaves no threads behind"""
    running = []
    for _ in range(4):
        squares(pair(api)[0], 0)
        gc.collect()
        time.sleep(0.5)  # gloo's end a moment later
        running.append(len(os.listdir("/proc/self/task")))
    require(running[-1] <= min(running[:2]), f"{running} threads after each model")


# failures


def many(api: Wrapper) -> None:
    with torch.no_grad():
        api.shard(nn.Sequential(*(nn.Linear(5, 5) for _ in range(300))))(batch(0))


row("Failures", "300 units under `no_grad`", run=many)
orders = ((0, 1, 2), (0, 2, 1))
swapped = lambda self, x: self.head(self.through(x, *orders[dist.get_rank() > 0]))  # noqa: E731
row("Failures", "Ranks that run units in another order", r"\branks?\b.*block", root=swapped)


@scene("Failures", "rank 1")
def unequal_steps(api: Wrapper) -> None:
    """Unequal numbers of steps"""
    model, _ = pair(api)
    for number in range(3 - dist.get_rank()):
        squares(model, number)


@scene("Failures", "rank 1")
def stopped(api: Wrapper) -> None:
    """A rank that is stopped: the time-out of 2 s says so"""
    model, _ = pair(api)
    squares(model, 0)
    api.set_time_out(timedelta(seconds=2))
    if dist.get_rank() == 1:
        subprocess.Popen(["sh", "-c", f"sleep 6; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        squares(model, 1)


@scene("Failures")
def busy(api: Wrapper) -> None:
    """A rank that is at work between steps for longer than the time-out"""
    model, _ = pair(api)
    squares(model, 0)
    api.set_time_out(timedelta(seconds=1.5))
    time.sleep(4.0 * dist.get_rank())
    squares(model, 1)

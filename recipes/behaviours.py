"""What users' code does to a sharding wrapper: models, how a row is written, and rows of training.

Most rows train a model and a replica, whose gradients are averaged by hand, on other data on each rank: equal
data would hide a wrapper that averages nothing. Models have odd sizes, which no world size divides.
`behaviours_of_calls` and `behaviours_of_state` have the other rows.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from shardtrain.judge.rows import NAMED, ROWS, Row, Wrong
from shardtrain.judge.wrappers import Wrapper

Change = Callable[[Any], object]
Step = Callable[[Any, int], object]  # a forward and a backward of a model, with the number of the step


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


def pair(api: Wrapper, make: Callable[[], Any] = Net, before: Change = id) -> tuple[Any, Any]:
    """Return a new model sharded, and its replica; ``before`` is done to it before wrapping."""
    torch.manual_seed(0)
    replica = make()
    before(replica)
    return api.shard(copy.deepcopy(replica)), replica


def advance(api: Wrapper, model: Any, replica: Any, step: Step = squares, optimizer: Any = sgd) -> None:
    """Train both, the replica with gradients averaged by hand, and require equal parameters."""
    three_steps(model, api.prepare(model, optimizer(model)), step)
    three_steps(replica, optimizer(replica), step, average_gradients)
    same(api, model, replica)


def three_steps(net: nn.Module, optimizer: Any, step: Step, after: Change = id) -> None:
    """Train ``net`` for three steps; ``after`` is done to it between backward and update."""
    for number in range(3):
        optimizer.zero_grad()
        step(net, number)
        after(net)
        optimizer.step()


def same(api: Wrapper, model: nn.Module, replica: nn.Module) -> None:
    """Require the replica's parameters of the sharded model, on every rank."""
    whole = api.full_state_dict(model)
    for name, param in replica.named_parameters():
        require(name in whole, f"{name} is missing")
        require(whole[name].shape == param.shape, f"{name} has another shape")
        close = torch.allclose(whole[name], param.detach(), rtol=1e-4, atol=1e-5)
        require(close, f"{name} differs from the replica's")


def require(condition: object, message: str) -> None:
    """Raise Wrong with ``message`` unless ``condition`` holds."""
    if not condition:
        raise Wrong(message)


def average_gradients(model: nn.Module) -> None:
    """Do what replicas do by hand: the mean over ranks, and None only where no rank has a gradient."""
    average(list(model.parameters()))


def average(params: Sequence[Tensor]) -> None:
    for param in params:
        has = torch.tensor(float(param.grad is not None))
        dist.all_reduce(has)
        if has:
            total = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(total)
            param.grad = total / dist.get_world_size()


def like_a_replica(
    api: Wrapper,
    make: Callable[[], Any] | None = None,
    step: Step = squares,
    optimizer: Any = sgd,
    before: Change = id,
    change: Change = id,
    unit: Any = None,
    root: Any = None,
) -> None:
    """Train a model sharded, and a replica; ``change`` is done to both models after wrapping.

    ``unit`` and ``root`` are forwards of a `Net`, where ``make`` makes no other model.
    """
    model, replica = pair(api, make or (lambda: Net(unit, root)), before)
    for net in (model, replica):
        torch.manual_seed(1)
        change(net)
    advance(api, model, replica, step, optimizer)


def row(kind: str, name: str, named: str = NAMED, run: Any = like_a_replica, **parts: Any) -> None:
    """Add a row: what ``run`` does with a wrapper and ``parts``."""
    ROWS[name[0].upper() + name[1:]] = Row(kind, partial(run, **parts), named)


def scene(kind: str, named: str = NAMED, role: str = "run") -> Callable[[Any], Any]:
    """Make a function a row, or the part ``role`` of `like_a_replica`, named by its docstring."""

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

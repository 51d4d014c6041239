"""Rows of what models return, call and edit."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from behaviours.rows import (
    NAMED,
    Net,
    Outer,
    advance,
    batch,
    conv_net,
    pair,
    require,
    row,
    same,
    scene,
    squares,
)
from behaviours.training import two_forwards
from behaviours.wrappers import Wrapper
from small import Parts

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


def momentum_encoder(self: Any, x: Tensor) -> Any:
    """Update a key encoder inside forward, as MoCo does."""
    query = self.blocks[0]
    key = self.blocks[1]
    with torch.no_grad():
        for ours, theirs in zip(key.parameters(), query.parameters(), strict=True):
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


CALLS: dict[str, Callable[[], nn.Module]] = {
    "a unit, and again inside another": again_inside,
    "a detached use of a weight beside a normal one": lambda: Net(detached_beside),
    "autograd.grad inside forward": lambda: Net(root=guided),
}
for name, make in CALLS.items():
    row(KIND, name, make=make)
row(KIND, "An object of the root", root=distribution, step=entropy)
row(KIND, "An object of the root, and another forward before backward", root=distribution, step=ratio)
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
        "A parameter used on one rank only": lambda self, x: self.norm(
            x if dist.get_rank() else self.inside(x)
        ),
        "A parameter used nowhere, in a unit that ran": lambda self, x: self.norm(x),
    },
    "root": {
        "A momentum encoder updated inside forward": momentum_encoder,
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

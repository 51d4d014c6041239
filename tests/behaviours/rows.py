"""Models of odd sizes, how a row is written, and what it says of a wrapper.

Most rows train a model and a replica, whose gradients are averaged by hand, on other data on each rank: equal
data would hide a wrapper that averages nothing. No world size divides the models' sizes.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from behaviours.wrappers import NotOffered, Wrapper
from small import average_gradients, sgd

Change = Callable[[Any], object]
Step = Callable[[Any, int], object]  # a forward and a backward of a model, with the number of the step

# What a refusal names: something of the user's, or that a thing is not supported.
NAMED = r"weight|bias|\b\w+(\.\w+)*\.\d+\b|sharded|support|differ"


class Wrong(Exception):
    """A result differs from the replica's, and no error says so."""


class Row(NamedTuple):
    """What a row does with a wrapper; ``named``: what a refusal names, a regular expression."""

    kind: str
    run: Callable[[Wrapper], object]
    named: str


class Outcome(NamedTuple):
    verdict: str  # equal, refused, error (which names nothing), wrong, hangs, ends, not offered
    text: str = ""


ROWS: dict[str, Row] = {}


def outcome(wrapper: Wrapper, row: Row) -> Outcome:
    """Run ``row`` on this rank; return what became of it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row.run(wrapper)
    except NotOffered as error:
        return Outcome("not offered", str(error))
    except Wrong as error:
        return Outcome("wrong", str(error))
    except BaseException as error:
        line = next((line for line in str(error).splitlines() if line.strip()), "")
        text = ". ".join([f"{type(error).__name__}: {line}", *getattr(error, "__notes__", ())])
        return Outcome("refused" if re.search(row.named, text) else "error", text)
    return Outcome("equal")


# models and data


class Unit(nn.Module):
    """A unit of odd sizes, whose forward a row may replace."""

    def __init__(self, forward: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.inside = nn.Linear(7, 7)
        self.norm = nn.LayerNorm(7)
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
        self.stem = nn.Linear(5, 7)
        self.head = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor([0.5]))
        self.blocks = nn.ModuleList(Unit(unit) for _ in range(blocks))
        self.does = root
        self.take = take

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
        self.inner = nn.ModuleList(inner)
        self.own = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        for inner in self.inner:
            x = inner(self.own(x))
        return x


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


# what a row is made of


def require(condition: object, message: str) -> None:
    """Raise Wrong with ``message`` unless ``condition`` holds."""
    if not condition:
        raise Wrong(message)


def pair(api: Wrapper, make: Callable[[], Any] = Net, before: Change = id) -> tuple[Any, Any]:
    """Return a new model sharded, and its replica; ``before`` is done to it before wrapping."""
    torch.manual_seed(0)
    replica = make()
    before(replica)
    return api.shard(copy.deepcopy(replica)), replica


def three_steps(net: nn.Module, optimizer: Any, step: Step, after: Change = id) -> None:
    """Train ``net`` for three steps; ``after`` is done to it between backward and update."""
    for number in range(3):
        optimizer.zero_grad()
        step(net, number)
        after(net)
        optimizer.step()


def advance(api: Wrapper, model: Any, replica: Any, step: Step = squares, optimizer: Any = sgd) -> None:
    """Train both, the replica with gradients averaged by hand, and require equal parameters."""
    three_steps(model, api.prepare(model, optimizer(model)), step)
    three_steps(replica, optimizer(replica), step, average_gradients)
    same(api, model, replica)


def same(api: Wrapper, model: nn.Module, replica: nn.Module) -> None:
    """Require the replica's parameters of the sharded model, on every rank."""
    whole = api.full_state_dict(model)
    for name, param in replica.named_parameters():
        require(name in whole, f"{name} is missing")
        require(whole[name].shape == param.shape, f"{name} has another shape")
        close = torch.allclose(whole[name], param.detach(), rtol=1e-4, atol=1e-5)
        require(close, f"{name} differs from the replica's")


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

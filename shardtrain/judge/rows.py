"""How a row of the judge's table is written, and what it says of a wrapper.

A row does with a wrapper what users' code does. Most train a model and a replica, whose gradients are
averaged by hand, on other data on each rank: equal data would hide a wrapper that averages nothing. The rows
themselves are in `shardtrain.recipes.behaviours`.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardtrain.judge.wrappers import NotOffered, Wrapper

# What a refusal names: something of the user's, or that a thing is not supported.
NAMED = r"weight|bias|\b\w+(\.\w+)*\.\d+\b|sharded|support|differ"
Step = Callable[[Any, int], object]  # a forward and a backward of a model, with the number of the step


class Wrong(Exception):
    """A result differs from the replica's, and nobody was told."""


class Row(NamedTuple):
    """Hold what a row does with a wrapper; ``named``: what a refusal names, a regular expression."""

    kind: str
    run: Callable[[Wrapper], object]
    named: str


class Outcome(NamedTuple):
    verdict: str  # equal, refused, error (which names nothing), wrong, hangs, ends, not offered
    text: str = ""


ROWS: dict[str, Row] = {}


def row(kind: str, name: str, named: str = NAMED, run: Any = None, **parts: Any) -> None:
    """Add a row: what ``run`` does with a wrapper and ``parts``, or `like_a_replica` does."""
    ROWS[name[0].upper() + name[1:]] = Row(kind, partial(run or like_a_replica, **parts), named)


def scene(kind: str, named: str = NAMED, role: str = "run") -> Callable[[Any], Any]:
    """Make a function a row, or the part ``role`` of `like_a_replica`, named by its docstring."""

    def register(function: Any) -> Any:
        row(kind, function.__doc__, named, **{role: function})
        return function

    return register


def outcome(wrapper: Wrapper, row: Row) -> Outcome:
    """Run ``row`` on this rank; return what became of it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", message=".* cannot be tried on pieces")
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


def require(condition: object, message: str) -> None:
    """Raise Wrong with ``message`` unless ``condition`` holds."""
    if not condition:
        raise Wrong(message)


def pair(api: Wrapper, make: Callable[[], Any], before: Callable[[Any], object] = id) -> tuple[Any, Any]:
    """Return a new model sharded, and its replica; ``before`` is done to it before wrapping."""
    torch.manual_seed(0)
    replica = make()
    before(replica)
    return api.shard(copy.deepcopy(replica)), replica


def advance(api: Wrapper, model: nn.Module, replica: nn.Module, step: Step, optimizer: Any) -> None:
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
    make: Callable[[], Any],
    step: Step,
    optimizer: Any,
    before: Callable[[Any], object] = id,
    change: Callable[[Any], object] = id,
) -> None:
    """Train a model sharded, and a replica; ``change`` is done to both models after wrapping."""
    model, replica = pair(api, make, before)
    for net in (model, replica):
        torch.manual_seed(1)
        change(net)
    advance(api, model, replica, step, optimizer)


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


def three_steps(net: nn.Module, optimizer: Any, step: Step, after: Callable[[Any], object] = id) -> None:
    """Train ``net`` for three steps; ``after`` is done to it between backward and update."""
    for number in range(3):
        optimizer.zero_grad()
        step(net, number)
        after(net)
        optimizer.step()

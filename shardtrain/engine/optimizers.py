"""Check each optimizer before it steps a sharded model, and describe its state as local shards.

Its own file, since only `Engine` calls it, and no step of the schedule needs it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from shardtrain.comm.norms import GradientPiece
from shardtrain.engine import pieces
from shardtrain.engine.driver import Driver
from shardtrain.engine.segment import Segment, ShardedParam
from shardtrain.engine.user_code import uncompiled
from shardtrain.layout import Policy


class Tryable(NamedTuple):
    """Describe a sharded model to what tries its optimizers.

    ``shapes``: of whole parameters. ``passed``: names of optimizers, with options, that were found right.
    """

    device: torch.device
    layout: Policy
    virtual: int
    shapes: Mapping[nn.Parameter, tuple[int, ...]]
    passed: set[str]


Trial = Callable[[torch.optim.Optimizer, Tryable], None]
Plain = tuple[ShardedParam, GradientPiece]


class Optimizers:
    """Hold what is known of the optimizers that step a model. Written here only."""

    def __init__(self, driver: Driver, segments: Sequence[Segment], members: Sequence[ShardedParam]) -> None:
        self._driver = driver
        self._segments = segments
        self._members = members
        # The sizes of each optimizer's groups when it was checked, and whether it steps this model.
        self._known: weakref.WeakKeyDictionary[Any, tuple[Any, bool]] = weakref.WeakKeyDictionary()
        self._hooks: weakref.WeakKeyDictionary[Any, StepHooks] = weakref.WeakKeyDictionary()
        self._passed: set[str] = set()  # see `Tryable`
        # Optimizers whose own code runs now, each with the parameters whose gradient is plain meanwhile.
        self._stepping: weakref.WeakKeyDictionary[Any, list[Plain]] = weakref.WeakKeyDictionary()
        # Those whose gradients are marked as pieces: none on a silent rank.
        self._marked = [member for member in members if member.owners is not None]

    def before_step(
        self,
        optimizer: torch.optim.Optimizer,
        hooked: Mapping[ShardedParam, tuple[nn.Parameter, Any]],
        trial: Trial,
    ) -> bool:
        """Prepare a step of ``optimizer``, if it steps one of the parameters that are ``hooked``.

        Return whether it does so for the first time, or with other parameters than before.

        Raises ValueError if it is not right on local shards, by ``trial``, or if gradients wait.
        """
        groups = optimizer.param_groups
        sizes = len(groups), sum([len(group["params"]) for group in groups]), len(hooked)
        known, steps = self._known.get(optimizer, (None, False))
        if known != sizes:
            params = {param for param, _ in hooked.values()}
            steps = not all(params.isdisjoint(group["params"]) for group in groups)
            if steps:
                trial(optimizer, self._tryable())
                self.describe_state(optimizer)
                for member in self._members:
                    state = optimizer.state.get(member.param, {})
                    pieces.require_own(member.part, state)  # loaded before this knew the optimizer
                    _cut_state(member, state)
            self._known[optimizer] = sizes, steps
        if not steps:
            return False
        self.end_step(optimizer)  # the last one may have raised
        self._hooks[optimizer].enclose(optimizer)
        driver = self._driver
        driver.reset_failed_backward()
        driver.require_reduced("an optimizer's step()")
        driver.show_shards()
        if driver.awaits_backward:
            self._check_before_backward()
        if driver.is_silent:
            return False
        skips = getattr(optimizer, "found_inf", None)  # a GradScaler's, where the optimizer is fused
        if skips is None or skips.device.type != "cpu" or not skips.item():
            driver.steps.note(optimizer)
        return bool(known != sizes)

    def _check_before_backward(self) -> None:
        """Check a step between forward and backward. Raises ValueError for gradients of whole parameters.

        Warns (UserWarning) if there are none.
        """
        grads = {member: member.param.grad for member in self._members}
        if all(grad is None for grad in grads.values()):
            warnings.warn(
                "an optimizer steps though no gradient has come since forward: backward(inputs=...) finds "
                "none of units' parameters; leave inputs out, and freeze others by requires_grad_(False)",
                stacklevel=5,
            )
        for member, grad in grads.items():
            if grad is not None and grad.as_subclass(torch.Tensor).shape != member.part.local_shape:
                raise ValueError(
                    f"the gradient of {member.name} was set while it was whole, between forward and "
                    "backward: step after backward. torch's get_optimizer_state_dict sets such gradients for "
                    "an optimizer without state: call it before forward, or after the first step"
                )

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the code of ``optimizer``, which was tried, use gradients as it likes, until `end_step`.

        No user's code runs meanwhile: neither a hook nor a closure. For torch's own optimizers gradients are
        plain tensors, since each operation on a piece is a call of Python.
        """
        self._driver.work(optimizer)
        plain = list[Plain]()
        if type(optimizer).__module__.startswith("torch.optim."):
            for member in self._marked:
                if (piece := member.unmark_grad()) is not None:
                    plain.append((member, piece))
        self._stepping[optimizer] = plain
        self._driver.root.channel.stepping = True

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Undo `begin_step`, if that was called."""
        for member, piece in self._stepping.pop(optimizer, ()):
            member.mark_grad(piece)
        self._driver.root.channel.stepping = bool(self._stepping)
        self._driver.rest(optimizer)

    def end_steps(self) -> None:
        """End the steps of optimizers that raised: torch calls no hook then."""
        for optimizer in list(self._stepping):
            self.end_step(optimizer)

    @property
    def seen(self) -> list[torch.optim.Optimizer]:
        """The optimizers that have stepped, of this model or others."""
        return [*self._known]

    def _tryable(self) -> Tryable:
        first = self._segments[0]
        policy: Policy = "whole" if first.layout.whole else "even"
        shapes = {member.param: member.part.shape for member in self._members}
        return Tryable(first.local.device, policy, first.layout.virtual, shapes, self._passed)

    def describe_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the state dict of ``optimizer`` give local shards to torch.distributed.checkpoint."""
        if optimizer not in self._hooks:
            self._hooks[optimizer] = StepHooks(self, optimizer)
            pieces.describe_state(optimizer, self._members)


class StepHooks:
    """Tell `Optimizers` when an optimizer's own code begins and ends, between all users' hooks.

    The optimizer holds the hooks. They hold `Optimizers` weakly, which holds a model.
    """

    def __init__(self, optimizers: Optimizers, optimizer: torch.optim.Optimizer) -> None:
        known = weakref.ref(optimizers)
        self._before = optimizer.register_step_pre_hook(partial(_begin_step, known)).id
        self._after = optimizer.register_step_post_hook(partial(_end_step, known)).id

    def enclose(self, optimizer: torch.optim.Optimizer) -> None:
        """Have users' hooks of ``optimizer`` run before its step begins, or after it has ended."""
        before: Any = optimizer._optimizer_step_pre_hooks
        after: Any = optimizer._optimizer_step_post_hooks
        before.move_to_end(self._before)
        after.move_to_end(self._after, last=False)


@uncompiled
def _begin_step(
    known: weakref.ref[Optimizers], optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
) -> tuple[Any, Any] | None:
    """Begin a step of ``optimizer``. Return its arguments, with closures that run outside of the step."""
    optimizers = known()
    if optimizers is None:
        return None
    optimizers.begin_step(optimizer)
    if len(args) == 1 and not kwargs:
        return None

    def outside(argument: Any) -> Any:
        return partial(_run_outside, optimizers, optimizer, argument) if callable(argument) else argument

    itself, *others = args
    return (itself, *map(outside, others)), {name: outside(value) for name, value in kwargs.items()}


def _run_outside(
    optimizers: Optimizers,
    optimizer: torch.optim.Optimizer,
    closure: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a user's ``closure``. If it raises, the step has ended."""
    optimizers.end_step(optimizer)
    result = closure(*args, **kwargs)
    optimizers.begin_step(optimizer)
    return result


@uncompiled
def _end_step(known: weakref.ref[Optimizers], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    optimizers = known()
    if optimizers is not None:
        optimizers.end_step(optimizer)


def _cut_state(member: ShardedParam, state: dict[str, Any]) -> None:
    """Cut the optimizer state of the full parameter, in place, to this rank's part, unless it is cut."""
    part = member.part
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    if all(value.shape != part.local_shape for value in tensors.values()):
        for key, value in tensors.items():
            if key != "step" and value.shape == part.shape:
                state[key] = part.shown(part.of(value).clone())

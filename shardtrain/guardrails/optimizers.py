"""The look at each optimizer before and while it steps a sharded model.

An optimizer must give each element of a local shard the value that it gives it in the whole parameter. SGD
and Adam treat every element by itself. One that looks at a parameter's shape (Muon, Shampoo) or norm (LARS,
LAMB) would silently compute something else, unless parameters are whole, and one that looks at all parameters
together (LBFGS) always would. A name tells that of torch's own. Their steps see plain tensors, as they do
without sharding. So do the steps of others, but for the first `_LOOKS`, also after parameters are added, each
`_EVERY`-th, and those of round numbers. In these, parameters, gradients, and state of the parameter's shape
are pieces, which compute the same, in Python, and refuse by name what is not right on them. What such a step
keeps elsewhere than in its state stays a piece. Once an optimizer has asked for a norm of all parameters,
each of its steps is made on pieces: ranks add up norms of these alone.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardtrain import torch_private
from shardtrain.engine.hooks import Engine
from shardtrain.engine.segment import ShardedParam
from shardtrain.guardrails.known import is_known
from shardtrain.guardrails.options import Steps
from shardtrain.pieces.piece import OptimizerStep, Piece, plain, uncompiled
from shardtrain.whole.dcp import StateDicts, require_own

_LOOKS = 20
_EVERY = 101  # a prime, so that what comes every so many steps is met sooner or later

Plain = list[tuple[ShardedParam, Piece]]  # parameters whose gradient is plain


@dataclass
class Stepper:
    """What is known of an optimizer."""

    sizes: tuple[int, int, int] = 0, 0, 0  # of its groups when it was checked
    steps: bool = False  # whether it steps this model
    known: bool = False  # whether it is right on pieces
    number: int = 0  # of its latest step
    first: int = 0  # of its latest step with parameters new to it
    looked: int = 0  # of its latest step on pieces
    sums: bool = False  # whether it has asked for a sum over ranks

    @property
    def steps_pieces(self) -> bool:
        """Whether its latest step is made on pieces."""
        if self.known:
            return False
        is_early = self.number < self.first + _LOOKS
        is_round = _is_round(self.number) or _is_round(self.number - 1)  # counts may begin at 0
        return is_early or is_round or self.sums or self.number % _EVERY == 0


def _is_round(number: int) -> bool:
    """Return whether something that comes every so many steps may come first, or soon, in this one.

    That is a power of two, or a digit and zeros, as 40, 50, 64, 200 and 1,000.
    """
    digits = str(number)
    return digits[1:].strip("0") == "" or number & (number - 1) == 0


class Optimizers:
    """What is known of the optimizers that step a model. Written here only."""

    def __init__(self, engine: Engine, steps: Steps) -> None:
        self._engine = engine
        self._driver = engine.driver
        self._steps = steps
        self._members = engine.members
        self._hooked = engine.hooked
        self._steppers: weakref.WeakKeyDictionary[Any, Stepper] = weakref.WeakKeyDictionary()
        self._hooks: weakref.WeakKeyDictionary[Any, StepHooks] = weakref.WeakKeyDictionary()
        # Optimizers whose own code runs now, on plain tensors or on pieces.
        self._stepping: weakref.WeakKeyDictionary[Any, Plain | OptimizerStep] = weakref.WeakKeyDictionary()
        # Those whose gradients are marked as pieces: none on a rank that has all.
        self._marked = [member for member in engine.members if member.marks]

    def before_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Prepare a step of ``optimizer``, if it steps one of the trainable parameters.

        Return whether it does so for the first time, or with other parameters than before.

        Raises ValueError if it cannot be right on local shards, or if gradients wait.
        """
        stepper = self._steppers.get(optimizer)
        if stepper is None:
            stepper = Stepper()
            self._steppers[optimizer] = stepper
        groups = optimizer.param_groups
        sizes = len(groups), sum([len(group["params"]) for group in groups]), len(self._hooked)
        is_new = stepper.sizes != sizes
        if is_new:
            params = {param for param, _ in self._hooked.values()}
            stepper.steps = not all(params.isdisjoint(group["params"]) for group in groups)
        if not stepper.steps:
            stepper.sizes = sizes
            return False
        is_inside = optimizer in self._stepping  # a step of a base class, or one after a step that raised
        stepper.number += not is_inside
        stepper.known = is_known(optimizer, self._engine.segments[0].layout.whole)
        if is_new:
            stepper.first = stepper.number
            self._adopt_state(optimizer)
            stepper.sizes = sizes
        self.end_step(optimizer)  # the last one may have raised
        if optimizer not in self._hooks:
            self._hooks[optimizer] = StepHooks(self, optimizer)
        self._hooks[optimizer].enclose(optimizer)
        driver = self._driver
        driver.reset_failed_backward()
        self._engine.require_reduced("an optimizer's step()")
        driver.show_shards()
        if driver.awaits_backward:
            self._check_before_backward()
        if driver.is_silent:
            return False
        skips = getattr(optimizer, "found_inf", None)  # a GradScaler's, where the optimizer is fused
        if skips is None or skips.device.type != "cpu" or not skips.item():
            self._steps.note(optimizer)
        return is_new

    def _adopt_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Cut and describe the state that ``optimizer`` has from before this knew it."""
        self._engine.attached(StateDicts).describe(optimizer)
        for member in self._members:
            state = optimizer.state.get(member.param, {})
            require_own(member.part, state)
            _cut_state(member, state)

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

    def enter(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Begin a step of ``optimizer``. Return its arguments, with closures that run outside of the step."""
        self.begin_step(optimizer)
        if len(args) == 1 and not kwargs:
            return None

        def outside(argument: Any) -> Any:
            return partial(self._run_outside, optimizer, argument) if callable(argument) else argument

        itself, *others = args
        return (itself, *map(outside, others)), {name: outside(value) for name, value in kwargs.items()}

    def _run_outside(
        self, optimizer: torch.optim.Optimizer, closure: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call a user's ``closure``. If it raises, the step has ended."""
        self.end_step(optimizer)
        result = closure(*args, **kwargs)
        self.begin_step(optimizer)
        return result

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the code of ``optimizer`` step plain tensors, or pieces, until `end_step`.

        No user's code runs meanwhile: neither a hook nor a closure.
        """
        stepper = self._steppers[optimizer]
        if stepper.steps_pieces and self._marked:
            self._begin_on_pieces(optimizer, stepper)
            return
        self._driver.work(optimizer)
        unmarked: Plain = []
        for member in self._marked:
            if (piece := member.unmark_grad()) is not None:
                unmarked.append((member, piece))
        self._stepping[optimizer] = unmarked

    def _begin_on_pieces(self, optimizer: torch.optim.Optimizer, stepper: Stepper) -> None:
        for outer in [outer for outer, step in self._stepping.items() if isinstance(step, list)]:
            self.end_step(outer)  # the rest of its step is made on pieces, too
        name = type(optimizer).__name__
        step = OptimizerStep(name, stepper.number, stepper.looked, _weakly(self.end_steps))
        stepper.looked = stepper.number
        for member in self._marked:
            _change_tensors(optimizer.state.get(member.param, {}), partial(_piece_of_state, member))
        self._stepping[optimizer] = step
        self._driver.root.channel.step = step

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Undo `begin_step`, if that was called."""
        step = self._stepping.pop(optimizer, None)
        if isinstance(step, OptimizerStep):
            self._steppers[optimizer].sums |= step.sums
            self._unmark_state(optimizer)
            others = [other for other in self._stepping.values() if isinstance(other, OptimizerStep)]
            self._driver.root.channel.step = others[-1] if others else None
        elif step is not None:
            for member, piece in step:
                member.mark_grad(piece)
            self._driver.rest(optimizer)

    def _unmark_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the state of ``optimizer`` plain tensors."""
        for member in self._marked:
            _change_tensors(optimizer.state.get(member.param, {}), plain)

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """End a step of ``optimizer``. If a base class has stepped in it, the rest was at rest."""
        step = self._stepping.get(optimizer)
        if isinstance(step, OptimizerStep):
            step.require_changed()
        if optimizer not in self._stepping:
            self._unmark_state(optimizer)
        self.end_step(optimizer)

    def end_steps(self) -> None:
        """End the steps of optimizers that raised: torch calls no hook then."""
        for optimizer in list(self._stepping):
            self.end_step(optimizer)

    @property
    def seen(self) -> list[torch.optim.Optimizer]:
        """The optimizers that have stepped, of this model or others."""
        return [*self._steppers]


class StepHooks:
    """The hooks that tell when an optimizer's own code begins and ends, between all users' hooks.

    The optimizer holds the hooks. They hold `Optimizers` weakly, which holds a model.
    """

    def __init__(self, optimizers: Optimizers, optimizer: torch.optim.Optimizer) -> None:
        self._before = optimizer.register_step_pre_hook(_weakly(optimizers.enter)).id
        self._after = optimizer.register_step_post_hook(_weakly(optimizers.after_step)).id

    def enclose(self, optimizer: torch.optim.Optimizer) -> None:
        """Have users' hooks of ``optimizer`` run before its step begins, or after it has ended."""
        before: Any = optimizer._optimizer_step_pre_hooks
        after: Any = optimizer._optimizer_step_post_hooks
        before.move_to_end(self._before)
        after.move_to_end(self._after, last=False)


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``method`` so that what holds it does not hold a model. It does nothing once that is gone."""
    known = weakref.WeakMethod(method)

    @uncompiled
    def call(*args: Any) -> Any:
        bound = known()
        return None if bound is None else bound(*args)

    return call


def _change_tensors(state: dict[str, Any], change: Callable[[Any], Any]) -> None:
    """Change each tensor of ``state``, a parameter's, but counts of steps. Those in lists, too."""
    for key, value in state.items():
        if key != "step":
            leaves = torch_private.tree_leaves(value)
            if any(change(leaf) is not leaf for leaf in leaves):
                state[key] = torch_private.tree_map(change, value)


def _piece_of_state(member: ShardedParam, value: Any) -> Any:
    """Return a tensor of the state of ``member`` as a piece, if it has a number per element of its shard.

    All tensors of a whole parameter's state belong to it.
    """
    owners = member.owners
    if type(value) is not Tensor:
        return value
    if value.shape == member.part.local_shape or (owners.whole and value.ndim):
        return Piece.on(value, owners._replace(subject=f"the state of {member.name}"))
    return value


def _cut_state(member: ShardedParam, state: dict[str, Any]) -> None:
    """Cut the optimizer state of the full parameter, in place, to this rank's part, unless it is cut."""
    part = member.part
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    if all(value.shape != part.local_shape for value in tensors.values()):
        for key, value in tensors.items():
            if key != "step" and value.shape == part.shape:
                state[key] = part.at_rest(part.of(value).clone())

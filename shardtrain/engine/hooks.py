"""Register the hooks that drive the schedule of a sharded module. Three kinds make a step:

- before and after the forward of a unit's module. For the root also of each module that holds a root
  parameter, so that a child called by itself finds its parameters;
- on the autograd node of each tensor that the module returns, and that modules inside it return, since a
  loss may depend on the latter alone. It tells that backward is about to need the unit;
- before and after a parameter's gradient is accumulated. A hook on a module's inputs would not do: images
  need no gradient, so it would never fire for the first unit.

A fourth kind checks each optimizer before it steps: see ``user_code.py``.
"""

from __future__ import annotations

import copy
import functools
import sys
import warnings
import weakref
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from shardtrain.engine import pieces, user_code
from shardtrain.engine.precision import Precision, cast, tensors_in
from shardtrain.engine.schedule import Schedule
from shardtrain.engine.shard import ShardedParam
from shardtrain.engine.unit import Unit
from shardtrain.engine.units import note_pieces

_ENGINE = "_shardtrain_engine"
_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()


class GradientHook(user_code.OwnHook):
    """Notify the schedule before and after a gradient is accumulated in one parameter of a unit.

    The parameter holds the hook where Python's garbage collector cannot see it. A hook that held the
    parameter in turn would keep the whole model alive for ever.
    """

    def __init__(self, schedule: Schedule, member: ShardedParam) -> None:
        self._schedule, self._member = weakref.ref(schedule), weakref.ref(member)

    def before(self, grad: torch.Tensor) -> None:
        if (schedule := self._schedule()) and (member := self._member()):
            schedule.gradient_arrives(member, grad)

    def __call__(self, param: torch.Tensor) -> None:
        if (schedule := self._schedule()) and (member := self._member()):
            schedule.gradient_arrived(member)


class Engine:
    """Connect a sharded root's modules with its units and their schedule, by hooks."""

    def __init__(
        self, module: nn.Module, units: list[Unit], reshard_after_forward: bool, precision: Precision
    ) -> None:
        self.module = module
        self.units = units
        self.segments = [segment for unit in units for segment in unit.segments]
        self.members = [member for unit in units for member in unit.members]
        self.transport = units[0].transport
        self.precision = precision
        self.schedule = Schedule(units, reshard_after_forward)
        for unit in units:
            unit.account = units[0].account
        self._ignored = set(module.parameters()).difference(member.param for member in self.members)
        self._hooked: set[nn.Parameter] = set()
        self._modules = _modules_below(module)
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._handles: list[RemovableHandle] = []
        # `copy` and `pickle` look up the last two.
        self._attributes = {
            _ENGINE: self,
            "__deepcopy__": self._copy_module,
            "__reduce_ex__": _refuse_pickling,
        }
        self._attach()
        _watch_optimizers()
        _ENGINES.add(self)

    @property
    def device(self) -> torch.device:
        """The device on which the first unit computes; the CPU for a model without parameters."""
        return self.segments[0].full.device if self.segments else torch.device("cpu")

    # attaching, copying

    def _attach(self) -> None:
        """Register all hooks, and set the attributes that mark the module as sharded."""
        self._hook_parameters()
        for unit in self.units:
            # A call of one of these gathers the unit.
            entrances = dict.fromkeys([unit.module, *(unit.holders if unit is self.units[0] else ())])
            for module in entrances:
                self._hook_entrance(unit, module)
            for module in [holder for holder in unit.holders if holder not in entrances]:
                self._hook_inside(unit, module)
            for member in unit.members:
                for module, attribute in member.info.holders:
                    self._handles += pieces.attach(module, attribute, unit, member)
        self._hook_casts()
        self.module.__dict__.update(self._attributes)

    def _copy_module(self, memo: dict[int, Any]) -> nn.Module:
        """Return a sharded copy of the root, for ``copy.deepcopy``. Collective."""
        self.require_rest("a sharded model cannot be copied")
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()
        for name in self._attributes:
            del self.module.__dict__[name]
        try:
            module = copy.deepcopy(self.module, memo)  # a plain module of this rank's pieces
        finally:
            self._attach()
        units = [unit.copied(memo) for unit in self.units]
        Engine(module, units, self.schedule.reshard_after_forward, self.precision)
        return module

    # forward

    def _hook_entrance(self, unit: Unit, module: nn.Module) -> None:
        def before(called: nn.Module, args: Any) -> None:
            if called is not module:
                raise ValueError(
                    f"this {type(called).__name__} is a copy of a part of a sharded model, and has pieces of "
                    "parameters only; copy the model that shardtrain.shard() returned"
                )
            user_code.refuse_transforms()
            if unit.pinned:  # `unsharded` shows all parameters, so that one rank may compute alone
                return
            self.settle()
            if called is self.module:
                self.schedule.begin_forward()
            self.schedule.before_forward(unit)

        def after(called: nn.Module, args: Any, output: Any) -> None:
            if called is not module or unit.pinned:
                return
            error = sys.exc_info()[1] if output is None else None
            if error is not None:
                note_pieces(error, self.units)
            self.schedule.after_forward(unit, output, error is not None)
            if called is self.module:
                self.schedule.end_forward(error is not None)

        self._handles.append(module.register_forward_pre_hook(user_code.uncompiled(before), prepend=True))
        self._handles.append(module.register_forward_hook(user_code.uncompiled(after), always_call=True))
        module.__dict__["named_modules"] = functools.partial(user_code.modules_unless_wrapped, module)

    def _hook_inside(self, unit: Unit, module: nn.Module) -> None:
        def after(called: nn.Module, args: Any, output: Any) -> None:
            if not torch.compiler.is_compiling() and (call := self.schedule.call_to_hook(unit)):
                for tensor in (output,) if isinstance(output, torch.Tensor) else tensors_in(output):
                    call.hook(tensor)

        self._handles.append(module.register_forward_hook(after))

    def _hook_casts(self) -> None:
        """Cast inputs and outputs of modules. Inside `unsharded` a unit computes in its own dtype."""
        precision = self.precision
        for unit in self.units if precision.param is not None else ():
            if precision.cast_inputs:
                self._cast(unit, unit.module, precision.param, None)
            for module, segment in unit.holders.items():
                if precision.wants_wide_inputs(module):
                    self._cast(unit, module, segment.local.dtype, precision.param)
        self._cast(self.units[0], self.module, None, precision.output)

    def _cast(
        self, unit: Unit, module: nn.Module, inputs: torch.dtype | None, output: torch.dtype | None
    ) -> None:
        if inputs is not None:

            def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
                return (args, kwargs) if unit.pinned else cast((args, kwargs), inputs)

            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if output is not None:

            def after(_: nn.Module, args: Any, result: Any) -> Any:
                return result if unit.pinned else cast(result, output)

            self._handles.append(module.register_forward_hook(after))

    # gradients and optimizers

    def _hook_parameters(self) -> None:
        """Hook the trainable parameters that have no hook yet."""
        for member in self.members:
            param = member.param
            if param.requires_grad and param not in self._hooked:
                self._hooked.add(param)
                hook = GradientHook(self.schedule, member)
                self._handles.append(param.register_hook(hook.before))
                self._handles.append(param.register_post_accumulate_grad_hook(hook))

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError if ``optimizer``, about to step, is not right on pieces, or gradients wait."""
        groups = optimizer.param_groups
        if self._optimizers.get(optimizer) != len(groups):
            if not any(param in self._hooked for group in groups for param in group["params"]):
                return
            user_code.refuse_unless_right_on_pieces(optimizer, self.segments[0])
            self.watch(optimizer)
            self._optimizers[optimizer] = len(groups)
            for member in self.members:
                member.cut_state(optimizer.state.get(member.param, {}))
        self.schedule.recover()
        self.schedule.require_reduced("an optimizer's step()")
        self.schedule.show_pieces()
        if self.schedule.unanswered and all(member.held_grad is None for member in self.members):
            warnings.warn(
                "an optimizer steps though no gradient has come since forward: backward(inputs=...) finds "
                "none of units' parameters; leave inputs out, and freeze others by requires_grad_(False)",
                stacklevel=3,
            )
        skips = getattr(optimizer, "found_inf", None)  # a GradScaler's, where the optimizer is fused
        self.schedule.stepped |= skips is None or skips.device.type != "cpu" or not skips.item()

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the state dict of ``optimizer`` give pieces to torch.distributed.checkpoint."""
        if optimizer not in self._optimizers:
            self._optimizers[optimizer] = 0  # groups that have been checked
            pieces.watch(optimizer, self.members)

    # between steps

    def require_rest(self, refusal: str) -> None:
        """Call `settle`. Raises ValueError, beginning with ``refusal``, in a step or inside `unsharded`."""
        self.schedule.recover_forward()
        if not self.schedule.at_rest:
            raise ValueError(f"{refusal} inside forward, backward or unsharded()")
        self.schedule.show_pieces()
        self.settle()

    def settle(self) -> None:
        """Adopt users' changes of modules and parameters since the last step, unless a step is under way.

        Raises ValueError if a piece no longer fits or is on the meta device, or a parameter was attached.
        """
        self.schedule.recover()
        if not self.schedule.at_rest:
            return
        for unit in self.units:
            unit.take_over()
        self._hook_parameters()
        if any(
            len(m._parameters) != n or tuple(m._modules.values()) != inner for m, inner, n in self._modules
        ):
            known = self._ignored.union(member.param for member in self.members)
            if new := [name for name, param in self.module.named_parameters() if param not in known]:
                raise ValueError(
                    f"parameters attached after shard(): {', '.join(new)}; nothing would reduce their "
                    "gradients. Attach them first, then shard"
                )
            self._modules = _modules_below(self.module)
        if on_meta := [m.name for s in self.segments if s.local.is_meta for m in s.members]:
            raise ValueError(
                f"parameters still on the meta device: {', '.join(on_meta)}; materialise the local pieces "
                "with module.to_empty(device=...) and load or initialise their values first"
            )


@functools.cache
def _watch_optimizers() -> None:
    """Check every optimizer before it steps, once for all engines.

    A hook per engine would be removed when its engine is garbage-collected, perhaps while torch calls hooks.
    """

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for engine in list(_ENGINES):
            engine.check_optimizer(optimizer)

    register_optimizer_step_pre_hook(before_step)


def engine_of(module: nn.Module) -> Engine:
    """Return the engine of a sharded root. Raises ValueError for any other module."""
    engine = module.__dict__.get(_ENGINE)
    if not isinstance(engine, Engine):
        raise ValueError(
            f"{type(module).__name__} is not sharded: pass the module that shardtrain.shard() returned"
        )
    return engine


def is_entrance(module: nn.Module) -> bool:
    """Return whether a call of ``module`` gathers a unit."""
    hooks = [getattr(hook, "__qualname__", "") for hook in module._forward_pre_hooks.values()]
    return any(name.startswith(Engine._hook_entrance.__qualname__) for name in hooks)


def _refuse_pickling(protocol: int) -> NoReturn:
    raise ValueError(
        "a sharded model cannot be pickled, by torch.save or otherwise: each rank has pieces only; save "
        "shardtrain.full_state_dict(model)"
    )


def _modules_below(root: nn.Module) -> list[tuple[nn.Module, tuple[nn.Module | None, ...], int]]:
    """Return all modules with their children and parameter counts, to notice when one is attached."""
    return [(m, tuple(m._modules.values()), len(m._parameters)) for m in root.modules()]

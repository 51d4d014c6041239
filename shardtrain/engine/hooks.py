"""Wrap the calls of a sharded module's units, and register the hooks that drive their schedule.

- Each call of a unit's module gathers it before and releases it afterwards, users' hooks included. For the
  root, so does a call of each module that holds a root parameter, so that a child called by itself works.
- A hook on the autograd node of each tensor that such a call returns, and that modules inside it return,
  since a loss may depend on the latter alone. It tells how far backward has come.
- A hook on each trainable parameter. It refuses gradients of local pieces by name.

Another hook checks each optimizer before it steps: see ``shardtrain/optim/trial.py``.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from shardtrain.engine import initialize, pieces, user_code
from shardtrain.engine.driver import Driver
from shardtrain.engine.precision import cast, leaves, tensors_in
from shardtrain.engine.shard import ShardedParam
from shardtrain.engine.unit import Shown, Unit
from shardtrain.engine.units import note_shards
from shardtrain.engine.virtual import Virtual
from shardtrain.layout import Policy

_ENGINE = "_shardtrain_engine"
Trial = Callable[[torch.optim.Optimizer, "Tryable"], None]
_ABSENT = object()
_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()


class Tryable(NamedTuple):
    """Describe a sharded model to what tries its optimizers.

    ``shapes``: of whole parameters. ``passed``: names of optimizers, with options, that were found right.
    """

    device: torch.device
    layout: Policy
    virtual: int
    shapes: Mapping[nn.Parameter, tuple[int, ...]]
    passed: set[str]


class Engine:
    """Connect a sharded root's modules with its units and their schedule, by hooks."""

    def __init__(self, module: nn.Module, units: list[Unit], virtual: int = 0) -> None:
        self.module = module
        self.units = units
        self.segments = [segment for unit in units for segment in unit.segments]
        self.members = [member for unit in units for member in unit.members]
        self.transport = units[0].transport
        self.driver = Driver(units)
        self.virtual = Virtual(module, self.transport.all_ranks, virtual) if virtual else None
        if self.virtual and len(self.virtual.ranks) > 1:
            self.driver.micro_batch = None
        for unit in units:
            unit.account = units[0].account
        self._ignored = set(module.parameters()).difference(member.param for member in self.members)
        # Trainable parameters, each with the handle of its hook.
        self._hooked: dict[ShardedParam, tuple[nn.Parameter, RemovableHandle]] = {}
        self._replaced: list[tuple[nn.Module, str, Any]] = []  # attributes of modules, see `_set`
        self._modules = _modules_below(module)
        # What `check_optimizer` knows of each optimizer.
        self._optimizers: weakref.WeakKeyDictionary[Any, tuple[Any, bool]] = weakref.WeakKeyDictionary()
        self.initializing = False  # see ``initialize.py``
        self._passed: set[str] = set()  # see `Tryable`
        self._described: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.stepping: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # in step() now
        self._handles: list[RemovableHandle] = []
        self._attach()
        assert check_optimizers.cache_info().currsize, "import shard from shardtrain, which checks optimizers"
        _ENGINES.add(self)

    @property
    def device(self) -> torch.device:
        """The device on which the first unit computes; the CPU for a model without parameters."""
        return self.segments[0].full.device if self.segments else torch.device("cpu")

    # attaching

    def _attach(self) -> None:
        """Wrap calls, register all hooks, and set the attributes that mark the module as sharded."""
        self._hook_parameters()
        for unit in self.units:
            # A call of one of these gathers the unit.
            entrances = dict.fromkeys([unit.module, *(unit.holders if unit is self.units[0] else ())])
            for module in entrances:
                self._wrap_calls(unit, module)
            for module in [holder for holder in unit.holders if holder not in entrances]:
                self._hook_inside(unit, module)
            for member in unit.members:
                for module, attribute in member.info.holders:
                    self._handles += pieces.attach(module, attribute, unit, member)
        homes = {module: unit for unit in self.units for module in unit.module.modules()}  # inner units last
        for module, unit in homes.items():
            self._wrap_initialization(unit, module)
        self._hook_casts()
        refuse = self.module.register_state_dict_pre_hook(lambda *_: self.driver.refuse_edits())
        self._handles.append(refuse)
        self._set(self.module, _ENGINE, self)
        # `copy` and `pickle` look up these.
        for module in self._entrances_and_holders():
            self._set(module, "__deepcopy__", refuse_copy)
        self._set(self.module, "__reduce_ex__", _refuse_pickling)

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute of ``module`` itself, until `detach`."""
        self._replaced.append((module, name, module.__dict__.get(name, _ABSENT)))
        module.__dict__[name] = value

    def detach(self) -> None:
        """Undo `_attach`."""
        for handle in [*self._handles, *(handle for _, handle in self._hooked.values())]:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()
        for module, name, before in reversed(self._replaced):
            module.__dict__[name] = before
            if before is _ABSENT:
                del module.__dict__[name]
        self._replaced.clear()

    def _entrances_and_holders(self) -> set[nn.Module]:
        """Return the modules of units, and all that hold sharded parameters."""
        modules = {unit.module for unit in self.units}
        for unit in self.units:
            modules.update(unit.holders)
        return modules

    # forward

    def _wrap_calls(self, unit: Unit, module: nn.Module) -> None:
        """Have each call of ``module`` gather ``unit``, and release it however the call ends.

        The wrapper is a bound method in the place of torch's. ``torch.compile`` breaks the graph there. What
        ran compiled before runs so inside the wrapper.
        """
        is_root = module is self.module
        is_only = len(self.units) == 1
        driver = self.driver
        run = module._compiled_call_impl or module._call_impl

        @user_code.undisturbed
        def before() -> None:
            self.adopt_changes()
            if is_root:
                driver.begin_forward()
            driver.begin_call(unit)

        @user_code.undisturbed
        def after(outputs: Sequence[Any], error: BaseException | None) -> None:
            if error is not None and driver.under_way[0] != "backward":
                note_shards(error, self.units)
            driver.end_call(unit, outputs, error is not None)
            if is_root:
                driver.end_forward(error is not None)

        def call(called: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # `unsharded` shows all, so that one rank may compute alone. So does a call of the only unit.
            if unit.shown is Shown.PRIVATE or (is_only and unit in driver.schedule.calls):
                return run(*args, **kwargs)
            try:
                before()
                output = run(*args, **kwargs)
                after([*leaves(output)], None)
            except BaseException as error:
                after((), error)
                raise
            return output

        self._set(module, "named_modules", MethodType(user_code.modules_unless_wrapped, module))
        self._set(module, "_compiled_call_impl", None)
        call._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch.compile breaks the graph
        self._set(module, "_call_impl", MethodType(call, module))

    def _wrap_initialization(self, unit: Unit, module: nn.Module) -> None:
        for name in ("reset_parameters", "_reset_parameters"):
            if callable(getattr(type(module), name, None)):
                self._wrap_reset(unit, module, name)
        for name, method in initialize.methods(self, module):
            self._set(module, name, MethodType(method, module))

    def _wrap_reset(self, unit: Unit, module: nn.Module, name: str) -> None:
        """Have ``module.reset_parameters()`` see whole parameters of ``unit``, since it computes fan-ins.

        Each rank keeps its part of what it draws: with one seed on all ranks, that of the whole model.
        """
        reset = getattr(type(module), name)

        def whole(called: nn.Module, *args: Any, **kwargs: Any) -> None:
            below = set(module.modules())
            members = [m for m in unit.members if not below.isdisjoint(h for h, _ in m.info.holders)]
            if unit.shown is not Shown.SHARD or any(m.info.parameter.is_meta for m in members):
                reset(called, *args, **kwargs)
                return
            self.adopt_changes()
            self.driver.schedule.release(unit)
            unit.show_private({member: member.part.padded(member.local_view) for member in members})
            try:
                reset(module, *args, **kwargs)
                for member in members:
                    member.local_view.copy_(member.piece_of_whole(member.param.data))
            finally:
                unit.hide()

        self._set(module, name, MethodType(whole, module))

    def _hook_inside(self, unit: Unit, module: nn.Module) -> None:
        def after(called: nn.Module, args: Any, output: Any) -> None:
            if not torch.compiler.is_compiling():
                self.driver.mark(unit, tensors_in(output))

        self._handles.append(module.register_forward_hook(after))

    def _hook_casts(self) -> None:
        """Cast inputs and outputs of modules. Inside `unsharded` a unit computes in its own dtype."""
        for unit in self.units:
            precision = unit.options.precision
            if precision.cast_inputs:
                self._cast(unit, unit.module, precision.param, None)
            for module, segment in unit.holders.items() if precision.param is not None else ():
                if precision.wants_wide_inputs(module):
                    self._cast(unit, module, segment.local.dtype, precision.param)
            self._cast(unit, unit.module, None, precision.output)

    def _cast(
        self, unit: Unit, module: nn.Module, inputs: torch.dtype | None, output: torch.dtype | None
    ) -> None:
        if inputs is not None:

            def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
                return (args, kwargs) if unit.shown is Shown.PRIVATE else cast((args, kwargs), inputs)

            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if output is not None:

            def after(_: nn.Module, args: Any, result: Any) -> Any:
                return result if unit.shown is Shown.PRIVATE else cast(result, output)

            self._handles.append(module.register_forward_hook(after))

    # gradients and optimizers

    def _hook_parameters(self) -> None:
        """Hook the trainable parameters that have no hook yet."""
        for unit in self.units:
            for member in unit.members:
                hooked = self._hooked.get(member)
                param = member.param
                if (hooked is None or hooked[0] is not param) and param.requires_grad:
                    if hooked:
                        hooked[1].remove()
                    handle = param.register_hook(_gradient_hook(self.driver, unit, member))
                    self._hooked[member] = param, handle

    def check_optimizer(self, optimizer: torch.optim.Optimizer, trial: Trial) -> None:
        """Raise ValueError if ``optimizer``, about to step, is not right on pieces, or gradients wait."""
        groups = optimizer.param_groups
        # What decides whether it steps parameters of this model. If it does, it has been found right.
        state = len(groups), sum([len(group["params"]) for group in groups]), len(self._hooked)
        known, steps = self._optimizers.get(optimizer, (None, False))
        if known != state:
            own = {param for param, _ in self._hooked.values()}
            steps = any(param in own for group in groups for param in group["params"])
            if steps:
                held = self.segments[0]
                shapes = {member.param: member.part.shape for member in self.members}
                layout: Policy = "whole" if held.layout.whole else "even"
                trial(
                    optimizer, Tryable(held.local.device, layout, held.layout.virtual, shapes, self._passed)
                )
                self.describe_state(optimizer)
                for member in self.members:
                    member.cut_state(optimizer.state.get(member.param, {}))
            self._optimizers[optimizer] = state, steps
        if not steps:
            return
        self.driver.reset_failed_backward()
        self.driver.require_reduced("an optimizer's step()")
        self.driver.show_shards()
        if self.driver.awaits_backward and all(member.param.grad is None for member in self.members):
            warnings.warn(
                "an optimizer steps though no gradient has come since forward: backward(inputs=...) finds "
                "none of units' parameters; leave inputs out, and freeze others by requires_grad_(False)",
                stacklevel=3,
            )
        skips = getattr(optimizer, "found_inf", None)  # a GradScaler's, where the optimizer is fused
        if skips is None or skips.device.type != "cpu" or not skips.item():
            self.driver.steps.note(optimizer)
        self.stepping.add(optimizer)
        self.transport.stepping = True

    def describe_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the state dict of ``optimizer`` give pieces to torch.distributed.checkpoint."""
        if optimizer not in self._described:
            self._described.add(optimizer)
            optimizer.register_step_post_hook(partial(_end_step, weakref.ref(self)))
            pieces.describe_state(optimizer, self.members)

    # between steps

    def require_rest(self, refusal: str) -> None:
        """Call `adopt_changes`. Raises ValueError, with ``refusal`` first, inside a step or `unsharded`."""
        self.driver.reset_failed_backward()
        if not self.driver.is_idle:
            raise ValueError(f"{refusal} inside forward, backward or unsharded()")
        self.driver.show_shards()
        self.adopt_changes()

    def adopt_changes(self) -> None:
        """Adopt users' changes of modules and parameters since the last step, unless a step is under way.

        Raises ValueError if a piece no longer fits or is on the meta device, or a parameter was attached.
        """
        self.driver.reset_failed_backward()
        if not self.driver.is_idle:
            return
        for unit in self.units:
            unit.adopt(self.driver.before_conversion)
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


def _end_step(known: weakref.ref[Engine], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Note that ``optimizer`` has stepped. If its step raised, that is not before its next one."""
    engine = known()
    if engine is not None:
        engine.stepping.discard(optimizer)
        engine.transport.stepping = bool(engine.stepping)


@functools.cache
def check_optimizers(trial: Trial) -> None:
    """Check every optimizer before it steps, once for all engines; ``trial`` raises if one is not right.

    A hook per engine would be removed when its engine is garbage-collected, perhaps while torch calls hooks.
    """

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for engine in list(_ENGINES):
            engine.check_optimizer(optimizer, trial)

    register_optimizer_step_pre_hook(before_step)


def engine_of(module: nn.Module) -> Engine:
    """Return the engine of a sharded root. Raises ValueError for any other module."""
    engine = module.__dict__.get(_ENGINE)
    if not isinstance(engine, Engine):
        raise ValueError(
            f"{type(module).__name__} is not sharded: pass the module that shardtrain.shard() returned"
        )
    return engine


def is_inside(module: nn.Module) -> bool:
    """Return whether ``module`` is, or is inside, a module that is sharded now."""
    roots = [engine.module for engine in _ENGINES if engine.module.__dict__.get(_ENGINE) is engine]
    return any(module is each for root in roots for each in root.modules())


def is_entrance(module: nn.Module) -> bool:
    """Return whether a call of ``module`` gathers a unit."""
    return "_call_impl" in module.__dict__


def _gradient_hook(driver: Driver, unit: Unit, member: ShardedParam) -> Callable[[torch.Tensor], None]:
    """Return the hook of a parameter, which sees each gradient before autograd keeps it.

    The parameter holds the hook where Python's garbage collector cannot see it. A hook that held the
    parameter in turn would keep the whole model alive for ever.
    """
    known = weakref.ref(driver)
    reduces = weakref.ref(driver.reductions[unit])
    name = member.name
    shape = member.part.shape

    def hook(grad: torch.Tensor) -> None:
        reduction = reduces()
        drives = known()
        if reduction is None or drives is None:
            return
        reduction.arrived.add(name)
        if reduction.unit not in drives.schedule.opened or grad.shape != shape:
            drives.gradient_arrives(reduction.unit, name, grad.shape == shape)

    return hook


def refuse_copy(memo: dict[int, Any]) -> NoReturn:
    raise ValueError(
        "a sharded model, or one that contains it, cannot be copied: each rank has pieces only; copy before "
        "shard(), and shard the copy, too, or load full_state_dict(model) into a new model"
    )


def _refuse_pickling(protocol: int) -> NoReturn:
    raise ValueError(
        "a sharded model cannot be pickled, by torch.save or otherwise: each rank has pieces only; save "
        "shardtrain.full_state_dict(model)"
    )


def _modules_below(root: nn.Module) -> list[tuple[nn.Module, tuple[nn.Module | None, ...], int]]:
    """Return all modules with their children and parameter counts, to notice when one is attached."""
    return [(m, tuple(m._modules.values()), len(m._parameters)) for m in root.modules()]

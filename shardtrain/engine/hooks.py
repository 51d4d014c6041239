"""Wrap the calls of a sharded module's units, and register the hooks that drive their schedule.

- Each call of a unit's module gathers it before and releases it afterwards, users' hooks included. For the
  root, so does a call of each module that holds a root parameter, so that a child called by itself works.
- A hook on the autograd node of each tensor that such a call returns, and of each that a module inside it
  returns which holds parameters of the unit: a loss may depend on the latter alone. It tells how far backward
  has come.
- A hook on each trainable parameter. It refuses gradients of local pieces by name.

`Engine` attaches these, and forwards events to what protects users: files of their own, which a step does not
need. Another hook checks each optimizer before it steps: see `optimizers.py`.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from shardtrain import torch_private
from shardtrain.engine import casts, pieces, user_code, virtual
from shardtrain.engine.changes import Changes
from shardtrain.engine.driver import Driver
from shardtrain.engine.initialize import Initialization
from shardtrain.engine.module_class import Addition, add, lend
from shardtrain.engine.optimizers import Optimizers, Rule
from shardtrain.engine.precision import leaves, tensors_in
from shardtrain.engine.refusals import UNCOPIED, Uncopied, Unwrapped
from shardtrain.engine.segment import ShardedParam
from shardtrain.engine.unit import Shown, Unit
from shardtrain.pieces.piece import uncompiled

_ENGINE = "_shardtrain_engine"
_CALLS = "_shardtrain_calls"
_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """Connect a sharded root's modules with its units and their schedule, by hooks."""

    def __init__(self, module: nn.Module, units: list[Unit], virtual_ranks: int = 0) -> None:
        self.module = module
        self.units = units
        self.segments = [*chain.from_iterable(unit.segments for unit in units)]
        self.members = [*chain.from_iterable(unit.members for unit in units)]
        self.channel = units[0].channel
        self._place()
        self._changes = Changes(module, units)
        self.driver = Driver(units, self._changes)
        self.virtual = virtual.Virtual(module, self.driver, virtual_ranks) if virtual_ranks else None
        if self.virtual:
            self.driver.before_backward = self.virtual.begin_backward
        for unit in units:
            unit.account = units[0].account
        self.optimizers = Optimizers(self.driver, self.segments, self.members)
        # Trainable parameters, each with the handle of its hook.
        self._hooked: dict[ShardedParam, tuple[nn.Parameter, RemovableHandle]] = {}
        self._classes: dict[nn.Module, type[nn.Module]] = {}  # of modules, before `attach`
        self._marks: list[tuple[nn.Module, str]] = []  # attributes that `attach` has set
        self._handles: list[RemovableHandle] = []
        assert check_optimizers.cache_info().currsize, "import shard from shardtrain, which checks optimizers"

    # attaching

    def attach(self) -> None:
        """Wrap calls, register all hooks, and mark the module as sharded."""
        self._hook_parameters()
        initialization = Initialization(self.units, self.driver, self.adopt_changes)
        methods = {module: initialization.methods(module) for module in self.module.modules()}
        for unit in self.units:
            # A call of one of these gathers the unit.
            entrances = dict.fromkeys(unit.modules.values())
            if unit is self.units[0]:
                entrances.update(dict.fromkeys(unit.holders))
            for module in entrances:
                # A unit of which the root has a tied parameter enters the root's gather, and then its own.
                outer = module.__dict__.get(_CALLS, ())
                self._mark(module, _CALLS, (*outer, _around_calls(self, unit, module is self.module)))
                self._add_to_class(module, Entrance)
            for module in [holder for holder in unit.holders if holder not in entrances]:
                self._hook_inside(unit, module)
                methods[module].update(UNCOPIED)
            for module in [holder for holder in unit.holders if isinstance(holder, nn.RNNBase)]:
                methods[module]["flatten_parameters"] = self._changes.flattens(unit)
            for member in unit.members:
                for module, attribute in member.info.holders:
                    self._handles += pieces.attach(module, attribute, unit, member)
        for module, lent in methods.items():  # none to modules without sharded parameters
            self._marks += [(module, name) for name in lend(module, lent)]
        self._handles += casts.attach(self.units)
        self._open_layers()
        self._handles.append(self.module.register_state_dict_pre_hook(self._before_state_dict))
        after = partial(Engine._after_state_dict, self)  # on which torch sets an attribute
        self._handles.append(self.module.register_state_dict_post_hook(after))
        self._mark(self.module, _ENGINE, self)
        self._mark(self.module, virtual.MARK, self.virtual)
        _ENGINES.add(self)
        for unit in self.units:
            unit.rest()

    def _mark(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute of ``module`` until `detach`."""
        self._marks.append((module, name))
        module.__dict__[name] = value

    def _add_to_class(self, module: nn.Module, addition: type[Addition]) -> None:
        """Add methods to ``module`` until `detach`."""
        self._classes.setdefault(module, type(module))
        add(module, addition)

    def detach(self) -> None:
        """Undo `attach`."""
        _ENGINES.discard(self)
        self.driver.work(self)
        for handle in [*self._handles, *(handle for _, handle in self._hooked.values())]:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()
        for module, own_class in self._classes.items():
            module.__class__ = own_class
        self._classes.clear()
        for module, name in self._marks:
            module.__dict__.pop(name, None)
        self._marks.clear()

    # forward

    def _hook_inside(self, unit: Unit, module: nn.Module) -> None:
        def after(called: nn.Module, args: Any, output: Any) -> None:
            if not torch.compiler.is_compiling():
                self.driver.mark(unit, tensors_in(output))

        self._handles.append(module.register_forward_hook(after))

    def _open_layers(self) -> None:
        """Let ``nn.TransformerEncoder`` see plain parameters of layers that it looks at.

        So it takes its fast path, with zeros for what is padded. It computes nothing with them.
        """

        @user_code.undisturbed
        def before(layers: Sequence[Unit], *_: Any) -> None:
            for unit in layers:
                unit.wake()

        for encoder in self.module.modules():
            if isinstance(encoder, nn.TransformerEncoder):
                below = set(encoder.modules())
                layers = [unit for unit in self.units if not below.isdisjoint(unit.modules.values())]
                self._handles.append(encoder.register_forward_pre_hook(partial(before, layers)))

    def _before_state_dict(self, *_: Any) -> None:
        """Have a state dict show parameters as they are."""
        self.driver.refuse_edits()
        self.driver.work("state dict")

    def _after_state_dict(self, *_: Any) -> None:
        self.driver.rest("state dict")

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

    @property
    def known_parameters(self) -> set[nn.Parameter]:
        """The parameters of the model: sharded, or ignored on purpose."""
        return self._changes.known

    def before_step(self, optimizer: torch.optim.Optimizer, rule: Rule) -> None:
        """Prepare a step of ``optimizer``. Raises ValueError if it may not step local shards, by ``rule``."""
        if self.optimizers.before_step(optimizer, self._hooked, rule) and self.channel.all_ranks.world > 1:
            _warn_of_unreduced(optimizer)

    # between steps

    def require_rest(self, refusal: str) -> None:
        """Call `require_idle`, then `adopt_changes`."""
        self.require_idle(refusal)
        self.adopt_changes()

    def require_idle(self, refusal: str) -> None:
        """Show shards. Raises ValueError, with ``refusal`` first, inside a step or `unsharded`."""
        self.driver.reset_failed_backward()
        if not self.driver.is_idle:
            raise ValueError(f"{refusal} inside forward, backward or unsharded()")
        self.driver.show_shards()

    def _place(self) -> None:
        """Tell the channel on which devices full vectors lie."""
        self.channel.place({segment.full.device for segment in self.segments})

    def adopt_changes(self) -> None:
        """Adopt users' changes of modules and parameters since the last step, unless a step is under way.

        Raises ValueError if a piece no longer fits or is on the meta device, or a parameter was attached.
        """
        self.driver.reset_failed_backward()
        if not self.driver.is_idle:
            return
        self.optimizers.end_steps()
        with torch_private.DisableTorchFunctionSubclass():
            if self._changes.adopt(self.driver.require_reduced):
                self._place()
            self._hook_parameters()
            self._changes.refuse_attached()
            self._changes.refuse_meta()


def _around_calls(engine: Engine, unit: Unit, is_root: bool) -> Callable[..., Any]:
    """Return what gathers ``unit`` before a call of a module, and releases it however the call ends."""
    driver = engine.driver
    is_only = len(engine.units) == 1

    @user_code.undisturbed
    def begin() -> None:
        engine.adopt_changes()
        if is_root and unit not in driver.schedule.calls:  # a root may call itself
            driver.begin_forward()
        driver.begin_call(unit)

    @user_code.undisturbed
    def end(output: Any, error: BaseException | None) -> None:
        driver.end_call(unit, leaves(output), error is not None)
        if is_root and unit not in driver.schedule.calls:
            driver.end_forward(error is not None)

    def around(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # `unsharded` shows all, so that one rank may compute alone. So does a call of the only unit.
        if unit.shown is Shown.PRIVATE or (is_only and unit in driver.schedule.calls):
            return call(*args, **kwargs)
        try:
            begin()
            output = call(*args, **kwargs)
            end(output, None)
        except BaseException as error:
            end((), error)
            raise
        return output

    return around


class Entrance(Unwrapped, Uncopied):
    """Have calls of a module gather its unit.

    ``torch.compile`` breaks the graph here. What `nn.Module.compile` has compiled runs so inside.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = super().__call__
        for around in self.__dict__[_CALLS]:
            call = partial(around, call)
        return call(*args, **kwargs)

    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]


@functools.cache
def check_optimizers(rule: Rule) -> None:
    """Check every optimizer before it steps, once for all engines, by ``rule``.

    A hook per engine would be removed when its engine is garbage-collected, perhaps while torch calls hooks.
    """

    @uncompiled
    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for engine in engines():
            engine.before_step(optimizer, rule)
        pieces.refuse_pickled(optimizer)

    register_optimizer_step_pre_hook(before_step)


def _warn_of_unreduced(optimizer: torch.optim.Optimizer) -> None:
    """Warn (UserWarning) if ``optimizer`` of a sharded model has parameters that belong to none."""
    known = set[nn.Parameter]()
    for engine in engines():
        known |= engine.known_parameters
    shapes = list[tuple[int, ...]]()
    for group in optimizer.param_groups:
        shapes += [tuple(p.shape) for p in group["params"] if p.grad is not None and p not in known]
    if shapes:
        warnings.warn(
            f"{type(optimizer).__name__} steps sharded parameters, and {len(shapes)} that belong to no "
            f"sharded model, the first of shape {shapes[0]}. Nothing here reduces their gradients, and ranks "
            "drift apart: shard the root, too, which contains all (fully_shard(model) after its blocks, or "
            "shard(model)), unless DistributedDataParallel or you reduce them",
            stacklevel=5,
        )


def engine_of(module: nn.Module) -> Engine:
    """Return the engine of a sharded root. Raises ValueError for any other module."""
    engine = module.__dict__.get(_ENGINE)
    if not isinstance(engine, Engine):
        raise ValueError(
            f"{type(module).__name__} is not sharded: pass the module that shardtrain.shard() returned"
        )
    return engine


def engines() -> list[Engine]:
    """Return the engines of all sharded models that exist."""
    return list(_ENGINES)


def is_inside(module: nn.Module) -> bool:
    """Return whether ``module`` is, or is inside, a module that is sharded now."""
    return any(module in engine.module.modules() for engine in engines())


def is_entrance(module: nn.Module) -> bool:
    """Return whether a call of ``module`` gathers a unit."""
    return isinstance(module, Entrance)


def _gradient_hook(driver: Driver, unit: Unit, member: ShardedParam) -> Callable[[torch.Tensor], None]:
    """Return the hook of a parameter, which sees each gradient before autograd keeps it.

    The parameter holds the hook where Python's garbage collector cannot see it. A hook that held the
    parameter in turn would keep the whole model alive for ever.
    """
    known = weakref.ref(driver)
    reduces = weakref.ref(driver.reductions[unit])
    name = member.name
    shape = member.part.shape
    arrive = driver.reductions[unit].arrived.add  # of a set of names

    def hook(grad: torch.Tensor) -> None:
        arrive(name)
        reduction = reduces()
        drives = known()
        if reduction is None or drives is None:
            return
        if reduction.unit not in drives.schedule.opened or grad.shape != shape:
            drives.gradient_arrives(reduction.unit, name, grad.shape == shape)

    return hook

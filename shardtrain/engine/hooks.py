"""What is around calls of a sharded model's modules, and hooks of autograd: both drive the schedule.

- Each call of a unit's module gathers it before and releases it afterwards, users' hooks included. For the
  root, so does a call of each module that holds a root parameter, so that a child called by itself works.
- A hook on the autograd node of each tensor that such a call returns, and of each that a module inside it
  returns which holds parameters of the unit: a loss may depend on the latter alone. It tells how far backward
  has come.
- A hook on each trainable parameter. It notes that a gradient has come, refuses one of a local shard by name,
  and opens a unit that no node has announced.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardtrain import torch_private
from shardtrain.engine import casts, user_code
from shardtrain.engine.attachment import Attachment
from shardtrain.engine.driver import Driver
from shardtrain.engine.module_class import Addition, add, bind
from shardtrain.engine.precision import leaves, tensors_in
from shardtrain.engine.segment import ShardedParam
from shardtrain.engine.unit import Shown, Unit
from shardtrain.pieces.parameter import refuse_gradient

_ENGINE = "_shardtrain_engine"
_CALLS = "_shardtrain_calls"
_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()

A = TypeVar("A", bound=Attachment)


class Engine:
    """The connection of a sharded root's modules with its units and their schedule, by hooks."""

    def __init__(self, module: nn.Module, units: list[Unit], virtual_count: int = 0) -> None:
        self.module = module
        self.units = units
        self.segments = [*chain.from_iterable(unit.segments for unit in units)]
        self.members = [*chain.from_iterable(unit.members for unit in units)]
        self.channel = units[0].channel
        self.driver = Driver(units)
        self.virtual_count = virtual_count  # virtual ranks of a step; 0 without
        all_ranks = self.channel.all_ranks
        share = virtual_count // all_ranks.world
        self.virtual_ranks = range(all_ranks.rank * share, (all_ranks.rank + 1) * share)  # this rank's
        # The trainable parameters, each with the handle of its hook.
        self.hooked: dict[ShardedParam, tuple[nn.Parameter, RemovableHandle]] = {}
        self._attached: dict[type[Attachment], Any] = {}
        self._classes: dict[nn.Module, type[nn.Module]] = {}  # of modules, before `attach`
        self._marks: list[tuple[nn.Module, str]] = []  # attributes that `attach` has set
        self._handles: list[RemovableHandle] = []
        self.place()
        for unit in units:
            unit.account = units[0].account

    # attaching

    def attach(self, attachments: Sequence[Attachment]) -> None:
        """Wrap calls, register all hooks, those of ``attachments`` too, and mark the module as sharded."""
        self._hook_parameters()
        for unit in self.units:
            self._hook_modules(unit)
        for handle in casts.attach(self.units):
            self.keep(handle)
        self._hook_encoders()
        self.driver.attachments = attachments
        for each in attachments:
            self._attached[type(each)] = each
            each.attach()
        self.mark(self.module, _ENGINE, self)
        _ENGINES.add(self)
        for unit in self.units:
            unit.rest()

    def attached(self, kind: type[A]) -> A:
        """Return the attachment of class ``kind``; there must be one."""
        return self._attached[kind]  # type: ignore[no-any-return]

    def keep(self, handle: RemovableHandle) -> None:
        """Remove the hook of ``handle`` in `detach`."""
        self._handles.append(handle)

    def mark(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute of ``module`` until `detach`."""
        self._marks.append((module, name))
        module.__dict__[name] = value

    def extend(self, module: nn.Module, addition: type[Addition]) -> None:
        """Add methods to the class of ``module`` until `detach`."""
        self._classes.setdefault(module, type(module))
        add(module, addition)

    def bind(self, module: nn.Module, methods: Mapping[str, Callable[..., Any]]) -> None:
        """Let ``module`` alone have ``methods`` until `detach`; once for each module."""
        self._marks += [(module, name) for name in bind(module, methods)]

    def detach(self) -> None:
        """Undo `attach`."""
        _ENGINES.discard(self)
        self.driver.work(self)
        for handle in [*self._handles, *(handle for _, handle in self.hooked.values())]:
            handle.remove()
        self._handles.clear()
        self.hooked.clear()
        for module, own_class in self._classes.items():
            module.__class__ = own_class
        self._classes.clear()
        for module, name in self._marks:
            module.__dict__.pop(name, None)
        self._marks.clear()

    def _hook_modules(self, unit: Unit) -> None:
        """Have calls of the modules of ``unit`` gather it, and note what modules inside them return."""
        entrances = dict.fromkeys(unit.modules.values())
        if unit is self.units[0]:
            entrances.update(dict.fromkeys(unit.holders))
        for module in entrances:
            # A unit of which the root has a tied parameter enters the root's gather, and then its own.
            outer = module.__dict__.get(_CALLS, ())
            self.mark(module, _CALLS, (*outer, _around_calls(self, unit, module is self.module)))
            self.extend(module, Entrance)
        for module in [holder for holder in unit.holders if holder not in entrances]:
            self._hook_inside(unit, module)

    def _hook_inside(self, unit: Unit, module: nn.Module) -> None:
        def after(called: nn.Module, args: Any, output: Any) -> None:
            if not torch.compiler.is_compiling():
                self.driver.watch(unit, tensors_in(output))

        self.keep(module.register_forward_hook(after))

    def _hook_encoders(self) -> None:
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
                self.keep(encoder.register_forward_pre_hook(partial(before, layers)))

    def _hook_parameters(self) -> None:
        """Hook the trainable parameters that have no hook yet."""
        for unit in self.units:
            for member in unit.members:
                hooked = self.hooked.get(member)
                param = member.param
                if (hooked is None or hooked[0] is not param) and param.requires_grad:
                    if hooked:
                        hooked[1].remove()
                    handle = param.register_hook(_gradient_hook(self.driver, unit, member))
                    self.hooked[member] = param, handle

    # between steps

    def require_rest(self, refusal: str) -> None:
        self.require_idle(refusal)
        self.adopt_changes()

    def require_idle(self, refusal: str) -> None:
        """Show shards. Raises ValueError, with ``refusal`` first, inside a step or `unsharded`."""
        self.driver.reset_failed_backward()
        if not self.driver.is_idle:
            raise ValueError(f"{refusal} inside forward, backward or unsharded()")
        self.driver.show_shards()

    def require_reduced(self, what: str) -> None:
        """Raise ValueError, naming ``what``, if gradients wait under `no_sync` or for more virtual ranks."""
        if self.driver.schedule.unreduced:
            raise ValueError(
                f"{what} while gradients wait under no_sync to be reduced: run the last backward outside of "
                "no_sync first, or clear them with zero_grad() and run another one"
            )

    def place(self) -> None:
        """Tell the channel on which devices full vectors lie."""
        self.channel.place({segment.full.device for segment in self.segments})

    def adopt_changes(self) -> None:
        """Adopt what users have changed since the last step, unless a step is under way.

        Raises ValueError for what cannot be adopted.
        """
        self.driver.reset_failed_backward()
        if self.driver.is_idle:
            for each in self.driver.attachments:
                each.at_rest()
            with torch_private.DisableTorchFunctionSubclass():
                self._hook_parameters()


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
        # Nothing to gather inside `unsharded`, where one rank may be alone, nor inside the only unit.
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


class Entrance(Addition):
    """A module whose calls gather its unit.

    ``torch.compile`` breaks the graph here. What `nn.Module.compile` has compiled runs compiled inside.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = super().__call__
        for around in self.__dict__[_CALLS]:
            call = partial(around, call)
        return call(*args, **kwargs)

    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]


def engine_of(module: nn.Module) -> Engine:
    """Return the engine of a sharded root. Raises ValueError for any other module."""
    engine = module.__dict__.get(_ENGINE)
    if not isinstance(engine, Engine):
        kind = type(module).__name__
        raise ValueError(f"{kind} is not sharded: pass the module that shardtrain.shard() returned")
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
    driver_ref = weakref.ref(driver)
    unit_ref = weakref.ref(unit)
    name = member.name
    shape = member.part.shape
    arrive = driver.reductions[unit].arrived.add  # of a set of names

    def hook(grad: torch.Tensor) -> None:
        arrive(name)
        unit = unit_ref()
        driver = driver_ref()
        if unit is None or driver is None:
            return
        if unit not in driver.schedule.opened or grad.shape != shape:
            is_whole = unit.shown is not Shown.SHARD or unit in driver.schedule.unannounced
            if grad.shape != shape or not is_whole:
                refuse_gradient(name, unit.title)
            driver.arrive(unit)

    return hook

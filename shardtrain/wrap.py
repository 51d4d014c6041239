"""``shard()``: which modules become units, and every hook that drives the schedule.

Three hooks, and nothing else in the package registers any:

- before and after a unit's module runs (and, for the root, each module that holds a root parameter, so
  that a child called by itself finds its parameters);
- on the gradient of each of its outputs: backward is about to need the unit;
- after a parameter's gradient has been accumulated. Images need no gradient, so a hook on a module's
  inputs would never fire for the first unit; counting parameters' gradients has no such hole.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from shardtrain import comm
from shardtrain.comm.transport import Transport
from shardtrain.precision import Precision, cast
from shardtrain.schedule import Schedule
from shardtrain.shard import Place, Unit, segments_of

UnitChoice = Iterable[type[nn.Module]] | Callable[[str, nn.Module], bool] | None

_ENGINE = "_shardtrain_engine"
_SMALL = 16_384  # elements; a unit below this is not worth a message of its own


class UnitInfo(NamedTuple):
    """One unit as `describe` reports it. ``parameters`` and ``bytes`` are the whole unit's;
    ``local`` (elements, padding included) and ``local_bytes`` this rank's."""

    name: str
    parameters: int
    local: int
    bytes: int
    local_bytes: int


def shard(
    module: nn.Module,
    *,
    units: UnitChoice = None,
    mesh: DeviceMesh | None = None,
    precision: Precision | None = None,
    reshard_after_forward: bool = True,
    transport: str = "auto",
    ignored: Iterable[nn.Module | nn.Parameter] = (),
) -> nn.Module:
    """Cut the parameters of ``module`` over the ranks, in place, and return ``module``.

    From then on every rank holds 1/N of each unit's parameters, gradients and optimizer state. The
    parameters stay the same objects under the same names, and at rest each holds its local piece (1-D,
    possibly empty); a unit's parameters are whole while it computes. Gradients are the mean over ranks.
    Initial parameters and buffers are rank 0's on every rank. With no process group and no
    ``WORLD_SIZE`` above 1 it works as a single rank and communicates nothing.

    Args:
        module: the root. It may be on the meta device: `to_empty` then materialises the local pieces.
        units: which modules are gathered as a whole. ``None`` chooses (see `choose_units`); else an
            iterable of module classes, or a callable ``(fully_qualified_name, module) -> bool``. What no
            unit takes belongs to the root, and so does a parameter shared by two units.
        mesh: the ranks to shard over, a 1-D ``DeviceMesh``; ``None`` is the world.
        precision: dtypes to compute and reduce in (see `Precision`); ``None`` leaves them alone.
        reshard_after_forward: release each unit after its forward and gather it again for backward.
            ``False`` keeps it, for more memory and one gather less.
        transport: ``"process_group"``; ``"shared_memory"`` for CPU ranks of one host, which then hold one
            copy of the parameters between them; ``"auto"`` takes the latter wherever it works.
        ignored: modules or parameters to leave alone; they stay replicated and are not reduced.

    Raises:
        ValueError: an argument or a module that cannot be sharded, with the reason.
        RuntimeError: ``WORLD_SIZE`` is above 1 but there is no process group yet.

    The algorithm is ZeRO stage 3 (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054).
    """
    _check(module, transport, mesh)
    skipped = _ignored_parameters(ignored)
    anchors = _unit_modules(module, units)
    places = _places_by_unit(module, anchors, skipped)
    on_cpu = all(param.device.type in ("cpu", "meta") for param in module.parameters())
    kind = "process_group" if transport == "auto" and not on_cpu else transport
    link = comm.open_transport(kind, mesh.get_group() if mesh is not None else None)
    built = [
        Unit(name, index, anchors[name], segments_of(found, link, precision or Precision()))
        for index, (name, found) in enumerate(places.items())
    ]
    _broadcast_buffers(module, link)
    engine = Engine(module, built, link, reshard_after_forward)
    if precision is not None:
        engine.hook_casts(precision)
    module.__dict__[_ENGINE] = engine
    return module


def engine_of(module: nn.Module) -> Engine:
    """The engine behind a sharded root.

    Raises:
        ValueError: ``module`` is not the module that was passed to `shard`.
    """
    engine = module.__dict__.get(_ENGINE)
    if not isinstance(engine, Engine):
        raise ValueError(
            f"{type(module).__name__} is not sharded: pass the module that shardtrain.shard() returned"
        )
    return engine


def describe(module: nn.Module) -> list[UnitInfo]:
    """What each unit of a sharded module holds, root first."""
    return [_describe_unit(unit) for unit in engine_of(module).units]


def _describe_unit(unit: Unit) -> UnitInfo:
    sizes = [(s.layout.numel, s.local.numel(), s.local.element_size()) for s in unit.segments]
    return UnitInfo(
        name=unit.name or "(root)",
        parameters=sum(whole for whole, _, _ in sizes),
        local=sum(local for _, local, _ in sizes),
        bytes=sum(whole * width for whole, _, width in sizes),
        local_bytes=sum(local * width for _, local, width in sizes),
    )


def choose_units(root: nn.Module) -> dict[str, nn.Module]:
    """The automatic choice of units: walk down from the root and stop at the first real block.

    A module becomes a unit unless it is
    - a plain container (``Sequential``, ``ModuleList``, ``ModuleDict``): its children are looked at;
    - more than half of the model (an "encoder" that is nearly everything): its children are looked at;
    - small, below 16,384 elements or 1/64 of the model, whichever is less: it stays with the root.

    In a ResNet that gives one unit per residual block and one for the classifier; in a ViT, one per
    encoder block.
    """
    sizes = {name: sum(p.numel() for p in m.parameters()) for name, m in root.named_modules()}
    total = sizes[""]
    small = min(_SMALL, total // 64)
    chosen: dict[str, nn.Module] = {}

    def visit(name: str, module: nn.Module) -> None:
        if sizes[name] == 0 or sizes[name] <= small:
            return
        has_children = next(module.children(), None) is not None
        too_large = 2 * sizes[name] > total and has_children
        if name and not too_large and not _is_container(module):
            chosen[name] = module
            return
        for child_name, child in module.named_children():
            full_name = f"{name}.{child_name}" if name else child_name
            if full_name in sizes:  # a module reachable by two names is listed under its first
                visit(full_name, child)

    visit("", root)
    return chosen


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)


def _check(module: nn.Module, transport: str, mesh: DeviceMesh | None) -> None:
    if transport not in ("auto", "process_group", "shared_memory"):
        raise ValueError(f"transport must be 'auto', 'process_group' or 'shared_memory', got {transport!r}")
    if mesh is not None and mesh.ndim != 1:
        raise ValueError(f"mesh must be a 1-D DeviceMesh, got {mesh.ndim} dimensions")
    for name, child in module.named_modules():
        if _ENGINE in child.__dict__:
            raise ValueError(f"{name or type(child).__name__} is sharded already; shard the root once")
    _check_forward("the root", module)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and not dist.is_initialized():
        raise RuntimeError(
            f"WORLD_SIZE is {world} but there is no process group: call "
            "torch.distributed.init_process_group() before shardtrain.shard()"
        )


def _check_forward(name: str, module: nn.Module) -> None:
    if type(module).forward is nn.Module.forward:
        raise ValueError(
            f"{name} is a {type(module).__name__}, which has no forward of its own, so nothing tells when "
            "its parameters are needed; shard the module that calls it, or its children"
        )


def _ignored_parameters(ignored: Iterable[nn.Module | nn.Parameter]) -> set[nn.Parameter]:
    skipped: set[nn.Parameter] = set()
    for item in ignored:
        skipped.update(item.parameters() if isinstance(item, nn.Module) else [item])
    return skipped


def _unit_modules(root: nn.Module, units: UnitChoice) -> dict[str, nn.Module]:
    """The units' modules by name, root first, outer before inner."""
    if units is None:
        chosen = choose_units(root)
    elif callable(units):
        chosen = {name: m for name, m in root.named_modules() if name and units(name, m)}
    else:
        classes = tuple(units)
        if not all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes):
            raise ValueError(f"units must be module classes or a callable, got {classes!r}")
        chosen = {name: m for name, m in root.named_modules() if name and isinstance(m, classes)}
        absent = [c.__name__ for c in classes if not any(isinstance(m, c) for m in chosen.values())]
        if absent:
            raise ValueError(f"units names {', '.join(absent)}, but the model has no such module")
    for name, module in chosen.items():
        _check_forward(name, module)
    return {"": root, **chosen}


def _places_by_unit(
    root: nn.Module, anchors: Mapping[str, nn.Module], skipped: set[nn.Parameter]
) -> dict[str, list[Place]]:
    """Each parameter under the innermost unit that holds it; one that two units share under the root."""
    names: dict[nn.Parameter, list[str]] = {}
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    homes: dict[nn.Parameter, set[str]] = {}
    for module_name, module in root.named_modules(remove_duplicate=False):
        home = _innermost(module_name, anchors)
        for attribute, param in module._parameters.items():
            if param is None or param in skipped:
                continue
            names.setdefault(param, []).append(f"{module_name}.{attribute}" if module_name else attribute)
            owners.setdefault(param, [])
            if (module, attribute) not in owners[param]:
                owners[param].append((module, attribute))
            homes.setdefault(param, set()).add(home)
    places: dict[str, list[Place]] = {name: [] for name in anchors}
    for param, found in homes.items():
        home = found.pop() if len(found) == 1 else ""
        places[home].append(Place(names[param][0], tuple(owners[param])))
    return {name: found for name, found in places.items() if found or name == ""}


def _innermost(module_name: str, anchors: Mapping[str, nn.Module]) -> str:
    while module_name and module_name not in anchors:
        module_name = module_name.rpartition(".")[0]
    return module_name


def _broadcast_buffers(root: nn.Module, transport: Transport) -> None:
    for buffer in root.buffers():
        if not buffer.is_meta:
            transport.broadcast(buffer)


class Engine:
    """A sharded root: its units, their schedule, and the hooks between them and the modules."""

    def __init__(
        self, root: nn.Module, units: list[Unit], transport: Transport, reshard_after_forward: bool
    ) -> None:
        self.module = root
        self.units = units
        self.transport = transport
        self.schedule = Schedule(units, units[0], transport, reshard_after_forward)
        self.handles: list[RemovableHandle] = []
        self._hooked: set[nn.Parameter] = set()
        for unit in units:
            self._hook_parameters(unit)
            for module in self._entrances(unit):
                self._hook_module(unit, module)

    @property
    def device(self) -> torch.device:
        """Where the first shard lies; the CPU for a model without parameters."""
        found = (segment.local.device for unit in self.units for segment in unit.segments)
        return next(found, torch.device("cpu"))

    def _entrances(self, unit: Unit) -> list[nn.Module]:
        """The modules whose call needs ``unit``: its own, and for the root every direct holder."""
        if unit is not self.units[0]:
            return [unit.module]
        holders = [m for s in unit.segments for place in s.places for m, _ in place.owners]
        return list(dict.fromkeys([unit.module, *holders]))

    def _hook_module(self, unit: Unit, module: nn.Module) -> None:
        def before(called: nn.Module, args: Any) -> None:
            self.settle()
            if called is self.module:
                self.schedule.begin_forward()
            self.schedule.before_forward(unit)

        def after(called: nn.Module, args: Any, output: Any) -> None:
            failed = output is None and sys.exc_info()[0] is not None
            self.schedule.after_forward(unit, self._hook_outputs(unit, output), failed)
            if called is self.module:
                self.schedule.end_forward(failed)

        self.handles.append(module.register_forward_pre_hook(before, prepend=True))
        self.handles.append(module.register_forward_hook(after, always_call=True))

    def _hook_outputs(self, unit: Unit, output: Any) -> bool:
        """Ask each output's gradient to announce the unit's backward; whether that is sure to work."""
        if not torch.is_grad_enabled() or output is None or not self.schedule.outermost(unit):
            return True

        def announce(grad: torch.Tensor) -> None:
            self.schedule.before_backward(unit)

        found = list(tensors_in(output))
        for tensor in found:
            if tensor.requires_grad:
                tensor.register_hook(announce)
        return bool(found)

    def _hook_parameters(self, unit: Unit) -> None:
        for number, segment in enumerate(unit.segments):
            for index, param in enumerate(segment.params):
                if param.requires_grad and param not in self._hooked:
                    self._hooked.add(param)
                    self._hook_parameter(unit, number, index, param)

    def _hook_parameter(self, unit: Unit, segment: int, index: int, param: nn.Parameter) -> None:
        # The parameter holds this hook where Python's garbage collector cannot see it, so a hook that held
        # the parameter in turn would keep the whole model for ever.
        to_schedule, to_unit = weakref.ref(self.schedule), weakref.ref(unit)

        def arrived(_: torch.Tensor) -> None:
            schedule, its_unit = to_schedule(), to_unit()
            if schedule is not None and its_unit is not None:
                schedule.gradient_arrived(its_unit, segment, index)

        self.handles.append(param.register_post_accumulate_grad_hook(arrived))

    def hook_casts(self, precision: Precision) -> None:
        """Cast what enters and leaves modules. Inside `unsharded` a unit computes in its own dtype."""
        if precision.param is not None:
            for unit in self.units:
                if precision.cast_inputs:
                    self._hook_inputs(unit, unit.module, precision.param)
                for module, dtype in self._wide_modules(unit, precision):
                    self._hook_inputs(unit, module, dtype)
                    self._hook_output(unit, module, precision.param)
        if precision.output is not None:
            self._hook_output(self.units[0], self.module, precision.output)

    def _wide_modules(self, unit: Unit, precision: Precision) -> list[tuple[nn.Module, torch.dtype]]:
        found = [(m, s.local.dtype) for s in unit.segments for place in s.places for m, _ in place.owners]
        return [(m, dtype) for m, dtype in dict(found).items() if precision.wants_wide_inputs(m)]

    def _hook_inputs(self, unit: Unit, module: nn.Module, dtype: torch.dtype) -> None:
        def cast_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return (args, kwargs) if unit.pinned else (cast(args, dtype), cast(kwargs, dtype))

        self.handles.append(module.register_forward_pre_hook(cast_inputs, with_kwargs=True))

    def _hook_output(self, unit: Unit, module: nn.Module, dtype: torch.dtype) -> None:
        def cast_output(_: nn.Module, args: Any, output: Any) -> Any:
            return output if unit.pinned else cast(output, dtype)

        self.handles.append(module.register_forward_hook(cast_output))

    def settle(self) -> None:
        """Take in what users did to parameters since the last step, unless a step is under way.

        Raises:
            ValueError: a parameter is still on the meta device, or was changed so that its piece no
                longer fits.
        """
        if not self.schedule.at_rest():
            return
        for unit in self.units:
            for segment in unit.segments:
                if not segment.shows_full and segment.was_replaced():
                    segment.take_over()
            self._hook_parameters(unit)
        on_meta = [p.name for u in self.units for s in u.segments if s.local.is_meta for p in s.places]
        if on_meta:
            raise ValueError(
                f"parameters still on the meta device: {', '.join(on_meta)}; materialise the local pieces "
                "with module.to_empty(device=...) and load or initialise their values first"
            )


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor inside nested lists, tuples, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))

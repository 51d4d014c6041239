"""Offer FSDP2's names over `shard`: an FSDP2 script runs with this import in the place of torch's.

::

    from shardtrain.fsdp import fully_shard      # was: from torch.distributed.fsdp import fully_shard

    fully_shard(block)   marks the block as a unit, with its options
    fully_shard(model)   encloses marked modules: shards the model now, with them as its units
    block(x)             shards a marked module that no call has enclosed, as a model of one unit

Parameters stay plain, and shards are flat. What concerns speed or memory alone in FSDP2, and has no meaning
here, is accepted and does nothing. What would change results is refused by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy as CPUOffloadPolicy
from torch.distributed.fsdp import MixedPrecisionPolicy as MixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as OffloadPolicy
from torch.distributed.fsdp import UnshardHandle as UnshardHandle

from shardtrain import Precision, UnitOptions, comm, forward_method, shard, torch_private, unsharded
from shardtrain.comm.channel import Channel
from shardtrain.comm.transport import Transport
from shardtrain.engine.hooks import Engine, engine_of, is_inside
from shardtrain.engine.module_class import add
from shardtrain.engine.segment import become
from shardtrain.engine.unit import Shown, Unit
from shardtrain.engine.units import unit_modules
from shardtrain.guardrails.refusals import Uncopied
from shardtrain.sharding import check

_MARK = "_shardtrain_mark"
Modules = TypeVar("Modules", bound=nn.Module | list[nn.Module])


@dataclass(eq=False)
class _Mark:
    """What `fully_shard` was given for a module.

    ``options``: those of its unit. ``shared``: the arguments that `shard` gets if the module is the root.
    ``root``: the sharded model that has the module.
    """

    options: UnitOptions
    shared: dict[str, Any]
    ignored: set[nn.Parameter]
    root: nn.Module | None = None

    def __str__(self) -> str:
        """Say what all marks of a model must have in common."""
        mesh = self.shared["mesh"]
        ranks = list(range(comm.world_size())) if mesh is None else mesh.mesh.tolist()
        return f"ranks {ranks}{' and offload' if self.shared['offload'] else ''}"


def fully_shard(
    module: Modules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Any = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    transport: str | Transport | Channel = "auto",
) -> Modules:
    """Mark ``module``, or each module of a list, as a unit; shard it if it encloses marked modules.

    The arguments are FSDP2's, and are this unit's. An int for ``reshard_after_forward`` means True: the unit
    is gathered from all ranks again. The root is never resharded between forward and backward. ``mesh`` and
    ``offload_policy`` must be the same for all units of a model. ``transport``: the root's, as in `shard`.
    ``shard_placement_fn`` chooses the dimension that FSDP2 cuts, which changes no result: shards are flat.

    Raises ValueError for a ``shard_placement_fn`` that chooses ranks, ``dp_mesh_dims``, subclasses of tensors
    (DTensors) as parameters, modules without a forward of their own, and modules that are sharded or inside a
    sharded one.
    """
    if dp_mesh_dims is not None:
        _refuse("fully_shard(dp_mesh_dims=...)")
    policy = mp_policy or MixedPrecisionPolicy()
    dtypes = policy.param_dtype, policy.reduce_dtype, policy.output_dtype
    # FSDP2 casts BatchNorm, too, which then fails.
    precision = Precision(*dtypes, cast_inputs=policy.cast_forward_inputs, keep=(torch_private.NormBase,))
    ignored = set(ignored_params or ())
    offload = isinstance(offload_policy, CPUOffloadPolicy)
    device = None if mesh is None else mesh.device_type
    shared = {"mesh": mesh, "offload": offload, "device": device, "transport": transport}
    for part in module if isinstance(module, list) else [module]:
        if _MARK in part.__dict__ or is_inside(part):
            raise ValueError(
                f"this {type(part).__name__} is a unit already, or inside a sharded model; call fully_shard "
                "once each, on blocks first and on what contains them last"
            )
        inner = _marks(part)
        for inside, mark in inner.items():
            if mark.root is inside:
                _withdraw(inside)
        check(part, transport, mesh, precision, ignored)
        _check_placement(part, shard_placement_fn)
        unit_modules(part, {})  # raises without a forward
        options = UnitOptions(precision, reshard_after_forward is None or bool(reshard_after_forward))
        part.__dict__[_MARK] = _Mark(options, shared, ignored)
        add(part, FSDPModule, prefix="FSDP")
        if inner:
            _shard(part)
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let the method need full parameters, too. As in FSDP2, other modules than units are left alone."""
    if isinstance(module, FSDPModule):
        forward_method(module, method_name)


def _accept(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Do nothing: this concerns only speed or memory, which the schedule decides by itself."""


class FSDPModule(Uncopied):
    """FSDP2's methods, which `fully_shard` adds to a module."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.__dict__[_MARK].root is None:
            _shard(self)
            return self(*args, **kwargs)  # by its new class
        return super().__call__(*args, **kwargs)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit and show full parameters, which must not be changed, until `reshard`."""
        engine, unit = _sharded(self)
        if unit is not None and unit.shown is Shown.SHARD:
            engine.adopt_changes()
            if engine.driver.is_idle:
                engine.driver.reshard_and_cast(unit)
            engine.driver.schedule.show_unannounced(unit)  # until the next forward or update
        return UnshardHandle() if async_op else None  # its `wait` has nothing to wait for

    def reshard(self) -> None:
        """Release this unit."""
        engine, unit = _sharded(self)
        if unit is not None and unit.shown is Shown.FULL:
            engine.driver.before_hide([unit])
            engine.driver.schedule.reshard_unannounced(unit)
            engine.driver.reshard_and_cast(unit)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Reduce gradients in backward, or (False) let them wait on each rank."""
        accumulating = dict[Engine, set[Unit]]()
        for module, mark in _marks(self, recurse).items():
            mark.options = replace(mark.options, reduces=requires_gradient_sync)
            if mark.root is not None:
                engine, unit = _sharded(module)
                accumulates = accumulating.setdefault(engine, set(engine.driver.schedule.accumulates))
                if unit is not None and requires_gradient_sync:
                    accumulates.discard(unit)
                elif unit is not None:
                    accumulates.add(unit)
        for engine, accumulates in accumulating.items():
            engine.driver.schedule.accumulate(accumulates)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Do as `set_requires_gradient_sync` if there are replicas: both averages are one reduction here."""
        mesh = self.__dict__[_MARK].shared["mesh"]
        if mesh is not None and mesh.ndim > 1:
            self.set_requires_gradient_sync(requires_all_reduce, recurse=recurse)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Release units after forward, or keep them."""
        for module, mark in _marks(self, recurse).items():
            mark.options = replace(mark.options, reshard_after_forward=reshard_after_forward)
            if mark.root is not None:
                engine, unit = _sharded(module)
                if unit is not None:
                    engine.driver.schedule.keep_after_forward(unit, not reshard_after_forward)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of all ranks' gradients of this unit by ``factor``, instead of their number."""
        mark: _Mark = self.__dict__[_MARK]
        mark.options = replace(mark.options, divide_by=factor)
        if mark.root is not None:
            engine, unit = _sharded(self)
            if unit is not None:
                engine.driver.reductions[unit].divide_by = factor

    set_reduce_scatter_divide_factor = set_gradient_divide_factor
    set_modules_to_forward_prefetch = _accept
    set_modules_to_backward_prefetch = _accept
    reset_iter_state = _accept
    set_is_last_backward = _accept
    set_reshard_after_backward = _accept
    set_unshard_in_backward = _accept
    set_force_sum_reduction_for_comms = _accept
    set_reduce_scatter_max_input_buffers = _accept
    set_allocate_memory_from_process_group_for_comm = _accept
    set_post_optim_event = _accept
    _set_unshard_async_op = _accept

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        if any(param.is_meta for param in self.parameters()):  # `to_empty` materialises shards only
            _sharded(self)
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]


def _refuse(what: str, *args: Any, **kwargs: Any) -> None:
    raise ValueError(f"{what} of FSDP2 is not supported: shards and messages are not FSDP2's; leave it out")


for _name in vars(fsdp.FSDPModule):
    if _name[0] != "_" and not hasattr(FSDPModule, _name):
        setattr(FSDPModule, _name, functools.partialmethod(functools.partial(_refuse, f"{_name}()")))


def _marks(module: nn.Module, recurse: bool = True) -> dict[nn.Module, _Mark]:
    """Return ``module``, and with ``recurse`` the modules in it, if they are marked, with their marks."""
    modules = module.modules() if recurse else [module]
    return {marked: marked.__dict__[_MARK] for marked in modules if _MARK in marked.__dict__}


def _check_placement(module: nn.Module, choose: Callable[[nn.Parameter], Any] | None) -> None:
    """Raise ValueError if ``choose`` returns more than the dimension to cut, such as other ranks."""
    if choose is None:
        return
    from torch.distributed.tensor import Shard  # an import of 0.3 s

    odd = [name for name, param in module.named_parameters() if not isinstance(choose(param), Shard | None)]
    if odd:
        _refuse(f"fully_shard(shard_placement_fn=...) that returns no Shard(dim), for {odd[0]},")


def _withdraw(module: nn.Module) -> None:
    """Give a root its whole parameters again, since it becomes a part of another root."""
    engine = engine_of(module)
    on_meta = any(segment.local.is_meta for segment in engine.segments)
    with nullcontext() if on_meta else unsharded(module, writeback=False):
        values = [member.full_view if on_meta else member.param.data for member in engine.members]
    engine.detach()
    for member, value in zip(engine.members, values, strict=True):
        member.param.grad = None
        become(member.param, value)
    for inner in _marks(module).values():
        inner.root = None


@torch_private.disable_dynamo  # type: ignore[untyped-decorator]
def _shard(root: nn.Module) -> None:
    """Shard ``root``, with the marked modules in it as units. Raises ValueError if they differ in ranks."""
    marks = _marks(root)
    own = marks[root]
    for name, module in root.named_modules():
        if str(mark := marks.get(module, own)) != str(own):
            raise ValueError(
                f"{name} was given {mark}, expected the root's {own}: give all calls of fully_shard the same "
                "mesh and offload_policy"
            )
    units = {module: mark.options for module, mark in marks.items()}
    ignored = set[nn.Parameter]().union(*[mark.ignored for mark in marks.values()])
    shard(root, units=units, ignored=ignored, **own.shared)
    for mark in marks.values():
        mark.root = root


def _sharded(module: nn.Module) -> tuple[Engine, Unit | None]:
    """Return the engine and the unit of a marked module. If it is in no root, shard it as one first.

    A module without parameters of its own has no unit.
    """
    mark = module.__dict__[_MARK]
    if mark.root is None:
        _shard(module)
    engine = engine_of(mark.root)
    return engine, next((unit for unit in engine.units if module in unit.modules.values()), None)

"""`shard`: arguments are checked, units chosen, the engine built, the other rooms attached.

And what works on its result: `no_sync`, and `forward_method` for other methods than forward.

The algorithm is ZeRO stage 3 (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardtrain import comm, torch_private
from shardtrain.bits.virtual import Virtual, check_sums, require_deterministic_kernels
from shardtrain.comm.channel import Channel, Ranks
from shardtrain.comm.transport import Transport
from shardtrain.device import is_accelerator, return_freed_memory
from shardtrain.engine.attachment import Attachment
from shardtrain.engine.hooks import Engine, engine_of, is_entrance
from shardtrain.engine.precision import Precision
from shardtrain.engine.segment import ParamInfo, Segment, become
from shardtrain.engine.unit import Unit, UnitOptions
from shardtrain.engine.units import Choice, UnitChoice, infos_by_unit, joined, most_bytes, unit_modules
from shardtrain.guardrails.attachment import Guardrails
from shardtrain.guardrails.refusals import require_apart
from shardtrain.layout import Cut, Policy, cut_of
from shardtrain.whole.dcp import StateDicts
from shardtrain.whole.deferred import InitialValues


def shard(
    module: nn.Module,
    *,
    units: UnitChoice = None,
    mesh: DeviceMesh | None = None,
    precision: Precision | None = None,
    reshard_after_forward: bool = True,
    transport: str | Transport | Channel = "auto",
    ignored: Iterable[nn.Module | nn.Parameter] = (),
    conditional: Iterable[nn.Module] = (),
    layout: Policy = "even",
    virtual_ranks: int = 0,
    device: torch.device | str | None = None,
    offload: bool = False,
    unit_bytes: int | None = None,
) -> nn.Module:
    """Shard the parameters of ``module`` over the ranks, in place, and return ``module``.

    Every rank then holds 1/N of each unit's parameters, gradients and optimizer state. Parameters stay the
    same objects under the same names. At rest each holds its local shard, with as many dimensions as the
    parameter: n elements of a filter are (n, 1, 1, 1). A rank that has all of a parameter, as a single one
    does, shows it in its own shape. A unit's parameters are gathered while it computes. Gradients are the
    mean over ranks. Every rank gets rank 0's initial parameters and buffers. With no process group and no
    ``WORLD_SIZE`` above 1 it works as a single rank and communicates nothing.

    Args:
        module: the root. It may come from `deferred`. It may also be on the meta device without values:
            `to_empty` then materialises the local shards.
        units: the modules whose parameters are gathered together: an iterable of module classes, a callable
            ``(fully_qualified_name, module) -> bool``, or a dict ``{module: UnitOptions}``, whose options
            replace ``precision`` and ``reshard_after_forward``. ``"blocks"`` finds residual and encoder
            blocks (see `choose_units`). ``None`` does, too, where that pays: a model of at most 2 MiB is one
            unit. Parameters of no unit, and those shared by two units, belong to the root.
        mesh: the ranks to shard over, a 1-D ``DeviceMesh``; ``None`` is the world. With a 2-D mesh of the
            whole world, ``(replicate, shard)``, each row shards one copy of the model (HSDP; see
            `comm/wrappers.py`). N is then the ranks of a row; gradients are the mean over all ranks.
        precision: dtypes to compute and reduce in (see `Precision`); ``None`` changes nothing.
        reshard_after_forward: release each unit after its forward and gather it again for backward.
            ``False`` keeps it: more memory, one gather less.
        transport: ``"process_group"``; ``"shared_memory"`` for CPU ranks of one host, which then hold one
            copy of the parameters between them; ``"auto"`` chooses the latter where it works. Or a
            `Transport`, without ``mesh``: `shardtrain.plan.transport.Simulated` is one rank of any world.
        ignored: modules or parameters that are not sharded; they stay replicated and are not reduced.
        conditional: modules that a step may call on some ranks only, such as a tower for images. Neither
            they nor modules inside are units: all ranks gather and reduce them with the unit around them.
        layout: ``"even"`` cuts each unit into equal intervals, also inside parameters. ``"whole"`` gives each
            parameter to one rank, for optimizers that look at all of it (Muon): there it has its own shape
            at rest, on other ranks ``(0, 1, ...)``. Shards are as equal as whole parameters allow.
        device: the device of shards, buffers and computation. ``None`` is where they are now, for a deferred
            model the CPU. At most one full unit at a time is there while sharding.
        virtual_ranks: micro-batches per step, a power of two, so that any power of two of ranks up to it
            gives the same bits (see `virtual_rank`). 0: each number of ranks has its own order of sums.
        offload: keep shards, their gradients and optimizer state in host memory instead of on the device
            that computes; the optimizer then steps on the CPU. On the CPU it changes nothing.
        unit_bytes: join neighbours of one class in one container, which are called in a row, into units of at
            most that many bytes of parameters, in the dtype that is gathered: fewer units cost the host less,
            and two of them are whole at a time. 0 joins none. ``None`` joins the blocks that `choose_units`
            chooses, up to 32 MiB on an accelerator and 1 MiB on the CPU, but no units that you name.

    Raises:
        ValueError: an argument or a module that cannot be sharded, with the reason; ``virtual_ranks`` on an
            accelerator without `torch.use_deterministic_algorithms`.
        RuntimeError: ``WORLD_SIZE`` is above 1 but there is no process group yet.
    """
    precision = precision or Precision()
    left_alone = check(module, transport, mesh, precision, ignored)
    anchors = unit_modules(module, units, [*conditional])
    options = _options_of(anchors, units, UnitOptions(precision, reshard_after_forward))
    infos = infos_by_unit(module, anchors, left_alone)
    choices = [Choice({name: anchors[name]}, infos[name], options[name]) for name in infos]
    initial = InitialValues(module, None if device is None else torch.device(device))
    if initial.deferred and mesh is not None and 0 not in mesh.mesh:
        raise ValueError("deferred() built the values on rank 0, which is not in the mesh: build without it")
    devices = [initial.device(param) for param in module.parameters()]
    link = _open(transport, mesh, devices, offload)
    if virtual_ranks:
        check_sums(module, left_alone, [each.precision for each in options.values()], link, virtual_ranks)
        require_deterministic_kernels(devices)
    choices = joined(module, choices, most_bytes(unit_bytes, units, devices))
    comm.require_same([f"layout {layout}", *_model_lines(choices)], "the model to shard", link.all_ranks)
    cut = cut_of(layout, link.world, virtual_ranks)
    segments: dict[str, list[Segment]] = {}
    for choice in _largest_first(choices):
        segments[choice.name] = _segments_of(choice, link, cut, initial)
    sharded_units = [
        Unit(choice.name, choice.modules, segments[choice.name], link, choice.options) for choice in choices
    ]
    _place_uncut(module, left_alone, initial, link.all_ranks)
    engine = Engine(module, sharded_units, virtual_ranks)
    attachments: list[Attachment] = [Guardrails(engine), StateDicts(engine)]
    if virtual_ranks:
        attachments.append(Virtual(engine))
    engine.attach(attachments)
    return_freed_memory()  # freed by the unsharded parameters
    return module


def _options_of(
    anchors: Mapping[str, nn.Module], units: UnitChoice, root_options: UnitOptions
) -> dict[str, UnitOptions]:
    """Return the options of each unit: those that ``units`` has for it, else the root's."""
    # The root's `output` is for the root alone: a unit casts its outputs by its own options.
    other_options = replace(root_options, precision=replace(root_options.precision, output=None))
    options = {}
    for name, anchor in anchors.items():
        chosen = units.get(anchor) if isinstance(units, Mapping) else None
        options[name] = chosen or (other_options if name else root_options)
    return options


def _largest_first(choices: Iterable[Choice]) -> list[Choice]:
    """Return ``choices``, that with the largest parameter first."""
    return sorted(choices, key=lambda choice: -max([i.parameter.numel() for i in choice.infos], default=0))


def _segments_of(choice: Choice, channel: Channel, cut: Cut, initial: InitialValues) -> list[Segment]:
    """Make a segment of each dtype, device and ``requires_grad``, in order. Collective."""
    precision = choice.options.precision
    groups: dict[tuple[object, ...], list[ParamInfo]] = {}
    for info in choice.infos:
        param = info.parameter
        moves_as = precision.of_parameter(param, info.holder)
        kind = moves_as, param.dtype, initial.device(param), param.requires_grad
        groups.setdefault(kind, []).append(info)
    segments = []
    for group in groups.values():
        device = initial.device(group[0].parameter)
        segments.append(Segment(group, channel, precision, cut, device))
    return segments


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Accumulate gradients: a backward inside keeps full gradients on each rank, and reduces nothing.

    The next backward outside adds to them and reduces the sum. Until then ``.grad`` of a parameter without a
    reduced gradient shows this rank's part of the waiting one, so that `zero_grad` clears it. An optimizer's
    step, clipping and other changes of it raise ValueError.
    """
    engine = engine_of(module)
    if engine.virtual_count:
        with engine.attached(Virtual).waiting(), engine.driver.reducing(False):
            yield
        return
    with engine.driver.reducing(engine.channel.all_ranks.world == 1):  # a single rank communicates nothing
        yield


def forward_method(module: nn.Module, *names: str) -> None:
    """Run the hooks of forward around the methods ``names`` of ``module``, which need full parameters, too.

    ``module``: what `shard` returned, or one of its units. FSDP2's name for this is
    ``register_fsdp_forward_method``.

    Raises:
        ValueError: ``module`` is something else, or has no such method.
    """
    kind = type(module).__name__
    if not is_entrance(module):
        raise ValueError(f"{kind} is neither a sharded model nor one of its units; call shard() first")
    for name in names:
        method = getattr(type(module), name, None)
        if not callable(method):
            raise ValueError(f"{kind} has no method {name}")
        setattr(module, name, MethodType(partial(_call_as_forward, method), module))


def _call_as_forward(method: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call ``module`` with ``method`` in place of its forward. Inside ``method``, forward is restored."""
    users_forward = module.__dict__.get("forward")

    def restore() -> None:
        module.__dict__.pop("forward", None)
        if users_forward is not None:
            module.forward = users_forward

    def instead(*args: Any, **kwargs: Any) -> Any:
        restore()
        return method(module, *args, **kwargs)

    module.forward = instead
    try:
        return module(*args, **kwargs)
    finally:
        restore()


def check(
    module: nn.Module,
    transport: str | Transport | Channel,
    mesh: DeviceMesh | None,
    precision: Precision,
    ignored: Iterable[nn.Module | nn.Parameter],
) -> set[nn.Parameter]:
    """Return the ignored parameters. Raises for what `shard` cannot shard, or was not given right."""
    left_alone = _parameters_of(ignored)
    if not isinstance(precision, Precision):
        expected = "a shardtrain.Precision, such as Precision(param=torch.bfloat16)"
        raise ValueError(f"precision must be {expected}, got {precision!r}")
    if mesh is not None:
        _check_mesh(mesh)
        if not isinstance(transport, str):
            raise ValueError(
                f"transport={type(transport).__name__}(...) is between the ranks that it was made for, "
                "whatever mesh= says: leave mesh= out, or name the transport"
            )
    for name, child in module.named_modules():
        if is_entrance(child):
            raise ValueError(f"{name or type(child).__name__} is sharded already; shard the root once")
    for name, param in module.named_parameters():
        kind = type(param.data)
        if param not in left_alone and kind not in (torch.Tensor, torch_private.FakeTensor):
            raise ValueError(
                f"parameter {name} is a {kind.__module__}.{kind.__name__}, expected a plain torch.Tensor: a "
                "tensor subclass cannot be cut into pieces; convert it, or leave it whole with ignored=[...]"
            )
    world = int(os.environ.get("WORLD_SIZE", "1"))
    require_apart(module, left_alone)
    if world > 1 and isinstance(transport, str) and not dist.is_initialized():
        raise RuntimeError(
            f"WORLD_SIZE is {world} but there is no process group: call "
            "torch.distributed.init_process_group() before shardtrain.shard()"
        )
    return left_alone


def _parameters_of(items: Iterable[nn.Module | nn.Parameter]) -> set[nn.Parameter]:
    params = set[nn.Parameter]()
    for item in items:
        if not isinstance(item, nn.Module | nn.Parameter):
            raise ValueError(f"ignored must hold modules and parameters, got {type(item).__name__}")
        params.update(item.parameters() if isinstance(item, nn.Module) else [item])
    return params


def _check_mesh(mesh: DeviceMesh) -> None:
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"mesh must be a 1-D DeviceMesh or a 2-D one (replicate, shard), got {mesh.ndim} dimensions"
        )
    ranks = mesh.mesh
    world = dist.get_world_size()
    if mesh.ndim == 2 and ranks.numel() != world:
        sizes = "×".join(map(str, ranks.shape))
        raise ValueError(f"a 2-D mesh must hold every rank: expected {world} ranks, got {sizes}")
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh, which holds {ranks.tolist()}")
    if mesh.ndim == 2 and any((ranks.diff(dim=dim) <= 0).any() for dim in (0, 1)):
        raise ValueError(f"the ranks of a 2-D mesh must ascend along both dimensions, got {ranks.tolist()}")


def _open(
    transport: str | Transport | Channel,
    mesh: DeviceMesh | None,
    devices: Sequence[torch.device],
    offload: bool,
) -> Channel:
    """Open ``transport`` for parameters on ``devices``, or return it if it is open."""
    on_accelerators = any(map(is_accelerator, devices))
    kind = "process_group" if transport == "auto" and on_accelerators else transport
    if isinstance(kind, Channel):
        link = kind
    elif isinstance(kind, Transport):
        link = Channel(kind)
        if isinstance(kind, comm.ProcessGroupTransport) and not kind.notices:
            raise ValueError(
                f"ranks that differ would hang over transport={type(kind).__name__}(...): call "
                "shardtrain.comm.guard_world() on all ranks before it is made"
            )
    elif mesh is None:
        link = comm.open_transport(kind)
    elif mesh.ndim == 1 or mesh.size(0) == 1:
        link = comm.open_transport(kind, mesh.get_group(mesh.ndim - 1))
    else:
        link = comm.open_transport(kind, None, mesh.mesh.tolist(), mesh.get_group(1), mesh.get_group(0))
    return comm.Offloaded(link, devices[0]) if offload and devices and is_accelerator(devices[0]) else link


def _model_lines(choices: Iterable[Choice]) -> list[str]:
    """Return one line per parameter that describes it, which must be the same on every rank."""
    lines = []
    for choice in choices:
        unit = choice.name or "the root"
        for info in choice.infos:
            param = info.parameter
            frozen = "" if param.requires_grad else " frozen"
            kind = f"{tuple(param.shape)} {param.dtype} strides {param.stride()}{frozen}"
            lines.append(f"{info.name} {kind} in {unit}")
    return lines


def _place_uncut(module: nn.Module, ignored: set[nn.Parameter], initial: InitialValues, ranks: Ranks) -> None:
    """Move ignored parameters and buffers; broadcast buffers and deferred values from rank 0."""
    for param in [param for param in module.parameters() if param in ignored]:
        value = initial.placed(param)
        if param in initial.deferred:
            ranks.broadcast(value)
        become(param, value)
    buffers = {buffer: initial.placed(buffer) for buffer in module.buffers()}
    for part in module.modules():
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffers[buffer]
    for buffer in buffers.values():
        if not buffer.is_meta:
            ranks.broadcast(buffer)

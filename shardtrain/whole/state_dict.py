"""Full parameters for users, inside `unsharded` or in a state dict; and buffers made equal on all ranks.

All public functions here but `optimizer_state_dict` are collective: every rank must call them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardtrain import comm
from shardtrain.comm.channel import Ranks
from shardtrain.comm.transport import Vector
from shardtrain.device import synchronize
from shardtrain.engine.hooks import Engine, engine_of
from shardtrain.engine.segment import Segment, ShardedParam, plain_name
from shardtrain.engine.unit import Unit
from shardtrain.pieces.piece import plain
from shardtrain.whole.dcp import StateDicts


class Spec(NamedTuple):
    """A full parameter or buffer without its values: dtype and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        return cls(tensor.dtype, tuple(tensor.shape))


@contextmanager
def unsharded(module: nn.Module, *, writeback: bool = True, grads: bool = False) -> Iterator[None]:
    """Show full parameters in their own shapes inside, on every rank; with ``grads``, full gradients too.

    ``writeback``: keep the edits made inside, or drop them. Each rank keeps edits of its own interval, so
    make the same edits on all ranks. A forward inside communicates nothing, so one rank may run it alone.

    Raises ValueError if a step or another ``unsharded`` is under way, if ``grads`` wait under `no_sync`, or,
    at the end, if an edit gave a parameter or gradient another shape.
    """
    engine = engine_of(module)
    engine.require_rest("unsharded() cannot be called")
    if grads:
        engine.require_reduced("unsharded(grads=True)")
    gradients = {member: member.param.grad for member in engine.members}
    try:
        for unit in engine.units:
            engine.driver.schedule.reshard(unit)
            _show_copies(unit, grads)
        try:
            yield
        finally:
            if writeback:
                for member in engine.members:
                    member.local_view.copy_(member.part_of_whole(member.param.data))
                    if grads:
                        gradients[member] = _kept_grad(member)
    finally:
        for unit in engine.units:
            unit.hide()
        for member, grad in gradients.items():
            member.param.grad = None
            if grad is not None:
                member.set_grad(grad)


def _kept_grad(member: ShardedParam) -> Tensor | None:
    """Return a copy of this rank's part of the full gradient that ``member`` shows, where its shard lies."""
    grad = member.param.grad
    if grad is None:
        return None
    return member.part_of_whole(grad).to(member.local_view.device, copy=True)


def _show_copies(unit: Unit, grads: bool) -> None:
    """Show full copies that are private to this rank: no other rank sees edits before they are kept."""
    values: dict[ShardedParam, Tensor] = {}
    gradients: dict[ShardedParam, Tensor | None] = {}
    for segment in unit.segments:
        whole = _whole(unit, segment, segment.local)
        whole_grads = _whole_grads(unit, segment) if grads else [None] * len(whole)
        values.update(zip(segment.members, whole, strict=True))
        gradients.update(zip(segment.members, whole_grads, strict=True))
    for member in unit.members:
        member.param.grad = None
    unit.show_private(values)
    for member, grad in gradients.items():
        member.param.grad = grad


def _whole(unit: Unit, segment: Segment, local: Tensor) -> list[Tensor]:
    """Gather every rank's interval ``local``; return private full tensors on the unit's device."""
    if unit.channel.world == 1:
        return segment.views_of(local.to(segment.full.device, copy=True))
    full = segment.full.new_empty(segment.layout.padded, dtype=local.dtype)
    unit.channel.gather(unit.title, [Vector(full, local, segment.layout)]).wait()
    return segment.views_of(full)


def _whole_grads(unit: Unit, segment: Segment) -> list[Tensor | None]:
    """Return every parameter's full gradient, or None if no rank has one."""
    # Ranks agree first: one whose piece of a parameter is empty does not know whether there is a gradient.
    here = [member.param.grad is not None and member.part.numel > 0 for member in segment.members]
    present = segment.local.new_tensor(here, dtype=torch.float32)  # a dtype that has a maximum
    segment.channel.all_ranks.all_reduce(present, "max")
    local = torch.zeros_like(segment.local)
    for member in segment.members:
        if member.param.grad is not None:
            member.part_of(local).copy_(plain(member.param.grad))
    wholes = _whole(unit, segment, local) if present.any() else [None] * len(here)
    return [whole if there else None for whole, there in zip(wholes, present.tolist(), strict=True)]


def full_state_dict(module: nn.Module, *, rank0_only: bool = False) -> dict[str, Tensor]:
    """Return full parameters and persistent buffers on the CPU, as the unwrapped model's ``state_dict()``.

    Keys, their order, shapes and dtypes are the same. One unit is gathered at a time. Floating-point buffers
    (BatchNorm's running statistics) are the mean over ranks, others are rank 0's, so the result is the same
    on every rank. With ``rank0_only`` the other ranks return an empty dict.

    Raises ValueError inside forward, backward or `unsharded`.
    """
    engine = engine_of(module)
    engine.require_rest("full_state_dict() cannot be called")
    wanted = engine.channel.all_ranks.rank == 0 or not rank0_only
    to_host = partial(Tensor.to, device="cpu", copy=True, non_blocking=True)
    values = {b: to_host(value) for b, value in equal_buffers(module, engine.channel.all_ranks)}
    params = {member.name: member.param for member in engine.members}
    for name, whole in full_weights(module):
        if wanted:
            values[params[name]] = to_host(whole)
    synchronize(engine.driver.device)
    state = module.state_dict(keep_vars=True) if wanted else {}
    tensors = [(key, value) for key, value in state.items() if isinstance(value, Tensor)]
    copies = {k: values[v] if v in values else v.detach().to("cpu", copy=True) for k, v in tensors}
    return {**state, **copies}  # what get_extra_state() returned stays as it is


def full_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the full value of every sharded parameter, on the model's device. Collective.

    One unit is gathered at a time, and freed once its tensors are, so that an inference engine or a file can
    take a model that no device holds. Every rank must go to the end. Of tied names only the first comes.

    Raises ValueError inside forward, backward or `unsharded`.
    """
    engine = engine_of(module)
    engine.require_rest("full_weights() cannot be called")
    for unit in engine.units:
        for segment in unit.segments:
            names = [member.name for member in segment.members]
            yield from zip(names, _whole(unit, segment, segment.local), strict=True)


def load_full_state_dict(module: nn.Module, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
    """Load full parameters and buffers. Every rank uses rank 0's ``state``.

    ``state``: as returned by `full_state_dict` or the unwrapped model's ``state_dict()``. ``strict=False``:
    what ``state`` lacks keeps its value, and what the model lacks is ignored.

    Raises ValueError on every rank, naming each key that is missing, unexpected, of another shape or dtype.
    Then nothing has been loaded.
    """
    engine = engine_of(module)
    engine.require_rest("load_full_state_dict() cannot be called")
    all_ranks = engine.channel.all_ranks
    values = dict[str, Tensor]()
    verdict = json.dumps(([], []))
    if all_ranks.rank == 0:
        values, ties = _untied(engine.module, state, strict)
        problems, missing = _compare(engine, values, strict)
        verdict = json.dumps(([*problems, *ties], missing))
    # A simulated world delivers an empty text.
    problems, missing = json.loads(comm.gather_texts(verdict, all_ranks)[0] or verdict)
    if problems:
        raise ValueError("nothing was loaded: " + "; ".join(problems))
    for unit in engine.units:
        engine.driver.schedule.reshard(unit)
        for segment in unit.segments:
            of_members = [values.get(member.name) for member in segment.members]
            interval = segment.from_rank_0(of_members, segment.local)
            for member in segment.members:
                if member.name not in missing:
                    member.part_of(segment.local).copy_(member.part_of(interval))
    for name, tensor in uncut(engine):
        if name not in missing:
            if name in values:
                tensor.copy_(values[name])
            all_ranks.broadcast(tensor)


def optimizer_state_dict(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state by parameter names, in the format of ``get_optimizer_state_dict``.

    Its tensors are the optimizer's own, as pieces (see ``dcp.py``): ``torch.distributed.checkpoint`` saves
    them as parts of the whole and loads into them. Pass the result to ``load_state_dict`` to set options such
    as learning rates. An optimizer without state first makes a step with a learning rate of 0.

    Raises ValueError inside forward, backward or `unsharded`, and for that step between forward and backward.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    engine = engine_of(module)
    if engine.driver.awaits_backward and not optimizer.state:
        raise ValueError(
            "optimizer_state_dict() of an optimizer without state makes a step, which cannot be done between "
            "forward and backward: call it before forward, or after the first optimizer.step()"
        )
    engine.require_rest("optimizer_state_dict() cannot be called")
    engine.attached(StateDicts).describe(optimizer)
    return dict(get_optimizer_state_dict(module, optimizer))


def _untied(
    module: nn.Module, state: Mapping[str, Tensor], strict: bool
) -> tuple[dict[str, Tensor], list[str]]:
    """Return ``state`` with the value of each tied tensor under its first name, and what contradicts that.

    Of one tensor with several names torch would keep the value that it copies last.
    """
    values = dict(state)
    problems = list[str]()
    firsts = dict[Tensor, str]()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            continue
        first = firsts.setdefault(tensor, name)
        if first == name:
            continue
        value = values.pop(name, None)
        if value is None:
            problems += [f"{name} is missing (tied to {first})"] if strict and first in values else []
        elif first not in values:
            problems += [f"{first} is missing (tied to {name})"] if strict else []
            values[first] = value
        elif not _is_same(values[first], value):
            problems.append(
                f"{name} and {first} are one tied tensor here, and differ in what is to be loaded: leave one "
                "out with strict=False, or untie them before shard()"
            )
    return values, problems


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two dense tensors have the same values, NaN included. Others are refused elsewhere."""
    if value is other or not (_is_dense(value) and _is_dense(other)):
        return True
    if Spec.of(value) != Spec.of(other):
        return False
    return torch.allclose(value, other, rtol=0, atol=0, equal_nan=True)


def _is_dense(value: Any) -> bool:
    """Return whether ``value`` is a dense tensor with values, and no DTensor."""
    if getattr(value, "is_meta", True) or hasattr(value, "device_mesh"):
        return False
    return bool(value.layout == torch.strided)


def _compare(engine: Engine, state: Mapping[str, Tensor], strict: bool) -> tuple[list[str], list[str]]:
    """Return the differences between ``state`` and the module, and the names that ``state`` lacks."""
    expected = {member.name: Spec(member.local_view.dtype, member.part.shape) for member in engine.members}
    expected.update((name, Spec.of(tensor)) for name, tensor in uncut(engine))
    missing = [name for name in expected if name not in state]
    values = {n: value for n, value in state.items() if strict or n in expected}
    odd = [name for name, value in values.items() if not _is_dense(value)]
    if odd:
        return [f"{name} is no dense tensor with values" for name in odd], missing
    return differences(expected, {name: Spec.of(value) for name, value in values.items()}, strict), missing


def uncut(engine: Engine) -> list[tuple[str, Tensor]]:
    """Return the state that is not sharded, by name: ignored parameters and persistent buffers."""
    cut = {member.param for member in engine.members}
    ignored = [(plain_name(name), p.data) for name, p in engine.module.named_parameters() if p not in cut]
    return [*ignored, *persistent_buffers(engine.module)]


def differences(expected: Mapping[str, Spec], specs: Mapping[str, Spec], strict: bool = True) -> list[str]:
    """Return one line per tensor of another shape or dtype, or (``strict``) missing or unexpected."""
    missing = [f"{name} is missing" for name in expected if name not in specs]
    unexpected = [f"{name} is unexpected" for name in specs if name not in expected]
    problems = [*missing, *unexpected] if strict else []
    for name, wanted in expected.items():
        spec = specs.get(name, wanted)
        if spec.shape != wanted.shape:
            problems.append(f"{name} has shape {spec.shape}, expected {wanted.shape}")
        elif spec.dtype != wanted.dtype:
            problems.append(f"{name} is {spec.dtype}, expected {wanted.dtype}")
    return problems


def average_buffers(module: nn.Module) -> None:
    """Make buffers equal on all ranks: floating-point ones the mean over ranks, others rank 0's.

    BatchNorm's running statistics differ between ranks during training: call this before evaluation. It takes
    one all-reduce per floating-point dtype, and one broadcast per other dtype.
    """
    for buffer, value in equal_buffers(module, engine_of(module).channel.all_ranks):
        buffer.copy_(value)


def equal_buffers(module: nn.Module, all_ranks: Ranks) -> list[tuple[Tensor, Tensor]]:
    """Return every buffer with the value that `average_buffers` gives it, without changing the buffer."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in dict.fromkeys(module.buffers()):
        groups.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    pairs = []
    for (dtype, _), buffers in groups.items():
        flat = torch.cat([buffer.detach().flatten() for buffer in buffers])
        if dtype.is_floating_point and all_ranks.world > 1:
            # In fp64, since a sum of fp16 overflows, and the mean of three equal values would be rounded.
            total = flat.double()
            all_ranks.all_reduce(total)
            flat = total.div_(all_ranks.world).to(dtype)
        else:
            all_ranks.broadcast(flat)
        parts = flat.split([buffer.numel() for buffer in buffers])
        pairs += [(b, part.view(b.shape)) for b, part in zip(buffers, parts, strict=True)]
    return pairs


def persistent_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the buffers that are in the module's ``state_dict()``, by name."""
    persistent = module.state_dict(keep_vars=True)
    named = [(plain_name(name), buffer) for name, buffer in module.named_buffers()]
    return [(name, buffer) for name, buffer in named if name in persistent]

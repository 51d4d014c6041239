"""Users' changes of parameters: noticed, and adopted or refused by name.

Parameters change in ways of which no hook tells: in place, by ``.data =``, ``.to()``, ``requires_grad_()``,
or by another object in a module's attribute. So what they show is noted, and compared at four moments:

between steps     a local shard that lies elsewhere, of another dtype or device, is adopted; so is another
                  object, if all modules that held the parameter hold it
in forward        local shards may not change or move, since other ranks may compute with them
while whole       values may not change: that would be lost, or done once per rank; the parameters may move
where a forward   the frozen parameters must be the same on all ranks: their names enter the path
or backward begins

A move changes where a parameter lies, and no element: ``flatten_parameters()`` of a recurrent network moves
its weights into one buffer, ``.to(memory_format=torch.channels_last)`` into another order.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import nn

from shardtrain.engine.hooks import Engine
from shardtrain.engine.segment import Segment, ShardedParam, address_of
from shardtrain.engine.unit import Shown, Unit

_version = attrgetter("_version")


class Noted(NamedTuple):
    """Autograd's versions of a unit's parameters, and where they lie.

    Another dtype or device lies elsewhere, since the memory of what was noted is still held.
    """

    versions: list[int]
    addresses: list[int]


class Changes:
    """What the parameters of one model showed, to compare with what they show. Only this class writes it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ignored = set(engine.module.parameters()).difference(m.param for m in engine.members)
        self._below = _modules_below(engine.module)
        self._full: dict[Unit, Noted] = {}
        self._shards: dict[Unit, Noted] = {}

    @property
    def known(self) -> set[nn.Parameter]:
        """The parameters that units have, and those that are ignored."""
        return self._ignored.union(member.param for member in self._engine.members)

    # between steps

    def adopt(self) -> bool:
        """Adopt the local shards that users have replaced. Call it between steps only.

        Return whether one was converted, so that full vectors may lie on another device.

        Raises ValueError if a local shard does not fit, or if a unit takes another dtype or device while
        gradients wait; then nothing of the unit is adopted.
        """
        converted = False
        for unit in self._engine.units:
            replaced = [segment for segment in unit.segments if _was_replaced(segment)]
            if not replaced or unit.shown is not Shown.SHARD:
                continue
            for segment in replaced:
                _refuse_resized(segment)
            locals_ = [shown_local(segment) for segment in replaced]
            if any(segment.converts(local) for segment, local in zip(replaced, locals_, strict=True)):
                self._engine.require_reduced("parameters were converted")
                converted = True
            unit.wake()
            for segment, local in zip(replaced, locals_, strict=True):
                segment.adopt(local)
            unit.rest()
        return converted

    def refuse_attached(self) -> None:
        """Raise ValueError if parameters were attached, which no unit has."""
        if not any(
            len(module._parameters) != count or tuple(module._modules.values()) != children
            for module, children, count in self._below
        ):
            return
        root = self._engine.module
        known = self.known
        if new := [name for name, param in root.named_parameters() if param not in known]:
            raise ValueError(
                f"parameters attached after shard(): {', '.join(new)}; nothing would reduce their "
                "gradients. Attach them first, then shard"
            )
        self._below = _modules_below(root)

    def refuse_meta(self) -> None:
        """Raise ValueError if local shards have no values yet."""
        names = list[str]()
        for segment in self._engine.segments:
            if segment.local.is_meta:
                names += [member.name for member in segment.members]
        if names:
            raise ValueError(
                f"parameters still on the meta device: {', '.join(names)}; materialise the local shards "
                "with module.to_empty(device=...) and load or initialise their values first"
            )

    # in a step

    def note(self, unit: Unit) -> None:
        """Note the values that parameters of ``unit`` show now."""
        noted = self._full if unit.shown is Shown.FULL else self._shards
        noted[unit] = _noted(unit)

    def flattens(self, unit: Unit) -> Callable[[nn.RNNBase], None]:
        """Return what lets a recurrent network move its weights into one buffer while they are whole.

        It notes where they lie then, so that the host need not wait for an accelerator to compare values. At
        rest they are local shards, which stay where they are. cuDNN would take them for whole weights.
        """

        def flatten_parameters(module: nn.RNNBase) -> None:
            if unit.shown is Shown.SHARD:
                return
            changed = _differing(unit, self._full)
            type(module).flatten_parameters(module)
            if unit.shown is Shown.FULL:
                addresses = self._full[unit].addresses
                for index, member in enumerate(unit.members):
                    if member not in changed:
                        addresses[index] = member.param.data_ptr()

        return flatten_parameters

    def require_same_values(self, unit: Unit) -> None:
        """Raise ValueError if a full parameter was changed: ranks would disagree, or the change be lost.

        If one lies elsewhere its values are compared, for which the host waits for an accelerator.
        """
        if unit.shown is not Shown.FULL:
            return
        differing = _differing(unit, self._full)
        if changed := [m.name for m in differing if not _has_moved(m.param, m.full_view)]:
            raise ValueError(
                f"{', '.join(changed)} changed while {unit.title} was whole, which would be lost or done "
                "once per rank; change parameters between steps, inside shardtrain.unsharded(model). After a "
                "forward with gradients, the root is whole until its backward: evaluate under torch.no_grad()"
            )
        if differing:
            self.note(unit)

    def require_same_shards(self, unit: Unit) -> None:
        """Raise ValueError if local shards were changed since forward began: other ranks may read them.

        Or moved: an equal value on one rank may be a change on another, and all ranks must refuse alike.
        """
        if unit.shown is not Shown.SHARD:
            return
        if changed := [member.name for member in _differing(unit, self._shards)]:
            raise ValueError(
                f"forward changed {', '.join(changed)} of {unit.title}, with which other ranks may compute "
                "now; change or move parameters between steps (a momentum encoder after optimizer.step())"
            )


def frozen(members: Iterable[ShardedParam]) -> list[str]:
    """Return the names of the parameters that require no gradient now."""
    return [member.name for member in members if not member.param.requires_grad]


def trained_in_words(names: Sequence[str]) -> str:
    """Return what ranks compare of what they train: all parameters, or all but the frozen ``names``."""
    if not names:
        return "all parameters"
    if len(names) == 1:
        return f"all but {names[0]}"
    return f"all but {names[0]} and {len(names) - 1} more ({zlib.crc32(' '.join(names).encode()):08x})"


def _was_replaced(segment: Segment) -> bool:
    """Return whether a user's ``.to()``, ``to_empty()`` or ``.data =`` gave a parameter other storage.

    The old storage is still held, so a new one has another address. A module may also hold another object.
    """
    for member in segment.members:
        param = member.param
        for module, attribute in member.info.holders:
            if module._parameters.get(attribute) is not param:
                return True
        if address_of(param) != member.address:
            return True
    return False


def _refuse_resized(segment: Segment) -> None:
    """Raise ValueError if a user has resized the memory of local shards, whose values are lost.

    What `share_memory_` moves keeps its storage, too, and its values.
    """
    for member in segment.members:
        param = member.param
        same = param.untyped_storage()._cdata == member.local_view.untyped_storage()._cdata
        if same and address_of(param) != member.address and not param.is_shared():
            raise ValueError(
                f"the memory of parameter {member.name} was resized by untyped_storage().resize_(), and its "
                "values are lost: a rank's shards of several parameters share one storage; free memory by "
                "deleting the model, or shard it over more ranks"
            )


def shown_local(segment: Segment) -> torch.Tensor:
    """Return the local shards that the parameters show now, laid out like ``segment.local``.

    Members take over parameters that a user has put in the place of theirs. Raises ValueError if one is not
    of its part's size, or if dtypes or devices differ.
    """
    for member in segment.members:
        member.hold(member.info.parameter)
    first = segment.members[0]
    local = first.param.new_zeros(segment.layout.length(segment.channel.rank))
    for member in segment.members:
        _check_like(member, first)
        member.part_of(local).copy_(member.param.data)
    return local


def _check_like(member: ShardedParam, first: ShardedParam) -> None:
    """Raise ValueError unless the value is a piece of the right size, dtype and device (``first``'s)."""
    param = member.param
    expected = first.param
    if not param.is_leaf:
        raise ValueError(
            f"parameter {member.name} was replaced by the result of a computation, through which "
            "gradients cannot flow here; do that (torch.func.functional_call) with an unsharded model"
        )
    if param.shape != member.part.local_shape:
        raise ValueError(
            f"parameter {member.name} now has shape {tuple(param.shape)} on this rank, but its local shard "
            f"has {member.part.local_shape}; change whole parameters inside shardtrain.unsharded(model)"
        )
    if (param.dtype, param.device) != (expected.dtype, expected.device):
        raise ValueError(
            f"parameter {member.name} is now {param.dtype} on {param.device}, while {first.name} of the "
            f"same unit is {expected.dtype} on {expected.device}; convert the whole model, or convert it "
            "before shard()"
        )


def _modules_below(root: nn.Module) -> list[tuple[nn.Module, tuple[nn.Module | None, ...], int]]:
    """Return all modules with their children and numbers of parameters, to notice what is attached."""
    return [(module, tuple(module._modules.values()), len(module._parameters)) for module in root.modules()]


def _noted(unit: Unit) -> Noted:
    params = [member.param for member in unit.members]
    return Noted([*map(_version, params)], [*map(torch.Tensor.data_ptr, params)])


def _differing(unit: Unit, noted: dict[Unit, Noted]) -> list[ShardedParam]:
    """Return the parameters of ``unit`` that show other memory, or other values, than ``noted`` has."""
    shows = _noted(unit)
    showed = noted.get(unit, shows)
    if shows == showed:
        return []
    pairs = zip(zip(*shows, strict=True), zip(*showed, strict=True), strict=True)
    return [member for member, (now, then) in zip(unit.members, pairs, strict=True) if now != then]


def _has_moved(param: nn.Parameter, held: torch.Tensor) -> bool:
    """Return whether ``param`` shows, elsewhere, the values of ``held``, which its unit set it to."""
    shown = param.data
    if shown.data_ptr() == held.data_ptr():  # changed in place
        return False
    alike = (shown.shape, shown.dtype, shown.device) == (held.shape, held.dtype, held.device)
    return alike and torch.allclose(shown, held, rtol=0, atol=0, equal_nan=True)

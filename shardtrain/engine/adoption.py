"""Adopt what users change between steps: ``.to()``, ``.data =``, ``to_empty()``, attached modules.

Its own file, since no step needs it: `Engine` calls it before a forward and before other uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from shardtrain.engine.shard import Segment, ShardedParam, address_of
from shardtrain.engine.unit import Shown, Unit

Below = list[tuple[nn.Module, tuple[nn.Module | None, ...], int]]


class Adoption:
    """Adopt changes of the parameters of ``root``, or refuse them by name. Written here only."""

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[Unit],
        segments: Sequence[Segment],
        members: Sequence[ShardedParam],
    ) -> None:
        self._root = root
        self._units = units
        self._segments = segments
        self._members = members
        self._ignored = set(root.parameters()).difference(member.param for member in self._members)
        self._below = _modules_below(root)

    def adopt(self, require_reduced: Callable[[str], None]) -> bool:
        """Adopt the local shards that users have replaced. Call it between steps only.

        Return whether one was converted, so that full vectors may lie on another device.

        Raises ValueError if a local shard does not fit, or, by ``require_reduced``, if a unit takes another
        dtype or device while gradients wait; then nothing of the unit is adopted.
        """
        converted = False
        for unit in self._units:
            replaced = [segment for segment in unit.segments if any(map(was_replaced, segment.members))]
            if not replaced or unit.shown is not Shown.SHARD:
                continue
            locals_ = [shown_local(segment) for segment in replaced]
            if any(segment.converts(local) for segment, local in zip(replaced, locals_, strict=True)):
                require_reduced("parameters were converted")
                converted = True
            for segment, local in zip(replaced, locals_, strict=True):
                segment.adopt(local)
        return converted

    def refuse_attached(self) -> None:
        """Raise ValueError if parameters were attached, which no unit has."""
        if not any(
            len(module._parameters) != count or tuple(module._modules.values()) != children
            for module, children, count in self._below
        ):
            return
        known = self._ignored.union(member.param for member in self._members)
        if new := [name for name, param in self._root.named_parameters() if param not in known]:
            raise ValueError(
                f"parameters attached after shard(): {', '.join(new)}; nothing would reduce their "
                "gradients. Attach them first, then shard"
            )
        self._below = _modules_below(self._root)

    def refuse_meta(self) -> None:
        """Raise ValueError if local shards have no values yet."""
        names = list[str]()
        for segment in self._segments:
            if segment.local.is_meta:
                names += [member.name for member in segment.members]
        if names:
            raise ValueError(
                f"parameters still on the meta device: {', '.join(names)}; materialise the local pieces "
                "with module.to_empty(device=...) and load or initialise their values first"
            )


def was_replaced(member: ShardedParam) -> bool:
    """Return whether a user's ``.to()``, ``to_empty()`` or ``.data =`` gave the parameter other storage.

    The old storage is still held, so a new one has another address.
    """
    module, attribute = member.info.holders[0]
    param = member.param
    return module._parameters.get(attribute) is not param or address_of(param) != member.address


def shown_local(segment: Segment) -> torch.Tensor:
    """Return the local shards that the parameters show now, laid out like ``segment.local``.

    Members take over parameters that a user has put in the place of theirs. Raises ValueError if one is not
    of its part's size, or if dtypes or devices differ.
    """
    for member in segment.members:
        member.param = member.info.parameter
    first = segment.members[0]
    local = first.param.new_zeros(segment.layout.length(segment.transport.rank))
    for member in segment.members:
        _check_like(member, first)
        member.part.shown(member.piece_of(local)).copy_(member.param.data)
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
            f"parameter {member.name} now has shape {tuple(param.shape)} on this rank, but its local piece "
            f"has {member.part.local_shape}; change whole parameters inside shardtrain.unsharded(model)"
        )
    if (param.dtype, param.device) != (expected.dtype, expected.device):
        raise ValueError(
            f"parameter {member.name} is now {param.dtype} on {param.device}, while {first.name} of the "
            f"same unit is {expected.dtype} on {expected.device}; convert the whole model, or convert it "
            "before shard()"
        )


def _modules_below(root: nn.Module) -> Below:
    """Return all modules with their children and numbers of parameters, to notice what is attached."""
    below = []
    for module in root.modules():
        below.append((module, tuple(module._modules.values()), len(module._parameters)))
    return below

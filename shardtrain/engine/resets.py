"""Have ``reset_parameters`` see whole parameters, since it computes fan-ins from their shapes.

Each rank keeps its part of what it draws: with one seed on all ranks, that of the whole model. Its own file,
since nothing here is needed for a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from shardtrain.engine.module_class import Addition
from shardtrain.engine.unit import Shown, Unit

HOME = "_shardtrain_home"  # the attribute of a module with its `Home`


class Home(NamedTuple):
    """Name a module's innermost unit. ``release`` adopts users' changes, and releases the unit."""

    unit: Unit
    release: Callable[[Unit], None]


class Resets(Addition):
    def reset_parameters(self, *args: Any, **kwargs: Any) -> None:
        _reset_whole(self, super().reset_parameters, *args, **kwargs)  # type: ignore[misc]


class ResetsOfAttention(Addition):
    """Do so for torch's attention, whose method has a private name."""

    def _reset_parameters(self, *args: Any, **kwargs: Any) -> None:
        _reset_whole(self, super()._reset_parameters, *args, **kwargs)  # type: ignore[misc]


def additions(module: nn.Module) -> list[type[Addition]]:
    """Return what to add to the class of ``module``."""
    methods = {"reset_parameters": Resets, "_reset_parameters": ResetsOfAttention}
    return [addition for name, addition in methods.items() if callable(getattr(type(module), name, None))]


def _reset_whole(module: nn.Module, reset: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Call ``reset`` while the parameters of ``module``, and of the modules in it, are whole."""
    home: Home = module.__dict__[HOME]
    unit = home.unit
    below = set(module.modules())
    members = []
    for member in unit.members:
        if any(holder in below for holder, _ in member.info.holders):
            members.append(member)
    if unit.shown is not Shown.SHARD or any(m.info.parameter.is_meta for m in members):
        reset(*args, **kwargs)
        return
    home.release(unit)
    unit.show_private({member: member.part.padded(member.local_view) for member in members})
    try:
        reset(*args, **kwargs)
        for member in members:
            member.local_view.copy_(member.piece_of_whole(member.param.data))
    finally:
        unit.hide()

"""Show whole parameters to users' code that initializes them after `shard`.

``model.apply(init)`` calls ``init`` for each module, and methods such as ``init_weights`` set many.
They compute fan-ins from shapes. Ranks with one seed would draw the same numbers for different elements. So
they see whole parameters and draw all of them, and each rank keeps its part: with one seed on all ranks that
of the model which one process draws. Nothing is communicated: elements of other ranks are NaN, which shows
what depends on them. This is a file of its own since ``hooks.py`` attaches what it decides.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardtrain.engine.shard import ShardedParam
from shardtrain.engine.unit import Shown, Unit

_METHODS = ("init_weights", "initialize_weights", "init_parameters", "initialize_parameters", "init_params")
_INSIDE = "inside shardtrain.unsharded(model), with one seed on all ranks"


def methods(engine: Any, module: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield what to call in the place of ``module``'s methods that initialize, by their names."""

    def apply(called: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
        for each in _children_first(called):
            with _whole(engine, each, below=False):
                fn(each)
        return called

    yield "apply", apply
    for name in _METHODS:
        own = inspect.getattr_static(type(module), name, None)
        if callable(own) and not isinstance(own, staticmethod | classmethod):
            yield name, _with_all(engine, own)


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def _with_all(engine: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(called: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _whole(engine, called, below=True):
            return method(called, *args, **kwargs)

    return call


@contextmanager
def _whole(engine: Any, module: nn.Module, below: bool) -> Iterator[None]:
    """Show whole parameters in ``module``: of one unit, its own, or (``below``) of all units in it.

    Inside a step, `unsharded` or another call nothing changes. Raises ValueError if parameters of other units
    are changed, or if values depend on other ranks' elements.
    """
    if not engine.driver.is_idle or engine.initializing:
        yield
        return
    engine.adopt_changes()
    table = dict[nn.Parameter, tuple[Unit, ShardedParam]]()
    for unit in engine.units:
        table.update({member.param: (unit, member) for member in unit.members})
    inside = [table[param] for param in module.parameters() if param in table]
    units = {unit for unit, _ in inside}
    if len(units) > 1 and not below:
        units = {table[param][0] for param in module.parameters(recurse=False) if param in table}
    shown = [member for unit, member in inside if unit in units]
    others = [member for unit, member in inside if unit not in units]
    before = [member.param._version for member in others]
    with _shown(engine, units, shown):
        yield
    changed = [m.name for m, version in zip(others, before, strict=True) if m.param._version != version]
    if changed:
        raise ValueError(
            f"{', '.join(changed)} were changed by what {type(module).__name__} was applied to, and showed "
            f"this rank's pieces: initialize each module by itself, or {_INSIDE}"
        )


@contextmanager
def _shown(engine: Any, units: Iterable[Unit], members: Iterable[ShardedParam]) -> Iterator[None]:
    """Show whole values of ``members``, which are of ``units``, and keep this rank's parts of them."""
    for unit in units:
        if unit.shown is not Shown.SHARD:
            engine.driver.show_shards()
        engine.driver.schedule.release(unit)
        unit.show_private({m: _with_unknown(m) for m in members if m in unit.members})
    engine.initializing = True
    try:
        yield
        for member in members:
            _keep(member)
    finally:
        engine.initializing = False
        for unit in units:
            unit.hide()


def _has_nan(tensor: torch.Tensor) -> bool:
    wide = (tensor.is_floating_point() or tensor.is_complex()) and tensor.itemsize > 1
    return wide and bool(tensor.isnan().any())


def _with_unknown(member: ShardedParam) -> torch.Tensor:
    """Return a whole tensor that holds this rank's part, and NaN elsewhere, or zeros if it is of integers."""
    whole = member.part.padded(member.local_view)
    if whole.is_floating_point() or whole.is_complex():
        whole.fill_(math.nan)
        member.part.of(whole).copy_(member.part.flattened(member.local_view))
    return whole


def _keep(member: ShardedParam) -> None:
    """Keep this rank's part of the whole value that ``member`` shows. Raises ValueError for new NaNs."""
    piece = member.piece_of_whole(member.param.data)
    if _has_nan(piece) and not _has_nan(member.local_view):
        raise ValueError(
            f"{member.name} was given NaN, perhaps computed from elements that other ranks hold: initialize "
            f"it {_INSIDE}"
        )
    member.local_view.copy_(piece)

"""Whole parameters for users' code that initializes them after `shard`.

``model.apply(init)`` calls ``init`` for each module, and methods such as ``reset_parameters`` and
``init_weights`` set many. They compute fan-ins from shapes. Ranks with one seed would draw the same numbers
for different elements. So they see whole parameters and draw all of them, and each rank keeps its part: with
one seed on all ranks that of the model which one process draws. Nothing is communicated: elements of other
ranks are NaN, which shows what depends on them.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardtrain.engine.hooks import Engine
from shardtrain.engine.module_class import own_class
from shardtrain.engine.segment import ShardedParam
from shardtrain.engine.unit import Unit

# Those of torch's layers, the private one of its attention included, and names that models use.
_METHODS = (
    "reset_parameters",
    "_reset_parameters",
    "init_weights",
    "initialize_weights",
    "init_parameters",
    "initialize_parameters",
    "init_params",
)


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


class Initialization:
    """Whole parameters of one model while users initialize them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._driver = engine.driver
        self._params = {member.param for member in engine.members}
        self._is_under_way = False

    def methods(self, module: nn.Module) -> dict[str, Callable[..., Any]]:
        """Return the methods by which users initialize parameters in ``module``, each on whole ones."""
        if self._params.isdisjoint(module.parameters()):
            return {}
        methods: dict[str, Callable[..., Any]] = {}
        if type(module).apply is nn.Module.apply:  # another one is the user's, for something else
            methods["apply"] = self._apply
        for name in _METHODS:
            method = inspect.getattr_static(type(module), name, None)
            if callable(method) and not isinstance(method, staticmethod | classmethod):
                methods[name] = self._around(method)
        return methods

    def _apply(self, module: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
        """Call ``fn`` on each module while that shows whole parameters.

        Meanwhile it has the class that its user knows: functions ask ``type(module) == nn.Linear``.
        """
        for submodule in _children_first(module):
            with self.whole(submodule, below=False), own_class(submodule):
                fn(submodule)
        return module

    def _around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``method`` of a module so that it sees whole parameters."""

        @functools.wraps(method)
        def on_whole(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with self.whole(module, below=True):
                return method(module, *args, **kwargs)

        return on_whole

    @contextmanager
    def whole(self, module: nn.Module, below: bool) -> Iterator[None]:
        """Show whole parameters in ``module``: of one unit, its own, or (``below``) of all units in it.

        Inside a step, `unsharded` or another call nothing changes. Raises ValueError if values depend on
        other ranks' elements.
        """
        if not self._driver.is_idle or self._is_under_way:
            yield
            return
        self._engine.adopt_changes()
        table = dict[nn.Parameter, tuple[Unit, ShardedParam]]()
        for unit in self._engine.units:
            table.update({member.param: (unit, member) for member in unit.members})
        inside = [table[param] for param in module.parameters() if param in table]
        units = {unit for unit, _ in inside}
        if len(units) > 1 and not below:
            units = {table[param][0] for param in module.parameters(recurse=False) if param in table}
        shown = [member for unit, member in inside if unit in units]
        with self._shown(units, shown):
            yield

    @contextmanager
    def _shown(self, units: Iterable[Unit], members: Sequence[ShardedParam]) -> Iterator[None]:
        """Show whole values of ``members``, which are of ``units``, and keep this rank's parts of them."""
        self._is_under_way = True
        try:
            self._driver.show_shards()
            for unit in units:
                self._driver.schedule.reshard(unit)
                unit.show_private({m: _with_unknown(m) for m in members if m in unit.members})
            yield
            for member in members:
                _keep(member)
        finally:
            self._is_under_way = False
            for unit in units:
                unit.hide()


def _has_nan(tensor: torch.Tensor) -> bool:
    wide = (tensor.is_floating_point() or tensor.is_complex()) and tensor.itemsize > 1
    return wide and bool(tensor.isnan().any())


def _with_unknown(member: ShardedParam) -> torch.Tensor:
    """Return a whole tensor that holds this rank's part, and NaN elsewhere, or zeros if it is of integers."""
    local = member.local_view
    has_nan = local.is_floating_point() or local.is_complex()
    return member.part.padded(local, math.nan if has_nan else 0)


def _keep(member: ShardedParam) -> None:
    """Keep this rank's part of the whole value that ``member`` shows. Raises ValueError for new NaNs."""
    part = member.part_of_whole(member.param.data)
    if _has_nan(part) and not _has_nan(member.local_view):
        raise ValueError(
            f"{member.name} was given NaN, perhaps computed from elements that other ranks hold: initialize "
            "it inside shardtrain.unsharded(model), with one seed on all ranks"
        )
    member.local_view.copy_(part)

"""Hooks that cast inputs and outputs of units and of normalisation layers, as `Precision` says.

Inside `unsharded` a unit computes in its own dtype.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardtrain.engine.precision import cast
from shardtrain.engine.unit import Shown, Unit


def attach(units: Iterable[Unit]) -> list[RemovableHandle]:
    """Register the hooks of ``units``, as their `Precision` says."""
    handles = []
    for unit in units:
        precision = unit.options.precision
        compute = precision.param
        if precision.cast_inputs and compute is not None:
            handles += [_cast_inputs(unit, module, compute) for module in unit.modules.values()]
        if compute is not None:
            for module, segment in unit.holders.items():
                if precision.wants_wide_inputs(module):
                    handles.append(_cast_inputs(unit, module, segment.local.dtype))
                    handles.append(_cast_output(unit, module, compute))
        if precision.output is not None:
            handles += [_cast_output(unit, module, precision.output) for module in unit.modules.values()]
    return handles


def _cast_inputs(unit: Unit, module: nn.Module, dtype: torch.dtype) -> RemovableHandle:
    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return (args, kwargs) if unit.shown is Shown.PRIVATE else cast((args, kwargs), dtype)

    return module.register_forward_pre_hook(before, with_kwargs=True)


def _cast_output(unit: Unit, module: nn.Module, dtype: torch.dtype) -> RemovableHandle:
    def after(_: nn.Module, args: Any, output: Any) -> Any:
        return output if unit.shown is Shown.PRIVATE else cast(output, dtype)

    return module.register_forward_hook(after)

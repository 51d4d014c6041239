"""In which dtypes a sharded model computes and reduces. Shards and optimizer state stay as they were.

With ``Precision(param=torch.bfloat16)``, fp32 shards, two ranks::

    before forward   each rank casts its shard to bf16, once; this copy serves both gathers
    gather           bf16 moves: half the bytes
    compute          in bf16; inputs of every unit are cast; normalisation layers stay in fp32
    reduce           bf16 gradients move, their sum is taken in fp32
    update           fp32 shard, fp32 gradient
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

NORMS: tuple[type[nn.Module], ...] = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True)
class Precision:
    """Dtypes for `shard`. ``None`` leaves a thing as it is.

    ``param``: parameters while a unit computes, and on the wire. ``reduce``: gradients on the wire
    (default: the dtype they are computed in); sums are taken in fp32 or wider, on NCCL by NCCL.
    ``output``: floating-point outputs of the root. ``cast_inputs``: cast floating-point inputs of every
    unit to ``param``. ``keep``: modules whose own parameters stay in their dtype, and which are given
    inputs of that dtype; normalisation layers unless said otherwise. BatchNorm takes ``param`` inputs as
    they are: its kernels compute in fp32 then.

    Raises:
        ValueError: a dtype that is not floating-point.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    cast_inputs: bool = True
    keep: tuple[type[nn.Module], ...] = NORMS

    def __post_init__(self) -> None:
        for name in ("param", "reduce", "output"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"precision.{name} must be a floating-point dtype or None, got {dtype!r}")

    def of_parameter(self, param: torch.Tensor, owner: nn.Module) -> torch.dtype:
        """The dtype in which ``param``, held by ``owner``, computes."""
        kept = isinstance(owner, self.keep) or not param.dtype.is_floating_point
        return param.dtype if kept or self.param is None else self.param

    def of_gradient(self, compute: torch.dtype) -> torch.dtype:
        """The dtype in which gradients computed in ``compute`` move between ranks."""
        return compute if self.reduce is None or not compute.is_floating_point else self.reduce

    def wants_wide_inputs(self, module: nn.Module) -> bool:
        """Whether ``module``'s inputs are to be cast to its parameters' dtype, and its outputs back."""
        return isinstance(module, self.keep) and not isinstance(module, _NormBase)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with every floating-point tensor inside nested containers as ``dtype``."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        found = {key: cast(item, dtype) for key, item in value.items()}
        return found if type(value) is dict else type(value)(found)  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        items = [cast(item, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: cast(getattr(value, name), dtype) for name in fields})
    return value

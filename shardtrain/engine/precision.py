"""The dtypes in which a sharded model computes and reduces. Shards and optimizer state keep theirs.

With ``Precision(param=torch.bfloat16)``, fp32 shards, two ranks::

    before forward   each rank casts its shard to bf16 once; the copy serves both gathers
    gather           bf16 moves: half the bytes
    compute          in bf16; inputs of every unit are cast; parameters of norms stay in fp32
    reduce           bf16 gradients move and are summed in fp32
    update           fp32 shard, fp32 gradient

``reduce=torch.bfloat16`` alone computes in fp32 and halves the bytes of gradients.

`leaves` and `tensors_in` find what is nested in inputs and outputs of modules, for casts and for hooks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardtrain import torch_private
from shardtrain.engine.user_code import is_plain, tracked

NORMS: tuple[type[nn.Module], ...] = (torch_private.NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True)
class Precision:
    """The dtypes for `shard`, as FSDP2's ``MixedPrecisionPolicy`` has them. ``None`` changes nothing.

    ``param``: dtype of parameters while a unit computes and while they are gathered. ``reduce``: dtype of
    gradients while they are reduced (default: the dtype they are computed in). Ranks' are summed in fp32 or
    wider, over NCCL by NCCL. ``output``: dtype of floating-point outputs, the root's or a unit's own.
    ``cast_inputs``: cast floating-point inputs of every unit to ``param``. ``keep``: classes of modules whose
    own parameters keep their dtype and whose inputs are cast to it. BatchNorm takes inputs in ``param``: its
    kernels use fp32.

    Raises ValueError for a dtype that is not floating-point.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    cast_inputs: bool = True
    keep: tuple[type[nn.Module], ...] = NORMS

    def __post_init__(self) -> None:
        for name in ("param", "reduce", "output"):
            dtype = getattr(self, name)
            floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
            if not (dtype is None or floating):
                raise ValueError(f"precision.{name} must be a floating-point dtype or None, got {dtype!r}")

    def of_parameter(self, param: torch.Tensor, holder: nn.Module) -> torch.dtype:
        """Return the dtype of ``param``, held by ``holder``, while its unit computes."""
        if self.param is None or isinstance(holder, self.keep) or not param.is_floating_point():
            return param.dtype
        return self.param

    def of_gradient(self, compute: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients computed in ``compute`` are kept and sent."""
        if self.reduce is None or not compute.is_floating_point:
            return compute
        return self.reduce

    def wants_wide_inputs(self, module: nn.Module) -> bool:
        """Return whether ``module``'s inputs are cast to its parameters' dtype, and its outputs back."""
        return isinstance(module, self.keep) and not isinstance(module, torch_private.NormBase)


def leaves(value: Any) -> list[Any]:
    """Return the leaves of nested arguments or outputs of a module: pytrees, mappings, dataclasses.

    Of a tensor inside vmap, or a dual number, return what autograd tracks: its plain value and tangent.
    """
    if isinstance(value, torch.Tensor) and is_plain():  # most modules return one tensor
        return [value]
    if type(value) is tuple and all(map(_is_flat, value)) and is_plain():  # attention, and weights or None
        return [*value]
    return [*_each_leaf(value)]


def _is_flat(value: Any) -> bool:
    return value is None or isinstance(value, torch.Tensor)


def _each_leaf(value: Any) -> Iterator[Any]:
    for leaf in torch_private.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield from tracked(leaf)
        elif isinstance(leaf, Mapping):
            yield from _each_leaf(list(leaf.values()))
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _each_leaf([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        else:
            yield leaf


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with every floating-point tensor that `leaves` yields cast to ``dtype``.

    A container without anything to cast is returned itself: a unit may append to a list that it was given.
    """
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) is tuple:  # the fast path: positional arguments, mostly one tensor
        return tuple([cast(item, dtype) for item in value])
    if all(tensor.dtype == dtype or not tensor.is_floating_point() for tensor in tensors_in(value)):
        return value

    def of(item: Any) -> Any:
        if item is not value:
            return cast(item, dtype)
        if isinstance(item, Mapping):
            return type(item)({key: cast(inner, dtype) for key, inner in item.items()})  # type: ignore[call-arg]
        fields = [field.name for field in dataclasses.fields(item) if field.init]
        return dataclasses.replace(item, **{name: cast(getattr(item, name), dtype) for name in fields})

    return torch_private.tree_map(of, value, is_leaf=lambda item: item is not value)

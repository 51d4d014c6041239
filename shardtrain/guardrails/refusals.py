"""Refusals of what is wrong with a rank's shards: copies, pickles, other wrappers, ties by ``.data``."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch
from torch import nn

from shardtrain.engine.module_class import Addition

_WRAPPERS = (
    "torch.nn.parallel.",
    "torch.distributed.fsdp.",
    "torch.distributed._composable.",
    "torch.distributed.tensor.",
)
_CHECKPOINTING = "torch.distributed.algorithms._checkpoint."


class Uncopied(Addition):
    """A module that holds shards: it refuses copies and pickles, so do models that contain it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise ValueError(
            "a sharded model, or one that contains it, cannot be copied: each rank has pieces only; copy "
            "before shard(), and shard the copy, too, or load full_state_dict(model) into a new model"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ValueError(
            "a sharded model cannot be pickled, by torch.save or otherwise: each rank has pieces only; save "
            "shardtrain.full_state_dict(model)"
        )


# Of modules that keep their class.
UNCOPIED = {name: getattr(Uncopied, name) for name in ("__deepcopy__", "__reduce_ex__")}


class Refusals(Uncopied):
    """A module whose calls gather a unit: it also refuses to be inside of torch's data parallel wrappers."""

    def named_modules(self, *args: Any, **options: Any) -> Any:
        """Yield modules. Raises ValueError if torch's data parallel wrappers ask for them.

        They ask through any model that contains the module, before they broadcast or replace its parameters.
        """
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__", "") == nn.Module.__module__ and frame.f_back:
            frame = frame.f_back
        caller = frame.f_back
        if caller and caller.f_globals.get("__name__", "").startswith(_CHECKPOINTING):
            raise ValueError(
                "apply_activation_checkpointing() of a sharded model replaces its units: call it before "
                "shard() or fully_shard()"
            )
        if frame.f_globals.get("__name__", "").startswith(_WRAPPERS):
            raise ValueError(
                "a sharded model reduces its gradients itself: do not wrap it, or a model that contains it, "
                "in DistributedDataParallel, FSDP or DTensors, and keep accelerate, Trainer or Fabric from "
                "doing so"
            )
        return super().named_modules(*args, **options)


def require_apart(module: nn.Module, left_alone: set[nn.Parameter]) -> None:
    """Raise ValueError if a parameter that is to be sharded lies where another one does, or a buffer.

    Each gets memory of its own, so what was tied by `.data` would no longer be.
    """
    cut = set(module.parameters()).difference(left_alone)
    first: dict[tuple[torch.device, int], tuple[str, torch.Tensor]] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        data = tensor.data
        if type(data) is torch.Tensor and data.layout is torch.strided and data.numel() and not data.is_meta:
            other_name, other = first.setdefault((data.device, data.data_ptr()), (name, tensor))
            if other is not tensor and not cut.isdisjoint((tensor, other)):
                raise ValueError(
                    f"{other_name} and {name} share memory, and sharding would give each its own: tie them "
                    "as one object (b.weight = a.weight, not b.weight.data = a.weight.data), or clone one"
                )

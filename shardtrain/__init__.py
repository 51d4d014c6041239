"""Fully sharded data parallel training on PyTorch. docs/engine.md says in which order to read the files."""

from shardtrain import checkpoint, comm
from shardtrain.engine.api import forward_method, no_sync, shard
from shardtrain.engine.deferred_init import deferred
from shardtrain.engine.introspect import Introspection, UnitInfo, introspect
from shardtrain.engine.precision import Precision
from shardtrain.engine.recompute import checkpoint_activations, compile_units
from shardtrain.engine.state_dict import (
    average_buffers,
    full_state_dict,
    load_full_state_dict,
    optimizer_state_dict,
    unsharded,
)
from shardtrain.optim import GradScaler, clip_grad_norm_

__all__ = [
    "GradScaler",
    "Introspection",
    "Precision",
    "UnitInfo",
    "average_buffers",
    "checkpoint",
    "checkpoint_activations",
    "clip_grad_norm_",
    "comm",
    "compile_units",
    "deferred",
    "forward_method",
    "full_state_dict",
    "introspect",
    "load_full_state_dict",
    "no_sync",
    "optimizer_state_dict",
    "shard",
    "unsharded",
]

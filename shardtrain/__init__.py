"""Fully sharded data parallel training on PyTorch.

The engine reads in the order of the data path: ``layout`` (which element belongs to whom), ``comm`` (how
bytes move), ``shard`` (what a rank owns), ``gather`` and ``reduce`` (the two movements), ``schedule``
(when), ``wrap`` (the hooks), ``forwards`` (what runs inside them), ``state`` (whole parameters for users),
``checkpoint`` (runs that outlive their processes).
"""

from shardtrain import checkpoint, comm
from shardtrain.forwards import checkpoint_activations, compile_units
from shardtrain.optim import GradScaler, clip_grad_norm_
from shardtrain.precision import Precision
from shardtrain.state import (
    average_buffers,
    full_state_dict,
    load_full_state_dict,
    no_sync,
    unsharded,
)
from shardtrain.tape import deferred
from shardtrain.wrap import UnitInfo, describe, held_by_rank, shard

__all__ = [
    "GradScaler",
    "Precision",
    "UnitInfo",
    "average_buffers",
    "checkpoint",
    "checkpoint_activations",
    "clip_grad_norm_",
    "comm",
    "compile_units",
    "deferred",
    "describe",
    "full_state_dict",
    "held_by_rank",
    "load_full_state_dict",
    "no_sync",
    "shard",
    "unsharded",
]

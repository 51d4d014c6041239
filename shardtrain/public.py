"""Define the names of ``import shardtrain``. Its own file: `__init__` loads it at the first use of one."""

from shardtrain import checkpoint, comm
from shardtrain.checkpoint.weights import load_weights
from shardtrain.engine.api import forward_method, no_sync, shard, virtual_rank
from shardtrain.engine.deferred_init import deferred
from shardtrain.engine.introspection import Introspection, UnitInfo, introspect
from shardtrain.engine.precision import Precision
from shardtrain.engine.recompute import checkpoint_activations, compile_units
from shardtrain.engine.replay import ReplayMismatch, recording, replay
from shardtrain.engine.state_dict import (
    average_buffers,
    full_state_dict,
    full_weights,
    load_full_state_dict,
    optimizer_state_dict,
    unsharded,
)
from shardtrain.engine.unit import UnitOptions
from shardtrain.optim import GradScaler, clip_grad_norm_, mean_over_samples

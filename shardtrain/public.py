"""Define the names of ``import shardtrain``.

It has its own file, since `__init__` loads it at the first use of a name, and torch with it.
"""

from shardtrain import checkpoint, comm
from shardtrain.engine.api import forward_method, no_sync, shard
from shardtrain.engine.capture import capture
from shardtrain.engine.deferred_init import deferred
from shardtrain.engine.introspection import Introspection, UnitInfo, introspect
from shardtrain.engine.precision import Precision
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
from shardtrain.engine.units import blocks
from shardtrain.engine.virtual import virtual_rank
from shardtrain.errors import ShardtrainError
from shardtrain.optim import GradScaler, clip_grad_norm_, trusted

_REMOVED = {
    "compile_units": "call, before shard(): for block in shardtrain.blocks(model).values(): block.compile()",
    "checkpoint_activations": "call, before shard(), torch's apply_activation_checkpointing or "
    "checkpoint_wrapper (torch.distributed.algorithms._checkpoint.checkpoint_wrapper)",
    "mean_over_samples": "multiply the loss by (this rank's samples * ranks / samples of all ranks) "
    "(docs/example/mean_over_samples.py)",
    "load_weights": "use torch.distributed.checkpoint.load(model.state_dict(), "
    "storage_reader=HuggingFaceStorageReader(directory)), which reads .safetensors",
}


def __getattr__(name: str) -> object:
    if name in _REMOVED:  # not AttributeError, whose text `from shardtrain import ...` does not show
        raise ValueError(f"shardtrain.{name} was removed; {_REMOVED[name]}")
    raise AttributeError(f"module 'shardtrain' has no attribute {name!r}")

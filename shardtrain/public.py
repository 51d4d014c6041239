"""The names of ``import shardtrain``, which loads this file at the first use of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardtrain import checkpoint, comm
from shardtrain.bits.replay import ReplayMismatch, recording, replay
from shardtrain.bits.virtual import virtual_rank
from shardtrain.engine.precision import Precision
from shardtrain.engine.unit import UnitOptions
from shardtrain.engine.units import blocks
from shardtrain.errors import ShardtrainError
from shardtrain.graphs.capture import capture
from shardtrain.optim import GradScaler, clip_grad_norm_, trusted
from shardtrain.sharding import forward_method, no_sync, shard
from shardtrain.whole.deferred import deferred
from shardtrain.whole.introspection import Introspection, UnitInfo, introspect
from shardtrain.whole.state_dict import (
    average_buffers,
    full_state_dict,
    full_weights,
    load_full_state_dict,
    optimizer_state_dict,
    unsharded,
)

if TYPE_CHECKING:  # what is imported here alone is no public name
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from PIL import Image
    from torch import Tensor, nn


def load_exported(
    file: str | Path, allow: Sequence[str] = ()
) -> tuple[nn.Module, Callable[[Image.Image], Tensor], tuple[str, ...]]:
    """Return the model in ``file``, which `shardtrain.export` wrote, ``prepare`` for images, and the classes.

    ``classes[int(model(prepare(image)).argmax())]`` is the name of an image's class. The model is on the CPU,
    in evaluation mode; ``prepare`` turns an image of Pillow into a batch of one. No code in the files runs.

    Args:
        file: the weights. ``FILE.json`` beside it says the rest.
        allow: packages whose model may be built, besides those of torchvision and `shardtrain.recipes`.

    Raises:
        ValueError: a file is missing, cannot be read or does not fit the other; a package is not allowed.
    """
    from importlib import import_module

    # The program is above the public names, and is imported by this call alone.
    return import_module("shardtrain.job.inference").load_exported(file, allow)  # type: ignore[no-any-return]

"""Checkpoints: complete or absent, verified before anything is loaded, without pickle.

Read ``manifest.py`` (what a checkpoint holds), ``files.py`` (how a file is written and verified),
``content.py`` (what each rank writes), ``loading.py``, and ``store.py`` (how a save is committed, and the
checkpoints of a run). ``memory.py`` and ``cleanup.py`` keep some in memory.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardtrain.checkpoint.content import Averages, collect
from shardtrain.checkpoint.loading import load_into, open_checkpoint
from shardtrain.checkpoint.store import Draft, file_writer
from shardtrain.engine.hooks import engine_of
from shardtrain.errors import Damaged, SaveFailed

__all__ = ["Damaged", "SaveFailed", "load", "save"]


def save(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Any = None,
    averages: Averages | None = None,
) -> None:
    """Save a sharded module, and its optimizer, as the new directory ``path``. Collective.

    Every rank writes its shards into its own file, so ``path`` must be on a file system that all ranks see.
    On return the checkpoint is complete on disk. After an error or a kill ``path`` does not exist.

    Args:
        path: must not exist. Parent directories are created.
        module: what `shardtrain.shard` returned.
        optimizer: any element-wise one. Its state is saved under the parameters' names.
        extra: numbers, texts, None and tensors, in any nesting of lists (tuples come back as lists)
            and of dicts with text or integer keys. It may differ between ranks: each rank's own is saved.
        averages: a tensor per parameter, sharded like it, such as `shardtrain.optim.Ema.averages`.

    Raises:
        SaveFailed: on every rank, naming ranks, files and reasons.
        ValueError: called inside forward, backward or `unsharded`.
    """
    engine = engine_of(module)
    all_ranks = engine.channel.all_ranks
    path = Path(path)
    problem = ""
    if all_ranks.rank == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                problem = f"{path}: exists already, and a checkpoint is never overwritten"
        except (OSError, ValueError) as error:  # ValueError for a NUL
            problem = str(error)
    with engine.driver.working():
        content = collect(path, module, optimizer, extra=extra, facts={}, averages=averages, problem=problem)
    Draft(path, content, all_ranks).save(file_writer(content))


def load(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    averages: Averages | None = None,
) -> Any:
    """Load what `save` saved at any world size and with any units, and return its ``extra``. Collective.

    Every file is verified before the module changes. With as many ranks as saved, each rank gets its own
    buffers and ``extra`` again, bit for bit. With more or fewer, buffers are the mean over the ranks that
    saved, and ``extra`` is rank 0's. The optimizer also gets its groups' options, as by its
    ``load_state_dict``. ``averages`` are filled in place. If they were saved and are not passed, a
    UserWarning says so. Beside its shards a rank holds at most one whole parameter.

    Raises:
        Damaged: on every rank, naming the file that is missing, changed, or not what the manifest says.
        ValueError: on every rank, naming each parameter, buffer or group that does not fit. In both cases
            nothing has been loaded.
    """
    engine = engine_of(module)
    engine.require_rest("checkpoint.load() cannot be called")
    opened = open_checkpoint(Path(path), engine.channel.all_ranks)
    if averages is None and opened.manifest.specs("ema"):
        warnings.warn(
            f"{path} has moving averages of the parameters, which are not loaded: pass averages=ema.averages",
            stacklevel=2,
        )
    with engine.driver.working():
        return load_into(opened, module, optimizer, averages)

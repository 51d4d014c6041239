"""Batches that workers load, and the report of those that never arrive.

A worker hands a batch over by a thread. If that fails, for want of shared memory for example, Python prints a
traceback and drops the batch, and the loader waits until its time-out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from shardtrain.config.errors import UserError
from shardtrain.launch.ranks import START_UP
from shardtrain.launch.signals import held_back

PATIENCE_S = START_UP.total_seconds()  # for a single batch; a cold network disk takes minutes
WAY_OUT = "make /dev/shm larger (docker run --shm-size=…), or data.workers=0 loads without workers"


def arriving(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield the batches of ``loader``. Raises UserError for one that is lost, or takes too long."""
    # A worker with `end_with_parent` handles signals only late in its start; one before that would end it.
    starting = contextlib.nullcontext() if loader.worker_init_fn is None else held_back()
    try:
        with starting:
            batches = iter(loader)
        yield from batches
    except RuntimeError as error:
        text = str(error)
        key = f"data.workers={loader.num_workers}"
        if text.startswith("DataLoader timed out"):
            raise UserError(
                f"{key}: no batch has come for {loader.timeout:g} s: a worker waits for its files, or has "
                "lost the batch; data.workers=0 loads without workers, and shows where"
            ) from None
        if "Bus error" in text:
            raise UserError(f"{key}: a worker has found no shared memory; {WAY_OUT}") from None
        raise

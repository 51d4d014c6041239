"""Batches that workers load, and the report of those that never arrive.

A worker hands a batch over by a thread. If that fails, for want of shared memory for example, Python prints a
traceback and drops the batch, and the loader waits for ever. Here the error takes the batch's place.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
from collections.abc import Iterator
from functools import partial
from multiprocessing.context import BaseContext
from multiprocessing.queues import Queue
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, get_worker_info

from shardtrain.config.errors import UserError, WorkerError
from shardtrain.launch.ranks import START_UP
from shardtrain.launch.signals import held_back

PATIENCE_S = START_UP.total_seconds()  # for a single batch; a cold network disk takes minutes
WAY_OUT = "make /dev/shm larger (docker run --shm-size=…), or data.workers=0 loads without workers"


class LostBatch(WorkerError):
    """A batch that a worker could not hand over."""


class _Batches(Queue):  # type: ignore[type-arg]  # not subscriptable before Python 3.12
    """A queue of a worker's batches, each with its number. An error takes the place of one it cannot send."""

    def _on_queue_feeder_error(self, error: Exception, batch: Any) -> None:
        worker = get_worker_info()
        reason = " ".join(str(error).split())
        count = worker.num_workers if worker else 0
        lost = LostBatch(f"data.workers={count}: a worker cannot hand over a batch: {reason}; {WAY_OUT}")
        self.put((batch[0], ExceptionWrapper((LostBatch, lost, None))))


def context() -> BaseContext:
    """Return the usual way to start workers, with such queues."""
    own = copy.copy(multiprocessing.get_context())
    own.Queue = partial(_Batches, ctx=own)  # type: ignore[method-assign, assignment]
    return own


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

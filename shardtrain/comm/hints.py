"""What users may do where ranks differ: `HINTS`, of which the first that matches holds."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from shardtrain.comm.trace import (
    ADD,
    AVERAGE,
    ENTER,
    GATHER,
    GRAPH,
    LEAVE,
    MOVEMENTS,
    REDUCE,
    SHARE,
    STEP,
    TRAIN,
    Movement,
)

STEPS = (
    ". All ranks must take the same steps and forwards: run what stands under `if rank == 0:`, an evaluation "
    "for example, on every rank, and skip an update on all ranks or on none, by a number that they have "
    "all-reduced (shardtrain.comm.all_reduce). If a scaler skips it, use shardtrain.GradScaler: with "
    "torch.amp.GradScaler each rank decides"
)
UNITS = (
    ". Modules that only some ranks call (experts, heads for some images) belong into shard(..., "
    "conditional=[module]); what stands under `if rank == 0:`, an evaluation for example, must run on every "
    "rank; forwards of which ranks make different numbers (generate() to other lengths) belong into "
    "shardtrain.unsharded(model)"
)
OPTIONS = (
    ". Optimizers must be alike on all ranks, in class and options: let ReduceLROnPlateau and other "
    "decisions see the mean over ranks (shardtrain.comm.all_reduce)"
)
FROZEN = ". Freeze the same parameters on all ranks, at the same point: call requires_grad_() on every rank"
BACKWARDS = (
    ". Ranks must clear gradients at the same point, and make as many backwards under no_sync and outside of "
    "it: call zero_grad(), backward() and no_sync() on every rank"
)
CAPTURE = (
    ". A captured step must run on all ranks alike: inputs of the same shapes in each call, and the same "
    "changes of the model and its optimizer between calls"
)
CALLS = (
    ". All ranks must make the same calls in the same order, with tensors of the same sizes: run what stands "
    "under `if rank == 0:`, a save for example, on every rank"
)

ANY = frozenset(MOVEMENTS)
REDUCTIONS = frozenset({REDUCE, AVERAGE})
# What a forward and a backward consist of. The first gather of a unit may share memory.
OF_FORWARDS = REDUCTIONS | {SHARE, GATHER, ENTER, LEAVE, ADD}


class Hint(NamedTuple):
    """A ``text`` for where a rank does one of ``some`` and all ranks do one of ``among``."""

    some: Set[Movement]
    among: Set[Movement]
    text: str


HINTS = (
    Hint({GRAPH}, ANY, CAPTURE),
    Hint({STEP}, {STEP}, OPTIONS),
    # Noted as a forward or backward begins, before the steps of optimizers.
    Hint({TRAIN}, OF_FORWARDS | {TRAIN, STEP}, FROZEN),
    Hint({SHARE}, {SHARE}, CALLS),  # of other sizes: two models
    Hint({ADD}, OF_FORWARDS, BACKWARDS + UNITS),
    Hint(REDUCTIONS, REDUCTIONS, UNITS),
    Hint(REDUCTIONS, OF_FORWARDS, UNITS + BACKWARDS),
    Hint(REDUCTIONS | {ADD}, ANY, BACKWARDS),
    # A rank that skips an update begins its next forward.
    Hint({STEP}, OF_FORWARDS | {STEP}, STEPS),
    Hint(OF_FORWARDS, OF_FORWARDS, UNITS),
    Hint(ANY, ANY, CALLS),
)


def hint(movements: Set[Movement]) -> str:
    """Return what to do where the k-th collectives of ranks are ``movements``, and differ."""
    return next(row.text for row in HINTS if row.some & movements and movements <= row.among)

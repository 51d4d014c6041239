"""What users may do where ranks differ: `HINTS`, the first row that a rank's collective is in."""

from __future__ import annotations

from collections.abc import Set

from shardtrain.comm import trace
from shardtrain.comm.trace import Movement

CAPTURE = (
    ". A captured step must run on all ranks alike: inputs of the same shapes in each call, and the same "
    "changes of the model and its optimizer between calls"
)
CALLS = (
    ". All ranks must make the same calls in the same order, with tensors of the same sizes: run what stands "
    "under `if rank == 0:`, a save for example, on every rank"
)
FROZEN = ". Freeze the same parameters on all ranks, at the same point: call requires_grad_() on every rank"
STEPS = (
    ". All ranks must take the same steps and forwards, with optimizers alike in class and options: run what "
    "stands under `if rank == 0:`, an evaluation for example, on every rank; let ReduceLROnPlateau and what "
    "decides to skip an update see numbers that ranks have all-reduced (shardtrain.comm.all_reduce), and "
    "scale by shardtrain.GradScaler: with torch.amp.GradScaler each rank decides"
)
UNITS = (
    ". Modules that only some ranks call (experts, dropped layers, heads for some images) belong into "
    "shard(..., conditional=[module]); what stands under `if rank == 0:`, an evaluation for example, must "
    "run on every rank; forwards of which ranks make different numbers (generate() to other lengths) belong "
    "into shardtrain.unsharded(model)"
)
BACKWARDS = (
    ". Ranks must clear gradients at the same point, and make as many backwards under no_sync and outside of "
    "it: call zero_grad(), backward() and no_sync() on every rank"
)

# What a forward and a backward consist of. The first gather of a unit may share memory.
OF_BACKWARDS = frozenset({trace.REDUCE, trace.AVERAGE, trace.ADD})
OF_FORWARDS = OF_BACKWARDS | {trace.SHARE, trace.GATHER, trace.ENTER, trace.LEAVE}

HINTS: tuple[tuple[Set[Movement], str], ...] = (
    ({trace.GRAPH}, CAPTURE),
    ({trace.ALL_REDUCE, trace.BROADCAST, trace.ALL_TO_ALL}, CALLS),
    ({trace.TRAIN}, FROZEN),  # noted as a forward or backward begins, before the steps of optimizers
    ({trace.STEP}, STEPS),
    (OF_BACKWARDS, UNITS + BACKWARDS),
    (OF_FORWARDS, UNITS),
)


def hint(movements: Set[Movement]) -> str:
    """Return what to do where the k-th collectives of ranks are ``movements``, and differ."""
    return next(text for some, text in HINTS if some & movements)

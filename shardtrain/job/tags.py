"""Define all TensorBoard tags of a run, which are also keys of ``result.json``.

Memory is rank 0's. Speed is that of all ranks, unless the tag says per rank.
"""

from __future__ import annotations

import re

TRAIN_LOSS = "train/loss"
TRAIN_ACC1 = "train/acc1"  # percent, like all accuracies
GRAD_NORM = "grad_norm"  # before clipping

VAL_LOSS = "val/loss"
VAL_ACC1 = "val/acc1"
VAL_ACC5 = "val/acc5"
VAL = (VAL_LOSS, VAL_ACC1, VAL_ACC5)
# Scores of the weights' moving average.
VAL_EMA_LOSS = "val/ema_loss"
VAL_EMA_ACC1 = "val/ema_acc1"
VAL_EMA_ACC5 = "val/ema_acc5"
VAL_EMA = (VAL_EMA_LOSS, VAL_EMA_ACC1, VAL_EMA_ACC5)
# Of the weights, or of their average where one is kept, at the end.
TEST_LOSS = "test/loss"
TEST_ACC1 = "test/acc1"
TEST_ACC5 = "test/acc5"
TEST = (TEST_LOSS, TEST_ACC1, TEST_ACC5)
# The best evaluation so far; the best score itself has the tag ``best(tag)``.
BEST_BY = "best_by"  # the tag by which the best step is chosen; in result.json only
BEST_IS_LOWEST = "best_is_lowest"  # whether the smallest value of that tag is the best; in result.json only
BEST_STEP = "best_val/step"  # in result.json only

IMG_PER_S = "perf/img_per_s"
IMG_PER_S_PER_RANK = "perf/img_per_s_per_rank"
STEP_S = "time/step_s"
EXPOSED_COMM_PCT = "time/exposed_comm_pct"

PARAMS_MIB = "memory/params_mib"
GRADS_MIB = "memory/grads_mib"
OPTIMIZER_MIB = "memory/optimizer_mib"
GATHERED_PEAK_MIB = "memory/gathered_peak_mib"
PEAK_MIB = "memory/peak_mib"

SAMPLES = "samples/as_trained"  # a picture

# Tags with a parameter: ``lr(0)`` is "lr/group0".
lr = "lr/group{}".format  # by the optimizer's group
best = "best_{}".format  # by the tag of `train.best`: "best_val/acc1"
phase_pct = "time/{}_pct".format  # by phase (data, forward, …): its share of the time
sent_mib = "comm/{}_mib_per_step".format  # by kind of collective (all_gather, …): sent per rank


def score(part: str, name: str) -> str:
    """Return the tag of a score of ``part``, such as ``val``; names with a slash are a group of their own.

    ``val`` has "val/balanced" of the name "balanced", and "val_recall/cat" of "recall/cat".
    """
    return f"{part}_{name}" if "/" in name else f"{part}/{name}"


def name(tag: str) -> str:
    """Return a score's name without its part: "recall/cat" of "val_recall/cat"."""
    return re.sub("^[a-z]+[/_]", "", tag)


PERCENT = ("/acc1", "/acc5", "/balanced")


def in_words(tag: str, value: float) -> str:
    """Return a score as text: those of the program are percent, but for losses."""
    is_percent = tag.endswith(PERCENT) or "recall/" in tag
    return f"{value:.2f} %" if is_percent else f"{value:.4f}"

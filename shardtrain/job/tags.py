"""All TensorBoard tags of a run, which are also keys of ``result.json``.

Memory is rank 0's. Speed is that of all ranks, unless the tag says per rank.
"""

from __future__ import annotations

TRAIN_LOSS = "loss/train"
TRAIN_ACC1 = "acc1/train"  # percent, like all accuracies
GRAD_NORM = "grad_norm"  # before clipping

VAL_LOSS = "loss/val"
VAL_ACC1 = "acc1/val"
VAL = (VAL_LOSS, VAL_ACC1, "acc5/val")
# Scores of the weights' moving average.
VAL_EMA = ("loss/val_ema", "acc1/val_ema", "acc5/val_ema")
# Of the weights, or of their average where one is kept, at the end.
TEST = ("loss/test", "acc1/test", "acc5/test")
# The best evaluation so far; the best score itself has the tag ``best(tag)``.
BEST_BY = "best_by"  # the tag by which the best step is chosen; in result.json only
BEST_IS_LOWEST = "best_is_lowest"  # whether the smallest value of that tag is the best; in result.json only
BEST_STEP = "best/step"  # in result.json only

# What machines do: one group, whose name comes after those of what people look at.
IMG_PER_S = "system/img_per_s"
IMG_PER_S_PER_RANK = "system/img_per_s_per_rank"
STEP_S = "system/step_s"
EXPOSED_COMM_PCT = "system/exposed_comm_pct"
PARAMS_MIB = "system/params_mib"
GRADS_MIB = "system/grads_mib"
OPTIMIZER_MIB = "system/optimizer_mib"
GATHERED_PEAK_MIB = "system/gathered_peak_mib"
PEAK_MIB = "system/peak_mib"

SAMPLES = "samples/as_trained"  # a picture

# Tags with a parameter: ``lr(0)`` is "lr/group0".
lr = "lr/group{}".format  # by the optimizer's group
phase_pct = "system/{}_pct".format  # by phase (data, forward, …): its share of the time
sent_mib = "system/{}_mib_per_step".format  # by kind of collective (all_gather, …): sent per rank


def score(part: str, name: str) -> str:
    """Return the tag of a score of ``part``, such as ``val``: the quantity comes first.

    ``val`` has "balanced/val" of the name "balanced", and "recall/val/cat" of "recall/cat".
    """
    quantity, *rest = name.split("/", 1)
    return "/".join((quantity, part, *rest))


def name(tag: str) -> str:
    """Return a score's name without its part: "recall/cat" of "recall/val/cat"."""
    quantity, _, *rest = tag.split("/", 2)
    return "/".join((quantity, *rest))


def best(tag: str) -> str:
    """Return the tag of the best score so far, by the tag of `train.best`: "best/acc1" of "acc1/val"."""
    return f"best/{name(tag)}"


PERCENT = ("acc1", "acc5", "balanced", "recall")


def in_words(tag: str, value: float) -> str:
    """Return a score as text: those of the program are percent, but for losses."""
    is_percent = tag.partition("/")[0] in PERCENT
    return f"{value:.2f} %" if is_percent else f"{value:.4f}"

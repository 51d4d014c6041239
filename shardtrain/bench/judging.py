"""Whose losses count as right, and who is not ranked because of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from shardtrain.bench.statistics import loss_difference, losses_agree

# Trusted in this order to have the right losses. It never trains alone: each rank has data of its own.
JUDGES = ("ddp", "zero1", "fsdp2", "fsdp1", "fsdp2_no_reshard")
EXEMPT = ("no_communication",)


class Trained(Protocol):
    """What a contender's training has come to."""

    losses: list[float]
    failure: str | None


def judge_of(found: Mapping[str, Trained]) -> str | None:
    """The most trusted of those that have not failed."""
    return next((name for name in JUDGES if name in found and found[name].failure is None), None)


def difference(name: str, found: Mapping[str, Trained]) -> float | None:
    """Of the losses of ``name`` from the judge's, as a fraction of these; None if nobody judges."""
    judge = judge_of(found)
    return None if judge is None else loss_difference(found[name].losses, found[judge].losses)


def objection(name: str, found: Mapping[str, Trained], precision: str) -> str | None:
    """Why the losses of ``name`` are wrong, if they are."""
    judge = judge_of(found)
    if judge is None or name in EXEMPT or losses_agree(found[name].losses, found[judge].losses, precision):
        return None
    return f"losses differ from {judge}'s by up to {difference(name, found):.1e} of their value"

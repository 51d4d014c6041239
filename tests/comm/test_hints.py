"""Which hint an error of ranks that differ ends with."""

from itertools import permutations

import pytest

from shardtrain.comm import guard, hints
from shardtrain.comm.trace import MOVEMENTS, Movement

UNITS_OR_BACKWARDS = hints.UNITS + hints.BACKWARDS

# By the names of `Movement`: what ranks do, one each.
EXPECTED = {
    "GRAPH ALL_REDUCE": hints.CAPTURE,
    "GRAPH TRAIN STEP": hints.CAPTURE,
    "ALL_REDUCE TRAIN": hints.CALLS,
    "BROADCAST STEP": hints.CALLS,
    "ALL_TO_ALL GATHER": hints.CALLS,
    "TRAIN STEP": hints.FROZEN,
    "TRAIN GATHER": hints.FROZEN,
    "STEP STEP": hints.STEPS,
    "STEP ENTER": hints.STEPS,
    "STEP REDUCE": hints.STEPS,
    "REDUCE GATHER": UNITS_OR_BACKWARDS,
    "AVERAGE AVERAGE": UNITS_OR_BACKWARDS,
    "ADD LEAVE": UNITS_OR_BACKWARDS,
    "GATHER GATHER": hints.UNITS,
    "SHARE SHARE": hints.UNITS,
    "ENTER LEAVE": hints.UNITS,
}


def text_of(*movements: Movement) -> str:
    """The error, on rank 0, of ranks that do ``movements``, each under a name of its own."""
    first, *others = [guard.Paths(rank, range(len(movements))) for rank in range(len(movements))]
    first.theirs.clear()
    for rank, movement in enumerate(movements):
        [first, *others][rank].add(movement, f"unit {rank}")
    for other in others:
        first.hear(other.rank, other.latest.pack(0))
    return str(first.diverged(0))


@pytest.mark.parametrize("names", EXPECTED)
def test_a_hint_does_not_depend_on_the_order_of_ranks(names: str) -> None:
    movements = [Movement[name] for name in names.split()]
    for order in permutations(movements):
        assert text_of(*order).endswith(f"unit {len(order) - 1}{EXPECTED[names]}"), order


def test_each_movement_has_a_hint() -> None:
    for movement in MOVEMENTS:
        assert hints.hint({movement})

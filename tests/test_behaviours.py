"""The probes of `behaviours.py`, whose table compares shardtrain with FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from behaviours import PROBES, Shardtrain, outcome

Ranks = Callable[..., list[Any]]

# These end in an error that the other ranks may have to wait for; `test_guard.py` has them.
_DIVERGING = ("Ranks that run units in another order", "Unequal numbers of steps")


def on_a_rank(name: str) -> str:
    return outcome(Shardtrain(), name)


@pytest.mark.parametrize("name", [name for name in PROBES if name not in _DIVERGING])
def test_every_behaviour_is_equal_or_refused(ranks: Ranks, name: str) -> None:
    refused = PROBES[name].refused
    for text in ranks(3, on_a_rank, name):
        if refused is None:
            assert text == "equal"
        else:
            assert text.partition("Error: ")[2].startswith(refused)

"""Names that were removed: each says what to use instead."""

import pytest

import shardtrain


@pytest.mark.parametrize("name", ["Flat", "Gradient"])
def test_what_moved_says_where_it_is(name: str) -> None:
    message = rf"^shardtrain\.comm\.{name} was moved; use shardtrain\.comm\.Vector$"
    with pytest.raises(ValueError, match=message):
        getattr(shardtrain.comm, name)
    with pytest.raises(ValueError, match=message):
        exec(f"from shardtrain.comm import {name}")


def test_other_names_are_unknown() -> None:
    assert not hasattr(shardtrain, "compile_unit")
    assert not hasattr(shardtrain.optim, "Muons")

"""The picture of the package shows what the package has, and a real step goes the two ways that it draws."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
from house import GRADIENT, PARAMETER, FunctionCall, house
from torch import nn

import shardtrain

from pool import each_rank
from small import Block, OddNet, classify, sgd, shard

PACKAGE = Path(shardtrain.__file__).parent


def test_the_picture_is_the_one_that_is_drawn_now() -> None:
    """Otherwise: python docs/course/house.py docs/pictures."""
    assert (Path(__file__).parents[2] / "docs/pictures/house.svg").read_text() == house()


def calls_of_a_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, str]]:
    """Return the functions of the package that a step calls, in order, each as its file and name."""
    calls = list[tuple[str, str]]()

    def note(frame: FrameType, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(PACKAGE):
            calls.append((file.relative_to(PACKAGE).as_posix(), frame.f_code.co_name))

    sys.setprofile(note)
    try:
        classify(model, 1).backward()
        optimizer.step()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.long
@pytest.mark.parametrize("way", [PARAMETER, GRADIENT], ids=["parameter", "gradient"])
@each_rank(2)
def test_a_step_goes_the_way_that_is_drawn(way: tuple[FunctionCall, ...]) -> None:
    model = shard(OddNet(), units=[Block])
    optimizer = sgd(model)
    classify(model, 0).backward()
    optimizer.zero_grad()
    calls: Iterator[tuple[str, str]] = iter(calls_of_a_step(model, optimizer))
    for call in way:
        name = call.file, call.function.rpartition(".")[2]
        assert name in calls, f"{name} is not called after what stands before it"

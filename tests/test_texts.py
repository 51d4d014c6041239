"""Texts between ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardtrain import comm

Ranks = Callable[..., list[Any]]
CPU = torch.device("cpu")


def told(texts: list[str]) -> tuple[str, str, list[str]]:
    mine = texts[comm.rank()]
    ranks = comm.plain_transport()
    first, second = (comm.broadcast_text(mine, ranks, CPU, src) for src in range(2))
    return first, second, comm.gather_texts(mine, ranks, CPU)


@pytest.mark.parametrize(
    "texts", [["", "näher\n"], ["a" * 1000, ""], ["", ""]], ids=["short", "long", "empty"]
)
def test_texts_arrive_as_they_were(on_ranks: Ranks, texts: list[str]) -> None:
    assert on_ranks(2, told, texts) == [(*texts, texts)] * 2


def test_a_single_rank_hears_itself() -> None:
    alone = comm.Alone()
    assert comm.broadcast_text("ä", alone, CPU) == "ä"
    assert comm.gather_texts("ä", alone, CPU) == ["ä"]

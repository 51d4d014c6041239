"""Ranks that share memory: when they do, and what happens when one of them strays, stops or dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardtrain
from shardtrain import comm
from shardtrain.comm.shared_memory import Arena

from pool import each_rank
from small import Block, OddNet, assert_same_parameters, sgd, sharded_and_replica, train
from test_forwards import Deep
from test_forwards import train as train_in_micro_batches

Ranks = Callable[..., list[Any]]


@each_rank(2, 3, transport="auto")
def test_both_transports_give_the_same_bits_and_count_the_same_bytes() -> None:
    """Memory is shared unasked; without a name, for which the session's end looks into /dev/shm."""
    ends = []
    for transport in ("process_group", "auto"):
        torch.manual_seed(0)
        model = shardtrain.shard(OddNet(), units=[Block], transport=transport)
        with comm.meter() as meter:
            losses = train(model, sgd(model), 6)
        ends.append((losses, dict(meter.bytes), shardtrain.full_state_dict(model)))
    assert isinstance(shardtrain.introspect(model).transport, comm.SharedMemoryTransport)
    weight = next(p for p in model.parameters() if p.numel())
    assert weight.untyped_storage().nbytes() > weight.nbytes
    assert ends[0][:2] == ends[1][:2]
    torch.testing.assert_close(ends[0][2], ends[1][2], rtol=0, atol=0)


@each_rank(2, 3, transport="auto")
def test_gradients_that_wait_together_share_the_arena() -> None:
    """Ten units whose gradients all wait under `no_sync`."""
    model, replica = sharded_and_replica(lambda: Deep(9), transport="shared_memory")
    assert train_in_micro_batches(model) == pytest.approx(train_in_micro_batches(replica), rel=1e-5)
    assert_same_parameters(model, replica)


def test_an_arena_gives_out_what_is_free() -> None:
    arena = Arena(torch.zeros(384, dtype=torch.uint8))
    assert (arena.take(100), arena.take(128)) == (0, 128)
    with pytest.raises(AssertionError, match="a unit has one gradient"):
        arena.take(129)
    assert arena.offset_of(arena.view(128, 4, torch.float32)) == 128
    arena.give_back(0)
    assert arena.take(0) == 0
    assert arena.take(64) == 64

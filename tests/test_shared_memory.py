"""Ranks that share memory: when they do, and what happens when one of them strays, stops or dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardtrain
from shardtrain import comm
from shardtrain.comm import Gradient, Tag
from shardtrain.comm.movement import ENTER, LEAVE
from shardtrain.comm.shared_memory import Arena
from shardtrain.layout import even

from pool import each_rank
from small import Block, OddNet, assert_same_parameters, sgd, sharded_and_replica, train
from test_forwards import Deep
from test_forwards import train as train_in_micro_batches
from test_hosts import hosts

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
def test_gradients_beyond_the_arena_wait_in_private_memory() -> None:
    """Ten units whose gradients all wait under `no_sync`: most are collected in private memory."""
    model, replica = sharded_and_replica(lambda: Deep(9), transport="shared_memory")
    assert train_in_micro_batches(model) == pytest.approx(train_in_micro_batches(replica), rel=1e-5)
    assert_same_parameters(model, replica)


def a_unit_of_two_segments(of_ranks: list[int]) -> None:
    """Neither gradient has room where gradients come together, and copies of both have none at once."""
    with hosts(of_ranks):
        transport = comm.open_transport("auto")
    layouts = [even([size], transport.world, 4) for size in (1024, 640)]
    for layout in layouts:
        transport.allocate(layout, torch.zeros(0), torch.float32)
    transport.fence(ENTER)
    waiting = [transport.gradient(layouts[0], torch.zeros(0)) for _ in range(2)]
    for movement in range(3):
        gradients = []
        for layout in layouts:
            full = transport.gradient(layout, torch.zeros(0)).fill_(movement + transport.rank)
            own = [full[layout.interval(transport.rank)].clone()]
            gradients.append(Gradient(full, own, layout, layout.pieces(transport.rank)))
        transport.reduce(Tag(0, "both"), gradients).wait()
        for gradient in gradients:
            assert torch.all(gradient.own[0] == movement + (transport.world - 1) / 2)
    for gradient in waiting:
        transport.discard(gradient)
    transport.fence(LEAVE)


@pytest.mark.parametrize("of_ranks", [[0, 0], [0, 0, 1, 1]])
def test_segments_that_have_to_be_copied_take_turns(on_ranks: Ranks, of_ranks: list[int]) -> None:
    on_ranks(len(of_ranks), a_unit_of_two_segments, of_ranks)


def test_an_arena_gives_out_what_is_free() -> None:
    arena = Arena(torch.zeros(1024, dtype=torch.uint8), 128, 512)
    first, second = arena.take(100), arena.take(128)
    assert (first, second) == (128, 256)
    assert arena.take(129) is None
    assert arena.offset_of(arena.view(256, 4, torch.float32)) == 256
    assert arena.offset_of(torch.zeros(4)) is None
    arena.give_back(128)
    assert arena.take(0) == 128
    assert arena.take(64) == 192

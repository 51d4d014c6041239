"""Ranks that share memory: when they do, and what happens when one of them strays, stops or dies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardtrain
from shardtrain import comm
from shardtrain.comm import Gradient, Tag
from shardtrain.comm.movement import ENTER, LEAVE
from shardtrain.comm.shared_memory import Arena
from shardtrain.engine.hooks import engine_of
from shardtrain.layout import even

from pool import each_rank
from small import Block, OddNet, assert_same_parameters, sgd, sharded_and_replica, train
from test_hosts import hosts

Ranks = Callable[..., list[Any]]


def both_transports() -> tuple[list[list[float]], list[dict[str, torch.Tensor]], list[dict[str, int]]]:
    losses, states, sent = [], [], []
    for transport in ("process_group", "shared_memory"):
        torch.manual_seed(0)
        model = shardtrain.shard(OddNet(), units=[Block], transport=transport)
        with comm.meter() as meter:
            losses.append(train(model, sgd(model), 6))
        sent.append(dict(meter.bytes))
        states.append(shardtrain.full_state_dict(model))
    return losses, states, sent


@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_both_transports_give_the_same_bits_and_count_the_same_bytes(on_ranks: Ranks, world: int) -> None:
    for losses, states, sent in on_ranks(world, both_transports):
        assert losses[0] == losses[1]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        assert sent[0] == sent[1]


def what_is_chosen() -> tuple[type, bool]:
    model = shardtrain.shard(OddNet())
    weight = next(p for p in model.parameters() if p.numel())
    return type(engine_of(model).transport), weight.untyped_storage().nbytes() > weight.nbytes


def test_ranks_of_one_host_share_memory_unasked(on_ranks: Ranks) -> None:
    """Without a name: the session's end looks into /dev/shm."""
    assert on_ranks(2, what_is_chosen) == [(comm.SharedMemoryTransport, True)] * 2


@each_rank(2, 3, transport="auto")
def test_gradients_beyond_the_arena_wait_in_private_memory() -> None:
    """Units whose gradients all wait under `no_sync`: most are collected in private memory."""
    model, plain = sharded_and_replica(
        lambda: nn.Sequential(*(nn.Linear(31, 31) for _ in range(9))),
        units=[nn.Linear],
        transport="shared_memory",
    )
    for step in range(3):
        for net in (model, plain):
            for micro in range(3):
                seed = 10 * step + micro + 100 * dist.get_rank()
                x = torch.randn(4, 31, generator=torch.Generator().manual_seed(seed))
                no_sync = shardtrain.no_sync(model) if net is model else plain.no_sync()
                with no_sync if micro < 2 else contextlib.nullcontext():
                    net(x).square().mean().backward()
            torch.optim.SGD(net.parameters(), 0.1).step()
            net.zero_grad()
    assert_same_parameters(model, plain)


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

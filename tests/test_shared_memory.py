"""Ranks that share memory: when they do, and what happens when one of them strays, stops or dies."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import shardtrain
from shardtrain import comm
from shardtrain.comm.shared_memory import Arena
from shardtrain.engine import engine_of

from pool import Pool
from small import Block, OddNet, images, sgd, train

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


@pytest.mark.parametrize("world", [2, 3, 4])
def test_both_transports_give_the_same_bits_and_count_the_same_bytes(on_ranks: Ranks, world: int) -> None:
    for losses, states, sent in on_ranks(world, both_transports):
        assert losses[0] == losses[1]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        assert sent[0] == sent[1]


def what_is_chosen() -> tuple[type, bool]:
    model = shardtrain.shard(OddNet())
    transport = engine_of(model).transport
    weight = next(p for p in model.parameters() if p.numel())
    shared = weight.untyped_storage().nbytes() > weight.nbytes
    return type(transport), shared


def test_ranks_of_one_host_share_memory_unasked(on_ranks: Ranks) -> None:
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    assert on_ranks(2, what_is_chosen) == [(comm.SharedMemoryTransport, True)] * 2
    if Path("/dev/shm").is_dir():
        assert set(os.listdir("/dev/shm")) <= before


def on_simulated_hosts() -> tuple[type, list[str], str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shardtrain")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    os.environ["SHARDTRAIN_HOST_KEY"] = f"host {dist.get_rank() // 2}"
    try:
        transport = engine_of(shardtrain.shard(OddNet())).transport
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            shardtrain.shard(OddNet(), transport="shared_memory")
    finally:
        del os.environ["SHARDTRAIN_HOST_KEY"]
        logger.removeHandler(handler)
    return type(transport), messages, str(caught.value)


def test_several_hosts_fall_back_to_the_process_group_with_one_line(on_ranks: Ranks) -> None:
    """Hosts are simulated on this one by a forced key."""
    for rank, (transport, messages, refusal) in enumerate(on_ranks(3, on_simulated_hosts)):
        assert transport is comm.ProcessGroupTransport
        line = "not sharing memory between ranks: the ranks are on several hosts"
        assert messages == ([line] if rank == 0 else [])
        assert refusal == "transport='shared_memory' is not possible: the ranks are on several hosts"


class TwoPaths(nn.Module):
    """Two equal layers, run in an order of the caller's, or one of them not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(9, 9), nn.Linear(9, 9)

    def forward(self, x: torch.Tensor, order: str) -> torch.Tensor:
        for name in order.split():
            x = getattr(self, name)(x)
        return x


def strays(order_of_last_rank: str) -> str:
    model = shardtrain.shard(TwoPaths(), units=[nn.Linear])
    usual = "first second"
    model(torch.randn(2, 9), usual).sum().backward()
    last = dist.get_rank() == dist.get_world_size() - 1
    started = time.monotonic()
    with pytest.raises(comm.Diverged) as caught:
        model(torch.randn(2, 9), order_of_last_rank if last else usual).sum().backward()
    assert time.monotonic() - started < 10
    return str(caught.value)


@pytest.mark.parametrize("order", ["second first", "first"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_takes_another_path_is_named_on_every_rank(
    on_ranks: Ranks, world: int, order: str
) -> None:
    texts = on_ranks(world, strays, order)
    for rank, text in enumerate(texts):
        odd = f"[{world - 1}]" if rank < world - 1 else "[01]"  # the stray sees the others stray
        assert re.match(
            f"step 2: rank {odd} takes another path than rank {rank}: rank {rank} is (gath|reduc)", text
        )
        assert "first" in text or "second" in text


def leaves_early() -> str:
    torch.manual_seed(0)
    model = shardtrain.shard(OddNet(), units=[Block])
    optimizer = sgd(model)
    train(model, optimizer, 2)
    if dist.get_rank() == 1:
        engine_of(model).transport._signals.close()  # type: ignore[attr-defined]  # what the kernel does at exit
        return ""
    started = time.monotonic()
    with pytest.raises(comm.PeerLost) as caught:
        train(model, optimizer, 1)
    assert time.monotonic() - started < 10
    return str(caught.value)


def test_a_rank_that_ends_early_is_named(on_ranks: Ranks) -> None:
    texts = on_ranks(3, leaves_early)
    for rank in (0, 2):
        assert texts[rank].startswith(f"rank 1 has ended: rank {rank} was at step 3, entering the model")


def is_killed(report: str) -> None:
    torch.manual_seed(0)
    model = shardtrain.shard(OddNet(), units=[Block])
    optimizer = sgd(model)
    train(model, optimizer, 2)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    x, y = images(2)
    started = time.monotonic()
    with pytest.raises(comm.PeerLost) as caught:
        F.cross_entropy(model(x), y).backward()
    Path(report).write_text(f"{time.monotonic() - started < 10} {caught.value}")


def test_survivors_of_a_killed_rank_leave_at_once_and_nothing_is_left_behind(tmp_path: Path) -> None:
    pool = Pool()
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    try:
        with pytest.raises(AssertionError, match=r"ranks \[1\] died"):
            pool.run("auto", 2, is_killed, str(tmp_path / "report"))
        assert (tmp_path / "report").read_text().startswith("True rank 1 has ended: rank 0 was at step 3")
    finally:
        pool.stop()
    if Path("/dev/shm").is_dir():
        assert set(os.listdir("/dev/shm")) <= before


def stops() -> str:
    torch.manual_seed(0)
    model = shardtrain.shard(OddNet(), units=[Block])
    optimizer = sgd(model)
    train(model, optimizer, 2)
    signals = engine_of(model).transport._signals  # type: ignore[attr-defined]
    type(signals)._timeout_s, kept = property(lambda _: 1.0), type(signals)._timeout_s
    try:
        if dist.get_rank() == 1:
            time.sleep(3)
            return ""
        with pytest.raises(comm.PeerLost) as caught:
            train(model, optimizer, 1)
        return str(caught.value)
    finally:
        type(signals)._timeout_s = kept


def test_a_rank_that_stands_still_is_named_at_the_time_out(on_ranks: Ranks) -> None:
    assert on_ranks(2, stops)[0] == "rank 0 waited 1 s for rank 1 at step 3, entering the model"


def accumulates_more_than_the_arena_holds() -> None:
    """Units whose gradients all wait under `no_sync`: most come together in private memory."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(31, 31) for _ in range(9)))
    plain = torch.nn.parallel.DistributedDataParallel(nn.Sequential(*(nn.Linear(31, 31) for _ in range(9))))
    plain.module.load_state_dict(layers.state_dict())
    model = shardtrain.shard(layers, units=[nn.Linear])
    for step in range(3):
        for micro in range(3):
            x = torch.randn(
                4, 31, generator=torch.Generator().manual_seed(10 * step + micro + 100 * dist.get_rank())
            )
            for net, quiet in ((model, lambda: shardtrain.no_sync(model)), (plain, plain.no_sync)):
                if micro < 2:
                    with quiet():
                        net(x).square().mean().backward()
                else:
                    net(x).square().mean().backward()
        for net in (model, plain):
            torch.optim.SGD(net.parameters(), 0.1).step()
            net.zero_grad()
    whole = shardtrain.full_state_dict(model)
    for name, param in plain.module.named_parameters():
        torch.testing.assert_close(whole[name], param.detach())


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_beyond_the_arena_wait_in_private_memory(on_ranks: Ranks, world: int) -> None:
    on_ranks(world, accumulates_more_than_the_arena_holds)


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

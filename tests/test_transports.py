"""Ranks that share memory, on one host and on several, simulated by a forced key; offloaded shards."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardtrain
from shardtrain import Precision, comm
from shardtrain.comm.shared_memory import Arena
from shardtrain.job.build import build
from shardtrain.job.config import from_hydra
from shardtrain.job.hydra_app import compose
from shardtrain.monitor import StepMetrics
from shardtrain.optim import Ema

from pool import each_rank
from small import (
    Block,
    Deep,
    OddNet,
    assert_at_rest,
    assert_same_parameters,
    classify,
    images,
    raised_soon,
    sgd,
    shard,
    sharded_and_replica,
    train,
    train_in_micro_batches,
)
from test_engine import mean_of_means
from tiny import CPU

BLOCKS, INTERLEAVED = [0, 0, 1, 1], [0, 1, 0, 1]  # the host of each rank


@contextmanager
def hosts(of_ranks: list[int]) -> Iterator[None]:
    os.environ["SHARDTRAIN_HOST_KEY"] = f"host {of_ranks[dist.get_rank()]}"
    try:
        yield
    finally:
        del os.environ["SHARDTRAIN_HOST_KEY"]


def sharded(of_ranks: list[int]) -> nn.Module:
    torch.manual_seed(0)
    with hosts(of_ranks):
        return shardtrain.shard(OddNet(), units=[Block])


@each_rank(4, transport="auto")
def test_training_over_hosts_is_training() -> None:
    """DDP's means of the hosts' means, bit for bit; in another order of ranks, equal but for rounding."""
    torch.manual_seed(0)
    replica = DistributedDataParallel(OddNet())
    replica.register_comm_hook(None, mean_of_means(2))
    expected, sent = train(replica, sgd(replica), 6), []
    for of_ranks, tolerance in ((BLOCKS, 0.0), (INTERLEAVED, 1e-5), ([0] * 4, 1e-5)):
        model = sharded(of_ranks)
        with comm.meter() as meter:
            losses = train(model, sgd(model), 6)
        sent.append(dict(meter.bytes))
        assert losses == pytest.approx(expected, rel=tolerance, abs=0)
        assert_same_parameters(model, replica, tolerance)
        one = max(of_ranks) == 0
        kind = type(shardtrain.introspect(model).transport)
        assert kind is (comm.SharedMemoryTransport if one else comm.HostsTransport)
        weight = next(p for p in model.parameters() if p.numel())
        assert weight.untyped_storage().nbytes() > weight.nbytes  # memory is shared
    assert sent[0] == sent[1] == sent[2]


@each_rank(4, transport="auto")
def test_a_rank_on_another_path_is_named_on_every_host() -> None:
    """Rank 3 runs the two blocks in the other order."""
    model = sharded(BLOCKS)
    if dist.get_rank() == 3:
        first, second = model.blocks  # type: ignore[misc]
        model.blocks.forward = lambda x: first(second(x))
    text = raised_soon(comm.Diverged, lambda: train(model, sgd(model), 1))
    assert text.endswith(" are gathering blocks.0, rank 3 is gathering blocks.1"), text


@pytest.mark.parametrize(
    ("of_ranks", "why"),
    [
        ([0, 0, 1], "the hosts have different numbers of ranks: 2, 1"),
        ([0, 1, 2], "every rank is on a host of its own"),
    ],
)
@each_rank(3, transport="auto")
def test_hosts_that_cannot_share_fall_back_with_one_line(of_ranks: list[int], why: str) -> None:
    with patch.object(logging.getLogger("shardtrain"), "info") as told:
        transport = shardtrain.introspect(sharded(of_ranks)).transport
    assert type(transport) is comm.ProcessGroupTransport
    messages = [call.args[0] % call.args[1:] for call in told.call_args_list]
    assert messages == ([f"not sharing memory between ranks: {why}"] if dist.get_rank() == 0 else [])
    with hosts(of_ranks):
        refusal = raised_soon(ValueError, lambda: shardtrain.shard(OddNet(), transport="shared_memory"))
    assert refusal == f"transport='shared_memory' is not possible: {why}"


# one host


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


# offloaded shards: the CPU stands in for the device, with memory of its own


def both(**options: Any) -> tuple[nn.Module, nn.Module]:
    """The same model offloaded, and over messages."""
    torch.manual_seed(0)
    plain = OddNet()
    resident = shardtrain.shard(copy.deepcopy(plain), units=[Block], transport="process_group", **options)
    away = comm.Offloaded(comm.open_transport(), CPU)
    return shardtrain.shard(plain, units=[Block], transport=away, **options), resident


@pytest.mark.parametrize("precision", [None, Precision(torch.bfloat16, torch.float32, torch.float32)])
@each_rank(1, 3, transport="auto")
def test_it_changes_no_bit(precision: Precision | None) -> None:
    """Micro-batches of which all or only the last are reduced, and clipping."""
    model, resident = both(precision=precision)
    assert train_in_micro_batches(model) == train_in_micro_batches(resident)
    assert_at_rest(model)
    states = [shardtrain.full_state_dict(each) for each in (model, resident)]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    for each in (model, resident):
        for number in range(2):
            classify(each, number).backward()
    for ours, theirs in zip(model.parameters(), resident.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@each_rank(3, transport="auto")
def test_averages_and_checkpoints(tmp_path: Path) -> None:
    model, resident = both()
    adamw = partial(torch.optim.AdamW, lr=0.01, fused=True)
    optimizer, other = adamw(model.parameters()), adamw(resident.parameters())
    train(model, optimizer, 2)
    train(resident, other, 2)
    ema = Ema(model, 0.5)
    train(model, optimizer, 1, start=2)
    ema.update(1)
    shardtrain.checkpoint.save(tmp_path / "saved", model, optimizer)
    shardtrain.checkpoint.load(tmp_path / "saved", resident, other)
    with ema.swapped():
        model(images(0)[0])
    assert train(model, optimizer, 2, start=3) == train(resident, other, 2, start=3)
    ends = [shardtrain.full_state_dict(each) for each in (model, resident)]
    assert all(torch.equal(*(end[name] for end in ends)) for name, _ in model.named_parameters())


def test_a_run_adds_up_where_units_compute() -> None:
    """Not where shards lie."""
    raw = compose(["+recipe=resnet", "model=squeezenet1_1", "data.image_size=32"])
    assert raw is not None
    job, _ = build(from_hydra(raw), 0, 1, CPU)
    elsewhere = torch.device("meta")
    window = StepMetrics(job._replace(device=elsewhere))
    with elsewhere:
        images, labels = torch.zeros(3, 1, 32, 32), torch.zeros(3, dtype=torch.int64)
        window.add(images, torch.zeros(()), torch.zeros(3, 10), labels)
    assert window.sums.device == elsewhere


@each_rank(2)
def test_on_the_cpu_there_is_nothing_to_offload() -> None:
    model = shard(OddNet(), units=[Block], offload=True)
    assert not isinstance(shardtrain.introspect(model).transport, comm.Offloaded)

"""Offloaded shards. The CPU stands in for the device, with memory of its own: CUDA's path but for streams."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardtrain
from shardtrain import Precision, comm
from shardtrain.engine.hooks import engine_of
from shardtrain.job.build import build
from shardtrain.job.config import from_hydra
from shardtrain.job.hydra_app import compose
from shardtrain.monitor import StepMetrics
from shardtrain.optim import Ema

from pool import each_rank
from small import Block, OddNet, assert_at_rest, assert_same_parameters, images, sgd, shard, train

Ranks = Callable[..., list[Any]]
CPU = torch.device("cpu")
every = pytest.mark.parametrize("world", [1, 2, 3, pytest.param(4, marks=pytest.mark.long)])


def offloaded(module: nn.Module, **options: Any) -> nn.Module:
    return shardtrain.shard(
        module, units=[Block], transport=comm.Offloaded(comm.open_transport(), CPU), **options
    )


def both(**options: Any) -> tuple[nn.Module, nn.Module]:
    """The same model offloaded, and over messages."""
    torch.manual_seed(0)
    plain = OddNet()
    resident = shardtrain.shard(copy.deepcopy(plain), units=[Block], transport="process_group", **options)
    return offloaded(plain, **options), resident


@each_rank(1, 2, 3, 4, transport="auto")
def test_training_equals_ddp() -> None:
    torch.manual_seed(0)
    plain = OddNet()
    replica = nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    model = offloaded(plain)
    assert train(model, sgd(model)) == pytest.approx(train(replica, sgd(replica)), rel=1e-5)
    assert_same_parameters(model, replica)
    for unit in engine_of(model).units:
        for segment in unit.segments:
            assert segment.wire.untyped_storage().data_ptr() != segment.full.untyped_storage().data_ptr()


def equals_resident(precision: Precision | None, accumulate: str, clip: bool) -> None:
    """Losses, gradients and parameters, bit for bit; fused AdamW."""
    ends = []
    for model in both(precision=precision):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        losses, norms = [], []
        for step in range(3):
            for micro in range(2):
                waits = accumulate == "no_sync" and micro == 0
                with shardtrain.no_sync(model) if waits else contextlib.nullcontext():
                    x, y = images(2 * step + micro)
                    loss = F.cross_entropy(model(x).float(), y)
                    (loss / 2).backward()
                losses.append(loss.item())
            if clip:
                norms.append(shardtrain.clip_grad_norm_(model, 0.1).item())
            with shardtrain.unsharded(model, grads=True):
                grads = {name: param.grad.clone() for name, param in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
        ends.append((losses, norms, grads, shardtrain.full_state_dict(model)))
        assert_at_rest(model)
    (losses, norms, grads, state), other = ends
    assert (losses, norms) == other[:2]
    assert all(torch.equal(grads[name], other[2][name]) for name in grads)
    assert all(torch.equal(state[name], other[3][name]) for name in state)


@every
@pytest.mark.parametrize("precision", [None, Precision(torch.bfloat16, reduce=torch.float32)])
@pytest.mark.parametrize("accumulate", ["no_sync", "reduce every time"])
def test_it_changes_no_bit(on_ranks: Ranks, world: int, precision: Precision | None, accumulate: str) -> None:
    on_ranks(world, equals_resident, precision, accumulate, world != 3)


def saves(folder: str) -> None:
    model, resident = both()
    optimizer, other = sgd(model), sgd(resident)
    train(model, optimizer, 2)
    train(resident, other, 2)
    ema = Ema(model, 0.5)
    train(model, optimizer, 1, start=2)
    ema.update(1)
    shardtrain.checkpoint.save(Path(folder) / "saved", model, optimizer)
    shardtrain.checkpoint.load(Path(folder) / "saved", resident, other)
    with ema.swapped():
        model(images(0)[0])
    assert train(model, optimizer, 2, start=3) == train(resident, other, 2, start=3)
    assert_same_parameters(model, resident_whole(resident), tolerance=0)


def resident_whole(resident: nn.Module) -> nn.Module:
    plain = OddNet()
    plain.load_state_dict(shardtrain.full_state_dict(resident))
    return plain


@pytest.mark.parametrize("world", [1, 3])
def test_averages_and_checkpoints(on_ranks: Ranks, tmp_path: Path, world: int) -> None:
    on_ranks(world, saves, str(tmp_path))


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
    assert not isinstance(engine_of(model).transport, comm.Offloaded)

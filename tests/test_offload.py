"""Offloaded shards. The CPU stands in for the device, with memory of its own: CUDA's path but for streams."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardtrain
from shardtrain import Precision, comm
from shardtrain.job.build import build
from shardtrain.job.config import from_hydra
from shardtrain.job.hydra_app import compose
from shardtrain.monitor import StepMetrics
from shardtrain.optim import Ema

from pool import each_rank
from small import Block, OddNet, assert_at_rest, classify, images, shard, train, train_in_micro_batches

CPU = torch.device("cpu")


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

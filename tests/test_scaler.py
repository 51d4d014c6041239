"""fp16: the same decisions on all ranks, the updates of unscaled training, and runs with a scaled loss."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardtrain
from shardtrain import GradScaler, Precision
from shardtrain.train.saving import Saver

from pool import each_rank
from small import shard
from tiny import result_of, run

FP16 = Precision(param=torch.float16, output=torch.float32)


def sharded(fused: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model = shard(net, units=[nn.Linear], precision=FP16)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)


def backward(model: nn.Module, step: int, scaler: GradScaler) -> None:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    scaler.scale(model(torch.randn(4, 5, generator=generator)).square().mean()).backward()


def update(optimizer: torch.optim.Optimizer, scaler: GradScaler) -> None:
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@pytest.mark.parametrize(("fused", "clip"), [(False, False), (True, False), (False, True)])
@each_rank(3)
def test_scaling_changes_no_update(fused: bool, clip: bool) -> None:
    """A power of two as scale changes no bit of what does not overflow."""
    ends = []
    for scale in (1.0, 2.0**10):
        scaler = GradScaler("cpu", init_scale=scale)
        model, optimizer = sharded(fused)
        for step in range(4):
            backward(model, step, scaler)
            if clip:
                scaler.unscale_(optimizer)
                shardtrain.clip_grad_norm_(model, 0.05)
            update(optimizer, scaler)
        ends.append(shardtrain.full_state_dict(model))
    for name, value in ends[0].items():  # subnormal fp16 has fewer bits
        torch.testing.assert_close(ends[1][name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
@each_rank(3)
def test_all_ranks_skip_a_step_that_overflows_on_one(fused: bool) -> None:
    """The last parameter overflows in the second step; only the last of three ranks owns a part of it."""
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=2)
    model, optimizer = sharded(fused)
    seen = []
    for step in range(4):
        before = shardtrain.full_state_dict(model)
        backward(model, step, scaler)
        last = list(model.parameters())[-1]
        if step == 1 and last.grad is not None and last.grad.numel():
            last.grad[-1] = torch.inf
        update(optimizer, scaler)
        after = shardtrain.full_state_dict(model)
        moved = any(not torch.equal(before[name], after[name]) for name in before)
        seen.append((scaler.get_scale(), moved))
    assert seen == [(8.0, True), (4.0, False), (4.0, True), (8.0, True)]


TINY = """
    model=vit_cifar model.layers=1 model.heads=1 model.width=64 model.mlp_width=64 augment=none
    data=fake data.image_size=8 data.train_images=40 data.val_images=8 parallel.precision=fp16
    train.batch_size=4 train.epochs=1 train.log_every=1 optim.lr=0.01 sched=constant
    checkpoint.every_steps=1 monitor.tensorboard=false
"""


def scales(folder: Path, max_steps: int) -> list[float]:
    """Train, and return the scales that the run's checkpoints hold."""
    found = []
    save = Saver._save

    def saved(saver: Saver, step: int) -> None:
        found.append(saver._job.scaler.get_scale())
        save(saver, step)

    with patch.object(Saver, "_save", saved):
        run(str(folder), *TINY.split(), f"train.max_steps={max_steps}")
    return found


@each_rank(2, transport="auto")
def test_a_run_in_fp16_scales_its_loss(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    found = scales(whole, 6)
    assert found[0] < 65536, found  # the first step overflowed, which is no failure
    assert len(set(found)) < 6, found  # others did not
    assert scales(parts, 3) + scales(parts, 6) == found
    assert result_of(whole)["train/loss"] == result_of(parts)["train/loss"]

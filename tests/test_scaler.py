"""fp16: the same decisions on all ranks, the updates of unscaled training, and runs with a scaled loss."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import shardtrain
from shardtrain import GradScaler, Precision, comm
from shardtrain.job.config import from_hydra
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.hydra_app import compose
from shardtrain.job.launch import Context
from shardtrain.train.loop import train
from shardtrain.train.saving import Saver

from pool import each_rank
from small import images, shard

Ranks = Callable[..., list[Any]]
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


def overflows(fused: bool) -> list[tuple[float, bool]]:
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
    return seen


@pytest.mark.parametrize("fused", [False, True])
def test_all_ranks_skip_a_step_that_overflows_on_one(ranks: Ranks, fused: bool) -> None:
    seen = ranks(3, overflows, fused)
    assert seen == [[(8.0, True), (4.0, False), (4.0, True), (8.0, True)]] * 3


@each_rank(1, 2)
def test_accumulation_adds_up_in_the_dtype_of_the_reduction() -> None:
    """fp16 gradients of micro-batches are added up in the dtype of the reduction, here fp32."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(75, 9), nn.Tanh(), nn.Linear(9, 5))
    low = [param.detach().half().requires_grad_() for param in plain.parameters()]
    model = shard(plain, units=[nn.Linear], precision=Precision(torch.float16, torch.float32, torch.float32))
    total = [torch.zeros(param.shape) for param in low]
    for micro in range(3):
        x, y = images(micro)
        hidden = torch.tanh(F.linear(x.half().flatten(1), low[0], low[1]))
        loss = F.cross_entropy(F.linear(hidden, low[2], low[3]).float(), y)
        for into, grad in zip(total, torch.autograd.grad(loss, low), strict=True):
            into.add_(grad)
        with shardtrain.no_sync(model) if micro < 2 else contextlib.nullcontext():
            F.cross_entropy(model(x), y).backward()
    with shardtrain.unsharded(model, grads=True):
        for param, expected in zip(model.parameters(), total, strict=True):
            dist.all_reduce(expected)
            assert torch.equal(param.grad, expected / dist.get_world_size())


TINY = """
    model=vit_cifar model.layers=1 model.heads=1 model.width=64 model.mlp_width=64 augment=none
    data=fake data.image_size=8 data.train_images=40 data.val_images=8 parallel.precision=fp16
    train.batch_size=4 train.epochs=1 train.log_every=1 optim.lr=0.01 sched=constant
    checkpoint.every_steps=1 monitor.progress=none monitor.tensorboard=false monitor.plan=false
"""


def run(folder: Path, *more: str) -> list[float]:
    """Train, and return the scales that the run's checkpoints hold."""
    config = from_hydra(compose([*TINY.split(), *more]))  # type: ignore[arg-type]
    rank_info = RankInfo(comm.rank(), comm.world_size(), comm.rank(), comm.world_size())
    scales = []
    save = Saver._save

    def saved(saver: Saver, step: int) -> None:
        scales.append(saver._job.scaler.get_scale())
        save(saver, step)

    with patch.object(Saver, "_save", saved):
        train(config, Context(rank_info, torch.device("cpu"), folder))
    return scales


def overflows_and_continues(folder: str) -> None:
    whole, parts = Path(folder) / "whole", Path(folder) / "parts"
    scales = run(whole, "train.max_steps=8")
    assert scales[0] < 65536, scales  # the first step overflowed, which is no failure
    assert len(set(scales)) < 8, scales  # others did not
    assert run(parts, "train.max_steps=4") + run(parts, "train.max_steps=8") == scales


def test_a_run_in_fp16_scales_its_loss(on_ranks: Ranks, tmp_path: Path) -> None:
    on_ranks(2, overflows_and_continues, str(tmp_path))
    whole, parts = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "parts"))
    assert whole["train/loss"] == parts["train/loss"]

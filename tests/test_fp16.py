"""fp16: gradients of several micro-batches, and the training program with a scaled loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import shardtrain
from shardtrain import Precision, comm
from shardtrain.job.config import from_hydra
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.hydra_app import compose
from shardtrain.job.launch import Context
from shardtrain.train.loop import train
from shardtrain.train.saving import Saver

from small import images, shard

Ranks = Callable[..., list[Any]]


def accumulates() -> None:
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
        if micro < 2:
            with shardtrain.no_sync(model):
                F.cross_entropy(model(x), y).backward()
        else:
            F.cross_entropy(model(x), y).backward()
    with shardtrain.unsharded(model, grads=True):
        for param, expected in zip(model.parameters(), total, strict=True):
            torch.distributed.all_reduce(expected)
            assert torch.equal(param.grad, expected / torch.distributed.get_world_size())


def test_accumulation_adds_up_in_the_dtype_of_the_reduction(ranks: Ranks) -> None:
    for world in (1, 2):
        ranks(world, accumulates)


TINY = (
    "model=vit_cifar",
    "model.layers=1",
    "model.heads=1",
    "model.width=64",
    "model.mlp_width=64",
    "data=fake",
    "data.image_size=8",
    "data.train_images=40",
    "data.val_images=8",
    "augment=none",
    "parallel.precision=fp16",
    "train.batch_size=4",
    "train.epochs=1",
    "train.log_every=1",
    "optim.lr=0.01",
    "sched=constant",
    "checkpoint.every_steps=1",
    "monitor.progress=none",
    "monitor.tensorboard=false",
    "monitor.plan=false",
)


def run(folder: Path, *more: str) -> list[float]:
    """The scales that the run's checkpoints hold."""
    config = from_hydra(compose([*TINY, *more]))  # type: ignore[arg-type]
    place = RankInfo(comm.rank(), comm.world_size(), comm.rank(), comm.world_size())
    scales = []
    save = Saver._save

    def saved(saver: Saver, step: int) -> None:
        scales.append(saver._job.scaler.get_scale())
        save(saver, step)

    Saver._save = saved  # type: ignore[method-assign]
    try:
        train(config, Context(place, torch.device("cpu"), folder))
    finally:
        Saver._save = save  # type: ignore[method-assign]
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

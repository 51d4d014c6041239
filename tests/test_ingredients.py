"""What recipes are made of, each against a plain single-process reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

import shardtrain
from shardtrain import checkpoint, comm
from shardtrain.job.build import loss_of, lr_factor
from shardtrain.job.config import Constant, Cosine, Linear, Sched, Steps
from shardtrain.job.data import Batch, Share
from shardtrain.job.data.mixing import Draws, Mix
from shardtrain.job.evaluate import evaluate
from shardtrain.optim import Ema

import small
from pool import each_rank
from small import Block, OddNet, sgd, shard, train


def go_through_a_checkpoint(folder: Path, model: nn.Module, optimizer: Any, ema: Ema) -> None:
    """Saves, forgets the averages, and loads them bit for bit."""
    checkpoint.save(folder, model, optimizer, extra=ema.state(), averages=ema.averages)
    kept = [*ema.averages.values(), *ema.state()["own"]]
    before = [average.clone() for average in kept]
    for average in kept:
        average.zero_()
    ema.restore(checkpoint.load(folder, model, optimizer, averages=ema.averages), comm.world_size())
    assert all(torch.equal(*pair) for pair in zip(before, kept, strict=True))


@each_rank(1, 3)
def test_an_average_of_shards_is_that_of_full_states(tmp_path: Path) -> None:
    """Parameters and buffers, through a checkpoint, and how it is evaluated."""
    model = shard(OddNet(), units=[Block])
    optimizer, ema = sgd(model), Ema(model, 0.8, every=2, after=2)
    expected: dict[str, torch.Tensor] = {}
    for step in range(1, 8):
        train(model, optimizer, 1, start=step)
        ema.update(step)
        if step == 5:
            go_through_a_checkpoint(tmp_path / "checkpoint", model, optimizer, ema)
        if step % 2 == 0:
            for name, value in shardtrain.full_state_dict(model).items():
                averaged = step > 2 and value.is_floating_point()
                expected[name] = 0.8 * expected[name] + 0.2 * value if averaged else value.clone()
    raw = shardtrain.full_state_dict(model)
    with ema.swapped():
        for name, value in shardtrain.full_state_dict(model).items():
            if value.is_floating_point():
                torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    assert all(torch.equal(raw[name], value) for name, value in shardtrain.full_state_dict(model).items())
    images, labels = small.images(0, rank=0)
    scores = evaluate(model, [Batch(images, labels, len(images))], ema=ema)
    plain = OddNet().eval()
    plain.load_state_dict(expected)
    assert scores.ema is not None
    assert scores.ema.loss == pytest.approx(F.cross_entropy(plain(images), labels).item(), rel=1e-5)
    assert scores.scores != scores.ema


@each_rank(2, transport="auto")
def test_a_rank_that_owns_nothing_averages_nothing() -> None:
    model = shard(nn.Linear(3, 2, bias=False), layout="whole")
    ema = Ema(model, 0.5)
    ema.update(1)
    held = torch.tensor(sum(average.numel() for average in ema.averages.values()))
    assert held in (0, 6)
    assert comm.all_reduce(held) == 6


def test_what_an_average_refuses(tmp_path: Path) -> None:
    model = shardtrain.shard(OddNet())
    with pytest.raises(ValueError, match=r"decay=1, every=1, after=0: expected \[0, 1\), at least 1 and 0"):
        Ema(model, 1)
    checkpoint.save(tmp_path / "x", model)
    with pytest.raises(ValueError, match="it was saved without moving averages of the parameters"):
        checkpoint.load(tmp_path / "x", model, averages=Ema(model, 0.9).averages)


def mixed_by_hand(
    images: torch.Tensor, labels: torch.Tensor, draws: Draws, classes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Image after image, by the formulas of the papers as torchvision has them."""
    height, width = images.shape[2:]
    mixed, soft = images.clone(), torch.zeros(len(images), classes)
    for i in range(len(images)):
        j, kept = i ^ 1, float(draws.kept[i])
        if draws.boxed[i]:
            r = 0.5 * math.sqrt(1 - kept)
            y, x = (int(float(draws.centres[i, axis]) * size) for axis, size in ((0, height), (1, width)))
            y1, y2 = max(0, y - int(r * height)), min(height, y + int(r * height))
            x1, x2 = max(0, x - int(r * width)), min(width, x + int(r * width))
            mixed[i, :, y1:y2, x1:x2] = images[j, :, y1:y2, x1:x2]
            kept = 1 - (y2 - y1) * (x2 - x1) / (height * width)
        else:
            mixed[i] = kept * images[i] + (1 - kept) * images[j]
        soft[i, labels[i]] += kept
        soft[i, labels[j]] += 1 - kept
    return mixed, soft


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.2, 0.0), (0.0, 1.0), (0.2, 1.0)])
def test_mixing_is_that_of_the_papers(mixup: float, cutmix: float) -> None:
    mix = Mix(mixup, cutmix, 7, Share(24, 1, 0, 1), seed=3)
    images, labels = torch.randn(24, 2, 9, 11), torch.arange(24) % 7
    draws = mix.draws(5)
    assert draws.boxed.any().item() == (cutmix > 0)
    assert draws.boxed.all().item() == (mixup == 0)
    found, expected = mix(images, labels, draws), mixed_by_hand(images, labels, draws, 7)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)
    assert not torch.equal(draws.kept, mix.draws(6).kept)


def test_an_image_without_a_partner_stays_as_it_is() -> None:
    mix = Mix(1.0, 0, 3, Share(3, 1, 0, 1), 0)
    images, labels = torch.randn(3, 1, 2, 2), torch.tensor([0, 1, 2])
    mixed, soft = mix(images, labels, mix.draws(0))
    assert torch.equal(mixed[2], images[2])
    assert soft[2].tolist() == [0, 0, 1]
    assert not torch.equal(mixed[0], images[0])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_of_hard_and_soft_labels(smoothing: float) -> None:
    logits, labels = torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 4, 0])
    one_hot = F.one_hot(labels, 5).float()
    for name in ("cross_entropy", "bce"):
        loss = loss_of(name, smoothing)
        torch.testing.assert_close(loss(logits, labels), loss(logits, one_hot))
    answers = one_hot * (1 - smoothing) + smoothing / 5
    wanted = -(answers * F.logsigmoid(logits) + (1 - answers) * F.logsigmoid(-logits)).mean()
    torch.testing.assert_close(loss_of("bce", smoothing)(logits, labels), wanted)
    half = loss_of("cross_entropy", smoothing)(logits, 0.5 * one_hot + 0.5 * one_hot.roll(1, 1))
    parts = [loss_of("cross_entropy", smoothing)(logits, each) for each in (labels, (labels + 1) % 5)]
    torch.testing.assert_close(half, (parts[0] + parts[1]) / 2)


def test_schedules_are_torchs() -> None:
    """Each epoch of 10 steps against torch's scheduler of the same name, stepped once an epoch or step."""

    def factors(sched: Sched, steps: int) -> list[float]:
        return [lr_factor(sched, steps, 10)(step) for step in range(steps)]

    def theirs(make: Callable[..., LRScheduler], *arguments: float, steps: int) -> list[float]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule, rates = make(optimizer, *arguments), []
        for _ in range(steps):
            rates.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        return rates

    step = factors(Steps(name="step", epochs=(3.0, 6.0), factor=0.1, warmup_epochs=0.0), 90)
    for epoch, rate in enumerate(theirs(lr_scheduler.StepLR, 3, 0.1, steps=9)):
        assert step[10 * epoch : 10 * epoch + 10] == pytest.approx([rate] * 10)
    linear = factors(Linear(name="linear", warmup_epochs=2.0, final_lr=0.0), 100)
    assert linear[20::16] == pytest.approx(np.linspace(1, 0, 6)[:5])
    assert linear[:3] == pytest.approx([1 / 21, 2 / 21, 3 / 21])
    cosine = factors(Cosine(name="cosine", warmup_epochs=0.0, final_lr=0.1), 20)
    assert cosine == pytest.approx(theirs(lr_scheduler.CosineAnnealingLR, 20, 0.1, steps=20))
    halfway = factors(Constant(name="constant", warmup_epochs=9.0), 8)  # what a warm-up takes at most
    assert halfway == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1])

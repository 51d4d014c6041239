"""The job that a configuration builds, the loop, and evaluation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor

from shardtrain.config.config import Config
from shardtrain.config.errors import UserError
from shardtrain.job.build import build

import tiny
from pool import each_rank
from tiny import CPU

TWO_STEPS = ("data.limit=48", "train.max_steps=2", "train.log_every=1", "checkpoint.keep=0")
TWO_STEPS += ("monitor.writers=[]",)


def configure(*arguments: str) -> Config:
    return tiny.configure(*tiny.SHORT, *TWO_STEPS, *arguments)


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    return tiny.run(str(folder), *TWO_STEPS, *arguments)


@each_rank(2, transport="auto")
def test_an_optimizer_that_is_refused_in_its_first_step_is_a_mistake(tmp_path: Path) -> None:
    told = r"^optim\._target_=torch\.optim.*\.Adafactor: Adafactor cannot step on a sharded model: "
    with pytest.raises(UserError, match=told):
        run(tmp_path, "optim._target_=torch.optim.Adafactor")


@pytest.mark.smoke
def test_repetitions_are_exact_and_settings_count(tmp_path: Path) -> None:
    """A seed changes much, bf16 little, and activations that are computed again change nothing."""
    again = "parallel.activation_checkpoint=true"
    bf16 = "parallel.precision=bf16"
    settings = ("seed=0", "seed=0", again, "seed=1", bf16)
    results = [run(tmp_path / str(n), setting) for n, setting in enumerate(settings)]
    tags = ("loss/train", "loss/val", "grad_norm")
    first, second, recomputed, other, rounded = ([result[tag] for tag in tags] for result in results)
    assert first == second == recomputed
    assert first != other
    assert rounded[0] == pytest.approx(first[0], rel=0.05)
    assert rounded[0] != first[0]


@pytest.mark.long
def test_compiling_without_a_compiler_is_a_mistake() -> None:
    # Not a monkeypatch, whose end these settings do not survive.
    missing = inductor.patch({"cpp.cxx": ("no-such-compiler",)})
    with missing, pytest.raises(UserError, match=r"needs a C\+\+ compiler, and there is none: install g\+\+"):
        build(configure("parallel.compile=true"), 0, 1, CPU)


@pytest.mark.long
def test_channels_last_reaches_the_activations() -> None:
    job, _ = build(configure("train.channels_last=true"), 0, 1, CPU)
    seen: list[bool] = []
    job.model.layer2.register_forward_hook(
        lambda module, inputs, output: seen.append(output.is_contiguous(memory_format=torch.channels_last))
    )
    job.model(next(iter(job.train)).images)
    assert seen == [True]

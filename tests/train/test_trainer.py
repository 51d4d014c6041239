"""Hooks of a trainer: when they are called, on which ranks, and how they end a run."""

from pathlib import Path
from typing import Any

import pytest

from shardtrain import comm
from shardtrain.config.errors import UserError
from shardtrain.job.evaluation import Evaluation
from shardtrain.train import Hook
from shardtrain.train.trainer import Trainer

import tiny
from pool import each_rank
from tiny import composed

QUIET = (
    "data.limit=48",
    "train.log_every=1",
    "monitor.writers=[]",
    "checkpoint.keep=0",
    f"allow=[{__name__}]",
)
CALLS: list[tuple[str, int]] = []


def run(folder: Path, hook: str, *arguments: str) -> dict[str, Any]:
    return tiny.run(str(folder), *QUIET, f"train.hooks=[{__name__}.{hook}]", *arguments)


class Noting(Hook):
    def before_fit(self, trainer: Trainer) -> None:
        CALLS.append(("begin", trainer.job.first_step))

    def after_step(self, trainer: Trainer, step: int, finite: bool) -> None:
        assert finite
        assert all(param.grad is not None for param in trainer.model.parameters())
        assert trainer.monitor.scalars["grad_norm"] == trainer.norm.item()
        CALLS.append(("step", step))

    def after_evaluation(self, trainer: Trainer, step: int, evaluation: Evaluation) -> None:
        assert trainer.monitor.scalars["loss/val"] == evaluation.scores.loss
        CALLS.append(("evaluation", step))

    def after_fit(self, trainer: Trainer) -> None:
        CALLS.append(("end", comm.world_size()))


@each_rank(2, transport="auto")
def test_hooks_are_called_after_each_step_and_evaluation_on_every_rank(tmp_path: Path) -> None:
    CALLS.clear()
    result = run(tmp_path, "Noting", "train.max_steps=2")
    assert result["status"] == "finished"
    assert CALLS == [("begin", 0), ("step", 1), ("step", 2), ("evaluation", 2), ("end", 2)]


class Ending(Hook):
    def after_step(self, trainer: Trainer, step: int, finite: bool) -> None:
        trainer.end = "enough"


@each_rank(1)
def test_a_hook_ends_the_run(tmp_path: Path) -> None:
    result = run(tmp_path, "Ending", "train.max_steps=4")
    assert (result["status"], result["step"]) == ("finished", 1)
    assert "stopped after step 1: enough" in (tmp_path / "log.txt").read_text()


class Raising(Hook):
    def after_step(self, trainer: Trainer, step: int, finite: bool) -> None:
        raise OverflowError("too much")


@each_rank(2, transport="auto")
def test_what_a_hook_raises_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(OverflowError, match="too much"):
        run(tmp_path, "Raising", "train.max_steps=4")


def test_a_hook_has_a_package() -> None:
    told = r"train.hooks=\[Noting\]: expected PACKAGE.CLASS, with allow=\[PACKAGE\]"
    with pytest.raises(UserError, match=told):
        composed("+recipe=resnet", "train.hooks=[Noting]")

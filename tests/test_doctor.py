"""The doctor: sharded beside unsharded, planted faults named, and what it says of an installation."""

import re
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import doctor as program
import pytest
import torch
from doctor import Twins, difference

from shardtrain import comm
from shardtrain.config.errors import UserError
from shardtrain.config.format import counted
from shardtrain.job.build import Job, build
from shardtrain.recipes import models

from pool import each_rank
from tiny import ALONE, CPU, VIT, composed, over_transport, small_model

TINY = ["+recipe=resnet", "data=fake", "data.limit=48", "data.image_size=8", "train.batch_size=12"]
LOW = ["train.accumulate=2"]
MESSAGES = "SHARDTRAIN_TRANSPORT=process_group"
LONG = pytest.mark.long


def examined(fault: Callable[[Job], object] | None, *arguments: str) -> str:
    """What the doctor says of two steps with dropout and BatchNorm, with a ``fault`` on rank 1."""
    with patch.object(models, "_build", small_model), over_transport(arguments) as words:
        config = composed(*TINY, "model=mobilenet_v3_small", *words)
        job, config = build(config, comm.rank(), comm.world_size(), CPU)
        if comm.rank() == 1 and fault is not None:
            fault(job)
        return Twins(job, config).examine(2)[1]


@pytest.mark.parametrize(
    ("world", "arguments", "how"),
    [
        (1, [*LOW, "optim=adamw"], "bit for bit, updates to 1e-06"),
        (2, ["optim=adamw", "train.channels_last=true"], "bit for bit, "),
        pytest.param(3, [MESSAGES, *LOW], "bit for bit, ", marks=LONG),
        (2, ["parallel.precision=bf16", "train.clip_grad_norm=0.1"], "bit for bit, "),
        (2, [*LOW, "parallel.precision=bf16"], "to 0.05, updates to 0.05"),
        pytest.param(2, [*LOW, "parallel.precision=fp16"], "to 0.01, updates to 0.01", marks=LONG),
    ],
)
def test_sharding_changes_nothing(on_ranks: Any, world: int, arguments: list[str], how: str) -> None:
    said = on_ranks(world, examined, None, *arguments)
    assert all(text == said[0] for text in said)
    equal = f"ok       2 steps sharded over {counted(world, 'rank')} equal unsharded ones"
    assert said[0].startswith(f"{equal} (outputs and gradients {how}")


def test_traffic_that_rounds_is_not_compared() -> None:
    settings = program.read([*TINY, "parallel.reduce=bf16"], speak=False)
    with pytest.raises(UserError, match=r"reduce=bf16: the doctor compares with an unsharded model"):
        program.examine(settings, ALONE, CPU)


def weight(job: Job) -> torch.Tensor:
    return job.model.get_parameter("1.0.weight")


ONE_ELEMENT = torch.zeros(9, 9, 3, 3)
ONE_ELEMENT[3, 0, 1, 2] = 0.25
# What the doctor says, and what was done to the job of rank 1.
FAULTS: dict[str, Callable[[Job], object]] = {
    r"rank 1: step 1, own gradient of 1\.0\.weight in unit 1\.0: Mismatched elements: 1 / 729 .*; Greatest "
    r"absolute difference: 0\.2[45]\d* at index \(3, 0, 1, 2\)": (
        lambda job: weight(job).register_hook(lambda gradient: gradient + ONE_ELEMENT)
    ),
    r"step 1, parameter of 1\.0\.weight in unit 1\.0: Mismatched": (
        lambda job: job.optimizer.register_step_post_hook(lambda *_: weight(job).data.add_(1.0))
    ),
    r"rank 1: step 1, output of 1\.0 in unit 1\.0: Mismatched": (
        lambda job: job.model.get_submodule("1.0").register_forward_hook(lambda *call: call[2] * 1.0001)
    ),
    r"step 0, initial value of 1\.0\.weight in unit 1\.0: Mismatched ": (
        lambda job: weight(job).data.as_subclass(torch.Tensor)[5].fill_(0.25)
    ),
}


@pytest.mark.parametrize("where", FAULTS)
@each_rank(2, transport="auto")
def test_a_planted_fault_is_found_and_named(where: str) -> None:
    # With activation checkpointing blocks are units, in a model of any size.
    said = examined(FAULTS[where], MESSAGES, "parallel.activation_checkpoint=true")
    assert re.match(f"failed   {where}", said), said


def test_a_gradient_that_is_lost_is_named() -> None:
    with patch.object(models, "_build", small_model):
        job, config = build(composed(*TINY, "model=mobilenet_v3_small"), 0, 1, CPU)
        twins = Twins(job, config)
    with patch.object(twins, "_average", lambda: setattr(weight(job), "grad", None)):
        found = twins.examine(1)[1]
    assert found.startswith("failed   step 1, mean gradient of 1.0.weight in unit the root: Mism"), found


def test_a_difference_counts_beyond_the_tolerance() -> None:
    """The tolerance is a share of the largest expected element, here 3."""
    one = torch.tensor([1.0, -1.0, 0.0, 3.0])
    assert difference(one, torch.tensor([1.0, -1.0, -0.0, 3.0])) == ""
    other = one + torch.tensor([0.0, 0.25, 0.0, 0.0])
    said = "Mismatched elements: 1 / 4 (25.0%); Greatest absolute difference: 0.25 at index (1,)"
    assert difference(other, one).startswith(said)
    assert difference(other, one, tolerance=0.08)
    assert difference(other, one, tolerance=0.09) == ""
    nan = torch.tensor([1.0, -1.0, 0.0, torch.nan])  # equals NaN and nothing else
    assert difference(nan, nan.clone()) == ""
    for found, expected in ((nan, one), (one, nan)):
        assert difference(found, expected, tolerance=0.1).startswith("Mismatched elements: 1 / 4")


def test_the_program_says_what_it_found(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    settings = program.read([*TINY, *VIT, "steps=2", "train.max_steps=1"], False)  # the run has fewer steps
    program.examine(settings, ALONE, CPU)
    assert capsys.readouterr().out.startswith("ok       1 steps sharded over 1 rank equal unsharded ones")
    monkeypatch.setattr(Twins, "examine", lambda *_: (False, "failed   it is broken: mend it"))
    with pytest.raises(SystemExit) as leaving:
        program.examine(settings, ALONE, CPU)
    assert leaving.value.code == 1
    assert capsys.readouterr().out == "failed   it is broken: mend it\n"

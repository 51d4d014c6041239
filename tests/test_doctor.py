"""The doctor: sharded beside unsharded, planted faults named, and what it says of an installation."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardtrain import comm
from shardtrain.doctor import FAILED, OK, WARNING, Finding, shared
from shardtrain.doctor import __main__ as program
from shardtrain.doctor.twin import Twins, difference
from shardtrain.job.build import Job, build
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.format import counted
from shardtrain.job.schema import UserError
from shardtrain.plan.__main__ import read
from shardtrain.plan.simulate import simulate

from pool import each_rank
from tiny import CPU, composed

HERE = RankInfo(0, 1, 0, 1)
TINY = ["+recipe=resnet", "data=fake", "data.train_images=48", "data.image_size=8", "train.batch_size=12"]
SQUEEZENET = ["model=squeezenet1_1", "data.image_size=32"]
LOW = [*SQUEEZENET, "train.accumulate=2"]
MESSAGES, LONG = "parallel.transport=process_group", pytest.mark.long


def examined(fault: Callable[[Job], None] | None, *arguments: str) -> str:
    """What the doctor says of two steps, with a ``fault`` on rank 1."""
    job, config = build(composed(*TINY, *arguments), comm.rank(), comm.world_size(), CPU)
    if comm.rank() == 1 and fault is not None:
        fault(job)
    return str(Twins(job, config).examine(2))


def _in_gradient(job: Job) -> None:
    def change(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[3, 0, 1, 2] += 0.001
        return gradient

    job.model.get_parameter("layer2.0.conv1.weight").register_hook(change)


def _in_update(job: Job) -> None:
    def change(optimizer: torch.optim.Optimizer, *_: object) -> None:
        job.model.get_parameter("layer4.1.conv2.weight").data[-1] += 1.0

    job.optimizer.register_step_post_hook(change)


def _in_forward(job: Job) -> None:
    job.model.get_submodule("layer3.1.bn2").register_forward_hook(lambda *found: found[2] * 1.0001)


def _at_start(job: Job) -> None:
    job.model.get_parameter("layer4.0.conv2.weight").data[5] = 0.25


@pytest.mark.parametrize(
    ("world", "arguments", "how"),
    [
        (1, ["model=resnet18", "train.accumulate=2", "optim=adamw"], "bit for bit, updates to 1e-06"),
        (2, [*SQUEEZENET, "parallel.transport=shared_memory", "optim=adamw"], "bit for bit, "),
        pytest.param(3, ["model=resnet18", MESSAGES, "train.accumulate=2"], "bit for bit, ", marks=LONG),
        (2, [*SQUEEZENET, "parallel.precision=bf16", "train.clip_grad_norm=0.1"], "bit for bit, "),
        (2, [*LOW, "parallel.precision=bf16"], "to 0.05, updates to 0.05"),
        pytest.param(2, [*LOW, "parallel.precision=fp16"], "to 0.01, updates to 0.01", marks=LONG),
    ],
)
def test_sharding_changes_nothing(on_ranks: Any, world: int, arguments: list[str], how: str) -> None:
    """Dropout and BatchNorm included: squeezenet has the one, resnet18 the other."""
    said = on_ranks(world, examined, None, *arguments)
    assert all(text == said[0] for text in said)
    equal = f"ok       2 steps sharded over {counted(world, 'rank')} equal unsharded ones"
    assert said[0].startswith(f"{equal} (outputs and gradients {how}")


def test_traffic_that_rounds_is_not_compared() -> None:
    with pytest.raises(UserError, match=r"traffic=int8: the doctor compares with an unsharded model"):
        program.read([*TINY, "parallel.traffic=int8"], speak=False)


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        (
            _in_gradient,
            r"rank 1: step 1, own gradient of layer2\.0\.conv1\.weight in unit layer2\.0: "
            r"Mismatched elements: 1 / 73728 .*; Greatest absolute difference: 0\.001\d* at index "
            r"\(3, 0, 1, 2\).*: something on that rank changed it",
        ),
        (_in_update, r"step 1, parameter of layer4\.1\.conv2\.weight in unit layer4\.1: Mismatch.*optimizer"),
        (_in_forward, r"rank 1: step 1, output of layer3\.1 in unit layer3\.1: .* the unit computed with "),
        (_at_start, r"step 0, initial value of layer4\.0\.conv2\.weight in unit layer4\.0: Mismatched "),
    ],
)
@each_rank(2, transport="auto")
def test_a_planted_fault_is_found_and_named(fault: Callable[[Job], None], where: str) -> None:
    """One element of one gradient changed on one rank, and others."""
    said = examined(fault, "model=resnet18", MESSAGES)
    assert re.match(f"failed   {where}", said), said


def test_a_difference_counts_beyond_the_tolerance() -> None:
    """The tolerance is a share of the largest expected element, here 3."""
    one = torch.tensor([1.0, -1.0, 0.0, 3.0])
    assert difference(one, torch.tensor([1.0, -1.0, -0.0, 3.0])) == ""
    other = one + torch.tensor([0.0, 0.25, 0.0, 0.0])
    assert difference(other, one).startswith(
        "Mismatched elements: 1 / 4 (25.0%); Greatest absolute difference: 0.25 at index (1,)"
    )
    assert difference(other, one, tolerance=0.08)
    assert difference(other, one, tolerance=0.09) == ""
    nan = torch.tensor([1.0, -1.0, 0.0, torch.nan])  # equals NaN and nothing else
    assert difference(nan, nan.clone()) == ""
    for found, expected in ((nan, one), (one, nan)):
        assert difference(found, expected, tolerance=0.1).startswith("Mismatched elements: 1 / 4")


@each_rank(3, transport="auto")
def test_what_all_ranks_find_is_said_once() -> None:
    own = Finding(WARNING, "clock is late", "wind it") if comm.rank() else Finding(OK, "clock is right")
    said = [str(finding) for finding in shared([Finding(OK, "same everywhere"), own])]
    everywhere, right = "ok       same everywhere", "ok       rank 0: clock is right"
    assert said == [everywhere, right, "warning  ranks 1, 2: clock is late: wind it"]


def test_a_disk_that_will_not_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed(*TINY, f"run.dir={tmp_path}/outputs/run", "checkpoint.keep=1")
    good = program.check_disk(config, 2**20)
    assert good.verdict == OK
    assert re.fullmatch(rf"{tmp_path} has [\d,]+ MiB free for 3 checkpoints of 1", good.text)
    full = program.check_disk(config, 2**60)
    assert full.verdict == FAILED
    assert full.advice == "free some, lower checkpoint.keep, or choose another run.dir"

    def refuse(dir: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(program.tempfile, "TemporaryFile", refuse)
    assert str(program.check_disk(config, 1)) == (
        f"failed   {tmp_path} cannot be written (Read-only file system): choose another run.dir"
    )
    assert list(tmp_path.iterdir()) == []


def test_what_an_installation_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert program.check_versions().verdict == OK
    monkeypatch.setattr(program, "version", lambda name: "2.9.1")
    old = program.check_versions()
    assert (old.verdict, old.advice) == (FAILED, 'pip install "torch>=2.11"')
    monkeypatch.setattr(program, "SMALLEST_SHM", 1 << 60)
    small = program.check_shared_memory()
    assert small.verdict == WARNING
    assert "give it more with --shm-size" in small.advice
    monkeypatch.delattr(os, "memfd_create", raising=False)
    assert "ranks cannot share memory here" in program.check_shared_memory().text


def test_the_program_says_a_line_per_check(capsys: pytest.CaptureFixture[str]) -> None:
    own = ["steps=2", "train.max_steps=1"]  # the run has fewer steps
    settings = program.read([*TINY, *SQUEEZENET, *own], False)
    assert settings is not None
    program.examine(settings, HERE, CPU)
    torch_said, shared_memory, twin, plan, disk = capsys.readouterr().out.splitlines()
    assert torch_said.startswith("ok       torch ")
    assert "ranks can share memory" in shared_memory
    assert twin.startswith("ok       1 steps sharded over 1 rank")
    planned = r"ok +state and traffic are as planned; peak [\d.]+ MiB, planned [\d.]+ \([-+]0\.\d %\)"
    assert re.match(planned, plan)
    assert " MiB free for 4 checkpoints of 6" in disk  # parameters and momentum


@each_rank(2, transport="auto")
def test_ranks_hold_what_is_planned() -> None:
    config = composed(*TINY, *SQUEEZENET, "ema.decay=0.9")
    job, config = build(config, comm.rank(), comm.world_size(), CPU)
    (said,) = map(str, shared(program.check_plan(job, config)))
    assert re.match(r"ok +rank 0: state and traffic are as planned; peak .* \([-+]\d\.\d %\)", said)
    assert program.checkpoint_bytes(job) == 3 * 4 * 727_626  # parameters, momentum and averages


def test_what_is_not_as_planned_is_said() -> None:
    asked = read([*TINY, *SQUEEZENET, "world_size=2"], False)
    assert asked is not None
    plan = simulate(asked.config, asked.question)
    as_planned = {"parameters": plan.parameters, "optimizer": plan.optimizer}
    more = program.plan_finding(plan, as_planned | plan.sent, 2 * plan.peak)
    assert (more.verdict, more.text[-10:]) == (WARNING, "(+100.0 %)")
    other = program.plan_finding(plan, as_planned | {"optimizer": 7, "all_gather": 8}, plan.peak)
    assert other.verdict == FAILED
    assert other.text == (
        f"other bytes than planned: optimizer 7 for {plan.optimizer:,}; "
        f"all_gather 8 for {plan.sent['all_gather']:,}"
    )


def test_a_failure_ends_with_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([Finding(FAILED, "it is broken", "mend it"), Finding(OK, "that is not")])
    monkeypatch.setattr(program, "findings", lambda *_: found)
    settings = program.read(TINY, False)
    assert settings is not None
    with pytest.raises(SystemExit) as leaving:
        program.examine(settings, HERE, CPU)
    assert leaving.value.code == 1
    assert capsys.readouterr().out == "failed   it is broken: mend it\nok       that is not\n"

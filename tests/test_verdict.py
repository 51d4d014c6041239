"""The end of a run in words, and ranks that are slower than the others."""

from __future__ import annotations

import functools
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shardtrain import comm
from shardtrain.job.config import Config
from shardtrain.job.data import Prepare
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.launch import Context
from shardtrain.monitor.metrics import PHASES, Report, SlowestRank, Spent, slowest
from shardtrain.monitor.tables import end_table, judge, verdict
from shardtrain.monitor.watch import Watch

from tiny import CPU, configure, run


@functools.cache
def configured(*arguments: str) -> Config:
    return configure("train.batch_size=96", "train.eval_every=3", *arguments)


def advice(
    shares: dict[str, float],
    *arguments: str,
    device: str = "cpu",
    ranks: int = 2,
    cores: int = 8,
    **spent: Any,
) -> str:
    found = Spent(**{"steps": 100, "reports": 10, **spent})
    return verdict(shares, found, configured(*arguments), ranks, device, cores)


WAIT = "40 % of the time is waiting for other ranks and their shards: "
SAVE = "9 % of the time is saving checkpoints: "
CHECKPOINT, WAITING = {"checkpoint": 9}, {"waiting": 40}
ADVICE: list[tuple[dict[str, float], str, str]] = [
    ({"data": 68}, "data.workers=2", "68 % of the time is waiting for images: raise data.workers (now 2)"),
    ({"data": 30}, "", "let processes of their own load them, data.workers=2 (now 0)"),
    (
        WAITING,
        "parallel.transport=process_group",
        f"{WAIT}parallel.transport=auto lets the ranks of one host",
    ),
    (WAITING, "parallel.traffic=int8", f"{WAIT}parallel.traffic=null parallel.transport=auto lets the ranks"),
    (WAITING, "cuda", f"{WAIT}parallel.precision=bf16 moves half the bytes"),
    (WAITING, "", f"{WAIT}parallel.reshard_after_forward=false spares backward's gathers, if the memory is"),
    (
        WAITING,
        "parallel.reshard_after_forward=false",
        f"{WAIT}give each rank more to compute, train.batch_size (now 48 images per rank)",
    ),
    (CHECKPOINT, "checkpoint.asynchronous=false", f"{SAVE}checkpoint.asynchronous=true writes them while"),
    (CHECKPOINT, "checkpoint.every_steps=5", f"{SAVE}raise checkpoint.every_steps (now 5)"),
    (CHECKPOINT, "", f"{SAVE}raise checkpoint.every_steps (now once per epoch)"),
    ({"evaluation": 33}, "", "33 % of the time is evaluation: raise train.eval_every (now 3 epochs)"),
    ({"optimizer": 25}, "", "optimizer: one update could serve more images, train.batch_size (now 96)"),
    ({"the rest": 50}, "", "neither steps nor evaluation: reports, train.log_every (now 10)"),
    (
        {"forward": 30, "backward": 60, "data": 4},
        "",
        "90 % of the time is computing: more ranks would share it; nothing else stands out",
    ),
    ({"forward": 90}, "cuda", "90 % of the time is computing: parallel.precision=bf16 computes faster"),
    ({"data": 12, "waiting": 30}, "", "30 % of the time is waiting for other ranks"),
]


@pytest.mark.parametrize(("shares", "setting", "expected"), ADVICE)
def test_the_advice_is_about_what_stands_out_most(
    shares: dict[str, float], setting: str, expected: str
) -> None:
    """``setting``: what the run has on the command line, or its device."""
    arguments, device = ((), setting) if setting == "cuda" else (setting.split(), "cpu")
    assert expected in advice(shares, *arguments, device=device)


def test_waiting_for_a_slow_rank_is_told_as_such() -> None:
    slow = Counter({(1, "data"): 5})
    expected = "shards: rank 1 is slower than the others in data, look there first"
    assert expected in advice({"waiting": 40.0}, slow=slow)
    assert "look there" not in advice({"waiting": 40.0}, slow=Counter({(1, "data"): 4}))


def test_where_every_core_has_a_rank_more_ranks_are_no_advice() -> None:
    found = advice({"forward": 90.0}, cores=2)
    assert found == "90 % of the time is computing: every core has a rank already; nothing else stands out"


def test_few_steps_are_not_judged() -> None:
    assert advice({"data": 90.0}, steps=19) == "19 steps are too few to judge by; from 20 on there is advice"


def test_a_judgement_adds_up_and_is_told_at_the_end() -> None:
    config = configured()
    spent = Spent(since=time.perf_counter() - 10, steps=50, images=600)
    spent.seconds |= {"data": 6.0, "forward": 1.0, "waiting": 1.0}
    found = judge(spent, config, 2, "cpu")
    assert found["run_img_per_s"] == pytest.approx(60, rel=0.1)
    assert sum(found["spent_s"].values()) == pytest.approx(10, rel=0.1)
    assert found["time"] == "data 60 %, forward 10 %, exposed communication 10 %, the rest 20 %"
    table = end_table({"status": "finished", "step": 50, "seconds": 10.0, "run_dir": "there", **found})
    assert "speed     60 img/s over all" in table
    assert "time      data 60 %, forward 10 %" in table
    assert "verdict   60 % of the time is waiting for images" in table


def rows(*busy_ms: dict[str, float]) -> list[dict[str, float]]:
    return [{phase: row.get(phase, 0.0) / 1e3 for phase in PHASES} for row in busy_ms]


def test_the_slowest_rank_is_compared_with_the_median_of_the_others() -> None:
    base = {"data": 1.0, "forward": 30.0, "backward": 60.0, "optimizer": 3.0}
    found = slowest(rows(base, base | {"data": 41.0, "backward": 61.0}, base | {"forward": 31.0}))
    assert found is not None
    assert found.beyond_margin
    assert found.text == (
        "rank 1 is slow: busy 135.0 ms per step, the others 94.5 ms (+43 %), most of it in data (+40.0 ms)"
    )


def test_small_differences_and_single_ranks_are_let_pass() -> None:
    assert slowest(rows({"forward": 10.0})) is None
    for fast, slow in ((10.0, 14.9), (100.0, 119.0)):
        found = slowest(rows({"forward": fast}, {"forward": slow}))
        assert found is not None
        assert found.rank == 1
        assert not found.beyond_margin


def test_a_rank_that_is_slow_twice_is_named_once_until_it_keeps_up(tmp_path: Path) -> None:
    said: list[str] = []
    monitor: Any = SimpleNamespace(say=said.append)
    job: Any = SimpleNamespace(steps=99, steps_per_epoch=3)
    context = Context(RankInfo(0, 2, 0, 2), CPU, tmp_path)
    course = {
        "none": None,
        "slow": SlowestRank(1, "data", 100.0, True, "slow"),
        "slower": SlowestRank(1, "data", 200.0, True, "slower"),
        "elsewhere": SlowestRank(1, "backward", 100.0, True, "elsewhere"),
    }
    reports = "none slow none slow slower slow elsewhere slow none slow none none"
    with Watch(configured(), context, job, SimpleNamespace(), monitor) as watch:  # type: ignore[arg-type]
        for step, what in enumerate(reports.split(), 1):
            watch.step_done(step, Report({}, course[what]))
    assert said == [
        "step 5: slower",
        "step 12: rank 1 keeps up again",
    ]


def with_a_slow_rank(folder: str) -> None:
    """Rank 1 takes long to prepare its batches."""
    prepare = Prepare.__call__

    def slowly(self: Prepare, *arguments: Any) -> torch.Tensor:
        time.sleep(0.25 * comm.rank())
        return prepare(self, *arguments)

    short = ("data.train_images=48", "train.epochs=1", "train.log_every=2", "checkpoint.keep=0")
    with patch.object(Prepare, "__call__", slowly):
        run(folder, *short, "monitor.tensorboard=false")


def test_a_planted_slow_rank_is_named_with_its_phase(on_ranks: Any, tmp_path: Path) -> None:
    on_ranks(2, with_a_slow_rank, str(tmp_path))
    log = (tmp_path / "log.txt").read_text()
    assert "step 4: rank 1 is slow: busy " in log
    assert "most of it in data (+" in log
    assert "ranks/slowest 1 " in log

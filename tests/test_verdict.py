"""The end of a run in words, and ranks that are slower than the others."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shardtrain import comm
from shardtrain.job.data import Prepare
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.launch import Context
from shardtrain.monitor.metrics import PHASES, Report, SlowRank, Spent, slow_rank
from shardtrain.monitor.tables import end_table, judge, verdict
from shardtrain.monitor.timeline import Watch

from tiny import CPU, configure, run


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ({"data": 68}, "68 % of the time is waiting for images: raise data.workers"),
        (
            {"data": 12, "waiting": 30},
            "30 % of the time is waiting for other ranks and their shards: a",
        ),
        ({"checkpoint": 9}, "9 % of the time is saving checkpoints: raise checkpoint.every_steps"),
        ({"evaluation": 33}, "33 % of the time is evaluation: raise train.eval_every"),
        ({"optimizer": 25}, "25 % of the time is optimizer: a larger train.batch_size takes fewer updates"),
        ({"the rest": 50}, "50 % of the time is neither steps nor evaluation: raise train.log_every"),
        ({"forward": 30, "backward": 60, "data": 4}, "90 % of the time is computing: nothing stands out"),
    ],
)
def test_the_verdict_is_about_what_stands_out_most(shares: dict[str, float], expected: str) -> None:
    assert expected in verdict(shares)


def test_a_judgement_adds_up_and_is_told_at_the_end() -> None:
    spent = Spent(since=time.perf_counter() - 10, steps=50, images=600)
    spent.seconds |= {"data": 6.0, "forward": 1.0, "waiting": 1.0}
    found = judge(spent)
    assert found["run_img_per_s"] == pytest.approx(60, rel=0.1)
    assert sum(found["spent_s"].values()) == pytest.approx(10, rel=0.1)
    assert found["time"] == "data 60 %, forward 10 %, exposed communication 10 %, the rest 20 %"
    table = end_table({"status": "finished", "step": 50, "seconds": 10.0, "run_dir": "there", **found})
    assert "speed     60 img/s over all" in table
    assert "time      data 60 %, forward 10 %" in table
    assert "verdict   60 % of the time is waiting for images" in table


def rows(*busy_ms: dict[str, float]) -> list[dict[str, float]]:
    return [{phase: row.get(phase, 0.0) / 1e3 for phase in PHASES} for row in busy_ms]


def test_a_rank_is_slow_by_the_median_of_the_others() -> None:
    base = {"data": 1.0, "forward": 30.0, "backward": 60.0, "optimizer": 3.0}
    found = slow_rank(rows(base, base | {"data": 41.0, "backward": 61.0}, base | {"forward": 31.0}))
    text = "rank 1 is slow: busy 135.0 ms per step, the others 94.5 ms, most of it in data (+40.0 ms)"
    assert found == (1, "data", text)
    for busy in ([10.0], [10.0, 14.9], [100.0, 119.0]):  # small differences, and a rank alone
        assert slow_rank(rows(*({"forward": each} for each in busy))) is None


def test_a_rank_that_is_slow_twice_is_named_once_until_it_keeps_up(tmp_path: Path) -> None:
    said: list[str] = []
    monitor: Any = SimpleNamespace(say=said.append)
    job: Any = SimpleNamespace(steps=99)
    context = Context(RankInfo(0, 2, 0, 2), CPU, tmp_path)
    course = {
        "none": None,
        "slow": SlowRank(1, "data", "slow"),
        "slower": SlowRank(1, "data", "slower"),
        "elsewhere": SlowRank(1, "backward", "elsewhere"),
    }
    reports = "none slow none slow slower slow elsewhere slow none slow none none"
    with Watch(configure(), context, job, SimpleNamespace(), monitor) as watch:  # type: ignore[arg-type]
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
        time.sleep(0.6 * comm.rank())
        return prepare(self, *arguments)

    short = ("data.train_images=48", "train.epochs=1", "train.log_every=2", "checkpoint.keep=0")
    with patch.object(Prepare, "__call__", slowly):
        run(folder, *short, "monitor.tensorboard=false")


def test_a_planted_slow_rank_is_named_with_its_phase(on_ranks: Any, tmp_path: Path) -> None:
    on_ranks(2, with_a_slow_rank, str(tmp_path))
    log = (tmp_path / "log.txt").read_text()
    assert "step 4: rank 1 is slow: busy " in log
    assert "most of it in data (+" in log

"""Sweeps: which jobs, one group for all of them, what fails and what follows."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardtrain.job.config import Config
from shardtrain.job.launch import Context
from shardtrain.job.schema import UserError
from shardtrain.train import sweep
from shardtrain.train.loop import train
from shardtrain.train.sweep import Outcome, Sweep, combinations

from tiny import CPU, VIT, context, result_of

TINY = (
    *("+recipe=resnet", *VIT, "data=fake", "data.train_images=24", "data.val_images=7"),
    *("train.batch_size=12", "train.max_steps=2", "checkpoint.keep=0"),
    *("monitor.progress=none", "monitor.tensorboard=false"),
)


def read(*arguments: str) -> Sweep:
    found = sweep.read(["-m", *arguments], False)
    assert found is not None
    return found


def jobs(*arguments: str) -> list[str]:
    _, swept = sweep.split_sweep(arguments)
    return [" ".join(job) for job in combinations(swept)]


def run(folder: str, job: Callable[[Config, Context], float | None], *arguments: str) -> tuple[Any, str]:
    """What a sweep on the ranks that call this gives, or the error's text, and what the rank says."""
    rank_info = context(folder).rank_info
    if rank_info.world_size > 1:
        rank_info.__dict__["store"] = dist.FileStore(f"{folder}.store", rank_info.world_size)
    said = io.StringIO()
    with redirect_stdout(said):
        try:
            result: Any = sweep.run_jobs(read(*arguments, f"run.dir={folder}"), rank_info, CPU, job)
        except (UserError, RuntimeError) as error:
            result = f"{type(error).__name__}: {error}"
    return result, said.getvalue()


def test_every_combination_in_hydras_words() -> None:
    assert jobs("optim.lr=0.1,0.2", "seed=range(2)") == [
        "optim.lr=0.1 seed=0",
        "optim.lr=0.1 seed=1",
        "optim.lr=0.2 seed=0",
        "optim.lr=0.2 seed=1",
    ]
    assert jobs("+recipe=resnet", "data=glob(cifar*)", "optim.betas=[0.9,0.99],[0.8,0.9]")[1::2] == [
        "data=cifar10 optim.betas=[0.8,0.9]",
        "data=cifar100 optim.betas=[0.8,0.9]",
    ]
    assert jobs("seed=shuffle(range(9))") == jobs("seed=shuffle(range(9))") != jobs("seed=range(9)")
    assert jobs("seed=4") == [""]


def test_flags_and_single_values_are_every_jobs(tmp_path: Path) -> None:
    found = read("seed=1,2", "train.epochs=3", "--config-dir", str(tmp_path))
    assert found.fixed == ["--config-dir", str(tmp_path), "train.epochs=3"]
    assert (found.first.train.epochs, found.first.seed, found.device, found.threads) == (3, 1, "auto", None)
    with redirect_stdout(io.StringIO()) as said:
        assert sweep.read(["-m", "seed=1,2", "--cfg", "job"], True) is None
    assert "seed: 1" in said.getvalue()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "optim.lr=interval(0.1,0.2)",
            r"optim.lr=interval\(0.1,0.2\): an interval has no end of values; list some instead",
        ),
        ("run.name=a,b", r"run.name=a,b: all jobs of a sweep have one run.name"),
        ("seed=1,2 foo", r"cannot read 'foo': expected key=value"),
        ("sed=1,2", r"unknown key sed; did you mean seed\?"),
        ("optim.lr=0.1,0.2 train.epoch=1", r"unknown key train.epoch; did you mean train.epochs\?"),
    ],
)
def test_mistakes_are_named_before_any_job(arguments: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(*arguments.split())


def test_a_sweep_of_four_on_one_group(on_ranks: Any, tmp_path: Path) -> None:
    """One job is refused, one gives a loss that is no number; the other two train as they would alone."""
    swept = ("optim.lr=0.001,1e30", "train.batch_size=12,13")
    (best, said), (other, silent) = on_ranks(2, run, str(tmp_path / "sweep"), train, *TINY, *swept)
    assert best == other
    assert silent == ""
    assert "job 1 has failed: train.batch_size=13 is not divisible by 2 ranks" in said
    results = json.loads((tmp_path / "sweep/sweep.json").read_text())
    assert [bool(result["problem"]) for result in results] == [False, True, True, True]
    assert "a lower optim.lr may help" in results[2]["problem"]
    assert results[0] == {
        "overrides": ["optim.lr=0.001", "train.batch_size=12"],
        "objective": best,
        "problem": "",
    }
    assert f"{best:>11.2f} %     0  optim.lr=0.001 train.batch_size=12" in said
    assert result_of(tmp_path / "sweep/0")["best_val/acc1"] == best
    assert result_of(tmp_path / "sweep/2")["status"] == "failed"


def _fails_on_rank_1(config: Config, context: Context) -> float:
    if context.rank_info.rank == 1:
        raise RuntimeError("a disk is gone")
    return 1.0


def test_ranks_that_part_end_the_sweep(on_ranks: Any, tmp_path: Path) -> None:
    results = on_ranks(2, run, str(tmp_path / "sweep"), _fails_on_rank_1, "seed=1,2")
    text = "RuntimeError: the ranks left job 0 for different reasons, so none can follow: rank 0: done; "
    assert [result for result, _ in results] == [text + "rank 1: RuntimeError: a disk is gone"] * 2


def test_a_sweep_without_a_working_job_is_a_mistake_and_keeps_tracebacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(config: Config, context: Context) -> float:
        if config.seed == 1:
            raise UserError("no such thing")
        raise ZeroDivisionError("of nothing")

    result, _ = run(str(tmp_path), fails, "seed=1,2")
    assert result == "UserError: every job of the sweep has failed, the first with: no such thing"
    for kept in (capsys.readouterr().err, (tmp_path / "1/traceback-00000.txt").read_text()):
        assert 'raise ZeroDivisionError("of nothing")' in kept


def test_ctrl_c_ends_the_whole_sweep(tmp_path: Path) -> None:
    def interrupted(config: Config, context: Context) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(str(tmp_path), interrupted, "seed=1,2")


def test_the_ranking() -> None:
    done = [Outcome(["seed=0"], 0.0, ""), Outcome(["seed=1"], None, "why"), Outcome(["seed=2"], 99.5, "")]
    assert sweep.table([*done, Outcome(["dry_run=true"], None, "")]).splitlines()[1:] == [
        "      99.50 %     2  seed=2",
        "       0.00 %     0  seed=0",
        "            –     3  dry_run=true",
        "       failed     1  seed=1",
        "                     why",
    ]


def test_the_objective_is_returned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[int] = []

    def job(config: Config, context: Context) -> float:
        seen.append(config.seed)
        return float(config.seed)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "seed=7", "threads=1", "device=cpu"])
    assert sweep.run(job) == 7.0
    monkeypatch.setattr(
        sys, "argv", ["train.py", "-m", "seed=3,5,4", "threads=1", "device=cpu", "run.name=s"]
    )
    assert sweep.run(job) == 5.0
    assert seen == [7, 3, 5, 4]
    assert (tmp_path / "outputs/s/sweep.json").is_file()

"""What a run tells: console, files, TensorBoard."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from shardtrain.build import build
from shardtrain.compose import compose
from shardtrain.config import Config, from_hydra
from shardtrain.errors import UserError
from shardtrain.evaluate import Evaluation, Scores
from shardtrain.launch import Context
from shardtrain.monitor import Monitor, open_monitor, start_table
from shardtrain.monitor.console import Bar, Lines
from shardtrain.monitor.window import Window
from shardtrain.place import Place

CPU = torch.device("cpu")
SCALARS = {
    "train/loss": 0.5,
    "train/acc1": 80.0,
    "lr/group0": 0.1,
    "perf/img_per_s": 123.0,
    "grad_norm": 2.0,
}


def configure(*arguments: str) -> Config:
    raw = compose(["+recipe=resnet", "monitor.tensorboard=false", "monitor.plan=false", *arguments])
    assert raw is not None
    return from_hydra(raw)


def opened(run_dir: Path, *arguments: str, rank: int = 0) -> tuple[Any, Context, Any]:
    context = Context(Place(rank, 1, 0, 1), CPU, run_dir)
    job, config = build(configure(*arguments), 0, 1, CPU)
    return open_monitor(config, context, job, Window(job)), context, job


def test_a_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opening, _, job = opened(tmp_path / "a/run", "monitor.progress=lines")
    with opening as monitor:
        monitor.step(1)
        monitor.log(1, SCALARS)
        assert json.loads((tmp_path / "a/run/result.json").read_text())["status"] == "running"
        monitor.evaluated(1, Evaluation(Scores(0.25, 98.5, 100.0), None, ()))
    result = json.loads((tmp_path / "a/run/result.json").read_text())
    assert (result["status"], result["step"], result["steps"]) == ("finished", 1, job.steps)
    assert (result["val/acc1"], result["best_val/acc1"], result["train/loss"]) == (98.5, 98.5, 0.5)
    assert result["parameters"] == 11_172_810
    assert {"torch", "torchvision", "python"} <= set(result["versions"])
    saved = OmegaConf.load(tmp_path / "a/run/config.yaml")
    assert (saved.model.num_classes, saved.model.in_channels, saved.model.image_size) == (10, 1, 8)
    log = (tmp_path / "a/run/log.txt").read_text()
    output = capsys.readouterr().out
    assert "train/loss 0.5" in log
    assert "finished  step 1" in log
    assert f"step   1/{job.steps}  epoch 0.0  loss 0.5000  acc1 80.00 %  lr 0.1  123 img/s" in output
    assert "val loss 0.2500  acc1 98.50 %  acc5 100.00 %" in output
    assert "finished" in output


def _stop_at_step_3(monitor: Monitor, error: type[BaseException]) -> None:
    monitor.step(3)
    raise error


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, "interrupted"), (RuntimeError, "failed")])
def test_files_are_complete_however_a_run_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: type[BaseException], status: str
) -> None:
    opening, _, _ = opened(tmp_path, "monitor.progress=none")
    with pytest.raises(error), opening as monitor:
        _stop_at_step_3(monitor, error)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["status"], result["step"]) == (status, 3)
    assert ("interrupted  step 3" in capsys.readouterr().out) == (status == "interrupted")
    assert (tmp_path / "log.txt").read_text().endswith(f"{status}\n")


def test_other_ranks_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opening, context, job = opened(tmp_path / "run", rank=1)
    with opening as monitor:
        monitor.say(start_table(configure(), context, job))
        monitor.log(1, SCALARS)
        monitor.step(1)
    assert capsys.readouterr().out == ""
    assert [path.name for path in (tmp_path / "run").iterdir()] == [
        "config.yaml"
    ]  # made by rank 0 of the group


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    opening, _, _ = opened(tmp_path / "file/run")
    with (
        pytest.raises(UserError, match=r"run.dir=.*: cannot write there \(Not a directory\); choose another"),
        opening,
    ):
        pass


def test_start_table_says_what_a_rank_holds(tmp_path: Path) -> None:
    _, context, job = opened(tmp_path, "optim=adamw", "train.accumulate=2")
    table = start_table(configure("optim=adamw"), context, job)
    for expected in (
        "11,172,810 parameters",
        "42.6 MiB parameters, 42.6 gradients, 85.2 optimizer",
        "digits, 1,437 + 360 held out, 8×8 pixels",
        "48 = 1 rank × 2 micro-batches × 24",
        "layer4.1",
    ):
        assert expected in table


def test_deep_models_are_summed_up(tmp_path: Path) -> None:
    _, context, job = opened(tmp_path, "model=resnet101", "dry_run=true")
    table = start_table(configure("model=resnet101"), context, job)
    assert " more " in table
    assert len(table.splitlines()) < 40


def test_the_bar_draws_one_line_and_keeps_evaluations(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Bar(steps=4, steps_per_epoch=2)
    bar.log(2, SCALARS)
    bar.step(4)
    bar.log(4, {"val/loss": 0.1, "val/acc1": 99.0, "val/acc5": 100.0})
    output = capsys.readouterr().out
    assert "█" * 24 + " 4/4  loss 0.500  acc1 80.0 %  123 img/s  0:00 left" in output
    assert output.count("\n") == 1
    assert "val loss 0.1000" in output


def test_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines(steps=1000, steps_per_epoch=10)
    monkeypatch.setattr("time.perf_counter", lambda: lines.started + 100)
    assert lines.left(10) == "2:45:00"
    assert lines.left(900) == "0:11"


def test_windows_measure_what_happens_between_reports(tmp_path: Path) -> None:
    _, _, job = opened(tmp_path)
    window = Window(job)
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    with window.step():
        for loss in (1.0, 2.0):
            with window.phase("data"):
                time.sleep(0.02)
            window.add(torch.tensor(loss), logits, torch.tensor([0, 0]))
    scalars = window.close(1, torch.tensor(3.0))
    assert (scalars["train/loss"], scalars["train/acc1"], scalars["grad_norm"]) == (1.5, 50.0, 3.0)
    assert scalars["perf/img_per_s"] == pytest.approx(4 / scalars["time/step_s"])
    assert 50 < scalars["time/data_pct"] < 100
    assert scalars["time/forward_pct"] == 0 < scalars["time/optimizer_pct"]
    assert scalars["time/exposed_comm_pct"] == 0
    assert scalars["memory/params_mib"] == pytest.approx(11_172_810 * 4 / 2**20)
    assert scalars["memory/peak_mib"] > scalars["memory/params_mib"]
    assert scalars["memory/gathered_peak_mib"] == 0  # nothing ran
    assert "perf/mfu" not in scalars
    with window.step():
        window.add(torch.tensor(float("nan")), logits, torch.tensor([0, 0]))
    with pytest.raises(RuntimeError, match=r"train/loss is nan at step 7; a lower optim.lr may help"):
        window.close(7, torch.tensor(3.0))

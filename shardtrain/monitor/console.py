"""Progress for people: a bar on a terminal, otherwise a line per report."""

from __future__ import annotations

import datetime
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from shardtrain.job.config import Config
from shardtrain.job.dist_env import versions
from shardtrain.job.schema import plain, writing
from shardtrain.monitor.reporter import Sink

WIDTH = 24  # characters of the bar
REDRAW_S = 0.1


class Lines(Sink):
    """A line for each report."""

    def __init__(self, steps: int, steps_per_epoch: int, first_step: int = 0) -> None:
        self.steps, self.steps_per_epoch, self.first_step = steps, steps_per_epoch, first_step
        self.started = time.perf_counter()

    def say(self, text: str) -> None:
        print(text, flush=True)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.say(self.report(step, scalars))

    def report(self, step: int, scalars: Mapping[str, float]) -> str:
        where = f"step {step:>{len(str(self.steps))}}/{self.steps}  epoch {step / self.steps_per_epoch:.1f}"
        if "val/loss" in scalars:
            loss, acc1, acc5 = (scalars[f"val/{key}"] for key in ("loss", "acc1", "acc5"))
            return f"{where}  val loss {loss:.4f}  acc1 {acc1:.2f} %  acc5 {acc5:.2f} %"
        return (
            f"{where}  loss {scalars['train/loss']:.4f}  acc1 {scalars['train/acc1']:.2f} %  "
            f"lr {scalars['lr/group0']:.3g}  {scalars['perf/img_per_s']:.0f} img/s  {self.left(step)} left"
        )

    def left(self, step: int) -> str:
        """Time to the end, at the mean pace so far."""
        seconds = (time.perf_counter() - self.started) / (step - self.first_step) * (self.steps - step)
        minutes, seconds = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class Bar(Lines):
    """One line that is drawn over and over; evaluations stay above it."""

    def __init__(self, steps: int, steps_per_epoch: int, first_step: int = 0) -> None:
        super().__init__(steps, steps_per_epoch, first_step)
        self.drawn_at = 0.0
        self.latest = ""

    def say(self, text: str) -> None:
        sys.stdout.write(f"\r\x1b[K{text}\n")
        sys.stdout.flush()

    def step(self, step: int) -> None:
        now = time.perf_counter()
        if now - self.drawn_at < REDRAW_S and step < self.steps:
            return
        self.drawn_at = now
        done = WIDTH * step // self.steps
        bar = "█" * done + "·" * (WIDTH - done)
        sys.stdout.write(f"\r\x1b[K{bar} {step}/{self.steps}  {self.latest}{self.left(step)} left")
        sys.stdout.flush()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        if "val/loss" in scalars:
            self.say(self.report(step, scalars))
            return
        self.latest = (
            f"loss {scalars['train/loss']:.3f}  acc1 {scalars['train/acc1']:.1f} %  "
            f"{scalars['perf/img_per_s']:.0f} img/s  "
        )


class Tables(Sink):
    """What is said at the start and at the end, without progress between."""

    def say(self, text: str) -> None:
        print(text, flush=True)


# The run directory's files: config.yaml, log.txt and result.json. Rank 0 alone writes.


def make_run_dir(path: Path, config: Config) -> None:
    """Makes the directory and writes the configuration, complete enough to be used again."""
    with writing("run.dir", path):
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.yaml").write_text(OmegaConf.to_yaml(plain(config)))


class LogFile(Sink):
    """What the console says, with the time, in log.txt; a later run in the same directory adds to it."""

    def __init__(self, directory: Path) -> None:
        self.file = (directory / "log.txt").open("a", encoding="utf-8", buffering=1)
        self.say(f"{' '.join(sys.argv)}")

    def say(self, text: str) -> None:
        now = datetime.datetime.now().isoformat(" ", "seconds")
        self.file.writelines(f"{now}  {line}\n" for line in text.splitlines())

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.say(f"step {step}  " + "  ".join(f"{tag} {value:.5g}" for tag, value in scalars.items()))

    def close(self, status: str) -> None:
        with self.file:
            self.say(status)


class ResultFile(Sink):
    """result.json: the latest value of every tag, and what it takes to compare runs."""

    def __init__(
        self, directory: Path, facts: Mapping[str, Any], steps_per_epoch: int, first_step: int = 0
    ) -> None:
        self.path = directory / "result.json"
        self.steps_per_epoch = steps_per_epoch
        earlier = self._read() if first_step else {}
        self.started = time.perf_counter() - earlier.pop("seconds", 0.0)
        self.result: dict[str, Any] = {"status": "running", "step": first_step, "epoch": 0.0, "seconds": 0.0}
        packages = versions("hydra-core", "tensorboard", "numpy", "safetensors")
        self.result |= {**earlier, **facts, "versions": packages}
        self._write()

    def step(self, step: int) -> None:
        self.result["step"] = step

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.result.update(scalars)
        if "val/acc1" in scalars:
            judged = scalars.get("val/ema_acc1", scalars["val/acc1"])
            self.result["best_val/acc1"] = max(self.result.get("best_val/acc1", 0.0), judged)
            self._write()

    def facts(self, facts: Mapping[str, Any]) -> None:
        self.result.update(facts)

    def close(self, status: str) -> None:
        self.result["status"] = status
        self._write()

    def _read(self) -> dict[str, Any]:
        """The tags and the seconds of the process that this one continues, where it left them."""
        try:
            result = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return {
            key: value
            for key, value in result.items()
            if ("/" in key or key == "seconds") and value is not None
        }

    def _write(self) -> None:
        """Whoever reads it meanwhile finds the old file or the new one, whole."""
        self.result["epoch"] = self.result["step"] / self.steps_per_epoch
        self.result["seconds"] = round(time.perf_counter() - self.started, 3)
        temporary = self.path.with_suffix(".json.tmp")
        temporary.write_text(json.dumps(_valid(self.result), indent=2) + "\n")
        os.replace(temporary, self.path)


def _valid(result: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: what is no number is null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in result.items()
    }

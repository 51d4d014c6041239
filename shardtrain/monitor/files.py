"""The run directory's files: config.yaml, log.txt and result.json. Rank 0 alone writes."""

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

from shardtrain.checked import plain
from shardtrain.config import Config
from shardtrain.errors import writing
from shardtrain.machine import versions
from shardtrain.monitor.sink import Sink


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

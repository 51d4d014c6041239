"""The TensorBoard sink: everything of a run in one directory, readable without settings.

Torch's `add_hparams` makes a run of its own for every call; here hyperparameters go into the run's own file,
the same keys for every run, so that runs can be compared. A layout for the custom-scalars page asks what
people ask of a run: is it learning, is it fast, does it fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from shardtrain.job.config import Config
from shardtrain.job.schema import plain
from shardtrain.monitor.reporter import Sink

LINES = "Multiline"

# Page → chart → tags as regular expressions.
LAYOUT: dict[str, dict[str, list[Any]]] = {
    "Is it learning?": {
        "loss": [LINES, ["train/loss", "val/loss", "val/ema_loss"]],
        "accuracy, %": [LINES, ["train/acc1", "val/acc1", "val/ema_acc1", "val/acc5"]],
        "learning rate": [LINES, ["lr/.*"]],
        "gradient norm": [LINES, ["grad_norm"]],
    },
    "Is it fast?": {
        "images a second": [LINES, ["perf/img_per_s", "perf/img_per_s_per_rank"]],
        "seconds a step, by rank without waiting": [LINES, ["time/step_s", "ranks/busy_s_.*"]],
        "where the time goes, %": [LINES, ["time/.*_pct"]],
        "traffic, MiB a step": [LINES, ["comm/.*"]],
    },
    "Does it fit?": {
        "memory of rank 0, MiB": [LINES, ["memory/.*"]],
        "model state of rank 0, MiB": [LINES, ["memory/params_mib", "memory/grads_mib", "memory/opt.*"]],
    },
}

METRICS = ("val/acc1", "val/loss", "train/loss", "perf/img_per_s", "memory/peak_mib")


class TensorBoard(Sink):
    """Events, flushed with every evaluation and checkpoint. Importing the writer takes 1.5 s: done here."""

    def __init__(
        self, directory: Path, config: Config, facts: Mapping[str, Any], first_step: int = 0
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What an earlier process told of later steps than the one it continues from is dropped from view.
        purge = first_step + 1 if first_step else 0
        self.first_step = self.latest = first_step
        self.writer: Any = SummaryWriter(str(directory), purge_step=purge)  # type: ignore[no-untyped-call]
        self._say_what_runs(config, facts)

    def _say_what_runs(self, config: Config, facts: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard.summary import hparams

        self._hparams, session, self._end = hparams(hyperparameters(config, facts), dict.fromkeys(METRICS, 0))
        self.writer.file_writer.add_summary(self._hparams)
        self.writer.file_writer.add_summary(session)
        self.writer.add_custom_scalars(LAYOUT)
        resolved = OmegaConf.to_yaml(plain(config))
        self.text("config", f"```yaml\n{resolved}```")
        self.writer.flush()

    def step(self, step: int) -> None:
        self.latest = step

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.details(step, scalars)
        if "val/loss" in scalars:
            self.flush()

    def details(self, step: int, scalars: Mapping[str, float]) -> None:
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, step)

    def text(self, tag: str, text: str) -> None:
        self.writer.add_text(tag, text, self.latest)

    def picture(self, tag: str, image: np.ndarray[Any, Any]) -> None:
        self.writer.add_image(tag, image, self.latest, dataformats="HWC")

    def facts(self, facts: Mapping[str, Any]) -> None:
        if "verdict" in facts:
            self.text("verdict", f"{facts['verdict']}\n\n{facts['time']}")

    def flush(self) -> None:
        self.writer.flush()

    def close(self, status: str) -> None:
        if status == "finished":  # without it, TensorBoard shows the run as running
            self.writer.file_writer.add_summary(self._end)
        self.writer.close()


def hyperparameters(config: Config, facts: Mapping[str, Any]) -> dict[str, float | str]:
    """What tells runs apart, under the names of the command line; the same keys for every run."""
    train, parallel = config.train, config.parallel
    return {
        "model": facts["model"],
        "parameters": facts["parameters"],
        "world_size": facts["world_size"],
        "device": facts["device"],
        "data": config.data.name,
        "data.image_size": config.data.image_size,
        "augment": (config.augment.get("_target_") or "none").rpartition(".")[2],
        "optim": config.optim.name,
        "optim.lr": config.optim.lr,
        "optim.weight_decay": config.optim.weight_decay,
        "sched": config.sched.name,
        "train.batch_size": train.batch_size,
        "train.accumulate": train.accumulate,
        "train.steps": facts["steps"],
        "train.label_smoothing": train.label_smoothing,
        "train.loss": train.loss,
        "train.mixup": train.mixup,
        "train.cutmix": train.cutmix,
        "ema.decay": config.ema.decay or "none",
        "train.clip_grad_norm": train.clip_grad_norm or "none",
        "parallel.precision": parallel.precision,
        "parallel.transport": parallel.transport,
        "parallel.replicate": parallel.replicate,
        "parallel.layout": parallel.layout,
        "parallel.offload": str(parallel.offload).lower(),
        "parallel.activation_checkpoint": str(parallel.activation_checkpoint).lower(),
        "parallel.compile": str(parallel.compile).lower(),
        "parallel.traffic": parallel.traffic or "none",
        "parallel.reshard_after_forward": str(parallel.reshard_after_forward).lower(),
        "seed": config.seed,
    }

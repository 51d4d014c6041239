"""What a run tells: progress, tables, TensorBoard, files.

The loop reports to a `Monitor`, which passes everything on to its sinks. Ranks other than 0 have a monitor
without sinks, so the loop never asks which rank it is on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardtrain import describe
from shardtrain.build import Job
from shardtrain.config import Config
from shardtrain.evaluate import Evaluation
from shardtrain.launch import Context
from shardtrain.monitor.console import Bar, Lines, Tables
from shardtrain.monitor.files import LogFile, ResultFile, TensorBoard, make_run_dir
from shardtrain.monitor.sink import Sink
from shardtrain.monitor.tables import end_table, score_table, start_table
from shardtrain.monitor.window import Window

__all__ = ["Monitor", "Window", "open_monitor", "score_table", "start_table"]


class Monitor:
    """Passes reports on, in the order of its sinks."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = sinks

    def say(self, text: str) -> None:
        for sink in self.sinks:
            sink.say(text)

    def step(self, step: int) -> None:
        for sink in self.sinks:
            sink.step(step)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for sink in self.sinks:
            sink.log(step, scalars)

    def flush(self) -> None:
        for sink in self.sinks:
            sink.flush()

    def evaluated(self, step: int, found: Evaluation) -> None:
        self.log(step, found.scalars())

    def close(self, status: str) -> None:
        for sink in self.sinks:
            sink.close(status)


class Ending(Sink):
    """Tells the end table, unless what follows is the report of a failure."""

    def __init__(self, result: ResultFile, listeners: Sequence[Sink]) -> None:
        self.result, self.listeners = result, listeners

    def close(self, status: str) -> None:
        if status != "failed":
            for listener in self.listeners:
                listener.say(end_table(self.result.result))


@contextlib.contextmanager
def open_monitor(
    config: Config, context: Context, job: Job, best_acc1: float | None = None
) -> Iterator[Monitor]:
    """The run's monitor; however the block is left, files are complete afterwards.

    ``best_acc1``: that of the run which goes on here, if it has been evaluated.
    """
    monitor = Monitor(_sinks(config, context, job, best_acc1))
    status = "failed"
    try:
        yield monitor
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        monitor.close(status)


def _sinks(config: Config, context: Context, job: Job, best_acc1: float | None) -> list[Sink]:
    if context.place.rank > 0:
        return []
    if config.dry_run or config.eval_only:
        return [Tables()]
    make_run_dir(context.run_dir, config)
    console = _console(config, job)
    log = LogFile(context.run_dir)
    facts = _facts(config, context, job)
    if best_acc1 is not None:
        facts["best_val/acc1"] = best_acc1
    result = ResultFile(context.run_dir, facts, job.steps_per_epoch, job.first_step)
    sinks: list[Sink] = [result, Ending(result, [console, log]), console, log]
    if config.monitor.plan:
        from shardtrain.plan.run import Comparison  # which imports sinks

        sinks.insert(1, Comparison(config, job, [console, log]))
    return [*sinks, TensorBoard(context.run_dir, job.first_step)] if config.monitor.tensorboard else sinks


def _console(config: Config, job: Job) -> Sink:
    progress = config.monitor.progress
    if progress == "none":
        return Tables()
    if progress == "bar" or (progress == "auto" and sys.stdout.isatty()):
        return Bar(job.steps, job.steps_per_epoch, job.first_step)
    return Lines(job.steps, job.steps_per_epoch, job.first_step)


def _facts(config: Config, context: Context, job: Job) -> dict[str, Any]:
    """What result.json says of a run beside its measurements."""
    return {
        "run_dir": str(context.run_dir),
        "model": str(config.model.get("name", config.model["_target_"])),
        "data": config.data.name,
        "seed": config.seed,
        "reference": None if config.reference is None else dataclasses.asdict(config.reference),
        "steps": job.steps,
        "batch_size": job.share.batch_size,
        "world_size": context.place.world_size,
        "device": context.device.type,
        "parameters": sum(unit.parameters for unit in describe(job.model)),
    }

"""What a run tells: progress, tables, TensorBoard, files.

The loop reports to a `Monitor`, which passes everything on to its sinks. Ranks other than 0 have a monitor
without sinks, so the loop never asks which rank it is on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shardtrain import describe
from shardtrain.build import Job
from shardtrain.config import Config
from shardtrain.data import Batch
from shardtrain.errors import UserError
from shardtrain.evaluate import Evaluation
from shardtrain.launch import Context
from shardtrain.machine import memory_of
from shardtrain.monitor.board import TensorBoard
from shardtrain.monitor.comparison import Comparison
from shardtrain.monitor.console import Bar, Lines, Tables
from shardtrain.monitor.files import LogFile, ResultFile, make_run_dir
from shardtrain.monitor.glance import Glance
from shardtrain.monitor.sink import Sink
from shardtrain.monitor.tables import end_table, score_table, start_table
from shardtrain.monitor.verdict import judge
from shardtrain.monitor.window import Window
from shardtrain.place import on_rank_0
from shardtrain.text import MIB

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

    def showing(self, feed: Iterable[Batch]) -> Iterator[Batch]:
        """The feed's batches; the first is put on show as it comes."""
        batches = iter(feed)
        for batch in batches:
            for sink in self.sinks:
                sink.samples(batch)
            yield batch
            yield from batches

    def picture(self, tag: str, image: np.ndarray[Any, Any]) -> None:
        for sink in self.sinks:
            sink.picture(tag, image)

    def facts(self, facts: Mapping[str, Any]) -> None:
        for sink in self.sinks:
            sink.facts(facts)

    def details(self, step: int, scalars: Mapping[str, float]) -> None:
        for sink in self.sinks:
            sink.details(step, scalars)

    def flush(self) -> None:
        for sink in self.sinks:
            sink.flush()

    def evaluated(self, step: int, found: Evaluation) -> None:
        self.log(step, found.scalars())
        for sink in self.sinks:
            sink.evaluated(found)

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
    config: Config, context: Context, job: Job, window: Window, best_acc1: float | None = None
) -> Iterator[Monitor]:
    """The run's monitor; however the block is left, files are complete afterwards.

    ``window`` knows where the time went. ``best_acc1``: that of the run which goes on here, if it has been
    evaluated.
    """
    if config.monitor.norms and not config.monitor.tensorboard:
        raise UserError("monitor.norms=true: norms are for plots alone, so monitor.tensorboard must be true")
    if not (config.dry_run or config.eval_only):
        on_rank_0(lambda: make_run_dir(context.run_dir, config))
    monitor = Monitor(_sinks(config, context, job, best_acc1))
    status = "failed"
    try:
        yield monitor
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        if window.spent.steps:
            monitor.facts(judge(window.spent, config, context.place.world_size, context.device.type))
        monitor.close(status)


def _sinks(config: Config, context: Context, job: Job, best_acc1: float | None) -> list[Sink]:
    if context.place.rank > 0:
        return []
    if config.dry_run or config.eval_only:
        return [Tables()]
    console = _console(config, job)
    log = LogFile(context.run_dir)
    facts = _facts(config, context, job)
    if best_acc1 is not None:
        facts["best_val/acc1"] = best_acc1
    result = ResultFile(context.run_dir, facts, job.steps_per_epoch, job.first_step)
    sinks: list[Sink] = [result, Ending(result, [console, log]), console, log]
    if config.monitor.plan:
        sinks.insert(1, Comparison(config, job, [console, log]))
    if config.monitor.tensorboard:
        board = TensorBoard(context.run_dir, config, facts, job.first_step)
        memory_mib = memory_of(context.device) / MIB
        sinks += [Glance(context.run_dir, board, console, job, memory_mib), board]
    return sinks


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

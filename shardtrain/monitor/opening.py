"""The monitor of a run, put together from its configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

from shardtrain import describe
from shardtrain.build import Job
from shardtrain.config import Config
from shardtrain.errors import UserError
from shardtrain.launch import Context
from shardtrain.machine import memory_of
from shardtrain.monitor.board import TensorBoard
from shardtrain.monitor.comparison import Comparison
from shardtrain.monitor.console import Bar, Lines, Tables
from shardtrain.monitor.files import LogFile, ResultFile, make_run_dir
from shardtrain.monitor.glance import Glance
from shardtrain.monitor.reporter import Monitor
from shardtrain.monitor.sink import Sink
from shardtrain.monitor.tables import end_table
from shardtrain.monitor.verdict import judge
from shardtrain.monitor.window import Window
from shardtrain.place import on_rank_0
from shardtrain.text import MIB


class Ending(Sink):
    """Tells the end table, unless what follows is the report of a failure."""

    def __init__(self, result: ResultFile, speaker: Sink) -> None:
        self.result, self.speaker = result, speaker

    def close(self, status: str) -> None:
        if status != "failed":
            self.speaker.say(end_table(self.result.result))


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
    monitor = Monitor()
    monitor.sinks = _sinks(config, context, job, best_acc1, monitor)
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


def _sinks(
    config: Config, context: Context, job: Job, best_acc1: float | None, monitor: Monitor
) -> list[Sink]:
    """In the order in which they end: what is told then passes through ``monitor`` to those that follow."""
    if context.place.rank > 0:
        return []
    if config.dry_run or config.eval_only:
        return [Tables()]
    log = LogFile(context.run_dir)
    facts = _facts(config, context, job)
    if best_acc1 is not None:
        facts["best_val/acc1"] = best_acc1
    result = ResultFile(context.run_dir, facts, job.steps_per_epoch, job.first_step)
    sinks: list[Sink] = [Ending(result, monitor), _console(config, job), log]
    if config.monitor.tensorboard:
        board = TensorBoard(context.run_dir, config, facts, job.first_step)
        glance = Glance(context.run_dir, monitor, job, memory_of(context.device) / MIB)
        sinks = [glance, *sinks, board]
    if config.monitor.plan:
        sinks.insert(0, Comparison(config, job, monitor))
    return [result, *sinks]


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

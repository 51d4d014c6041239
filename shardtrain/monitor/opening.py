"""The monitor of a run, put together from its configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shardtrain import introspect
from shardtrain.device import total_memory
from shardtrain.job.build import Job
from shardtrain.job.config import Config
from shardtrain.job.dist_env import on_rank_0
from shardtrain.job.format import MIB, aligned
from shardtrain.job.launch import Context
from shardtrain.job.schema import UserError
from shardtrain.monitor.board import TensorBoard
from shardtrain.monitor.console import Bar, Lines, LogFile, ResultFile, Tables, make_run_dir
from shardtrain.monitor.glance import Glance
from shardtrain.monitor.reporter import Monitor, Sink
from shardtrain.monitor.tables import end_table
from shardtrain.monitor.verdict import judge
from shardtrain.monitor.window import StepMetrics
from shardtrain.plan.simulate import Plan, plan_of


class Ending(Sink):
    """Tells the end table, unless what follows is the report of a failure."""

    def __init__(self, result: ResultFile, speaker: Sink) -> None:
        self.result, self.speaker = result, speaker

    def close(self, status: str) -> None:
        if status != "failed":
            self.speaker.say(end_table(self.result.result))


@contextlib.contextmanager
def open_monitor(
    config: Config, context: Context, job: Job, window: StepMetrics, best_acc1: float | None = None
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
            monitor.facts(judge(window.spent, config, context.rank_info.world_size, context.device.type))
        monitor.close(status)


def _sinks(
    config: Config, context: Context, job: Job, best_acc1: float | None, monitor: Monitor
) -> list[Sink]:
    """In the order in which they end: what is told then passes through ``monitor`` to those that follow."""
    if context.rank_info.rank > 0:
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
        glance = Glance(context.run_dir, monitor, job, total_memory(context.device) / MIB)
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
        "world_size": context.rank_info.world_size,
        "device": context.device.type,
        "parameters": sum(unit.parameters for unit in introspect(job.model).units),
    }


# The plan of a run beside what the run measured.


class Row(NamedTuple):
    """One line of the comparison. ``exact``: the plan promises every byte."""

    name: str
    planned: int
    measured: float
    exact: bool

    @property
    def verdict(self) -> str:
        if self.measured == self.planned:
            return "exact"
        difference = f"{100 * (self.measured - self.planned) / max(self.planned, 1):+.1f} %"
        return f"{difference}, which should be exact" if self.exact else difference


# What the last report of a run holds in MiB, and what the plan says of it in bytes.
STATE = {
    "parameters": "memory/params_mib",
    "gradients": "memory/grads_mib",
    "optimizer": "memory/optimizer_mib",
}
TRAFFIC = {
    "all_gather": "comm/all_gather_mib_per_step",
    "reduce_scatter": "comm/reduce_scatter_mib_per_step",
    "all_reduce": "comm/all_reduce_mib_per_step",
}


def compare(plan: Plan, scalars: Mapping[str, float], *, on_cuda: bool, scaled: bool) -> list[Row]:
    """Plan and measurement of rank 0. On CUDA the allocator knows the peak; on the CPU nobody does.

    ``scaled``: the loss was, so the ranks have told one another of overflows, in a few more bytes each time.
    """
    rows = [Row(name, getattr(plan, name), scalars[tag] * MIB, True) for name, tag in STATE.items()]
    rows.append(Row("gathered at once", plan.gathered, scalars["memory/gathered_peak_mib"] * MIB, True))
    names = ["gathers send", "reductions send", *(["averages send"] if plan.question.replicate > 1 else [])]
    for name, (kind, tag) in zip(names, TRAFFIC.items(), strict=False):
        exact = not (scaled and kind == "all_reduce")
        rows.append(Row(name, plan.sent.get(kind, 0), scalars[tag] * MIB, exact))
    if on_cuda:
        rows.append(Row("peak", plan.peak, scalars["memory/peak_mib"] * MIB, False))
    return rows


def comparison(rows: Sequence[Row]) -> str:
    """The rows as text."""
    cells = [["MiB, rank 0", "planned", "measured", ""]]
    for row in rows:
        cells.append([row.name, f"{row.planned / MIB:,.2f}", f"{row.measured / MIB:,.2f}", row.verdict])
    return "\n".join(aligned(cells))


class Comparison(Sink):
    """Tells at the end of a run how far plan and measurement are apart. To plan takes a second or two."""

    def __init__(self, config: Config, job: Job, speaker: Sink) -> None:
        self.config, self.job, self.speaker = config, job, speaker
        self.scalars: dict[str, float] = {}

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.scalars.update(scalars)

    def close(self, status: str) -> None:
        if status != "finished" or "memory/params_mib" not in self.scalars:
            return
        on_cuda, scaled = self.job.device.type == "cuda", self.job.scaler.is_enabled()
        try:
            plan = plan_of(self.config, self.job, rank=0)
            text = comparison(compare(plan, self.scalars, on_cuda=on_cuda, scaled=scaled))
        except Exception as error:  # the model needs values, say; the run has done well all the same
            text = f"no plan to compare with: {type(error).__name__}: {error}".split("\n", 1)[0]
        self.speaker.say(text)

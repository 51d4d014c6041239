"""Pass a run's events on to writers, and report how the run ended."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from PIL import Image

from shardtrain import device, introspect
from shardtrain.job import tags
from shardtrain.job.build import Job
from shardtrain.job.config import Config
from shardtrain.job.data import Batch
from shardtrain.job.dist_env import versions
from shardtrain.job.evaluate import Evaluation
from shardtrain.job.format import MIB
from shardtrain.job.launch import Context
from shardtrain.job.pictures import Picture
from shardtrain.monitor.metrics import StepMetrics
from shardtrain.monitor.tables import end_table, judge
from shardtrain.monitor.writers import Console, LogFile, ResultFile, SummaryFigure, TensorBoard, Writer


class Monitor:
    """Pass each event on to all writers. A writer that cannot write does not end the run.

    One line warns of the cause. The writer still gets every event, since a full disk may have space again.
    """

    def __init__(self, *writers: Writer) -> None:
        self.writers = writers
        self.summary = next((each for each in writers if isinstance(each, SummaryFigure)), None)
        self._warned: set[object] = set()

    def say(self, text: str) -> None:
        self._each(lambda writer: writer.say(text))

    def step(self, step: int) -> None:
        self._each(lambda writer: writer.step(step))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._each(lambda writer: writer.log(step, scalars))

    def facts(self, facts: Mapping[str, Any]) -> None:
        self._each(lambda writer: writer.facts(facts))

    def close(self, status: str) -> None:
        self._each(lambda writer: writer.close(status))

    def picture(self, tag: str, picture: Picture | str, path: Path | None = None) -> bool:
        """Pass a picture on, and write it to ``path``. A text instead is printed once: why there is none.

        Returns whether there is a picture.
        """
        if isinstance(picture, str):
            if picture not in self._warned:
                self._warned.add(picture)
                self.say(picture)
            return False
        self._each(lambda writer: writer.picture(tag, picture))
        if path is not None:
            self.save(path, picture)
        return True

    def save(self, path: Path, content: Picture | str) -> bool:
        """Write a file of the run directory; return whether it was written. Warns if not."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                path.write_text(content)
            else:
                Image.fromarray(content).save(path)
        except OSError as error:
            self._warn(path.name, error)
            return False
        return True

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Log an evaluation's scores, and draw the summary if it is due."""
        self.log(step, evaluation.scalars())
        if self.summary is not None and time.perf_counter() > self.summary.due_at:
            self.draw_summary()

    def tested(self, step: int, evaluation: Evaluation) -> None:
        """Log the scores of the test images, which decide nothing."""
        self.log(step, dict(zip(tags.TEST, evaluation.judged, strict=True)))

    def draw_summary(self) -> None:
        if self.summary is not None and self.summary.curves:
            self.picture(tags.SUMMARY, self.summary.draw(), self.summary.path)

    def showing(self, feed: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the feed's batches, with a picture of the first one."""
        for index, batch in enumerate(feed):
            if index == 0 and self.summary is not None:
                self.picture(tags.SAMPLES, self.summary.samples(batch))
            yield batch

    def _each(self, event: Callable[[Writer], None]) -> None:
        for writer in self.writers:
            try:
                event(writer)
            except OSError as error:
                self._warn(type(writer).__name__, error)

    def _warn(self, what: str, error: OSError) -> None:
        """Print that ``what`` cannot be written, once for each cause: a full disk concerns all writers."""
        if error.errno not in self._warned:
            self._warned.add(error.errno)
            with contextlib.suppress(OSError):  # the terminal may be gone
                print(f"warning: {what}: {error}; training goes on", file=sys.stderr, flush=True)


@contextlib.contextmanager
def open_monitor(
    config: Config, context: Context, job: Job, metrics: StepMetrics, best: tuple[int, float] | None = None
) -> Iterator[Monitor]:
    """Open the run's monitor. Its files are complete after the block, also after an exception.

    ``best``: step and accuracy of the resumed run's best evaluation, if it has one.
    """
    if context.rank_info.rank > 0:
        yield Monitor()
        return
    if config.dry_run or config.eval_only:
        yield Monitor(Console("none", job.steps, job.steps_per_epoch))
        return
    monitor, result = _open(config, context, job, best)
    status = "failed"
    try:
        yield monitor
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        verdict = judge(metrics.spent) if metrics.spent.steps else {}
        monitor.facts({"status": status, **verdict})
        if status != "failed":  # after a failure only the exception is reported
            monitor.draw_summary()
            monitor.say(end_table(result))
        monitor.close(status)


def _open(
    config: Config, context: Context, job: Job, best: tuple[int, float] | None
) -> tuple[Monitor, Mapping[str, Any]]:
    """Return rank 0's monitor, and the live content of result.json."""
    facts = {
        "run_dir": str(context.run_dir),
        "model": config.model_name,
        "data": config.data.name,
        "seed": config.seed,
        "reference": None if config.reference is None else dataclasses.asdict(config.reference),
        "steps": job.steps,
        "batch_size": job.share.batch_size,
        "world_size": context.rank_info.world_size,
        "device": context.device.type,
        "parameters": sum(unit.parameters for unit in introspect(job.model).units),
        "classes": config.model["num_classes"],
        "command": shlex.join(sys.argv),
        "versions": versions("hydra-core", "tensorboard", "numpy", "safetensors"),
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        **({} if best is None else {tags.BEST_STEP: best[0], tags.BEST_ACC1: best[1]}),
    }
    result = ResultFile(context.run_dir, job.steps_per_epoch, job.first_step)
    length = job.steps, job.steps_per_epoch, job.first_step
    console = Console(config.monitor.progress, *length, facts["classes"])
    writers: list[Writer] = [result, console, LogFile(context.run_dir)]
    if config.monitor.tensorboard:
        writers.append(TensorBoard(context.run_dir, config, facts, job.first_step))
        memory_mib = device.total_memory(job.device) / MIB
        writers.append(SummaryFigure(context.run_dir, job.val, job.first_step, memory_mib))
    monitor = Monitor(*writers)
    monitor.save(context.run_dir / "config.yaml", OmegaConf.to_yaml(dataclasses.asdict(config)))
    monitor.facts(facts)
    return monitor, result.result


def _commit() -> str | None:
    """Return the git commit of the working directory; None outside of a repository."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5)
        return asked.stdout.strip() or None
    return None

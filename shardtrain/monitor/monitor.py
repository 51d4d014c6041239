"""A run's events, passed on to writers, and the tables at its start and its end."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from shardtrain import introspect
from shardtrain.config.config import Config
from shardtrain.config.format import MIB, counted
from shardtrain.config.marks import record_of
from shardtrain.config.target import instantiate
from shardtrain.job import tags
from shardtrain.job.build import Job
from shardtrain.job.evaluation import Evaluation
from shardtrain.job.pictures import Picture
from shardtrain.launch.launcher import Context
from shardtrain.launch.ranks import versions
from shardtrain.launch.signals import Stopped
from shardtrain.monitor.metrics import scores_in_words, time_in_words, trained_in_words, unit_of_speed
from shardtrain.monitor.writers import Console, LogFile, ResultFile, TensorBoard, Writer


class Monitor:
    """All writers, to which each event is passed on. A writer that cannot write does not end the run.

    One line warns of the cause. The writer still gets every event, since a full disk may have space again.
    """

    def __init__(self, *writers: Writer, first_step: int = 0) -> None:
        self.writers = writers
        self.latest = first_step
        self.scalars: dict[str, float] = {}  # the latest value of each tag
        self.texts: dict[str, str] = {}  # of the latest evaluation of each part, for the end
        self._warned: set[object] = set()

    def say(self, text: str) -> None:
        self._each(lambda writer: writer.say(text))

    def step(self, step: int) -> None:
        self.latest = step

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.scalars.update(scalars)
        self._each(lambda writer: writer.log(step, scalars))

    def facts(self, facts: Mapping[str, Any]) -> None:
        self._each(lambda writer: writer.facts(facts))

    def picture(self, tag: str, picture: Picture) -> None:
        self._each(lambda writer: writer.picture(self.latest, tag, picture))

    def write(self, path: Path, make: Callable[[], object]) -> bool:
        """Have ``make`` write a file of the run directory; return whether it did. Warns if not."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            make()
        except OSError as error:
            self._warn(path.name, error)
            return False
        return True

    def evaluated(self, step: int, evaluation: Evaluation, best: tuple[int, float, str] | None) -> None:
        """Log an evaluation, and step, score and tag of the best one so far, if one is a number."""
        best_scalars = {} if best is None else {tags.BEST_STEP: best[0], tags.best(best[2]): best[1]}
        self.log(step, {**evaluation.scalars(), **best_scalars})
        self._show("val", evaluation)

    def tested(self, step: int, evaluation: Evaluation) -> None:
        """Log the scores of the test images, which decide nothing."""
        self.log(step, evaluation.ranking("test"))
        self._show("test", evaluation)

    def _show(self, part: str, evaluation: Evaluation) -> None:
        for name, picture in evaluation.results.pictures.items():
            self.picture(tags.score(part, name), picture)
        self.texts |= titled(part, evaluation)

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
                print(f"warning: {what}: {error}; training continues", file=sys.stderr, flush=True)


@contextlib.contextmanager
def open_monitor(
    config: Config, context: Context, job: Job, best: tuple[int, float, str] | None = None
) -> Iterator[Monitor]:
    """Open the run's monitor. Its files are complete after the block, also after an exception.

    ``best``: step, score and its tag of the resumed run's best evaluation, if it has one.
    """
    if context.rank_info.rank > 0:
        yield Monitor()
        return
    facts = facts_of(config, context, job, best)
    result = ResultFile(context.run_dir, job)
    writers: list[Writer] = [result, Console(job), LogFile(context.run_dir)]
    arguments = (context.run_dir, dataclasses.asdict(config))
    for path in config.monitor.writers:
        if path == config.monitor.TENSORBOARD:
            writers.append(TensorBoard(context.run_dir, config, facts, job.first_step))
            continue
        writers.append(instantiate({"_target_": path}, "monitor.writers", Writer, config.allow, *arguments))
    monitor = Monitor(*writers, first_step=job.first_step)
    file = context.run_dir / "config.yaml"
    text = OmegaConf.to_yaml(record_of(config))
    monitor.write(file, lambda: file.write_text(text, encoding="utf-8"))
    monitor.facts(facts)
    status = "failed"
    ending: list[str] = []
    try:
        yield monitor
        status = "finished"
    except KeyboardInterrupt as interrupt:
        status = "interrupted"
        if isinstance(interrupt, Stopped) and interrupt.ending:
            ending.append(f"{interrupt} {interrupt.ending}")
        raise
    finally:
        monitor.facts({"status": status, "step": monitor.latest})
        if status != "failed":  # after a failure only the exception is reported
            monitor.say("\n".join([*monitor.texts.values(), end_table(result.result), *ending]))


def facts_of(
    config: Config, context: Context, job: Job, best: tuple[int, float, str] | None
) -> dict[str, Any]:
    """Return what a run knows about itself at its start."""
    return {
        "run_dir": str(context.run_dir),
        "model": config.model_name,
        "data": config.data.name,
        "seed": config.seed,
        "steps": job.steps,
        "steps_per_epoch": job.steps_per_epoch,
        "batch_size": job.train.share.batch_size,
        "world_size": context.rank_info.world_size,
        "device": context.device.type,
        "parameters": sum(unit.parameters for unit in introspect(job.model).units),
        "classes": config.model.get("num_classes"),
        "class_counts": job.class_counts,
        "inference": job.inference and dataclasses.asdict(job.inference),
        "command": shlex.join(sys.argv),
        "versions": versions("hydra-core", "tensorboard", "numpy", "safetensors"),
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        tags.BEST_BY: config.train.best,
        tags.BEST_IS_LOWEST: job.scoring.is_minimised,
        **({} if best is None else {tags.BEST_STEP: best[0], tags.best(best[2]): best[1]}),
    }


def start_table(config: Config, context: Context, job: Job) -> str:
    """Return a table of what will be trained, on what, and what this rank will hold."""
    share = job.train.share
    optim = config.optim
    side = config.data.image_size
    units = introspect(job.model).units
    sizes = introspect(job.model).bytes_by_rank
    own = max(sizes) / MIB
    most = "at most " if min(sizes) < max(sizes) else ""
    size = f"{sum(unit.parameters for unit in units):,} parameters in {counted(len(units), 'unit')}"
    pixels = "" if job.inference is None else f", {side}×{side} pixels"
    rate = f"lr {optim.lr:g}, {config.sched.name}"
    micro_batches = counted(share.accumulate, "micro-batch")
    ranks = counted(share.world_size, "rank")
    replicas = f" in {config.parallel.replicate} replicas" if config.parallel.replicate > 1 else ""
    virtual = f", as {share.virtual} virtual ranks" if share.virtual else ""
    threads = f", {counted(torch.get_num_threads(), 'thread')} each" if context.device.type == "cpu" else ""
    lines = [
        ("model", f"{_model_name(config.model)}, {size}"),
        ("per rank", f"{most}{own:.1f} MiB parameters, {own:.1f} gradients"),
        ("data", f"{job.data_name}{pixels}"),
        ("batch", f"{share.batch_size} = {ranks} × {micro_batches} × {share.micro_batch}"),
        ("length", f"{job.steps} steps, {job.steps_per_epoch} per epoch"),
        ("update", f"{optim.name}, {rate}, weight decay {optim.weight_decay:g}"),
        ("world", f"{ranks}{replicas}{virtual}, {context.device.type}{threads}, torch {torch.__version__}"),
        ("run", str(context.run_dir)),
    ]
    return _labelled(lines)


def _model_name(model: Mapping[str, Any]) -> str:
    """Return the model's name, with keys that are not at their defaults."""
    usual = ("_target_", "name", "num_classes", "in_channels", "image_size")
    keys = [f"{k} {v}" for k, v in model.items() if k not in usual and v not in (None, False, "auto", [])]
    return ", ".join([str(model.get("name", model["_target_"])), *keys])


def end_table(result: Mapping[str, Any]) -> str:
    """Return a table of how a run ended, from the content of result.json."""
    unit = unit_of_speed(result.get("inference", ""))
    lines = [(result["status"], f"step {result['step']}, {result['seconds']:.1f} s")]
    if tags.TRAIN_LOSS in result:
        speed = f"{result[tags.IMG_PER_S]:.0f} {unit} at the end"
        lines.append(("train", ", ".join([*trained_in_words(result), speed])))
        lines.append(("time", f"{time_in_words(result)} at the end"))
    if tags.VAL_LOSS in result:
        tag = result.get(tags.BEST_BY, tags.VAL_ACC1)
        best = ""
        if tags.best(tag) in result:
            score = tags.in_words(tag, result[tags.best(tag)])
            best = f", best {tags.name(tag)} {score} at step {result[tags.BEST_STEP]}"
        lines += _score_rows(result, best)
    return _labelled([*lines, ("run", result["run_dir"])])


def score_table(scored: Sequence[Evaluation]) -> str:
    """Return a table of evaluations without a run: of the validation images, then of test images if any."""
    val, *tests = scored
    test = tests[0].ranking("test") if tests else {}
    texts = titled("val", val) | (titled("test", tests[0]) if tests else {})
    return "\n".join([*texts.values(), _labelled(_score_rows(val.scalars() | test, ""))])


def titled(part: str, evaluation: Evaluation) -> dict[str, str]:
    """Return the texts of an evaluation of ``part``, by their titles, which are their first lines."""
    texts = evaluation.results.texts
    return {f"{part}, {name}": f"{part}, {name}:\n{text}" for name, text in texts.items()}


def _score_rows(result: Mapping[str, Any], more: str) -> list[tuple[str, str]]:
    """Return lines for the latest evaluation in ``result``."""
    scored = scores_in_words(result)
    scored["average" if "average" in scored else "val"] += more
    return [*scored.items()]


def _labelled(lines: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)

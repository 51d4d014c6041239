"""The writers of a run's events: console, log.txt, result.json and TensorBoard. Only rank 0 has them."""

from __future__ import annotations

import datetime
import json
import math
import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from shardtrain.config.command import as_values, compose
from shardtrain.config.config import Config
from shardtrain.config.marks import MARKS, changed_keys
from shardtrain.config.schema import Mark
from shardtrain.job import tags
from shardtrain.job.build import Job
from shardtrain.job.pictures import Picture
from shardtrain.monitor.metrics import scores_in_words, trained_in_words, unit_of_speed

ERASE = "\r\x1b[K"  # of a terminal: to the line's begin, and what stands in it away


class Writer:
    """A writer that ignores every event; subclasses override the events that they write.

    A class of `monitor.writers` is called with the run directory and the configuration, nested dicts, on rank
    0 alone. Constructors write nothing, and no file stays open between events: an OSError is warned of once,
    and disturbs no later event. Any other exception ends the run.
    """

    def say(self, text: str) -> None:
        """Write lines for people, such as the tables at the start and the end."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write scalars by TensorBoard tag: every `train.log_every` steps, and after each evaluation."""

    def picture(self, step: int, tag: str, picture: Picture) -> None:
        """Write a picture, uint8 [height, width, 3]: the samples at the start, and those of scores."""

    def facts(self, facts: Mapping[str, Any]) -> None:
        """Write facts that are no curves over the steps.

        The first event has the model, the data, the number of parameters and when the run ``started``. The
        last one has ``step`` and ``status``: ``finished``, ``interrupted`` or ``failed``.
        """


class Console(Writer):
    """The texts that are printed, and a line per report, which on a terminal overwrites the one before."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.started = time.perf_counter()
        self._erase = ""  # what erases the report in the terminal's last line

    def say(self, text: str) -> None:
        print(f"{self._erase}{text}", flush=True)
        self._erase = ""

    def facts(self, facts: Mapping[str, Any]) -> None:
        if self._erase and "status" in facts:  # a traceback may follow
            print(flush=True)
            self._erase = ""

    def report(self, line: str) -> None:
        if not sys.stdout.isatty():
            self.say(line)
            return
        width = shutil.get_terminal_size().columns - 1  # a longer line could not be erased
        print(f"{self._erase}{line[:width]}", end="", flush=True)
        self._erase = ERASE

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        steps = self.job.steps
        epoch = step / self.job.steps_per_epoch
        where = f"step {step:>{len(str(steps))}}/{steps}  epoch {epoch:.1f}"
        for name, scores in scores_in_words(scalars).items():
            self.say(f"{where}  {name} {scores}")
        if tags.TRAIN_LOSS not in scalars:
            return
        speed = f"{scalars[tags.IMG_PER_S]:.0f} {unit_of_speed(self.job.inference)}"
        rate = f"lr {scalars[tags.lr(0)]:.3g}  {speed}  {self.left(step)} left"
        line = "  ".join([where, *trained_in_words(scalars), rate])
        (self.say if step == steps else self.report)(line)

    def left(self, step: int) -> str:
        """Return the time to the end, at the mean pace so far."""
        pace = (time.perf_counter() - self.started) / (step - self.job.first_step)
        return str(datetime.timedelta(seconds=round(pace * (self.job.steps - step))))


class LogFile(Writer):
    """log.txt: the console's texts with the time. A later run in the same directory appends."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "log.txt"

    def say(self, text: str) -> None:
        now = datetime.datetime.now().isoformat(" ", "seconds")
        with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(f"{now}  {line}\n" for line in text.splitlines())

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.say(f"step {step}  " + "  ".join(f"{tag} {value:.5g}" for tag, value in scalars.items()))

    def facts(self, facts: Mapping[str, Any]) -> None:
        if "status" in facts:  # how the run ended; what it knows at its start is in result.json
            self.say("  ".join(f"{key} {value}" for key, value in facts.items()))


def json_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``result`` for JSON, which has neither NaN nor infinity: None stands for them."""
    unknown = {key for key, value in result.items() if isinstance(value, float) and not math.isfinite(value)}
    return {**result, **dict.fromkeys(unknown)}


class ResultFile(Writer):
    """result.json: the latest value of every tag, and the facts for comparing runs."""

    def __init__(self, directory: Path, job: Job) -> None:
        self.path = directory / "result.json"
        self.steps_per_epoch = job.steps_per_epoch
        earlier = self._read() if job.first_step else {}
        self.started = time.perf_counter() - earlier.pop("seconds", 0.0)
        self.result: dict[str, Any] = {"status": "running", "step": job.first_step, **earlier}

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.facts({**scalars, "step": step})

    def facts(self, facts: Mapping[str, Any]) -> None:
        """Replace the file atomically: a reader finds the old or the new one, complete."""
        self.result.update(facts)
        self.result["epoch"] = self.result["step"] / self.steps_per_epoch
        self.result["seconds"] = round(time.perf_counter() - self.started, 3)
        temporary = self.path.with_suffix(".json.tmp")
        temporary.write_text(json.dumps(json_of(self.result), indent=2) + "\n")
        os.replace(temporary, self.path)

    def _read(self) -> dict[str, Any]:
        """Return the tags and the seconds of the process that this process continues."""
        try:
            result = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        kept = {key: value for key, value in result.items() if "/" in key or key == "seconds"}
        return {key: value for key, value in kept.items() if value is not None}


EVENTS = "events.out.tfevents."
MOST_UNWRITTEN = 10_000  # events that are kept while the disk is full
METRICS = (tags.VAL_LOSS, tags.TRAIN_LOSS, tags.IMG_PER_S, tags.PEAK_MIB)  # of HParams, after the best score
# TensorBoard shows five hyperparameters, then the scores. If fewer come first, it adds others by name, like
# `augment`, whose text is so wide that no score is in sight.
FIRST_COLUMNS = ("model", "optim.lr", "seed", "train.batch_size", "train.epochs")


class TensorBoard(Writer):
    """One event file per process, complete after every report, and so before every checkpoint.

    The thread of tensorboard's own writer ends with its first error. Here events that do not fit on the disk
    are written with later ones. torch's `add_hparams` makes a separate run per call; here hyperparameters go
    into the run's own file.
    """

    def __init__(
        self, directory: Path, config: Config, facts: Mapping[str, Any], first_step: int = 0
    ) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary  # here, since it takes 1.5 s

        self.path = directory / f"{_after_others(directory)}.{socket.gethostname()}.{os.getpid()}"
        self._summary = summary
        self._event = Event
        self._records = RecordWriter
        self._written = 0  # bytes
        self._unwritten = [Event(wall_time=time.time(), file_version="brain.Event:2")]
        # TensorBoard then drops later steps that an earlier process has written.
        purge = first_step + 1 if first_step else 0
        self._keep(purge, session_log=SessionLog(status=SessionLog.START))
        metrics = dict.fromkeys((tags.best(config.train.best), *METRICS), 0)
        experiment, session, self._end = summary.hparams(hyperparameters(config, facts), metrics)
        plugin = experiment.value[0].metadata.plugin_data
        columns = HParamsPluginData.FromString(plugin.content)
        for column in columns.experiment.hparam_infos:
            column.differs = column.name in FIRST_COLUMNS
        plugin.content = columns.SerializeToString()
        text = summary.text("config", f"```yaml\n{OmegaConf.to_yaml(asdict(config))}```")
        changed = summary.text("changed", f"`` {facts['command']} ``\n\n{_changes(config)}")
        for each in (experiment, session, changed, text):
            self._keep(first_step, summary=each)

    def _keep(self, step: int, **content: Any) -> None:
        """Make an event of ``step``, for `_write`."""
        if len(self._unwritten) < MOST_UNWRITTEN:
            self._unwritten.append(self._event(wall_time=time.time(), step=step, **content))

    def _write(self) -> None:
        with self.path.open("ab") as file:
            file.truncate(min(file.tell(), self._written))  # a full disk may have taken a part of a record
            for event in self._unwritten:
                self._records(file).write(event.SerializeToString())
            file.flush()
            self._written = file.tell()
        self._unwritten.clear()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for tag, value in scalars.items():
            if tag != tags.BEST_STEP:
                self._keep(step, summary=self._summary.scalar(tag, value))
        self._write()

    def picture(self, step: int, tag: str, picture: Picture) -> None:
        self._keep(step, summary=self._summary.image(tag, picture, dataformats="HWC"))
        self._write()

    def facts(self, facts: Mapping[str, Any]) -> None:
        if facts.get("status") == "finished":  # otherwise TensorBoard shows the run as running
            self._keep(facts["step"], summary=self._end)
        self._write()


def _changes(config: Config) -> str:
    """Return a table of the keys that differ from the defaults, of a command without words, in Markdown."""
    usual = compose([])
    assert usual is not None
    lines = ["| key | value | default |", "| --- | --- | --- |"]
    for change in changed_keys(as_values(usual.values), asdict(config)):
        if Mark.HIDDEN not in change.mark:
            lines.append(f"| `{change.key}` | {change.now} | {change.before} |")
    return "\n".join(lines)


def _after_others(directory: Path) -> str:
    """Return the begin of a file's name, which sorts after the names of all event files in ``directory``.

    TensorBoard reads them in the order of their names, and a clock may have gone back since the last one.
    """
    latest = max((path.name for path in directory.glob(f"{EVENTS}*")), default="")
    return max(f"{EVENTS}{time.time():017.6f}", f"{latest}.0")


def hyperparameters(config: Config, facts: Mapping[str, Any]) -> dict[str, float | str]:
    """Return the values that distinguish runs, by the keys of the command line. Every run has the same keys.

    A section whose keys a user may choose is one text. A key that only another choice has is a dash.
    """
    sections = asdict(config)
    shown = {key: facts[key] for key in ("parameters", "world_size", "device")}
    for key in (key for key, mark in MARKS.items() if Mark.HIDDEN not in mark):
        section, _, name = key.partition(".")
        value = sections[section].get(name, "–") if name else sections[section]
        if isinstance(value, dict):
            keys = (f"{name} {each}" for name, each in value.items() if each not in (None, False, []))
            value = ", ".join(keys) or None
        number = isinstance(value, (bool, int, float))
        shown[key.removesuffix(".name")] = value if number else "none" if value is None else str(value)
    shown |= {"train.steps": facts["steps"], "model": f"{facts['model']}, {shown['model']}"}
    return shown

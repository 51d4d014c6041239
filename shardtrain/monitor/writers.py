"""Write a run's events to the console, log.txt, result.json and TensorBoard. Only rank 0 has writers.

The summary is one picture: does the run learn, is it fast, does it fit into memory?
"""

from __future__ import annotations

import datetime
import json
import math
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from shardtrain.job import pictures, tags
from shardtrain.job.build import Job
from shardtrain.job.config import Config
from shardtrain.job.pictures import Picture
from shardtrain.monitor.metrics import PHASES, WAITING, scores_in_words
from shardtrain.plan.memory import MEMORY_KINDS


class Writer:
    """Ignore every event; subclasses override the events that they write.

    ``say``: lines for people. ``log``: scalars by TensorBoard tag. ``facts``: what has no curve; the first
    event, and at the end with the last ``step`` and the ``status``: ``finished``, ``interrupted`` or
    ``failed``. Constructors write nothing, and no file stays open between events: an event that raised
    OSError disturbs no later one.
    """

    def say(self, text: str) -> None: ...
    def log(self, step: int, scalars: Mapping[str, float]) -> None: ...
    def picture(self, step: int, tag: str, picture: Picture) -> None: ...
    def facts(self, facts: Mapping[str, Any]) -> None: ...


class Console(Writer):
    """Print texts, and a line for each report."""

    def __init__(self, job: Job, classes: int = 10) -> None:
        self.job, self.classes = job, classes
        self.started = time.perf_counter()

    def say(self, text: str) -> None:
        print(text, flush=True)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        steps, epoch = self.job.steps, step / self.job.steps_per_epoch
        where = f"step {step:>{len(str(steps))}}/{steps}  epoch {epoch:.1f}"
        for name, scores in scores_in_words(scalars, self.classes).items():
            self.say(f"{where}  {name} {scores}")
        if tags.TRAIN_LOSS not in scalars:
            return
        loss, acc1, speed = (scalars[tag] for tag in (tags.TRAIN_LOSS, tags.TRAIN_ACC1, tags.IMG_PER_S))
        rate = f"lr {scalars[tags.lr(0)]:.3g}  {speed:.0f} img/s  {self.left(step)} left"
        self.say(f"{where}  loss {loss:.4f}  acc1 {acc1:.2f} %  {rate}")

    def left(self, step: int) -> str:
        """Return the time to the end, at the mean pace so far."""
        pace = (time.perf_counter() - self.started) / (step - self.job.first_step)
        return str(datetime.timedelta(seconds=round(pace * (self.job.steps - step))))


class LogFile(Writer):
    """Write the console's texts with the time to log.txt. A later run in the same directory appends."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "log.txt"

    def say(self, text: str) -> None:
        now = datetime.datetime.now().isoformat(" ", "seconds")
        with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(f"{now}  {line}\n" for line in text.splitlines())

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.say(f"step {step}  " + "  ".join(f"{tag} {value:.5g}" for tag, value in scalars.items()))

    def facts(self, facts: Mapping[str, Any]) -> None:
        self.say("  ".join(f"{key} {value}" for key, value in facts.items()))


RESULT_EVERY_S = 10.0  # seconds from one writing of result.json to the next, while nothing special happens
MOST_UNWRITTEN = 10_000  # events that are kept for TensorBoard while its disk is full


class ResultFile(Writer):
    """Write result.json: the latest value of every tag, and the facts for comparing runs."""

    def __init__(self, directory: Path, job: Job) -> None:
        self.path, self.steps_per_epoch = directory / "result.json", job.steps_per_epoch
        earlier = self._read() if job.first_step else {}
        self.started = time.perf_counter() - earlier.pop("seconds", 0.0)
        self.result: dict[str, Any] = {"status": "running", "step": job.first_step, **earlier}
        self.due = 0.0

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.result.update(scalars, step=step)
        if tags.VAL_ACC1 in scalars:
            judged = scalars.get(tags.VAL_EMA_ACC1, scalars[tags.VAL_ACC1])
            best = judged > self.result.get(tags.BEST_ACC1, -1.0)
            self.facts({tags.BEST_ACC1: judged, tags.BEST_STEP: step} if best else {})
        elif time.perf_counter() > self.due:
            self.facts({})

    def facts(self, facts: Mapping[str, Any]) -> None:
        """Replace the file atomically: a reader finds the old or the new one, complete."""
        self.result.update(facts)
        self.due = time.perf_counter() + RESULT_EVERY_S
        self.result["epoch"] = self.result["step"] / self.steps_per_epoch
        self.result["seconds"] = round(time.perf_counter() - self.started, 3)
        valid = {  # JSON has neither NaN nor infinity
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in self.result.items()
        }
        temporary = self.path.with_suffix(".json.tmp")
        temporary.write_text(json.dumps(valid, indent=2) + "\n")
        os.replace(temporary, self.path)

    def _read(self) -> dict[str, Any]:
        """Return the tags and the seconds of the process that this process continues."""
        try:
            result = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        kept = {key: value for key, value in result.items() if "/" in key or key == "seconds"}
        return {key: value for key, value in kept.items() if value is not None}


# Page → chart → tags or regular expressions. The last page hardly changes, and is folded.
PAGES = {
    "Is it learning?": {
        "loss": [tags.TRAIN_LOSS, tags.VAL_LOSS, tags.VAL_EMA_LOSS],
        "accuracy, %": [tags.TRAIN_ACC1, tags.VAL_ACC1, tags.VAL_EMA_ACC1, tags.VAL_ACC5],
        "learning rate": [tags.lr(".*")],
        "gradient norm": [tags.GRAD_NORM],
    },
    "Is it fast?": {
        "images per second": [tags.IMG_PER_S, tags.IMG_PER_S_PER_RANK],
        "where the time goes, %": [*(tags.phase_pct(phase) for phase in PHASES), tags.EXPOSED_COMM_PCT],
        "seconds per step": [tags.STEP_S],
    },
    "Does it fit?": {
        "memory of rank 0, MiB": [tags.PEAK_MIB],
        "of the model and its training state, MiB": [
            *(tags.PARAMS_MIB, tags.GRADS_MIB, tags.OPTIMIZER_MIB, tags.GATHERED_PEAK_MIB),
        ],
        "traffic, MiB per step": [tags.sent_mib(".*")],
    },
}

# Chart of the summary → tag → its curve's name and colour.
TRAIN, VAL, AVERAGE = ("train", "black"), ("val", "tab:pink"), ("average", "#a0258f")
SUMMARY = {
    "Is it learning? Loss": {tags.TRAIN_LOSS: TRAIN, tags.VAL_LOSS: VAL, tags.VAL_EMA_LOSS: AVERAGE},
    "Accuracy, %": {tags.TRAIN_ACC1: TRAIN, tags.VAL_ACC1: VAL, tags.VAL_EMA_ACC1: AVERAGE},
    "Is it fast? Time, %": {
        **{tags.phase_pct(phase): (phase, color) for phase, color in PHASES.items()},
        tags.EXPOSED_COMM_PCT: ("waiting", WAITING),
    },
    "Does it fit? MiB of rank 0": {
        tags.PARAMS_MIB: ("parameters", MEMORY_KINDS["parameters"]),
        tags.GATHERED_PEAK_MIB: ("gathered", MEMORY_KINDS["gathered"]),
        tags.PEAK_MIB: ("peak", "0.4"),
    },
}

METRICS = (tags.VAL_ACC1, tags.VAL_LOSS, tags.TRAIN_LOSS, tags.IMG_PER_S, tags.PEAK_MIB)  # of HParams
FIRST_COLUMNS = ("model", "optim.lr", "train.batch_size")  # of HParams; others follow in order of names

# Keys of the command line on the HParams page, beside facts. Every run writes the same ones.
COMPARED = (
    *("data.image_size", "optim.lr", "optim.weight_decay", "train.batch_size", "train.accumulate"),
    *("train.label_smoothing", "train.loss", "train.mixup", "train.cutmix", "train.clip_grad_norm"),
    *("ema.decay", "parallel.precision", "parallel.transport", "parallel.replicate"),
    *("parallel.offload", "parallel.activation_checkpoint", "parallel.compile", "parallel.traffic"),
    *("parallel.reshard_after_forward", "seed"),
)


class TensorBoard(Writer):
    """Write one event file per process, complete after every report, and so before every checkpoint.

    The thread of tensorboard's own writer ends with its first error. Here events that do not fit on the disk
    are written with later ones. torch's `add_hparams` makes a separate run per call; here hyperparameters go
    into the run's own file.
    """

    def __init__(
        self, directory: Path, config: Config, facts: Mapping[str, Any], first_step: int = 0
    ) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary  # here, since it takes 1.5 s

        name = f"{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self.path = directory / f"events.out.tfevents.{name}"
        self._summary, self._event, self._records = summary, Event, RecordWriter
        self._written = 0  # bytes
        self._unwritten = [Event(wall_time=time.time(), file_version="brain.Event:2")]
        # TensorBoard then drops later steps that an earlier process has written.
        purge = first_step + 1 if first_step else 0
        self._keep(purge, session_log=SessionLog(status=SessionLog.START))
        chosen = hyperparameters(config, facts)
        experiment, session, self._end = summary.hparams(chosen, dict.fromkeys(METRICS, 0))
        plugin = experiment.value[0].metadata.plugin_data
        columns = HParamsPluginData.FromString(plugin.content)
        for column in columns.experiment.hparam_infos:
            column.differs = column.name in FIRST_COLUMNS  # TensorBoard shows these first
        plugin.content = columns.SerializeToString()
        charts = {
            page: {name: ["Multiline", shown] for name, shown in each.items()} for page, each in PAGES.items()
        }
        pages = summary.custom_scalars(charts)
        (layout,) = map(Layout.FromString, pages.value[0].tensor.string_val)
        layout.category[-1].closed = True
        pages.value[0].tensor.string_val[0] = layout.SerializeToString()
        text = summary.text("config", f"```yaml\n{OmegaConf.to_yaml(asdict(config))}```")
        for each in (experiment, session, pages, text):
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
        again = {first: scalars[tag] for tag, first in tags.FIRST.items() if tag in scalars}
        for tag, value in {**scalars, **again}.items():
            self._keep(step, summary=self._summary.scalar(tag, value))
        self._write()

    def picture(self, step: int, tag: str, picture: Picture) -> None:
        self._keep(step, summary=self._summary.image(tag, picture, dataformats="HWC"))
        self._write()

    def facts(self, facts: Mapping[str, Any]) -> None:
        if facts.get("status") == "finished":  # otherwise TensorBoard shows the run as running
            self._keep(facts["step"], summary=self._end)
        self._write()


def hyperparameters(config: Config, facts: Mapping[str, Any]) -> dict[str, float | str]:
    """Return the values that distinguish runs, under the command line's names."""
    values = {key: attrgetter(key)(config) for key in COMPARED}
    return {
        **{key: facts[key] for key in ("model", "parameters", "world_size", "device")},
        **{"data": config.data.name, "optim": config.optim.name, "sched": config.sched.name},
        "augment": (config.augment.get("_target_") or "none").rpartition(".")[2],
        "train.steps": facts["steps"],
        **{key: "none" if value is None else value for key, value in values.items()},
    }


REDRAW_S = 100.0  # drawing takes about a second: 1 % of the run's time


class SummaryFigure(Writer):
    """Collect all curves of a run, and draw the summary. ``memory_mib``: the device's memory."""

    def __init__(self, directory: Path, first_step: int, memory_mib: float) -> None:
        self.path, self.memory_mib = directory / "at_a_glance.png", memory_mib
        self.curves = _curves_until(directory, first_step) if first_step else {}  # tag → step → value
        self.due_at = time.perf_counter() + REDRAW_S

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for tag, value in scalars.items():
            self.curves.setdefault(tag, {})[step] = value

    def draw(self) -> Picture | str:
        """Return the picture, in the proportions of TensorBoard's smallest card."""
        self.due_at = time.perf_counter() + REDRAW_S
        return pictures.plot(self._draw, (4.0, 2.45), dpi=220)

    def _draw(self, figure: Any) -> None:
        """Draw the charts, each with its curves' names and latest values beside it."""
        for axes, (chart, shown) in zip(
            figure.subplots(2, 2, sharex=True).flat, SUMMARY.items(), strict=True
        ):
            for tag, (name, color) in shown.items():
                if tag in self.curves:
                    curve, style = self.curves[tag], {"color": color, "linewidth": 1, "markersize": 2}
                    label = f"{name} {[*curve.values()][-1]:.4g}"
                    axes.plot(curve.keys(), curve.values(), ".-", label=label, **style)
            axes.set_ylim(bottom=0)
            if tags.PEAK_MIB in shown:
                axes.set(yscale="log", ylim=(1, 2 * self.memory_mib))
                room = {"label": f"capacity {self.memory_mib:,.0f}", "linestyle": "--", "linewidth": 1}
                axes.axhline(self.memory_mib, color="black", **room)
            if tags.EXPOSED_COMM_PCT in shown and tags.IMG_PER_S in self.curves:
                chart += f" at {[*self.curves[tags.IMG_PER_S].values()][-1]:.0f} img/s"
            axes.set_title(chart, fontsize=6.5, loc="left")
            axes.tick_params(labelsize=6)
            if axes.lines:
                beside = {"loc": "center left", "bbox_to_anchor": (0.98, 0.5), "handlelength": 0.8}
                axes.legend(fontsize=6, frameon=False, **beside)
        figure.supxlabel("step", fontsize=6)


def _curves_until(directory: Path, step: int) -> dict[str, dict[int, float]]:
    """Return the curves up to ``step`` that earlier processes wrote; of several values the latest."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), purge_orphaned_data=False).Reload()
    scalars = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    return {tag: {e.step: e.value for e in points if e.step <= step} for tag, points in scalars.items()}

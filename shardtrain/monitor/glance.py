"""A run at a glance: three small plots that say whether it learns, is fast, and fits.

They are the first thing that TensorBoard's first page shows, since tags are in alphabetical order, and
`at_a_glance.png` in the run directory. With them come the images that were taken for another class, and
which for which. Drawing takes a while, so it may take 1 % of the run's time and no more; the last pictures
are drawn when the run ends, unless it fails.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardtrain.job import pictures
from shardtrain.job.build import Job
from shardtrain.job.data import Batch
from shardtrain.job.evaluate import Evaluation
from shardtrain.monitor.phases import PHASES
from shardtrain.monitor.reporter import Sink

SHARE = 0.01  # of the run's time
SAMPLES = 32  # images of a batch that are shown
LEAST = 0.1  # of an image, that is worth a mention
FIRST_S = 0.5  # what the first drawing is taken to cost: Matplotlib is imported
INCHES = (5.0, 2.9)

Curve = list[tuple[int, float]]


class Glance(Sink):
    """Remembers every curve, draws now and then, and passes pictures to ``monitor``.

    ``memory_mib``: what the device has.
    """

    def __init__(self, directory: Path, monitor: Sink, job: Job, memory_mib: float) -> None:
        self.path, self.monitor = directory / "at_a_glance.png", monitor
        self.held_out, self.memory_mib = job.val, memory_mib
        self.found: Evaluation | None = None
        self.curves: dict[str, Curve] = _curves_until(directory, job.first_step) if job.first_step else {}
        self._cost_s, self._drawn_at = FIRST_S, time.perf_counter()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for tag, value in scalars.items():
            self.curves.setdefault(tag, []).append((step, value))

    def samples(self, batch: Batch) -> None:
        images, prepare = batch.images[:SAMPLES], self.held_out.prepare
        captions = [_caption(label) for label in batch.labels[:SAMPLES]]
        self.monitor.picture("samples/augmented", pictures.grid(images, captions, prepare.mean, prepare.std))

    def evaluated(self, found: Evaluation) -> None:
        self.found = found
        if (time.perf_counter() - self._drawn_at) * SHARE > self._cost_s:
            self.draw()

    def close(self, status: str) -> None:
        if self.curves and status != "failed" and self._cost_s < math.inf:
            self.draw()

    def draw(self) -> None:
        start = time.perf_counter()
        panels = {
            "at_a_glance/1_is_it_learning": self._learning,
            "at_a_glance/2_is_it_fast": self._fast,
            "at_a_glance/3_does_it_fit": self._fits,
        }
        drawn = []
        for tag, panel in panels.items():
            picture = pictures.plot(panel, INCHES)
            if isinstance(picture, str):
                self.monitor.say(picture)
                self._cost_s = math.inf
                return
            self.monitor.picture(tag, picture)
            drawn.append(picture)
        if self.found is not None:
            self._draw_mistakes(self.found)
        self._drawn_at = time.perf_counter()
        self._cost_s = self._drawn_at - start
        pictures.save(self.path, np.hstack(drawn))  # at last: the disk may be full

    def _draw_mistakes(self, found: Evaluation) -> None:
        if found.confusion is not None:
            matrix = pictures.confusion(found.confusion)
            assert not isinstance(matrix, str)  # there is Matplotlib
            self.monitor.picture("val/confusion", matrix)
        if found.mistakes:
            prepare, data = self.held_out.prepare, self.held_out.images
            images = torch.cat([prepare(data[[mistake.image]][0]) for mistake in found.mistakes])
            captions = [f"{mistake.label} as {mistake.predicted}" for mistake in found.mistakes]
            page = pictures.grid(images, captions, prepare.mean, prepare.std)
            self.monitor.picture("val/worst_mistakes", page)

    def latest(self, tag: str) -> float:
        return self.curves[tag][-1][1] if self.curves.get(tag) else float("nan")

    def _lines(self, axes: Any, tags: Mapping[str, str], **style: Any) -> None:
        for name, tag in tags.items():
            if self.curves.get(tag):
                steps, values = zip(*self.curves[tag], strict=True)
                axes.plot(
                    steps, values, label=name, marker="." if len(steps) < 30 else "", linewidth=1.5, **style
                )

    def _areas(self, axes: Any, tags: Mapping[str, str]) -> None:
        """One above the other; what never reaches a hundredth of the highest is left out."""
        found = {name: dict(self.curves.get(tag, [])) for name, tag in tags.items()}
        steps = sorted({step for curve in found.values() for step in curve})
        heights = {name: [curve.get(step, 0.0) for step in steps] for name, curve in found.items()}
        least = 0.01 * max((max(values) for values in heights.values() if values), default=0.0)
        heights = {name: values for name, values in heights.items() if values and max(values) > least}
        if len(steps) == 1:  # an area needs a width
            steps, heights = [steps[0] - 1, *steps], {name: 2 * values for name, values in heights.items()}
        if heights:
            colors = [COLORS[name] for name in heights]
            axes.stackplot(steps, *heights.values(), labels=list(heights), colors=colors, linewidth=0)

    def _learning(self, figure: Any) -> None:
        loss, accuracy = figure.subplots(2, 1, sharex=True)
        self._lines(loss, {"training": "train/loss", "held out": "val/loss", "average": "val/ema_loss"})
        self._lines(accuracy, {"training": "train/acc1", "held out": "val/acc1", "average": "val/ema_acc1"})
        _explain(loss)
        judged = self.curves.get("val/ema_acc1") or self.curves.get("val/acc1", [])
        best = max((value for _, value in judged), default=float("nan"))
        title = f"loss {self.latest('train/loss'):.3f}, best held out {best:.2f} %"
        _label(figure, title, {loss: "loss", accuracy: "right, %"})

    def _fast(self, figure: Any) -> None:
        speed, share = figure.subplots(2, 1, sharex=True)
        self._lines(speed, {"images": "perf/img_per_s"})
        speed.set_ylim(
            0, 1.15 * max((value for _, value in self.curves.get("perf/img_per_s", [])), default=1)
        )
        phases = {phase: f"time/{phase}_pct" for phase in PHASES}
        self._areas(share, phases | {"waiting": "time/exposed_comm_pct"})
        share.set_ylim(0, 100)
        _explain(share)
        speed_now, step_ms = self.latest("perf/img_per_s"), 1e3 * self.latest("time/step_s")
        waiting = self.latest("time/exposed_comm_pct")
        title = f"{speed_now:.0f} images/s, {step_ms:.0f} ms a step, {waiting:.0f} % waiting"
        _label(figure, title, {speed: "images/s", share: "of the time, %"})

    def _fits(self, figure: Any) -> None:
        axes = figure.subplots()
        kinds = {"parameters": "params", "gradients": "grads", "optimizer": "optimizer"}
        tags = {name: f"memory/{tag}_mib" for name, tag in kinds.items()}
        self._areas(axes, tags | {"gathered": "memory/gathered_peak_mib"})
        self._lines(axes, {"peak of rank 0": "memory/peak_mib"}, color="black")
        axes.set_ylim(
            0, 1.15 * max((value for _, value in self.curves.get("memory/peak_mib", [])), default=1)
        )
        _explain(axes)
        state = sum(self.latest(tag) for tag in tags.values())
        title = (
            f"peak {self.latest('memory/peak_mib'):.0f} of {self.memory_mib:.0f} MiB, model state {state:.0f}"
        )
        _label(figure, title, {axes: "MiB"})


SMALL = 8  # points


def _explain(axes: Any) -> None:
    """A legend beside the plot, top row first as areas are stacked, so that it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1],
        labels[::-1],
        fontsize=SMALL,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
    )


def _label(figure: Any, title: str, ylabels: Mapping[Any, str]) -> None:
    figure.suptitle(title, fontsize=11)
    for axes, text in ylabels.items():
        axes.set_ylabel(text, fontsize=10)
        axes.tick_params(labelsize=9)
    axes.set_xlabel("step", fontsize=9)


def _caption(label: Tensor) -> str:
    """A class, or the two that a mixed image has most of, most first."""
    if label.ndim == 0:
        return str(label.item())
    parts, classes = label.topk(min(2, len(label)))
    return "+".join(
        str(number) for number, part in zip(classes.tolist(), parts.tolist(), strict=True) if part > LEAST
    )


COLORS = {
    "data": "tab:olive",
    "forward": "tab:blue",
    "backward": "tab:cyan",
    "optimizer": "tab:green",
    "checkpoint": "tab:gray",
    "waiting": "tab:red",
    "parameters": "tab:blue",
    "gradients": "tab:cyan",
    "gathered": "tab:orange",
}


def _curves_until(directory: Path, step: int) -> dict[str, Curve]:
    """What earlier processes of the run told TensorBoard, up to ``step``."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = logging.getLogger("tensorboard")
    level = logger.level
    logger.setLevel(logging.ERROR)  # that points told twice are dropped is no news
    try:
        events = EventAccumulator(str(directory))
        events.Reload()
    finally:
        logger.setLevel(level)
    tags = events.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in events.Scalars(tag) if e.step <= step] for tag in tags}

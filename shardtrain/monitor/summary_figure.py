"""The summary of a run: three small plots that show whether it learns, is fast, and fits.

They come first on TensorBoard's first page, whose tags are in alphabetical order. With them come the
confusion matrix and the images that were misclassified.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardtrain.job import pictures, tags
from shardtrain.job.build import Job
from shardtrain.job.data import Batch
from shardtrain.job.evaluate import Evaluation
from shardtrain.job.pictures import Picture
from shardtrain.monitor.metrics import PHASES
from shardtrain.monitor.tables import STATE

REDRAW_S = 100.0  # a drawing takes about a second: 1 % of the run's time
SAMPLES = 32  # images of a batch that are shown
LEAST = 0.1  # of a mixed image: smaller parts are left out of its caption
INCHES = (5.0, 2.9)

TIMES = {phase: tags.phase_pct(phase) for phase in PHASES} | {"waiting": tags.EXPOSED_COMM_PCT}
COLORS = {
    **{"data": "tab:olive", "forward": "tab:blue", "backward": "tab:cyan", "optimizer": "tab:green"},
    **{"checkpoint": "tab:gray", "waiting": "tab:red", "peak of rank 0": "black"},
    **{"parameters": "tab:blue", "gradients": "tab:cyan", "gathered": "tab:orange"},
}


class SummaryFigure:
    """Every curve of a run, and pictures made of them. ``memory_mib``: what the device has."""

    def __init__(self, directory: Path, job: Job, memory_mib: float) -> None:
        self.path, self.memory_mib, self.validation = directory / "at_a_glance.png", memory_mib, job.val
        self.curves = _curves_until(directory, job.first_step) if job.first_step else {}  # tag → step → value
        self.evaluation: Evaluation | None = None
        self.due_at = time.perf_counter() + REDRAW_S

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for tag, value in scalars.items():
            self.curves.setdefault(tag, {})[step] = value

    def samples(self, batch: Batch) -> Picture:
        """Return the first images of a training batch, as the model sees them."""
        return self._grid(batch.images[:SAMPLES], [_caption(label) for label in batch.labels[:SAMPLES]])

    def draw(self) -> dict[str, Picture | str]:
        """Return pictures by tag: the three plots first, then those of the latest evaluation."""
        self.due_at = time.perf_counter() + REDRAW_S
        plots = zip(tags.SUMMARY, (self._learning, self._speed, self._memory), strict=True)
        drawn = {tag: pictures.plot(plot, INCHES) for tag, plot in plots}
        if self.evaluation is not None and self.evaluation.confusion is not None:
            drawn[tags.CONFUSION] = pictures.confusion(self.evaluation.confusion)
        if self.evaluation is not None and (mistakes := self.evaluation.mistakes):
            prepare, data = self.validation.prepare, self.validation.images
            images = torch.cat([prepare(data[[mistake.image]][0]) for mistake in mistakes])
            captions = [f"{mistake.label} as {mistake.predicted}" for mistake in mistakes]
            drawn[tags.WORST_MISTAKES] = self._grid(images, captions)
        return drawn

    def _grid(self, images: Tensor, captions: list[str]) -> Picture:
        return pictures.grid(images, captions, self.validation.prepare.mean, self.validation.prepare.std)

    def _learning(self, figure: Any) -> None:
        losses = {"training": tags.TRAIN_LOSS, "validation": tags.VAL_LOSS, "average": tags.VAL_EMA_LOSS}
        scores = {"training": tags.TRAIN_ACC1, "validation": tags.VAL_ACC1, "average": tags.VAL_EMA_ACC1}
        loss, accuracy = figure.subplots(2, 1, sharex=True)
        self._plot(loss, "loss", losses, {})
        self._plot(accuracy, "acc1, %", scores, {})
        judged = self.curves.get(tags.VAL_EMA_ACC1) or self.curves.get(tags.VAL_ACC1, {})
        best = max(judged.values(), default=math.nan)
        figure.suptitle(f"loss {self._last(tags.TRAIN_LOSS):.3f}, best acc1 {best:.2f} %", fontsize=11)

    def _speed(self, figure: Any) -> None:
        speed, share = figure.subplots(2, 1, sharex=True)
        self._plot(speed, "images/s", {"images": tags.IMG_PER_S}, {})
        speed.set_ylim(bottom=0)
        self._plot(share, "of the time, %", {}, TIMES)
        share.set_ylim(0, 100)
        now, step_ms = self._last(tags.IMG_PER_S), 1e3 * self._last(tags.STEP_S)
        waiting = self._last(tags.EXPOSED_COMM_PCT)
        title = f"{now:.0f} images/s, {step_ms:.0f} ms per step, {waiting:.0f} % waiting"
        figure.suptitle(title, fontsize=11)

    def _memory(self, figure: Any) -> None:
        axes, held = figure.subplots(), STATE | {"gathered": tags.GATHERED_PEAK_MIB}
        self._plot(axes, "MiB", {"peak of rank 0": tags.PEAK_MIB}, held)
        axes.set_ylim(bottom=0)
        peak, state = self._last(tags.PEAK_MIB), sum(self._last(tag) for tag in STATE.values())
        title = f"peak {peak:.0f} of {self.memory_mib:.0f} MiB, model state {state:.0f}"
        figure.suptitle(title, fontsize=11)

    def _last(self, tag: str) -> float:
        return next(reversed(self.curves.get(tag, {}).values()), math.nan)

    def _plot(self, axes: Any, label: str, lines: Mapping[str, str], areas: Mapping[str, str]) -> None:
        """Draw curves by name → tag, as lines and as areas on top of one another.

        Tags of areas are logged together. An area below a hundredth of the highest is left out.
        """
        stacked = {name: self.curves[tag] for name, tag in areas.items() if tag in self.curves}
        tops = {name: max(curve.values()) for name, curve in stacked.items()}
        stacked = {name: stacked[name] for name, top in tops.items() if top > 0.01 * max(tops.values())}
        if stacked:
            steps = list(next(iter(stacked.values())))
            x = steps if len(steps) > 1 else [steps[0] - 1, *steps]  # an area needs a width
            heights = [
                [curve.get(step, curve.get(steps[0], 0.0)) for step in x] for curve in stacked.values()
            ]
            colors = [COLORS[name] for name in stacked]
            axes.stackplot(x, *heights, labels=list(stacked), colors=colors, linewidth=0)
        for name, tag in lines.items():
            if curve := self.curves.get(tag):
                style = {"marker": "." if len(curve) < 30 else "", "color": COLORS.get(name)}
                axes.plot(curve.keys(), curve.values(), label=name, linewidth=1.5, **style)
        axes.set_xlabel("step", fontsize=9)
        axes.label_outer()
        axes.set_ylabel(label, fontsize=10)
        axes.tick_params(labelsize=9)
        if len(lines) + len(areas) > 1:  # a legend, beside the plot: it hides nothing there
            beside = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
            axes.legend(fontsize=8, frameon=False, reverse=True, **beside)


def _caption(label: Tensor) -> str:
    """Name a class, or the two that a mixed image has most of, the larger first."""
    if label.ndim == 0:
        return str(label.item())
    parts, classes = label.topk(min(2, len(label)))
    return "+".join(str(int(number)) for number, part in zip(classes, parts, strict=True) if part > LEAST)


def _curves_until(directory: Path, step: int) -> dict[str, dict[int, float]]:
    """Read what earlier processes of the run wrote for TensorBoard, up to ``step``."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = logging.getLogger("tensorboard")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of points that were written twice
    try:
        events = EventAccumulator(str(directory)).Reload()
    finally:
        logger.setLevel(level)
    scalars = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    return {tag: {e.step: e.value for e in points if e.step <= step} for tag, points in scalars.items()}

"""The summary of a run: three small plots that show whether it learns, is fast, and fits.

They come first on TensorBoard's first page, whose tags are in alphabetical order. With them come the
confusion matrix and the images that were misclassified.
"""

from __future__ import annotations

import logging
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

REDRAW_S = 100.0  # a drawing takes about a second: 1 % of the run's time
SAMPLES = 32  # images of a batch that are shown
LEAST = 0.1  # of a mixed image: smaller parts are left out of its caption
INCHES = (5.0, 2.9)

Curves = dict[str, dict[int, float]]  # tag → step → value


BESIDE = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}  # a legend hides nothing there
STATE = {"parameters": tags.PARAMS_MIB, "gradients": tags.GRADS_MIB, "optimizer": tags.OPTIMIZER_MIB}
TIMES = {phase: tags.phase_pct(phase) for phase in PHASES} | {"waiting": tags.EXPOSED_COMM_PCT}
COLORS = {
    **{"data": "tab:olive", "forward": "tab:blue", "backward": "tab:cyan", "optimizer": "tab:green"},
    **{"checkpoint": "tab:gray", "waiting": "tab:red"},
    **{"parameters": "tab:blue", "gradients": "tab:cyan", "gathered": "tab:orange"},
}


class SummaryFigure:
    """Every curve of a run, and pictures made of them. ``memory_mib``: what the device has."""

    def __init__(self, directory: Path, job: Job, memory_mib: float) -> None:
        self.path, self.memory_mib, self.validation = directory / "at_a_glance.png", memory_mib, job.val
        self.curves = _curves_until(directory, job.first_step) if job.first_step else {}
        self.evaluation: Evaluation | None = None
        self.due_at = time.perf_counter() + REDRAW_S

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for tag, value in scalars.items():
            self.curves.setdefault(tag, {})[step] = value

    def samples(self, batch: Batch) -> Picture:
        """Return the first images of a training batch, as the model sees them."""
        captions = [_caption(label) for label in batch.labels[:SAMPLES]]
        return self._grid(batch.images[:SAMPLES], captions)

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
        loss, accuracy = figure.subplots(2, 1, sharex=True)
        self._lines(loss, training=tags.TRAIN_LOSS, validation=tags.VAL_LOSS, average=tags.VAL_EMA_LOSS)
        self._lines(accuracy, training=tags.TRAIN_ACC1, validation=tags.VAL_ACC1, average=tags.VAL_EMA_ACC1)
        judged = self.curves.get(tags.VAL_EMA_ACC1) or self.curves.get(tags.VAL_ACC1, {})
        best = max(judged.values(), default=float("nan"))
        title = f"loss {self._last(tags.TRAIN_LOSS):.3f}, best acc1 {best:.2f} %"
        _label(figure, title, {loss: "loss", accuracy: "acc1, %"}, legend=loss)

    def _speed(self, figure: Any) -> None:
        speed, share = figure.subplots(2, 1, sharex=True)
        self._lines(speed, images=tags.IMG_PER_S)
        self._areas(share, TIMES)
        speed.set_ylim(bottom=0)
        share.set_ylim(0, 100)
        now, step_ms = self._last(tags.IMG_PER_S), 1e3 * self._last(tags.STEP_S)
        waiting = self._last(tags.EXPOSED_COMM_PCT)
        title = f"{now:.0f} images/s, {step_ms:.0f} ms per step, {waiting:.0f} % waiting"
        _label(figure, title, {speed: "images/s", share: "of the time, %"}, legend=share)

    def _memory(self, figure: Any) -> None:
        axes = figure.subplots()
        self._areas(axes, STATE | {"gathered": tags.GATHERED_PEAK_MIB})
        self._lines(axes, "black", **{"peak of rank 0": tags.PEAK_MIB})
        axes.set_ylim(bottom=0)
        peak, state = self._last(tags.PEAK_MIB), sum(self._last(tag) for tag in STATE.values())
        title = f"peak {peak:.0f} of {self.memory_mib:.0f} MiB, model state {state:.0f}"
        _label(figure, title, {axes: "MiB"}, legend=axes)

    def _last(self, tag: str) -> float:
        return next(reversed(self.curves.get(tag, {}).values()), float("nan"))

    def _lines(self, axes: Any, color: str | None = None, /, **named: str) -> None:
        for name, tag in named.items():
            if curve := self.curves.get(tag):
                marker = "." if len(curve) < 30 else ""
                axes.plot(curve.keys(), curve.values(), label=name, color=color, marker=marker, linewidth=1.5)

    def _areas(self, axes: Any, named: Mapping[str, str]) -> None:
        """Stack areas, whose tags are logged together; one below a hundredth of the highest is left out."""
        curves = {name: self.curves[tag] for name, tag in named.items() if tag in self.curves}
        tops = {name: max(curve.values()) for name, curve in curves.items()}
        shown = {name: curves[name] for name, top in tops.items() if top > 0.01 * max(tops.values())}
        if shown:
            steps = list(next(iter(shown.values())))
            x = steps if len(steps) > 1 else [steps[0] - 1, *steps]  # an area needs a width
            heights = [[curve.get(step, curve.get(steps[0], 0.0)) for step in x] for curve in shown.values()]
            colors = [COLORS[name] for name in shown]
            axes.stackplot(x, *heights, labels=list(shown), colors=colors, linewidth=0)


def _label(figure: Any, title: str, ylabels: Mapping[Any, str], legend: Any) -> None:
    figure.suptitle(title, fontsize=11)
    for axes, text in ylabels.items():
        axes.set_ylabel(text, fontsize=10)
        axes.tick_params(labelsize=9)
    axes.set_xlabel("step", fontsize=9)
    legend.legend(fontsize=8, frameon=False, reverse=True, **BESIDE)


def _caption(label: Tensor) -> str:
    """Name a class, or the two that a mixed image has most of, the larger first."""
    if label.ndim == 0:
        return str(label.item())
    parts, classes = label.topk(min(2, len(label)))
    return "+".join(str(int(number)) for number, part in zip(classes, parts, strict=True) if part > LEAST)


def _curves_until(directory: Path, step: int) -> Curves:
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
    return {tag: {e.step: e.value for e in found if e.step <= step} for tag, found in scalars.items()}

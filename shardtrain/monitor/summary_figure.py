"""The curves of a run on TensorBoard: the custom-scalars page and the summary.

The summary is one figure per question: does the run learn, is it fast, does it fit. Its figures come first on
TensorBoard's first page, whose tags are in alphabetical order.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from shardtrain.job import pictures, tags
from shardtrain.job.data import Batch, EvalFeed
from shardtrain.job.pictures import Picture
from shardtrain.monitor.metrics import PHASES

REDRAW_S = 100.0  # a drawing takes about a second: 1 % of the run's time
SAMPLES = 32  # images of a batch that are shown

# Page → chart → tags, regular expressions among them. The summary has the first two charts of each page.
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
        "traffic, MiB per step": [tags.sent_mib(".*")],
    },
    "Does it fit?": {
        "memory of rank 0, MiB": [tags.PEAK_MIB],
        "of the model and its training state, MiB": [
            *(tags.PARAMS_MIB, tags.GRADS_MIB, tags.OPTIMIZER_MIB, tags.GATHERED_PEAK_MIB),
        ],
    },
}


class SummaryFigure:
    """Collects every curve of a run and draws them. ``memory_mib``: what the device has."""

    def __init__(self, directory: Path, validation: EvalFeed, first_step: int, memory_mib: float) -> None:
        self.path, self.validation, self.memory_mib = directory / "at_a_glance.png", validation, memory_mib
        self.curves = _curves_until(directory, first_step) if first_step else {}  # tag → step → value
        self.due_at = time.perf_counter() + REDRAW_S

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for tag, value in scalars.items():
            self.curves.setdefault(tag, {})[step] = value

    def samples(self, batch: Batch) -> Picture:
        """Return the first images of a training batch, as the model sees them."""
        prepare = self.validation.prepare
        return pictures.grid(batch.images[:SAMPLES], prepare.mean, prepare.std)

    def draw(self) -> dict[str, Picture | str]:
        """Return the figures by tag."""
        self.due_at = time.perf_counter() + REDRAW_S
        return {
            tag: pictures.plot(partial(self._draw_page, page), (5.5, 3.2))
            for tag, page in zip(tags.SUMMARY, PAGES, strict=True)
        }

    def _draw_page(self, page: str, figure: Any) -> None:
        """Draw the first two charts; beside each stand its tags with their latest values."""
        fits = page == list(PAGES)[-1]
        figure.suptitle(f"{page} There are {self.memory_mib:,.0f} MiB." if fits else page, fontsize=11)
        for axes, (chart, shown) in zip(
            figure.subplots(2, 1, sharex=True), PAGES[page].items(), strict=False
        ):
            for tag, curve in ((tag, self.curves[tag]) for tag in shown if tag in self.curves):
                label = f"{tag} {[*curve.values()][-1]:.4g}"
                axes.plot(curve.keys(), curve.values(), ".-", markersize=3, label=label)
                axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
            axes.set_title(chart, fontsize=9, loc="left")
            axes.set_ylim(bottom=0)
            axes.tick_params(labelsize=8)


def _curves_until(directory: Path, step: int) -> dict[str, dict[int, float]]:
    """Read what earlier processes of the run wrote for TensorBoard, up to ``step``; the latest one counts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), purge_orphaned_data=False).Reload()
    scalars = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    return {tag: {e.step: e.value for e in points if e.step <= step} for tag, points in scalars.items()}

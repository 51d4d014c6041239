"""Progress for people: a bar on a terminal, otherwise a line per report."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from shardtrain.monitor.sink import Sink

WIDTH = 24  # characters of the bar
REDRAW_S = 0.1


class Lines(Sink):
    """A line for each report."""

    def __init__(self, steps: int, steps_per_epoch: int, first_step: int = 0) -> None:
        self.steps, self.steps_per_epoch, self.first_step = steps, steps_per_epoch, first_step
        self.started = time.perf_counter()

    def say(self, text: str) -> None:
        print(text, flush=True)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.say(self.report(step, scalars))

    def report(self, step: int, scalars: Mapping[str, float]) -> str:
        where = f"step {step:>{len(str(self.steps))}}/{self.steps}  epoch {step / self.steps_per_epoch:.1f}"
        if "val/loss" in scalars:
            loss, acc1, acc5 = (scalars[f"val/{key}"] for key in ("loss", "acc1", "acc5"))
            return f"{where}  val loss {loss:.4f}  acc1 {acc1:.2f} %  acc5 {acc5:.2f} %"
        return (
            f"{where}  loss {scalars['train/loss']:.4f}  acc1 {scalars['train/acc1']:.2f} %  "
            f"lr {scalars['lr/group0']:.3g}  {scalars['perf/img_per_s']:.0f} img/s  {self.left(step)} left"
        )

    def left(self, step: int) -> str:
        """Time to the end, at the mean pace so far."""
        seconds = (time.perf_counter() - self.started) / (step - self.first_step) * (self.steps - step)
        minutes, seconds = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class Bar(Lines):
    """One line that is drawn over and over; evaluations stay above it."""

    def __init__(self, steps: int, steps_per_epoch: int, first_step: int = 0) -> None:
        super().__init__(steps, steps_per_epoch, first_step)
        self.drawn_at = 0.0
        self.latest = ""

    def say(self, text: str) -> None:
        sys.stdout.write(f"\r\x1b[K{text}\n")
        sys.stdout.flush()

    def step(self, step: int) -> None:
        now = time.perf_counter()
        if now - self.drawn_at < REDRAW_S and step < self.steps:
            return
        self.drawn_at = now
        done = WIDTH * step // self.steps
        bar = "█" * done + "·" * (WIDTH - done)
        sys.stdout.write(f"\r\x1b[K{bar} {step}/{self.steps}  {self.latest}{self.left(step)} left")
        sys.stdout.flush()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        if "val/loss" in scalars:
            self.say(self.report(step, scalars))
            return
        self.latest = (
            f"loss {scalars['train/loss']:.3f}  acc1 {scalars['train/acc1']:.1f} %  "
            f"{scalars['perf/img_per_s']:.0f} img/s  "
        )


class Tables(Sink):
    """What is said at the start and at the end, without progress between."""

    def say(self, text: str) -> None:
        print(text, flush=True)

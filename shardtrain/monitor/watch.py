"""The names of slow ranks, and a profile of some steps, by torch's profiler.

Each rank writes its own trace, for Perfetto or Chrome. `comm/trace.py` lists the named ranges in it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from torch.profiler import profile

from shardtrain import comm
from shardtrain.config.config import Config
from shardtrain.launch.launcher import Context
from shardtrain.monitor.metrics import Report, StepMetrics
from shardtrain.monitor.monitor import Monitor

PROFILED = 3  # steps per trace, from `monitor.profile_at` on
FOLDER = "traces"


class Watch(contextlib.AbstractContextManager["Watch"]):
    """The profile of some steps, and the names of slow ranks. Called after every step, on every rank."""

    def __init__(self, config: Config, context: Context, metrics: StepMetrics, monitor: Monitor) -> None:
        self._context = context
        self._metrics = metrics
        self._monitor = monitor
        self._slow: tuple[int, str] | None = None  # the slow rank of the last report, and its phase
        self._named: tuple[int, str] | None = None  # those that were last named
        self._profile: profile | None = None  # running since the step before `_first`
        self._first = config.monitor.profile_at or 0

    def __exit__(self, *_: object) -> None:
        if self._profile is not None:
            self._profile.stop()

    def step_done(self, step: int, report: Report | None) -> None:
        """Begin or end the profile after ``step``; name a slow rank. Collective when a profile ends."""
        if report is not None:
            slow = report.slow
            now = slow and slow[:2]
            # Once, if two reports in a row name it, since other programs often disturb one report.
            if slow and now == self._slow != self._named:
                self._monitor.say(f"step {step}: {slow.text}")
                self._named = now
            self._slow = now
        last = self._metrics.job.steps
        if self._profile is not None and step in (self._first + PROFILED - 1, last):
            self._finish(self._profile, step)
        if step + 1 == self._first <= last:
            with self._metrics.paused():
                self._profile = profile()
                self._profile.start()

    def _finish(self, current: profile, last: int) -> None:
        self._profile = None
        with self._metrics.paused():
            current.stop()
            name = f"{self._context.run_dir}/{FOLDER}/steps-{self._first}-{last}-rank"
            path = Path(f"{name}{self._context.rank_info.rank}.json")
            if self._monitor.write(path, lambda: _export(current, path)):
                self._monitor.say(f"steps {self._first} to {last} are in {name}*.json (for ui.perfetto.dev)")
            comm.barrier()  # or the others would wait for the slowest writer in the next step


def _export(current: profile, path: Path) -> None:
    """Write the trace to ``path``. Raises OSError if that fails; torch alone would only print it."""
    path.touch()
    current.export_chrome_trace(str(path))

"""A look at each step: slow ranks are named, and some steps are traced on request.

Steps are traced where `monitor.profile_at` says, or when somebody touches the file ``profile`` in the run
directory. Rank 0 looks for it with each report, and the report's exchange passes that on.
"""

from __future__ import annotations

import contextlib
import json

from shardtrain import comm
from shardtrain.comm import trace
from shardtrain.job import tags
from shardtrain.job.build import Job
from shardtrain.job.config import Config
from shardtrain.job.format import counted
from shardtrain.job.launch import Context
from shardtrain.monitor import timeline
from shardtrain.monitor.metrics import Report, SlowRank, StepMetrics
from shardtrain.monitor.monitor import Monitor

TRACED = 3  # steps
REQUEST, FOLDER = "profile", "timeline"


class Watch(contextlib.AbstractContextManager["Watch"]):
    """Called after every step, on every rank."""

    def __init__(
        self, config: Config, context: Context, job: Job, metrics: StepMetrics, monitor: Monitor
    ) -> None:
        self._metrics, self._monitor, self._last_step = metrics, monitor, job.steps
        self._title = f"{config.model.get('name', 'model')}, {counted(context.rank_info.world_size, 'rank')}"
        self._rank_0 = context.rank_info.rank == 0
        self._request, self._folder = context.run_dir / REQUEST, context.run_dir / FOLDER
        self._profile_at = config.monitor.profile_at
        self._slow: tuple[int, str] | None = None  # the slow rank of the last report, and its phase
        self._named: tuple[int, str] | None = None  # the slow rank that was named last
        self._requested = False
        self._recording = contextlib.ExitStack()
        self._tracing: tuple[int, trace.Trace] | None = None  # the first step, and the trace that is open

    def __exit__(self, *_: object) -> None:
        self._recording.close()

    def requested(self) -> bool:
        """Return whether somebody asked for a trace since the last call; the file is gone then."""
        with contextlib.suppress(OSError):
            if self._rank_0:
                self._request.unlink()
                return True
        return False

    def step_done(self, step: int, report: Report | None) -> None:
        """Look at a step after its update. Collective after steps that were traced or reported."""
        if report is not None:
            self._requested |= report.profile_requested
            self._name_slow_rank(step, report.slow)
        self._requested |= step + 1 == self._profile_at
        if self._tracing is not None and step in (self._tracing[0] + TRACED - 1, self._last_step):
            self._finish(*self._tracing)
        if self._requested and self._tracing is None and step < self._last_step:
            self._requested = False
            self._tracing = step + 1, self._recording.enter_context(trace.record(self._metrics.device))

    def _finish(self, first_step: int, taken: trace.Trace) -> None:
        self._recording.close()
        self._tracing = None
        with self._metrics.paused("pictures"):
            lanes = timeline.collect(taken.spans(), first_step)
            if self._rank_0:
                self._write(lanes)
            comm.barrier()  # or the others would wait for rank 0 in the next step

    def _name_slow_rank(self, step: int, slow: SlowRank | None) -> None:
        """Name a rank once that two reports in a row name: one report is often another program's doing."""
        now = slow and slow[:2]
        again, self._slow = now == self._slow, now
        if again and now != self._named:
            text = slow.text if slow else f"rank {self._named and self._named[0]} keeps up again"
            self._monitor.say(f"step {step}: {text}")
            self._named = now

    def _write(self, lanes: timeline.Lanes) -> None:
        first, last = lanes.steps[0], lanes.steps[-1]
        path, png = self._folder / f"steps-{first}-{last}.json", self._folder / f"step-{last}.png"
        drawn = self._monitor.picture(tags.TIMELINE_STEP, timeline.picture(lanes, last, self._title), png)
        if self._monitor.save(path, json.dumps(timeline.chrome(lanes))):
            shown = f", {png.name} shows the last" if drawn else ""
            self._monitor.say(f"steps {first} to {last} are in {path} (for ui.perfetto.dev){shown}")
        self._monitor.say(timeline.in_words(lanes, last))

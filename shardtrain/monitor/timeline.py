"""Trace steps of all ranks for Perfetto or Chrome, and draw one of them as a picture.

Steps are traced from `monitor.profile_at` on, or when somebody touches the file ``profile`` in the run
directory. Rank 0 looks for it with each report, and the report's exchange tells the other ranks.

Each rank is a lane. Its units compute; below them are their gathers and reductions, each from its start to
its result. Computation hides the communication below it. Exposed communication is waiting, in red.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from shardtrain import comm
from shardtrain.comm import trace
from shardtrain.comm.trace import Span
from shardtrain.job import tags
from shardtrain.job.config import Config
from shardtrain.job.format import counted
from shardtrain.job.launch import Context
from shardtrain.job.pictures import Picture, plot
from shardtrain.monitor.metrics import PHASES, WAITING, Report, SlowRank, StepMetrics
from shardtrain.monitor.monitor import Monitor
from shardtrain.plan.memory import MEMORY_KINDS

MOST_RANKS = 16  # ranks whose spans are collected and drawn
READINGS = 10  # readings of the clocks
TRACED = 3  # steps per trace
REQUEST, FOLDER = "profile", "timeline"
LEAST_NAMED = 0.012  # of a picture's width: what an upright name takes

COMPUTES = ("forward", "backward")  # kinds of a unit's spans
TRACKS = ("step", "phase", "unit", "wait", "gather", "reduce")  # of a rank in a trace, from top to bottom

# Kind of span, or kind and name → color, top and height as fractions of a rank's lane, legend.
STYLES = {
    "phase": ("#c6dde8", 0.05, 0.55, "forward and backward"),
    "phase data": (PHASES["data"], 0.05, 0.55, "loading images"),
    "phase optimizer": (PHASES["optimizer"], 0.05, 0.55, "optimizer"),
    "forward": (PHASES["forward"], 0.08, 0.49, "a unit's forward"),
    "backward": (PHASES["backward"], 0.08, 0.49, "a unit's backward"),
    "wait": (WAITING, 0.05, 0.55, "exposed waiting"),
    "gather": (MEMORY_KINDS["gathered"], 0.63, 0.13, "its all-gather under way"),
    "reduce": (MEMORY_KINDS["gradients"], 0.78, 0.13, "its reduce-scatter under way"),
}


class Lanes(NamedTuple):
    """Hold ``spans[rank]``, in seconds of the wall clock, of the steps from ``first_step`` on."""

    spans: list[list[Span]]
    first_step: int

    @property
    def steps(self) -> range:
        traced = sum(span.kind == "step" for span in self.spans[0])
        return range(self.first_step, self.first_step + traced)

    def of_step(self, step: int) -> tuple[float, float, list[list[Span]]]:
        """Return when the first rank began ``step``, when the last ended it, and the spans between."""
        index = step - self.first_step
        each = [[span for span in lane if span.kind == "step"][index] for lane in self.spans]
        start, end = min(span.start for span in each), max(span.end for span in each)
        lanes = [[span for span in lane if span.end > start and span.start < end] for lane in self.spans]
        return start, end, lanes


def collect(spans: Sequence[Span], first_step: int) -> Lanes:
    """Return the spans of the first `MOST_RANKS` ranks, on every rank. Collective."""
    # Hosts share only the wall clock. The largest of several readings was not interrupted between reading
    # the two clocks.
    offset = max(time.time() - time.perf_counter() for _ in range(READINGS))
    mine = spans if comm.rank() < MOST_RANKS else ()
    rows = [(span.kind, span.name, span.start + offset, span.end + offset) for span in mine]
    texts = comm.gather_texts(json.dumps(rows), comm.plain_transport())
    return Lanes([[Span(*row) for row in json.loads(text)] for text in texts[:MOST_RANKS]], first_step)


def chrome(lanes: Lanes) -> dict[str, Any]:
    """Return the spans in Chrome's trace event format, in microseconds since the first one."""
    zero = min((span.start for spans in lanes.spans for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(lanes.spans):
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        tracks: dict[str, list[list[Span]]] = {name: [] for name in TRACKS}
        for span in spans:  # into the first free row, since viewers drop overlapping spans
            rows = tracks["unit" if span.kind in COMPUTES else span.kind]
            if all(row[-1].end > span.start for row in rows):
                rows.append([])
            next(row for row in rows if not row or row[-1].end <= span.start).append(span)
        named = [(track, row) for track, rows in tracks.items() for row in rows]
        for number, (track, row) in enumerate(named):
            where = {"pid": rank, "tid": number}
            events.append({"ph": "M", **where, "name": "thread_name", "args": {"name": track}})
            for index, (kind, name, start, end) in enumerate(row):
                title = f"step {lanes.first_step + index}" if kind == "step" else f"{kind} {name}"
                times = {"ts": round(1e6 * (start - zero), 3), "dur": round(1e6 * (end - start), 3)}
                events.append({"ph": "X", **where, **times, "name": title, "cat": kind})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def in_words(lanes: Lanes, step: int) -> str:
    """Return a sentence: how long ``step`` took, and its longest wait."""
    start, end, spans = lanes.of_step(step)
    waits = [[(span.end - span.start, span.name) for span in lane if span.kind == "wait"] for lane in spans]
    took = f"step {step}: {1e3 * (end - start):.1f} ms"
    if not any(waits):
        return f"{took}, no waiting"
    shares = " / ".join(f"{100 * sum(seconds for seconds, _ in lane) / (end - start):.0f}" for lane in waits)
    longest, name, rank = max((*wait, rank) for rank, lane in enumerate(waits) for wait in lane)
    return f"{took}, waiting {shares} % by rank, longest {1e3 * longest:.1f} ms for {name} (rank {rank})"


def picture(lanes: Lanes, step: int, title: str) -> Picture | str:
    """Draw ``step`` of all ranks, or return why there is no picture."""
    start, end, spans = lanes.of_step(step)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for rank, lane in enumerate(spans):
            for kind, name, begun, ended in lane:
                computes = kind in COMPUTES
                style = STYLES.get(f"{kind} {name}") or STYLES.get(kind)
                if style is None or (computes and name == "the root"):  # the root's span contains all others
                    continue
                color, top, height, _ = style
                left, width = 1e3 * (begun - start), 1e3 * (ended - begun)
                middle, order = rank + top + height / 2, kind != "phase"  # others are drawn over phases
                axes.barh(middle, width, height, left, color=color, edgecolor="white", lw=0.5, zorder=order)
                if computes and ended - begun > LEAST_NAMED * (end - start):
                    text = {"ha": "center", "va": "center", "rotation": 90, "color": "white", "fontsize": 7}
                    axes.text(left + width / 2, middle, name, **text)
        axes.set(xlim=(0, 1e3 * (end - start)), ylim=(len(spans), 0), xlabel="ms")
        axes.set_yticks([rank + 0.3 for rank in range(len(spans))], [f"rank {r}" for r in range(len(spans))])
        axes.set_title(f"{title}, {in_words(lanes, step)}", fontsize=9, loc="left")
        handles = [axes.barh([0], [0], color=color, label=label) for color, _, _, label in STYLES.values()]
        figure.legend(handles=handles, ncols=len(handles), fontsize=8, loc="outside lower center")

    return plot(draw, (13, 1.4 + 1.1 * len(spans)))


class Watch(contextlib.AbstractContextManager["Watch"]):
    """Trace steps on request, and name slow ranks. Called after every step, on every rank."""

    def __init__(self, config: Config, context: Context, metrics: StepMetrics, monitor: Monitor) -> None:
        self._config, self._context, self._metrics, self._monitor = config, context, metrics, monitor
        self._slow: tuple[int, str] | None = None  # the slow rank of the last report, and its phase
        self._named: tuple[int, str] | None = None  # the slow rank that was last named
        self._requested = False
        self._recording = contextlib.ExitStack()
        self._tracing: tuple[int, trace.Trace] | None = None  # the first step, and the open trace

    def __exit__(self, *_: object) -> None:
        self._recording.close()

    def requested(self) -> bool:
        """Return whether somebody asked for a trace since the last call. Removes the file."""
        with contextlib.suppress(OSError):
            if self._context.rank_info.rank == 0:
                (self._context.run_dir / REQUEST).unlink()
                return True
        return False

    def step_done(self, step: int, report: Report | None) -> None:
        """Begin or end a trace after ``step``; name slow ranks. Collective after traced or reported steps."""
        if report is not None:
            self._requested |= report.profile_requested
            self._name_slow_rank(step, report.slow)
        self._requested |= step + 1 == self._config.monitor.profile_at
        if self._tracing is not None and step in (self._tracing[0] + TRACED - 1, self._metrics.job.steps):
            self._finish(*self._tracing)
        if self._requested and self._tracing is None and step < self._metrics.job.steps:
            self._requested = False
            self._tracing = step + 1, self._recording.enter_context(trace.record(self._metrics.device))

    def _finish(self, first_step: int, taken: trace.Trace) -> None:
        self._recording.close()
        self._tracing = None
        with self._metrics.paused("pictures"):
            lanes = collect(taken.spans(), first_step)
            if self._context.rank_info.rank == 0:
                self._write(lanes)
            comm.barrier()  # or the others would wait for rank 0 in the next step

    def _name_slow_rank(self, step: int, slow: SlowRank | None) -> None:
        """Name a rank once if two reports in a row name it, since other programs often disturb one report."""
        now = slow and slow[:2]
        again, self._slow = now == self._slow, now
        if again and now != self._named:
            text = slow.text if slow else f"rank {self._named and self._named[0]} keeps up again"
            self._monitor.say(f"step {step}: {text}")
            self._named = now

    def _write(self, lanes: Lanes) -> None:
        first, last, folder = lanes.steps[0], lanes.steps[-1], self._context.run_dir / FOLDER
        path, png = folder / f"steps-{first}-{last}.json", folder / f"step-{last}.png"
        ranks = counted(self._context.rank_info.world_size, "rank")
        title = f"{self._config.model.get('name', 'model')}, {ranks}"
        drawn = self._monitor.picture(tags.TIMELINE_STEP, picture(lanes, last, title), png)
        if self._monitor.save(path, json.dumps(chrome(lanes))):
            shown = f", {png.name} shows the last" if drawn else ""
            self._monitor.say(f"steps {first} to {last} are in {path} (for ui.perfetto.dev){shown}")
        self._monitor.say(in_words(lanes, last))

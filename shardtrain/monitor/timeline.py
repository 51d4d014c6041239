"""Steps of all ranks as a trace for Perfetto or Chrome, and one of them as a picture.

A rank is a lane. Its units compute; below them their gathers and reductions are under way, each from the
request to the result. Computation hides what lies below it. What it does not hide is waiting, in red.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from shardtrain import comm
from shardtrain.comm.trace import Span
from shardtrain.job.pictures import Picture, plot

MOST_TRACED = 64  # ranks whose spans are collected
MOST_DRAWN = 16  # ranks in a picture
LEAST_NAMED = 0.012  # of a picture's width, which a name turned upright takes

TRACKS = {  # kind of span → its rows in a trace, from top to bottom
    "step": "steps",
    "phase": "phases",
    "forward": "units",
    "backward": "units",
    "wait": "waiting",
    "gather": "gathers",
    "reduce": "reductions",
}

# Kind of span, or kind and name → color, top and height as parts of a rank's lane, legend.
STYLES = {
    "phase": ("#c6dde8", 0.05, 0.55, "forward and backward"),
    "phase data": ("tab:olive", 0.05, 0.55, "loading images"),
    "phase optimizer": ("#9fd39a", 0.05, 0.55, "optimizer"),
    "forward": ("tab:blue", 0.08, 0.49, "a unit's forward"),
    "backward": ("#17708a", 0.08, 0.49, "a unit's backward"),
    "wait": ("tab:red", 0.05, 0.55, "exposed waiting"),
    "gather": ("tab:orange", 0.63, 0.13, "its all-gather under way"),
    "reduce": ("tab:purple", 0.78, 0.13, "its reduce-scatter under way"),
}


class Lanes(NamedTuple):
    """``spans[rank]`` by rank 0's clock, the earliest first, of the steps from ``first_step`` on."""

    spans: list[list[Span]]
    first_step: int

    @property
    def steps(self) -> range:
        traced = sum(span.kind == "step" for span in self.spans[0])
        return range(self.first_step, self.first_step + traced)

    def of_step(self, step: int) -> tuple[float, float, list[list[Span]]]:
        """Return when the first rank began ``step``, when the last one ended it, and what happened between.

        Of many ranks these are the spans of the first few, which have room in a picture.
        """
        each = [
            [span for span in spans if span.kind == "step"][step - self.first_step]
            for spans in self.spans
            if spans
        ]
        start, end = min(span.start for span in each), max(span.end for span in each)
        lanes = self.spans[:MOST_DRAWN]
        return (
            start,
            end,
            [[span for span in lane if span.end > start and span.start < end] for lane in lanes],
        )


def collect(spans: Sequence[Span], first_step: int) -> Lanes:
    """Return every rank's spans, on every rank. Collective."""
    offset = offsets()[comm.rank()]
    mine = spans if comm.rank() < MOST_TRACED else ()
    rows = [(span.kind, span.name, span.start + offset, span.end + offset) for span in mine]
    texts = comm.gather_texts(json.dumps(rows), comm.plain_transport(), comm.control_device())
    return Lanes([[Span(*row) for row in json.loads(text)] for text in texts[:MOST_TRACED]], first_step)


def chrome(lanes: Lanes) -> dict[str, Any]:
    """Return the spans in Chrome's trace event format, in microseconds since the first one."""
    zero = min((span.start for spans in lanes.spans for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(lanes.spans):
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        tracks: dict[str, list[list[Span]]] = {name: [] for name in TRACKS.values()}
        for span in spans:  # into the first row with room, since viewers drop spans that overlap
            rows = tracks[TRACKS[span.kind]]
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
    """Say how long ``step`` took, and what was waited for longest."""
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
                computes = kind in ("forward", "backward")
                style = STYLES.get(f"{kind} {name}") or STYLES.get(kind)
                if style is None or (computes and name == "the root"):  # which computes around all others
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


# How far the ranks' clocks are apart. No rank leaves an all-reduce before all have entered it, which bounds
# the difference to rank 0's clock from both sides. Several rounds leave the narrowest bounds. Ranks of one
# host share a clock: where the difference may be 0, it is.

ROUNDS = 10


def offsets(clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Return the seconds to add to every rank's ``clock`` to have rank 0's. Collective."""
    device = comm.control_device()
    met = torch.zeros(comm.world_size(), ROUNDS, 2, dtype=torch.float64, device=device)
    for number in range(ROUNDS):
        entered = clock()
        comm.all_reduce(torch.zeros(1, device=device)).item()
        met[comm.rank(), number] = torch.tensor([entered, clock()], dtype=torch.float64)
    entered_at, left_at = comm.all_reduce(met).cpu().unbind(2)  # each [ranks, rounds]
    least = (entered_at[0] - left_at).amax(1)
    most = (left_at[0] - entered_at).amin(1)
    return torch.where((least <= 0) & (most >= 0), 0.0, (least + most) / 2).tolist()

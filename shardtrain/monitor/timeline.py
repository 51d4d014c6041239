"""Steps of all ranks as a trace for Perfetto or Chrome, and one of them as a picture.

A rank is a lane. In it units compute, under that their gathers and reductions are under way, each from the
moment it is asked for until its result is there. Where one lies below computing it is hidden; what is not
hidden shows as waiting, in red.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch

from shardtrain import comm
from shardtrain.comm.trace import Span
from shardtrain.job.pictures import Picture, plot

MOST_TRACED = 64  # ranks whose spans are collected
MOST_DRAWN = 16  # ranks in a picture

STEP = "step"
TRACKS = {  # kind → what its rows are called in a trace, from top to bottom
    "step": "steps",
    "phase": "phases",
    "forward": "units",
    "backward": "units",
    "wait": "waiting",
    "gather": "gathers",
    "reduce": "reductions",
}
PHASE_COLORS = {
    "data": "tab:olive",
    "forward": "#c6dbef",
    "backward": "#c7e9ea",
    "optimizer": "#9fd39a",
    "checkpoint": "tab:gray",
}
COLORS = {
    "forward": "tab:blue",
    "backward": "#17708a",
    "gather": "tab:orange",
    "reduce": "tab:purple",
    "wait": "tab:red",
}
LEGEND = {
    "forward": "a unit's forward",
    "backward": "a unit's backward",
    "gather": "its gather is under way",
    "reduce": "its reduction is under way",
    "wait": "exposed waiting",
    "data": "reading images",
    "optimizer": "optimizer",
}


class Lanes(NamedTuple):
    """``spans[rank]`` by rank 0's clock; the steps traced are ``first_step`` and those that follow."""

    spans: list[list[Span]]
    first_step: int

    @property
    def steps(self) -> range:
        traced = sum(span.kind == STEP for span in self.spans[0])
        return range(self.first_step, self.first_step + traced)

    def bounds(self, step: int) -> tuple[float, float]:
        """When the first rank began ``step`` and the last one ended it."""
        index = step - self.first_step
        found = [[span for span in spans if span.kind == STEP][index] for spans in self.spans if spans]
        return min(span.start for span in found), max(span.end for span in found)

    def waits(self, rank: int, step: int) -> list[Span]:
        start, end = self.bounds(step)
        return [span for span in self.spans[rank] if span.kind == "wait" and start <= span.start < end]


def collect(spans: Sequence[Span], first_step: int) -> Lanes:
    """Every rank's spans, on every rank. Collective."""
    offset = offsets()[comm.rank()]
    mine = spans if comm.rank() < MOST_TRACED else ()
    rows = [(span.kind, span.name, span.start + offset, span.end + offset) for span in mine]
    texts = comm.gather_texts(json.dumps(rows), comm.plain_transport(), comm.control_device())
    return Lanes([[Span(*row) for row in json.loads(text)] for text in texts[:MOST_TRACED]], first_step)


def chrome(lanes: Lanes) -> dict[str, Any]:
    """In Chrome's trace event format; microseconds since the first span."""
    start = min((span.start for spans in lanes.spans for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(lanes.spans):
        events += [{"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}]
        for number, (track, row) in enumerate(_rows(_numbered(spans, lanes.first_step))):
            events += [
                {"ph": "M", "pid": rank, "tid": number, "name": "thread_name", "args": {"name": track}}
            ]
            events += [_event(span, rank, number, start) for span in row]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _numbered(spans: Iterable[Span], first_step: int) -> Iterator[Span]:
    """With the numbers of steps in their names."""
    numbers = count(first_step)
    return (span._replace(name=f"step {next(numbers)}") if span.kind == STEP else span for span in spans)


def _event(span: Span, rank: int, row: int, start: float) -> dict[str, Any]:
    title = span.name if span.kind in ("step", "phase", "wait") else f"{span.kind} {span.name}"
    times = {"ts": round(1e6 * (span.start - start), 3), "dur": round(1e6 * (span.end - span.start), 3)}
    where = {"ph": "X", "pid": rank, "tid": row, "cat": span.kind}
    return {"name": title, **where, **times, "args": {"unit": span.name}}


def _rows(spans: Iterable[Span]) -> list[tuple[str, list[Span]]]:
    """Rows of a trace with their names, in which no two spans overlap: viewers would drop one."""
    tracks: dict[str, list[list[Span]]] = {name: [] for name in TRACKS.values()}
    for span in spans:
        rows = tracks[TRACKS[span.kind]]
        row = next((row for row in rows if row[-1].end <= span.start), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return [(name, row) for name, rows in tracks.items() for row in rows]


def in_words(lanes: Lanes, step: int) -> str:
    """How long ``step`` took, and what was waited for longest."""
    start, end = lanes.bounds(step)
    waits = [
        (span.end - span.start, rank, span.name) for rank in drawn(lanes) for span in lanes.waits(rank, step)
    ]
    shares = [sum(s.end - s.start for s in lanes.waits(rank, step)) / (end - start) for rank in drawn(lanes)]
    told = f"step {step}: {1e3 * (end - start):.1f} ms"
    if not waits:
        return f"{told}, no waiting"
    longest, rank, name = max(waits)
    each = " / ".join(f"{100 * share:.0f}" for share in shares)
    return f"{told}, waiting {each} % by rank, longest {1e3 * longest:.1f} ms for {name} (rank {rank})"


def drawn(lanes: Lanes) -> range:
    return range(min(MOST_DRAWN, len(lanes.spans)))


def picture(lanes: Lanes, step: int, title: str) -> Picture | str:
    """``step`` of all ranks, or why there is no picture."""
    start, end = lanes.bounds(step)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for rank in drawn(lanes):
            for span in lanes.spans[rank]:
                if span.end > start and span.start < end:
                    _draw_span(axes, span, rank, start, end)
        axes.set_xlim(0, 1e3 * (end - start))
        axes.set_ylim(len(drawn(lanes)), 0)
        axes.set_yticks([rank + 0.3 for rank in drawn(lanes)], [f"rank {rank}" for rank in drawn(lanes)])
        axes.set_xlabel("ms")
        axes.set_title(f"{title}, {in_words(lanes, step)}", fontsize=9, loc="left")
        colors = PHASE_COLORS | COLORS
        handles = [axes.barh([0], [0], color=colors[kind], label=text) for kind, text in LEGEND.items()]
        figure.legend(handles=handles, ncols=len(handles), fontsize=8, loc="outside lower center")

    return plot(draw, (13, 1.4 + 1.1 * len(drawn(lanes))))


# Of the width of a picture: what a letter takes, and what an upright name does.
LETTER, UPRIGHT = 0.0055, 0.012

# Of a rank's lane, from its top: where each kind of span is drawn, and how high.
PLACES = {
    "phase": (0.05, 0.55),
    "forward": (0.08, 0.49),
    "backward": (0.08, 0.49),
    "wait": (0.05, 0.55),
    "gather": (0.63, 0.13),
    "reduce": (0.78, 0.13),
}


def _draw_span(axes: Any, span: Span, rank: int, start: float, end: float) -> None:
    computes = span.kind in ("forward", "backward")
    if span.kind not in PLACES or (computes and span.name == "the root"):  # computes around all others
        return
    top, height = PLACES[span.kind]
    left, right = 1e3 * (max(span.start, start) - start), 1e3 * (min(span.end, end) - start)
    middle, order = rank + top + height / 2, list(PLACES).index(span.kind)
    color = PHASE_COLORS[span.name] if span.kind == "phase" else COLORS[span.kind]
    edge = "none" if span.kind == "phase" else "white"
    axes.barh(middle, right - left, height, left, color=color, edgecolor=edge, linewidth=0.5, zorder=order)
    share = (right - left) / (1e3 * (end - start))
    if computes and share > UPRIGHT:
        turned = 0 if share > len(span.name) * LETTER else 90
        at = (left + right) / 2
        axes.text(
            at,
            middle,
            span.name,
            ha="center",
            va="center",
            fontsize=7,
            color="white",
            zorder=10,
            rotation=turned,
        )


# How far the ranks' clocks are apart.
#
# Each rank notes when it enters and when it leaves a small all-reduce. Nobody leaves before everybody has
# entered, which bounds the difference to rank 0's clock from both sides, whatever the network. Rank 0
# enters at
# 100.000 and leaves at 100.003, rank 1 by its own clock enters at 7.001 and leaves at 7.002::
#
#     rank 1 leaves after rank 0 enters    7.002 + d >= 100.000    d >= 92.998
#     rank 1 enters before rank 0 leaves   7.001 + d <= 100.003    d <= 93.002
#
# Several rounds leave the narrowest of these. Ranks of one host share a clock: where no difference is
# possible,
# there is none.

ROUNDS = 10


def offsets(clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Seconds to add to every rank's ``clock`` to have rank 0's. Collective."""
    device = comm.control_device()
    met = torch.zeros(comm.world_size(), ROUNDS, 2, dtype=torch.float64, device=device)
    for number in range(ROUNDS):
        entered = clock()
        comm.all_reduce(torch.zeros(1, device=device)).item()
        met[comm.rank(), number] = torch.tensor([entered, clock()], dtype=torch.float64)
    entered_at, left_at = comm.all_reduce(met).cpu().unbind(2)  # each [ranks, rounds]
    least = (entered_at[0] - left_at).amax(1)
    most = (left_at[0] - entered_at).amin(1)
    middle = (least + most) / 2
    return torch.where((least <= 0) & (most >= 0), 0.0, middle).tolist()

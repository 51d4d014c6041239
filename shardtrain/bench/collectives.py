"""Gather and reduce by themselves: the engine's, the backend's own, and a memory copy of the same bytes.

A size is that of the whole flat vector, in bytes. Results are compared once per size before anything is
timed. The engine's reduction divides by the number of ranks and the backend's does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardtrain import comm
from shardtrain.bench.interleave import Runner, Track, attempt, interleave
from shardtrain.bench.progress import Progress
from shardtrain.bench.report import Report
from shardtrain.bench.settings import Settings
from shardtrain.bench.statistics import Spread, ratios, spread
from shardtrain.bench.table import aligned, quartiles
from shardtrain.comm import Flat, Transport
from shardtrain.layout import even

OURS, NATIVE, COPY = "shardtrain", "native", "copy"
MOVEMENTS = ("gather", "reduce")
ENOUGH = 4 * 2**20  # bytes that one timing moves at least, in repetitions, so that a clock can see it
MOST = 32  # repetitions

# Renamed in torch 2.13, where the old names warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Point(NamedTuple):
    movement: str
    size: int  # bytes of the flat vector
    repetitions: int  # in one timing
    tracks: dict[str, Track]


@dataclass
class Points:
    """What has been measured so far."""

    found: list[Point] = field(default_factory=list)


class Contest(NamedTuple):
    """One way to do a movement: ``run()`` does it, and ``right()`` tells whether the result is right."""

    run: Callable[[], object]
    right: Callable[[], bool]


def contests(movement: str, size: int, transport: Transport, device: torch.device) -> dict[str, Contest]:
    """The engine's movement, the backend's own and a copy, on vectors that they share.

    Rank r starts from values r + 1. Of two ranks a gather gives ``1 … 1 2 … 2``; a reduction gives their
    mean, 1.5, and the backend's own their sum, 3.
    """
    world, value = transport.world, float(transport.rank + 1)
    layout = even([size // 4], world, align=4)
    full, target = (torch.zeros(layout.padded, device=device) for _ in range(2))
    local = torch.zeros(layout.length(transport.rank), device=device)
    flat = Flat(full, local, layout)
    copy = Contest(lambda: target.copy_(full), lambda: torch.equal(target, full))
    if movement == "gather":
        local.fill_(value)
        whole = torch.arange(1.0, world + 1, device=device).repeat_interleave(layout.length(0))
        return {
            OURS: Contest(lambda: transport.gather(0, [flat]).wait(), lambda: torch.equal(full, whole)),
            NATIVE: Contest(lambda: _all_gather(full, local), lambda: torch.equal(full, whole)),
            COPY: copy,
        }
    full.fill_(value)
    total = world * (world + 1) / 2
    return {
        OURS: Contest(lambda: transport.reduce(0, [flat]).wait(), lambda: _all_are(local, total / world)),
        NATIVE: Contest(lambda: _reduce_scatter(local, full), lambda: _all_are(local, total)),
        COPY: copy,
    }


def measure(points: Points, settings: Settings, device: torch.device) -> None:
    """Fill ``points``, smallest vectors first."""
    transport = comm.open_transport()
    for size in sizes(settings):
        for movement in MOVEMENTS if transport.world > 1 else ():
            points.found.append(Point(movement, size, _repetitions(size), {}))
            _fill(points.found[-1], contests(movement, size, transport, device), settings, device)


def sizes(settings: Settings) -> Iterator[int]:
    size = settings.collectives.smallest_kib * 1024
    while size <= settings.collectives.largest_kib * 1024:
        yield size
        size *= 4


def report(output: Report, points: Points, interrupted: bool) -> None:
    native = f"{output.hardware['backend']}'s own"
    lines: list[str] = []
    panels: dict[str, dict[str, Spread]] = {}
    for movement in MOVEMENTS:
        found = [point for point in points.found if point.movement == movement]
        rows = [["", "shardtrain ms", f"{native} ms", "copy ms", f"of {native}", "quartiles", "of a copy"]]
        rows += [_row(point) for point in found]
        panels[movement] = {_size(p.size): r for p in found if (r := _ratio(p, NATIVE)) is not None}
        lines += [movement, *aligned(rows), *_failures(found), ""]
    if not points.found:
        lines = ["A single rank has no collectives: start it with torchrun --nproc-per-node N."]
    results = {"points": [_as_json(point) for point in points.found]}
    bars = (f"shardtrain's time over {native} (less is better)", panels)
    output.write(results, "\n".join(lines).rstrip(), bars, interrupted)


def _fill(point: Point, found: Mapping[str, Contest], settings: Settings, device: torch.device) -> None:
    for name, contest in found.items():
        point.tracks[name] = Track(failure=attempt(lambda contest=contest: _check(contest), device))  # type: ignore[misc]
    runners = {name: _repeat(contest.run, point.repetitions) for name, contest in found.items()}
    title = f"{point.movement} {_size(point.size)}"
    progress = Progress(title, settings.rounds, speaks=comm.rank() == 0, lines=1)
    first, last = settings.warmup, settings.warmup + settings.rounds
    interleave(runners, point.tracks, range(first), device, timed=False)
    interleave(runners, point.tracks, range(first, last), device, timed=True, tick=progress.tick)


def _check(contest: Contest) -> None:
    contest.run()
    if not contest.right():
        raise ValueError("the result is wrong")


def _all_are(tensor: torch.Tensor, value: float) -> bool:
    return torch.equal(tensor, torch.full_like(tensor, value))


def _repetitions(size: int) -> int:
    return max(1, min(MOST, ENOUGH // size))


def _repeat(run: Callable[[], object], times: int) -> Runner:
    def runner(_: int) -> torch.Tensor:
        for _ in range(times):
            run()
        return torch.zeros(())

    return runner


def _ratio(point: Point, name: str) -> Spread | None:
    """Our time over that of ``name``."""
    own, other = point.tracks[OURS].seconds, point.tracks[name].seconds
    return ratios(own, other) if own and other else None


def _row(point: Point) -> list[str]:
    def time(name: str) -> str:
        seconds = point.tracks[name].seconds
        return f"{spread(seconds).median / point.repetitions * 1e3:.3f}" if seconds else "-"

    native, copy = _ratio(point, NATIVE), _ratio(point, COPY)
    return [
        _size(point.size),
        *(time(name) for name in (OURS, NATIVE, COPY)),
        f"{native.median:.2f}" if native else "-",
        quartiles(native) if native else "-",
        f"{copy.median:.2f}" if copy else "-",
    ]


def _failures(found: Sequence[Point]) -> list[str]:
    return [
        f"{_size(point.size)}, {name}: not timed: {track.failure}"
        for point in found
        for name, track in point.tracks.items()
        if track.failure is not None
    ]


def _as_json(point: Point) -> dict[str, Any]:
    found = {name: _ratio(point, name) for name in (NATIVE, COPY)}
    return {
        "movement": point.movement,
        "bytes": point.size,
        "repetitions": point.repetitions,
        "seconds": {name: track.seconds for name, track in point.tracks.items()},
        "failures": {name: track.failure for name, track in point.tracks.items()},
        "ratio_to": {name: ratio._asdict() if ratio else None for name, ratio in found.items()},
    }


def _size(size: int) -> str:
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 1024} KiB"

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
from shardtrain.bench.contenders import TITLES, default_is_process_group
from shardtrain.bench.interleave import Progress, Runner, Spread, Track, attempt, interleave, ratios, spread
from shardtrain.bench.report import Report, quartiles
from shardtrain.bench.settings import Settings
from shardtrain.comm import Flat, Gradient, Tag, Transport
from shardtrain.comm.movement import ENTER, LEAVE
from shardtrain.job.format import MIB, aligned
from shardtrain.layout import Layout, even

OURS, GROUP, NATIVE, COPY = "shardtrain", "shardtrain_process_group", "native", "copy"
MOVEMENTS = ("gather", "reduce")
ENOUGH = 4 * MIB  # bytes that one timing moves at least, in repetitions, so that a clock can see it
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
    """One way to do a movement: ``run()`` does it; ``check()`` does it on known values and looks."""

    run: Callable[[], object]
    check: Callable[[], bool]


def contests(
    movement: str, size: int, transports: Mapping[str, Transport], device: torch.device
) -> dict[str, Contest]:
    """The engine's movement by each of ``transports``, the backend's own, and a copy.

    Rank r starts from values r + 1. Of two ranks a gather gives ``1 … 1 2 … 2``; a reduction gives their
    mean, 1.5, and the backend's own their sum, 3.
    """
    layout = even([size // 4], comm.world_size(), align=4)
    ours, native = (_gather, _native_gather) if movement == "gather" else (_reduce, _native_reduce)
    found = {name: ours(transport, layout, device) for name, transport in transports.items()}
    return {**found, NATIVE: native(layout, device), COPY: _copy(layout, device)}


def _gather(transport: Transport, layout: Layout, device: torch.device) -> Contest:
    """With the fences about it, which are what a gather costs where ranks share memory."""
    full, local = transport.allocate(
        layout, torch.zeros(layout.length(transport.rank), device=device), torch.float32
    )
    if not transport.in_place:
        full.untyped_storage().resize_(layout.padded * full.element_size())

    def run() -> None:
        transport.fence(ENTER)
        transport.gather(Tag(0, "bench"), [Flat(full, local, layout)]).wait()
        transport.fence(LEAVE)

    def check() -> bool:
        local.fill_(transport.rank + 1)
        run()
        return torch.equal(full, _whole(layout, device))

    return Contest(run, check)


def _reduce(transport: Transport, layout: Layout, device: torch.device) -> Contest:
    like = torch.zeros(layout.length(transport.rank), device=device)
    transport.allocate(
        layout, like, like.dtype
    )  # where ranks share memory, this decides how much gradients get
    full, own = like.new_zeros(layout.padded), like.clone()

    def run(value: float | None = None) -> torch.Tensor:
        # Shared memory is given back by a reduction; other memory can serve again.
        into = transport.gradient(layout, like) if transport.in_place else full
        gradient = Gradient(into, [own], layout, layout.pieces(transport.rank))
        if value is not None:
            gradient.full.fill_(value)
            own.fill_(value)
        transport.reduce(Tag(0, "bench"), [gradient]).wait()
        return gradient.own[0]

    def check() -> bool:
        return _all_are(run(transport.rank + 1), (transport.world + 1) / 2)

    return Contest(run, check)


def _native_gather(layout: Layout, device: torch.device) -> Contest:
    full = torch.zeros(layout.padded, device=device)
    local = torch.full((layout.length(comm.rank()),), comm.rank() + 1.0, device=device)

    def run() -> None:
        _all_gather(full, local)

    def check() -> bool:
        run()
        return torch.equal(full, _whole(layout, device))

    return Contest(run, check)


def _native_reduce(layout: Layout, device: torch.device) -> Contest:
    full = torch.full((layout.padded,), comm.rank() + 1.0, device=device)
    out = torch.zeros(layout.length(comm.rank()), device=device)

    def run() -> None:
        _reduce_scatter(out, full)

    def check() -> bool:
        run()
        return _all_are(out, layout.world * (layout.world + 1) / 2)

    return Contest(run, check)


def _copy(layout: Layout, device: torch.device) -> Contest:
    source, target = torch.ones(layout.padded, device=device), torch.zeros(layout.padded, device=device)

    def run() -> None:
        target.copy_(source)

    def check() -> bool:
        run()
        return torch.equal(source, target)

    return Contest(run, check)


def _whole(layout: Layout, device: torch.device) -> torch.Tensor:
    return torch.arange(1.0, layout.world + 1, device=device).repeat_interleave(layout.length(0))


def measure(points: Points, settings: Settings, device: torch.device) -> None:
    """Fill ``points``, smallest vectors first."""
    transports = _transports()
    for size in sizes(settings):
        for movement in MOVEMENTS if comm.world_size() > 1 else ():
            points.found.append(Point(movement, size, _repetitions(size), {}))
            _fill(points.found[-1], contests(movement, size, transports, device), settings, device)


def _transports() -> dict[str, Transport]:
    """What the engine uses by default, and the process group where that is something else."""
    kinds = {OURS: "auto"} if default_is_process_group() else {OURS: "auto", GROUP: "process_group"}
    return {name: comm.open_transport(kind) for name, kind in kinds.items()}


def sizes(settings: Settings) -> Iterator[int]:
    size = settings.collectives.smallest_kib * 1024
    while size <= settings.collectives.largest_kib * 1024:
        yield size
        size *= 4


def report(output: Report, points: Points, interrupted: bool) -> None:
    native = str(output.hardware["backend"])
    lines: list[str] = []
    panels: dict[str, dict[str, Spread]] = {}
    for movement in MOVEMENTS:
        found = [point for point in points.found if point.movement == movement]
        for name in _ours(found[0]) if found else ():
            found_ratios = {_size(point.size): _ratio(point, name, NATIVE) for point in found}
            panels[f"{movement}, {TITLES[name]}"] = {size: r for size, r in found_ratios.items() if r}
        lines += [movement, *_table(found, native), *_failures(found), ""] if found else []
    if not points.found:
        lines = ["A single rank has no collectives: start it with torchrun --nproc-per-node N."]
    results = {"points": [_as_json(point) for point in points.found]}
    bars = (f"time over {native}'s own (less is better)", panels)
    output.write(results, "\n".join(lines).rstrip(), bars, interrupted)


def _fill(point: Point, found: Mapping[str, Contest], settings: Settings, device: torch.device) -> None:
    for name, contest in found.items():
        point.tracks[name] = Track(failure=attempt(lambda contest=contest: _check(contest), device))  # type: ignore[misc]
    runners = {name: _repeat(contest.run, point.repetitions) for name, contest in found.items()}
    title = f"{point.movement} {_size(point.size)}"
    warmup, rounds = settings.warmup, settings.rounds
    progress = Progress(title, warmup + rounds, speaks=comm.rank() == 0, lines=1)
    interleave(runners, point.tracks, device, warmup=warmup, rounds=rounds, tick=progress.tick)


def _check(contest: Contest) -> None:
    if not contest.check():
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


def _ratio(point: Point, own: str, other: str) -> Spread | None:
    own_seconds, other_seconds = point.tracks[own].seconds, point.tracks[other].seconds
    return ratios(own_seconds, other_seconds) if own_seconds and other_seconds else None


def _ours(point: Point) -> list[str]:
    return [name for name in (OURS, GROUP) if name in point.tracks]


def _table(found: Sequence[Point], native: str) -> list[str]:
    """One row a size: milliseconds of each, then each of ours over the native one and over a copy."""
    titles = {OURS: "shardtrain", GROUP: "process group", NATIVE: native, COPY: "copy"}
    rows = [["ms", *(titles[name] for name in found[0].tracks)]]
    for name in _ours(found[0]):
        rows[0] += [f"{titles[name]} / {native}", "quartiles", f"{titles[name]} / copy"]
    return aligned([*rows, *(_row(point) for point in found)])


def _row(point: Point) -> list[str]:
    cells = [_size(point.size)]
    for track in point.tracks.values():
        each = spread(track.seconds).median / point.repetitions * 1e3 if track.seconds else None
        cells.append("-" if each is None else f"{each:.3f}")
    for name in _ours(point):
        native, copy = _ratio(point, name, NATIVE), _ratio(point, name, COPY)
        cells += [f"{native.median:.2f}", quartiles(native)] if native else ["-", "-"]
        cells.append(f"{copy.median:.2f}" if copy else "-")
    return cells


def _failures(found: Sequence[Point]) -> list[str]:
    return [
        f"{_size(point.size)}, {name}: not timed: {track.failure}"
        for point in found
        for name, track in point.tracks.items()
        if track.failure is not None
    ]


def _as_json(point: Point) -> dict[str, Any]:
    found = {name: {other: _ratio(point, name, other) for other in (NATIVE, COPY)} for name in _ours(point)}
    return {
        "movement": point.movement,
        "bytes": point.size,
        "repetitions": point.repetitions,
        "seconds": {name: track.seconds for name, track in point.tracks.items()},
        "failures": {name: track.failure for name, track in point.tracks.items()},
        "ratios": {
            name: {other: ratio._asdict() if ratio else None for other, ratio in row.items()}
            for name, row in found.items()
        },
    }


def _size(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // 1024} KiB"

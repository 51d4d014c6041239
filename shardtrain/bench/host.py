"""What a wrapper costs the host: its own time per unit, whatever the network does.

Large models on fast devices wait for Python when a unit's bookkeeping takes longer than its kernels. So the
ranks here are simulated (`simulated_group`), and the model computes next to nothing: many units of six
parameters with 60 elements in all. Contenders take turns; a contender's host time is its time less that of
the model that nobody has wrapped, in the same round::

    unwrapped 4 ms, FSDP2 52 ms, shardtrain 16 ms, 48 units
    host time a unit: FSDP2 (52 - 4) / 48 = 1 ms, shardtrain (16 - 4) / 48 = 0.25 ms, ratio 0.25

torch's simulated all-gather copies the local part once for each rank, one small copy after the other, which
no real one does: 1,024 of them take a millisecond. So the collectives of a step, two gathers and a reduction
a unit, are also timed by themselves, and a second ratio leaves them out on both sides.

Time is CPU time of this process, which others on the machine stretch less than time on the clock.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

import shardtrain
from shardtrain.bench.contenders import OPTIMIZERS, TITLES
from shardtrain.bench.interleave import Progress, Spread, Track, interleave, spread
from shardtrain.bench.report import Report, quartiles
from shardtrain.bench.settings import Settings
from shardtrain.comm import native
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.format import aligned
from shardtrain.job.launch import close_process_group, open_process_group
from shardtrain.layout import even

OURS, PEER, BARE, MOVES = "shardtrain", "fsdp2", "no_communication", "collectives"
WIDTH = 4
PARAMETERS = 6  # of a unit
CPU = torch.device("cpu")

# What is timed, in words. Of each, the unwrapped model's time is taken away.
ACTIVITIES = {
    "wrap": "wrapping the model",
    "step": "forward and backward",
    "update": "the optimizer's step",
}


class Block(nn.Module):
    """One unit: three linear layers of 4×4, each with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(PARAMETERS // 2)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def _shardtrain(model: nn.Module) -> nn.Module:
    return shardtrain.shard(model, units=[Block])


def _fsdp2(model: nn.Module) -> nn.Module:
    for module in model.children():
        fully_shard(module)
    fully_shard(model)
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    OURS: _shardtrain,
    PEER: _fsdp2,
    BARE: lambda model: model,
}


class Point(NamedTuple):
    """One activity in one world: a track for each contender."""

    world: int
    activity: str
    units: int
    tracks: dict[str, Track]

    def micros(self, name: str) -> Spread:
        """Host time of ``name``, microseconds a unit; of the collectives their whole time."""
        leave_out = () if name == MOVES else (BARE,)
        return spread([seconds * 1e6 / self.units for seconds in self._without(name, leave_out)])

    def ratio(self, leave_out: Sequence[str] = (BARE,)) -> Spread:
        """Of our host time to the peer's, round by round; host time is what is left without ``leave_out``."""
        pairs = zip(self._without(OURS, leave_out), self._without(PEER, leave_out), strict=False)
        return spread([ours / theirs for ours, theirs in pairs])

    def _without(self, name: str, leave_out: Sequence[str]) -> list[float]:
        rows = zip(*(self.tracks[each].seconds for each in (name, *leave_out)), strict=False)
        return [own - sum(others) for own, *others in rows]


@dataclass
class Points:
    """What has been measured so far, activities of one world after the other."""

    found: list[Point] = field(default_factory=list)


def measure(points: Points, settings: Settings) -> None:
    """Fill ``points``, smallest world first."""
    for world in settings.host.world_sizes:
        with simulated_group(world):
            _measure_world(points, settings, world)


def _measure_world(points: Points, settings: Settings, world: int) -> None:
    units = settings.host.units
    models: dict[str, nn.Module] = {}
    optimizers: dict[str, Optimizer] = {}
    batch = torch.randn(2, WIDTH)
    nothing = torch.zeros(())

    moves = _collectives(world, units)

    def wrap(name: str) -> Tensor:
        models[name] = WRAPPERS[name](nn.Sequential(*(Block() for _ in range(units))))
        return nothing

    def step(name: str) -> Tensor:
        if name == MOVES:
            moves()
            return nothing
        models[name].zero_grad()
        models[name](batch).sum().backward()
        return nothing

    def update(name: str) -> Tensor:
        optimizers[name].step()
        return nothing

    for activity, run in (("wrap", wrap), ("step", step), ("update", update)):
        names = (*WRAPPERS, MOVES) if activity == "step" else WRAPPERS
        points.found.append(Point(world, activity, units, {name: Track() for name in names}))
        _fill(points.found[-1], run, settings)
        if activity == "wrap":
            kind, options = OPTIMIZERS[settings.optimizer]
            optimizers.update((name, kind(m.parameters(), **options)) for name, m in models.items())


def _collectives(world: int, units: int) -> Callable[[], None]:
    """The collectives of one step and nothing else."""
    group = dist.group.WORLD
    assert group is not None
    layout = even([WIDTH * WIDTH, WIDTH] * (PARAMETERS // 2), world, align=4)
    full, local = torch.zeros(layout.padded), torch.zeros(layout.length(0))

    def run() -> None:
        for _ in range(units):
            native.all_gather(full, local, group)
            native.all_gather(full, local, group)
            native.reduce_scatter(local, full, group)

    return run


def _fill(point: Point, run: Callable[[str], Tensor], settings: Settings) -> None:
    runners = {name: lambda _, name=name: run(name) for name in point.tracks}  # type: ignore[misc]
    warmup, rounds = settings.warmup, settings.rounds
    title = f"{ACTIVITIES[point.activity]}, {point.world:,} ranks"
    progress = Progress(title, warmup + rounds, speaks=True, lines=1)
    with _no_collection():
        interleave(
            runners,
            point.tracks,
            CPU,
            warmup=warmup,
            rounds=rounds,
            tick=progress.tick,
            clock=time.process_time,
        )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's collector runs when it likes, and one contender would pay for all."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def report(output: Report, points: Points, interrupted: bool) -> None:
    done = [point for point in points.found if all(track.seconds for track in point.tracks.values())]
    lines: list[str] = []
    panels: dict[str, Mapping[str, Spread]] = {}
    for activity, words in ACTIVITIES.items():
        found = [point for point in done if point.activity == activity]
        if found:
            lines += [f"{words}, µs of host time a unit", *_table(found), ""]
            panels[words] = {f"{point.world:,} ranks": point.ratio() for point in found}
    failures = _failures(points)
    units = f"{done[0].units} units of {PARAMETERS} parameters; " if done else ""
    lines.append(f"{units}ranks are simulated\n")
    label = f"host time over {TITLES[PEER]}'s (less is better)"
    results = {"points": [_as_json(point) for point in done], "failures": failures}
    output.write(results, "\n".join([*lines, *failures]).rstrip(), (label, panels), interrupted)


def _table(found: list[Point]) -> list[str]:
    rows = [["ranks", TITLES[OURS], TITLES[PEER], "ratio", "quartiles"]]
    with_moves = all(MOVES in point.tracks for point in found)
    rows[0] += ["collectives alone", "ratio without"] if with_moves else []
    for point in found:
        ratio, own, peer = point.ratio(), point.micros(OURS).median, point.micros(PEER).median
        row = [f"{point.world:,}", f"{own:.0f}", f"{peer:.0f}", f"{ratio.median:.3f}", quartiles(ratio)]
        if with_moves:
            row += [f"{point.micros(MOVES).median:.0f}", f"{point.ratio((BARE, MOVES)).median:.3f}"]
        rows.append(row)
    return aligned(rows)


def _failures(points: Points) -> list[str]:
    return [
        f"{ACTIVITIES[point.activity]}, {point.world:,} ranks, {TITLES[name]}: {track.failure}"
        for point in points.found
        for name, track in point.tracks.items()
        if track.failure is not None
    ]


def _as_json(point: Point) -> dict[str, Any]:
    return {
        "activity": point.activity,
        "world_size": point.world,
        "units": point.units,
        "micros_a_unit": {name: point.micros(name)._asdict() for name in point.tracks if name != BARE},
        "ratio": point.ratio()._asdict(),
        "ratio_without_collectives": (
            point.ratio((BARE, MOVES))._asdict() if MOVES in point.tracks else None
        ),
        "seconds": {name: track.seconds for name, track in point.tracks.items()},
    }


# A process group of many ranks in one process, whose collectives reach nobody.


@contextlib.contextmanager
def simulated_group(world: int) -> Iterator[None]:
    """The default group while the block runs, as rank 0 of ``world`` sees it: torch's fake backend."""
    # Importing it registers the backend; torch has it among its own tests' tools, and nowhere else.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        close_process_group()


# Process groups that the launcher does not make: of a single rank, and of ranks started by a benchmark.


@contextlib.contextmanager
def process_group(place: RankInfo, device: torch.device, meeting: str) -> Iterator[None]:
    """The default group while the block runs, met at ``meeting`` in the launcher's store.

    Unlike `launch.process_group` it makes one for a single rank too, because the peers need it.
    """
    alone = place.world_size == 1
    store = dist.HashStore() if alone else PrefixStore(meeting, place.store)  # type: ignore[attr-defined]
    open_process_group(place, device, store)
    try:
        yield
    finally:
        close_process_group()

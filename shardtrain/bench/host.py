"""What a wrapper costs the host: its own time per unit, whatever the network does.

Large models on fast devices wait for Python when a unit's bookkeeping takes longer than its kernels. So the
ranks here are simulated (`simulated_group`), and the model computes next to nothing: many units of six
parameters with 60 elements in all. Contenders take turns; a contender's host time is its time less that of
the model that nobody has wrapped, in the same round::

    unwrapped 4 ms, FSDP2 52 ms, shardtrain 16 ms, 48 units
    host time per unit: FSDP2 (52 - 4) / 48 = 1 ms, shardtrain (16 - 4) / 48 = 0.25 ms, ratio 0.25

torch's simulated all-gather copies the local shard once for each rank, one small copy after the other, which
no real one does: 1,024 of them take a millisecond. So the collectives of a step, two gathers and a reduction
per unit, are also timed by themselves, and a second ratio leaves them out on both sides.

Time is CPU time of this process, which others on the machine stretch less than time on the clock.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

import shardtrain
from shardtrain.bench.comparison import Spread, spread
from shardtrain.bench.contenders import OPTIMIZERS, TITLES
from shardtrain.bench.interleave import Samples
from shardtrain.bench.report import Program, Results, median, quartiles, table
from shardtrain.comm import native
from shardtrain.job.launch import close_process_group
from shardtrain.layout import even

OURS, PEER, BARE, COLLECTIVES = "shardtrain", "fsdp2", "no_communication", "collectives"
WIDTH = 4
PARAMETERS = 6  # of a unit

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


def wrapped(name: str, units: int) -> nn.Module:
    """Return a new model as contender ``name`` wraps it."""
    model = nn.Sequential(*(Block() for _ in range(units)))
    if name == OURS:
        return shardtrain.shard(model, units=[Block])
    if name == PEER:
        for module in (*model, model):
            fully_shard(module)
    return model


class Point(NamedTuple):
    """What has been measured of one activity in one world."""

    world: int
    activity: str
    units: int
    samples: dict[str, Samples]

    @property
    def title(self) -> str:
        return f"{ACTIVITIES[self.activity]}, {self.world:,} ranks"

    def micros(self, name: str) -> Spread:
        """Return the host time of ``name`` in µs per unit; for the collectives their whole time."""
        leave_out = () if name == COLLECTIVES else (BARE,)
        return spread([seconds * 1e6 / self.units for seconds in self._without(name, leave_out)])

    def ratio(self, leave_out: Sequence[str] = (BARE,)) -> Spread:
        """Return the ratio of our time to the peer's, round by round, both without that of ``leave_out``."""
        pairs = zip(self._without(OURS, leave_out), self._without(PEER, leave_out), strict=False)
        return spread([ours / theirs for ours, theirs in pairs])

    def cells(self) -> list[tuple[str, str]]:
        """Return µs of each per unit, and the ratio, with and without the collectives."""
        ratio = self.ratio()
        cells = [("ranks", f"{self.world:,}")]
        cells += [(TITLES[name], median(self.micros(name), 0)) for name in (OURS, PEER)]
        cells += [("ratio", median(ratio, 3)), ("quartiles", quartiles(ratio))]
        if COLLECTIVES in self.samples:
            cells.append(("collectives alone", median(self.micros(COLLECTIVES), 0)))
            cells.append(("ratio without", median(self.ratio((BARE, COLLECTIVES)), 3)))
        return cells

    def failures(self) -> list[str]:
        failed = {name: samples.failure for name, samples in self.samples.items() if samples.failure}
        return [f"{self.title}, {TITLES.get(name, name)}: {failure}" for name, failure in failed.items()]

    def facts(self) -> dict[str, Any]:
        without = self.ratio((BARE, COLLECTIVES)) if COLLECTIVES in self.samples else None
        return {
            "activity": self.activity,
            "world_size": self.world,
            "units": self.units,
            "micros_a_unit": {name: self.micros(name) for name in self.samples if name != BARE},
            "ratio": self.ratio(),
            "ratio_without_collectives": without,
            "seconds": {name: samples.values for name, samples in self.samples.items()},
        }

    def _without(self, name: str, leave_out: Sequence[str]) -> list[float]:
        rows = zip(*(self.samples[each].values for each in (name, *leave_out)), strict=False)
        return [own - sum(others) for own, *others in rows]


class HostBench(Program):
    def measure(self) -> None:
        self.points: list[Point] = []  # the activities of one world after the other
        for world in self.settings.host.world_sizes:
            with simulated_group(world):
                self._measure(world)

    def _measure(self, world: int) -> None:
        units, (kind, options) = self.settings.host.units, OPTIMIZERS[self.settings.optimizer]
        models: dict[str, nn.Module] = {}
        batch = torch.randn(2, WIDTH)

        def wrap(name: str) -> None:
            models[name] = wrapped(name, units)

        def step(name: str) -> None:
            models[name].zero_grad()
            models[name](batch).sum().backward()

        self._time(world, "wrap", {name: partial(wrap, name) for name in (OURS, PEER, BARE)})
        optimizers: dict[str, Optimizer] = {
            name: kind(m.parameters(), **options) for name, m in models.items()
        }
        steps = {name: partial(step, name) for name in models}
        self._time(world, "step", {**steps, COLLECTIVES: _collectives(world, units)})
        self._time(world, "update", {name: optimizer.step for name, optimizer in optimizers.items()})

    def _time(self, world: int, activity: str, work: dict[str, Callable[[], object]]) -> None:
        point = Point(world, activity, self.settings.host.units, {name: Samples() for name in work})
        self.points.append(point)
        nothing = torch.zeros(())

        def run(own: Callable[[], object], _: int) -> Tensor:
            own()
            return nothing

        runners = {name: partial(run, own) for name, own in work.items()}
        gc.collect()
        gc.disable()  # Python's collector runs when it likes, and one contender would pay for all
        try:
            self.interleave(runners, point.samples, point.title, lines=1, clock=time.process_time)
        finally:
            gc.enable()

    def results(self) -> Results:
        done = [point for point in self.points if all(each.values for each in point.samples.values())]
        lines: list[str] = []
        panels: dict[str, dict[str, Spread | None]] = {}
        for activity, words in ACTIVITIES.items():
            points = [point for point in done if point.activity == activity]
            if points:
                lines += table(f"{words}, µs of host time per unit", [point.cells() for point in points])
                panels[words] = {f"{point.world:,} ranks": point.ratio() for point in points}
        failures = [failure for point in self.points for failure in point.failures()]
        units = f"{self.settings.host.units} units of {PARAMETERS} parameters"
        lines += [f"{units}; ranks are simulated", "", *failures]
        facts = {"points": [point.facts() for point in done], "failures": failures}
        return Results(lines, facts, f"host time over {TITLES[PEER]}'s (less is better)", panels)


def _collectives(world: int, units: int) -> Callable[[], None]:
    """Return what does the collectives of one step and nothing else."""
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


@contextlib.contextmanager
def simulated_group(world: int) -> Iterator[None]:
    """Inside, this process is rank 0 of ``world`` in a process group whose collectives reach nobody."""
    # Importing it registers the backend; torch has it among its own tests' tools, and nowhere else.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        close_process_group()

"""Measure a wrapper's host time per unit, without a network.

Large models on fast devices wait for Python if a unit's bookkeeping takes longer than its kernels. Here ranks
are simulated (`simulated_group`), and the model computes next to nothing: many units of six parameters with
60 elements in all. Contenders take turns. A contender's host time is its time minus that of the unwrapped
model in the same round::

    unwrapped 4 ms, FSDP2 52 ms, shardtrain 16 ms, 48 units
    host time per unit: FSDP2 (52 - 4) / 48 = 1 ms, shardtrain (16 - 4) / 48 = 0.25 ms, ratio 0.25

torch's simulated all-gather copies the local shard once per rank, which no real one does: 1,024 copies take
a millisecond. So the collectives of a step, two gathers and a reduction per unit, are also timed alone, and a
second ratio excludes them on both sides.

Time is this process's CPU time, which other processes influence less than wall-clock time.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardtrain
from shardtrain.bench.contenders import TITLES, adamw
from shardtrain.bench.interleave import Runner, Samples, Spread, ratios, spread
from shardtrain.bench.report import Bench, Cells, median, quartiles
from shardtrain.comm import native
from shardtrain.job.launch import close_process_group
from shardtrain.layout import even

OURS, PEER, BARE, COLLECTIVES = "shardtrain", "fsdp2", "no_communication", "collectives"
WIDTH = 4
PARAMETERS = 6  # per unit

# What is timed, in words. The unwrapped model's time is subtracted from each.
ACTIVITIES = {"wrap": "wrapping the model", "step": "forward and backward", "update": "the optimizer's step"}


class Block(nn.Sequential):
    """Compute one unit: three linear layers of 4×4, each with a bias."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(PARAMETERS // 2)))


def wrapped(name: str, units: int) -> nn.Module:
    """Return a new model, wrapped by contender ``name``."""
    model = nn.Sequential(*(Block() for _ in range(units)))
    if name == OURS:
        return shardtrain.shard(model, units=[Block])
    if name == PEER:
        for module in (*model, model):
            fully_shard(module)
    return model


def figures(samples: Mapping[str, Samples], units: int) -> dict[str, Any]:
    """Return µs per unit of each contender, and the ratios of shardtrain's time to the peer's.

    The unwrapped model's time is subtracted; in the second ratio also that of the collectives.
    """

    def without(name: str, *leave_out: str) -> list[float]:
        rows = zip(*(samples[each].values for each in (name, *leave_out)), strict=False)
        return [own - sum(others) for own, *others in rows]

    def ratio(*leave_out: str) -> Spread | None:
        return ratios(without(OURS, *leave_out), without(PEER, *leave_out))

    seconds = {name: without(name, BARE) for name in samples if name not in (BARE, COLLECTIVES)}
    if COLLECTIVES in samples:
        seconds[COLLECTIVES] = samples[COLLECTIVES].values
    return {
        "micros_a_unit": {name: spread([1e6 * s / units for s in own]) for name, own in seconds.items()},
        "ratio": ratio(BARE),
        "ratio_without_collectives": ratio(BARE, COLLECTIVES) if COLLECTIVES in samples else None,
    }


def measure(bench: Bench) -> None:
    units = bench.settings.host.units
    bench.note = f"{units} units of {PARAMETERS} parameters; ranks are simulated"
    for world in bench.settings.host.world_sizes:
        with simulated_group(world):
            _measure(bench, world, units)


def _measure(bench: Bench, world: int, units: int) -> None:
    models: dict[str, nn.Module] = {}
    batch = torch.randn(2, WIDTH)

    def wrap(name: str, _: int) -> None:
        models[name] = wrapped(name, units)

    def step(name: str, _: int) -> None:
        models[name].zero_grad()
        models[name](batch).sum().backward()

    def update(name: str, _: int) -> None:
        optimizers[name].step()

    _time(bench, world, "wrap", {name: partial(wrap, name) for name in (OURS, PEER, BARE)})
    optimizers = {name: adamw(model) for name, model in models.items()}
    steps: dict[str, Runner] = {name: partial(step, name) for name in models}
    _time(bench, world, "step", {**steps, COLLECTIVES: _collectives(world, units)})
    _time(bench, world, "update", {name: partial(update, name) for name in models})


def _time(bench: Bench, world: int, activity: str, runners: Mapping[str, Runner]) -> None:
    words, units = ACTIVITIES[activity], bench.settings.host.units
    gc.collect()
    gc.disable()  # otherwise one contender would pay for a garbage collection of all
    try:
        samples = bench.timed(runners, f"{words}, {world:,} ranks", clock=time.process_time)
    finally:
        gc.enable()
    numbers = figures(samples, units)
    micros, ratio = numbers["micros_a_unit"], numbers["ratio"]
    cells: Cells = [("ranks", f"{world:,}")]
    cells += [(TITLES[name], median(micros[name], 0)) for name in (OURS, PEER)]
    cells += [("ratio", median(ratio, 3)), ("quartiles", quartiles(ratio))]
    if COLLECTIVES in micros:
        cells.append(("collectives alone", median(micros[COLLECTIVES], 0)))
        cells.append(("ratio without", median(numbers["ratio_without_collectives"], 3)))
    facts = {"activity": activity, "world_size": world, "units": units, **numbers}
    bench.add(f"{words}, µs of host time per unit", cells, facts, samples)


def _collectives(world: int, units: int) -> Runner:
    """Return a runner that runs only the collectives of one step."""
    group = dist.group.WORLD
    assert group is not None
    layout = even([WIDTH * WIDTH, WIDTH] * (PARAMETERS // 2), world, align=4)
    full, local = torch.zeros(layout.padded), torch.zeros(layout.length(0))

    def run(_: int) -> None:
        for _ in range(units):
            native.all_gather(full, local, group)
            native.all_gather(full, local, group)
            native.reduce_scatter(local, full, group=group)

    return run


@contextlib.contextmanager
def simulated_group(world: int, rank: int = 0) -> Iterator[None]:
    """Make this process ``rank`` of ``world`` inside, in a process group whose collectives move nothing."""
    # The import registers the backend, which torch has only among its test utilities.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        close_process_group()

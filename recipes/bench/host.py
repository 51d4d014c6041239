"""Measure a wrapper's host time per unit, without a network.

Large models on fast devices wait for Python if a unit's bookkeeping takes longer than its kernels. Here ranks
are simulated (`simulated_group`), and the model computes next to nothing: many units of six parameters with
60 elements in all. Contenders take turns. A contender's host time is its time minus that of the base in the
same round::

    base 4 ms, FSDP2 52 ms, shardtrain 16 ms, 48 units
    host time per unit: FSDP2 (52 - 4) / 48 = 1 ms, shardtrain (16 - 4) / 48 = 0.25 ms, ratio 0.25

The base is the unwrapped model and, in forward and backward, the collectives of a step by themselves, two
gathers and a reduction per unit: torch's simulated all-gather copies the local shard once per rank, which no
real one does, and 1,024 copies take a millisecond.

Time is this process's CPU time, which other processes influence less than wall-clock time.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardtrain
from shardtrain.device import BACKENDS
from shardtrain.job.launch import close_process_group

from .collectives import movements
from .compared import Bench
from .contenders import adamw
from .interleave import Samples

OURS, PEER, BASE = "shardtrain", "fsdp2", "base"
WIDTH = 4
PARAMETERS = 6  # per unit
BYTES = 4 * (WIDTH * WIDTH + WIDTH) * PARAMETERS // 2  # of a unit


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


def without_base(samples: dict[str, Samples]) -> None:
    """Leave of each contender's time what it takes beyond the base, in the same round."""
    base = samples.pop(BASE).values
    for own in samples.values():
        own.values = [seconds - other for seconds, other in zip(own.values, base, strict=False)]


def measure(bench: Bench) -> None:
    settings = bench.settings
    bench.note = f"{settings.units} units of {PARAMETERS} parameters; ranks are simulated"
    for world in settings.world_sizes:
        with simulated_group(world):
            _measure(bench, world)


def _measure(bench: Bench, world: int) -> None:
    models: dict[str, nn.Module] = {}
    optimizers: dict[str, torch.optim.Optimizer] = {}
    batch, units = torch.randn(2, WIDTH), bench.settings.units
    gather, reduce = (
        movements(kind, BYTES, {}, bench.device)[BACKENDS["cpu"]] for kind in ("gather", "reduce")
    )

    def wrap(name: str, _: int) -> None:
        models[name] = wrapped(name, units)

    def step(name: str, _: int) -> None:
        models[name].zero_grad()
        models[name](batch).sum().backward()
        if name == BASE:
            for movement in (gather, gather, reduce) * units:
                movement()

    def update(name: str, _: int) -> None:
        optimizers[name].step()

    for activity, words in ((wrap, "wrapping"), (step, "forward and backward"), (update, "optimizer.step")):
        title = f"{words}, {world:,} ranks"
        how = "µs per unit", 1e6 / units, [PEER], None
        comparison = bench.begin((OURS, PEER, BASE), title, *how)
        gc.collect()
        gc.disable()  # otherwise one contender would pay for a garbage collection of all
        try:
            runners = {name: partial(activity, name) for name in comparison.samples}
            bench.time(comparison, runners, clock=time.process_time)
        finally:
            gc.enable()
            without_base(comparison.samples)
        optimizers.update((name, adamw(model)) for name, model in models.items() if activity is wrap)


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

"""The benchmark's command line: one word for the program, then Hydra's ``key=value``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shardtrain.bench.contenders import CASES, OPTIMIZERS, PRECISIONS, TITLES, Case, Setup, superfluous
from shardtrain.device import ACCELERATOR
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.hydra_app import compose
from shardtrain.job.schema import UserError, above, at_least, checked, nearest, one_of

CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class Collectives:
    smallest_kib: int = at_least(1)
    largest_kib: int = at_least(1)


@dataclass(frozen=True)
class Host:
    world_sizes: tuple[int, ...]
    units: int = at_least(1)


@dataclass(frozen=True)
class Settings:
    """`config.yaml` explains every key."""

    suite: bool
    memory: bool
    contenders: tuple[str, ...] | None
    out: str | None
    name: str | None
    collectives: Collectives
    host: Host
    model: str = one_of(*CASES)
    reference: str = one_of(*TITLES)
    rounds: int = at_least(1)
    warmup: int = at_least(0)
    precision: str = one_of(*PRECISIONS)
    accumulate: int = at_least(1)
    optimizer: str = one_of(*OPTIMIZERS)
    lr: float = above(0)
    image_size: int | None = at_least(1)
    batch_size: int | None = at_least(1)
    seed: int = at_least(0)
    device: str = one_of("auto", "cpu", ACCELERATOR)
    threads: int | None = at_least(1)

    def case(self, name: str) -> Case:
        """Return the named case with the sizes asked for."""
        case = CASES[name]
        return dataclasses.replace(
            case,
            image_size=self.image_size or case.image_size,
            batch_size=self.batch_size or case.batch_size,
        )

    def setup(self, device: torch.device) -> Setup:
        return Setup(self.optimizer, self.lr, PRECISIONS[self.precision], device)

    def to_run(self) -> list[str]:
        """Return the contenders asked for, else those that differ here and the reference. Collective."""
        left_out = set() if self.contenders else superfluous() - {self.reference}
        return [name for name in self.contenders or TITLES if name not in left_out]


def read(arguments: Sequence[str], speak: bool) -> Settings | None:
    """Return the settings that ``arguments`` ask for; None when they asked for something to be printed."""
    raw = compose(arguments, speak=speak, folder=CONFIGS)
    if raw is None:
        return None
    settings = checked(raw, Settings)
    _check(settings)
    if settings.threads is None and RankInfo.from_environment(os.environ).local_world_size > 1:
        return dataclasses.replace(settings, threads=1)  # ranks of one host then compete for cores alike
    return settings


def _check(settings: Settings) -> None:
    names, sizes, worlds = settings.contenders, settings.collectives, settings.host.world_sizes
    listed, reference = f"contenders=[{','.join(names or ())}]", settings.reference
    for name in names or ():
        if name not in TITLES:
            raise UserError(f"contenders: {name}{nearest(name, TITLES)} (valid: {', '.join(TITLES)})")
    if names == ():
        raise UserError(f"{listed}: expected at least one of {', '.join(TITLES)}")
    if names and len(set(names)) < len(names):
        raise UserError(f"{listed}: a name is listed twice")
    if names and reference not in names:
        raise UserError(f"reference={reference} is not among {listed}: add it, or choose another reference")
    if settings.suite and settings.memory:
        raise UserError("suite=true measures time and memory=true memory: choose one, and model=NAME")
    if sizes.smallest_kib > sizes.largest_kib:
        smallest, largest = (f"collectives.{key}={value}" for key, value in vars(sizes).items())
        raise UserError(f"{smallest} is more than {largest}")
    if not worlds or min(worlds) < 2:
        listed = ",".join(map(str, worlds))
        raise UserError(f"host.world_sizes=[{listed}]: expected numbers of ranks, each at least 2")

"""The benchmark's command line: one word for the program, then Hydra's ``key=value``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shardtrain.bench.contenders import CASES, OPTIMIZERS, PRECISIONS, TITLES, Case, Setup
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
    device: str = one_of("auto", "cpu", "cuda")
    threads: int | None = at_least(1)

    @property
    def chosen(self) -> list[str]:
        """Names of the contenders to run."""
        return list(self.contenders or TITLES)

    def case(self, name: str) -> Case:
        """The named case with the sizes asked for."""
        case = CASES[name]
        return dataclasses.replace(
            case,
            image_size=self.image_size or case.image_size,
            batch_size=self.batch_size or case.batch_size,
        )

    def setup(self, device: torch.device) -> Setup:
        return Setup(self.optimizer, self.lr, PRECISIONS[self.precision], device)


def read(arguments: Sequence[str], speak: bool) -> Settings | None:
    """The settings that ``arguments`` ask for; None when they asked for something to be printed."""
    raw = compose(arguments, speak=speak, folder=CONFIGS)
    if raw is None:
        return None
    settings = checked(raw, Settings)
    _check(settings)
    return settings


def with_default_threads(settings: Settings, place: RankInfo) -> Settings:
    """One thread a rank where several ranks share a host: contenders then compete for cores alike."""
    if settings.threads is None and place.local_world_size > 1:
        return dataclasses.replace(settings, threads=1)
    return settings


def what_is_measured(settings: Settings, program: str) -> str:
    """A short name, for the output directory and the title."""
    if program != "steps":
        return program
    return ("memory-" if settings.memory else "") + ("suite" if settings.suite else settings.model)


def _check(settings: Settings) -> None:
    for name in settings.contenders or ():
        if name not in TITLES:
            raise UserError(f"contenders: {name}{nearest(name, TITLES)} (valid: {', '.join(TITLES)})")
    if settings.contenders == ():
        raise UserError(f"contenders=[]: expected at least one of {', '.join(TITLES)}")
    if len(set(settings.chosen)) < len(settings.chosen):
        raise UserError(f"contenders=[{','.join(settings.chosen)}]: a name is listed twice")
    if settings.reference not in settings.chosen:
        raise UserError(
            f"reference={settings.reference} is not among contenders=[{','.join(settings.chosen)}]: "
            "add it there, or choose another reference"
        )
    if settings.suite and settings.memory:
        raise UserError("suite=true measures time and memory=true memory: choose one, and model=NAME")
    if settings.collectives.smallest_kib > settings.collectives.largest_kib:
        raise UserError(
            f"collectives.smallest_kib={settings.collectives.smallest_kib} is more than "
            f"collectives.largest_kib={settings.collectives.largest_kib}"
        )
    if not settings.host.world_sizes or min(settings.host.world_sizes) < 2:
        raise UserError(
            f"host.world_sizes=[{','.join(map(str, settings.host.world_sizes))}]: expected numbers of ranks, "
            "each at least 2"
        )

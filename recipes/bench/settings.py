"""Read the benchmark's command line: one word for the program, then Hydra's ``key=value``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shardtrain.device import ACCELERATOR, count
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.errors import UserError
from shardtrain.job.hydra_app import compose
from shardtrain.job.schema import at_least, checked, one_of

from .contenders import CASES, PRECISIONS, SUITE, TITLES, Case

# The values that null stands for in the configuration.
ON_CPUS = {"model": "resnet18", "precision": "fp32", "channels_last": False}
ON_GPUS = {"model": "resnet50_224", "precision": "bf16", "channels_last": True}

PROGRAMS = ("steps", "suite", "memory", "collectives", "host")


@dataclass(frozen=True)
class Settings:
    """`config.yaml` explains every key."""

    channels_last: bool
    out: str | None
    results: str | None
    contenders: tuple[str, ...] | None = one_of(*TITLES)
    program: str = one_of(*PROGRAMS)
    model: str = one_of(*CASES)
    reference: str = one_of(*TITLES)
    rounds: int = at_least(1)
    warmup: int = at_least(0)
    precision: str = one_of(*PRECISIONS)
    accumulate: int = at_least(1)
    image_size: int | None = at_least(1)
    batch_size: int | None = at_least(1)
    seed: int = at_least(0)
    device: str = one_of("auto", "cpu", ACCELERATOR)
    threads: int | None = at_least(1)
    sizes_kib: tuple[int, ...] = at_least(1)
    world_sizes: tuple[int, ...] = at_least(2)
    units: int = at_least(1)

    def __post_init__(self) -> None:
        for key in ("contenders", "sizes_kib", "world_sizes"):
            if getattr(self, key) == ():
                raise UserError(f"{key}=[]: expected at least one")
        for name in self.models:
            self.case(name)

    @property
    def models(self) -> tuple[str, ...]:
        return SUITE if self.program == "suite" else (self.model,)

    def case(self, name: str) -> Case:
        """Return the named case with the configured sizes."""
        case = CASES[name]
        return dataclasses.replace(
            case,
            image_size=self.image_size or case.image_size,
            batch_size=self.batch_size or case.batch_size,
            memory_format=torch.channels_last if self.channels_last else torch.contiguous_format,
        )


def read(arguments: Sequence[str], speak: bool) -> Settings | None:
    """Return the settings of ``arguments``; None if a flag asks for output."""
    first = [f"program={word}" if word in PROGRAMS else word for word in arguments[:1]]
    raw = compose([*first, *arguments[1:]], speak=speak, folder=Path(__file__).parent / "configs")
    if raw is None:
        return None
    on_gpu = raw["device"] == ACCELERATOR or (raw["device"] == "auto" and count() > 0)
    for key, value in (ON_GPUS if on_gpu else ON_CPUS).items():
        raw[key] = value if raw[key] is None else raw[key]
    if raw["threads"] is None and RankInfo.from_environment(os.environ).local_world_size > 1:
        raw["threads"] = 1  # so that ranks of one host compete equally for cores
    return checked(raw, Settings)

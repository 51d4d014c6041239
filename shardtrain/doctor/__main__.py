"""``-m shardtrain.doctor +recipe=resnet``, alone or under torchrun: one line a check, exit code 0 or 1."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shardtrain.doctor import installation, memory
from shardtrain.doctor.installation import FAILED, Finding, shared
from shardtrain.doctor.twin import Twins
from shardtrain.job import launch
from shardtrain.job.build import build
from shardtrain.job.config import Config
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.hydra_app import read_beside
from shardtrain.job.model import uncompiled
from shardtrain.job.schema import UserError, at_least

CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class Keys:
    """`config.yaml` explains every key."""

    out: str | None
    steps: int = at_least(1)


@dataclass(frozen=True)
class Settings:
    keys: Keys
    config: Config

    @property
    def device(self) -> str:
        return self.config.device

    @property
    def threads(self) -> int | None:
        return self.config.threads


def read(arguments: Sequence[str], speak: bool) -> Settings | None:
    """The settings that ``arguments`` ask for; None when they asked for something to be printed."""
    found = read_beside(Keys, arguments, speak=speak, folder=CONFIGS)
    if found is None:
        return None
    settings = Settings(*found)
    if settings.config.parallel.traffic is not None:
        raise UserError(
            f"parallel.traffic={settings.config.parallel.traffic}: the doctor compares with an unsharded "
            "model, for which nothing is rounded; examine the job with parallel.traffic=null"
        )
    return settings


def findings(settings: Settings, place: RankInfo, device: torch.device) -> Iterator[Finding]:
    """Each check's finding, on every rank. Collective."""
    # A compiler rounds, and draws random numbers, in its own way: what is examined is the sharding.
    job, config = build(uncompiled(settings.config), place.rank, place.world_size, device)
    run_dir = Path(config.run.dir or "outputs").expanduser()
    kept = config.checkpoint.keep and config.checkpoint.keep + 2  # the best one, and the one being written
    checks: list[Callable[[], Finding]] = [
        installation.versions,
        lambda: installation.backend(place, device),
        installation.shared_memory,
        lambda: installation.clocks(place, device),
        lambda: installation.cores(place, device),
        installation.pictures,
    ]
    for check in checks:
        yield from shared([check()])
    yield Twins(job, config).examine(min(settings.keys.steps, job.steps))
    yield from shared(memory.check(job, config, settings.keys.out))
    needed = memory.checkpoint_bytes(job)
    first_here = place.local_rank == 0  # one rank of a host looks at its disk
    yield from shared([installation.disk(run_dir, needed, kept)] if first_here else [])


def examine(settings: Settings, place: RankInfo, device: torch.device) -> None:
    """Print what is found; leave with code 1 if anything has failed."""
    failed = False
    for finding in findings(settings, place, device):
        failed = failed or finding.verdict == FAILED
        if place.rank == 0:
            print(finding, flush=True)
    if failed:
        sys.exit(1)


def main() -> None:
    # On some processors MKL adds up in another order where memory is aligned otherwise, and a unit's
    # parameters lie end to end. Bits are compared here; MKL reads this when it is first used.
    os.environ.setdefault("MKL_CBWR", "AVX2")
    launch.start(read, examine)


if __name__ == "__main__":
    main()

"""Print one line and exit with 0 or 1: ``-m shardtrain.doctor +recipe=resnet``, alone or under torchrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shardtrain.doctor.twin import Twins
from shardtrain.job import launch
from shardtrain.job.build import build
from shardtrain.job.config import Config
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.hydra_app import read_beside
from shardtrain.job.model import uncompiled
from shardtrain.job.schema import UserError, at_least


@dataclass(frozen=True)
class DoctorKeys:
    """`config.yaml` explains every key."""

    steps: int = at_least(1)


@dataclass(frozen=True)
class DoctorSettings:
    """Hold the command line's settings. ``config``: the training program's."""

    keys: DoctorKeys
    config: Config
    device: str
    threads: int | None


def read(arguments: Sequence[str], speak: bool) -> DoctorSettings | None:
    """Return the settings of ``arguments``; None if a flag asks for output."""
    both = read_beside(DoctorKeys, arguments, speak=speak, folder=Path(__file__).parent / "configs")
    if both is None:
        return None
    keys, config = both
    if config.parallel.traffic is not None:
        raise UserError(
            f"parallel.traffic={config.parallel.traffic}: the doctor compares with an unsharded "
            "model, for which nothing is rounded; examine the job with parallel.traffic=null"
        )
    return DoctorSettings(keys, config, config.device, config.threads)


def examine(settings: DoctorSettings, rank_info: RankInfo, device: torch.device) -> None:
    """Print the finding on rank 0; exit with code 1 if sharding changes anything."""
    # Uncompiled, since a compiler rounds and draws random numbers differently.
    job, config = build(uncompiled(settings.config), rank_info.rank, rank_info.world_size, device)
    equal, finding = Twins(job, config).examine(min(settings.keys.steps, job.steps))
    if rank_info.rank == 0:
        print(finding, flush=True)
    if not equal:
        sys.exit(1)


def main() -> None:
    # On some processors the order of MKL's sums depends on alignment, and a unit's parameters lie end to end.
    # The doctor compares bits. MKL reads this variable at its first use.
    os.environ.setdefault("MKL_CBWR", "AVX2")
    launch.start(read, examine)


if __name__ == "__main__":
    main()

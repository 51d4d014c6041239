"""``-m shardtrain.doctor +recipe=resnet``, alone or under torchrun: one line per check, exit code 0 or 1."""

from __future__ import annotations

import importlib
import itertools
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch.torch_version import TorchVersion

from shardtrain import comm, introspect
from shardtrain.doctor import FAILED, OK, WARNING, Finding, shared
from shardtrain.doctor.twin import Twins
from shardtrain.job import launch
from shardtrain.job.build import Job, build
from shardtrain.job.config import Config
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.format import MIB
from shardtrain.job.hydra_app import read_beside
from shardtrain.job.model import uncompiled
from shardtrain.job.schema import UserError, at_least
from shardtrain.job.step import Step
from shardtrain.plan.memory import memory_of_step, state_bytes
from shardtrain.plan.simulate import Plan, plan_of

OLDEST_TORCH = "2.11"
SMALLEST_SHM = 64 * MIB  # what containers give unless told otherwise; loader workers need more
PEAK_TOLERANCE = 0.1  # between the planned peak and the measured one


@dataclass(frozen=True)
class DoctorKeys:
    """`config.yaml` explains every key."""

    steps: int = at_least(1)


@dataclass(frozen=True)
class DoctorSettings:
    """What the command line asks for. ``config``: the training program's."""

    keys: DoctorKeys
    config: Config
    device: str
    threads: int | None


def read(arguments: Sequence[str], speak: bool) -> DoctorSettings | None:
    """Return the settings that ``arguments`` ask for; None when they asked for something to be printed."""
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
    """Print every finding on rank 0; leave with code 1 if a check has failed."""
    failed = False
    for finding in findings(settings, rank_info, device):
        failed = failed or finding.verdict == FAILED
        if rank_info.rank == 0:
            print(finding, flush=True)
    if failed:
        sys.exit(1)


def findings(settings: DoctorSettings, rank_info: RankInfo, device: torch.device) -> Iterator[Finding]:
    """Yield the findings of every check, on every rank. Collective."""
    # A compiler rounds, and draws random numbers, in its own way: what is examined is the sharding.
    job, config = build(uncompiled(settings.config), rank_info.rank, rank_info.world_size, device)
    yield from shared([check_versions()])
    yield from shared([check_shared_memory()])
    yield Twins(job, config).examine(min(settings.keys.steps, job.steps))
    yield from shared(check_plan(job, config))
    size = checkpoint_bytes(job)
    first_here = rank_info.local_rank == 0  # one rank of a host looks at its disk
    yield from shared([check_disk(config, size)] if first_here else [])


def check_versions() -> Finding:
    """Check that torch is new enough, and that torchvision was built for it."""
    text = f"torch {version('torch')}, torchvision {version('torchvision')}"
    if TorchVersion(version("torch")) < OLDEST_TORCH:
        return Finding(FAILED, text, f'pip install "torch>={OLDEST_TORCH}"')
    try:
        importlib.import_module("torchvision").ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    except (ImportError, RuntimeError) as error:
        reason = str(error).split("\n", 1)[0]
        return Finding(FAILED, f"{text} do not fit together ({reason})", "install both from one index")
    return Finding(OK, text)


def check_shared_memory() -> Finding:
    """Check that ranks of a host can share memory, and that loader workers can pass batches on."""
    if not (hasattr(os, "memfd_create") and hasattr(socket, "send_fds")):
        return Finding(WARNING, "ranks cannot share memory here", "they exchange messages; that needs Linux")
    folder = Path("/dev/shm")
    size = shutil.disk_usage(folder).total if folder.is_dir() else 0
    text = f"ranks can share memory; /dev/shm has {size // MIB:,} MiB"
    advice = "data.workers above 0 may fail; in a container give it more with --shm-size"
    return Finding(OK, text) if size > SMALLEST_SHM else Finding(WARNING, text, advice)


def check_plan(job: Job, config: Config) -> list[Finding]:
    """Take two steps and compare the second one with rank 0's plan. Collective."""
    step = Step.of(job, config.train.clip_grad_norm)
    batches = [batch[:2] for batch in itertools.islice(iter(job.train), config.train.accumulate)]
    step(batches)
    with comm.meter() as traffic:
        timeline = memory_of_step(step, batches)
    if comm.rank() > 0:
        return []
    measured = state_bytes(job.model, job.optimizer, job.ema) | traffic.bytes
    return [plan_finding(plan_of(config, job, rank=0), measured, timeline.peak.total)]


def plan_finding(plan: Plan, measured: Mapping[str, int], peak: int) -> Finding:
    """Compare state and traffic exactly, the peak to a tolerance."""
    planned = {**plan.sent, **{name: getattr(plan, name) for name in ("parameters", "optimizer", "averages")}}
    pairs = [(name, size, planned.get(name, 0)) for name, size in measured.items()]
    wrong = [f"{name} {size:,} for {expected:,}" for name, size, expected in pairs if size != expected]
    if wrong:
        return Finding(FAILED, f"other bytes than planned: {'; '.join(wrong)}", "is every rank alike?")
    apart = peak / plan.peak - 1
    sizes = f"peak {peak / MIB:.1f} MiB, planned {plan.peak / MIB:.1f} ({100 * apart:+.1f} %)"
    text = f"state and traffic are as planned; {sizes}"
    near = abs(apart) <= PEAK_TOLERANCE
    return Finding(OK, text) if near else Finding(WARNING, text, "leave room for the difference")


def checkpoint_bytes(job: Job) -> int:
    """Return the bytes that all ranks save together. Collective."""
    inside, held = introspect(job.model), sum(state_bytes(job.model, job.optimizer, job.ema).values())
    saves = comm.rank() in inside.primary_ranks  # other replicas have the same
    return int(comm.all_reduce(torch.tensor(held * saves, device=inside.device)))


def check_disk(config: Config, checkpoint_bytes: int) -> Finding:
    """Check that the run directory's disk can be written and has room for checkpoints."""
    run_dir = Path(config.run.dir or "outputs").expanduser().absolute()
    folder = next(path for path in (run_dir, *run_dir.parents) if path.is_dir())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding(FAILED, f"{folder} cannot be written ({error.strerror})", "choose another run.dir")
    checkpoints = config.checkpoint.keep and config.checkpoint.keep + 2  # the best, and one being written
    free, size = shutil.disk_usage(folder).free, f"{checkpoint_bytes / MIB:,.0f}"
    text = f"{folder} has {free / MIB:,.0f} MiB free for {checkpoints} checkpoints of {size}"
    if free < checkpoint_bytes * checkpoints:
        return Finding(FAILED, text, "free some, lower checkpoint.keep, or choose another run.dir")
    return Finding(OK, text)


def main() -> None:
    # On some processors MKL adds up in another order where memory is aligned otherwise, and a unit's
    # parameters lie end to end. Bits are compared here; MKL reads this when it is first used.
    os.environ.setdefault("MKL_CBWR", "AVX2")
    launch.start(read, examine)


if __name__ == "__main__":
    main()

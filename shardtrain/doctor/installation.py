"""Whether this machine has what a run needs. Each check gives one finding; nothing is left behind."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardtrain import comm
from shardtrain.job import dist_env
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.format import MIB, counted

OLDEST_TORCH = (2, 11)
SMALLEST_SHM = 64 * MIB  # what containers give unless told otherwise; loader workers need more
LARGEST_SKEW = 1.0  # seconds between clocks
SLOWEST_DISK = 20.0  # MiB/s with fsync
PROBE_BYTES = 8 * MIB


def versions() -> Finding:
    """Torch is new enough, and torchvision was built for it."""
    found = {name: version(name) for name in ("torch", "torchvision")}
    text = ", ".join(f"{name} {number}" for name, number in found.items())
    if tuple(int(part) for part in found["torch"].split(".")[:2]) < OLDEST_TORCH:
        return Finding(FAILED, text, f'pip install "torch>={OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}"')
    try:
        importlib.import_module("torchvision").ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    except (ImportError, RuntimeError) as error:
        reason = str(error).split("\n", 1)[0]
        return Finding(FAILED, f"{text} do not fit together ({reason})", "install both from one index")
    return Finding(OK, text)


def backend(place: RankInfo, device: torch.device) -> Finding:
    """The ranks' collectives add up. Collective."""
    name = "nccl" if device.type == "cuda" else "gloo"
    there = dist.is_nccl_available() if name == "nccl" else dist.is_gloo_available()
    if not there:
        return Finding(FAILED, f"this torch has no {name}", "install a build of torch that has it")
    total = comm.all_reduce(torch.ones(1, device=device)).item()
    if total != place.world_size:
        return Finding(
            FAILED, f"{name}: the sum of ones over {place.world_size} ranks is {total}", "check the network"
        )
    ranks = (
        "one rank, which needs no backend" if place.world_size == 1 else f"{place.world_size} ranks add up"
    )
    return Finding(OK, f"{name} is there; {ranks}")


def shared_memory() -> Finding:
    """Ranks of a host can share memory, and loader workers can pass batches on."""
    if not (hasattr(os, "memfd_create") and hasattr(socket, "send_fds")):
        return Finding(WARNING, "ranks cannot share memory here", "they exchange messages; that needs Linux")
    folder = Path("/dev/shm")
    size = shutil.disk_usage(folder).total if folder.is_dir() else 0
    text = f"ranks can share memory; /dev/shm has {size // MIB:,} MiB"
    if size <= SMALLEST_SHM:
        return Finding(
            WARNING, text, "data.workers above 0 may fail; in a container give it more with --shm-size"
        )
    return Finding(OK, text)


def clocks(place: RankInfo, device: torch.device, rounds: int = 5) -> Finding:
    """Clocks of different ranks agree. Collective: the best of a few rounds, so that no delay counts."""
    least = float("inf")
    for _ in range(rounds):
        comm.barrier()
        times = torch.zeros(place.world_size, dtype=torch.float64, device=device)
        times[place.rank] = time.time()
        comm.all_reduce(times)
        least = min(least, float(times.max() - times.min()))
    text = f"clocks of {counted(place.world_size, 'rank')} agree to {max(least, 1e-3):.3f} s"
    if least > LARGEST_SKEW:
        return Finding(WARNING, text, "times in logs and traces will not match; run an NTP client")
    return Finding(OK, text)


def disk(run_dir: Path, checkpoint_bytes: int, checkpoints: int) -> Finding:
    """The run directory's disk can be written, is fast enough, and has room for the checkpoints."""
    folder = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.is_dir())
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            start = time.perf_counter()
            file.write(os.urandom(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
            speed = PROBE_BYTES / MIB / (time.perf_counter() - start)
    except OSError as error:
        return Finding(FAILED, f"{folder} cannot be written ({error.strerror})", "choose another run.dir")
    free, needed = shutil.disk_usage(folder).free, checkpoint_bytes * checkpoints
    room = f"{checkpoints} checkpoints of {checkpoint_bytes / MIB:,.0f}"
    text = f"{folder} has {free / MIB:,.0f} MiB free for {room}"
    if free < needed:
        return Finding(FAILED, text, "free some, lower checkpoint.keep, or choose another run.dir")
    if speed < SLOWEST_DISK:
        return Finding(
            WARNING, f"{text}, at {speed:.0f} MiB/s", "saves will take long; choose a faster disk for run.dir"
        )
    return Finding(OK, f"{text}, and keeps them at {speed:.0f} MiB/s")


def cores(place: RankInfo, device: torch.device) -> Finding:
    """Ranks of a host do not compete for its cores."""
    there = dist_env.cores()
    threads = torch.get_num_threads()
    ranks, each = counted(place.local_world_size, "rank"), counted(threads, "thread")
    text = f"{ranks} here × {each}, {counted(there, 'core')}"
    if device.type == "cpu" and place.local_world_size * threads > there:
        return Finding(WARNING, text, "they compete; lower threads, or start fewer ranks")
    return Finding(OK, text)


def pictures() -> Finding:
    """TensorBoard can be imported; matplotlib is welcome."""
    try:
        importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        return Finding(
            FAILED,
            f"TensorBoard cannot be imported ({error})",
            "pip install tensorboard, or monitor.tensorboard=false",
        )
    text = f"tensorboard {version('tensorboard')}"
    try:
        return Finding(OK, f"{text}, matplotlib {version('matplotlib')}")
    except PackageNotFoundError:
        return Finding(
            WARNING, f"{text}, no matplotlib", 'pictures are left out; pip install "shardtrain[bench]"'
        )


# What a check finds: one line, from one rank or from all.

OK, WARNING, FAILED = "ok", "warning", "failed"


class Finding(NamedTuple):
    """``text`` says what was found; ``advice``, unless all is well, what to do."""

    verdict: str
    text: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.verdict:<8} {self.text}" + (f": {self.advice}" if self.advice else "")


def shared(findings: Sequence[Finding]) -> list[Finding]:
    """Every rank's findings on every rank; what all ranks found is listed once. Collective."""
    texts = comm.gather_texts(json.dumps(findings), comm.plain_transport(), comm.control_device())
    ranks: dict[Finding, list[int]] = {}
    for rank, text in enumerate(texts):
        for found in json.loads(text):
            ranks.setdefault(Finding(*found), []).append(rank)
    return [_of_ranks(finding, found, len(texts)) for finding, found in ranks.items()]


def _of_ranks(finding: Finding, ranks: list[int], world: int) -> Finding:
    if len(ranks) == world:
        return finding
    names = ", ".join(map(str, ranks))
    return finding._replace(text=f"rank{'s' if len(ranks) > 1 else ''} {names}: {finding.text}")

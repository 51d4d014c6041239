"""Measure the peak memory of a whole job on CPUs above its imports, each contender in fresh processes.

    torchrun --nproc-per-node 2 tests/bench/memory.py model=resnet152

It takes the keys of `steps.py`, but not rounds, warmup and device.

Rank 0 starts as many processes as there are ranks. They form their own process group and train a few steps
while rank 0 watches them: one contender at a time, so that contenders share nothing.

The proportional set size (PSS) of a page is its size divided by the number of processes that map it. So the
sum over ranks counts shared memory once. It is read from ``/proc/PID/smaps_rollup``.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, spawn

from shardtrain.config.errors import UserError
from shardtrain.launch.launcher import open_process_group, start
from shardtrain.launch.ranks import RankInfo

from compared import Facts, compared, table, write
from contenders import POOL, Case, build, usual
from rounds import Samples, attempt
from settings import Settings, read

MIB = 2**20
STEPS = 5  # optimizer state exists after the first; allocators settle in the others
INTERVAL_S = 0.01  # seconds between two readings
ROLLUP = "/proc/{}/smaps_rollup"


def run(settings: Settings, rank_info: RankInfo, device: torch.device) -> None:
    """Watch one contender after the other; print and write the peaks."""
    if not Path(ROLLUP.format("self")).exists():
        raise UserError("memory reads /proc/PID/smaps_rollup, which this system does not have (Linux does)")
    if rank_info.local_world_size < rank_info.world_size:
        raise UserError("memory watches the processes of one host: start all ranks on it")
    cases: dict[str, Facts] = {}
    for case in settings.cases:
        samples = {name: Samples() for name in settings.contenders or usual()}
        for name, own in samples.items():
            watch = partial(watch_ranks, case, settings, name, rank_info.world_size)
            watched = attempt(watch if rank_info.rank == 0 else lambda: None, own)
            if watched is not None:
                peak, own.losses = watched
                own.values.append(peak)
        facts = compared(samples, (settings.reference, "ddp"), settings.precision)
        title = (
            f"{case.shape} in {settings.precision}, peak of the whole job above its imports, {STEPS} steps"
        )
        cases[title] = facts
        if rank_info.rank == 0:
            print(table(title, facts, "MiB", 1 / MIB))
            write(settings, device, cases)


def watch_ranks(case: Case, settings: Settings, name: str, world: int) -> tuple[int, list[float]]:
    """Train ``name`` in one fresh process per rank; return the peak bytes of all, and their mean losses.

    Raises RuntimeError with the reason of the first rank that ends early; the others are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = (case, settings, name, world, folder, torch.get_num_threads())
        ranks = spawn(train, arguments, world, join=False)  # type: ignore[no-untyped-call]
        peak = 0
        try:
            while not ranks.join(INTERVAL_S):
                peak = max(peak, pss(ranks.pids()))
        except ProcessException as error:
            raise RuntimeError(f"a rank ended: {str(error).strip().splitlines()[-1]}") from None
        finally:
            for process in ranks.processes:
                process.kill()
        reports = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    before, losses = zip(*reports, strict=True)
    return peak - sum(before), list(map(fmean, zip(*losses, strict=True)))


def pss(pids: Iterable[int]) -> int:
    """Return the PSS of the processes, in bytes; 0 for those that have just ended."""
    total = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines = Path(ROLLUP.format(pid)).read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def train(
    rank: int, case: Case, settings: Settings, name: str, world: int, folder: str, threads: int
) -> None:
    """Train as one rank; write the bytes before the first step, and every step's loss."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    device = torch.device("cpu")
    store = dist.FileStore(f"{folder}/store", world)  # type: ignore[attr-defined]
    open_process_group(RankInfo(rank, world, rank, world), device, store)
    dist.barrier()
    before = pss([os.getpid()])
    dist.barrier()
    data = case.build_data(settings.accumulate, rank, device)
    contender = build(name, case.build_model(device), settings.precision, device)
    losses = [contender.step(data[number % POOL]).item() for number in range(STEPS)]
    dist.barrier()
    Path(folder, f"{rank}.json").write_text(json.dumps([before, losses]))
    os._exit(0)  # since gloo's threads may abort an interpreter that ends while a model holds the group


if __name__ == "__main__":
    start(partial(read, __doc__, ("rounds", "warmup", "device")), run)

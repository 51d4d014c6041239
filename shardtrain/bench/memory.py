"""Peak memory of the whole job, each contender in fresh processes, above what imports take.

The rank with local rank 0 starts as many processes as its host has ranks. They meet among themselves and
train a few steps while it watches them. One contender at a time, so that nothing is shared between two.

The proportional set size (PSS) of a page is its size over the number of processes that map it, so that the
sum over ranks counts shared memory once. It is read from ``/proc/PID/smaps_rollup``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardtrain import comm
from shardtrain.bench.contenders import POOL, TITLES, build
from shardtrain.bench.interleave import Comparison, Samples, attempt
from shardtrain.bench.report import Program, Results, median, table
from shardtrain.bench.settings import Settings
from shardtrain.device import is_accelerator, peak_memory
from shardtrain.job.dist_env import RankInfo, choose_device, meet
from shardtrain.job.format import MIB
from shardtrain.job.launch import open_process_group
from shardtrain.job.schema import UserError

STEPS = 5  # the optimizer's state is there after the first; allocators settle in the next
INTERVAL_S = 0.01  # between two looks at the processes
ROLLUP = "/proc/{}/smaps_rollup"


class Watched(NamedTuple):
    """What one host's ranks did: bytes when they held most, of host and accelerators, and mean losses."""

    peak: tuple[int, int]
    losses: list[float]


class MemoryBench(Program):
    def measure(self) -> None:
        if not Path(ROLLUP.format("self")).exists():
            path = ROLLUP.format("PID")
            raise UserError(f"memory=true reads {path}, which this system does not have (Linux does)")
        self.comparison = Comparison(self.settings.reference, self.settings.precision)
        self.peaks: dict[str, tuple[int, int]] = {}  # bytes of all hosts, and of their accelerators
        for name in self.settings.to_run():
            samples = self.comparison.samples[name] = Samples()
            watch = partial(self._watch, name)
            peak, samples.losses = attempt(watch, samples, self.device) or ((0, 0), [])
            total = torch.tensor(peak, dtype=torch.int64, device=self.device)
            host, device = map(int, comm.all_reduce(total).tolist())
            self.peaks[name], samples.values = (host, device), [host + device]
            if self.rank_info.rank == 0:
                print(f"{TITLES[name]}: {samples.failure or f'{(host + device) / MIB:.0f} MiB'}", flush=True)

    def results(self) -> Results:
        reference = TITLES[self.settings.reference]
        shape = self.settings.case(self.settings.model).shape
        title = f"{shape}, peak of the whole job above its imports, {STEPS} steps"
        rows = []
        for name, verdict in self.comparison.ranked().items():
            host, device = (f"{size / MIB:.0f}" for size in self.peaks[name])
            row = [("", TITLES[name]), ("host MiB", host), ("device MiB", device)]
            rows.append([*row, (f"of {reference}", median(verdict.ratio))])
        found = {
            name: {
                "reason": verdict.reason,
                "host_bytes": self.peaks[name][0],
                "device_bytes": self.peaks[name][1],
                "ratio": verdict.ratio and verdict.ratio.median,
                "losses": self.comparison.samples[name].losses,
            }
            for name, verdict in self.comparison.verdicts().items()
            if name in self.peaks
        }
        facts = {"steps": STEPS, "reference": self.settings.reference, "contenders": found}
        lines = table(title, rows, self.comparison.left_out())
        label = f"peak memory over {reference}'s (less is better)"
        return Results(lines, facts, label, {title: self.comparison.ratios_to(self.settings.reference)})

    def _watch(self, name: str) -> Watched:
        """On local rank 0 start the contender's processes and watch them; elsewhere wait for that."""
        info, watched = self.rank_info, Watched((0, 0), [])
        done = f"shardtrain/bench/memory/{name}/done/{{}}".format
        leaders = range(0, info.world_size, info.local_world_size) if info.world_size > 1 else ()
        if info.local_rank == 0:
            try:
                watched = watch_host(self.settings, name, info)
            finally:
                if leaders:
                    info.store.set(done(info.rank), "")
        while not all(info.store.check([done(leader)]) for leader in leaders):
            time.sleep(0.1)
        return watched


def watch_host(settings: Settings, name: str, first: RankInfo) -> Watched:
    """Train ``name`` in one fresh process per rank of this host, whose first rank is ``first``.

    A task of the pool ends only when all ranks have begun it, so that every process gets one of each kind.
    """
    ranks = [
        replace(first, rank=first.rank + local, local_rank=local) for local in range(first.local_world_size)
    ]
    spawn = multiprocessing.get_context("spawn")
    with tempfile.NamedTemporaryFile("r") as log:
        pool = ProcessPoolExecutor(len(ranks), spawn, _quiet, (log.name, torch.get_num_threads()))
        try:
            pids = [met.result() for met in [pool.submit(_meet, rank, settings.device) for rank in ranks]]
            before = peak = pss(pids)
            training = [pool.submit(_train, settings, name) for _ in ranks]
            while not all(rank.done() for rank in training):
                peak = max(peak, pss(pids))
                for rank in wait(training, INTERVAL_S).done:
                    rank.result()
            losses, device_bytes = zip(*(rank.result() for rank in training), strict=True)
        except BrokenProcessPool:
            said = log.read().strip().splitlines() or ["it said nothing"]
            raise RuntimeError(f"a rank ended: {said[-1]}") from None
        except UserError as error:  # only this rank knows of it
            raise RuntimeError(str(error)) from None
        finally:
            for process in multiprocessing.active_children():
                process.kill()
            pool.shutdown()
    means = [fmean(step) for step in zip(*losses, strict=True)]
    return Watched((peak - before, sum(device_bytes)), means)


def pss(pids: Iterable[int]) -> int:
    """Return the bytes of processes; one that has just ended has none."""
    total = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines = Path(ROLLUP.format(pid)).read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def _quiet(log: str, threads: int) -> None:
    """Prepare a process: what it prints goes to ``log``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the watching process, which kills this one
    for descriptor in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), descriptor)
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)


def _meet(rank_info: RankInfo, device: str) -> int:
    """Make this process that rank; return its process number once all ranks have met."""
    rank, world = rank_info.rank, rank_info.world_size
    # The launcher's store is up already: no rank starts another one at its address.
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank_info.local_rank), **agent})
    store = meet(rank_info.store, rank, world) if world > 1 else dist.HashStore()  # type: ignore[attr-defined]
    open_process_group(rank_info, choose_device(device, rank_info), store)
    dist.barrier()
    return os.getpid()


def _train(settings: Settings, name: str) -> tuple[list[float], int]:
    """Return the losses of every step, and the peak of the accelerator's memory, 0 on the CPU."""
    device = choose_device(settings.device, RankInfo.from_environment(os.environ))
    case = settings.case(settings.model)
    data = case.build_data(settings.accumulate, settings.seed, dist.get_rank(), device)
    contender = build(name, case.build_model(settings.seed, device), settings.setup(device))
    losses = [contender.step(data[number % POOL]).item() for number in range(STEPS)]
    dist.barrier()
    return losses, peak_memory(device) if is_accelerator(device) else 0

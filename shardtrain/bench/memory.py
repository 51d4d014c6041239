"""Peak memory of the whole job, each contender in fresh processes, above what imports take.

The rank with local rank 0 starts as many processes as its host has ranks, which meet among themselves and
train a few steps while it watches them. One contender at a time, so that nothing is shared between two.
"""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from shardtrain import comm
from shardtrain.bench import contenders, interleave
from shardtrain.bench.contenders import POOL, TITLES, Case, build_data, build_model
from shardtrain.bench.host import process_group
from shardtrain.bench.interleave import attempt, spread
from shardtrain.bench.report import Report
from shardtrain.bench.settings import Settings
from shardtrain.bench.steps import to_run
from shardtrain.job.dist_env import RankInfo, choose_device
from shardtrain.job.format import MIB, aligned
from shardtrain.job.schema import UserError, checked


@dataclass
class Peak:
    """Bytes over all ranks; ``losses`` the mean over this host's ranks."""

    host: int = 0
    device: int = 0
    losses: list[float] = field(default_factory=list)
    failure: str | None = None

    @property
    def total(self) -> int:
        return self.host + self.device


@dataclass
class Peaks:
    """What has been measured so far."""

    case: Case | None = None
    precision: str = "fp32"
    found: dict[str, Peak] = field(default_factory=dict)


def measure(peaks: Peaks, settings: Settings, place: RankInfo, device: torch.device) -> None:
    """Fill ``peaks``, one contender after the other."""
    require_pss()
    peaks.case, peaks.precision = settings.case(settings.model), settings.precision
    for name in to_run(settings):
        peak = Peak()
        peak.failure = attempt(lambda name=name, peak=peak: _observe(name, peak, settings, place), device)  # type: ignore[misc]
        total = torch.tensor([peak.host, peak.device], dtype=torch.int64, device=device)
        peak.host, peak.device = (int(value) for value in comm.all_reduce(total).tolist())
        peaks.found[name] = peak
        if place.rank == 0:
            print(f"{TITLES[name]}: {peak.failure or f'{peak.total / MIB:.0f} MiB'}", flush=True)


def report(output: Report, peaks: Peaks, interrupted: bool) -> None:
    """A table, least memory first, and its files."""
    reference = output.settings.reference
    reasons = {
        name: peak.failure or interleave.objection(name, peaks.found, peaks.precision)
        for name, peak in peaks.found.items()
    }
    right = {name: peak for name, peak in peaks.found.items() if reasons[name] is None}
    base = right[reference].total if reference in right else None
    ranked = sorted(right, key=lambda name: right[name].total)
    rows = [["", "host MiB", "device MiB", f"of {TITLES[reference]}"]]
    for name in ranked:
        peak = right[name]
        ratio = f"{peak.total / base:.2f}" if base else "-"
        rows.append([TITLES[name], f"{peak.host / MIB:.0f}", f"{peak.device / MIB:.0f}", ratio])
    title = (
        f"{peaks.case.shape if peaks.case else ''}, peak of the whole job above its imports, {STEPS} steps"
    )
    left_out = [f"{TITLES[name]}: not ranked: {reason}" for name, reason in reasons.items() if reason]
    ratios = {TITLES[name]: spread([right[name].total / base]) for name in ranked} if base else {}
    bars = (f"peak memory over {TITLES[reference]}'s (less is better)", {title: ratios})
    results = {"steps": STEPS, "reference": reference, "contenders": _as_json(peaks, reasons, base)}
    output.write(results, "\n".join([title, *aligned(rows), *left_out]), bars, interrupted)


def _observe(name: str, peak: Peak, settings: Settings, place: RankInfo) -> None:
    """On local rank 0 start the contender's processes and look at them; elsewhere wait for that."""
    key = meeting_of(name)
    alone = dataclasses.replace(settings, contenders=(name,), threads=torch.get_num_threads())
    first = place.rank - place.local_rank
    if place.local_rank == 0:
        try:
            seen = run(
                "shardtrain.bench.memory",
                json.dumps(dataclasses.asdict(alone)),
                [_environment(place, first, local) for local in range(place.local_world_size)],
            )
            by_step = zip(*(answer["losses"] for answer in seen.answers), strict=True)
            peak.losses = [sum(losses) / len(losses) for losses in by_step]
            peak.host, peak.device = seen.peak, sum(answer["device_bytes"] for answer in seen.answers)
        finally:
            if place.world_size > 1:
                place.store.set(f"{key}/done/{place.rank}", "")
    leaders = range(0, place.world_size, place.local_world_size) if place.world_size > 1 else ()
    while not all(place.store.check([f"{key}/done/{leader}"]) for leader in leaders):
        time.sleep(0.1)


def _environment(place: RankInfo, first: int, local: int) -> dict[str, str]:
    if place.world_size == 1:
        return {}
    # The launcher's store is up already: nobody is to start another one at its address.
    return {"RANK": str(first + local), "LOCAL_RANK": str(local), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def _as_json(peaks: Peaks, reasons: dict[str, str | None], base: int | None) -> dict[str, Any]:
    return {
        name: {
            "reason": reasons[name],
            "host_bytes": peak.host,
            "device_bytes": peak.device,
            "ratio": peak.total / base if base and reasons[name] is None else None,
            "losses": peak.losses,
        }
        for name, peak in peaks.found.items()
    }


# One rank of one contender in a process of its own, looked at from outside by ``memory``.
#
# Its command line is the benchmark's settings, with this contender alone and the number of threads.
# It says ``ready`` when everything is imported and the ranks have met, waits for a line, takes its steps and
# answers with one line of JSON: losses and peak device memory, or why it failed.

STEPS = 5  # the optimizer's state is there after the first; allocators settle in the next


def meeting_of(contender: str) -> str:
    """Where in the launcher's store the ranks of a contender meet."""
    return f"shardtrain/bench/memory/{contender}"


def _train(settings: Settings, contender: str, place: RankInfo, device: torch.device) -> dict[str, object]:
    case = settings.case(settings.model)
    data = build_data(case, settings.accumulate, settings.seed, place.rank, device)
    trained = contenders.build(contender, build_model(case, settings.seed, device), settings.setup(device))
    losses = [trained.step(data[number % POOL]).item() for number in range(STEPS)]
    on_device = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    dist.barrier()
    return {"losses": losses, "device_bytes": on_device}


def _answer(settings: Settings, contender: str, place: RankInfo, device: torch.device) -> dict[str, object]:
    try:
        return _train(settings, contender, place, device)
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {error}".split("\n", 1)[0][:300]}


def main() -> None:
    settings = checked(OmegaConf.create(json.loads(sys.argv[1])), Settings)
    (contender,) = settings.chosen
    warnings.simplefilter("ignore")
    place = RankInfo.from_environment(os.environ)
    device = choose_device(settings.device, place)
    assert settings.threads is not None
    torch.set_num_threads(settings.threads)
    with process_group(place, device, meeting_of(contender)):
        dist.barrier()
        print("ready", flush=True)
        sys.stdin.readline()
        print(json.dumps(_answer(settings, contender, place, device)), flush=True)
        sys.stdin.readline()  # stay, with everything mapped, until the others have answered


# Processes of one host, looked at from outside: their memory, counted once, and their answers.
#
# The proportional set size (PSS) of a page is its size over the number of processes that map it, so that the
# sum over ranks counts shared memory once. It is read from ``/proc/PID/smaps_rollup``.

INTERVAL_S = 0.01


class Seen(NamedTuple):
    """Bytes above what imports take, at the moment when all ranks together held most; each rank's answer."""

    peak: int
    answers: list[dict[str, Any]]


class RankEnded(RuntimeError):
    """A process ended without an answer."""


def require_pss() -> None:
    if not Path("/proc/self/smaps_rollup").exists():
        raise UserError(
            "memory=true reads /proc/PID/smaps_rollup, which this system does not have (Linux does)"
        )


def pss(pid: int) -> int:
    """Bytes; 0 for a process that has just ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def run(module: str, argument: str, environments: Sequence[Mapping[str, str]]) -> Seen:
    """Run ``python -m module argument`` once per environment, all at the same time, to the end.

    Raises:
        RankEnded: one of them ended early; the others are ended too.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(index) for index in range(len(environments))]
        ranks = [_start(module, argument, env, log) for env, log in zip(environments, logs, strict=True)]
        try:
            for rank, log in zip(ranks, logs, strict=True):
                _line(rank, log)
            before = sum(pss(rank.pid) for rank in ranks)
            _tell(ranks)
            peak, answers = _sample(ranks, logs)
            _tell(ranks)
            for rank in ranks:
                rank.wait()
        finally:
            _end(ranks)
    return Seen(peak - before, answers)


def _start(module: str, argument: str, environment: Mapping[str, str], log: Path) -> subprocess.Popen[str]:
    with log.open("w") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", module, argument],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )


def _line(rank: subprocess.Popen[str], log: Path) -> str:
    assert rank.stdout is not None
    line = rank.stdout.readline()
    if not line:
        said = log.read_text().strip().splitlines()
        raise RankEnded(f"a rank ended with code {rank.wait()}: {said[-1] if said else 'it said nothing'}")
    return line


def _tell(ranks: Sequence[subprocess.Popen[str]]) -> None:
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("go\n")
        rank.stdin.flush()


def _sample(ranks: Sequence[subprocess.Popen[str]], logs: Sequence[Path]) -> tuple[int, list[dict[str, Any]]]:
    """The largest sum of all ranks' memory until each has answered, and the answers."""
    peak = 0
    answers: dict[int, dict[str, Any]] = {}
    with selectors.DefaultSelector() as selector:
        for index, rank in enumerate(ranks):
            assert rank.stdout is not None
            selector.register(rank.stdout, selectors.EVENT_READ, index)
        while len(answers) < len(ranks):
            peak = max(peak, sum(pss(rank.pid) for rank in ranks))
            for key, _ in selector.select(INTERVAL_S):
                answers[key.data] = json.loads(_line(ranks[key.data], logs[key.data]))
                selector.unregister(key.fileobj)
                if "failure" in answers[key.data]:
                    raise RankEnded(answers[key.data]["failure"])
    return peak, [answers[index] for index in range(len(ranks))]


def _end(ranks: Sequence[subprocess.Popen[str]]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
        rank.wait()
        for pipe in (rank.stdin, rank.stdout):
            if pipe is not None:
                pipe.close()


if __name__ == "__main__":
    main()

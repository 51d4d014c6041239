"""What monitoring costs: the same steps with and without it, in turns.

    torchrun --nproc-per-node 2 tests/monitor_cost.py [rounds=40] [key=value ...]

With it is everything of the training program at its default settings: phases, traffic and memory measured,
ranks compared and curves written every `train.log_every` steps. Without it is the loop of a script. A round
is `train.log_every` steps of each.

Three figures: the median of the rounds' ratios, which is as good as the machine is quiet; the same of CPU
time, over all ranks and threads, with its standard error (waiting for one another is not in it, and others on
the machine disturb it less); and the time inside monitoring's own calls as a share of the steps, which hardly
depends on the machine, but leaves out what counting costs inside the engine. With the digits 40 rounds take
two minutes on two cores.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from shardtrain import clip_grad_norm_, comm, launch
from shardtrain.bench.interleave import Track, interleave
from shardtrain.bench.statistics import ratios
from shardtrain.build import Job, build
from shardtrain.compose import compose
from shardtrain.config import Config, from_hydra
from shardtrain.launch import Context
from shardtrain.monitor import Monitor, Watch, Window, open_monitor
from shardtrain.place import Place, choose_device, cpu_threads

WARMUP = 2
DEFAULTS = ("+recipe=resnet", "monitor.progress=lines", "monitor.plan=false")


def bare(job: Job, steps: int) -> torch.Tensor:
    images, labels, _ = next(iter(job.train))
    for _ in range(steps):
        loss = job.loss(job.model(images), labels)
        loss.backward()
        float(clip_grad_norm_(job.model, math.inf))
        job.optimizer.step()
        job.optimizer.zero_grad()
    return loss.detach()


class Stopwatch:
    """Seconds inside calls, one after the other."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def call(self, function: Callable[..., object], *arguments: object) -> object:
        start = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            self.seconds += time.perf_counter() - start

    @contextlib.contextmanager
    def within(self, manager: AbstractContextManager[object]) -> Iterator[None]:
        """``manager``, of which only entering and leaving are counted."""
        self.call(manager.__enter__)
        yield
        self.call(manager.__exit__, None, None, None)


def monitored(
    job: Job, steps: int, window: Window, monitor: Monitor, watch: Watch, own: Stopwatch
) -> torch.Tensor:
    images, labels, _ = next(iter(job.train))
    for step in range(1, steps + 1):
        with own.within(window.step()):
            with own.within(window.phase("data")):
                pass
            with own.within(window.phase("forward")):
                logits = job.model(images)
                loss = job.loss(logits, labels)
            with own.within(window.phase("backward")):
                loss.backward()
            own.call(window.add, images, loss, logits, labels)
            norm = clip_grad_norm_(job.model, math.inf)
            float(norm)
            job.optimizer.step()
        own.call(monitor.step, step)
        if step == steps:
            own.call(monitor.log, step, own.call(window.close, step, norm))
        own.call(watch.step_done, step)
        job.optimizer.zero_grad()
    return loss.detach()


class CpuTime:
    """Of this process, all its threads, in each round of one runner."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def of(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        start = time.process_time()
        loss = work()
        self.seconds.append(time.process_time() - start)
        return loss


def mean_ratio(of: CpuTime, to: CpuTime, device: torch.device) -> tuple[float, float]:
    """The mean over rounds of the ratio of all ranks' CPU time, and its standard error. Collective."""
    table = torch.tensor([of.seconds, to.seconds], dtype=torch.float64, device=device)
    with_it, without = comm.all_reduce(table).tolist()
    found = [a / b for a, b in zip(with_it, without, strict=True)]
    error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan
    return statistics.fmean(found), error


def measure(config: Config, place: Place, device: torch.device, folder: Path, rounds: int) -> None:
    job, config = build(config, place.rank, place.world_size, device)
    window, context, steps = Window(job), Context(place, device, folder), config.train.log_every
    own, cpu_without, cpu_with = Stopwatch(), CpuTime(), CpuTime()
    tracks = {"without": Track(), "with": Track()}
    with contextlib.redirect_stdout(io.StringIO()), open_monitor(config, context, job, window) as monitor:
        watch = Watch(config, context, job, window, monitor)
        runners = {
            "without": lambda _: cpu_without.of(lambda: bare(job, steps)),
            "with": lambda _: cpu_with.of(lambda: monitored(job, steps, window, monitor, watch, own)),
        }
        interleave(runners, tracks, device, warmup=WARMUP, rounds=0)
        own.seconds, cpu_without.seconds, cpu_with.seconds = 0.0, [], []
        interleave(runners, tracks, device, warmup=0, rounds=rounds)
    found = ratios(tracks["with"].seconds, tracks["without"].seconds)
    cpu, error = mean_ratio(cpu_with, cpu_without, device)
    if place.rank == 0:
        without = sorted(tracks["without"].seconds)[rounds // 2] / steps
        print(
            f"with over without: {found.median:.4f} (quartiles {found.low:.4f} to {found.high:.4f}), "
            f"CPU time {cpu:.4f} (± {error:.4f}), "
            f"inside monitoring's calls: {own.seconds / sum(tracks['with'].seconds):.2%} of the steps, "
            f"{rounds} rounds of {steps} steps of {1e3 * without:.1f} ms, {place.world_size} ranks "
            f"on {device}"
        )


def main() -> None:
    own = [text for text in sys.argv[1:] if text.startswith("rounds=")]
    rounds = int(own[-1].removeprefix("rounds=")) if own else 40
    raw = compose([*DEFAULTS, *(text for text in sys.argv[1:] if text not in own)])
    assert raw is not None
    config, place = from_hydra(raw), Place.from_environment(os.environ)
    device = choose_device(config.device, place)
    torch.set_num_threads(config.threads or cpu_threads(place, os.environ))
    with tempfile.TemporaryDirectory() as folder, launch.process_group(place, device):
        measure(config, place, device, Path(folder), rounds)


if __name__ == "__main__":
    main()

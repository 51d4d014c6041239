"""What monitoring costs: the same steps with and without it, in turns.

    torchrun --nproc-per-node 2 tests/monitor_cost.py [rounds=40] [key=value ...]

With it is everything of the training program at its default settings: phases, traffic and memory measured,
ranks compared and curves written every `train.log_every` steps. Without it are bare steps. They take turns
step by step, since a machine's speed drifts; a round is `train.log_every` steps of each.

Two figures, means over rounds with standard errors: the ratio of time, and that of CPU time over all ranks
and threads (waiting for one another is not in it, and others on the machine disturb it less). With the digits
40 rounds take two minutes on two cores.
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
from collections.abc import Callable
from pathlib import Path

import torch

from shardtrain import comm
from shardtrain.bench.interleave import Samples, interleave
from shardtrain.job import launch
from shardtrain.job.build import build
from shardtrain.job.config import Config, from_hydra
from shardtrain.job.dist_env import RankInfo, choose_device, cpu_threads
from shardtrain.job.hydra_app import compose
from shardtrain.job.launch import Context
from shardtrain.job.step import Step
from shardtrain.monitor import Monitor, StepMetrics, Watch, open_monitor

WARMUP = 2
DEFAULTS = ("+recipe=resnet", "monitor.progress=lines")

Batch = tuple[torch.Tensor, torch.Tensor]


class Monitored:
    """The steps of the training program's loop, one by one, with a report after every ``steps``."""

    def __init__(
        self, step: Step, batch: Batch, steps: int, metrics: StepMetrics, monitor: Monitor, watch: Watch
    ) -> None:
        self.one, self.batch, self.steps = step, batch, steps
        self.metrics, self.monitor, self.watch = metrics, monitor, watch
        self.done = 0

    def __call__(self) -> None:
        metrics, report = self.metrics, None
        self.done += 1
        with metrics.step():
            norm = self.one.gradients(iter([self.batch]), 1, metrics.phase, metrics.add)
            self.one.update(self.done)
        self.monitor.step(self.done)
        if self.done % self.steps == 0:
            report = metrics.report(self.done, norm, self.watch.requested())
            self.monitor.log(self.done, report.scalars)
        self.watch.step_done(self.done, report)
        self.one.optimizer.zero_grad()


class CpuTime:
    """CPU seconds of this process, all its threads, in each step of one runner."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def of(self, work: Callable[[], object]) -> torch.Tensor:
        start = time.process_time()
        work()
        self.seconds.append(time.process_time() - start)
        return torch.zeros(())  # runners return a loss


def mean_ratio(of: list[float], to: list[float], steps: int, device: torch.device) -> tuple[float, float]:
    """The mean over rounds of ``steps`` of the ratio of all ranks' time, and its standard error."""
    table = torch.tensor([of, to], dtype=torch.float64, device=device).view(2, -1, steps).sum(2)
    with_it, without = comm.all_reduce(table).tolist()
    found = [a / b for a, b in zip(with_it, without, strict=True)]
    error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan
    return statistics.fmean(found), error


def measure(config: Config, rank_info: RankInfo, device: torch.device, folder: Path, rounds: int) -> None:
    job, config = build(config, rank_info.rank, rank_info.world_size, device)
    images, labels, _ = next(iter(job.train))
    batch, step, metrics = (images, labels), Step.of(job, None), StepMetrics(job)
    context, steps = Context(rank_info, device, folder), config.train.log_every
    cpu_without, cpu_with = CpuTime(), CpuTime()
    samples = {"without": Samples(), "with": Samples()}
    with (
        contextlib.redirect_stdout(io.StringIO()),
        open_monitor(config, context, job, metrics) as monitor,
        Watch(config, context, job, metrics, monitor) as watch,
    ):
        monitored = Monitored(step, batch, steps, metrics, monitor, watch)
        runners = {
            "without": lambda _: cpu_without.of(lambda: step([batch])),
            "with": lambda _: cpu_with.of(monitored),
        }
        interleave(runners, samples, device, warmup=WARMUP * steps, rounds=0)
        cpu_without.seconds, cpu_with.seconds = [], []
        interleave(runners, samples, device, warmup=0, rounds=rounds * steps)
    seconds = samples["with"].values, samples["without"].values
    (time_of, error), (cpu, cpu_error) = (
        mean_ratio(of, to, steps, device) for of, to in (seconds, (cpu_with.seconds, cpu_without.seconds))
    )
    if rank_info.rank == 0:
        print(
            f"with over without: {time_of:.4f} (± {error:.4f}), CPU time {cpu:.4f} (± {cpu_error:.4f}), "
            f"{rounds} rounds of {steps} steps of {1e3 * statistics.median(seconds[1]):.1f} ms, "
            f"{rank_info.world_size} ranks on {device}"
        )


def main() -> None:
    own = [text for text in sys.argv[1:] if text.startswith("rounds=")]
    rounds = int(own[-1].removeprefix("rounds=")) if own else 40
    raw = compose([*DEFAULTS, *(text for text in sys.argv[1:] if text not in own)])
    assert raw is not None
    config, rank_info = from_hydra(raw), RankInfo.from_environment(os.environ)
    device = choose_device(config.device, rank_info)
    torch.set_num_threads(config.threads or cpu_threads(rank_info, os.environ))
    with tempfile.TemporaryDirectory() as folder, launch.process_group(rank_info, device):
        measure(config, rank_info, device, Path(folder), rounds)


if __name__ == "__main__":
    main()

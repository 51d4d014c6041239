"""What monitoring costs: the same steps with and without it, in turns.

    torchrun --nproc-per-node 2 tests/monitor_cost.py [rounds=40] [key=value ...]

With it is everything of the training program at its default settings: phases, traffic and memory measured,
ranks compared and curves written every `train.log_every` steps. Without it are bare steps. A round is
`train.log_every` steps of each. The figure is the ratio of CPU time, in which waiting for one another is not,
and which others on the machine disturb least: the mean over rounds with its standard error.
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
from pathlib import Path

import torch

from shardtrain.bench.interleave import Samples, interleave
from shardtrain.job import launch
from shardtrain.job.build import build
from shardtrain.job.config import Config, from_hydra
from shardtrain.job.dist_env import RankInfo, choose_device, cpu_threads
from shardtrain.job.hydra_app import compose
from shardtrain.job.launch import Context
from shardtrain.job.step import Step
from shardtrain.monitor import StepMetrics, Watch, open_monitor

WARMUP = 2  # rounds
DEFAULTS = ("+recipe=resnet", "monitor.progress=lines")


def measure(config: Config, rank_info: RankInfo, device: torch.device, folder: Path, rounds: int) -> None:
    job, config = build(config, rank_info.rank, rank_info.world_size, device)
    images, labels, _ = next(iter(job.train))
    batch, one, metrics = (images, labels), Step.of(job, None), StepMetrics(job)
    context, steps = Context(rank_info, device, folder), config.train.log_every
    samples = {"without": Samples(), "with": Samples()}

    def without(_: int) -> None:
        for _ in range(steps):
            one([batch])

    with (
        contextlib.redirect_stdout(io.StringIO()),
        open_monitor(config, context, job, metrics) as monitor,
        Watch(config, context, job, metrics, monitor) as watch,
    ):

        def monitored(number: int) -> None:
            """The training program's loop, and a report after its last step."""
            for step in range(number * steps + 1, (number + 1) * steps + 1):
                report = None
                with metrics.step():
                    norm = one.gradients(iter([batch]), 1, metrics.phase, metrics.add)
                    one.update(step)
                monitor.step(step)
                if step % steps == 0:
                    report = metrics.report(step, norm, watch.requested())
                    monitor.log(step, report.scalars)
                watch.step_done(step, report)
                one.optimizer.zero_grad()

        runners = {"without": without, "with": monitored}
        interleave(runners, samples, device, WARMUP, rounds, clock=time.process_time)
    ratios = [a / b for a, b in zip(samples["with"].values, samples["without"].values, strict=True)]
    error = statistics.stdev(ratios) / math.sqrt(rounds) if rounds > 1 else math.nan
    if rank_info.rank == 0:
        milliseconds = 1e3 * statistics.median(samples["without"].values) / steps
        print(
            f"CPU time with over without: {statistics.fmean(ratios):.4f} (± {error:.4f}), {rounds} rounds of "
            f"{steps} steps of {milliseconds:.1f} ms, {rank_info.world_size} ranks on {device}"
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

"""Where a run's time went, in words, and the one change most likely to help.

The advice is for what takes most more of the time than the percentage in `USUAL`::

    data 68 %, usual up to 10 %    68 % of the time is waiting for images: raise data.workers (now 2)
    evaluation 12 %, up to 20 %    no advice

If nothing does, the run computes, and the advice is about computing faster.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from shardtrain.device import ACCELERATOR
from shardtrain.job.config import Config
from shardtrain.job.dist_env import cores
from shardtrain.monitor.metrics import Spent

FEW_STEPS = 20  # of fewer, the first is most of what there is to see
OFTEN = 0.5  # of the reports, that name one rank slow
ORDER = ("data", "forward", "backward", "optimizer", "waiting", "evaluation", "checkpoint", "pictures")
USUAL = {"data": 10, "waiting": 15, "checkpoint": 5, "evaluation": 20, "optimizer": 15, "the rest": 15}


class Run(NamedTuple):
    """What the verdict rests on: where the time went, in percent, and the settings that could change it."""

    shares: Mapping[str, float]
    spent: Spent
    config: Config
    ranks: int
    device: str
    cores: int  # of this host


def judge(spent: Spent, config: Config, ranks: int, device: str) -> dict[str, Any]:
    """Return entries of result.json: seconds by what they went to, and the verdict."""
    seconds = time.perf_counter() - spent.since
    parts = {what: spent.seconds[what] for what in ORDER if spent.seconds[what]}
    parts["the rest"] = max(0.0, seconds - sum(parts.values()))
    shares = {what: 100 * value / seconds for what, value in parts.items()}
    named = {"exposed communication" if what == "waiting" else what: value for what, value in shares.items()}
    return {
        "spent_s": {what: round(value, 3) for what, value in parts.items()},
        "run_img_per_s": spent.images / seconds,
        "time": ", ".join(f"{what} {share:.0f} %" for what, share in named.items()),
        "verdict": verdict(Run(shares, spent, config, ranks, device, cores())),
    }


def verdict(run: Run) -> str:
    """Return one sentence: what takes more time than it should, and what to change."""
    if run.spent.steps < FEW_STEPS:
        return f"{run.spent.steps} steps are too few to judge by; from {FEW_STEPS} on there is advice"
    over = {what: run.shares.get(what, 0.0) - usual for what, usual in USUAL.items()}
    worst = max(over, key=over.__getitem__)
    if over[worst] <= 0:
        computing = run.shares.get("forward", 0.0) + run.shares.get("backward", 0.0)
        return f"{computing:.0f} % of the time is computing: {_computing(run)}"
    return f"{run.shares[worst]:.0f} % of the time is {_advice(worst, run)}"


def _advice(what: str, run: Run) -> str:
    train, saves, workers = run.config.train, run.config.checkpoint, run.config.data.workers
    match what:
        case "data":
            more = "raise data.workers" if workers else "let processes of their own load them, data.workers=2"
            return f"waiting for images: {more} (now {workers})"
        case "waiting":
            return f"waiting for other ranks{_waiting(run)}"
        case "checkpoint" if not saves.asynchronous:
            return "saving checkpoints: checkpoint.asynchronous=true writes them while training goes on"
        case "checkpoint":
            every = saves.every_steps or "once per epoch"
            return f"saving checkpoints: raise checkpoint.every_steps (now {every})"
        case "evaluation":
            return f"evaluation: raise train.eval_every (now {train.eval_every} epochs)"
        case "optimizer":
            batch = train.batch_size
            return f"the optimizer: one update could serve more images, train.batch_size (now {batch})"
    return f"neither steps nor evaluation: reports, train.log_every (now {train.log_every})"


def _waiting(run: Run) -> str:
    (slow, times), *_ = [*run.spent.slow.most_common(1), ((0, ""), 0)]
    if times and times >= OFTEN * run.spent.reports:
        return f": rank {slow[0]} is slower than the others in {slow[1]}, look there first"
    parallel, images = run.config.parallel, run.config.train.batch_size // run.ranks
    if run.device == "cpu" and (parallel.transport == "process_group" or parallel.traffic is not None):
        exact = "parallel.traffic=null " if parallel.traffic is not None else ""
        help = f"{exact}parallel.transport=auto lets the ranks of one host share memory"
    elif run.device == ACCELERATOR and parallel.precision == "fp32":
        help = "parallel.precision=bf16 moves half the bytes"
    elif parallel.reshard_after_forward:
        help = "parallel.reshard_after_forward=false spares backward's gathers, if the memory is there"
    else:
        help = f"give each rank more to compute, train.batch_size (now {images} images per rank)"
    return f" and their shards: {help}"


def _computing(run: Run) -> str:
    if run.device == ACCELERATOR and run.config.parallel.precision == "fp32":
        return "parallel.precision=bf16 computes faster"
    if run.device == "cpu" and run.ranks >= run.cores:
        return "every core has a rank already; nothing else stands out"
    return "more ranks would share it; nothing else stands out"

"""What a run's time went to, in words, and the one change most likely to help.

The advice is that of the rule in `RULES` whose share of the time lies furthest above what is usual::

    data 68 %, usual up to 10 %    68 % of the time is waiting for images: raise data.workers (now 2)
    evaluation 12 %, up to 20 %    nothing to say

If none does, the run computes, and advice is about computing faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shardtrain.job.config import Config
from shardtrain.job.dist_env import cores
from shardtrain.monitor.window import Spent

FEW_STEPS = 20  # of fewer, the first is most of what there is to see
OFTEN = 0.5  # of the reports, that name one rank slow
ORDER = (
    "data",
    "forward",
    "backward",
    "optimizer",
    "waiting",
    "evaluation",
    "checkpoint",
    "pictures",
)
TITLES = {"waiting": "exposed communication"}


class Run(NamedTuple):
    """What rules look at: where the time went, in percent, and the settings that could change it."""

    shares: Mapping[str, float]
    spent: Spent
    config: Config
    ranks: int
    device: str
    cores: int  # of this host


class Rule(NamedTuple):
    """``advice``, if more than ``usual`` percent of the time goes to ``what``."""

    what: str
    usual: float
    advice: Callable[[Run], str]


def judge(spent: Spent, config: Config, ranks: int, device: str) -> dict[str, Any]:
    """For result.json: seconds by what they went to, and the verdict."""
    seconds = time.perf_counter() - spent.since
    parts = {what: spent.seconds[what] for what in ORDER if spent.seconds[what]}
    parts["the rest"] = max(0.0, seconds - sum(parts.values()))
    shares = {what: 100 * value / seconds for what, value in parts.items()}
    run = Run(shares, spent, config, ranks, device, cores())
    return {
        "spent_s": {what: round(value, 3) for what, value in parts.items()},
        "run_img_per_s": spent.images / seconds,
        "time": ", ".join(f"{TITLES.get(what, what)} {share:.0f} %" for what, share in shares.items()),
        "verdict": verdict(run),
    }


def verdict(run: Run) -> str:
    """One sentence: what takes more time than it should, and what to change."""
    if run.spent.steps < FEW_STEPS:
        return f"{run.spent.steps} steps are too few to judge by; from {FEW_STEPS} on there is advice"
    over = {rule: run.shares.get(rule.what, 0.0) - rule.usual for rule in RULES}
    worst = max(RULES, key=over.__getitem__)
    if over[worst] <= 0:
        return f"{_computing(run):.0f} % of the time is computing: {_faster(run)}"
    return f"{run.shares[worst.what]:.0f} % of the time is {worst.advice(run)}"


def _data(run: Run) -> str:
    workers = run.config.data.workers
    more = "raise data.workers" if workers else "let processes of their own load them, data.workers=2"
    return f"waiting for images: {more} (now {workers})"


def _waiting(run: Run) -> str:
    slow = run.spent.slow.most_common(1)
    if slow and slow[0][1] >= OFTEN * run.spent.reports:
        (rank, phase), _ = slow[0]
        return f"waiting for other ranks: rank {rank} is slower than the others in {phase}, look there first"
    parallel, images = run.config.parallel, run.config.train.batch_size // run.ranks
    what = "waiting for other ranks and their shards: "
    if run.device == "cpu" and (parallel.transport == "process_group" or parallel.traffic is not None):
        exact = "parallel.traffic=null " if parallel.traffic is not None else ""
        return what + f"{exact}parallel.transport=auto lets the ranks of one host share memory"
    if run.device == "cuda" and parallel.precision == "fp32":
        return what + "parallel.precision=bf16 moves half the bytes"
    if parallel.reshard_after_forward:
        return what + (
            "parallel.reshard_after_forward=false spares backward's gathers, if the memory is there"
        )
    return what + f"give each rank more to compute, train.batch_size (now {images} images a rank)"


def _checkpoint(run: Run) -> str:
    if not run.config.checkpoint.asynchronous:
        return "saving checkpoints: checkpoint.asynchronous=true writes them while training goes on"
    every = run.config.checkpoint.every_steps
    return f"saving checkpoints: raise checkpoint.every_steps (now {every or 'once an epoch'})"


def _evaluation(run: Run) -> str:
    return f"evaluation: raise train.eval_every (now {run.config.train.eval_every} epochs)"


def _optimizer(run: Run) -> str:
    batch = run.config.train.batch_size
    return f"the optimizer: one update could serve more images, train.batch_size (now {batch})"


def _rest(run: Run) -> str:
    every = run.config.train.log_every
    return f"neither steps nor evaluation: reports, train.log_every (now {every})"


def _computing(run: Run) -> float:
    return run.shares.get("forward", 0.0) + run.shares.get("backward", 0.0)


def _faster(run: Run) -> str:
    if run.device == "cuda" and run.config.parallel.precision == "fp32":
        return "parallel.precision=bf16 computes faster"
    if run.device == "cpu" and run.ranks >= run.cores:
        return "every core has a rank already; nothing else stands out"
    return "more ranks would share it; nothing else stands out"


RULES = (
    Rule("data", 10, _data),
    Rule("waiting", 15, _waiting),
    Rule("checkpoint", 5, _checkpoint),
    Rule("evaluation", 20, _evaluation),
    Rule("optimizer", 15, _optimizer),
    Rule("the rest", 15, _rest),
)

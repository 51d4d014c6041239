"""Run several jobs by one command: every combination of the given values.

    python -m shardtrain.train -m +recipe=resnet optim.lr=0.02,0.04 seed=range(3)

All jobs share the ranks and their process group. Each job has a folder in one directory, named by its number
and its values. A job's objective is its best score of `train.best`. If a job fails for the same reason on
every rank, the next one starts. If ranks leave it for different reasons, the sweep ends.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import math
import random
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import hydra
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.utils.store import synchronize

from shardtrain.job import launch, tags
from shardtrain.job.config import Config, Train
from shardtrain.job.dist_env import START_UP, RankInfo, meet
from shardtrain.job.errors import UserError
from shardtrain.job.hydra_app import program_configs, split, unreadable
from shardtrain.job.launch import Context
from shardtrain.job.read import read_config
from shardtrain.job.saved import MARKS
from shardtrain.job.schema import Mark

Program = Callable[[Config, Context], float | None]

FLAGS = ("-m", "--multirun")
LONGEST_NAME = 100  # characters of the name of a job's folder


class Outcome(NamedTuple):
    """Hold the result of a job."""

    overrides: list[str]  # the overrides in which jobs differ
    objective: float | None
    problem: str  # "" for none


@dataclass(frozen=True)
class Sweep:
    """Hold the settings of a command line with `--multirun`."""

    fixed: list[str]  # overrides and flags of every job
    jobs: list[list[str]]  # the overrides in which they differ
    first: Config
    device: str
    threads: int | None


def run(program: Program) -> float | None:
    """Run one job, or with `--multirun` several in turn; return the best objective."""
    if any(flag in sys.argv[1:] for flag in FLAGS):
        return launch.start(read, partial(run_jobs, program=program))
    return launch.run(program)


def read(arguments: Sequence[str], speak: bool) -> Sweep | None:
    """Return the sweep of ``arguments``; None if a flag asks for output."""
    fixed, jobs = split_sweep([text for text in arguments if text not in FLAGS])
    first = read_config([*fixed, *jobs[0]], speak)
    return None if first is None else Sweep(fixed, jobs, first, first.device, first.threads)


def run_jobs(sweep: Sweep, rank_info: RankInfo, device: torch.device, program: Program) -> float | None:
    """Run the jobs in turn; return the best objective. Collective. Raises UserError if a job failed."""
    rank = rank_info.rank
    world_size = rank_info.world_size
    store = meet(rank_info.store, rank, world_size) if world_size > 1 else HashStore()
    directory = launch.run_dir(sweep.first, rank_info)
    done: list[Outcome] = []
    for overrides in sweep.jobs:
        settings = [*sweep.fixed, *overrides]
        folder = directory / job_name(len(done), overrides)
        context = Context(rank_info, device, folder, not done, settings, swept=overrides)
        if rank == 0:
            print(f"job {len(done)}: {' '.join(overrides)}", flush=True)
        outcome, trace = _run_job(program, overrides, context)
        gc.collect()  # a sharded model is a reference cycle, and holds its transport
        # By the store, since a rank that failed alone may have left the others in a collective.
        text = json.dumps([outcome.problem, trace]).encode()
        seconds = START_UP.total_seconds()
        texts = synchronize(store, text, rank, world_size, f"job {len(done)}/", seconds)
        _require_same_reason([json.loads(each) for each in texts], len(done))
        if rank == 0 and trace:
            print(trace, file=sys.stderr, flush=True)
        done.append(outcome)
        if rank == 0:
            if outcome.problem:
                print(f"job {len(done) - 1} has failed: {outcome.problem}", flush=True)
            facts = [each._asdict() for each in done]
            with contextlib.suppress(OSError):  # written after each job, so there may be room next time
                directory.mkdir(parents=True, exist_ok=True)
                (directory / "sweep.json").write_text(json.dumps(facts, indent=2) + "\n")
    if rank == 0:
        print(table(done, sweep.first.train), flush=True)
    if failed := [number for number, outcome in enumerate(done) if outcome.problem]:
        count = f"{len(failed)} of {len(done)} jobs have failed"
        first = failed[0]
        raise UserError(f"{count}, the first, job {first}, with: {done[first].problem}")
    best = min if sweep.first.train.is_minimised else max
    return best((outcome.objective for outcome in done if outcome.objective is not None), default=None)


def job_name(number: int, overrides: Sequence[str]) -> str:
    """Return the name of a job's folder, and of its run in TensorBoard: job 3 is ``3-width-32-lr-0.1``.

    A path with `=` in it would need quotes as the value of a key.
    """
    parts = [str(number)]
    for override in overrides:
        key, _, value = override.partition("=")
        for text in (key.rpartition(".")[2], value):
            parts.append(re.sub(r"[^\w.+-]+", "_", text).strip("_+"))
    return "-".join(parts)[:LONGEST_NAME]


def _require_same_reason(endings: Sequence[tuple[str, str]], job: int) -> None:
    """Raise an error if ranks left ``job`` for different reasons: a user's mistake, if one found one.

    ``endings``: each rank's problem, "" for none, and its traceback, "" for a mistake.
    """
    if len({problem for problem, _ in endings}) == 1:
        return
    for problem, trace in endings:
        if problem and not trace:  # the others saw only that this rank had left
            raise UserError(f"job {job}: {problem}; the other ranks were in a step, so no job can follow")
    reasons = [f"rank {rank}: {problem or 'done'}" for rank, (problem, _) in enumerate(endings)]
    raise RuntimeError(
        f"the ranks left job {job} for different reasons, so none can follow: {'; '.join(reasons)}"
    )


def table(done: Sequence[Outcome], train: Train) -> str:
    """Return a table of the jobs, best first; failed ones come last, with their reasons."""
    sign = 1.0 if train.is_minimised else -1.0
    ranks = []
    for each in done:
        last = math.inf if each.objective is None else sign * each.objective
        ranks.append((bool(each.problem), last))
    title = f"best {train.best}"
    lines = [f"{title}   job  overrides"]
    for number in sorted(range(len(done)), key=ranks.__getitem__):
        overrides, objective, problem = done[number]
        score = "failed" if problem else "–"
        if objective is not None and not problem:
            score = tags.in_words(train.best, objective)
        lines.append(f"{score:>{len(title)}}  {number:>4}  {' '.join(overrides)}")
        lines += [f"{'':>{len(title) + 8}}{problem}"] if problem else []
    return "\n".join(lines)


def split_sweep(arguments: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return the arguments that all jobs share, and each job's own, whose last key changes fastest."""
    swept: dict[str, list[str]] = {}
    random.seed(0)  # for shuffle(…), which must be the same on all ranks
    with program_configs() as folder, hydra.initialize_config_dir(str(folder), version_base="1.3"):
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())  # for glob(…) over groups
        for text in split(arguments)[1]:
            try:
                (override,) = parser.parse_overrides([text])
            except (HydraException, OverrideParseException):
                raise unreadable(text) from None
            if not override.is_sweep_override():
                continue
            if Mark.SHARED in MARKS.get(override.key_or_group, Mark.NONE):
                raise UserError(f"{text}: all jobs of a sweep have one {override.key_or_group}")
            if override.is_interval_sweep():
                raise UserError(f"{text}: an interval has infinitely many values; list some")
            key = override.get_key_element()
            swept[text] = [f"{key}={value}" for value in override.sweep_string_iterator()]
    fixed = [text for text in arguments if text not in swept]
    return fixed, [list(job) for job in itertools.product(*swept.values())]


def _run_job(program: Program, overrides: list[str], context: Context) -> tuple[Outcome, str]:
    """Return the outcome, and the traceback of a failure that is no user's mistake."""
    try:
        config = read_config(context.overrides, False)
        assert config is not None
        launch.require_same_command(config)
        return Outcome(overrides, program(config, context), ""), ""
    except UserError as error:
        return Outcome(overrides, None, str(error)), ""
    except Exception as error:
        rank = context.rank_info.rank
        with contextlib.suppress(OSError):  # the job may have failed because of this disk
            context.run_dir.mkdir(parents=True, exist_ok=True)
            (context.run_dir / f"traceback-{rank:05}.txt").write_text(traceback.format_exc())
        return Outcome(overrides, None, f"{type(error).__name__}: {error}"), traceback.format_exc()

"""Several runs by one command: every combination of the values given, or what Optuna suggests.

    python -m shardtrain.train -m +recipe=resnet optim.lr=0.02,0.04 seed=range(3)
    python -m shardtrain.train -m +recipe=resnet sweep.trials=20 'optim.lr=tag(log,interval(0.005,0.1))'

The ranks and their process group live through all jobs; each job has a numbered folder in one directory.
What a job is worth is its best accuracy on the held-out images. A job that fails alike on every rank is told,
and the next one follows; when the ranks part, nothing can follow.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import hydra
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException, OverrideParseException

from shardtrain import launch
from shardtrain.compose import compose, program_configs, split, unreadable
from shardtrain.config import Config, from_hydra
from shardtrain.errors import UserError
from shardtrain.launch import Context
from shardtrain.place import Place, meet
from shardtrain.search import Combinations, Outcome, Search, Suggestions, written

Program = Callable[[Config, Context], float | None]

FLAGS = ("-m", "--multirun")
# One process group, on one device, in one directory: of all jobs together.
SHARED = ("device", "threads", "run.name", "run.dir", "sweep.trials")


@dataclass(frozen=True)
class Sweep:
    """What a command line with `--multirun` asks for."""

    fixed: list[str]  # overrides and flags of every job
    search: Search
    first: Config

    @property
    def device(self) -> str:
        return self.first.device

    @property
    def threads(self) -> int | None:
        return self.first.threads


def read(arguments: Sequence[str], speak: bool) -> Sweep | None:
    """The sweep that `arguments` ask for; None if they ask for something to be printed."""
    fixed, swept = split_sweep([text for text in arguments if text not in FLAGS])
    raw = compose([*fixed, *(_sample(override) for override in swept)], speak=speak)
    if raw is None:
        return None
    first = from_hydra(raw)
    for override in swept:
        if override.key_or_group in SHARED:
            raise UserError(f"{override.input_line}: all jobs of a sweep have one {override.key_or_group}")
    if first.sweep.trials is None:
        return Sweep(fixed, Combinations(swept), first)
    return Sweep(fixed, Suggestions(swept, first.sweep.trials, first.seed), first)


def run(program: Program) -> float | None:
    """`launch.run`, or with `--multirun` one job after the other; the best objective."""
    if any(flag in sys.argv[1:] for flag in FLAGS):
        return launch.start(read, partial(run_jobs, program=program))
    return launch.run(program)


def run_jobs(sweep: Sweep, place: Place, device: torch.device, program: Program) -> float | None:
    """Runs the jobs in turn; the best objective. Collective.

    Raises:
        UserError: not one of them has worked.
        RuntimeError: the ranks have left a job for different reasons.
    """
    tell, directory = _telling(place), launch.run_dir(sweep.first, place)
    done: list[Outcome] = []
    while (overrides := sweep.search.next(done)) is not None:
        context = Context(place, device, directory / str(len(done)))
        if place.rank == 0:
            print(f"job {len(done)}: {' '.join(overrides)}", flush=True)
        outcome = _attempt(program, sweep, overrides, context)
        gc.collect()  # a model is a cycle, and holds its transport
        _require_same(len(done), tell(outcome.problem))
        done.append(outcome)
        if place.rank == 0:
            _note(done, directory)
    if place.rank == 0:
        print(table(done), flush=True)
    if all(outcome.problem for outcome in done):
        raise UserError(f"every job of the sweep has failed, the first with: {done[0].problem}")
    return max((outcome.objective for outcome in done if outcome.objective is not None), default=None)


def table(done: Sequence[Outcome]) -> str:
    """The jobs, best first; what failed comes last, with the reason."""
    worth = [(bool(each.problem), 1.0 if each.objective is None else -each.objective) for each in done]
    lines = ["best val/acc1   job  overrides"]
    for number in sorted(range(len(done)), key=worth.__getitem__):
        overrides, objective, problem = done[number]
        score = "failed" if problem else "–" if objective is None else f"{objective:.2f} %"
        lines.append(f"{score:>13}  {number:>4}  {' '.join(overrides)}")
        lines += [f"{'':>21}{problem}"] if problem else []
    return "\n".join(lines)


def split_sweep(arguments: Sequence[str]) -> tuple[list[str], list[Override]]:
    """What all jobs have, as written, and the keys with several values."""
    fixed, overrides = split(arguments)
    swept: list[Override] = []
    with program_configs() as folder, hydra.initialize_config_dir(str(folder), version_base="1.3"):
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())  # which knows groups: glob(…)
        for text in overrides:
            override = _parsed(parser, text)
            if override.is_sweep_override():
                swept.append(override)
            else:
                fixed.append(text)
    return fixed, swept


def _parsed(parser: OverridesParser, text: str) -> Override:
    try:
        return parser.parse_overrides([text])[0]
    except (HydraException, OverrideParseException):
        raise UserError(unreadable(text)) from None


def _sample(override: Override) -> str:
    """One of the values, for a look at what all jobs have in common."""
    value = override.value()
    if isinstance(value, IntervalSweep):
        assert value.start is not None
        return written(override, int(value.start) if "int" in value.tags else value.start)
    return written(override, next(iter(override.sweep_string_iterator())))


def _attempt(program: Program, sweep: Sweep, overrides: list[str], context: Context) -> Outcome:
    try:
        raw = compose([*sweep.fixed, *overrides])
        assert raw is not None
        return Outcome(overrides, program(from_hydra(raw), context), "")
    except UserError as error:
        return Outcome(overrides, None, str(error))
    except Exception as error:
        _keep_traceback(context)
        return Outcome(overrides, None, f"{type(error).__name__}: {error}")


def _keep_traceback(context: Context) -> None:
    """Of the exception being handled: in the job's folder, every rank's, and on rank 0's terminal."""
    text, rank = traceback.format_exc(), context.place.rank
    if rank == 0:
        print(text, file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):  # what the disk refuses may be the job's very failure
        context.run_dir.mkdir(parents=True, exist_ok=True)
        (context.run_dir / f"traceback-{rank:05}.txt").write_text(text)


def _telling(place: Place) -> Callable[[str], list[str]]:
    """Gives every rank's text for this rank's. By way of the store, for the group may be broken."""
    if place.world_size == 1:
        return lambda text: [text]
    store = meet(place.store, place.rank, place.world_size)
    ranks, rounds = range(place.world_size), itertools.count()

    def tell(text: str) -> list[str]:
        key = f"told/{next(rounds)}/{{}}".format
        store.set(key(place.rank), text)
        return [store.get(key(rank)).decode() for rank in ranks]

    return tell


def _require_same(number: int, problems: list[str]) -> None:
    """A rank that failed alone has left the others in the middle of something."""
    if len(set(problems)) > 1:
        said = "; ".join(f"rank {rank}: {problem or 'done'}" for rank, problem in enumerate(problems))
        raise RuntimeError(f"the ranks left job {number} for different reasons, so none can follow: {said}")


def _note(done: Sequence[Outcome], directory: Path) -> None:
    """Whatever happens next, what is known so far is in a file."""
    if done[-1].problem:
        print(f"job {len(done) - 1} has failed: {done[-1].problem}", flush=True)
    directory.mkdir(parents=True, exist_ok=True)
    facts = [outcome._asdict() for outcome in done]
    (directory / "sweep.json").write_text(json.dumps(facts, indent=2) + "\n")

"""Run every combination of the given values, each as a job of its own.

    python -m shardtrain.train -m +recipe=resnet optim.lr=0.02,0.04 "seed=range(3)"
    python -m shardtrain.train.sweep --nproc-per-node 2 -- +recipe=resnet optim.lr=0.02,0.04 "seed=range(3)"

Arguments before ``--`` are torchrun's. Without them each job is one process. Each job has a folder in one
directory, named by its number and its values. A job's objective is its best score of `train.best`. A job that
fails, or that is killed, is reported, and the next one starts.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf

from shardtrain.job import tags
from shardtrain.job.config import Config
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.errors import UserError
from shardtrain.job.hydra_app import program_configs, split, unreadable
from shardtrain.job.launch import USER_ERROR, run_dir
from shardtrain.job.read import read_command
from shardtrain.job.signals import INTERRUPTED
from shardtrain.train.loop import OUTCOME_FILE

FLAGS = ("-m", "--multirun")
LONGEST_NAME = 100  # characters of the name of a job's folder
# Keys that decide where jobs are and how they are ranked.
SHARED = ("run.name", "run.dir", "train.best")
LAUNCHER_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun copies the first failing rank's there
STOPS = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: 143, signal.SIGHUP: 129}  # with their exit codes


class Outcome(NamedTuple):
    """Hold the result of a job."""

    overrides: list[str]  # the overrides in which jobs differ
    objective: float | None = None
    problem: str = ""  # "" for none
    is_minimised: bool = False


class Sweep(NamedTuple):
    """Hold the settings of a sweep's command line."""

    fixed: list[str]  # overrides and flags of every job
    jobs: list[list[str]]  # the overrides in which they differ
    first: Config


def main() -> None:
    """Run the sweep of the command line; exit with 2 if a job failed."""
    arguments = sys.argv[1:]
    at = arguments.index("--") if "--" in arguments else -1
    run(arguments[: max(at, 0)], arguments[at + 1 :])


def run(launch: Sequence[str], arguments: Sequence[str]) -> None:
    """Run a job for each combination in ``arguments``, one after the other; exit unless all succeed.

    launch: torchrun's own arguments; without any each job is one process.
    """
    launcher = [sys.executable, *(["-m", "torch.distributed.run", *launch] if launch else [])]
    try:
        require_one_host(launch)
        sweep = read(arguments, speak=True)
        if sweep is None:
            return
        directory = run_dir(sweep.first, RankInfo(0, 1, 0, 1))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    done: list[Outcome] = []
    for number, overrides in enumerate(sweep.jobs):
        print(f"job {number}: {' '.join(overrides)}", flush=True)
        folder = directory / job_name(number, overrides)
        command = [*launcher, "-m", "shardtrain.train", *sweep.fixed, *overrides]
        command.append(f"run.dir={quoted(folder)}")
        outcome = outcome_of(command, overrides)
        done.append(outcome)
        if outcome.problem:
            print(f"job {number} has failed: {outcome.problem}", flush=True)
        with contextlib.suppress(OSError):  # written after each job, so there may be room next time
            directory.mkdir(parents=True, exist_ok=True)
            facts = [each._asdict() for each in done]
            (directory / "sweep.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(table(done, sweep.first.train.best), flush=True)
    failed = [number for number, outcome in enumerate(done) if outcome.problem]
    if failed:
        count = f"{len(failed)} of {len(done)} jobs have failed"
        reason = done[failed[0]].problem
        print(f"error: {count}, the first, job {failed[0]}, with: {reason}", file=sys.stderr)
        sys.exit(USER_ERROR)


def read(arguments: Sequence[str], speak: bool) -> Sweep | None:
    """Return the sweep of ``arguments``; None if a flag asks for output. Raises UserError for mistakes."""
    fixed, jobs = split_sweep([text for text in arguments if text not in FLAGS])
    if not jobs:
        raise UserError("a sweep without a job: a glob(…) matches no name")
    first = read_command([*fixed, *jobs[0]], speak)
    return None if first is None else Sweep(fixed, jobs, first.config)


def refuse_ranks(arguments: Sequence[str], speak: bool) -> Any:
    """Raise UserError with the command for several ranks: a sweep starts the ranks of each job itself."""
    words = [text for text in arguments if text not in FLAGS]
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "N")
    command = f"python -m shardtrain.train.sweep --nproc-per-node {ranks} -- {shlex.join(words)}"
    raise UserError(f"-m: a sweep starts torchrun itself, once per job; use {command}")


def require_one_host(launch: Sequence[str]) -> None:
    """Raise UserError if torchrun is to start ranks on several hosts, each of which would need this sweep."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--nnodes", default="1")
    nodes = parser.parse_known_args(launch)[0].nnodes
    if nodes not in ("1", "1:1"):
        raise UserError(
            f"--nnodes {nodes}: a sweep starts the ranks of this host alone; on several hosts start each "
            "combination by a torchrun on every host"
        )


def outcome_of(command: Sequence[str], overrides: list[str]) -> Outcome:
    """Run one job, and return how it ended. Exits as the job does after a signal to this process."""
    with tempfile.TemporaryDirectory() as name:
        outcome_file = Path(name) / "outcome.json"
        error_file = Path(name) / "error.json"
        files = {OUTCOME_FILE: str(outcome_file), LAUNCHER_ERROR_FILE: str(error_file)}
        code = exit_code_of(command, {**os.environ, **files})
        if code != 0:
            return Outcome(overrides, problem=reason_of(code, json_in(error_file)))
        return Outcome(overrides, **(json_in(outcome_file) or {}))


def exit_code_of(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run ``command``, and return its exit code: if a signal ended it, minus the signal's number.

    A signal to this process ends the job, which saves, and then this process.
    """
    received: list[int] = []
    processes: list[subprocess.Popen[bytes]] = []

    def pass_on(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        for process in processes:
            process.send_signal(signum)

    before = {signum: signal.signal(signum, pass_on) for signum in STOPS}
    try:
        # In a session of its own, so that Ctrl-C reaches the job once, from here.
        processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
        if received:  # while it started
            processes[0].send_signal(received[0])
        code = processes[0].wait()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if received:
        sys.exit(STOPS[signal.Signals(received[0])])
    return code


def json_in(file: Path) -> dict[str, Any] | None:
    """Return the content of ``file``; None if there is none."""
    try:
        content: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return content


def reason_of(code: int, report: Mapping[str, Any] | None) -> str:
    """Return why a job failed with exit ``code``, in one line, from the ``report`` of the launcher."""
    message = report["message"] if report else ""
    if isinstance(message, Mapping):
        message = message["message"]
    first_line = next(iter(str(message).removeprefix("error: ").splitlines()), "")
    if first_line:
        return first_line
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def quoted(path: Path) -> str:
    """Return ``path`` as a value of an override."""
    # Backslashes count as such only before a quote or an interpolation, where they are doubled.
    escaped = re.sub(r"(\\*)('|\$\{)", r"\1\1\\\2", f"{path}'")
    return f"'{escaped[:-2]}'"  # the last quote ends the value


def job_name(number: int, overrides: Sequence[str]) -> str:
    """Return the name of a job's folder, and of its run in TensorBoard: job 3 is ``3-width-32-lr-0.1``.

    A path with `=` in it would need quotes as the value of a key.
    """
    parts = [str(number)]
    for override in overrides:
        key, _, value = override.partition("=")
        parts += [key.rpartition(".")[2], value]
    parts = [re.sub(r"[^\w.+-]+", "_", part).strip("_+") for part in parts]
    return "-".join(parts)[:LONGEST_NAME]


def table(done: Sequence[Outcome], tag: str) -> str:
    """Return a table of the jobs, best first; failed ones come last, with their reasons."""
    sign = 1.0 if any(each.is_minimised for each in done) else -1.0
    ranks = []
    for each in done:
        last = math.inf if each.objective is None else sign * each.objective
        ranks.append((bool(each.problem), last))
    title = f"best {tag}"
    lines = [f"{title}   job  overrides"]
    for number in sorted(range(len(done)), key=ranks.__getitem__):
        outcome = done[number]
        score = "failed" if outcome.problem else "–"
        if outcome.objective is not None:
            score = tags.in_words(tag, outcome.objective)
        lines.append(f"{score:>{len(title)}}  {number:>4}  {' '.join(outcome.overrides)}")
        lines += [f"{'':>{len(title) + 8}}{outcome.problem}"] if outcome.problem else []
    return "\n".join(lines)


def split_sweep(arguments: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return the arguments that all jobs share, and each job's own, whose last key changes fastest."""
    swept: dict[str, list[str]] = {}
    random.seed(0)  # for shuffle(…), the same if the command is repeated
    configs = program_configs()
    with (
        configs.registered(OmegaConf.create()),
        hydra.initialize_config_dir(str(configs.FOLDER), version_base="1.3"),
    ):
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())  # for glob(…) over groups
        for text in split(arguments)[1]:
            try:
                (override,) = parser.parse_overrides([text])
            except (HydraException, OverrideParseException):
                raise unreadable(text) from None
            if not override.is_sweep_override():
                continue
            if override.key_or_group in SHARED:
                raise UserError(f"{text}: all jobs of a sweep have one {override.key_or_group}")
            if override.is_interval_sweep():
                raise UserError(f"{text}: an interval has infinitely many values; list some")
            key = override.get_key_element()
            swept[text] = [f"{key}={value}" for value in override.sweep_string_iterator()]
    fixed = [text for text in arguments if text not in swept]
    return fixed, [list(job) for job in itertools.product(*swept.values())]


if __name__ == "__main__":
    main()

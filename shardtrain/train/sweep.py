"""A sweep by Hydra's sweeper: each job is a process of its own, or a torchrun of several ranks.

Hydra sees the words in which jobs differ, and its own; each job composes its configuration by itself. A job's
folder is named by its number and its values, so the same command again continues what has not finished.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from shardtrain.config.command import explained, read_command, split
from shardtrain.config.config import Config
from shardtrain.config.errors import UserError, path_of, program_configs, writing
from shardtrain.config.schema import typed
from shardtrain.job import tags
from shardtrain.launch.launcher import USER_ERROR, run_dir
from shardtrain.launch.ranks import RankInfo
from shardtrain.launch.signals import INTERRUPTED

FLAGS = ("-m", "--multirun")
RANKS = "ranks"  # the key of a sweep alone: how many ranks a job has
LONGEST_NAME = 100  # characters of the name of a job's folder
SHARED = ("run.name", "run.dir", "train.best")  # keys that decide where jobs are and how they are ranked
# Hydra makes no folders but the sweep's own, and no logs.
QUIET = {"output_subdir": None, "sweep": {"subdir": "."}, "job": {"name": "shardtrain", "chdir": False}}
OUTCOME = "outcome.json"  # in a job's folder
STOPS = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: 143, signal.SIGHUP: 129}  # with their exit codes


class Outcome(NamedTuple):
    number: int
    overrides: Sequence[str]  # in which jobs differ
    problem: str = ""  # "" for none
    score: float | None = None
    rank: float = math.inf  # the least is the best


class Sweep(NamedTuple):
    """What the command line of a sweep says."""

    fixed: list[str]  # words and flags of every job
    swept: list[str]  # words in which jobs differ
    hydra_words: list[str]
    ranks: int
    first: Config  # of a job with the first value of each word


def run(arguments: Sequence[str]) -> None:
    """Run the jobs of the sweep in ``arguments``, one after the other; exit unless all succeed."""
    try:
        sweep = read(arguments, speak=True)
        if sweep is None:
            return
        directory = run_dir(sweep.first, RankInfo(0, 1, 0, 1)).absolute()
        for file in directory.glob(f"*/{OUTCOME}"):  # of an earlier sweep
            file.unlink()
        let_hydra_sweep(sweep, directory)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    done = [Outcome(**json.loads(file.read_text())) for file in directory.glob(f"*/{OUTCOME}")]
    print(table(done, sweep.first.train.best), flush=True)
    failed = sorted((outcome.number, outcome.problem) for outcome in done if outcome.problem)
    if failed:
        first = "the first, job {}, with: {}".format(*failed[0])
        print(f"error: {len(failed)} of {len(done)} jobs have failed, {first}", file=sys.stderr)
        sys.exit(USER_ERROR)


def read(arguments: Sequence[str], speak: bool) -> Sweep | None:
    """Return the sweep of ``arguments``; None if a flag asks for output. Raises UserError for mistakes."""
    fixed = [text for text in arguments if text not in FLAGS]
    flags, words = split(fixed)
    swept = []
    hydra_words = []
    first_values = []
    ranks = 1
    with _hydra(flags.config_dir) as app:
        for override in OverridesParser.create(app.config_loader).parse_overrides(words):
            text = str(override.input_line)
            if override.is_sweep_override():
                swept.append(text.lstrip("+"))
                first_values.append(_with_first_value(override))
            elif override.is_hydra_override():
                hydra_words.append(text)
            elif override.key_or_group == RANKS:
                ranks = typed(int, override.value(), RANKS, {"at_least": 1})
            else:
                continue
            fixed.remove(text)
    first = read_command([*fixed, *first_values], speak)
    return None if first is None else Sweep(fixed, swept, hydra_words, ranks, first.config)


def _with_first_value(override: Override) -> str:
    """Return a word of several values with the first of them. Raises UserError if it has none."""
    if override.key_or_group in SHARED:
        raise UserError(f"{override.input_line}: all jobs of a sweep have one {override.key_or_group}")
    value: Any = override.value()
    values = [value.start] if override.is_interval_sweep() else [*override.sweep_string_iterator()]
    if not values:
        raise UserError(f"{override.input_line}: a sweep without a job: a glob(…) matches no name")
    return f"{override.get_key_element()}={values[0]}"


@contextlib.contextmanager
def _hydra(config_dirs: Sequence[str], swept: Sequence[str] = ()) -> Iterator[Any]:
    """Yield a Hydra that has the keys of the ``swept`` words, and all groups, with nothing chosen of them."""
    random.seed(0)  # for shuffle(…), the same whenever the words are read
    configs = program_configs()
    folders = [configs.FOLDER, *(path_of("--config-dir", text).absolute() for text in config_dirs)]
    groups = configs.groups_in(folders)
    with explained(groups):  # what Hydra and its parser raise becomes a UserError
        defaults: list[Any] = ["_self_"]
        defaults += [{group: None} for group in sorted(groups, key="recipe".__eq__)]  # it changes the others
        defaults += [{f"override hydra/{name}_logging": "none"} for name in ("hydra", "job")]
        own_keys = {**QUIET, "searchpath": [f"file://{folder}" for folder in folders[1:]]}
        node = OmegaConf.create({"defaults": defaults, "hydra": own_keys})
        for word in swept:  # each job checks its own
            OmegaConf.update(node, word.partition("=")[0], None)
        with configs.registered(node), hydra.initialize_config_dir(str(configs.FOLDER), version_base="1.3"):
            yield GlobalHydra.instance().hydra


def let_hydra_sweep(sweep: Sweep, directory: Path) -> None:
    """Run the jobs by Hydra's sweeper, in folders of ``directory``, each of which gets an `Outcome`."""
    words = [*sweep.swept, *sweep.hydra_words, f"hydra.sweep.dir={quoted(directory)}"]
    if "hydra/sweeper=optuna" in words:  # what `run_job` returns is so, whatever `train.best` is
        words.append("hydra.sweeper.direction=minimize")
    task = partial(run_job, sweep.fixed, sweep.ranks, directory)
    with _hydra(split(sweep.fixed)[0].config_dir, sweep.swept) as app:
        app.multirun(program_configs().PRIMARY, task, words, with_log_configuration=False)


def run_job(fixed: Sequence[str], ranks: int, directory: Path, _: DictConfig) -> float:
    """Run the job whose words Hydra has chosen; return its rank. Exits after a signal to this process."""
    settings = HydraConfig.get()
    number = settings.job.num
    overrides = [*settings.overrides.task]
    print(f"job {number}: {' '.join(overrides)}", flush=True)
    folder = directory / job_name(number, overrides)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(launcher if ranks > 1 else []), "-m", "shardtrain.train"]
    words = [*fixed, *overrides, f"run.dir={quoted(folder)}"]
    outcome = Outcome(number, overrides, problem_of([*command, *words]))
    if outcome.problem:
        print(f"job {number} has failed: {outcome.problem}", flush=True)
    else:
        result = json.loads((folder / "result.json").read_text())
        score = result.get(tags.best(result[tags.BEST_BY]))
        if score is not None:
            outcome = outcome._replace(score=score, rank=score if result[tags.BEST_IS_LOWEST] else -score)
    with writing("run.dir", folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / OUTCOME).write_text(json.dumps(outcome._asdict()))
    return outcome.rank


def refuse_ranks(arguments: Sequence[str], speak: bool) -> Any:
    """Raise UserError: a sweep starts the ranks of each job itself."""
    command = f"python -m shardtrain.train -m {RANKS}=N"
    raise UserError(f"-m: a sweep starts torchrun itself, once per job; use {command} with the same words")


def problem_of(command: Sequence[str]) -> str:
    """Run one job, which prints its own mistakes; return how it failed, "" if it did not."""
    code = exit_code_of(command)
    if not code:
        return ""
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def exit_code_of(command: Sequence[str]) -> int:
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
        processes.append(subprocess.Popen(command, start_new_session=True))
        if received:  # while it started
            processes[0].send_signal(received[0])
        code = processes[0].wait()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if received:
        sys.exit(STOPS[signal.Signals(received[0])])
    return code


def quoted(path: Path) -> str:
    """Return ``path`` as a value of an override."""
    # Backslashes count as such only before a quote or an interpolation, where they are doubled.
    escaped = re.sub(r"(\\*)('|\$\{)", r"\1\1\\\2", f"{path}'")
    return f"'{escaped[:-2]}'"  # the last quote ends the value


def job_name(number: int, overrides: Sequence[str]) -> str:
    """Return the name of a job's folder, and of its run in TensorBoard: job 3 is ``3-width-32-lr-0.1``."""
    parts = [str(number)]
    for override in overrides:
        key, _, value = override.partition("=")
        parts += [key.rpartition(".")[2], value]
    # Without `=`, since a path with one would need quotes as the value of a key.
    parts = [re.sub(r"[^\w.+-]+", "_", part).strip("_+") for part in parts]
    return "-".join(parts)[:LONGEST_NAME]


def table(done: Sequence[Outcome], tag: str) -> str:
    """Return a table of the jobs, best first; failed ones come last, with their reasons."""
    title = f"best {tag}"
    lines = [f"{title}   job  overrides"]
    for outcome in sorted(done, key=lambda each: (bool(each.problem), each.rank, each.number)):
        score = "failed" if outcome.problem else "–"
        if outcome.score is not None:
            score = tags.in_words(tag, outcome.score)
        lines.append(f"{score:>{len(title)}}  {outcome.number:>4}  {' '.join(outcome.overrides)}")
        lines += [f"{'':>{len(title) + 8}}{outcome.problem}"] if outcome.problem else []
    return "\n".join(lines)


if __name__ == "__main__":
    print(f"error: use python -m shardtrain.train -m {RANKS}=N WORD …", file=sys.stderr)
    sys.exit(USER_ERROR)

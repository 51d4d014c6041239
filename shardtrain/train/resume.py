"""Where a run starts: anew, or after the step that an earlier process saved last (see `keeper.py`)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import secrets
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from shardtrain import comm
from shardtrain.checkpoint import Damaged
from shardtrain.checkpoint.loading import Opened, load_into, open_checkpoint
from shardtrain.checkpoint.manifest import NAME
from shardtrain.checkpoint.store import Newest, Store, newest, steps_in
from shardtrain.comm.transport import Ranks
from shardtrain.job.build import Job, seed_process
from shardtrain.job.config import Config
from shardtrain.job.dist_env import on_rank_0
from shardtrain.job.launch import Context
from shardtrain.job.schema import UserError, writing
from shardtrain.monitor import StepMetrics
from shardtrain.train.saving import Best, Past, facts_of

CHECKPOINTS = "checkpoints"
SHOWN = 5  # parameters that do not fit a checkpoint


class Start(NamedTuple):
    """Where a run starts: after ``step`` steps, with what ``opened`` holds, or anew."""

    step: int
    opened: Opened | None
    store: Store
    damaged: list[tuple[Path, str]]  # newer checkpoints that are not whole, and why


def told(start: Start, job: Job, evaluating: bool = False) -> list[str]:
    """What people should know of the start."""
    aside = "" if evaluating else "; it is set aside"
    warnings = [f"warning: {text}{aside}" for _, text in start.damaged]
    if start.opened is None:
        return warnings
    if evaluating:
        return [*warnings, f"evaluating step {start.step} ({start.opened.path})"]
    left = ": nothing is left to do" if start.step >= job.steps else ""
    where = f"continuing after step {start.step} of {job.steps}{left}"
    return [*warnings, f"{where} ({start.opened.path})"]


def find_start(config: Config, context: Context) -> Start:
    """Where the configuration's `resume` says to start. Changes nothing yet. Collective.

    Raises:
        UserError: there is nothing whole to start from, where there should be.
    """
    directory = context.run_dir / CHECKPOINTS
    all_ranks, keep = comm.plain_transport(), config.checkpoint.keep
    store = Store(
        directory, all_ranks, context.device, keep=keep, asynchronous=config.checkpoint.asynchronous
    )
    if config.dry_run or (config.resume == "none" and (config.eval_only or not _restarted(context))):
        return Start(0, None, store, [])
    try:
        found = store.newest()
        if found.opened is None and config.resume not in ("auto", "none"):
            found = _elsewhere(Path(config.resume).expanduser(), all_ranks, context.device)
    except Damaged as error:
        raise UserError(f"resume={config.resume}: {error}; resume=none starts anew") from None
    return Start(found.step, found.opened, store, found.damaged)


@contextlib.contextmanager
def run_directory(start: Start, config: Config, context: Context) -> Iterator[list[str]]:
    """Inside, the run directory is this job's alone, and ready for its checkpoints. Collective.

    Gives what people should know of that. A run that writes nothing changes nothing here.

    Raises:
        UserError: on every rank: another job writes there, or nobody can.
    """
    news: list[str] = []
    with contextlib.ExitStack() as held:

        def take() -> None:
            held.enter_context(locked(context.run_dir))
            if config.resume == "none" and start.opened is None:
                news.extend(_set_aside(start.store.directory))
            start.store.clear(start.damaged)

        if not (config.dry_run or config.eval_only):
            on_rank_0(take)
        yield news


def _set_aside(directory: Path) -> list[str]:
    """Rename the checkpoints of an earlier run, so that no restart takes them for this one's."""
    if not steps_in(directory):
        return []
    taken = len(list(directory.parent.glob(f"{CHECKPOINTS}.*")))
    aside = directory.with_name(f"{CHECKPOINTS}.{taken + 1}")
    try:
        directory.rename(aside)
    except OSError as error:
        raise UserError(f"resume=none: cannot rename {directory} ({error.strerror})") from error
    return [f"resume=none: the checkpoints of an earlier run are in {aside} now"]


def _restarted(context: Context) -> bool:
    """Whether torchrun has started this run before: after a failure, or with more or fewer ranks. Collective.

    Then it goes on from its own checkpoints, whatever its `resume` says.
    """
    before = False
    if context.rank_info.rank == 0 and "TORCHELASTIC_RUN_ID" in os.environ:
        token, count = secrets.token_hex(8), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        before = context.rank_info.agree(f"start/{context.run_dir}", token) != token or count != "0"
    return bool(comm.broadcast(torch.tensor(int(before), device=comm.control_device())).item())


def _elsewhere(path: Path, all_ranks: Ranks, device: torch.device) -> Newest:
    """The checkpoint ``path``, or the newest of the run ``path``."""
    if (path / NAME).exists():
        opened = open_checkpoint(path, all_ranks, device)
        return Newest(opened, int(opened.manifest.facts.get("step", 0)), [])
    found = newest(path / CHECKPOINTS, all_ranks, device)
    if found.opened is None:
        raise UserError(
            f"resume={path}: neither a checkpoint nor a run with checkpoints; resume=none starts anew"
        )
    return found


def restore(start: Start, config: Config, job: Job, window: StepMetrics) -> Past:
    """Fill the job with what `find_start` found, and give what is known of the run until then. Collective.

    The command's settings count, not the saved ones: a new `optim.weight_decay` takes effect.

    Raises:
        UserError: the checkpoint is of another model or optimizer, or of other batches.
    """
    if config.eval_only:
        _restore_model(start, config, job)
        return Past()
    if start.opened is None:
        return Past()
    _compare(start.opened.manifest.facts, facts_of(config, job))
    options = [{k: v for k, v in group.items() if k != "params"} for group in job.optimizer.param_groups]
    try:
        averages = None if job.ema is None else job.ema.averages
        extra = load_into(start.opened, job.model, job.optimizer, averages)
    except ValueError as error:
        raise UserError(f"resume={config.resume}: {_shortened(error)}; resume=none starts anew") from None
    for group, own in zip(job.optimizer.param_groups, options, strict=True):
        group.update(own)
    ranks = start.opened.manifest.world_size
    window.restore(extra["window"], ranks)
    if job.ema is not None:
        job.ema.restore(extra["ema"], ranks)
    if extra.get("scaler"):  # empty from a run that scaled nothing
        job.scaler.load_state_dict(extra["scaler"])
    if ranks == job.share.world_size:
        _set_random_state(extra["random"], job.device)
    else:
        seed_process("resumed", config.seed, comm.rank(), start.step)
    return Past(extra["best"] and Best(*extra["best"]), extra.get("owed", False))


def _restore_model(start: Start, config: Config, job: Job) -> None:
    """For an evaluation, to which the optimizer and the place among the images do not matter."""
    opened = start.opened
    if opened is None:
        if config.model.get("weights") is None:
            raise UserError(
                f"eval_only=true: there is no checkpoint in {start.store.directory}; name the run "
                "(run.name=NAME), a checkpoint or a run (resume=PATH), or plain weights (model.weights=FILE)"
            )
        return
    averages = None if job.ema is None else job.ema.averages
    try:
        extra = load_into(opened, job.model, None, averages)
    except ValueError as error:
        raise UserError(_shortened(error)) from None
    if job.ema is not None:
        job.ema.restore(extra["ema"], opened.manifest.world_size)


def _shortened(error: ValueError) -> str:
    """The first few of what may be hundreds of parameters that do not fit."""
    problems = str(error).split("; ")
    more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return "; ".join(problems[:SHOWN]) + more


def _compare(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    for key in ("_target_", "name"):
        was, now = (facts["config"]["model"].get(key) for facts in (saved, ours))
        if was != now:
            raise UserError(
                f"resume: the checkpoint is of a run with model.{key}={was}, this one has {now}; choose "
                "another run.name, or resume=none starts anew"
            )
    theirs = saved.get("position", {})
    for key, value in ours["position"].items():
        if theirs.get(key) != value:
            raise UserError(
                f"resume: the checkpoint is of a run with {key}={theirs.get(key)}, this one has {value}, "
                "so its place among the images means nothing here; resume=none starts anew"
            )


def _set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    key, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", key.numpy().astype(np.uint32), position, has_gauss, cached))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


# Two jobs that would write into one run directory are kept apart.

LOCK = ".lock"


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Inside, ``directory`` exists, and no other process comes in with it, on whichever host.

    The kernel holds the lock for this process alone (`lockf`, not `flock`): it ends with the process, even
    where a data loader's workers outlive it for seconds.

    Raises:
        UserError: another process is inside, or nobody can write there.
    """
    path = directory / LOCK
    with writing("run.dir", directory):
        directory.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            raise UserError(
                f"another job is writing into {directory}: {file.read()}; choose another run.name, or wait "
                f"for it; if there is no such process any more, remove {path}"
            ) from None
        except OSError:
            pass  # a file system without locks: there nobody is kept apart
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield

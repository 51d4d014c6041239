"""The start of a run: anew, or after the last step that an earlier process saved (see `saving.py`)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

import shardtrain
from shardtrain import comm
from shardtrain.checkpoint import Damaged, SaveFailed, memory
from shardtrain.checkpoint.files import read_text, write_text
from shardtrain.checkpoint.loading import Opened, load_into, open_checkpoint
from shardtrain.checkpoint.manifest import NAME
from shardtrain.checkpoint.store import TEMPORARY, Newest, Store, newest, rehearse, step_name, steps_in
from shardtrain.config.command import require_version
from shardtrain.config.config import Config
from shardtrain.config.errors import UserError, path_of, reading, writing
from shardtrain.config.schema import key
from shardtrain.config.target import GIVEN, given_in_python
from shardtrain.job.build import Job
from shardtrain.job.model import plain_model
from shardtrain.launch.launcher import Context
from shardtrain.launch.ranks import on_rank_0, together
from shardtrain.monitor import StepMetrics
from shardtrain.optim import Ema
from shardtrain.train.continuation import is_path, require_same_run, validation_warnings
from shardtrain.train.saving import Best, RunState, machine

CHECKPOINTS = "checkpoints"
BEST = "best"
LOCK = ".lock"
IDENTITY = "run"  # the file beside the checkpoints that holds the run's identity


class Identity(NamedTuple):
    """A run's name. ``is_new``: it starts anew, and its directory does not have ``name`` yet."""

    name: str
    is_new: bool


def start_messages(store: Store, start: Newest, job: Job, config: Config) -> list[str]:
    """Return the lines that a run prints about its start."""
    warnings = [
        f"warning: {text}{'' if path.is_relative_to(memory.MEMORY) else '; it is set aside'}"
        for path, text in start.damaged
    ]
    ranks = comm.world_size()
    wanted = config.parallel.virtual_ranks
    if wanted and not config.virtual_ranks(ranks):
        warnings.append(
            f"warning: parallel.virtual_ranks={wanted} cannot be computed on {ranks} ranks, only on a power "
            "of two up to that number: this run trains without them, so its last bits differ"
            + (", and replays nothing" if config.train.replay_every else "")
        )
    if start.opened is None:
        return warnings
    return [*warnings, *_messages_of_checkpoint(store, start, start.opened, job, config)]


def _messages_of_checkpoint(
    store: Store, start: Newest, opened: Opened, job: Job, config: Config
) -> list[str]:
    """Return the lines about the checkpoint that a run starts from."""
    warnings = []
    wanted = config.parallel.virtual_ranks
    elsewhere = is_elsewhere(store, start)
    before = opened.manifest.facts.get("machine", {})
    now = machine(job.device)
    changed = [f"{what} {old} → {now[what]}" for what, old in before.items() if now.get(what) != old]
    if wanted and changed:
        warnings.append(
            f"warning: the checkpoint is from another machine ({', '.join(changed)}): results may differ in "
            "the last bits"
        )
    if not elsewhere:
        warnings += validation_warnings(opened, job)
    left = ": nothing is left to do" if start.step >= job.steps else ""
    where = f"continuing after step {start.step} of {job.steps}{left}"
    note = ""
    if elsewhere:
        note = "; this run is another one: its best score and its patience begin anew"
    elif is_path(config.resume):
        note = f"; resume={config.resume} is only for a run without checkpoints of its own"
    return [*warnings, f"{where} ({opened.path}){note}"]


def is_elsewhere(store: Store, start: Newest) -> bool:
    """Return whether a run starts from the checkpoint of another one, named by `resume=PATH`."""
    own = [store.directory] if store.memory is None else [store.directory, store.memory]
    return start.opened is not None and not any(start.opened.path.is_relative_to(place) for place in own)


def identify(config: Config, context: Context) -> Identity:
    """Return the identity of the run in the run directory, or a new one. Collective; writes nothing.

    A run whose ranks torchrun restarted, after a failure or with more or fewer ranks, keeps its identity
    whatever `resume` says.
    """

    def propose() -> Identity:
        saved = _saved_identity(context.run_dir / CHECKPOINTS / IDENTITY)
        proposal = secrets.token_hex(8)
        name = saved or proposal
        if config.resume == "none":
            name = proposal
            if "TORCHELASTIC_RUN_ID" in os.environ:
                name = context.rank_info.agree(f"start/{context.run_dir}", proposal)
            if name == proposal and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
                name = saved or proposal  # the launcher's store is a new one after a restart
        return Identity(name, is_new=name != saved)

    return Identity(*on_rank_0(propose))


def _saved_identity(path: Path) -> str:
    """Return the identity in the file ``path``; an empty text if there is none."""
    with contextlib.suppress(OSError, ValueError):
        if re.fullmatch("[0-9a-f]{16}", text := read_text(path, 100)):
            return text
    return ""


@contextlib.contextmanager
def memory_of(config: Config, context: Context, identity: Identity) -> Iterator[Path | None]:
    """Yield the run's directory in this host's memory, if it has one (`checkpoint/memory.py`). Collective.

    Raises UserError on every rank if there is no such memory, or if the ranks are on several hosts.
    """
    every = config.checkpoint.memory_every_steps
    if not every:
        yield None
        return
    setting = f"checkpoint.memory_every_steps={every}"
    hosts = len(comm.ranks_by_host(comm.plain_transport()))
    if hosts > 1:
        raise UserError(
            f"{setting}: checkpoints in memory are for ranks of one host, and these are on {hosts}; use "
            "checkpoint.every_steps=N on a disk that all see"
        )

    def claim() -> tuple[Path, int]:
        with reading(setting, "checkpoint.memory_every_steps=0 does without", OSError):
            return memory.claim(context.run_dir)

    directory, lock = together(claim)
    has_ended = False
    try:
        if context.rank_info.rank == 0:
            memory.watch(directory)
        yield directory / identity.name
        has_ended = True
    finally:
        disk = context.run_dir / CHECKPOINTS
        memory.release(directory, lock, keep=not (has_ended or memory.is_on_disk(directory, disk)))


def find_start(
    config: Config, context: Context, identity: Identity, in_memory: Path | None = None
) -> tuple[Store, Newest]:
    """Return where the run saves, and what it starts from as `resume` says. Collective.

    On disk it changes nothing. Raises UserError if `resume` requires a complete checkpoint and there is none.
    """
    store = Store(
        context.run_dir / CHECKPOINTS, comm.plain_transport(), keep=config.checkpoint.keep, memory=in_memory
    )
    if config.resume == "none" and identity.is_new:
        return store, Newest(None, 0, [])
    with reading(f"resume={config.resume}", "resume=none starts anew", (Damaged, OSError)):
        start = store.newest()
        if start.opened is None and is_path(config.resume):
            start = open_named(path_of("resume", config.resume))
            if start.opened is None:
                raise Damaged("neither a checkpoint nor a run with checkpoints")
    return store, start


def open_named(path: Path) -> Newest:
    """Open ``path``: a checkpoint, `RUN/best`, or a run, of which the newest complete one. Collective."""
    all_ranks = comm.plain_transport()
    if path.name == BEST:
        latest = newest(path.parent / CHECKPOINTS, all_ranks)
        if latest.opened is not None:
            best = latest.opened.manifest.facts.get(BEST) or latest.step
            path = path.parent / CHECKPOINTS / step_name(int(best))
    if on_rank_0(lambda: os.path.exists(path / NAME)):  # another host may not see it
        opened = open_checkpoint(path, all_ranks)
        return Newest(opened, int(opened.manifest.facts.get("step", 0)), [])
    return newest(path / CHECKPOINTS, all_ranks)


def open_saved(run: str, weights: str) -> Opened:
    """Open the newest complete checkpoint of ``run``, or the one that is named. Collective.

    weights: `raw` or `ema`. Raises UserError if it is no run's, or does not have these weights.
    """
    where = path_of("run", run)
    with reading(f"run={run}", "choose another step or run", Damaged):
        opened = open_named(where).opened
    if opened is None or "config" not in opened.manifest.facts:
        raise UserError(f"run={run}: neither a run with checkpoints nor a checkpoint of a run")
    config = opened.manifest.facts["config"]
    require_version(config.get("version"), f"run={run}")
    if config["model"].get("_target_") == GIVEN:
        raise given_in_python(f"run={run}")
    if weights == "ema" and not opened.manifest.specs("ema"):
        raise UserError(f"weights=ema: {opened.path} has no moving average; its run had ema.decay=null")
    return opened


def load_saved(
    opened: Opened, model: nn.Module, ema: Ema | None, what: str, optimizer: Optimizer | None = None
) -> dict[str, Any]:
    """Load ``opened`` into a sharded ``model``, its average and optimizer; return its extra. Collective.

    Raises UserError, about ``what``, for another model or optimizer than the one that was saved.
    """
    with reading(what, "the model or its optimizer was built otherwise then", ValueError):
        extra: dict[str, Any] = load_into(opened, model, optimizer, None if ema is None else ema.averages)
    if ema is not None:
        ema.restore(extra["ema"], opened.manifest.world_size)
    return extra


@dataclass(frozen=True, kw_only=True)
class SavedKeys:
    """The keys that choose weights of a run."""

    # packages of the run's model._target_, as the run's own command allowed them
    allow: tuple[str, ...] = key(())
    # a run directory, whose newest complete checkpoint is taken, or one of its checkpoints, as RUN/best
    run: str = key()
    # raw | ema: the weights, or their moving average
    weights: str = key("raw", choices=("raw", "ema"))
    # CPU threads of a rank; null: the cores of this host over its ranks
    threads: int | None = key(None, at_least=1)


@contextlib.contextmanager
def saved_model(opened: Opened, keys: SavedKeys, device: torch.device) -> Iterator[nn.Module]:
    """Yield a run's sharded model with the weights of ``opened``. In eval mode, no gradients. Collective."""
    model = plain_model(opened.manifest.facts["config"]["model"], keys.allow)
    shardtrain.shard(model.to(device))
    ema = Ema(model, 0.0) if keys.weights == "ema" else None
    load_saved(opened, model, ema, f"run={keys.run}")
    shardtrain.average_buffers(model)
    with contextlib.nullcontext() if ema is None else ema.swapped(), torch.no_grad():
        yield model.eval()


@contextlib.contextmanager
def run_directory(
    store: Store, start: Newest, config: Config, context: Context, identity: Identity
) -> Iterator[list[str]]:
    """Lock the run directory for this job, prepare it for checkpoints, and yield lines to print about that.

    Collective. Raises UserError on every rank if another job writes there, or if a file system lacks what a
    save needs.
    """
    messages: list[str] = []
    with contextlib.ExitStack() as stack:

        def prepare() -> None:
            stack.enter_context(locked(context.run_dir))
            if config.resume == "none" and start.opened is None:
                messages.extend(_set_aside(store.directory))
            store.clear(start.damaged)
            if identity.is_new:
                _write_identity(store.directory / IDENTITY, identity.name)

        on_rank_0(prepare)
        if store.memory is not None and context.rank_info.rank == 0:
            memory.keep_only(store.memory, start.step)
        if config.checkpoint.keep:
            way_out = "a save was rehearsed there; make room, or choose another run.dir"
            with reading(f"run.dir={context.run_dir}", way_out, (SaveFailed, Damaged)):
                rehearse(store.directory, comm.plain_transport())
        yield messages


def _write_identity(path: Path, name: str) -> None:
    """Write the run's identity into the file ``path``; a restart finds its memory by it."""
    temporary = path.with_name(f"{TEMPORARY}{IDENTITY}")
    with writing("run.dir", path.parents[1]):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        write_text(temporary, name)
        temporary.replace(path)


def _set_aside(directory: Path) -> list[str]:
    """Rename the checkpoints of an earlier run, so that no restart takes them for this run's."""
    if not steps_in(directory):
        return []
    taken = [path.suffix[1:] for path in directory.parent.glob(f"{CHECKPOINTS}.*")]
    last = max((int(number) for number in taken if number.isdecimal()), default=0)
    aside = directory.with_name(f"{CHECKPOINTS}.{last + 1}")
    with writing("run.dir", directory.parent):
        directory.rename(aside)
    return [f"resume=none: the checkpoints of an earlier run are in {aside} now"]


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Make ``directory``, and lock it against processes of all hosts. Raises UserError if that fails."""
    path = directory / LOCK
    with writing("run.dir", directory):
        directory.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b", buffering=0)
    with file:
        try:
            # Unlike a flock, it ends with this process, even if a data loader's workers outlive it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise UserError(
                f"another job is writing into {directory}: {path.read_text()}; choose another run.name, or "
                f"wait for it; if there is no such process any more, remove {path}"
            ) from None
        except OSError:
            pass  # a file system without locks: jobs are not kept apart there
        with contextlib.suppress(OSError):  # a full disk has locks, too
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield


def restore(
    store: Store, start: Newest, config: Config, context: Context, job: Job, metrics: StepMetrics
) -> tuple[RunState, list[str]]:
    """Load the checkpoint of ``start`` into the job; return the run's state, and lines about it. Collective.

    The command's settings replace the saved ones: a new `optim.weight_decay` takes effect. Raises UserError
    for a checkpoint that the command does not continue, or of another model or optimizer.
    """
    opened = start.opened
    if opened is None:
        return RunState(), []
    elsewhere = is_elsewhere(store, start)
    run = None if elsewhere else context.run_dir
    # Other ranks' paths may differ.
    changes = on_rank_0(lambda: require_same_run(opened, config, job, context.words, run))
    groups = [dict(group) for group in job.optimizer.param_groups]
    what = f"resume={config.resume} (resume=none starts anew)"
    extra = load_saved(opened, job.model, job.ema, what, job.optimizer)
    for group, own in zip(job.optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in own.items() if key != "params"})
    if extra.get("scaler"):  # empty if the run did not scale its loss
        job.scaler.load_state_dict(extra["scaler"])
    if elsewhere:  # whose best step this run does not have
        return RunState(), changes
    metrics.restore(extra["window"], opened.manifest.world_size)
    return RunState(extra["best"] and Best(*extra["best"]), extra.get("owed", False)), changes

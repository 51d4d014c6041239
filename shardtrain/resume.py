"""Where a run starts: anew, or after the step that an earlier process saved last (see `keeper.py`)."""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from shardtrain import comm
from shardtrain.build import Job, seed_process
from shardtrain.checkpoint import Damaged
from shardtrain.checkpoint.loading import Opened, load_into, open_checkpoint
from shardtrain.checkpoint.manifest import NAME
from shardtrain.checkpoint.store import Found, Store, newest
from shardtrain.comm.transport import Ranks
from shardtrain.config import Config
from shardtrain.engine import engine_of
from shardtrain.errors import UserError
from shardtrain.keeper import Best, facts_of
from shardtrain.launch import Context
from shardtrain.monitor import Window
from shardtrain.place import Place

CHECKPOINTS = "checkpoints"


class Start(NamedTuple):
    """Where a run starts: after ``step`` steps, with what ``opened`` holds, or anew."""

    step: int
    opened: Opened | None
    store: Store
    messages: list[str]


def told(start: Start, job: Job, evaluating: bool = False) -> list[str]:
    """What people should know of the start."""
    if start.opened is None:
        return start.messages
    if evaluating:
        return [*start.messages, f"evaluating step {start.step} ({start.opened.path})"]
    left = ": nothing is left to do" if start.step >= job.steps else ""
    where = f"continuing after step {start.step} of {job.steps}{left}"
    return [*start.messages, f"{where} ({start.opened.path})"]


def find_start(config: Config, context: Context) -> Start:
    """Where the configuration's `resume` says to start. Collective.

    Raises:
        UserError: there is nothing whole to start from, where there should be.
    """
    directory = context.run_dir / CHECKPOINTS
    everyone, keep = comm.plain_transport(), config.checkpoint.keep
    store = Store(directory, everyone, context.device, keep=keep, asynchronous=config.checkpoint.asynchronous)
    if config.dry_run or (config.eval_only and config.resume == "none"):
        return Start(0, None, store, [])
    messages = _set_aside(directory, context.place) if config.resume == "none" else []
    try:
        found = store.newest()
        if found.opened is None and config.resume not in ("auto", "none"):
            found = _elsewhere(Path(config.resume).expanduser(), everyone, context.device)
    except Damaged as error:
        raise UserError(f"resume={config.resume}: {error}; resume=none starts anew") from None
    messages += [f"warning: {text}; it is set aside" for _, text in found.damaged]
    return Start(found.step, found.opened, store, messages)


def _set_aside(directory: Path, place: Place) -> list[str]:
    """Rename the checkpoints of an earlier run, so that no restart takes them for this one's.

    A restart of this very launch goes on from its own, whatever its `resume` says.
    """
    told: list[str] = []
    if place.rank == 0 and not _restarted(place) and directory.is_dir() and any(directory.iterdir()):
        taken = len(list(directory.parent.glob(f"{CHECKPOINTS}.*")))
        aside = directory.with_name(f"{CHECKPOINTS}.{taken + 1}")
        try:
            directory.rename(aside)
        except OSError as error:
            raise UserError(f"resume=none: cannot rename {directory} ({error.strerror})") from error
        told = [f"resume=none: the checkpoints of an earlier run are in {aside} now"]
    return told


def _restarted(place: Place) -> bool:
    """Whether torchrun has started these ranks again: after a failure, or with more or fewer of them."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    token = secrets.token_hex(8)
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" or place.agree("start", token) != token


def _elsewhere(path: Path, everyone: Ranks, device: torch.device) -> Found:
    """The checkpoint ``path``, or the newest of the run ``path``."""
    if (path / NAME).exists():
        opened = open_checkpoint(path, everyone, device)
        return Found(opened, int(opened.manifest.facts.get("step", 0)), [])
    found = newest(path / CHECKPOINTS, everyone, device)
    if found.opened is None:
        raise UserError(
            f"resume={path}: neither a checkpoint nor a run with checkpoints; resume=none starts anew"
        )
    return found


def restore(start: Start, config: Config, job: Job, window: Window) -> Best | None:
    """Fill the job with what `find_start` found; the best evaluation before it. Collective.

    The command's settings count, not the saved ones: a new `optim.weight_decay` takes effect.

    Raises:
        UserError: the checkpoint is of another model or optimizer, or of other batches.
    """
    if config.eval_only:
        _restore_model(start, config, job)
        return None
    if start.opened is None:
        return None
    _compare(start.opened.manifest.facts, facts_of(config, job))
    options = [{k: v for k, v in group.items() if k != "params"} for group in job.optimizer.param_groups]
    try:
        averages = None if job.ema is None else job.ema.averages
        extra = load_into(start.opened, engine_of(job.model), job.optimizer, averages)
    except ValueError as error:
        raise UserError(f"resume={config.resume}: {error}; resume=none starts anew") from None
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
    return None if extra["best"] is None else Best(*extra["best"])


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
        extra = load_into(opened, engine_of(job.model), None, averages)
    except ValueError as error:
        raise UserError(str(error)) from None
    if job.ema is not None:
        job.ema.restore(extra["ema"], opened.manifest.world_size)


def _compare(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
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

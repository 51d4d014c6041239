"""What makes a run outlive its processes: where it starts, what is saved of it, and when.

Most of a run is a pure function of the configuration and the step: the order of the images, their random
crops and augmentation, the learning rate. What is not is saved: parameters, their moving averages, optimizer
state, buffers and random numbers of every rank, what the next report adds up, and the best score.
"""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Mapping
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
import torch

from shardtrain import comm
from shardtrain.build import Job, seed_process
from shardtrain.checked import plain
from shardtrain.checkpoint import Damaged, SaveFailed
from shardtrain.checkpoint.loading import Opened, load_into, open_checkpoint
from shardtrain.checkpoint.manifest import NAME
from shardtrain.checkpoint.store import Found, Store, newest
from shardtrain.comm.transport import Ranks
from shardtrain.config import Config
from shardtrain.engine import engine_of
from shardtrain.errors import UserError
from shardtrain.evaluate import Evaluation
from shardtrain.launch import Context, Place
from shardtrain.monitor import Monitor, Window
from shardtrain.stop import Stopped, StopSignals

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


class Best(NamedTuple):
    """The best evaluation so far."""

    step: int
    acc1: float


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
    _compare(start.opened.manifest.facts, _facts(config, job))
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


def _facts(config: Config, job: Job) -> dict[str, Any]:
    """What the manifest says of the run; the step and these say which images have been seen."""
    return {
        "position": {
            "seed": config.seed,
            "data.name": config.data.name,
            "train.batch_size": config.train.batch_size,
            "data.repeats": config.data.repeats,
            "images": job.train.sampler.images,
        },
        "config": plain(config),
    }


def _compare(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    theirs = saved.get("position", {})
    for key, value in ours["position"].items():
        if theirs.get(key) != value:
            raise UserError(
                f"resume: the checkpoint is of a run with {key}={theirs.get(key)}, this one has {value}, "
                "so its place among the images means nothing here; resume=none starts anew"
            )


def _random_state(device: torch.device) -> dict[str, Any]:
    numpy: Any = np.random.get_state(legacy=False)
    key = torch.from_numpy(numpy["state"]["key"].astype(np.int64))
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [key, numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"]],
    }
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    key, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", key.numpy().astype(np.uint32), position, has_gauss, cached))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


class Keeper:
    """Saves the run when it is time to, and ends it when it is asked to.

    With each step the ranks exchange three small numbers, and read what they exchanged the step before:
    whether one has been asked to leave, whether one is still writing. So they do the same at the same
    step, and on a GPU nobody waits for the exchange.
    """

    def __init__(
        self,
        config: Config,
        job: Job,
        start: Start,
        best: Best | None,
        window: Window,
        monitor: Monitor,
        signals: StopSignals,
    ) -> None:
        self._config, self._job, self._store = config, job, start.store
        self.best, self._window, self._monitor, self._signals = best, window, monitor, signals
        self._every = config.checkpoint.every_steps or job.steps_per_epoch
        self._device = job.device
        self._said: tuple[torch.Tensor, Thread | None] | None = None  # and which writer it speaks of
        self._reported_s = 0.0

    def before_update(self) -> None:
        """Before parameters change."""
        with self._window.phase("checkpoint"):
            self._store.settle()

    def step_done(self, step: int, found: Evaluation | None) -> None:
        """After everything of a step. Collective.

        Raises:
            Stopped: on every rank: one was asked to leave, and the step is saved.
            SaveFailed: on every rank, if failures are to stop the run.
        """
        signal, busy = self._exchange()
        better = found is not None and (self.best is None or found.acc1 > self.best.acc1)
        if better and found is not None:
            self.best = Best(step, found.acc1)
        last = step == self._job.steps
        with self._window.paused("checkpoint"):
            if self._store.under_way and not busy:
                self._attempt(self._store.advance, False)
            if self._config.checkpoint.keep and (signal or last or better or step % self._every == 0):
                # An earlier save's failure must not keep this step from being saved.
                self._attempt(self._store.finish, False)
                self._attempt(lambda: self._save(step), last or bool(signal))
            if signal and not last:
                self._attempt(self._store.finish, True)
        if signal and not last:
            saved = (
                f"step {self._store.latest} is saved" if self._store.latest == step else "nothing is saved"
            )
            stopped = Stopped(signal)
            self._monitor.say(f"{stopped} after step {step}; {saved}")
            raise stopped

    def finish(self) -> None:
        """Return when the last save is committed.

        Raises:
            SaveFailed: on every rank: it is not.
        """
        with self._window.paused("checkpoint"):
            self._attempt(self._store.finish, True)

    def report(self) -> dict[str, float]:
        """Seconds that training has waited for saves since the last report, as a scalar."""
        before, self._reported_s = self._reported_s, self._store.exposed_s
        return {"time/checkpoint_s": self._reported_s - before} if self._config.checkpoint.keep else {}

    def _exchange(self) -> tuple[int, bool]:
        mine = torch.tensor([self._signals.noted, self._store.busy], device=self._device)
        said, self._said = self._said, (comm.all_reduce(mine, "max"), self._store.writer)
        if said is None:
            return 0, True
        (signal, busy), writer = said[0].tolist(), said[1]
        return signal, bool(busy) or writer is not self._store.writer

    def _save(self, step: int) -> None:
        self._monitor.flush()
        extra = {
            "random": _random_state(self._device),
            "window": self._window.state(),
            "best": self.best,
            "ema": None if self._job.ema is None else self._job.ema.state(),
            "scaler": self._job.scaler.state_dict(),
        }
        averages = None if self._job.ema is None else self._job.ema.averages
        best = None if self.best is None else self.best.step
        facts = _facts(self._config, self._job)
        self._store.save(
            step,
            self._job.model,
            self._job.optimizer,
            extra=extra,
            facts=facts,
            best=best,
            averages=averages,
        )

    def _attempt(self, action: Any, needed: bool) -> None:
        """Do it; a failure stops the run only if nothing will be tried again, or if it is to."""
        try:
            action()
        except SaveFailed as error:
            if needed or self._config.checkpoint.on_failure == "stop":
                raise
            latest = f"the newest is of step {self._store.latest}" if self._store.latest else "there is none"
            self._monitor.say(f"warning: checkpoint {error}; {latest}; training goes on")

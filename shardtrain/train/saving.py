"""What is saved of a run, and when; and how it ends when it is asked to.

Most of a run is a pure function of the configuration and the step: the order of the images, their random
crops and augmentation, the learning rate. What is not is saved: parameters, their moving averages, optimizer
state, buffers and random numbers of every rank, what the next report adds up, and the best score.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from threading import Thread
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from shardtrain import comm
from shardtrain.checkpoint import SaveFailed
from shardtrain.checkpoint.store import Store
from shardtrain.job import tags
from shardtrain.job.build import Job
from shardtrain.job.config import Config
from shardtrain.job.data import Batch
from shardtrain.job.evaluate import Evaluation
from shardtrain.job.schema import plain
from shardtrain.job.signals import Listening, Stopped, StopSignals
from shardtrain.monitor import Monitor, StepMetrics


class Best(NamedTuple):
    """The best evaluation so far."""

    step: int
    acc1: float


class Past(NamedTuple):
    """What a run had found out, and what it still owed, when its step was saved."""

    best: Best | None = None
    owed: bool = False
    """The step's evaluation, which was left because a rank was asked to leave."""


def facts_of(config: Config, job: Job) -> dict[str, Any]:
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


def random_state(device: torch.device) -> dict[str, Any]:
    numpy: Any = np.random.get_state(legacy=False)
    key = torch.from_numpy(numpy["state"]["key"].astype(np.int64))
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [key, numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"]],
    }
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


class Saver:
    """Saves the run when it is time to, and ends it when it is asked to.

    With each step the ranks exchange two small numbers, and read what they exchanged the step before:
    whether one has been asked to leave, whether one is still writing. So they do the same at the same
    step, and on a GPU nobody waits for the exchange.
    """

    def __init__(
        self,
        config: Config,
        job: Job,
        store: Store,
        past: Past,
        window: StepMetrics,
        monitor: Monitor,
        signals: StopSignals,
    ) -> None:
        self._config, self._job, self._store = config, job, store
        self.best, self.owed = past
        self._window, self._monitor, self._signals = window, monitor, signals
        self._every = config.checkpoint.every_steps or job.steps_per_epoch
        self._device = job.device
        self._said: tuple[torch.Tensor, Thread | None] | None = None  # and which writer it speaks of
        self._asked = 0  # the signal that ended an evaluation
        self._reported_s = 0.0

    def before_update(self) -> None:
        """Before parameters change."""
        with self._window.phase("checkpoint"):
            self._store.settle()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[Listening[Batch]]:
        """For an evaluation of the batches given. It ends when a rank is asked to leave, and is owed then:
        the process that goes on from this step makes up for it. Collective."""
        self.owed = True
        try:
            yield Listening(self._job.val, self._signals)
            self.owed = False
        except Stopped as stopped:
            self._asked = stopped.number

    def made_up(self, step: int, found: Evaluation | None) -> None:
        """After the evaluation that an earlier process owed; ``step`` is saved already.

        Raises:
            Stopped: on every rank: it was left once more.
        """
        self._judge(step, found)
        if self.owed:
            self._leave(step, self._asked)

    def step_done(self, step: int, found: Evaluation | None) -> None:
        """After everything of a step. Collective.

        Raises:
            Stopped: on every rank: one was asked to leave, and the step is saved.
            SaveFailed: on every rank, if failures are to stop the run.
        """
        signal, busy = self._exchange()
        signal = signal or self._asked
        better = self._judge(step, found)
        last = step == self._job.steps
        leaving = signal and (self.owed or not last)
        with self._window.paused("checkpoint"):
            if self._store.under_way and not busy:
                self._attempt(self._store.advance, False)
            if self._config.checkpoint.keep and (signal or last or better or step % self._every == 0):
                # An earlier save's failure must not keep this step from being saved.
                self._attempt(self._store.finish, False)
                self._attempt(lambda: self._save(step), last or bool(signal))
            if leaving:
                self._attempt(self._store.finish, True)
        if leaving:
            self._leave(step, signal)

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
        return {tags.CHECKPOINT_S: self._reported_s - before} if self._config.checkpoint.keep else {}

    def _judge(self, step: int, found: Evaluation | None) -> bool:
        """Whether ``found`` is the best so far."""
        if found is None or (self.best is not None and found.acc1 <= self.best.acc1):
            return False
        self.best = Best(step, found.acc1)
        return True

    def _leave(self, step: int, signal: int) -> NoReturn:
        saved = "nothing is saved"
        if self._store.latest == step:
            run = self._config.run
            again = "the same command" if run.name or run.dir else f"resume={self._store.directory.parent}"
            saved = f"step {step} is saved, and {again} goes on from there"
        stopped = Stopped(signal)
        self._monitor.say(f"{stopped} after step {step}; {saved}")
        raise stopped

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
            "random": random_state(self._device),
            "window": self._window.state(),
            "best": self.best,
            "owed": self.owed,
            "ema": None if self._job.ema is None else self._job.ema.state(),
            "scaler": self._job.scaler.state_dict(),
        }
        averages = None if self._job.ema is None else self._job.ema.averages
        best = None if self.best is None else self.best.step
        facts = facts_of(self._config, self._job)
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

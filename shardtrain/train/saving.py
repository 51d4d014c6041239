"""The hook that saves and evaluates a run when it is time to, and ends it on a signal.

Most of a run is a pure function of the configuration and the step: the order of the images, their random
crops and augmentation, all random numbers of a model, the learning rate. All else is saved: parameters, their
moving averages, optimizer state, every rank's buffers, the sums of the next report, and the best score.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from threading import Thread
from typing import NamedTuple, NoReturn

import torch

from shardtrain import comm
from shardtrain import device as devices
from shardtrain.checkpoint import SaveFailed
from shardtrain.checkpoint.store import Store
from shardtrain.config.marks import record_of
from shardtrain.data import EvalFeed
from shardtrain.device import HostCopy
from shardtrain.job import tags
from shardtrain.job.evaluation import Evaluation, evaluate
from shardtrain.job.losses import given_weights
from shardtrain.launch.signals import Stopped, StopSignals
from shardtrain.train.steps import BaseTrainer, Hook


class Best(NamedTuple):
    """The best evaluation so far, by the score with this TensorBoard tag."""

    step: int
    score: float
    tag: str = tags.VAL_ACC1


class RunState(NamedTuple):
    """What a checkpoint says about the run so far."""

    best: Best | None = None
    pending_evaluation: bool = False  # a signal interrupted the evaluation of this step


def machine(where: torch.device) -> dict[str, str | int]:
    """Return what can change the bits of a computation, beside configuration and seed."""
    processor = devices.processor()
    threads = torch.get_num_threads()
    name = devices.name(where)
    return {"processor": processor, "threads": threads, "device": name, "torch": torch.__version__}


class Saver(Hook):
    """The evaluations and saves of a run when they are due, and its end if a rank got a signal.

    With each step, and each batch of an evaluation, ranks start an exchange of two numbers and read the
    previous one: whether a rank got a signal, and whether one is still writing. So all ranks act at the same
    point, and on a GPU no host waits for the exchange.
    """

    def __init__(self, trainer: BaseTrainer, store: Store, state: RunState, signals: StopSignals) -> None:
        self._store = store
        self._signals = signals
        self._trainer = trainer
        self._config = trainer.config
        self._job = trainer.job
        self._metrics = trainer.metrics
        self._monitor = trainer.monitor
        best, self.pending_evaluation = state
        # If `train.best` has changed, earlier scores cannot be compared: the search for the best begins anew.
        self.best = best if best is not None and best.tag == self._config.train.best else None
        self._save_every = self._config.checkpoint.every_steps or self._job.steps_per_epoch
        self._evaluate_every = self._config.train.eval_every * self._job.steps_per_epoch
        self._copies_fail = False  # in memory, and a warning has said so
        self._exchanged: tuple[HostCopy, Thread | None] | None = None  # with the writer that it concerns
        self._evaluation_signal = 0  # that ended an evaluation; 0: none

    def before_fit(self, trainer: BaseTrainer) -> None:
        """Evaluate the step from which this process resumes, if pending. Raises Stopped on a signal."""
        step = self._job.first_step
        if self.pending_evaluation:
            self._evaluate_step(step)
            if self.pending_evaluation:
                self._stop(step, self._evaluation_signal)
        trainer.end = trainer.end or self._why_stale(step)

    def after_step(self, trainer: BaseTrainer, step: int, finite: bool) -> None:
        """Evaluate, save or stop as due after ``step``. Collective.

        Raises on every rank Stopped if one got a signal, with the step saved, and SaveFailed if the
        last save of this process fails.
        """
        is_evaluated = step == self._job.steps or step % self._evaluate_every == 0
        better = is_evaluated and self._evaluate_step(step)
        signal, busy = self._exchange()
        signal = signal or self._evaluation_signal
        trainer.end = trainer.end or self._why_stale(step)
        last = step == self._job.steps or bool(trainer.end)
        stopping = signal and (self.pending_evaluation or not last)
        with self._metrics.paused():
            is_due = bool(signal) or last or better or step % self._save_every == 0
            to_disk = self._config.checkpoint.keep > 0 and is_due
            every = self._config.checkpoint.memory_every_steps
            to_memory = self._store.memory is not None and (step % every == 0 or bool(signal))
            if self._store.under_way and not busy:
                self._try(self._store.advance)
            if to_disk:
                # An earlier save's failure must not keep this step from being saved.
                self._try(self._store.finish)
                self._try(lambda: self._save(step), final=last or bool(signal))
            elif to_memory:
                self._copy(step)
            if stopping:
                self._store.finish()
        if stopping:
            self._stop(step, signal)

    def at_end(self, trainer: BaseTrainer) -> None:
        """Wait until the last save is committed, and evaluate the test images, if any.

        Raises SaveFailed on every rank if it failed, and Stopped if one got a signal while evaluating.
        """
        with self._metrics.paused():
            self._store.finish()
            if self._job.test is not None:
                self._monitor.tested(self._monitor.latest, self._evaluate(self._job.test))

    def _why_stale(self, step: int) -> str:
        """Return why `train.patience` ends with the evaluation after ``step``; "" if it does not."""
        train = self._config.train
        if train.patience is None or self.best is None:
            return ""
        if step - self.best.step < train.patience * self._evaluate_every:
            return ""
        return f"no better {train.best} in {train.patience} evaluations"

    def _evaluate_step(self, step: int) -> bool:
        """Evaluate, and return whether the model is the best so far."""
        self.pending_evaluation = True
        with self._metrics.paused():
            try:
                evaluation = self._evaluate(self._job.val)
            except Stopped as stopped:
                # The evaluation stays pending for the process that resumes.
                self._evaluation_signal = stopped.number
                return False
            tag = self._config.train.best
            score = self.ranked(evaluation)
            if math.isnan(score):  # a class without images here has no recall
                self._monitor.say(
                    f"warning: {tag} or the loss of an answer is not a number after step {step}, "
                    "which is not the best then"
                )
            is_better = self._job.scoring.is_better(score, None if self.best is None else self.best.score)
            if is_better:
                self.best = Best(step, score, tag)
            self._monitor.evaluated(step, evaluation, self.best)
            for hook in self._trainer.hooks:
                hook.after_evaluation(self._trainer, step, evaluation)
        self.pending_evaluation = False
        return is_better

    def ranked(self, evaluation: Evaluation) -> float:
        """Return the score that `train.best` names; not a number if these images, or answers, have none."""
        scores = evaluation.ranking()
        if math.isnan(scores.get(tags.VAL_LOSS, 0.0)):  # the model answers so, whatever else is right
            return math.nan
        return scores.get(self._config.train.best, math.nan)

    def _evaluate(self, feed: EvalFeed) -> Evaluation:
        """Evaluate the images of ``feed``; raise Stopped if a rank gets a signal meanwhile. Collective."""
        job = self._job
        return evaluate(job.model, feed, job.scoring, ema=job.ema, before_batch=self._raise_signal)

    def _raise_signal(self) -> None:
        signal, _ = self._exchange()
        if signal:
            raise Stopped(signal)

    def _stop(self, step: int, signal: int) -> NoReturn:
        run = self._config.run
        again = "the same command" if run.name or run.dir else f"resume={self._store.directory.parent}"
        saved = "nothing is saved"
        if self._store.latest == step:
            saved = f"step {step} is saved, and {again} resumes from it"
        elif self._store.latest_in_memory == step:
            saved = f"step {step} is in memory, from which the same run.dir resumes within ten minutes"
        raise Stopped(signal, f"after step {step}; {saved}")

    def _exchange(self) -> tuple[int, bool]:
        """Return the signal that a rank had noted at the call before, and whether one was writing."""
        own = torch.tensor([self._signals.noted, self._store.busy]).to(self._job.device, non_blocking=True)
        latest = HostCopy(comm.all_reduce(own, "max")), self._store.writer
        before = self._exchanged
        self._exchanged = latest
        if before is None:
            return 0, True
        signal, busy = before[0].read().tolist()
        writer = before[1]
        return signal, bool(busy) or writer is not self._store.writer

    def _copy(self, step: int) -> None:
        """Save ``step`` in memory alone, before the next step begins."""
        try:
            self._save(step, to_disk=False)
        except SaveFailed as error:
            self._warn_of_copy(str(error))

    def _warn_of_copy(self, problem: str) -> None:
        """Warn of a ``problem`` of the copy in memory, but not again while further copies fail."""
        if problem and not self._copies_fail:
            self._monitor.say(f"warning: checkpoint {problem}; training continues")
        self._copies_fail = bool(problem)

    def _save(self, step: int, to_disk: bool = True) -> None:
        self._trainer.finiteness.settle()
        for hook in self._trainer.hooks:
            hook.before_save(self._trainer, step)
        job = self._job
        extra = {  # part of the checkpoint format: these keys must not change
            "window": self._metrics.state(),
            "best": self.best,
            "owed": self.pending_evaluation,
            "ema": None if job.ema is None else job.ema.state(),
            "scaler": job.scaler.state_dict(),
        }
        best = None if self.best is None else self.best.step
        facts = {
            # With the step these determine which images have been used.
            "position": {"images": job.train.sampler.images, "labels": job.labels},
            "inference": job.inference and asdict(job.inference),
            "class_weights": given_weights(job.loss),  # as numbers, if `train.class_weights` has any
            "machine": machine(job.device),
            "config": record_of(self._config),
            "best": best,
        }
        problem = self._store.save(
            step,
            job.model,
            job.optimizer,
            extra=extra,
            facts=facts,
            best=best,
            averages=None if job.ema is None else job.ema.averages,
            to_disk=to_disk,
        )
        self._warn_of_copy(problem)

    def _try(self, action: Callable[[], object], final: bool = False) -> None:
        """Call ``action``. Let its SaveFailed through if ``final``; otherwise warn."""
        try:
            action()
        except SaveFailed as error:
            if final:
                raise
            latest = f"the latest is of step {self._store.latest}" if self._store.latest else "there is none"
            self._monitor.say(f"warning: checkpoint {error}; {latest}; training continues")

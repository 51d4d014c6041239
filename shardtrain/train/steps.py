"""Take a job's steps: forward, loss, backward and update in each, and hooks after it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from shardtrain import clip_grad_norm_, comm, introspect, no_sync, virtual_rank
from shardtrain.config.config import Config
from shardtrain.data import Batch
from shardtrain.job.build import Job, seed_process
from shardtrain.job.evaluation import Evaluation
from shardtrain.job.losses import CrossEntropy, Loss
from shardtrain.job.step import refusals_of, weight_of
from shardtrain.launch.ranks import AFTERWARDS
from shardtrain.monitor import Monitor, StepMetrics
from shardtrain.train.finiteness import Finiteness
from shardtrain.train.step_variants import CapturedSteps, VirtualRanks


class Hook:
    """Something that a trainer does after each step or evaluation; subclasses override what they need.

    Every rank calls it, so it may call collectives, but on all ranks alike. What it raises ends the run.
    """

    def before_fit(self, trainer: BaseTrainer) -> None:
        """Run before the first step of this process."""

    def after_step(self, trainer: BaseTrainer, step: int, finite: bool) -> None:
        """Run after ``step``, with its gradients. Not ``finite``: these were not, and nothing was updated."""

    def after_evaluation(self, trainer: BaseTrainer, step: int, evaluation: Evaluation) -> None:
        """Run after an evaluation of the validation images."""

    def before_save(self, trainer: BaseTrainer, step: int) -> None:
        """Run before ``step`` is saved."""

    def at_end(self, trainer: BaseTrainer) -> None:
        """Run after the last step."""


class BaseTrainer:
    """A job in training: its steps, and hooks after each. `Trainer` is one of a user's model and data.

    A step is computed in one of three ways, chosen once: its micro-batches are accumulated, or computed as
    virtual ranks, or the whole step is replayed as a CUDA graph.
    """

    def __init__(self, config: Config, job: Job, metrics: StepMetrics, monitor: Monitor) -> None:
        self.config = config
        self.job = job
        self.metrics = metrics
        self.monitor = monitor
        self.hooks: Sequence[Hook] = ()
        self.rank = comm.rank()
        self.model = job.model
        self.optimizer = job.optimizer
        self.batches = iter(job.train)  # this rank's micro-batches of all steps
        self.batch: Batch | None = None  # the latest of them
        self.norm = torch.tensor(math.nan)  # of the latest gradients, before they were clipped: 0-dim
        self.end = ""  # why no step follows, if a hook says so
        self.finiteness = Finiteness(job, self._compute_again)
        self._loss_of: Loss = job.loss  # of a micro-batch in this step
        self._max_norm = config.train.clip_grad_norm or math.inf  # inf measures and does not clip
        self._compute_gradients: Callable[[int, Iterator[Batch], bool], None] = self._accumulate
        if introspect(job.model).virtual_ranks:
            self._compute_gradients = VirtualRanks(job, config.train.replay_every, self._virtual_rank)

    def run(self) -> None:
        """Train up to the last step. Collective.

        Raises RuntimeError on every rank if a loss or a gradient is not finite; on a CPU before the update.
        """
        if not self.config.train.capture:
            self._take_steps(self.compute)
            return
        captured = CapturedSteps(self.job, self.config.train.clip_grad_norm)
        try:
            self._take_steps(partial(self._replay, captured))
        finally:
            summary = captured.release()
        self.monitor.facts({"captured_steps": summary})
        self.monitor.say(f"captured steps: {summary}")

    def _take_steps(self, compute: Callable[[int], bool]) -> None:
        for hook in self.hooks:
            hook.before_fit(self)
        self.metrics.start()
        for step in self.steps():
            self.seed(step)
            with self.metrics.step():
                finite = compute(step)
            for hook in self.hooks:
                hook.after_step(self, step, finite)
            self.optimizer.zero_grad()  # now, since hooks may read gradients
            self.job.schedule.step()
        self.finiteness.settle()
        for hook in self.hooks:
            hook.at_end(self)

    def steps(self) -> Iterator[int]:
        """Yield the numbers, from 1, of steps after the checkpoint's, to the last, or until `end` is set."""
        for step in range(self.job.first_step + 1, self.job.steps + 1):
            if self.end:
                self.monitor.say(f"stopped after step {step - 1}: {self.end}")
                return
            yield step
            if step == self.job.first_step + 1:  # models are compiled by now
                comm.set_time_out(AFTERWARDS)

    def seed(self, step: int, rank: int | None = None) -> None:
        """Seed the random numbers of ``step``, as those of another (virtual) ``rank`` if it is given."""
        seed_process(self.job.device, self.config.seed, self.rank if rank is None else rank, step)

    def compute(self, step: int) -> bool:
        """Compute the gradients of ``step``, and update; return whether they are finite. Collective."""
        self.gradients(step, self.batches)
        return self.update(step)

    def gradients(self, step: int, feed: Iterator[Batch], *, checked: bool = True) -> None:
        """Compute the gradients of the next micro-batches in ``feed``, and reduce them. Collective.

        ``checked``: by a replay, if one is due in ``step``.
        """
        batches = self._micro_batches(feed)
        loss = self.job.loss
        if isinstance(loss, CrossEntropy) and loss.weight is not None:
            whole = [*batches]  # the loss needs the labels of all
            self._loss_of = partial(loss.over, weight_of(self.model, loss, whole))
            batches = iter(whole)
        self._compute_gradients(step, batches, checked)

    def _accumulate(self, step: int, batches: Iterator[Batch], checked: bool) -> None:
        count = self.job.train.share.accumulate
        for number, batch in enumerate(batches, 1):
            with contextlib.nullcontext() if number == count else no_sync(self.model):
                self.forward_backward(batch, of=count)

    def _virtual_rank(self, step: int, number: int, batch: Batch, *, counts: bool) -> Tensor:
        with virtual_rank(self.model, number):
            self.seed(step, number)
            return self.forward_backward(batch, counts=counts)

    def _micro_batches(self, feed: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the micro-batches of one step."""
        for _ in range(self.job.train.share.accumulate):
            with self.metrics.phase("data"):
                self.batch = next(feed)
            yield self.batch

    def forward_backward(self, batch: Batch, of: int = 1, *, counts: bool = True) -> Tensor:
        """Compute the gradients of a micro-batch, one ``of`` some; return its loss, 0-dim.

        ``counts``: in the next report.
        """
        with self.metrics.phase("forward"):
            outputs = self.model(batch.images)
            loss = self._loss_of(outputs, batch.labels)
        with self.metrics.phase("backward"):
            self.job.scaler.scale(loss / of).backward()  # type: ignore[no-untyped-call]
        if counts:
            self.metrics.add(batch, loss, outputs)
        return loss

    def update(self, step: int) -> bool:
        """Clip the gradients, update the parameters and their moving average. Collective.

        Return whether gradients are finite. If not, nothing is updated.
        """
        scaler = self.job.scaler
        scaler.unscale_(self.optimizer)
        self.norm = clip_grad_norm_(self.model, self._max_norm)
        finite = self._is_finite(step)
        if not finite:
            self.optimizer.zero_grad()  # so that the update changes nothing
        with refusals_of(self.optimizer):
            scaler.step(self.optimizer)
        scaler.update()
        self._average(step)
        return finite

    def _replay(self, captured: CapturedSteps, step: int) -> bool:
        """Compute ``step`` and update as one CUDA graph; return whether gradients are finite. Collective."""
        batches = [*self._micro_batches(self.batches)]
        with self.metrics.phase("forward"):
            self.norm, results = captured(batches)
        for batch, (loss, outputs) in zip(batches, results, strict=True):
            self.metrics.add(batch, loss, outputs)
        self._average(after=step)
        return self._is_finite(step)

    def _average(self, after: int) -> None:
        if self.job.ema is not None:
            self.job.ema.update(after)

    def _is_finite(self, step: int) -> bool:
        return self.finiteness.of(step, self.norm, self.metrics.sums[:, 0].sum())

    def _compute_again(self, step: int) -> None:
        """Compute the gradients of ``step`` once more, while something records what is not finite."""
        feed = self.job.train.of(self.job.train.share, step - 1)
        self.optimizer.zero_grad()
        self.seed(step, self.rank)
        self.gradients(step, iter(feed), checked=False)

"""Run a training job.

`fit` is the loop. `job/build.py` builds its job, the monitor reports, `saving.py` saves, `resume.py` resumes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from shardtrain import comm, introspect, recording
from shardtrain.device import HostCopy, is_accelerator, on_accelerator
from shardtrain.job.build import build, seed_process
from shardtrain.job.config import Config
from shardtrain.job.data import Batch, Share, TrainFeed
from shardtrain.job.dist_env import AFTERWARDS, virtual_threads
from shardtrain.job.errors import Unreadable, UserError
from shardtrain.job.format import first_of
from shardtrain.job.launch import Context
from shardtrain.job.losses import loss_notes, mix_notes
from shardtrain.job.signals import StopSignals
from shardtrain.job.step import CapturedStep, Step
from shardtrain.monitor import StepMetrics, Watch, open_monitor, start_table
from shardtrain.train.resume import (
    Identity,
    find_start,
    identify,
    memory_of,
    restore,
    run_directory,
    start_messages,
)
from shardtrain.train.saving import Saver, Training


def fit(training: Training, saver: Saver, watch: Watch) -> None:
    """Train up to step ``job.steps``; evaluate every ``train.eval_every`` epochs and at the end."""
    train = training.config.train
    one_step = Step.of(training.job, train.clip_grad_norm)
    captured = CapturedStep(one_step) if train.capture else None
    try:
        take_steps(training, saver, watch, one_step, captured)
    finally:
        if captured is not None:
            captured.release()


def take_steps(
    training: Training, saver: Saver, watch: Watch, one_step: Step, captured: CapturedStep | None
) -> None:
    """Take the steps of `fit`, by replays if they are ``captured``."""
    config, job, metrics, monitor = training
    train = config.train
    gradients = Finiteness(training, one_step)
    replays = train.replay_every if introspect(job.model).virtual_ranks else 0
    saver.before_save = gradients.settle
    if saver.pending_evaluation:
        saver.evaluate_pending(job.first_step)
    batches = monitor.showing(job.train)
    metrics.start()
    for step in range(job.first_step + 1, job.steps + 1):
        if saver.is_stale(step - 1):
            monitor.say(
                f"stopped after step {step - 1}: no better {train.best} in {train.patience} evaluations"
            )
            break
        seed = seeding(training, step)
        with metrics.step():
            count = job.train.share.accumulate
            again = partial(micro_batch, job.train, step) if replays and step % replays == 0 else None
            first = step == job.first_step + 1
            if captured is not None:
                norm = captured(batches, count, metrics.phase, metrics.add, step)
                gradients.are_finite(step, norm)
            else:
                norm = one_step.gradients(
                    batches, count, metrics.phase, metrics.add, seed, again, step, first=first
                )
                if not gradients.are_finite(step, norm):
                    job.optimizer.zero_grad()  # so that the update changes nothing
                one_step.update(step)
        last = step == job.steps
        monitor.step(step)
        report = None
        if step % train.log_every == 0 or last:
            report = metrics.report(step, norm, watch.requested())
            monitor.log(step, report.scalars)
        watch.step_done(step, report)
        job.optimizer.zero_grad()
        job.schedule.step()
        saver.step_done(step, evaluate=last or step % (train.eval_every * job.steps_per_epoch) == 0)
        if first:  # models are compiled by now
            comm.set_time_out(AFTERWARDS)
    gradients.settle()
    if captured is not None:
        monitor.facts({"captured_steps": captured.summary})
        monitor.say(f"captured steps: {captured.summary}")
    saver.finish(monitor.latest)


def seeding(training: Training, step: int) -> Callable[[int], None]:
    """Seed random numbers for ``step``; return what seeds them for a virtual rank in it."""
    seed = partial(seed_process, training.job.device, training.config.seed, step=step)
    seed(comm.rank())
    return seed


def micro_batch(feed: TrainFeed, step: int, number: int) -> Batch:
    """Return the images and labels of virtual rank ``number`` in ``step``."""
    size = feed.share.batch_size
    virtual = feed.share.virtual
    [batch] = feed.of(Share(size, 1, number, virtual, virtual), step - 1)
    return batch


class Finiteness:
    """Check that gradients are finite. In fp16 they may not be because their scale was too high.

    The gradient's norm is the same number on every rank, and not finite if any element of any rank's gradient
    is not. So all ranks decide alike, and exchange the cause only then. On an accelerator the scaler skips
    updates by itself, so a step is checked after the next one has been launched, and before each save: the
    host need not wait.

    Raises RuntimeError on every rank if a loss is not finite, or if a gradient's scale cannot be the cause.
    """

    def __init__(self, training: Training, one_step: Step) -> None:
        self._training = training
        self._step = one_step
        self._open: list[tuple[int, HostCopy]] = []  # unchecked steps, their norms and this rank's losses

    def are_finite(self, step: int, norm: Tensor) -> bool:
        """Return False if the gradients of ``step``, with this ``norm``, are known not to be finite."""
        loss = self._training.metrics.sums[:, 0].sum()  # it was finite before this step
        self._open.append((step, HostCopy(torch.stack([norm.to(loss), loss]))))
        return self.settle(keep=int(on_accelerator(norm)))

    def settle(self, keep: int = 0) -> bool:
        """Check all steps but the last ``keep``; return False if the newest is not finite."""
        finite = True
        while len(self._open) > keep:
            step, copy = self._open.pop(0)
            finite = self._judge(step, *copy.read().tolist()) or keep > 0
        return finite

    def _judge(self, step: int, norm: float, loss: float) -> bool:
        if math.isfinite(norm):
            return True
        job = self._training.job
        losses = torch.zeros(comm.world_size(), dtype=torch.float64)
        losses[comm.rank()] = loss
        by_rank = enumerate(comm.all_reduce(losses).tolist())
        bad = [f"loss {loss} on rank {rank}" for rank, loss in by_rank if not math.isfinite(loss)]
        if not bad and job.scaler.is_enabled() and job.scaler.get_scale() >= 1:
            return False
        cause = ", ".join(bad) or "all losses finite"
        where = "" if is_accelerator(job.device) else self._where(step)
        raise RuntimeError(f"step {step}: {cause}, gradient norm {norm}{where}; a lower optim.lr may help")

    def _where(self, step: int) -> str:
        """Compute the gradients of ``step`` again; return in words what is not finite first, by rank.

        Collective, before the update.
        """
        job = self._training.job
        feed = job.train.of(job.train.share, step - 1)
        seed = seeding(self._training, step)
        job.optimizer.zero_grad()
        with recording(job.model, lambda tensor: tensor.isfinite().all()) as record:
            self._step.backward(iter(feed), job.train.share.accumulate, seed=seed)
        texts = enumerate(comm.gather_texts(record.first_false(), comm.plain_transport()))
        first_by_rank = [f"on rank {rank} {text}" for rank, text in texts if text]
        if not first_by_rank:
            return "; each rank's own are finite"
        return f"; the first not finite is {first_of(first_by_rank)}"


def train(config: Config, context: Context) -> float | None:
    """Run one job; return its best score, of `train.best`, or None without an evaluation."""
    identity = identify(config, context)
    with memory_of(config, context, identity) as memory:
        try:
            return _train(config, context, identity, memory)
        except Unreadable as error:
            raise UserError(
                f"{error}; python -m shardtrain.plan … check=true lists all images that cannot be read"
            ) from None


def _train(config: Config, context: Context, identity: Identity, memory: Path | None) -> float | None:
    rank_info = context.rank_info
    virtual = config.virtual_ranks(rank_info.world_size)
    if virtual and config.threads is None:  # as many as V ranks of this host would have: they change bits
        torch.set_num_threads(virtual_threads(virtual, os.environ))
    store, start = find_start(config, context, identity, memory)
    job, config = build(config, rank_info.rank, rank_info.world_size, context.device, start.step)
    metrics = StepMetrics(job)
    state, changes = restore(store, start, config, context, job, metrics)
    with (
        run_directory(store, start, config, context, identity) as messages,
        open_monitor(config, context, job, metrics, state.best) as monitor,
        StopSignals() as signals,
    ):
        notes = [
            *messages,
            *job.notes,
            *loss_notes(job.loss, job.scoring.classes),
            *mix_notes(config.train.mixup, config.train.cutmix, job.train.share.micro_batch),
            *changes,
            *start_messages(store, start, job, config),
        ]
        monitor.say("\n".join([start_table(config, context, job), *notes]))
        training = Training(config, job, metrics, monitor)
        saver = Saver(training, store, state, signals)
        with Watch(config, context, metrics, monitor) as watch:
            fit(training, saver, watch)
        return saver.best.score if saver.best else None

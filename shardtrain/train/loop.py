"""The main program.

    python -m shardtrain.train +recipe=resnet                          one process
    torchrun --nproc-per-node 2 -m shardtrain.train +recipe=resnet     two ranks of one host

`fit` is the whole of training. What it works on comes from `job/build.py`, what it reports goes to the
monitor, `saving.py` saves it, and `resume.py` finds where an earlier process stopped.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardtrain import comm
from shardtrain.job.build import build
from shardtrain.job.config import Config
from shardtrain.job.dist_env import AFTERWARDS, START_UP
from shardtrain.job.evaluate import evaluate
from shardtrain.job.launch import Context
from shardtrain.job.signals import StoppableFeed, StopSignals
from shardtrain.job.step import Step
from shardtrain.monitor import StepMetrics, Watch, open_monitor, score_table, start_table
from shardtrain.plan.report import rank_table
from shardtrain.plan.simulate import plan_of
from shardtrain.train.resume import find_start, restore, run_directory, start_messages
from shardtrain.train.saving import Saver, Training


def fit(training: Training, saver: Saver, watch: Watch) -> None:
    """Train up to step ``job.steps``; evaluate every ``train.eval_every`` epochs and at the end."""
    config, job, metrics, monitor = training
    train, one_step, bad_steps = config.train, Step.of(job, config.train.clip_grad_norm), BadSteps(training)
    if saver.pending_evaluation:
        saver.evaluate_pending(job.first_step)
    batches = monitor.showing(job.train)
    metrics.start()
    for step in range(job.first_step + 1, job.steps + 1):
        bad_steps.begin_step()
        with metrics.step():
            norm = one_step.gradients(batches, train.accumulate, metrics.phase, metrics.add)
            if not bad_steps.accepts(step, norm):
                job.optimizer.zero_grad()  # which leaves the update nothing to do
            saver.before_update()
            one_step.update(step)
        last = step == job.steps
        monitor.step(step)
        report = None
        if step % train.log_every == 0 or last:
            report = metrics.report(step, norm, watch.requested())
            monitor.log(step, report.scalars | saver.scalars())
        watch.step_done(step, report)
        job.optimizer.zero_grad()
        job.schedule.step()
        saver.step_done(step, evaluate=last or step % (train.eval_every * job.steps_per_epoch) == 0)
        if step == job.first_step + 1:  # models are compiled by now
            comm.set_time_out(AFTERWARDS)
    saver.finish()


class BadSteps:
    """Keeps steps whose gradient is not finite from the parameters: by stopping, or by skipping them.

    The gradient's norm over all ranks is the same number on every rank, and it is not finite as soon as one
    element of one rank's gradient is not. So every rank decides alike without communication; only then do
    the ranks exchange where it came from. A step whose scaled gradient overflows in fp16 is none of these: it
    is left out, and the scale goes down.
    """

    def __init__(self, training: Training) -> None:
        self._training, self._skipped_in_a_row = training, 0
        skips = training.config.train.nonfinite == "skip"
        self._buffers = list(training.job.model.buffers()) if skips else []
        self._before = [buffer.clone() for buffer in self._buffers]

    def begin_step(self) -> None:
        """Remember BatchNorm's running statistics, which a bad forward spoils for good."""
        if self._buffers:  # torch refuses to copy none
            torch._foreach_copy_(self._before, self._buffers)

    def accepts(self, step: int, norm: Tensor) -> bool:
        """Return whether this step may be taken. Collective if ``norm`` is not finite.

        Raises:
            RuntimeError: on every rank: it may not, and the run is to stop.
        """
        if math.isfinite(float(norm)):
            self._skipped_in_a_row = 0
            return True
        train, scaler = self._training.config.train, self._training.job.scaler
        bad = self._bad_losses()
        if not bad and scaler.is_enabled() and scaler.get_scale() >= 1:
            return False
        self._skipped_in_a_row += 1
        cause = f"step {step}: {', '.join(bad) or 'all losses finite'}, gradient norm {float(norm)}"
        if train.nonfinite == "stop":
            raise RuntimeError(f"{cause}; a lower optim.lr may help, or train.nonfinite=skip")
        if self._skipped_in_a_row > train.skip_at_most:
            raise RuntimeError(
                f"{cause}; {train.skip_at_most} steps in a row were skipped (train.skip_at_most)"
            )
        self._training.monitor.say(f"skipped {cause}")
        self._training.metrics.drop_step()
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._before)
        return False

    def _bad_losses(self) -> list[str]:
        metrics = self._training.metrics
        losses = torch.zeros(comm.world_size(), dtype=torch.float64, device=metrics.sums.device)
        losses[comm.rank()] = metrics.loss_of_step()
        by_rank = enumerate(comm.all_reduce(losses).tolist())
        return [f"loss {loss} on rank {rank}" for rank, loss in by_rank if not math.isfinite(loss)]


def train(config: Config, context: Context) -> float | None:
    """Run one job from its configuration to its result: the best accuracy in percent, if there is one."""
    rank_info = context.rank_info
    comm.set_time_out(START_UP)  # a sweep's jobs share their process group
    start = find_start(config, context)
    job, config = build(config, rank_info.rank, rank_info.world_size, context.device, start.step)
    metrics = StepMetrics(job)
    state = restore(start, config, job, metrics)
    best_acc1 = state.best.acc1 if state.best else None
    with (
        run_directory(start, config, context) as messages,
        open_monitor(config, context, job, metrics, best_acc1) as monitor,
        StopSignals() as signals,
    ):
        table = start_table(config, context, job)
        monitor.say("\n".join([table, *messages, *start_messages(start, job, config.eval_only)]))
        if config.eval_only:
            feed = StoppableFeed(job.val, signals)
            evaluation = evaluate(job.model, feed, ema=job.ema, flip=config.train.eval_flip)
            monitor.say(score_table(evaluation, config.reference))
            return evaluation.acc1
        if config.dry_run:
            if rank_info.rank == 0:
                monitor.say("\n" + rank_table(plan_of(config, job)))
            return best_acc1
        training = Training(config, job, metrics, monitor)
        saver = Saver(training, start.store, state, signals)
        with Watch(config, context, job, metrics, monitor) as watch:
            fit(training, saver, watch)
        return saver.best.acc1 if saver.best else None

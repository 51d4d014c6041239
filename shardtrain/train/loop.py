"""The main program.

    python -m shardtrain.train +recipe=resnet                          one process
    torchrun --nproc-per-node 2 -m shardtrain.train +recipe=resnet     two ranks of one host

`fit` is the whole of training; what it works on comes from `build.py`, what it reports goes to `monitor`,
`keeper.py` saves it, and `resume.py` makes it go on where an earlier process stopped.
"""

from __future__ import annotations

from shardtrain import comm
from shardtrain.job.build import Job, build
from shardtrain.job.config import Config, Train
from shardtrain.job.dist_env import AFTERWARDS, START_UP
from shardtrain.job.evaluate import Evaluation, evaluate
from shardtrain.job.launch import Context
from shardtrain.job.signals import Listening, StopSignals
from shardtrain.job.step import Step
from shardtrain.monitor import Monitor, StepMetrics, Watch, open_monitor, score_table, start_table
from shardtrain.plan.report import rank_table
from shardtrain.plan.simulate import plan_of
from shardtrain.train import sweep
from shardtrain.train.nonfinite import BadSteps
from shardtrain.train.resume import find_start, restore, run_directory, told
from shardtrain.train.saving import Saver


def fit(
    job: Job,
    train: Train,
    monitor: Monitor,
    window: StepMetrics,
    bad_steps: BadSteps,
    keeper: Saver,
    watch: Watch,
) -> None:
    """Trains up to step `job.steps`, evaluating every `train.eval_every` epochs and at the end."""
    model, optimizer = job.model, job.optimizer

    def evaluated(step: int) -> Evaluation | None:
        """None: a rank was asked to leave meanwhile."""
        with keeper.evaluating() as held_out, window.paused("evaluation"):
            found = evaluate(model, held_out, ema=job.ema, flip=train.eval_flip)
            monitor.evaluated(step, found)
            return found
        return None

    if keeper.owed:
        keeper.made_up(job.first_step, evaluated(job.first_step))
    one = Step.of(job, train.clip_grad_norm)
    batches = monitor.showing(job.train)
    window.start()
    for step in range(job.first_step + 1, job.steps + 1):
        bad_steps.begin_step()
        with window.step():
            norm = one.gradients(batches, train.accumulate, window.phase, window.add)
            if not bad_steps.accepts(step, norm):
                optimizer.zero_grad()  # which leaves the update nothing to do
            keeper.before_update()
            one.update(step)
        last = step == job.steps
        monitor.step(step)
        report = None
        if step % train.log_every == 0 or last:
            report = window.report(step, norm, watch.requested())
            monitor.log(step, report.scalars | keeper.report())
        watch.step_done(step, report)
        optimizer.zero_grad()
        job.schedule.step()
        due = step % (train.eval_every * job.steps_per_epoch) == 0 or last
        keeper.step_done(step, evaluated(step) if due else None)
        if step == job.first_step + 1:  # models are compiled by now
            comm.set_time_out(AFTERWARDS)
    keeper.finish()


def train(config: Config, context: Context) -> float | None:
    """One run, from its configuration to its result: the best accuracy in percent, if there is one."""
    rank_info = context.rank_info
    comm.set_time_out(START_UP)  # a sweep's jobs share their process group
    start = find_start(config, context)
    job, config = build(config, rank_info.rank, rank_info.world_size, context.device, start.step)
    window = StepMetrics(job)
    past = restore(start, config, job, window)
    best = past.best
    best_acc1 = best.acc1 if best else None
    with (
        run_directory(start, config, context) as news,
        open_monitor(config, context, job, window, best_acc1) as monitor,
        StopSignals() as signals,
    ):
        table = start_table(config, context, job)
        monitor.say("\n".join([table, *news, *told(start, job, config.eval_only)]))
        if config.eval_only:
            found = evaluate(job.model, Listening(job.val, signals), ema=job.ema, flip=config.train.eval_flip)
            monitor.say(score_table(found, config.reference))
            return found.acc1
        if config.dry_run:
            if rank_info.rank == 0:
                monitor.say("\n" + rank_table(plan_of(config, job)))
        else:
            bad_steps = BadSteps(job.model, config.train, window, monitor, job.scaler)
            keeper = Saver(config, job, start.store, past, window, monitor, signals)
            with Watch(config, context, job, window, monitor) as watch:
                fit(job, config.train, monitor, window, bad_steps, keeper, watch)
            best = keeper.best
        return best.acc1 if best else None


def main() -> float | None:
    return sweep.run(train)

"""A look at each step: slow ranks, norms, and a profile of some steps on request.

A profile is taken where `monitor.profile_at` says, or when somebody touches the file ``profile`` in the run
directory. Rank 0 looks for it with each report and the report's exchange passes that on. Three steps are
traced; in a step after them every rank's memory is recorded, which slows the step down, so not while tracing.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Generator

import torch
from torch import Tensor

from shardtrain import comm, introspect
from shardtrain.comm import trace
from shardtrain.job import tags
from shardtrain.job.build import Job
from shardtrain.job.config import Config
from shardtrain.job.format import counted
from shardtrain.job.launch import Context
from shardtrain.monitor import timeline
from shardtrain.monitor.metrics import Report, SlowestRank, StepMetrics
from shardtrain.monitor.monitor import Monitor
from shardtrain.plan.memory import LiveTensors

TRACED = 3  # steps
REQUEST, FOLDER = "profile", "timeline"

Steps = Generator[None, int, int]  # is sent the number of each step that is done, and returns the last


class Watch(contextlib.AbstractContextManager["Watch"]):
    """Called after every step, on every rank."""

    def __init__(
        self, config: Config, context: Context, job: Job, metrics: StepMetrics, monitor: Monitor
    ) -> None:
        self._job, self._metrics, self._monitor = job, metrics, monitor
        self._title = f"{config.model.get('name', 'model')}, {counted(context.rank_info.world_size, 'rank')}"
        self._rank_0 = context.rank_info.rank == 0
        self._request, self._folder = context.run_dir / REQUEST, context.run_dir / FOLDER
        self._profile_at: float = config.monitor.profile_at or math.inf
        self._evaluates_every = config.train.eval_every * job.steps_per_epoch
        self._norms = Norms(job, config.train.log_every) if config.monitor.norms else None
        self._last: tuple[int, str] | None = None  # the slow rank of the last report, and its phase
        self._named: tuple[int, str] | None = None  # the slow rank that was named last
        self._requested = False
        self._profiles = self._take_profiles()
        next(self._profiles)

    def __exit__(self, *_: object) -> None:
        self._profiles.close()  # which leaves the contexts that it is in
        if self._norms is not None:
            self._norms.hook.remove()

    def requested(self) -> bool:
        """Return whether somebody asked for a profile since the last call; the file is gone then."""
        with contextlib.suppress(OSError):
            if self._rank_0:
                self._request.unlink()
                return True
        return False

    def step_done(self, step: int, report: Report | None) -> None:
        """Look at a step after its update; gradients have to be still there. Collective after steps traced or
        reported."""
        if report is not None:
            self._requested |= report.profile_requested
            self._name_slow_rank(step, report.slow)
        if self._norms is not None:
            self._monitor.details(step, self._norms.take(step))
        self._profiles.send(step)

    def _name_slow_rank(self, step: int, slow: SlowestRank | None) -> None:
        """Name a rank once that two reports in a row name: one report is often another program's doing."""
        now = slow and slow[:2]
        again, self._last = now == self._last, now
        if again and now != self._named:
            text = slow.text if slow else f"rank {self._named and self._named[0]} keeps up again"
            self._monitor.say(f"step {step}: {text}")
            self._named = now

    def _take_profiles(self) -> Steps:
        step, memory_due = (yield), False
        while True:
            planned = step + 1 >= self._profile_at
            if step < self._job.steps and (planned or self._requested):
                self._requested, memory_due = False, True
                self._profile_at = math.inf if planned else self._profile_at
                step = yield from self._trace(step + 1)
            # An evaluation would be recorded too; the last step is followed by one.
            elif memory_due and step < self._job.steps and step % self._evaluates_every:
                memory_due = False
                step = yield from self._record_memory()
            else:
                step = yield

    def _trace(self, first: int) -> Steps:
        with trace.record(self._metrics.device) as taken:
            for _ in range(TRACED):
                step = yield
                if step == self._job.steps:
                    break
        with self._metrics.paused("pictures"):
            lanes = timeline.collect(taken.spans(), first)
            if self._rank_0:
                self._write_trace(lanes)
            comm.barrier()  # or the others would wait for rank 0 in the next step
        return step

    def _write_trace(self, lanes: timeline.Lanes) -> None:
        first, last = lanes.steps[0], lanes.steps[-1]
        path, png = self._folder / f"steps-{first}-{last}.json", self._folder / f"step-{last}.png"
        drawn = self._monitor.picture(tags.TIMELINE_STEP, timeline.picture(lanes, last, self._title), png)
        if self._monitor.save(path, json.dumps(timeline.chrome(lanes))):
            shown = f", {png.name} shows the last" if drawn else ""
            self._monitor.say(f"steps {first} to {last} are in {path} (for ui.perfetto.dev){shown}")
        self._monitor.say(timeline.in_words(lanes, last))

    def _record_memory(self) -> Steps:
        present = self._job.ema.held() if self._job.ema is not None else []
        with LiveTensors(self._job.model, self._job.optimizer, present) as live:
            step = yield
        with self._metrics.paused("pictures"):
            memory = live.timeline()
            if self._rank_0:
                png = self._folder / f"memory-{step}.png"
                self._monitor.picture(tags.TIMELINE_MEMORY, memory.picture(), png)
                self._monitor.say(f"step {step}: {memory.words()}")
            comm.barrier()
        return step


# Norms of each parameter's gradient, weight and update, over all ranks.
#
# A rank holds pieces, so it has squares of pieces: a parameter cut between two ranks, (3, 4 | 12), gives 25
# on the one and 144 on the other. One all-reduce adds up a table of three squares per parameter, whose roots
# are the norms: 13. Gradients are those that the optimizer is given, after clipping.


class Norms:
    """Norms of a job's parameters, every ``log_every`` steps and in the last one."""

    def __init__(self, job: Job, log_every: int) -> None:
        self._names, self._params = zip(*job.model.named_parameters(), strict=True)
        self._primary = comm.rank() in introspect(job.model).primary_ranks
        self._done, self._last_step, self._log_every = job.first_step, job.steps, log_every
        self._before: list[Tensor] = []
        self.hook = job.optimizer.register_step_pre_hook(self._before_update)

    def _before_update(self, *_: object) -> None:
        step = self._done + 1
        if step % self._log_every == 0 or step == self._last_step:
            self._before = [param.detach().clone() for param in self._params]

    def take(self, step: int) -> dict[str, float]:
        """Return norms by tag, if ``step`` made an update and is to be reported; call it after every step.

        Collective; gradients have to be still there.
        """
        self._done = step
        if not self._before:
            return {}
        weights = [param.detach() for param in self._params]
        kinds = {
            "gradient": [torch.zeros_like(p) if p.grad is None else p.grad for p in self._params],
            "weight": weights,
            "update": list(torch._foreach_sub(weights, self._before)),
        }
        self._before = []
        norms = torch.stack([norm.double() for each in kinds.values() for norm in torch._foreach_norm(each)])
        squares = norms.square() * self._primary  # another replica has the same pieces
        keys = [tags.norm(kind, name) for kind in kinds for name in self._names]
        return dict(zip(keys, comm.all_reduce(squares).sqrt().tolist(), strict=True))

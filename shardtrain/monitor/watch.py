"""What is looked at between steps: ranks that fall behind, norms, and steps that somebody wants to see.

A few steps are traced if `monitor.profile_at` says when, or when somebody touches the file `profile` in the
run directory. Rank 0 looks for it with each report, and tells the others in what they exchange then anyway.
In the step after these, every rank's memory is watched instead: that slows a step down, and a trace must not.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import torch
from torch import Tensor

from shardtrain import comm, introspect
from shardtrain.comm import trace
from shardtrain.job import pictures
from shardtrain.job.build import Job
from shardtrain.job.config import Config
from shardtrain.job.format import MIB, counted
from shardtrain.job.launch import Context
from shardtrain.monitor import timeline
from shardtrain.monitor.reporter import Monitor
from shardtrain.monitor.window import StepMetrics
from shardtrain.plan.memory import LiveTensors

TRACED = 3  # steps
REQUEST, FOLDER = "profile", "timeline"


class Watch:
    """Called after every step, on every rank."""

    def __init__(
        self, config: Config, context: Context, job: Job, window: StepMetrics, monitor: Monitor
    ) -> None:
        self._job, self._window, self._monitor = job, window, monitor
        self._title = f"{config.model.get('name', 'model')}, {counted(context.rank_info.world_size, 'rank')}"
        self._speaks = context.rank_info.rank == 0
        self._request, self._folder = context.run_dir / REQUEST, context.run_dir / FOLDER
        self._profile_at = config.monitor.profile_at
        self._log_every = config.train.log_every
        self._found: tuple[int, str] | None = None  # the slow rank of the last report, and its phase
        self._named: tuple[int, str] | None = None  # the slow rank that was told of last
        self._trace: trace.Trace | None = None
        self._first_step = 0  # that is traced
        self._live: LiveTensors | None = None
        self._memory_due = False
        self._epoch = config.train.eval_every * job.steps_per_epoch
        self._norms = Norms(job, config.train.log_every) if config.monitor.norms else None
        self._open = contextlib.ExitStack()
        window.wish = self._requested

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def step_done(self, step: int) -> None:
        """After an update, before gradients are cleared. Collective after steps reported or traced."""
        if step % self._log_every == 0:
            self._name_the_slow(step)
        if self._norms is not None:
            self._monitor.details(step, self._norms.take(step))
        last = step == self._job.steps
        if self._live is not None:
            with self._window.paused("pictures"):
                self._tell_memory(self._live, step)
                comm.barrier()
        if self._trace is not None and (last or step == self._first_step + TRACED - 1):
            with self._window.paused("pictures"):
                self._tell(self._trace)
                comm.barrier()  # or the others would wait for rank 0 in the next step
        if self._trace is not None or last:
            return
        if self._due(step):
            self._first_step = step + 1
            self._trace = self._open.enter_context(trace.record(self._window.device))
        elif self._memory_due and step % self._epoch:  # no evaluation comes between
            self._watch_memory()

    def _watch_memory(self) -> None:
        present = self._job.ema.held() if self._job.ema is not None else []
        self._live = LiveTensors(self._job.model, self._job.optimizer, present)
        self._memory_due = False
        self._open.enter_context(self._live)

    def _tell_memory(self, live: LiveTensors, step: int) -> None:
        """Collective: the ranks' peaks; the picture and the words are rank 0's."""
        self._open.close()
        self._live = None
        seen = live.timeline()
        peaks = torch.zeros(comm.world_size(), dtype=torch.float64, device=self._window.device)
        peaks[comm.rank()] = seen.peak.total / MIB
        comm.all_reduce(peaks)
        if not self._speaks:
            return
        picture = seen.picture()
        if not isinstance(picture, str):
            self._monitor.picture("timeline/memory", picture)
            with self._writing():
                self._folder.mkdir(exist_ok=True)
                pictures.save(self._folder / f"memory-{step}.png", picture)
        ranks = ", ".join(f"{peak:.1f}" for peak in peaks.tolist())
        self._monitor.say(f"step {step}: {seen.words()} The ranks' peaks: {ranks} MiB.")

    def _name_the_slow(self, step: int) -> None:
        """What two reports in a row have found is told once; one slow report is often another program's."""
        slow = self._window.slow
        found = (slow.rank, slow.phase) if slow else None
        again, self._found = found == self._found, found
        if again and found != self._named:
            if slow:
                self._monitor.say(f"step {step}: {slow}")
            elif self._named:
                self._monitor.say(f"step {step}: rank {self._named[0]} keeps up again")
            self._named = found

    def _requested(self) -> bool:
        """Whether somebody has touched the file; it is gone then."""
        if not self._speaks:
            return False
        try:
            self._request.unlink()
        except OSError:
            return False
        return True

    def _due(self, step: int) -> bool:
        """Whether the next step is to be traced."""
        planned = self._profile_at is not None and step + 1 >= self._profile_at
        if planned:
            self._profile_at = None
        asked, self._window.wished = self._window.wished, False
        return planned or asked

    def _tell(self, taken: trace.Trace) -> None:
        self._open.close()
        self._trace, self._memory_due = None, True
        lanes = timeline.collect(taken.spans(), self._first_step)
        if not self._speaks:
            return
        with self._writing():
            self._monitor.say(self._write(lanes))
        self._monitor.say(timeline.in_words(lanes, lanes.steps[-1]))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Whoever asked for a look did not ask for the run to end where the disk is full."""
        try:
            yield
        except OSError as error:
            self._monitor.say(f"warning: no timeline: cannot write to {self._folder} ({error.strerror})")

    def _write(self, lanes: timeline.Lanes) -> str:
        """The trace and the picture of its last step; where they are."""
        first, last = lanes.steps[0], lanes.steps[-1]
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"steps-{first}-{last}.json"
        path.write_text(json.dumps(timeline.chrome(lanes)))
        picture = timeline.picture(lanes, last, self._title)
        if isinstance(picture, str):
            drawn = picture
        else:
            self._monitor.picture("timeline/step", picture)
            pictures.save(self._folder / f"step-{last}.png", picture)
            drawn = f"step-{last}.png shows the last"
        return f"steps {first} to {last} are in {path} (for ui.perfetto.dev), {drawn}"


# Norms of each parameter's gradient, weight and update, over all ranks.
#
# A rank holds pieces, so it has squares of pieces: a parameter cut between two ranks, (3, 4 | 12), gives 25
# on
# the one and 144 on the other. One all-reduce adds up a table of three squares a parameter, and their roots
# are
# the norms: 13. Gradients are those that the optimizer is given, after clipping. Weights are copied before an
# update only in steps that are reported.

KINDS = ("gradient", "weight", "update")


class Norms:
    """Of a job's parameters, every ``log_every`` steps and in the last one."""

    def __init__(self, job: Job, log_every: int) -> None:
        self._names, self._params = zip(*job.model.named_parameters(), strict=True)
        self._speaks = comm.rank() in introspect(job.model).primary_ranks
        self._done, self._last_step, self._log_every = job.first_step, job.steps, log_every
        self._before: list[Tensor] = []
        self.hook = job.optimizer.register_step_pre_hook(self._before_update)

    def _before_update(self, *_: object) -> None:
        step = self._done + 1
        if step % self._log_every == 0 or step == self._last_step:
            self._before = [param.detach().clone() for param in self._params]

    def take(self, step: int) -> dict[str, float]:
        """By tag, if ``step`` has made an update and is to be reported; to be called after every step.

        Collective; gradients have to be still there.
        """
        self._done = step
        if not self._before:
            return {}
        weights = [param.detach() for param in self._params]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._params]
        updates = torch._foreach_sub(weights, self._before)
        self._before = []
        norms = [
            norm.double() for kind in (gradients, weights, updates) for norm in torch._foreach_norm(kind)
        ]
        squares = torch.stack(norms).square().view(len(KINDS), -1)
        if not self._speaks:  # another replica has the same pieces
            squares.zero_()
        found = comm.all_reduce(squares).sqrt().tolist()
        return {
            f"norms/{kind}/{name}": value
            for kind, row in zip(KINDS, found, strict=True)
            for name, value in zip(self._names, row, strict=True)
        }

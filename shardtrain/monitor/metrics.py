"""The steps between two reports: loss and hits, time by phase, traffic, memory, and the slowest rank.

Every rank measures. `StepMetrics.report` sums over ranks and returns scalars by TensorBoard tag.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardtrain import comm, device, introspect
from shardtrain.comm import trace
from shardtrain.config.format import MIB
from shardtrain.data import Batch
from shardtrain.job import tags
from shardtrain.job.build import Job
from shardtrain.job.evaluation import table_of, table_rows
from shardtrain.plan.memory import optimizer_tensors

PHASES = ("data", "forward", "backward", "optimizer")  # of a step
REPORTED_TRAFFIC = ("all_gather", "reduce_scatter", "all_reduce")

# Ranks wait for one another, so every rank's step takes as long as the slowest rank's. A rank's own work,
# without waiting, shows which one is slow: work that exceeds the others' median by more than both of these.
MARGIN = 0.20  # fraction of the other ranks' median
LEAST_S = 0.005  # seconds per step


class SlowRank(NamedTuple):
    """A rank that is slower than the others. ``phase``: where it loses most. ``text``: says both."""

    rank: int
    phase: str
    text: str


def slow_rank(busy: Tensor) -> SlowRank | None:
    """Return the slow rank, if any. ``busy``: seconds of work per step, fp64 [ranks, phases]."""
    totals = busy.sum(1)
    rank = int(totals.argmax())
    others = torch.cat([busy[:rank], busy[rank + 1 :]])
    own = float(totals[rank])
    usual = float(others.sum(1).quantile(0.5)) if len(others) else own
    if own - usual <= max(MARGIN * usual, LEAST_S):
        return None
    excess = busy[rank] - others.quantile(0.5, dim=0)
    most = int(excess.argmax())
    text = (
        f"rank {rank} is slow: busy {1e3 * own:.1f} ms per step, the others {1e3 * usual:.1f} ms, "
        f"most of it in {PHASES[most]} ({1e3 * float(excess[most]):+.1f} ms)"
    )
    return SlowRank(rank, PHASES[most], text)


def scores_in_words(scalars: Mapping[str, Any]) -> dict[str, str]:
    """Return scores in words, by what was scored: ``val``, ``average`` or ``test``.

    Scores of the user's functions belong to the moving average, if there is one.
    """
    scores = {}
    for name, names in (("val", tags.VAL), ("average", tags.VAL_EMA), ("test", tags.TEST)):
        if names[0] in scalars:
            loss, acc1, acc5 = (scalars.get(tag) for tag in names)
            first = "" if acc1 is None else f", acc1 {acc1:.2f} %"
            fifth = "" if acc5 is None else f", acc5 {acc5:.2f} %"
            scores[name] = f"loss {loss:.4f}{first}{fifth}"
    for tag, value in scalars.items():
        name, _, part = tag.partition("/")
        if part in scores and tag not in (*tags.VAL, *tags.VAL_EMA, *tags.TEST):
            judged = "average" if part == "val" and "average" in scores else part
            scores[judged] += f", {name} {tags.in_words(tag, value)}"
    return scores


def trained_in_words(scalars: Mapping[str, Any]) -> list[str]:
    """Return the loss of the training, and its accuracy if it classifies."""
    accuracy = [f"acc1 {scalars[tags.TRAIN_ACC1]:.2f} %"] if tags.TRAIN_ACC1 in scalars else []
    return [f"loss {scalars[tags.TRAIN_LOSS]:.4f}", *accuracy]


def time_in_words(scalars: Mapping[str, Any]) -> str:
    """Return where the time of steps went: the phases, without waiting, and waiting for other ranks."""
    parts = {phase: scalars[tags.phase_pct(phase)] for phase in PHASES}
    parts["exposed communication"] = scalars[tags.EXPOSED_COMM_PCT]
    return ", ".join(f"{part} {share:.0f} %" for part, share in parts.items())


def unit_of_speed(inference: object) -> str:
    """Return the unit of a run's speed, whose model classifies images as ``inference`` says, or does not."""
    return "items/s" if inference is None else "img/s"


class Report(NamedTuple):
    """The results of the steps since the last report."""

    scalars: dict[str, float]  # by tag; memory and speed as this rank measured them, all else equal on all
    slow: SlowRank | None = None


class StepMetrics:
    """Measurements of the steps of one rank.

    Only one phase runs at a time. A phase inside another interrupts it: loading images within a step counts
    as ``data`` only. On an accelerator moments are events in the compute stream, so they time the
    computation, not its launch.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.device = job.device
        self._rows = table_rows(job.model)
        self._restart()

    def start(self) -> None:
        """Exclude start-up's time and memory from reports."""
        self.since = time.perf_counter()
        device.reset_peak_memory(self.device)

    def state(self) -> dict[str, Any]:
        """Return the state for resuming; ``total`` is for other world sizes. Collective."""
        table = table_of(self.sums, self._rows)
        return {"sums": table, "total": table.sum(0), "scored": self.scored}

    def restore(self, state: Mapping[str, Any], ranks: int) -> None:
        """Continue from the `state` of ``ranks`` ranks. With other (virtual) ranks rank 0 gets all sums."""
        if state["sums"].shape == (len(self.sums) * comm.world_size(), 2):
            self.sums.copy_(state["sums"][self._rows.start : self._rows.stop])
        elif comm.rank() == 0:
            self.sums[0].copy_(state["total"])
        self.scored = state["scored"] * ranks // comm.world_size()

    def _restart(self) -> None:
        # Summed on the device, so that no step waits: loss times images, and right first guesses. A row per
        # virtual rank of this rank, or one.
        self.sums = torch.zeros(len(self._rows), 2, dtype=torch.float64, device=self.device)
        self._added = 0  # micro-batches
        self.scored = 0  # images in these sums
        # A resumed run begins the following anew.
        self.images = 0
        self._phase = ""
        self._moments: list[tuple[str, Any]] = []  # at which phases began, with their names
        self._meters: list[comm.Meter] = []  # one per step
        self.since = time.perf_counter()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time one step and count its traffic. Time outside of a `phase` counts as ``optimizer``."""
        with comm.meter() as meter:
            self._meters.append(meter)
            trace.begin("train", "step")
            try:
                with self.phase("optimizer"):
                    yield
            finally:
                trace.end("train", "step")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's time as phase ``name`` of the step. Then the previous phase continues."""
        before = self._phase
        self._enter(name)
        trace.begin("phase", name)
        try:
            yield
        finally:
            trace.end("phase", name)
            self._enter(before)

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self._meters[-1].during = phase
        self._moments.append((phase, device.moment(self.device)))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the block's time from the steps."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.since += time.perf_counter() - start

    def add(self, batch: Batch, loss: Tensor, logits: Tensor) -> None:
        """Add a micro-batch, its mean loss, 0-dim, and its logits [batch, classes]."""
        with torch.no_grad():
            labels = batch.labels.argmax(1) if batch.labels.ndim == 2 else batch.labels
            losses, hits = self.sums[self._added % len(self.sums)].unbind()
            losses.add_(loss, alpha=len(labels))
            hits.add_((logits.argmax(1) == labels).sum())
        self._count(batch)

    def add_sums(self, batch: Batch, total: Tensor, weight: Tensor) -> None:
        """Add a micro-batch of a user's trainer: the sum of its losses and what divides it, 0-dim."""
        self.sums[self._added % len(self.sums)] += torch.stack([total.detach(), weight]).to(self.sums)
        self._count(batch)

    def _count(self, batch: Batch) -> None:
        self.images += len(batch.images)
        self.scored += len(batch.labels)
        self._added += 1

    def report(self, step: int, grad_norm: Tensor) -> Report:
        """Report the steps since the last call. Gradients must not have been cleared. Collective.

        Raises RuntimeError if the loss is not finite.
        """
        steps = len(self._meters)
        ranks = comm.world_size()
        busy, waited, sent = self._own()
        own = torch.tensor([waited, *busy.values()], device=self.device)
        rows = table_of(own.double()[None], range(comm.rank(), comm.rank() + 1)).cpu()
        loss, right = table_of(self.sums, self._rows).sum(0).tolist()
        if not math.isfinite(loss):
            raise RuntimeError(f"{tags.TRAIN_LOSS} is {loss} at step {step}; a lower optim.lr may help")
        elapsed = time.perf_counter() - self.since
        images = self.images * ranks  # every rank has equally many
        scored = self.scored * ranks
        mean = dict(zip(("waiting", *PHASES), rows.mean(0).tolist(), strict=True))
        scalars = {
            **self._means(loss, right, scored),
            tags.GRAD_NORM: float(grad_norm),
            **{tags.lr(i): float(group["lr"]) for i, group in enumerate(self.job.optimizer.param_groups)},
            **{tags.phase_pct(phase): 100 * mean[phase] / elapsed for phase in PHASES},
            tags.EXPOSED_COMM_PCT: 100 * mean["waiting"] / elapsed,
            tags.IMG_PER_S: images / elapsed,
            tags.IMG_PER_S_PER_RANK: images / elapsed / ranks,
            tags.STEP_S: elapsed / steps,
            **{tags.sent_mib(kind): sent[kind] / steps / MIB for kind in REPORTED_TRAFFIC if ranks > 1},
            **_memory(self.job),
        }
        self._restart()
        return Report(scalars, slow_rank(rows[:, 1:] / steps))

    def _means(self, loss: float, right: float, scored: int) -> dict[str, float]:
        """Return the means over what was trained on. ``right``: of a user's trainer, the weight."""
        if self.job.scoring.task is not None:
            return {tags.TRAIN_LOSS: loss / right}
        return {tags.TRAIN_LOSS: loss / scored, tags.TRAIN_ACC1: 100 * right / scored}

    def _own(self) -> tuple[dict[str, float], float, Counter[str]]:
        """Return this rank's seconds of work by phase, its seconds of waiting, and bytes sent by kind."""
        spent = defaultdict[str, float](float)
        waits = defaultdict[str, float](float)
        sent = Counter[str]()
        for (name, start), (_, end) in pairwise(self._moments):
            spent[name] += device.seconds(start, end)
        for meter in self._meters:
            for wait, seconds in meter.exposed().items():
                waits[wait.during] += seconds
            sent.update(meter.bytes)
        return {phase: max(0.0, spent[phase] - waits[phase]) for phase in PHASES}, sum(waits.values()), sent


def _memory(job: Job) -> dict[str, float]:
    """Return MiB that this rank holds at the end of a step, and the peak of the device or process."""
    params = list(job.model.parameters())
    sizes = {
        tags.PARAMS_MIB: sum(param.nbytes for param in params),
        tags.GRADS_MIB: sum(param.grad.nbytes for param in params if param.grad is not None),
        tags.OPTIMIZER_MIB: sum(tensor.nbytes for tensor in optimizer_tensors(job.optimizer)),
        tags.GATHERED_PEAK_MIB: introspect(job.model).take_gathered_peak().bytes,
        tags.PEAK_MIB: device.peak_memory(job.device),
    }
    return {tag: size / MIB for tag, size in sizes.items()}

"""What is measured between two reports: sums of loss and hits, time, traffic and memory.

Every rank measures; `close` adds the ranks up and gives the scalars, named as in TensorBoard.
"""

from __future__ import annotations

import contextlib
import math
import re
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from shardtrain import Precision, comm, introspect
from shardtrain.job.build import Job
from shardtrain.job.format import MIB
from shardtrain.monitor.phases import PHASES, Phases, Slow, slowest
from shardtrain.plan.memory import optimizer_tensors

MOST_RANKS = 16  # whose own times become curves; the slowest is named among all of them

# Dense TF32 peak of one GPU in operations a second (NVIDIA's data sheets, without sparsity): what
# convolutions of fp32 tensors use by default. In bf16 and fp16 each of these GPUs has twice that.
# `perf/mfu` is reported where the peak is known.
TF32_PEAK = {"A100": 156e12, "H100 80GB HBM3": 494e12, "H200": 494e12}


@dataclass
class Spent:
    """Where the time of this process's training went: seconds, the mean over ranks, by what they went to.

    ``seconds``: the phases of a step without waiting; ``waiting``, for other ranks; and what steps were
    interrupted for. ``slow``: how many of the ``reports`` named which rank slow, in which phase.
    """

    since: float = field(default_factory=time.perf_counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    slow: Counter[tuple[int, str]] = field(default_factory=Counter)
    reports: int = 0
    steps: int = 0
    images: int = 0


class StepMetrics:
    """Opened once; each `close` reports what happened since the one before."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.device = job.device
        self.peak = _peak_flops(self.device, introspect(job.model).precision)
        self.spent = Spent()
        self.slow: Slow | None = None  # the rank that the last report found beyond the margin
        self.wish: Callable[[], bool] = _none  # asked with each report: whether this rank wants something
        self.wished = False  # whether a rank did
        self._phases = Phases(self.device)
        self.phase = self._phases.phase
        self._restart()

    def start(self) -> None:
        """Training begins: what start-up took, of time and of memory, is left out of reports."""
        self.since = self.spent.since = time.perf_counter()
        _forget_peak(self.device)

    def state(self) -> dict[str, Any]:
        """What a run that continues needs; the sum over ranks is for other world sizes. Collective."""
        total = comm.all_reduce(self.sums.clone())
        return {"sums": self.sums.clone(), "total": total, "scored": self.scored}

    def restore(self, state: Mapping[str, Any], ranks: int) -> None:
        """Go on from the `state` of ``ranks`` ranks; of more or fewer, rank 0 takes over the sums."""
        if ranks == comm.world_size():
            self.sums.copy_(state["sums"])
        elif comm.rank() == 0:
            self.sums.copy_(state["total"])
        self.scored = state["scored"] * ranks // comm.world_size()
        self._kept = self.sums.clone(), self.scored

    def _restart(self) -> None:
        # Summed on the device, so that no step waits for it: loss times images, right first guesses.
        self.sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        self._kept = self.sums.clone(), 0  # sums and images as of the last step
        self.scored = 0  # images whose loss is in them
        # What follows is measured since the clock was started, which a run that continues does anew.
        self.images: Counter[int] = Counter()  # by their side in pixels
        self.steps = 0
        self.sent: Counter[str] = Counter()  # bytes by kind
        self.since = time.perf_counter()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One optimizer step; see `Phases.step`."""
        with self._phases.step() as traffic:
            yield
        self.steps += 1
        self._kept = self.sums.clone(), self.scored
        self.sent.update(traffic.bytes)

    @contextlib.contextmanager
    def paused(self, what: str) -> Iterator[None]:
        """Leaves the block's time out of the steps'; it goes to ``what``."""
        start = time.perf_counter()
        yield
        elapsed = time.perf_counter() - start
        self.since += elapsed
        self.spent.seconds[what] += elapsed

    def add(self, images: Tensor, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """One micro-batch: images [batch, channels, side, side], mean loss, logits [batch, classes], labels
        [batch] or soft ones as the logits."""
        with torch.no_grad():
            labels = labels.argmax(1) if labels.ndim == 2 else labels
            losses, hits = self.sums.unbind()
            losses.add_(loss, alpha=len(labels))
            hits.add_((logits.argmax(1) == labels).sum())
        self.images[images.shape[-1]] += len(labels)
        self.scored += len(labels)

    def loss_of_step(self) -> Tensor:
        """This rank's loss since the last step, summed over images; 0-dim."""
        return self.sums[0] - self._kept[0][0]

    def drop_step(self) -> None:
        """Leave the step under way out of loss and accuracy."""
        self.sums.copy_(self._kept[0])
        self.scored = self._kept[1]

    def close(self, step: int, grad_norm: Tensor) -> dict[str, float]:
        """Scalars since the last call, by tag. Collective; gradients have to be still there."""
        ranks = comm.world_size()
        (loss, right), busy, waited = self._of_all_ranks()
        if not math.isfinite(loss):
            raise RuntimeError(f"train/loss is {loss} at step {step}; a lower optim.lr may help")
        elapsed = time.perf_counter() - self.since
        images = self.images.total() * ranks  # every rank has equally many
        scored = self.scored * ranks or math.nan
        scalars = {
            "train/loss": loss / scored,
            "train/acc1": 100 * right / scored,
            "grad_norm": float(grad_norm),
            "perf/img_per_s": images / elapsed,
            "perf/img_per_s_per_rank": images / elapsed / ranks,
            "time/step_s": elapsed / self.steps,
            "comm/all_gather_mib_per_step": self.sent["all_gather"] / self.steps / MIB,
            "comm/reduce_scatter_mib_per_step": self.sent["reduce_scatter"] / self.steps / MIB,
            "comm/all_reduce_mib_per_step": self.sent["all_reduce"] / self.steps / MIB,
        }
        for index, group in enumerate(self.job.optimizer.param_groups):
            scalars[f"lr/group{index}"] = float(group["lr"])
        if self.peak is not None:
            scalars["perf/mfu"] = self._flops() / elapsed / self.peak
        scalars |= self._times(busy, waited, elapsed) | self._ranks(busy)
        scalars.update(_memory(self.job, self.device))
        self._restart()
        return scalars

    def _flops(self) -> float:
        """This rank's operations: backward takes twice those of forward."""
        costs = self.job.forward_flops  # not of sizes that an augmentation makes
        return 3 * sum(count * costs.get(side, math.nan) for side, count in self.images.items())

    def _of_all_ranks(self) -> tuple[list[float], list[dict[str, float]], float]:
        """Sums over ranks; each rank's busy seconds by phase; mean seconds of waiting. One all-reduce."""
        busy, waited = self._phases.take()
        rows = torch.zeros(comm.world_size(), 4 + len(busy), dtype=torch.float64, device=self.device)
        rows[comm.rank(), :2] = self.sums
        rows[comm.rank(), 2:] = torch.tensor([waited, self.wish(), *busy.values()], device=self.device)
        found = comm.all_reduce(rows).cpu()
        self.wished = self.wished or bool(found[:, 3].any())
        each = [dict(zip(busy, row, strict=True)) for row in found[:, 4:].tolist()]
        return found[:, :2].sum(0).tolist(), each, found[:, 2].mean().item()

    def _times(self, busy: list[dict[str, float]], waited: float, elapsed: float) -> dict[str, float]:
        """Means over ranks in percent of the time."""
        seconds = {phase: fmean(row[phase] for row in busy) for phase in PHASES}
        self.spent.reports += 1
        self.spent.steps += self.steps
        self.spent.images += self.images.total() * len(busy)
        for what, value in (seconds | {"waiting": waited}).items():
            self.spent.seconds[what] += value
        shares = {f"time/{phase}_pct": 100 * value / elapsed for phase, value in seconds.items()}
        return shares | {"time/exposed_comm_pct": 100 * waited / elapsed}

    def _ranks(self, busy: list[dict[str, float]]) -> dict[str, float]:
        """Each rank's own time of a step, and how far the slowest lies behind the others."""
        a_step = [{phase: value / self.steps for phase, value in row.items()} for row in busy]
        found = slowest(a_step)
        if found is None:
            return {}
        self.slow = found if found.beyond_margin else None
        if self.slow:
            self.spent.slow[found.rank, found.phase] += 1
        each = {f"ranks/busy_s_{rank}": sum(row.values()) for rank, row in enumerate(a_step[:MOST_RANKS])}
        return each | {"ranks/slowest": float(found.rank), "ranks/slowest_excess_pct": found.excess_pct}


def _none() -> bool:
    return False


def _memory(job: Job, device: torch.device) -> dict[str, float]:
    """MiB that this rank holds at the end of a step; the peak is the device's, or on CPU the process's."""
    params = list(job.model.parameters())
    return {
        "memory/params_mib": _mib(params),
        "memory/grads_mib": _mib([param.grad for param in params if param.grad is not None]),
        "memory/optimizer_mib": _mib(optimizer_tensors(job.optimizer)),
        "memory/gathered_peak_mib": introspect(job.model).take_gathered_peak().bytes / MIB,
        "memory/peak_mib": _peak_bytes(device) / MIB,
    }


def _mib(tensors: list[Tensor] | list[torch.nn.Parameter]) -> float:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / MIB


def _forget_peak(device: torch.device) -> None:
    """Let the next peak be that from now on: the jobs of a sweep share a process.

    On the CPU only Linux can, and not in every container; elsewhere it stays that of the whole process.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
    if found:  # what `_forget_peak` has set back, and getrusage would not say
        return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _peak_flops(device: torch.device, precision: Precision | None) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    times = 2 if precision is not None and precision.param in (torch.bfloat16, torch.float16) else 1
    return next((times * peak for model, peak in TF32_PEAK.items() if model in name), None)

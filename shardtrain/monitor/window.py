"""What is measured between two reports: sums of loss and hits, time, traffic and memory.

Every rank measures; `close` adds the ranks up and gives the scalars, named as in TensorBoard.
"""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from shardtrain import comm
from shardtrain.build import Job
from shardtrain.engine import engine_of
from shardtrain.monitor.phases import PHASES, Phases
from shardtrain.monitor.stragglers import Slow, slowest
from shardtrain.text import MIB

MOST_RANKS = 16  # whose own times become curves; the slowest is named among all of them

# Dense TF32 peak of one GPU in operations a second (NVIDIA's data sheets, without sparsity): what
# convolutions of fp32 tensors use by default. `perf/mfu` is reported where the peak is known.
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


class Window:
    """Opened once; each `close` reports what happened since the one before."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.device = job.device
        self.peak = _peak_flops(self.device)
        self.spent = Spent()
        self.slow: Slow | None = None  # the rank that the last report found beyond the margin
        self.wish: Callable[[], bool] = _none  # asked with each report: whether this rank wants something
        self.wished = False  # whether a rank did
        self._phases = Phases(self.device)
        self.phase = self._phases.phase
        self._restart()

    def state(self) -> dict[str, Any]:
        """What a run that continues needs; the sum over ranks is for other world sizes. Collective."""
        total = comm.all_reduce(self.sums.clone())
        counts = {"scored": self.scored, "steps": self.steps}
        return {"sums": self.sums.clone(), "total": total, "sent": dict(self.sent), **counts}

    def restore(self, state: Mapping[str, Any], ranks: int) -> None:
        """Go on from the `state` of ``ranks`` ranks; of more or fewer, rank 0 takes over the sums."""
        self.steps = state["steps"]
        if ranks == comm.world_size():
            self.sums.copy_(state["sums"])
            self.sent.update(state["sent"])
        elif comm.rank() == 0:
            self.sums.copy_(state["total"])
        self.scored = state["scored"] * ranks // comm.world_size()
        self._kept = self.sums.clone(), self.scored

    def _restart(self) -> None:
        # Summed on the device, so that no step waits for it: loss times images, right first guesses.
        self.sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        self._kept = self.sums.clone(), 0  # sums and images as of the last step
        self.images = 0  # since the clock was started, which a run that continues does anew
        self.scored = 0  # of these, images whose loss counts
        self.steps = 0
        self.timed_steps = 0  # likewise
        self.sent: Counter[str] = Counter()  # bytes by kind
        self.since = time.perf_counter()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One optimizer step; see `Phases.step`."""
        with self._phases.step() as traffic:
            yield
        self.steps += 1
        self.timed_steps += 1
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

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """One micro-batch: mean loss, logits [batch, classes], labels [batch] or soft ones as the logits."""
        with torch.no_grad():
            labels = labels.argmax(1) if labels.ndim == 2 else labels
            right = (logits.argmax(1) == labels).sum()
            self.sums += torch.stack([loss.double() * len(labels), right.double()])
        self.images += len(labels)
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
        images = self.images * ranks  # every rank has equally many
        scored = self.scored * ranks or math.nan
        scalars = {
            "train/loss": loss / scored,
            "train/acc1": 100 * right / scored,
            "grad_norm": float(grad_norm),
            "perf/img_per_s": images / elapsed,
            "perf/img_per_s_per_rank": images / elapsed / ranks,
            "time/step_s": elapsed / self.timed_steps,
            "comm/all_gather_mib_per_step": self.sent["all_gather"] / self.steps / MIB,
            "comm/reduce_scatter_mib_per_step": self.sent["reduce_scatter"] / self.steps / MIB,
            "comm/all_reduce_mib_per_step": self.sent["all_reduce"] / self.steps / MIB,
        }
        for index, group in enumerate(self.job.optimizer.param_groups):
            scalars[f"lr/group{index}"] = float(group["lr"])
        if self.peak is not None:  # backward takes twice the operations of forward
            scalars["perf/mfu"] = 3 * self.job.forward_flops * images / elapsed / ranks / self.peak
        scalars |= self._times(busy, waited, elapsed) | self._ranks(busy)
        scalars.update(_memory(self.job, self.device))
        self._restart()
        return scalars

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
        self.spent.steps += self.timed_steps
        self.spent.images += self.images * len(busy)
        for what, value in (seconds | {"waiting": waited}).items():
            self.spent.seconds[what] += value
        shares = {f"time/{phase}_pct": 100 * value / elapsed for phase, value in seconds.items()}
        return shares | {"time/exposed_comm_pct": 100 * waited / elapsed}

    def _ranks(self, busy: list[dict[str, float]]) -> dict[str, float]:
        """Each rank's own time of a step, and how far the slowest lies behind the others."""
        a_step = [{phase: value / self.timed_steps for phase, value in row.items()} for row in busy]
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
    state = [value for part in job.optimizer.state.values() for value in part.values()]
    tensors = [value for value in state if isinstance(value, Tensor)]
    return {
        "memory/params_mib": _mib(params),
        "memory/grads_mib": _mib([param.grad for param in params if param.grad is not None]),
        "memory/optimizer_mib": _mib(tensors),
        "memory/gathered_peak_mib": engine_of(job.model).take_gathered_peak().bytes / MIB,
        "memory/peak_mib": _peak_bytes(device) / MIB,
    }


def _mib(tensors: list[Tensor] | list[torch.nn.Parameter]) -> float:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / MIB


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _peak_flops(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for model, peak in TF32_PEAK.items() if model in name), None)

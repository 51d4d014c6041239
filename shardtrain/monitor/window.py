"""What is measured between two reports: sums of loss and hits, time, traffic and memory.

Every rank measures; `close` adds the ranks up and gives the scalars, named as in TensorBoard.
"""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardtrain import comm
from shardtrain.build import Job
from shardtrain.engine import engine_of

MIB = 2**20

# Dense TF32 peak of one GPU in operations a second (NVIDIA's data sheets, without sparsity): what
# convolutions of fp32 tensors use by default. `perf/mfu` is reported where the peak is known.
TF32_PEAK = {"A100": 156e12, "H100 80GB HBM3": 494e12, "H200": 494e12}


class Window:
    """Opened once; each `close` reports what happened since the one before."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.device = next(job.model.parameters()).device
        self.peak = _peak_flops(self.device)
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
        self.data_s = 0.0
        self.sent: Counter[str] = Counter()  # bytes by kind
        self.traffic: list[comm.Meter] = []  # of the steps taken here
        self.since = time.perf_counter()

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Times the block as waiting for input."""
        start = time.perf_counter()
        yield
        self.data_s += time.perf_counter() - start

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the block's time out."""
        start = time.perf_counter()
        yield
        self.since += time.perf_counter() - start

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

    def step_done(self, traffic: comm.Meter) -> None:
        self.steps += 1
        self.timed_steps += 1
        self._kept = self.sums.clone(), self.scored
        self.sent.update(traffic.bytes)
        self.traffic.append(traffic)

    def close(self, step: int, grad_norm: Tensor) -> dict[str, float]:
        """Scalars since the last call, by tag. Collective; gradients have to be still there."""
        loss, right = comm.all_reduce(self.sums).tolist()
        if not math.isfinite(loss):
            raise RuntimeError(f"train/loss is {loss} at step {step}; a lower optim.lr may help")
        elapsed = time.perf_counter() - self.since
        ranks = comm.world_size()
        exposed = sum(sum(meter.exposed().values()) for meter in self.traffic)
        exposed = (
            comm.all_reduce(torch.tensor(exposed, dtype=torch.float64, device=self.device)).item() / ranks
        )
        images = self.images * ranks  # every rank has equally many
        scored = self.scored * ranks or math.nan
        scalars = {
            "train/loss": loss / scored,
            "train/acc1": 100 * right / scored,
            "grad_norm": float(grad_norm),
            "perf/img_per_s": images / elapsed,
            "perf/img_per_s_per_rank": images / elapsed / ranks,
            "time/step_s": elapsed / self.timed_steps,
            "time/data_pct": 100 * self.data_s / elapsed,
            "time/exposed_comm_pct": 100 * exposed / elapsed,
            "comm/all_gather_mib_per_step": self.sent["all_gather"] / self.steps / MIB,
            "comm/reduce_scatter_mib_per_step": self.sent["reduce_scatter"] / self.steps / MIB,
        }
        for index, group in enumerate(self.job.optimizer.param_groups):
            scalars[f"lr/group{index}"] = float(group["lr"])
        if self.peak is not None:  # backward takes twice the operations of forward
            scalars["perf/mfu"] = 3 * self.job.forward_flops * images / elapsed / ranks / self.peak
        scalars.update(_memory(self.job, self.device))
        self._restart()
        return scalars


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

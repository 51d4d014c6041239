"""The check that losses and gradients are finite, and the name of what is not."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from shardtrain import comm, recording
from shardtrain.config.format import first_of
from shardtrain.device import HostCopy, is_accelerator, on_accelerator
from shardtrain.job.build import Job


class Finiteness:
    """A check of whether the gradients of steps are finite. In fp16 their scale may have been too high.

    The gradient's norm is the same number on every rank, and not finite if any element of any rank's gradient
    is not. So all ranks decide alike, and exchange the cause only then. On an accelerator the scaler skips
    updates by itself, so a step is checked after the next one has been launched, and before each save: the
    host need not wait.

    Raises RuntimeError on every rank if a loss is not finite, or if a gradient's scale cannot be the cause.
    """

    def __init__(self, job: Job, compute_again: Callable[[int], object]) -> None:
        """compute_again: computes the gradients of a step again, before the update."""
        self._job = job
        self._compute_again = compute_again
        self._unchecked: list[tuple[int, HostCopy]] = []  # steps, their norms and this rank's losses

    def of(self, step: int, norm: Tensor, loss: Tensor) -> bool:
        """Return False if the gradients of ``step``, with this ``norm``, are known not to be finite.

        ``loss``: of this rank, with those of earlier steps, which were finite.
        """
        self._unchecked.append((step, HostCopy(torch.stack([norm.to(loss), loss]))))
        return self.settle(keep=int(on_accelerator(norm)))

    def settle(self, keep: int = 0) -> bool:
        """Check all steps but the last ``keep``; return False if the newest is not finite."""
        finite = True
        while len(self._unchecked) > keep:
            step, copy = self._unchecked.pop(0)
            finite = self._judge(step, *copy.read().tolist()) or keep > 0
        return finite

    def _judge(self, step: int, norm: float, loss: float) -> bool:
        if math.isfinite(norm):
            return True
        job = self._job
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
        with recording(self._job.model, lambda tensor: tensor.isfinite().all()) as record:
            self._compute_again(step)
        texts = enumerate(comm.gather_texts(record.first_false(), comm.plain_transport()))
        first_by_rank = [f"on rank {rank} {text}" for rank, text in texts if text]
        if not first_by_rank:
            return "; each rank's own are finite"
        return f"; the first not finite is {first_of(first_by_rank)}"

"""What happens when a loss or a gradient is no number: every rank decides alike.

The gradient's norm over all ranks is the same number on every rank, and it is not finite as soon as one
element of one rank's gradient is not. So each step is decided without another word; only then do the
ranks find out where it came from.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from shardtrain import comm
from shardtrain.job.config import Train
from shardtrain.monitor import Monitor, StepMetrics
from shardtrain.optim import GradScaler


class BadSteps:
    """Keeps steps whose gradient is not finite from the parameters: by stopping, or by skipping them.

    A step whose scaled gradient overflows in fp16 is none of these: it is left out, and the scale goes down.
    """

    def __init__(
        self, model: nn.Module, train: Train, window: StepMetrics, monitor: Monitor, scaler: GradScaler
    ) -> None:
        self._scaler = scaler
        self._skips = train.nonfinite == "skip"
        self._most, self._in_a_row = train.skip_at_most, 0
        self._window, self._monitor = window, monitor
        self._buffers = list(model.buffers()) if self._skips else []
        self._before = [buffer.clone() for buffer in self._buffers]

    def begin_step(self) -> None:
        """Remember BatchNorm's running statistics, which a bad forward spoils for good."""
        _copy(self._before, self._buffers)

    def accepts(self, step: int, norm: Tensor) -> bool:
        """Whether this step may be taken. Collective if ``norm`` is not finite.

        Raises:
            RuntimeError: on every rank: it may not, and the run is to stop.
        """
        if math.isfinite(float(norm)):
            self._in_a_row = 0
            return True
        bad = self._bad_losses()
        if not bad and self._scaler.is_enabled() and self._scaler.get_scale() >= 1:
            return False
        self._in_a_row += 1
        cause = f"step {step}: {', '.join(bad) or 'all losses finite'}, gradient norm {float(norm)}"
        if not self._skips:
            raise RuntimeError(f"{cause}; a lower optim.lr may help, or train.nonfinite=skip")
        if self._in_a_row > self._most:
            raise RuntimeError(f"{cause}; {self._most} steps in a row were skipped (train.skip_at_most)")
        self._monitor.say(f"skipped {cause}")
        self._window.drop_step()
        _copy(self._buffers, self._before)
        return False

    def _bad_losses(self) -> list[str]:
        losses = torch.zeros(comm.world_size(), dtype=torch.float64, device=self._window.sums.device)
        losses[comm.rank()] = self._window.loss_of_step()
        found = [(rank, loss) for rank, loss in enumerate(comm.all_reduce(losses).tolist())]
        return [f"loss {loss} on rank {rank}" for rank, loss in found if not math.isfinite(loss)]


def _copy(into: list[Tensor], values: list[Tensor]) -> None:
    """Models without BatchNorm have no buffers, and torch refuses to copy none."""
    if into:
        torch._foreach_copy_(into, values)

"""Keep the learning rates of an optimizer in tensors, which a captured step reads.

A graph would repeat a rate that is a number for ever. A schedule of torch writes into a rate that is a
tensor. What users set instead is copied into it. Its own file, since it knows an optimizer only.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Rates:
    """Hold a tensor of fp32 on ``device`` for the rate of each group of ``optimizer``."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._device = device
        self._tensors: list[Tensor] = []  # of each group

    def hold(self) -> None:
        """Copy rates that are not in their tensors into these. The host does not wait."""
        for number, group in enumerate(self._optimizer.param_groups):
            rate = group["lr"]
            if number == len(self._tensors):
                self._tensors.append(torch.empty((), dtype=torch.float32, device=self._device))
            own = self._tensors[number]
            if rate is own:
                continue
            if isinstance(rate, Tensor):
                own.copy_(rate.detach().squeeze())
            else:
                own.fill_(rate)
            group["lr"] = own

    @property
    def versions(self) -> list[int]:
        """Autograd's versions of the tensors: whether they are written."""
        return [tensor._version for tensor in self._tensors]

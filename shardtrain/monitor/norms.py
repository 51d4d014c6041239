"""Norms of each parameter's gradient, weight and update, over all ranks.

A rank holds pieces, so it has squares of pieces: a parameter cut between two ranks, (3, 4 | 12), gives 25 on
the one and 144 on the other. One all-reduce adds up a table of three squares a parameter, and their roots are
the norms: 13. Gradients are those that the optimizer is given, after clipping. Weights are copied before an
update only in steps that are reported.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardtrain import comm
from shardtrain.build import Job
from shardtrain.engine import engine_of

KINDS = ("gradient", "weight", "update")


class Norms:
    """Of a job's parameters, every ``log_every`` steps and in the last one."""

    def __init__(self, job: Job, log_every: int) -> None:
        self._names, self._params = zip(*job.model.named_parameters(), strict=True)
        self._speaks = comm.rank() in engine_of(job.model).transport.speakers
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

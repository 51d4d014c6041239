"""A sharded training step that anyone can check by eye. The engine is tested against it.

No hooks, no streams, no prefetch, no views: one flat vector for the whole model, cut into equal
intervals. Worked numbers for two ranks and a model of three parameter elements ``[1, 2, 3]``, lr 0.1::

    shards            rank 0: [1, 2]          rank 1: [3, 0]        the 0 is padding
    1 gather          both:   [1, 2, 3, 0]                          -> the model's parameters
    2 forward, backward on different data
                      rank 0: [4, 0, 2, 0]    rank 1: [0, 2, 4, 0]  gradients of the whole model
    3 reduce-scatter  rank 0: [2, 1]          rank 1: [3, 0]        each owner's mean
    4 update          rank 0: [0.8, 1.9]      rank 1: [2.7, 0]      only the shard
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import vector_to_parameters


class NaiveTwin:
    """``model`` trained by SGD with momentum, its parameters and momentum sharded over all ranks."""

    def __init__(self, model: nn.Module, lr: float, momentum: float) -> None:
        self.model = model
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.params = list(model.parameters())
        self.numel = sum(p.numel() for p in self.params)
        self.length = -(-self.numel // self.world)  # elements per rank, rounded up
        self.interval = slice(self.rank * self.length, (self.rank + 1) * self.length)
        self.shard = nn.Parameter(self.flatten([p.detach() for p in self.params])[self.interval])
        self.optimizer = torch.optim.SGD([self.shard], lr=lr, momentum=momentum)

    def flatten(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """End to end, and padded so that every rank's interval has the same length."""
        flat = torch.zeros(self.length * self.world)
        flat[: self.numel] = torch.cat([t.reshape(-1) for t in tensors])
        return flat

    def gather(self) -> None:
        """1: every rank's shard, end to end, becomes the model's parameters."""
        shards = [torch.empty(self.length) for _ in range(self.world)]
        dist.all_gather(shards, self.shard.detach())
        vector_to_parameters(torch.cat(shards)[: self.numel], self.params)

    def reduce_scatter(self) -> None:
        """3: the mean over ranks of this rank's interval of the gradient; unused parameters get zeros."""
        flat = self.flatten([torch.zeros_like(p) if p.grad is None else p.grad for p in self.params])
        dist.all_reduce(flat)  # all intervals: plain, and twice the bytes of a reduce-scatter
        self.shard.grad = flat[self.interval] / self.world

    def step(self, loss_of: Callable[[nn.Module], torch.Tensor]) -> float:
        """One training step; returns this rank's loss."""
        self.gather()
        self.model.zero_grad()
        loss = loss_of(self.model)
        loss.backward()
        self.reduce_scatter()
        self.optimizer.step()
        return loss.item()

"""A sharded training step that anyone can check by eye. The engine is tested against it.

No hooks, no streams, no prefetch, no units: one flat vector for the whole model, cut into equal
intervals. Worked numbers for two ranks and a model of three parameter elements ``[1, 2, 3]``, lr 0.1::

    at rest           rank 0: [1, 2]          rank 1: [3, 0]        its shard; the 0 is padding
    1 gather          both:   [1, 2, 3, 0]                          -> the model's parameters
    2 forward, backward on different data
                      rank 0: [4, 0, 2, 0]    rank 1: [0, 2, 4, 0]  gradients of the whole model
    3 reduce-scatter  rank 0: [2, 1]          rank 1: [3, 0]        each owner's mean; the rest is freed
    4 update          rank 0: [0.8, 1.9]      rank 1: [2.7, 0]      only the shard
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn


class NaiveTwin:
    """``model`` trained by SGD: parameters, gradients and momentum are sharded over all ranks."""

    def __init__(self, model: nn.Module, lr: float, momentum: float) -> None:
        self.model = model
        self.world = dist.get_world_size()
        self.params = list(model.parameters())
        self.shapes = [p.shape for p in self.params]
        self.length = -(-sum(p.numel() for p in self.params) // self.world)  # elements per rank, rounded up
        shard = self.flatten([p.detach() for p in self.params]).chunk(self.world)[dist.get_rank()]
        self.shard = nn.Parameter(shard.clone())  # a view would keep the whole vector in memory
        self.optimizer = torch.optim.SGD([self.shard], lr=lr, momentum=momentum)
        self.release()

    def flatten(self, tensors: list[Tensor]) -> Tensor:
        """Lay tensors end to end, and pad so that every rank's interval has the same length."""
        flat = torch.cat([t.reshape(-1) for t in tensors])
        return nn.functional.pad(flat, (0, self.length * self.world - len(flat)))

    def gather(self) -> None:
        """1: make every rank's shard, end to end, the model's parameters."""
        flat = torch.empty(self.length * self.world)
        dist.all_gather(list(flat.chunk(self.world)), self.shard.detach())
        for p, shape in zip(self.params, self.shapes, strict=True):
            p.data = flat[: shape.numel()].view(shape)
            flat = flat[shape.numel() :]

    def release(self) -> None:
        """Free the whole parameters and gradients: between steps a rank has its shard of each."""
        for p in self.params:
            p.data = torch.empty(0)
            p.grad = None

    def reduce_scatter(self) -> None:
        """3: keep the mean over ranks of this rank's interval; unused parameters get zeros."""
        whole = self.flatten([torch.zeros_like(p) if p.grad is None else p.grad for p in self.params])
        self.shard.grad = torch.empty(self.length)
        dist.reduce_scatter(self.shard.grad, list(whole.chunk(self.world)))
        self.shard.grad /= self.world

    def step(self, loss_of: Callable[[nn.Module], Tensor]) -> float:
        """Train on one batch; return this rank's loss."""
        self.gather()
        loss = loss_of(self.model)
        loss.backward()
        self.reduce_scatter()
        self.release()
        self.optimizer.step()
        return loss.item()

"""Clipping, loss scaling and averages of weights. Optimizers of ``torch.optim`` work as they are."""

from shardtrain.engine.hooks import check_optimizers
from shardtrain.optim.clip import GradScaler, clip_grad_norm_
from shardtrain.optim.ema import Ema
from shardtrain.optim.known import steps_plain, trusted

__all__ = ["Ema", "GradScaler", "clip_grad_norm_", "trusted"]

check_optimizers(steps_plain)  # `shard` raises without; whoever uses it has imported this

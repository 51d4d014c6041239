"""Clipping, loss scaling and averages of weights. Optimizers of ``torch.optim`` work as they are."""

from shardtrain.guardrails.attachment import check_optimizers
from shardtrain.guardrails.known import trusted
from shardtrain.optim.clip import GradScaler, clip_grad_norm_
from shardtrain.optim.ema import Ema

__all__ = ["Ema", "GradScaler", "clip_grad_norm_", "trusted"]

check_optimizers()  # of plain models, too: one may be given the state of a sharded model's

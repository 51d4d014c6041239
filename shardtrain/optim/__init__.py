"""Clip gradients, scale losses, average weights, and Muon. Optimizers of ``torch.optim`` work as they are."""

from shardtrain.engine.hooks import check_optimizers
from shardtrain.optim.clip import GradScaler, clip_grad_norm_
from shardtrain.optim.ema import Ema
from shardtrain.optim.muon import Muon, muon_groups
from shardtrain.optim.trial import refuse_unless_right_on_pieces

__all__ = ["Ema", "GradScaler", "Muon", "clip_grad_norm_", "muon_groups"]

check_optimizers(refuse_unless_right_on_pieces)  # `shard` raises without; whoever uses it has imported this

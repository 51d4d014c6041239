"""Clip gradients, scale losses, average weights, and Muon. Optimizers of ``torch.optim`` work as they are."""

from shardtrain.optim.clip import GradScaler, clip_grad_norm_
from shardtrain.optim.ema import Ema
from shardtrain.optim.muon import Muon, muon_groups

__all__ = ["Ema", "GradScaler", "Muon", "clip_grad_norm_", "muon_groups"]

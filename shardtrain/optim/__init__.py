"""What an optimizer step needs beyond ``torch.optim``, whose optimizers work on shards as they are."""

from shardtrain.optim.clip import clip_grad_norm_
from shardtrain.optim.ema import Ema
from shardtrain.optim.scaler import GradScaler

__all__ = ["Ema", "GradScaler", "clip_grad_norm_"]

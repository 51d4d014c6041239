"""What an optimizer step needs beyond ``torch.optim``, whose optimizers work on shards as they are."""

from shardtrain.optim.clip import clip_grad_norm_

__all__ = ["clip_grad_norm_"]

"""Mix each image of a batch, and its label, with those of a partner: mixup and cutmix.

An image's partner is its neighbour in the global batch: 0 and 1, 2 and 3, …. How they are mixed is drawn for
each image of the global batch from the seed and the step. So neither depends on the number of ranks and
micro-batches, if each micro-batch has an even number of images. Of an odd number the last image stays as it
is, and the others pair up within their micro-batch. (torchvision and timm draw once per rank's batch, so the
number of ranks changes the images.)

Mixup with 0.7 turns images a, b of classes 3, 5 into 0.7 a + 0.3 b, labelled 0.7 of class 3 and 0.3 of class
5. Cutmix puts a box of b into a. A box that covers 30 % gives the same label.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shardtrain.job.data.sampler import Share, generator


class Draws(NamedTuple):
    kept: Tensor  # float32 [images]: the fraction of an image that stays its own
    boxed: Tensor  # bool [images]: whether cutmix is used, not mixup
    centres: Tensor  # float32 [images, 2]: the box's centre, as fractions of height and width


class Mix:
    """Mix the images of every step, as a pure function of (seed, step)."""

    def __init__(self, mixup: float, cutmix: float, classes: int, share: Share, seed: int) -> None:
        """mixup, cutmix: alpha of Beta(alpha, alpha); 0: off. With both, each image gets one of them."""
        self.mixup, self.cutmix, self.classes = mixup, cutmix, classes
        self.share, self.seed = share, seed

    def draws(self, step: int) -> Draws:
        """Return the draws for this rank's images of ``step``, counted from 0."""
        images = self.share.batch_size
        random = np.random.default_rng(generator("mix", self.seed, step).initial_seed())
        part_boxed = 0.5 if self.mixup and self.cutmix else float(self.cutmix > 0)
        boxed = random.random(images) < part_boxed
        centres = random.random((images, 2))
        alpha = np.where(boxed, self.cutmix, self.mixup)
        kept = random.beta(alpha, alpha)
        rows = torch.from_numpy(kept).float(), torch.from_numpy(boxed), torch.from_numpy(centres).float()
        return Draws(*map(self.share.of, rows))

    def __call__(self, images: Tensor, labels: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """images: float32 [batch, channels, height, width]; labels: int64 [batch]; returns soft labels."""
        here = Draws(*(each.to(images.device, non_blocking=True) for each in draws))
        weight = kept_pixels(here, images.shape[2], images.shape[3])
        partner = (torch.arange(len(images), device=images.device) ^ 1).clamp(max=len(images) - 1)
        mixed = torch.lerp(images[partner], images, weight[:, None].to(images.dtype))
        one_hot = F.one_hot(labels, self.classes).float()
        return mixed, torch.lerp(one_hot[partner], one_hot, weight.mean((1, 2))[:, None])


def kept_pixels(draws: Draws, height: int, width: int) -> Tensor:
    """Return the fraction of each pixel that stays the image's own: float32 [batch, height, width].

    A box has ``1 - kept`` of the area before it is clipped at the image's edge.
    """
    kept, boxed, centres = draws
    half = 0.5 * (1 - kept).sqrt()
    inside = torch.ones(len(kept), height, width, dtype=torch.bool, device=kept.device)
    for axis, size in ((0, height), (1, width)):
        centre, reach = (centres[:, axis] * size).floor(), (half * size).floor()
        at = torch.arange(size, device=kept.device)
        within = (at >= (centre - reach)[:, None]) & (at < (centre + reach)[:, None])
        inside &= within[:, :, None] if axis == 0 else within[:, None, :]
    return torch.where(boxed[:, None, None], 1.0 - inside.float(), kept[:, None, None])

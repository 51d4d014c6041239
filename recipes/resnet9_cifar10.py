"""Define a small network that learns CIFAR-10 in twelve epochs, the model of `+recipe=resnet9_cifar10`.

Written after airbench94 (Keller Jordan, 2024, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU",
https://arxiv.org/abs/2404.00498), which itself follows David Page's ResNet-9 (2018)::

    images    float32 [batch, 3, 32, 32]
    whiten    24 filters of 2×2 that decorrelate patches of the images; not trained   [24, 31, 31]
    group 1   conv 3×3, max-pool 2, norm, GELU, conv 3×3, norm, GELU                  [64, 15, 15]
    group 2   the same                                                                [256, 7, 7]
    group 3   the same                                                                [256, 3, 3]
    head      max-pool 3, linear, divided by 9                                        [10]

Convolutions start as the identity on their first channels (Zagoruyko & Komodakis, 2017, "DiracNets"), which
does what a residual connection does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardtrain.recipes.augment import FLIP, crop_flip

# A bias that is stored divided by 8 learns 64 times as fast under SGD: its gradient and its effect are both
# 8 times as large. Its weight decay per step is that of all other parameters.
BIAS_SCALE = 8.0


class Resnet9(nn.Module):
    """A network from images, float32 [batch, in_channels, image_size, image_size], to class logits."""

    def __init__(
        self,
        num_classes: int,
        in_channels: int,
        image_size: int,
        widths: tuple[int, int, int] = (64, 256, 256),
        views: bool = False,
    ) -> None:
        """Build the network. ``views``: in evaluation average the logits of six views of an image."""
        super().__init__()
        if image_size < 17 or min(widths) < 1:
            sizes = f"image_size={image_size}, widths={widths}"
            raise ValueError(f"{sizes}: expected at least 17, since images are halved three times, and 1")
        self.views = views
        self.whiten = Whiten(in_channels)
        first, second, third = widths
        self.groups = nn.Sequential(
            group(self.whiten.weight.size(0), first), group(first, second), group(second, third)
        )
        self.head = nn.Linear(third, num_classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        if self.training or not self.views:
            return self.logits(images)
        return torch.stack([self.logits(view).float() * weight for view, weight in views_of(images)]).sum(0)

    def logits(self, images: Tensor) -> Tensor:
        features = self.groups(F.gelu(self.whiten(images)))
        logits: Tensor = self.head(features.amax((2, 3)))
        return logits / 9

    @torch.no_grad()
    def init_from_images(self, images: Tensor) -> None:
        """Set what depends on the data. The program calls it before the first step, with training images."""
        self.whiten.init_from_images(images)


def views_of(images: Tensor) -> list[tuple[Tensor, float]]:
    """Return batches of the images' shape, and their weights.

    They are the images, the images moved by one pixel up and left, and down and right, of half the weight
    each, and the mirror images of all three.
    """
    height, width = images.shape[2:]
    padded = F.pad(images, [1] * 4, mode="reflect")
    ends = padded[..., :height, :width], padded[..., -height:, -width:]
    views = [(images, 0.25), *((moved, 0.125) for moved in ends)]
    return [*views, *((view.flip(3), weight) for view, weight in views)]


class Crops:
    """Random crops with a reflected border; each image is mirrored in every second epoch."""

    draws = 3
    alternates = (FLIP,)  # columns of the random numbers that move by 1/2 from epoch to epoch

    def __init__(self, pad: int) -> None:
        """pad: pixels on each side before the crop. Raises ValueError below 0."""
        if pad < 0:
            raise ValueError(f"pad={pad}: expected at least 0")
        self.pad = pad

    def __call__(self, images: Tensor, uniform: Tensor) -> Tensor:
        """Crop images, float32 [batch, channels, height, width]. uniform: float32 [batch, 3]."""
        return crop_flip(images, uniform, self.pad, "reflect")


class Whiten(nn.Conv2d):
    """A projection of 2×2 patches onto the eigenvectors of their covariance, scaled to unit variance.

    The negatives of the filters follow, so that GELU loses nothing. Only the bias is trained.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, 2 * 4 * channels, 2)
        self.weight.requires_grad_(False)
        assert self.bias is not None
        nn.init.zeros_(self.bias)

    def init_from_images(self, images: Tensor) -> None:
        """Set the filters from ``images``, float32 [count, channels, side, side], normalised.

        An eigenvector's sign is free. That of its largest element is made positive, so that all ranks agree.
        """
        patches = F.unfold(images.double(), 2).transpose(1, 2).flatten(0, 1)
        values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
        largest = vectors.abs().argmax(0, keepdim=True)
        filters = (vectors * vectors.gather(0, largest).sign() / (values + 5e-4).sqrt()).T.flip(0)
        self.weight.copy_(torch.cat([filters, -filters]).view_as(self.weight))


def group(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        dirac_conv(channels, width),
        nn.MaxPool2d(2),
        Norm(width),
        nn.GELU(),
        dirac_conv(width, width),
        Norm(width),
        nn.GELU(),
    )


def dirac_conv(channels: int, width: int) -> nn.Conv2d:
    """Return a 3×3 convolution whose first ``channels`` outputs are its inputs; the others are random."""
    conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
    nn.init.dirac_(conv.weight[:channels].detach())
    return conv


class Norm(nn.BatchNorm2d):
    """A BatchNorm without a scale, with a bias that learns fast and statistics of few batches."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-12, momentum=0.4)
        self.weight.requires_grad_(False)

    def forward(self, input: Tensor) -> Tensor:
        momentum = float(self.momentum or 0)
        bias = self.bias * BIAS_SCALE
        return F.batch_norm(
            input, self.running_mean, self.running_var, self.weight, bias, self.training, momentum, self.eps
        )

"""Build image classifiers of torchvision by name, and fit them to a data set."""

from __future__ import annotations

import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torchvision.models import ResNet, VisionTransformer
from torchvision.models.resnet import BasicBlock, Bottleneck

from shardtrain.config.errors import not_valid

MOST_LAYERS = 10_000
SMALL_IMAGE = 64  # pixels; up to here `stem=auto` keeps a ResNet's full resolution


def classifier(
    name: str,
    num_classes: int,
    in_channels: int,
    image_size: int,
    stem: str = "auto",
    zero_init_residual: bool = False,
) -> nn.Module:
    """Return torchvision's model `name`, untrained; images: float32 [batch, in_channels, side, side].

    image_size: the side in pixels.
    stem: `standard` is torchvision's own, which leaves a ResNet 1/4 of the side to work on; `small` is a 3×3
    convolution of stride 1 and no pooling; `auto` chooses by image size. Only ResNets have the choice.
    zero_init_residual: a ResNet's blocks start as the identity. Raises ValueError for what a model lacks.
    """
    if stem not in ("auto", "small", "standard"):
        raise ValueError(f"stem={stem} (valid: auto, small, standard)")
    model = _build(name, num_classes, image_size)
    if stem == "small" and not isinstance(model, ResNet):
        raise ValueError(f"stem=small is for ResNets, not for {name}; use stem=auto")
    if zero_init_residual:
        _zero_init_residual(model, name)
    if isinstance(model, ResNet) and (stem == "small" or (stem == "auto" and image_size <= SMALL_IMAGE)):
        _fit_small_images(model)
    if in_channels != 3:
        _set_input_channels(model, in_channels)
    return model


def vit(
    num_classes: int,
    in_channels: int,
    image_size: int,
    patch: int,
    layers: int,
    heads: int,
    width: int,
    mlp_width: int,
) -> nn.Module:
    """Return torchvision's vision transformer in a size of its own; `patch`: pixels per patch's side.

    Raises ValueError if patches do not divide the image, heads do not divide the width, or a size is absurd.
    """
    if min(patch, layers, heads, width, mlp_width) < 1 or layers > MOST_LAYERS:
        sizes = f"patch={patch}, layers={layers}, heads={heads}, width={width}, mlp_width={mlp_width}"
        raise ValueError(f"{sizes}: expected sizes of at least 1, and at most {MOST_LAYERS} layers")
    if image_size % patch or width % heads:
        raise ValueError(
            f"patch={patch}, heads={heads}: expected divisors of image_size={image_size} and width={width}"
        )
    model = VisionTransformer(image_size, patch, layers, heads, width, mlp_width, num_classes=num_classes)
    if in_channels != 3:
        _set_input_channels(model, in_channels)
    return model


def resnet_cifar(num_classes: int, in_channels: int, image_size: int, depth: int) -> nn.Module:
    """Return the ResNet for small images of He et al. (2015, https://arxiv.org/abs/1512.03385, section 4.2).

    Three stages of 16, 32 and 64 channels, each of ``(depth - 2) / 6`` blocks of two convolutions. Shortcuts
    have no parameters: where the shape changes they take every second pixel and add channels of zeros. Raises
    ValueError for another depth.
    """
    blocks, rest = divmod(depth - 2, 6)
    if rest or blocks < 1 or image_size < 4 or depth > MOST_LAYERS:
        raise ValueError(
            f"depth={depth}, image_size={image_size}: expected 6 n + 2 layers (20, 32, 44, 56, 110), 4 pixels"
        )
    layers: list[nn.Module] = [
        nn.Conv2d(in_channels, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
    ]
    width = 16
    for stage in (16, 32, 64):
        for _ in range(blocks):
            shortcut = None if width == stage else Shortcut(stage - width)
            layers.append(BasicBlock(width, stage, 1 if shortcut is None else 2, shortcut))
            width = stage
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes))
    for part in model.modules():
        if isinstance(part, nn.Conv2d):
            _initialised(part)
    return model


class Shortcut(nn.Module):
    """Every second pixel, and ``channels`` channels of zeros beside."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, images: Tensor) -> Tensor:
        return F.pad(images[:, :, ::2, ::2], [0, 0, 0, 0, 0, self.channels])


def _build(name: str, num_classes: int, image_size: int) -> nn.Module:
    valid = torchvision.models.list_models(module=torchvision.models)
    if name not in valid:
        raise not_valid(f"model.name={name} is no torchvision model", name, valid)
    # Vision transformers alone are built for one image size.
    options = {"image_size": image_size} if name.startswith("vit_") else {}
    if name in ("googlenet", "inception_v3"):
        # Their auxiliary heads return further logits while training, and the slow initialisation warns.
        options = {"aux_logits": False, "init_weights": True}
    try:
        return torchvision.models.get_model(name, weights=None, num_classes=num_classes, **options)
    except AssertionError as error:
        raise ValueError(f"{name} cannot be built for images of {image_size} pixels: {error}") from error


def _fit_small_images(model: ResNet) -> None:
    width = model.conv1.out_channels
    model.conv1 = _initialised(nn.Conv2d(model.conv1.in_channels, width, 3, 1, 1, bias=False))
    model.maxpool = nn.Identity()


def _zero_init_residual(model: nn.Module, name: str) -> None:
    if not isinstance(model, ResNet):
        raise ValueError(f"zero_init_residual=true is for ResNets, not for {name}")
    for part in model.modules():
        if isinstance(part, Bottleneck):
            nn.init.zeros_(part.bn3.weight)
        elif isinstance(part, BasicBlock):
            nn.init.zeros_(part.bn2.weight)


def _set_input_channels(model: nn.Module, channels: int) -> None:
    """Replace the first convolution by one of `channels` input channels."""
    name, old = next((name, part) for name, part in model.named_modules() if isinstance(part, nn.Conv2d))
    new = nn.Conv2d(
        channels,
        old.out_channels,
        old.kernel_size,  # type: ignore[arg-type]
        old.stride,  # type: ignore[arg-type]
        old.padding,  # type: ignore[arg-type]
        bias=old.bias is not None,
    )
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, _initialised(new))


def _initialised(convolution: nn.Conv2d) -> nn.Conv2d:
    """Initialize a convolution as torchvision does in a ResNet."""
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution

"""What is trained: a small set of torchvision models, each with an image size and images a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models import VisionTransformer
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.models.vision_transformer import EncoderBlock

from shardtrain.errors import UserError

CLASSES = 10
POOL = 4  # steps with data of their own; then the data repeat

# What peers are told to shard one by one: residual blocks and encoder blocks.
BLOCKS: tuple[type[nn.Module], ...] = (BasicBlock, Bottleneck, EncoderBlock)


def _vit(layers: int, width: int, heads: int) -> Callable[[int], nn.Module]:
    def build(image_size: int) -> nn.Module:
        if image_size % 4:
            raise UserError(f"image_size={image_size}: the ViT's patches of 4 pixels do not divide it")
        model: nn.Module = VisionTransformer(
            image_size, 4, layers, heads, width, 4 * width, num_classes=CLASSES
        )
        return model

    return build


def _resnet(name: str) -> Callable[[int], nn.Module]:
    def build(_: int) -> nn.Module:
        model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=CLASSES)
        return model

    return build


@dataclass(frozen=True)
class Case:
    """``batch_size`` counts the images of one rank and micro-batch, of ``image_size`` × ``image_size``."""

    name: str
    build: Callable[[int], nn.Module]  # image size → model
    image_size: int
    batch_size: int

    @property
    def shape(self) -> str:
        return f"{self.name.removesuffix('_64')}@{self.image_size}×{self.batch_size}"


CASES = {
    case.name: case
    for case in (
        Case("resnet18", _resnet("resnet18"), 32, 32),
        Case("resnet50", _resnet("resnet50"), 32, 32),
        Case("resnet50_64", _resnet("resnet50"), 64, 16),
        Case("vit", _vit(layers=6, width=384, heads=6), 32, 32),
        Case("resnet152", _resnet("resnet152"), 32, 8),
        Case("tiny", _vit(layers=2, width=32, heads=2), 8, 2),  # for trying the benchmark out
    )
}
SUITE = ("resnet18", "resnet50", "resnet50_64", "vit")


class Batch(NamedTuple):
    images: Tensor  # float32 [batch, 3, size, size]
    labels: Tensor  # int64 [batch]


def build_model(case: Case, seed: int, device: torch.device) -> nn.Module:
    """The same initial parameters at every call, on every rank."""
    torch.manual_seed(seed)
    return case.build(case.image_size).to(device)


def build_data(case: Case, accumulate: int, seed: int, rank: int, device: torch.device) -> list[list[Batch]]:
    """``POOL`` steps of ``accumulate`` micro-batches, different on every rank."""
    random = torch.Generator().manual_seed(seed * 1_000_003 + rank)
    shape = (case.batch_size, 3, case.image_size, case.image_size)

    def batch() -> Batch:
        images = torch.randn(shape, generator=random)
        labels = torch.randint(CLASSES, (case.batch_size,), generator=random)
        return Batch(images.to(device), labels.to(device))

    return [[batch() for _ in range(accumulate)] for _ in range(POOL)]

"""Model families beyond ResNet, three steps each with automatic units: sharded against replicated.

Widths and depths are reduced where torchvision lets them be. On two ranks the order of summation is
DistributedDataParallel's, so losses and parameters are compared bit for bit.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torchvision import models
from torchvision.models import detection

import shardtrain

from small import assert_same_parameters, sgd, shard

Ranks = Callable[..., list[Any]]
Batch = tuple[Any, ...]


def convnext() -> nn.Module:
    settings = [
        models.convnext.CNBlockConfig(a, b, n) for a, b, n in ((24, 40, 1), (40, 72, 2), (72, None, 1))
    ]
    return models.ConvNeXt(settings, stochastic_depth_prob=0.2, num_classes=5)


def swin() -> nn.Module:
    return models.SwinTransformer([2, 2], 18, [2, 2], [3, 6], [2, 2], num_classes=5)


def vit() -> nn.Module:
    return models.VisionTransformer(16, 4, 3, 3, 27, 50, dropout=0.1, num_classes=5)


def densenet() -> nn.Module:
    return models.DenseNet(8, (2, 3, 2), 18, num_classes=5, memory_efficient=True)


def googlenet() -> nn.Module:
    return models.googlenet(num_classes=5, init_weights=False, aux_logits=True)


class Trunk(nn.Module):
    """A classifier's features; its head stays and is never used."""

    out_channels = 576

    def __init__(self) -> None:
        super().__init__()
        self.net = models.mobilenet_v3_small(num_classes=5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net.features(x)


def faster_rcnn() -> nn.Module:
    anchors = detection.anchor_utils.AnchorGenerator(((16, 32),), ((1.0,),))
    head = detection.faster_rcnn.TwoMLPHead(Trunk.out_channels * 49, 8)
    predictor = detection.faster_rcnn.FastRCNNPredictor(8, 3)
    return detection.FasterRCNN(
        Trunk(), None, 64, 64, rpn_anchor_generator=anchors, box_head=head, box_predictor=predictor
    )


class LanguageModel(nn.Module):
    """Two blocks between an embedding and a head that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, 18)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(18, 3, 50, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(18, 101, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def pictures(n: int, size: int) -> Batch:
    return torch.randn(n, 3, size, size), torch.randint(5, (n,))


def boxes(n: int, size: int) -> Batch:
    corners = torch.rand(n, 2) * size / 2
    targets = [
        {"boxes": torch.cat([c, c + size / 3])[None], "labels": torch.randint(1, 3, (1,))} for c in corners
    ]
    return list(torch.rand(n, 3, size, size)), targets


def texts(n: int, size: int) -> Batch:
    tokens = torch.randint(101, (n, size + 1))
    return tokens[:, :-1], tokens[:, 1:]


def classify(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def classify_with_auxiliary_heads(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    main, second, first = model(x)
    return F.cross_entropy(main, y) + 0.3 * (F.cross_entropy(first, y) + F.cross_entropy(second, y))


def detect(model: nn.Module, x: list[torch.Tensor], y: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    return sum(model(x, y).values())


def predict_next(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    size: int
    batch: Callable[[int, int], Batch] = pictures
    loss: Callable[..., torch.Tensor] = classify
    unused: bool = False


def _named(name: str) -> Callable[[], nn.Module]:
    return functools.partial(models.get_model, name, num_classes=5)


CASES = {
    "MobileNetV3": Case(_named("mobilenet_v3_small"), 32),
    "EfficientNet": Case(_named("efficientnet_b0"), 32),
    "ConvNeXt": Case(convnext, 32),
    "Swin": Case(swin, 16),
    "ViT": Case(vit, 16),
    "DenseNet": Case(densenet, 32),
    "RegNet": Case(_named("regnet_y_400mf"), 32),
    "ShuffleNet": Case(_named("shufflenet_v2_x0_5"), 32),
    "GoogLeNet": Case(googlenet, 32, loss=classify_with_auxiliary_heads),
    "Faster R-CNN": Case(faster_rcnn, 64, boxes, detect, unused=True),
    "language model": Case(LanguageModel, 7, texts, predict_next),
}


def three_steps(model: nn.Module, case: Case) -> list[float]:
    optimizer = sgd(model)
    losses = []
    for step in range(3):
        torch.manual_seed(100 * step + dist.get_rank())  # data, dropout and sampling alike
        loss = case.loss(model, *case.batch(4, case.size))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def like_ddp(name: str) -> list[str]:
    case = CASES[name]
    torch.manual_seed(0)
    plain = case.make()
    model = shard(copy.deepcopy(plain))
    replica = nn.parallel.DistributedDataParallel(plain, find_unused_parameters=case.unused)
    ours = three_steps(model, case)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")  # DDP, ConvNeXt
        assert ours == three_steps(replica, case)
    assert_same_parameters(model, replica, tolerance=0)
    return [info.name for info in shardtrain.introspect(model).units]


QUICK = ["ConvNeXt", "ViT", "GoogLeNet", "Faster R-CNN", "language model"]
MORE = [pytest.param(name, marks=pytest.mark.long) for name in CASES if name not in QUICK]


@pytest.mark.parametrize("name", [*QUICK, *MORE])
def test_three_steps_equal_ddp_s(on_ranks: Ranks, name: str) -> None:
    on_ranks(2, like_ddp, name)


@pytest.mark.parametrize("name", ["Faster R-CNN", "language model"])
def test_three_steps_by_messages(ranks: Ranks, name: str) -> None:
    ranks(2, like_ddp, name)


def units_of(model: nn.Module) -> list[str]:
    with torch.device("meta"):
        return [info.name for info in shardtrain.introspect(shardtrain.shard(model)).units][1:]


def test_automatic_units_are_blocks() -> None:
    """Named after the modules that repeat, and none of them large."""

    def inside(prefix: str, *counts: int) -> list[str]:
        return [f"{prefix}{stage}.{block}" for stage, n in enumerate(counts, 1) for block in range(n)]

    def largest(model: nn.Module) -> float:
        infos = shardtrain.introspect(shardtrain.shard(model)).units[1:]
        return max(i.parameters for i in infos) / sum(p.numel() for p in model.parameters())

    with torch.device("meta"):
        assert units_of(models.resnet50()) == [*inside("layer", 3, 4, 6, 3), "fc"]
        names = units_of(models.convnext_tiny())
        assert [n for n in names if n.startswith("features.5.")] == [f"features.5.{i}" for i in range(9)]
        encoder = [f"encoder.layers.encoder_layer_{layer}" for layer in range(12)]
        assert [name for name in units_of(models.vit_b_16()) if "encoder_layer" in name] == encoder
        assert units_of(models.vgg11_bn())[-3:] == ["classifier.0", "classifier.3", "classifier.6"]
        assert {"aux1", "aux2", "inception5b", "fc"} <= set(units_of(models.googlenet(init_weights=False)))
        assert units_of(LanguageModel()) == ["blocks.0", "blocks.1"]
        for name in ("efficientnet_b0", "densenet121", "swin_t", "vit_b_16", "mobilenet_v3_large"):
            assert largest(models.get_model(name)) < 0.26, name


class NoForward(nn.Module):
    """Holds layers and has no forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(99, 99), nn.Linear(99, 99)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.attention = NoForward(), nn.MultiheadAttention(99, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers.second(self.layers.first(x))
        return self.attention(x, x, x)[0]


def test_automatic_units_are_modules_that_are_called() -> None:
    """Not a holder without a forward; nor the projection inside an attention that never calls it."""
    model = Attends()
    assert units_of(model) == ["layers.first", "layers.second", "attention"]

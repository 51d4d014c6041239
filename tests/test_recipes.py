"""Models by name, augmentation, and what `_target_` may name."""

from __future__ import annotations

import math

import pytest
import torch
from torchvision.models import ResNet, resnet18

from shardtrain.job import model
from shardtrain.job.data import DataSet, Share
from shardtrain.job.data.batches import Arrays
from shardtrain.job.data.sampler import generator
from shardtrain.job.schema import UserError
from shardtrain.recipes.augment import Affine, Photo
from shardtrain.recipes.models import classifier, vit

from tiny import train_feed

MODELS = "shardtrain.recipes.models"


def test_standard_stem_is_torchvisions_own_model() -> None:
    model = classifier("resnet18", 1000, 3, 224)
    stock = resnet18()
    stock.load_state_dict(model.state_dict())
    assert [(n, p.shape) for n, p in model.named_parameters()] == [
        (n, p.shape) for n, p in stock.named_parameters()
    ]


@pytest.mark.parametrize(
    ("stem", "size", "side"), [("auto", 32, 32), ("small", 224, 224), ("standard", 32, 8)]
)
def test_stems(stem: str, size: int, side: int) -> None:
    model = classifier("resnet18", 10, 1, size, stem)
    assert isinstance(model, ResNet)
    seen: list[torch.Size] = []
    model.layer1.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape))
    model.to("meta")(torch.empty(2, 1, size, size, device="meta"))
    assert seen[0][-2:] == (side, side)


@pytest.mark.parametrize(
    ("name", "channels", "size"),
    [("mobilenet_v3_small", 5, 64), ("vit_b_16", 3, 32), ("googlenet", 3, 299), ("inception_v3", 3, 299)],
)
def test_channels_image_size_and_no_auxiliary_heads(name: str, channels: int, size: int) -> None:
    model = classifier(name, 4, channels, size).to("meta")
    assert model(torch.empty(2, channels, size, size, device="meta")).shape == (2, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "resnet19"}, r"name=resnet19 is no torchvision model; did you mean resnet18\?"),
        ({"stem": "tiny"}, r"stem=tiny \(valid: auto, small, standard\)"),
        ({"name": "vgg11", "stem": "small"}, r"stem=small is for ResNets, not for vgg11; use stem=auto"),
        (
            {"name": "vgg11", "zero_init_residual": True},
            r"zero_init_residual=true is for ResNets, not for vgg11",
        ),
        ({"num_classes": 0}, r"num_classes=0, in_channels=3: expected at least 1"),
        ({"name": "vit_b_16", "image_size": 20}, r"vit_b_16 cannot be built for images of 20 pixels"),
        ({"stme": "small"}, r"unknown key model.stme; did you mean stem\? \(valid: name, num_classes"),
        ({"_target_": "os.system"}, r"only callables of shardtrain.recipes"),
        ({"_target_": f"{MODELS}.clasifier"}, r"does not define clasifier; did you mean classifier\?"),
        ({"_target_": f"{MODELS}.nn.Linear"}, r"there is no module shardtrain.recipes.models.nn"),
        ({"_target_": f"{MODELS}.ResNet"}, r"shardtrain.recipes.models does not define ResNet"),
        ({"_target_": "shardtrain.recipes.none.f"}, r"there is no module shardtrain.recipes.none"),
        ({"_target_": None}, r"model._target_=None: only callables of shardtrain.recipes"),
        ({"num_classes": "many"}, r"model.num_classes=many: expected a whole number"),
        ({"image_size": None}, r"model.image_size=null: expected a whole number"),
        ({"zero_init_residual": 2}, r"model.zero_init_residual=2: expected true or false"),
    ],
)
def test_models_that_cannot_be_built(arguments: dict[str, object], message: str) -> None:
    node = {
        "_target_": f"{MODELS}.classifier",
        "name": "resnet18",
        "num_classes": 10,
        "in_channels": 3,
        "image_size": 32,
        "stem": "auto",
    }
    with pytest.raises(UserError, match=message):
        model.build(node | arguments, "model")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("Photo", {"pad": "abc"}, r"augment.pad=abc: expected a whole number"),
        ("Photo", {"pad": 1.5}, r"augment.pad=1.5: expected a whole number"),
        ("Photo", {"pad": 0, "policy": []}, r"augment.policy=\[\]: expected a text"),
        ("Affine", {"rotate": 10, "zoom": 0, "shift": "far"}, r"augment.shift=far: expected a number"),
        (
            "Affine",
            {"rotate": 200, "zoom": 0, "shift": 0},
            r"augment: rotate=200.0, zoom=0.0, shift=0.0",
        ),
        ("Affine", {"rotate": -1, "zoom": 0, "shift": 0}, r"augment: rotate=-1.0"),
        ("Affine", {"zoom": 0, "shift": 0}, r"augment: .*missing.*rotate"),
        ("Photo", {"pad": -1}, r"augment: pad=-1, magnitude=9"),
        ("Photo", {"pad": 0, "policy": "trivia"}, r"policy=trivia \(valid: none, trivial, rand, cifar10\)"),
    ],
)
def test_augmentations_that_cannot_be_built(name: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        model.build({"_target_": f"shardtrain.recipes.augment.{name}", **arguments}, "augment")


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_blocks_that_start_as_the_identity(name: str) -> None:
    model = classifier(name, 4, 3, 32, zero_init_residual=True)
    zeros = [n for n, p in model.named_parameters() if n.endswith("weight") and not p.any()]
    assert len(zeros) == {"resnet18": 8, "resnet50": 16}[name]
    assert all(n.endswith({"resnet18": "bn2.weight", "resnet50": "bn3.weight"}[name]) for n in zeros)


def test_a_small_vision_transformer() -> None:
    model = vit(10, 1, 32, patch=4, layers=7, heads=12, width=384, mlp_width=384)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(6.3e6, rel=0.01)
    assert model.to("meta")(torch.empty(2, 1, 32, 32, device="meta")).shape == (2, 10)
    with pytest.raises(
        ValueError, match="patch=5, heads=12: expected divisors of image_size=32 and width=384"
    ):
        vit(10, 3, 32, patch=5, layers=7, heads=12, width=384, mlp_width=384)


def test_affine_moves_by_the_draws() -> None:
    images = torch.randn(3, 2, 8, 8)
    same = Affine(30, 0.2, 0.1)(images, torch.full((3, 4), 0.5))
    assert torch.allclose(same, images, atol=1e-5)
    image = torch.zeros(1, 1, 8, 8)
    image[0, 0, 3, 3] = 1
    right = torch.tensor([[0.5, 0.5, 1.0, 0.5]])  # the largest shift to the right of the sampling grid
    moved = Affine(0, 0, 0.25)(image, right)
    assert moved[0, 0, 3, 1].item() == pytest.approx(1, abs=1e-5)
    quarter = Affine(90, 0, 0)(image, torch.tensor([[1.0, 0.5, 0.5, 0.5]]))
    assert quarter[0, 0].argmax().item() in (3 * 8 + 4, 4 * 8 + 3)


def test_crop_and_flip_by_the_draws() -> None:
    images = torch.arange(16.0).view(1, 1, 4, 4)
    centred, mirrored = torch.tensor([[0.5, 0.5, 0.9]]), torch.tensor([[0.5, 0.5, 0.1]])
    assert torch.equal(Photo(1)(images, centred), images) != torch.equal(Photo(1)(images, mirrored), images)
    both = {tuple(Photo(1)(images, draw).flatten().tolist()) for draw in (centred, mirrored)}
    assert both == {tuple(images.flatten().tolist()), tuple(images.flip(3).flatten().tolist())}
    corner = Photo(1)(images, torch.tensor([[0.0, 0.0, 0.9]]))
    assert corner.shape == images.shape
    assert corner[0, 0, 0].count_nonzero() == 0


def test_boxes_are_erased_by_the_draws() -> None:
    images, uniform = torch.randn(40, 2, 12, 17), torch.rand(40, 8)
    uniform[:, :3] = torch.tensor([0.5, 0.5, 0.1])
    found = Photo(0, erase=0.6)(images, uniform)
    for image, erased, draws in zip(images, found, uniform[:, 3:].tolist(), strict=True):
        area = (0.02 + 0.31 * draws[1]) * 12 * 17
        ratio = 0.3 * 11 ** draws[2]
        height, width = min(12, round(math.sqrt(area * ratio))), min(17, round(math.sqrt(area / ratio)))
        top, left = int(draws[3] * (13 - height)), int(draws[4] * (18 - width))
        expected = image.clone()
        if draws[0] < 0.6:
            expected[:, top : top + height, left : left + width] = 0
        assert torch.equal(erased, expected)


@pytest.mark.parametrize("policy", ["trivial", "rand", "cifar10"])
def test_policies_draw_for_each_image_whoever_loads_it(policy: str) -> None:
    def batches(world: int, accumulate: int) -> list[torch.Tensor]:
        pixels = torch.randint(0, 256, (24, 3, 6, 6), dtype=torch.uint8, generator=generator("pixels"))
        arrays = Arrays(pixels, torch.zeros(24, dtype=torch.int64))
        augment = Photo(0, policy, magnitude=30)
        data = DataSet(arrays, arrays, "small", 2, 3, (0.0,) * 3, (1.0,) * 3)
        steps: list[list[torch.Tensor]] = [[], []]
        for rank in range(world):
            share = Share(12, accumulate, rank, world)
            for index, batch in enumerate(train_feed(data, 6, share, augment=augment)):
                steps[index // accumulate].append(batch.images)
        return [torch.cat(parts) for parts in steps]

    state = torch.get_rng_state()
    alone = batches(1, 1)
    for world, accumulate in ((2, 3), (4, 1)):
        assert all(torch.equal(*pair) for pair in zip(alone, batches(world, accumulate), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(*(each.sum() for each in alone))

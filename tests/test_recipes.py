"""Models by name, augmentation, and what `_target_` may name."""

from __future__ import annotations

import pytest
import torch
from torchvision.models import ResNet, resnet18

from shardtrain import targets
from shardtrain.errors import UserError
from shardtrain.recipes.augment import Affine, CropFlip
from shardtrain.recipes.models import classifier

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


def test_input_channels_of_other_models() -> None:
    model = classifier("mobilenet_v3_small", 7, 5, 64).eval()
    assert model(torch.zeros(1, 5, 64, 64)).shape == (1, 7)


def test_vision_transformers_get_their_image_size() -> None:
    model = classifier("vit_b_16", 4, 3, 32).to("meta")
    assert model(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 4)


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_no_auxiliary_heads(name: str) -> None:
    model = classifier(name, 4, 3, 299).to("meta")
    assert model(torch.empty(2, 3, 299, 299, device="meta")).shape == (2, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "resnet19"}, r"name=resnet19 is no torchvision model; did you mean resnet18\?"),
        ({"stem": "tiny"}, r"stem=tiny \(valid: auto, small, standard\)"),
        ({"name": "vgg11", "stem": "small"}, r"stem=small is for ResNets, not for vgg11; use stem=auto"),
        ({"num_classes": 0}, r"num_classes=0, in_channels=3: expected at least 1"),
        ({"name": "vit_b_16", "image_size": 20}, r"vit_b_16 cannot be built for images of 20 pixels"),
        ({"stme": "small"}, r"unknown key model.stme; did you mean stem\? \(valid: name, num_classes"),
        ({"_target_": "os.system"}, r"only callables of shardtrain.recipes"),
        ({"_target_": f"{MODELS}.clasifier"}, r"does not define clasifier; did you mean classifier\?"),
        ({"_target_": f"{MODELS}.nn.Linear"}, r"there is no module shardtrain.recipes.models.nn"),
        ({"_target_": f"{MODELS}.ResNet"}, r"shardtrain.recipes.models does not define ResNet"),
        ({"_target_": "shardtrain.recipes.none.f"}, r"there is no module shardtrain.recipes.none"),
        ({"_target_": None}, r"model._target_=None: only callables of shardtrain.recipes"),
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
        targets.build(node | arguments, "model")


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(UserError, match=r"model: .*missing.*num_classes"):
        targets.build({"_target_": f"{MODELS}.classifier", "name": "resnet18"}, "model")


def test_affine_without_motion_is_the_identity() -> None:
    images = torch.randn(3, 2, 8, 8)
    same = Affine(30, 0.2, 0.1)(images, torch.full((3, 4), 0.5))
    assert torch.allclose(same, images, atol=1e-5)


def test_affine_moves_by_the_draws() -> None:
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
    assert torch.equal(CropFlip(1)(images, centred), images) != torch.equal(
        CropFlip(1)(images, mirrored), images
    )
    both = {tuple(CropFlip(1)(images, draw).flatten().tolist()) for draw in (centred, mirrored)}
    assert both == {tuple(images.flatten().tolist()), tuple(images.flip(3).flatten().tolist())}
    corner = CropFlip(1)(images, torch.tensor([[0.0, 0.0, 0.9]]))
    assert corner.shape == images.shape
    assert corner[0, 0, 0].count_nonzero() == 0


@pytest.mark.parametrize(
    ("build", "message"), [(lambda: Affine(-1, 0, 0), "rotate=-1"), (lambda: CropFlip(-1), "pad=-1")]
)
def test_augmentations_refuse_what_makes_no_sense(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()  # type: ignore[operator]

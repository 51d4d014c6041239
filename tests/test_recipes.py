"""Models by name, augmentation, what `_target_` may name; each named recipe, and a few steps of it."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from PIL import Image
from torchvision.models import resnet18

from shardtrain import comm
from shardtrain.job import model
from shardtrain.job.data import DataSet
from shardtrain.job.data.batches import Arrays
from shardtrain.job.data.mixing import Mix
from shardtrain.job.data.sampler import generator
from shardtrain.job.hydra_app import config_folder
from shardtrain.job.schema import UserError
from shardtrain.monitor.tables import end_table
from shardtrain.recipes import digits
from shardtrain.recipes.augment import Affine, Photo
from shardtrain.recipes.models import classifier, vit
from shardtrain.train.loop import train

from tiny import composed, context, global_batches, result_of

MODELS = "shardtrain.recipes.models"
SQUEEZENET = {"name": "squeezenet1_1"}


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
    seen: list[torch.Size] = []
    with torch.device("meta"):
        model = classifier("resnet18", 10, 1, size, stem)
        model.get_submodule("layer1").register_forward_pre_hook(lambda _, given: seen.append(given[0].shape))
        model(torch.empty(2, 1, size, size))
    assert seen[0][-2:] == (side, side)


@pytest.mark.parametrize(
    ("name", "channels", "size"),
    [("mobilenet_v3_small", 5, 64), ("vit_b_16", 3, 32), ("googlenet", 3, 299), ("inception_v3", 3, 299)],
)
def test_channels_image_size_and_no_auxiliary_heads(name: str, channels: int, size: int) -> None:
    with torch.device("meta"):
        model = classifier(name, 4, channels, size)
        assert model(torch.empty(2, channels, size, size)).shape == (2, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "resnet19"}, r"name=resnet19 is no torchvision model; did you mean resnet18\?"),
        ({"stem": "tiny"}, r"stem=tiny \(valid: auto, small, standard\)"),
        ({**SQUEEZENET, "stem": "small"}, r"stem=small is for ResNets, not for squeezenet1_1; use stem=auto"),
        ({**SQUEEZENET, "zero_init_residual": True}, r"zero_init_residual=true is for ResNets, not for sque"),
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
    node = {"_target_": f"{MODELS}.classifier", "name": "resnet18", "stem": "auto"}
    sizes = {"num_classes": 10, "in_channels": 3, "image_size": 32}
    with pytest.raises(UserError, match=message):
        model.build(node | sizes | arguments, "model")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("Photo", {"pad": "abc"}, r"augment.pad=abc: expected a whole number"),
        ("Photo", {"pad": 1.5}, r"augment.pad=1.5: expected a whole number"),
        ("Photo", {"pad": 0, "policy": []}, r"augment.policy=\[\]: expected a text"),
        ("Affine", {"rotate": 10, "zoom": 0, "shift": "far"}, r"augment.shift=far: expected a number"),
        ("Affine", {"rotate": 200, "zoom": 0, "shift": 0}, r"augment: rotate=200.0, zoom=0.0, shift=0.0"),
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
    text = "patch=5, heads=12: expected divisors of image_size=32 and width=384"
    with pytest.raises(ValueError, match=text):
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


class Add:
    draws = 1

    def __call__(self, images: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        return images + uniform[:, :, None, None]


@pytest.mark.parametrize(
    "options",
    [
        *({"augment": Photo(0, policy, magnitude=30)} for policy in ("trivial", "rand", "cifar10")),
        *({"augment": Add(), "workers": workers} for workers in (0, 1)),
        {"mix": lambda share: Mix(0.3, 1.0, 2, share, 1)},
    ],
)
def test_global_batches_do_not_depend_on_ranks_and_micro_batches(options: dict[str, Any]) -> None:
    pixels = torch.randint(0, 256, (48, 3, 6, 6), dtype=torch.uint8, generator=generator("pixels"))
    arrays = Arrays(pixels, torch.arange(48) % 2)
    data = DataSet(arrays, arrays, "small", 2, 3, (0.0,) * 3, (1.0,) * 3)
    state = torch.get_rng_state()
    first, second = global_batches(data, 6, 24, 1, 1, **options)
    assert not torch.equal(first[0].sum(), second[0].sum())
    for world, accumulate in ((2, 3), (4, 1)):
        cut = global_batches(data, 6, 24, world, accumulate, **options)
        for ours, theirs in zip((first, second), cut, strict=True):
            assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    assert torch.equal(state, torch.get_rng_state())


NAMES = sorted(path.stem for path in (config_folder() / "recipe").glob("*.yaml"))

# What recipes do not say themselves: settings that they take from the defaults.
FROM_DEFAULTS = {
    "resnet": "optim.nesterov=true optim.weight_decay=5e-4 optim.decay_all=false sched.warmup_epochs=2 "
    "sched.final_lr=0",
    "resnet18_cifar10": "model.stem=auto data.image_size=32 sched.warmup_epochs=0 augment.pad=4 "
    "augment.policy=none augment.erase=0",
    "vit_cifar10": "model.patch=4 model.layers=7 model.heads=12 model.width=384 model.mlp_width=384 "
    "augment.pad=4",
    "resnet50_imagenet_v1": "data.crop_area=0.08 train.label_smoothing=0 train.mixup=0 train.cutmix=0 "
    "ema.decay=null sched.warmup_epochs=0 augment.pad=0 augment.policy=none augment.erase=0",
    "resnet50_imagenet_v2": "train.loss=cross_entropy optim.decay_all=false sched.final_lr=0",
    "resnet50_imagenet_a3": "data.repeats=1 train.label_smoothing=0 ema.decay=null optim.decay_all=false "
    "sched.final_lr=0 augment.erase=0",
    "resnet50_imagenet_16ep": "optim.decay_all=false sched.final_lr=0 augment.policy=none",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_what_it_is(name: str) -> None:
    text = (config_folder() / "recipe" / f"{name}.yaml").read_text()
    assert re.match(r"# @package _global_\n# [A-Z][^\n]*\.\n#\n# data ", text), "title, then the card"
    for row in ("model", "training"):
        assert f"\n# {row} " in text
    config = composed(f"+recipe={name}")
    assert config.reference is not None
    assert f"{config.reference.accuracy} %" in text
    assert composed(f"+recipe={name}", *FROM_DEFAULTS[name].split()) == config
    if name.endswith("v2"):
        assert config.ema.decay == pytest.approx(1 - (1 - 0.99998) * 1024 * 32 / 600, abs=1e-6)


def test_images_grow_as_published() -> None:
    data = composed("+recipe=resnet50_imagenet_16ep").data
    assert [data.side_in(epoch) for epoch in range(16)] == [160] * 12 + [192] * 4


# Tiny in everything but what the recipe is about.
TWO_EPOCHS = (
    *("train.epochs=2", "train.log_every=1", "checkpoint.keep=0"),
    *("monitor.tensorboard=false", "monitor.progress=none"),
)
FAKE = ("data=fake", "data.classes=7", "data.val_images=9", "data.train_images=16", "train.batch_size=8")
SMALL = {
    "resnet": (*FAKE, "data.channels=1", "data.image_size=8"),
    "cifar": (*FAKE, "data.image_size=16"),
    "imagenet": (
        *("data.image_size=32", "data.eval_size=40", "data.resize=44", "data.workers=0"),
        *("train.batch_size=4", "model=resnet18", "parallel.precision=fp32"),
    ),
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An ImageNet of two classes."""
    root = tmp_path_factory.mktemp("photos")
    for part, count in (("train", 4), ("val", 3)):
        for name in ("ant", "bee"):
            (root / part / name).mkdir(parents=True)
            for index in range(count):
                pixels = torch.randint(0, 256, (40, 48, 3), dtype=torch.uint8).numpy()
                Image.fromarray(pixels).save(root / part / name / f"{index}.jpg")
    return str(root)


def tiny_run(folder: str, name: str, photos: str) -> dict[str, Any]:
    sizes = next(sizes for part, sizes in reversed(SMALL.items()) if part in name)
    source = (f"data.root={photos}",) if "imagenet" in name else ()
    if "16ep" in name:
        source += ("data.grow=[16]",)
    if "cifar" in name:  # whose augmentation goes with the data set
        source = (f"augment={composed(f'+recipe={name}').data.name}",)
    config = composed(f"+recipe={name}", *sizes, *TWO_EPOCHS, *source)
    train(config, context(folder))
    comm.barrier()
    return result_of(folder)


AGAIN = {
    "resnet18_cifar10",
    "resnet50_imagenet_v1",
    "resnet50_imagenet_v2",
    "resnet50_imagenet_a3",
}  # others have all their parts


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in AGAIN else ()) for name in NAMES]
)
def test_each_recipe_trains_two_epochs_on_two_ranks(
    on_ranks: Any, tmp_path: Path, name: str, photos: str
) -> None:
    result = on_ranks(2, tiny_run, str(tmp_path), name, photos)[0]
    assert (result["status"], result["epoch"]) == ("finished", 2.0)
    yours = result.get("val/ema_acc1", result["val/acc1"])
    assert f"acc1      yours {yours:.2f} %, reference " in end_table(result)


def test_the_report_on_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, acc1 in ((0, 99.0), (1, 100.0)):
        (tmp_path / str(seed)).mkdir()
        result = {"status": "finished", "val/acc1": acc1, "seconds": 61.5}
        (tmp_path / str(seed) / "result.json").write_text(json.dumps(result))
    with patch.dict(sys.modules, {"sklearn.svm": None}):
        digits.main(["--out", str(tmp_path), "--seeds", "2"])
    said = capsys.readouterr().out
    assert "1     100.00     61.5" in said
    assert "mean of 2: 99.50 %; RBF-SVM on the same split: scikit-learn is not installed" in said
    assert "360 held-out images, so one is 0.28 points" in said
    with patch.object(subprocess, "run") as started, pytest.raises(FileNotFoundError):
        digits.main(["--out", str(tmp_path), "--seeds", "3", "--ranks", "2", "train.epochs=1"])
    command = started.call_args.args[0]
    assert command[1:5] == ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    assert {"+recipe=resnet", "seed=2", "train.epochs=1"} <= {*command}

"""Models by name, augmentation, averages, mixing, losses; each named recipe, and a few steps of it."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import shardtrain
from shardtrain import checkpoint, comm
from shardtrain.config.config import Constant, Cosine, Linear, Sched, Steps
from shardtrain.config.errors import UserError
from shardtrain.data import Batch, Share
from shardtrain.data.feed import Mix
from shardtrain.job.build import lr_factor
from shardtrain.job.evaluation import evaluate
from shardtrain.job.losses import CrossEntropy
from shardtrain.optim import Ema
from shardtrain.recipes.augment import Affine, Photo
from shardtrain.recipes.models import classifier, resnet_cifar, vit
from shardtrain.recipes.resnet9_cifar10 import Crops, Norm, Resnet9, views_of
from shardtrain.train.loop import train

import small
from pool import each_rank
from small import Block, OddNet, sgd, shard
from small import train as steps_of
from tiny import composed, context, result_of, write_folders


def test_resnet9_whitens_patches_of_the_images_shown() -> None:
    torch.manual_seed(0)
    model = Resnet9(10, 3, 32)
    assert sum(param.numel() for param in model.parameters() if param.requires_grad) == 1_971_352
    images = torch.randn(300, 3, 9, 9).cumsum(3) @ torch.rand(9, 9)  # neighbours are alike
    model.init_from_images(images)
    found = model.whiten(images).detach().permute(1, 0, 2, 3).flatten(1)
    assert torch.allclose(found[:12], -found[12:], atol=1e-4)
    assert torch.allclose(found[:12] @ found[:12].T / found.size(1), torch.eye(12), atol=0.02)


def test_a_scaled_bias_learns_64_times_as_fast() -> None:
    norm = Norm(5)
    plain = nn.BatchNorm2d(5, eps=1e-12)
    images = torch.randn(8, 5, 3, 3)
    weights = torch.randn(8, 5, 3, 3)
    for module, lr in ((norm, 0.01), (plain, 0.64)):
        optimizer = torch.optim.SGD([module.bias], lr, momentum=0.9, weight_decay=0.02 / lr)
        for _ in range(3):
            optimizer.zero_grad()
            (module(images) * weights).sum().backward()
            optimizer.step()
    assert torch.allclose(norm.bias * 8, plain.bias, rtol=1e-4)


def test_stems() -> None:
    for stem, size, side in (("auto", 32, 32), ("small", 224, 224), ("standard", 32, 8)):
        seen: list[torch.Size] = []
        with torch.device("meta"):
            model = classifier("resnet18", 10, 1, size, stem)
            model.layer1.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0].shape))
            model(torch.empty(2, 1, size, size))
        assert seen[0][-2:] == (side, side)


def test_sizes_are_those_of_the_papers() -> None:
    def parameters(model: nn.Module) -> int:
        return sum(param.numel() for param in model.parameters())

    assert parameters(resnet_cifar(10, 3, 32, depth=20)) == 269_722
    sizes = {"layers": 7, "heads": 12, "width": 384, "mlp_width": 384}
    model = vit(10, 1, 32, patch=4, **sizes)
    assert parameters(model) == pytest.approx(6.3e6, rel=0.01)
    assert model.to("meta")(torch.empty(2, 1, 32, 32, device="meta")).shape == (2, 10)
    text = "patch=5, heads=12: expected divisors of image_size=32 and width=384"
    with pytest.raises(ValueError, match=text):
        vit(10, 3, 32, patch=5, **sizes)


def test_affine_moves_by_the_draws() -> None:
    images = torch.randn(3, 2, 8, 8)
    same = Affine(30, 0.2, 0.1)(images, torch.full((3, 4), 0.5))
    assert torch.allclose(same, images, atol=1e-5)
    image = torch.zeros(1, 1, 8, 8)
    image[0, 0, 3, 3] = 1
    right = torch.tensor([[0.5, 0.5, 1.0, 0.5]])  # the largest shift to the right of the sampling grid
    moved = Affine(0, 0, 0.25)(image, right)
    assert moved[0, 0, 3, 1].item() == pytest.approx(1, abs=1e-5)
    quarter = Affine(90, 0, 0)(images[:1], torch.tensor([[1.0, 0.5, 0.5, 0.5]]))
    assert torch.allclose(quarter, images[:1].rot90(1, (2, 3)), atol=1e-5)


def test_crop_and_flip_by_the_draws() -> None:
    images = torch.arange(16.0).view(1, 1, 4, 4)
    centred = torch.tensor([[0.5, 0.5, 0.9]])
    mirrored = torch.tensor([[0.5, 0.5, 0.1]])
    both = {tuple(Photo(1)(images, draw).flatten().tolist()) for draw in (centred, mirrored)}
    assert both == {tuple(images.flatten().tolist()), tuple(images.flip(3).flatten().tolist())}
    corner = Photo(1)(images, torch.tensor([[0.0, 0.0, 0.9]]))
    assert corner.shape == images.shape
    assert corner[0, 0, 0].count_nonzero() == 0


def test_a_border_may_be_reflected() -> None:
    images = torch.arange(16.0).view(1, 1, 4, 4)
    corner = Crops(2)(images, torch.tensor([[0.0, 0.0, 0.1]]))
    assert torch.equal(corner, F.pad(images, [2] * 4, "reflect")[:, :, :4, :4])
    with pytest.raises(UserError, match=r"augment\.pad=4: images of 4×4 pixels reflect less"):
        Crops(4)(images, torch.tensor([[0.0, 0.0, 0.1]]))
    with pytest.raises(ValueError, match="flip=never: expected none or random; augment=resnet9 alternates"):
        Photo(2, flip="never")


def test_boxes_are_erased_by_the_draws() -> None:
    images = torch.randn(40, 2, 12, 17)
    uniform = torch.rand(40, 8)
    uniform[:, :3] = torch.tensor([0.5, 0.5, 0.1])
    found = Photo(0, erase=0.6)(images, uniform)
    for image, erased, draws in zip(images, found, uniform[:, 3:].tolist(), strict=True):
        area = (0.02 + 0.31 * draws[1]) * 12 * 17
        ratio = 0.3 * 11 ** draws[2]
        height = min(12, round(math.sqrt(area * ratio)))
        width = min(17, round(math.sqrt(area / ratio)))
        top = int(draws[3] * (13 - height))
        left = int(draws[4] * (18 - width))
        expected = image.clone()
        if draws[0] < 0.6:
            expected[:, top : top + height, left : left + width] = 0
        assert torch.equal(erased, expected)


RECIPES = Path(__file__).parents[2] / "configs/recipe"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))

# Tiny in everything but what the recipe is about.
TWO_EPOCHS = ("train.epochs=2", "train.log_every=1", "checkpoint.keep=0", "monitor.writers=[]")
FAKE = ("data=fake", "data.limit=16", "train.batch_size=8")
SMALL = {
    "resnet": (*FAKE, "data.channels=1", "data.image_size=8"),
    "cifar": (*FAKE, "data.image_size=20"),
    "imagenet": (
        *("data.image_size=32", "data.eval_size=40", "data.resize=44", "data.workers=0"),
        *("train.batch_size=4", "model=resnet18", "parallel.precision=fp32"),
    ),
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    write_folders(root, 8)
    return root


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.release if name != "resnet" else ()) for name in NAMES]
)
@each_rank(2, transport="auto")
def test_each_recipe_trains_two_epochs(tmp_path: Path, name: str, photos: Path) -> None:
    sizes = next(sizes for part, sizes in reversed(SMALL.items()) if part in name)
    source = (f"data.root={photos}",) if "imagenet" in name else ()
    words = (f"+recipe={name}", *sizes, *TWO_EPOCHS, *source)
    train(composed(*words), context(tmp_path, *words))
    comm.barrier()
    result = result_of(tmp_path)
    assert (result["status"], result["epoch"]) == ("finished", 2.0)


def test_views_of_an_image() -> None:
    image = torch.arange(9.0).view(1, 1, 3, 3)
    views = views_of(image)
    assert sum(weight for _, weight in views) == 1
    assert torch.equal(views[3][0], image.flip(3))
    moved = [view for view, weight in views if weight == 1 / 8]
    corner = torch.tensor([[4.0, 3, 4], [1, 0, 1], [4, 3, 4]])  # reflected above and to the left
    assert torch.equal(moved[0][0, 0], corner)
    assert torch.equal(moved[2], moved[0].flip(3))
    assert torch.equal(moved[1], 8 - moved[0].flip(2, 3))
    model = Resnet9(5, 3, 20, widths=(4, 4, 4), views=True).eval()
    images = torch.randn(3, 3, 20, 20)
    torch.testing.assert_close(model(images), sum(model.logits(view) * w for view, w in views_of(images)))
    model.train()
    torch.testing.assert_close(model(images), model.logits(images))


@each_rank(1, 3)
def test_an_average_of_shards_is_that_of_full_states() -> None:
    """Parameters and buffers, and how it is evaluated. `test_resume.py` has it in checkpoints."""
    model = shard(OddNet(), units=[Block])
    optimizer = sgd(model)
    ema = Ema(model, 0.8, every=2, after=2)
    expected: dict[str, torch.Tensor] = {}
    for step in range(1, 8):
        steps_of(model, optimizer, 1, start=step)
        ema.update(step)
        if step % 2 == 0:
            for name, value in shardtrain.full_state_dict(model).items():
                averaged = step > 2 and value.is_floating_point()
                expected[name] = 0.8 * expected[name] + 0.2 * value if averaged else value.clone()
    raw = shardtrain.full_state_dict(model)
    with ema.swapped():
        for name, value in shardtrain.full_state_dict(model).items():
            if value.is_floating_point():
                torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    assert all(torch.equal(raw[name], value) for name, value in shardtrain.full_state_dict(model).items())
    buffers = [name for name, value in model.named_buffers() if value.is_floating_point()]
    for name, mean in zip(buffers, ema.state()["mean"], strict=True):  # which other numbers of ranks load
        torch.testing.assert_close(mean, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    images, labels = small.images(0, rank=0)
    scores = evaluate(model, [Batch(images, labels, len(images))], ema=ema)
    plain = OddNet().eval()
    plain.load_state_dict(expected)
    assert scores.ema.loss == pytest.approx(F.cross_entropy(plain(images), labels).item(), rel=1e-5)
    assert scores.scores != scores.ema


@each_rank(2, transport="auto")
def test_a_rank_that_owns_nothing_averages_nothing() -> None:
    model = shard(nn.Linear(3, 2, bias=False), layout="whole")
    ema = Ema(model, 0.5)
    ema.update(1)
    held = torch.tensor(sum(average.numel() for average in ema.averages.values()))
    assert held in (0, 6)
    assert comm.all_reduce(held) == 6


def test_what_an_average_refuses(tmp_path: Path) -> None:
    model = shardtrain.shard(OddNet())
    with pytest.raises(ValueError, match=r"decay=1, every=1, after=0: expected \[0, 1\), at least 1 and 0"):
        Ema(model, 1)
    checkpoint.save(tmp_path / "x", model)
    with pytest.raises(ValueError, match="it was saved without moving averages of the parameters"):
        checkpoint.load(tmp_path / "x", model, averages=Ema(model, 0.9).averages)


def mixed_by_hand(
    images: torch.Tensor, labels: torch.Tensor, draws: torch.Tensor, classes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Image after image, by the formulas of the papers as torchvision has them."""
    height, width = images.shape[2:]
    mixed = images.clone()
    soft = torch.zeros(len(images), classes)
    for i in range(len(images)):
        j = i ^ 1
        (kept, boxed, down, right) = draws[i].tolist()
        if boxed:
            r = 0.5 * math.sqrt(1 - kept)
            y = int(down * height)
            x = int(right * width)
            y1 = max(0, y - int(r * height))
            y2 = min(height, y + int(r * height))
            x1 = max(0, x - int(r * width))
            x2 = min(width, x + int(r * width))
            mixed[i, :, y1:y2, x1:x2] = images[j, :, y1:y2, x1:x2]
            kept = 1 - (y2 - y1) * (x2 - x1) / (height * width)
        else:
            mixed[i] = kept * images[i] + (1 - kept) * images[j]
        soft[i, labels[i]] += kept
        soft[i, labels[j]] += 1 - kept
    return mixed, soft


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.2, 0.0), (0.0, 1.0), (0.2, 1.0)])
def test_mixing_is_that_of_the_papers(mixup: float, cutmix: float) -> None:
    mix = Mix(mixup, cutmix, 7, Share(24, 1, 0, 1), seed=3)
    images = torch.randn(24, 2, 9, 11)
    labels = torch.arange(24) % 7
    draws = mix.draws(5)
    assert draws[:, 1].any().item() == (cutmix > 0)
    assert draws[:, 1].all().item() == (mixup == 0)
    found = mix(images, labels, draws)
    expected = mixed_by_hand(images, labels, draws, 7)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)
    assert not torch.equal(draws[:, 0], mix.draws(6)[:, 0])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_of_hard_and_soft_labels(smoothing: float) -> None:
    logits = torch.randn(6, 5)
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    one_hot = F.one_hot(labels, 5).float()
    loss = CrossEntropy(smoothing=smoothing)
    torch.testing.assert_close(loss(logits, labels), loss(logits, one_hot))
    half = loss(logits, 0.5 * one_hot + 0.5 * one_hot.roll(1, 1))
    parts = [loss(logits, each) for each in (labels, (labels + 1) % 5)]
    torch.testing.assert_close(half, (parts[0] + parts[1]) / 2)


def test_schedules() -> None:
    """Each epoch has 10 steps; the cosine is that of torch's scheduler."""

    def factors(sched: Sched, steps: int) -> list[float]:
        return [lr_factor(sched, steps, 10)(step) for step in range(steps)]

    step = factors(Steps(name="step", epochs=(3.0, 6.0), factor=0.1, warmup_epochs=0.0), 90)
    assert step[::10] == pytest.approx([1, 1, 1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01])
    assert (step[29], step[30]) == pytest.approx((1, 0.1))
    linear = factors(Linear(name="linear", warmup_epochs=2.0, final_lr_fraction=0.0), 100)
    assert linear[20::16] == pytest.approx(np.linspace(1, 0, 6)[:5])
    assert linear[:3] == pytest.approx([1 / 21, 2 / 21, 3 / 21])
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = lr_scheduler.CosineAnnealingLR(optimizer, 20, 0.1)
    for factor in factors(Cosine(name="cosine", warmup_epochs=0.0, final_lr_fraction=0.1), 20):
        assert factor == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    halfway = factors(Constant(name="constant", warmup_epochs=9.0), 8)  # what a warm-up takes at most
    assert halfway == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1])

"""Data sets, the order of images, and batches on the device."""

from __future__ import annotations

import hashlib
import importlib.resources
import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.datasets import CIFAR10

from shardtrain.job import data
from shardtrain.job.config import Cifar, Digits, Fake, ImageFolder
from shardtrain.job.data.batches import Arrays
from shardtrain.job.data.sampler import (
    EvalSampler,
    Share,
    TrainSampler,
    copies_apart,
    epoch_order,
    generator,
    uniform_draws,
)
from shardtrain.job.schema import UserError

CPU = torch.device("cpu")
PLAIN: dict[str, Any] = {
    "eval_size": None,
    "grow": (),
    "repeats": 1,
    "limit": None,
    "workers": 0,
}
DIGITS = Digits(name="digits", image_size=8, **PLAIN)


def fake(images: int, held_out: int, classes: int, channels: int, side: int) -> data.DataSet:
    options = {"train_images": images, "val_images": held_out, "classes": classes, "channels": channels}
    return data.load(Fake(name="fake", image_size=side, **PLAIN, **options))


def folders(root: Path | str, **options: Any) -> ImageFolder:
    sizes = {"image_size": 12, "resize": 16, "crop_area": 0.5}
    return ImageFolder(**{**PLAIN, **sizes, "name": "imagefolder", "root": str(root), **options})


def cifar(name: str, root: Path) -> Cifar:
    return Cifar(name=name, image_size=32, root=str(root), download=False, **PLAIN)


def test_digits_are_embedded_with_source_and_licence() -> None:
    digits = data.load(DIGITS)
    images, labels = digits.train[list(range(1437))]
    assert (len(digits.train), len(digits.val)) == (1437, 360)
    assert images.shape == (1437, 1, 8, 8)
    assert images.dtype == torch.uint8
    assert int(images.max()) == 16
    assert labels.unique().tolist() == list(range(10))
    assert images.float().mean().item() == pytest.approx(digits.mean[0], abs=0.01)
    assert images.float().std().item() == pytest.approx(digits.std[0], abs=0.01)
    notice = importlib.resources.files("shardtrain.job.data").joinpath("digits.md").read_text()
    assert "CC BY 4.0" in notice
    assert "archive.ics.uci.edu" in notice or "doi.org" in notice


def test_the_split_of_the_digits_never_changes() -> None:
    digits = data.load(DIGITS)
    images, labels = digits.val[list(range(360))]
    assert labels.bincount().tolist() == [27, 35, 36, 29, 30, 40, 44, 39, 39, 41]
    digest = hashlib.sha256(images.numpy().tobytes()).hexdigest()
    assert digest == "a1b64df42a338373212496047eff718ac50a81b6ddde1b3e1a5768a695d0aa16"
    train = {bytes(image.flatten().tolist()) for image in digits.train[list(range(1437))][0]}
    assert not any(bytes(image.flatten().tolist()) in train for image in images)


def test_fake_images_repeat_and_are_the_same_every_time() -> None:
    first, second = fake(300, 20, 7, 2, 5), fake(300, 20, 7, 2, 5)
    assert (len(first.train), len(first.val), first.classes, first.channels) == (300, 20, 7, 2)
    images, labels = first.train[[0, 256, 299]]
    assert images.shape == (3, 2, 5, 5)
    assert torch.equal(images[0], images[1])
    assert labels.max() < 7
    assert torch.equal(images, second.train[[0, 256, 299]][0])


def test_cifar_is_read_from_torchvisions_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    pixels = np.arange(6 * 3072, dtype=np.uint8).reshape(6, 3072)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": [0, 1, 2, 3, 4, 9]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(i) for i in range(10)]}))
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *args: True)
    found = data.load(cifar("cifar10", tmp_path))
    assert (len(found.train), len(found.val), found.classes, found.channels) == (30, 6, 10, 3)
    images, labels = found.val[[5, 0]]
    assert labels.tolist() == [9, 0]
    assert np.array_equal(images[0].numpy(), pixels[5].reshape(3, 32, 32))


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_a_missing_cifar_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=rf"data.root=.*: no {name} in .*data.download=true"):
        data.load(cifar(name, tmp_path))


def _folders(root: Path, parts: dict[str, list[str]]) -> ImageFolder:
    for part, names in parts.items():
        for index, name in enumerate(names):
            (root / part / name).mkdir(parents=True)
            for image in range(2):
                Image.new("L", (20, 30), 40 * index + image).save(root / part / name / f"{image}.png")
    return folders(root)


def test_images_in_folders(tmp_path: Path) -> None:
    found = data.load(_folders(tmp_path, {"train": ["cat", "dog"], "val": ["cat", "dog"]}))
    assert (len(found.train), len(found.val), found.classes) == (4, 4, 2)
    for part in (found.train, found.val):
        images, labels = part[[0, 3]]
        assert images.shape == (2, 3, 12, 12)
        assert images.dtype == torch.uint8
        assert labels.tolist() == [0, 1]
        assert images[1].unique().tolist() == [41]


def test_folders_that_do_not_fit_are_named(tmp_path: Path) -> None:
    differing = _folders(tmp_path / "differing", {"train": ["cat", "dog"], "val": ["cat", "cow"]})
    with pytest.raises(UserError, match="train and val differ in the classes cow, dog"):
        data.load(differing)
    (tmp_path / "empty/train/cat").mkdir(parents=True)
    with pytest.raises(UserError, match="Found no valid file for the classes cat"):
        data.load(folders(tmp_path / "empty"))
    with pytest.raises(UserError, match=r"data.resize=8: expected at least data.image_size=12"):
        data.load(folders(tmp_path, resize=8))
    with pytest.raises(UserError, match=r"data.resize=16: expected at least data.eval_size=20"):
        data.load(folders(tmp_path, eval_size=20))


def index_lists(*arguments: Any) -> list[list[int]]:
    return [request.indices for request in TrainSampler(*arguments)]


def test_order_depends_on_seed_and_epoch_alone() -> None:
    assert epoch_order(0, 0, 50).equal(epoch_order(0, 0, 50))
    orders = [tuple(epoch_order(seed, epoch, 50).tolist()) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9
    assert all(sorted(order) == list(range(50)) for order in orders)


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 1), (2, 1), (3, 2), (4, 3), (1, 12)])
def test_every_world_size_sees_the_same_global_batches(world_size: int, accumulate: int) -> None:
    images, batch_size, steps = 53, 24, 6
    whole = index_lists(images, Share(batch_size, 1, 0, 1), 5, 0, steps)
    shares = [Share(batch_size, accumulate, rank, world_size) for rank in range(world_size)]
    parts = [index_lists(images, share, 5, 0, steps) for share in shares]
    for step in range(steps):
        micro = slice(step * accumulate, (step + 1) * accumulate)
        joined = [index for part in parts for piece in part[micro] for index in piece]
        assert joined == whole[step]
    assert not set(whole[0]) & set(whole[1])


def test_a_run_continues_where_it_stopped() -> None:
    share = Share(8, 2, 1, 2)
    whole = index_lists(37, share, 1, 0, 11)
    assert len(TrainSampler(37, share, 1, 5, 11)) == 12
    assert index_lists(37, share, 1, 5, 11) == whole[10:]


def test_augmentation_draws_do_not_depend_on_the_world_size() -> None:
    whole = uniform_draws(3, 9, Share(12, 1, 0, 1), 4)
    parts = [uniform_draws(3, 9, Share(12, 1, rank, 3), 4) for rank in range(3)]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(uniform_draws(3, 10, Share(12, 1, 0, 1), 4), whole)


def reference_repeats(images: int, repeats: int, world_size: int, rank: int, order: list[int]) -> list[int]:
    """torchvision's RASampler (references/classification/sampler.py), without its rounding to 256 images."""
    indices = [index for index in order for _ in range(repeats)]
    return indices[rank::world_size][: images // world_size]


def test_repeated_augmentation_shows_what_the_reference_shows() -> None:
    """The same images each epoch, each as often, in the same batches of all ranks together."""
    images, repeats, world_size, batch_size = 96, 3, 4, 24
    order = epoch_order(5, 0, images).tolist()
    theirs = [reference_repeats(images, repeats, world_size, rank, order) for rank in range(world_size)]
    ours = index_lists(images, Share(batch_size, 1, 0, 1), 5, 0, images // batch_size, repeats)
    assert sum(map(len, ours)) == images
    for step, batch in enumerate(ours):
        per_rank = slice(step * batch_size // world_size, (step + 1) * batch_size // world_size)
        assert Counter(batch) == Counter(index for rank in theirs for index in rank[per_rank])
    assert set(Counter(ours[0]).values()) == {repeats}


@pytest.mark.parametrize("repeats", [1, 2, 3, 7])
def test_copies_are_spread_over_the_ranks(repeats: int) -> None:
    share = Share(12, 2, 0, 2)
    first, second = (index_lists(37, share._replace(rank=rank), 1, 0, 6, repeats) for rank in range(2))
    whole = index_lists(37, Share(12, 1, 0, 1), 1, 0, 6, repeats)
    for step, batch in enumerate(whole):
        parts = [*first[2 * step : 2 * step + 2], *second[2 * step : 2 * step + 2]]
        assert [index for part in parts for index in part] == batch
    if repeats == 2:
        assert Counter(index for part in first[:2] for index in part).most_common(1)[0][1] == 1
    assert copies_apart(torch.tensor([1, 1, 1, 2, 2, 2, 3]), 3).tolist() == [1, 2, 3, 1, 2, 1, 2]


def test_copies_are_augmented_differently(tmp_path: Path) -> None:
    Image.effect_noise((40, 40), 80).save(_one_image(tmp_path))
    found = data.load(folders(tmp_path, repeats=2))
    prepare = data.Prepare(found, 12, CPU)
    feed = data.TrainFeed(
        found,
        Share(2, 1, 0, 1),
        prepare,
        augment=None,
        seed=0,
        workers=0,
        first_step=0,
        last_step=1,
        repeats=2,
    )
    (batch,) = feed
    assert feed.sampler.images == 2
    assert not torch.equal(batch.images[0], batch.images[1])


def _one_image(root: Path) -> Path:
    """Where to put an image that is both of the two of either part."""
    for part in ("train", "val"):
        (root / part / "only").mkdir(parents=True)
    for name in ("train/only/b.png", "val/only/a.png"):
        (root / name).symlink_to(root / "train/only/a.png")
    return root / "train/only/a.png"


@pytest.mark.parametrize("kind", ["digits", "folders"])
def test_batches_have_the_size_of_their_epoch(tmp_path: Path, kind: str) -> None:
    grow = (6, 7)
    if kind == "digits":
        config: Digits | ImageFolder = replace(DIGITS, grow=grow, eval_size=9, limit=4)
    else:
        config = replace(
            _folders(tmp_path, {"train": ["cat", "dog"], "val": ["cat", "dog"]}),
            image_size=8,
            grow=grow,
            eval_size=9,
        )
    found = data.load(config)
    feed = data.TrainFeed(
        found,
        Share(2, 1, 0, 1),
        data.Prepare(found, 8, CPU),
        augment=None,
        seed=0,
        workers=0,
        first_step=1,
        last_step=6,
        side=config.side_in,
    )
    assert [batch.images.shape[-1] for batch in feed] == [6, 7, 7, 8, 8]
    if kind == "folders":  # cut to size by the workers, so that no more travels than is needed
        assert [images.shape[-1] for images, _ in feed.loader] == [6, 7, 7, 8, 8]
        assert found.val[[0]][0].shape[-1] == 9
    prepare = data.Prepare(found, config.side_in_eval, CPU)
    held_out = data.EvalFeed(found, Share(2, 1, 0, 1), prepare, batch_size=2, workers=0)
    assert {batch.images.shape[-1] for batch in held_out} == {9}
    assert config.sides == {6, 7, 8, 9}


def test_a_limit_takes_some_of_every_class() -> None:
    limited = data.load(replace(DIGITS, limit=5))
    assert (len(limited.train), len(limited.val)) == (5, 5)
    whole = data.load(DIGITS)
    assert torch.equal(limited.train[[0, 4]][0], whole.train[[0, 4 * 1437 // 5]][0])
    assert len(data.load(replace(DIGITS, limit=5000)).train) == 1437


@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 70))
def test_evaluation_counts_every_image_once(images: int, world_size: int, batch_size: int) -> None:
    samplers = [EvalSampler(images, batch_size, rank, world_size) for rank in range(world_size)]
    lists = [list(sampler) for sampler in samplers]
    assert len({tuple(map(len, rank)) for rank in lists}) == 1
    counted = [
        index
        for sampler, rank in zip(samplers, lists, strict=True)
        for batch, indices in enumerate(rank)
        for index in indices[: sampler.valid(batch)]
    ]
    assert sorted(counted) == list(range(images))


def test_batches_are_normalised_resized_and_on_time() -> None:
    images = torch.randint(0, 256, (10, 3, 6, 6), dtype=torch.uint8, generator=generator("test"))
    arrays = Arrays(images, torch.arange(10))
    small = data.DataSet(arrays, arrays, "small", 10, 3, (10.0, 20.0, 30.0), (2.0, 4.0, 8.0))
    feed = data.EvalFeed(small, Share(4, 1, 0, 1), data.Prepare(small, 6, CPU), batch_size=4, workers=0)
    batches = list(feed)
    assert [batch.valid for batch in batches] == [4, 4, 2]
    assert torch.allclose(batches[0].images[:, 1], (images[:4, 1].float() - 20) / 4)
    large = data.EvalFeed(small, Share(4, 1, 0, 1), data.Prepare(small, 9, CPU), batch_size=4, workers=0)
    assert next(iter(large)).images.shape == (4, 3, 9, 9)


@pytest.mark.parametrize("workers", [0, 1])
def test_training_batches_are_augmented_alike_on_every_world_size(workers: int) -> None:
    class Add:
        draws = 1

        def __call__(self, images: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
            return images + uniform[:, :, None, None]

    few = fake(40, 8, 3, 1, 4)

    def batches(share: Share) -> list[data.Batch]:
        prepare = data.Prepare(few, 4, CPU)
        feed = data.TrainFeed(
            few, share, prepare, augment=Add(), seed=1, workers=workers, first_step=0, last_step=5
        )
        return list(feed)

    whole = batches(Share(12, 1, 0, 1))
    parts = [batches(Share(12, 2, rank, 2)) for rank in range(2)]
    for step in range(5):
        micro = [part[2 * step + index] for part in parts for index in range(2)]
        assert torch.equal(torch.cat([batch.images for batch in micro]), whole[step].images)
        assert torch.equal(torch.cat([batch.labels for batch in micro]), whole[step].labels)

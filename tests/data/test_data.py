"""Data sets, the order of images, batches on the device; photographs in folders."""

import hashlib
import io
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.datasets import CIFAR10

from shardtrain import data
from shardtrain.config.errors import UserError, path_of
from shardtrain.data import DataSet, Prepare, TrainFeed
from shardtrain.data.feed import Arrays, Mix
from shardtrain.data.preprocessing import Preprocessing, numbered
from shardtrain.data.sampler import EvalSampler, Share, TrainSampler, copies_apart, epoch_order, generator
from shardtrain.job.build import feeds
from shardtrain.launch.signals import SIGNALS, end_with_parent
from shardtrain.recipes.augment import Photo
from shardtrain.recipes.photos import images_in
from shardtrain.recipes.resnet9_cifar10 import Crops

from tiny import CPU, closed, composed, refused, write_folders

DIGITS: Any = composed("data=digits").data
TWO_IMAGES = Share(2, 1, 0, 1)  # per step, on one rank
PHOTOS = {"image_size": 8, "resize": 10, "crop_area": 0.5, "workers": 0}


def files(name: str, root: Path, **options: Any) -> Any:
    """Return the configuration of ``data=name`` with its files in ``root``."""
    return replace(composed(f"data={name}", "data.root=.").data, root=str(root), **options)


def folder(root: Path, **options: Any) -> Any:
    return files("imagefolder", root, **PHOTOS | options)


def encoded(value: int, kind: str = "png") -> bytes:
    """A grey image of that value, in a file of that kind."""
    file = io.BytesIO()
    Image.new("L", (12, 14), value).save(file, format=kind)
    return file.getvalue()


def train_feed(found: DataSet, size: int, share: Share = TWO_IMAGES, **options: Any) -> TrainFeed:
    """Return the micro-batches of two steps, of images with ``size`` pixels per side."""
    prepare = Prepare(found.preprocessing, size, CPU)
    return TrainFeed(found.train, share, prepare, **{"seed": 0, "steps": range(2), **options})


def global_batches(
    found: DataSet, size: int, batch_size: int, world: int, accumulate: int, mix: Any = None, **options: Any
) -> list[tuple[torch.Tensor, ...]]:
    """Return each step's images and labels of all ranks, in the order of the global batch.

    ``mix(share)`` returns what mixes a rank's images.
    """
    steps: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for rank in range(world):
        share = Share(batch_size, accumulate, rank, world)
        feed = train_feed(found, size, share, mix=mix and mix(share), **options)
        for index, batch in enumerate(feed):
            steps.setdefault(index // accumulate, []).append(batch[:2])
    return [tuple(map(torch.cat, zip(*parts, strict=True))) for parts in steps.values()]


@pytest.mark.smoke
def test_digits_are_embedded_in_a_split_that_never_changes() -> None:
    digits = data.load(DIGITS)
    assert (len(digits.train), len(digits.val)) == (1437, 360)
    held_out, labels = digits.val[list(range(360))]
    assert labels.bincount().tolist() == [27, 35, 36, 29, 30, 40, 44, 39, 39, 41]
    digest = hashlib.sha256(held_out.numpy().tobytes()).hexdigest()
    assert digest == "a1b64df42a338373212496047eff718ac50a81b6ddde1b3e1a5768a695d0aa16"
    images, labels = digits.train[list(range(1437))]
    assert (images.shape, images.dtype) == ((1437, 1, 8, 8), torch.uint8)
    assert not {*map(bytes, images.flatten(1).numpy())} & {*map(bytes, held_out.flatten(1).numpy())}
    assert labels.unique().tolist() == list(range(10))
    assert images.float().mean().item() == pytest.approx(255 * digits.preprocessing.mean[0], abs=0.01)


def test_cifar_is_read_from_torchvisions_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    pixels = np.arange(6 * 3072, dtype=np.uint8).reshape(6, 3072)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": [0, 1, 2, 3, 4, 9]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(i) for i in range(10)]}))
    with patch.object(CIFAR10, "download", side_effect=OSError("no network")):
        told = refused(data.load, files("cifar100", tmp_path))
    assert re.match(r"data.root=.*no network.*; no cifar100 in .*, and it cannot be fetched", told), told
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *args: True)
    found = data.load(files("cifar10", tmp_path))
    assert (len(found.train), len(found.val), len(found.classes)) == (30, 6, 10)
    images, labels = found.val[[5, 0]]
    assert labels.tolist() == [9, 0]
    assert np.array_equal(images[0].numpy(), pixels[5].reshape(3, 32, 32))


def test_images_in_folders(tmp_path: Path) -> None:
    write_folders(tmp_path)
    config = folder(tmp_path)
    found = data.load(config)
    assert (len(found.train), len(found.val), found.classes) == (4, 4, ("class0", "class1"))
    for part in (found.train, found.val):
        images, labels = part[[0, 3]]
        assert (images.shape, images.dtype) == ((2, 3, 8, 8), torch.uint8)
        assert labels.tolist() == [0, 1]
        assert images[1].unique().tolist() == [11]
    sixteen = np.full((12, 14), 40 << 8, np.uint16)  # grey values of 16 bits
    Image.fromarray(sixteen).save(tmp_path / "val/class0/0.png")
    assert found.val[[0]][0].unique().tolist() == [40]
    Image.fromarray(sixteen.astype(np.float32)).save(tmp_path / "val/class0/1.tif")
    told = refused(data.load(config).val.__getitem__, [2])
    assert "its values are of mode F, expected 8 or 16 bits" in told  # whose range nobody knows
    (tmp_path / "val/class0/1.tif").unlink()
    whole = data.load(folder(tmp_path, image_size=14, resize=None)).val
    resize, crop = whole.transform.transforms[0].transforms
    assert (resize.size, crop.size) == ([16], (14, 14))  # 256 and 224, 16 times smaller
    (tmp_path / "val/class1").rename(tmp_path / "val/cow")
    assert "train has no cow and val has no class1; both need a folder of each" in refused(data.load, config)
    with pytest.raises(UserError, match=r"data.resize=10: expected at least data.eval_size=20"):
        folder(tmp_path, eval_size=20)


PIXELS = np.arange(7 * 4 * 4 * 3).reshape(7, 4, 4, 3).astype(np.uint8)
CLASSES = np.array([0, 1, 2, 1, 0, 2, 1])
MEDMNIST = {
    "train_images": PIXELS,
    "train_labels": CLASSES[:, None],
    "test_images": PIXELS[:2],
    "test_labels": CLASSES[:2, None],
}


def test_arrays_have_channels_last_first_or_none(tmp_path: Path) -> None:
    first = PIXELS.transpose(0, 3, 1, 2)
    none = PIXELS[..., 0]
    for name, train in (("last", PIXELS), ("first", first), ("none", none)):
        held_out = {"val_images": train[2:5], "val_labels": CLASSES[2:5].astype(np.uint8)}
        held_out["test_images"] = train[:2]
        np.savez(tmp_path / f"{name}.npz", **{**MEDMNIST, "train_images": train, **held_out})
        found = data.load(files("arrays", tmp_path / f"{name}.npz"))
        assert (len(found.train), len(found.val)) == (7, 3)  # val goes before test
        assert found.classes == ("0", "1", "2")
        images, labels = found.train[[6, 0]]
        assert labels.tolist() == [1, 0]
        how = found.preprocessing
        assert np.array_equal(images.numpy(), first[[6, 0]] if how.channels == 3 else none[[6, 0]][:, None])
        pixels = first[:, : how.channels] / 255
        assert how.mean == pytest.approx(pixels.mean((0, 2, 3)), abs=1e-4)
        assert how.std == pytest.approx(pixels.std((0, 2, 3)), abs=1e-4)
        assert how.image_size == 4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"test_labels": None}, "no test_labels among train_images, train_labels, test_images; expected an"),
        ({"train_images": PIXELS / 255}, r"train_images are float64 \[7, 4, 4, 3\], not uint8"),
        ({"train_images": PIXELS.reshape(7, -1)}, r"uint8 \[7, 48\], not \[n, height, width\] with channels"),
        ({"test_images": PIXELS[:2, :, :, 0]}, r"test_images have another size or other channels than"),
        ({"train_labels": CLASSES[:6]}, r"train_labels are int64 \[6\], not the class of each image"),
        ({"train_labels": CLASSES / 2}, r"train_labels are float64 \[7\], not the class of each image"),
        ({"train_labels": CLASSES - 1}, "train_labels are from -1 to 1, not 0 to 6"),
        ({"test_labels": CLASSES[:2] + 2}, "test_labels are from 2 to 3, not 0 to 2"),
        ({"train_labels": np.array([{}] * 7)}, "Object arrays cannot be loaded when allow_pickle=False"),
    ],
)
def test_arrays_that_do_not_fit_are_named(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    arrays = {key: value for key, value in (MEDMNIST | changed).items() if value is not None}
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(UserError, match=f"^data.root={tmp_path}/a.npz: .*{message}"):
        data.load(files("arrays", tmp_path / "a.npz"))


def index_lists(images: int, share: Share, seed: int, steps: int, repeats: int = 1) -> list[list[int]]:
    return [request.indices for request in TrainSampler(images, share, seed, range(steps), repeats)]


def test_order_depends_on_seed_and_epoch_alone() -> None:
    assert epoch_order(0, 0, 50).equal(epoch_order(0, 0, 50))
    orders = [tuple(epoch_order(seed, epoch, 50).tolist()) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9
    assert all(sorted(order) == list(range(50)) for order in orders)


def test_repeated_augmentation_shows_what_the_reference_shows() -> None:
    """The same images each epoch, each as often, in the same batches of all ranks together.

    Theirs is torchvision's RASampler (references/classification/sampler.py), which rounds to 256 images.
    """
    repeated = [index for index in epoch_order(5, 0, 96).tolist() for _ in range(3)]
    theirs = [repeated[rank::4][:24] for rank in range(4)]
    ours = index_lists(96, Share(24, 1, 0, 1), 5, 4, 3)
    assert sum(map(len, ours)) == 96
    for step, batch in enumerate(ours):
        per_rank = slice(6 * step, 6 * step + 6)
        assert Counter(batch) == Counter(index for rank in theirs for index in rank[per_rank])
    assert set(Counter(ours[0]).values()) == {3}


def test_copies_are_spread_over_the_ranks() -> None:
    first = index_lists(37, Share(12, 2, 0, 2), 1, 6, 2)
    assert Counter(index for part in first[:2] for index in part).most_common(1)[0][1] == 1
    assert copies_apart(torch.tensor([1, 1, 1, 2, 2, 2, 3]), 3).tolist() == [1, 2, 3, 1, 2, 1, 2]


def test_batches_have_the_size_that_was_asked_for(tmp_path: Path) -> None:
    write_folders(tmp_path)
    config = folder(tmp_path, eval_size=9)
    found = data.load(config)
    feed = train_feed(found, 7)
    assert {batch.images.shape[-1] for batch in feed} == {7}
    # cut to size by the workers, so that no more travels than is needed
    assert {images.shape[-1] for images, _ in feed.loader} == {8}
    prepare = data.Prepare(found.preprocessing, config.side_in_eval, CPU)
    held_out = data.EvalFeed(found.val, Share(2, 1, 0, 1), prepare, workers=0)
    assert {batch.images.shape[-1] for batch in held_out} == {9}
    assert config.sides == {8, 9}


def test_a_limit_takes_some_of_every_class() -> None:
    limited = data.load(replace(DIGITS, limit=5))
    assert (len(limited.train), len(limited.val)) == (5, 5)
    whole = data.load(DIGITS)
    assert torch.equal(limited.train[[0, 4]][0], whole.train[[0, 4 * 1437 // 5]][0])
    assert len(data.load(replace(DIGITS, limit=5000)).train) == 1437


@pytest.mark.parametrize("amount", [0.2, 287])
def test_validation_is_a_fixed_part_of_the_training_images(amount: float) -> None:
    whole = data.load(DIGITS)
    split = data.load(replace(DIGITS, validation=amount))
    assert [len(part) for part in (split.train, split.val, split.test)] == [1150, 287, 360]
    assert torch.equal(split.test[[0, 359]][0], whole.val[[0, 359]][0])
    parts = [set(part.indices.tolist()) for part in (split.train, split.val)]
    assert set.union(*parts) == set(range(1437))
    assert not set.intersection(*parts)
    assert parts[1] == set(data.load(replace(DIGITS, validation=amount)).val.indices.tolist())


def test_validation_is_cut_as_held_out_images_and_refused_where_it_cannot_be_taken(tmp_path: Path) -> None:
    write_folders(tmp_path)
    split = data.load(replace(folder(tmp_path), validation=2, eval_size=9))
    assert [part[[0]][0].shape[-1] for part in (split.train, split.val, split.test) if part] == [8, 9, 9]
    for amount in (1437, 1.5):
        with pytest.raises(UserError, match=f"={amount}: expected a fraction, or fewer than 1437 images"):
            data.load(replace(DIGITS, validation=amount))
    np.savez(tmp_path / "a.npz", **MEDMNIST, val_images=PIXELS, val_labels=CLASSES)
    config = files("arrays", tmp_path / "a.npz")
    assert len(data.load(config).test or ()) == 2
    with pytest.raises(UserError, match="has a validation part; set it to 0"):
        data.load(replace(config, validation=2))


@pytest.mark.parametrize(
    "options",
    [
        *({"augment": Photo(0, policy)} for policy in ("trivial", "rand", "cifar10")),
        *({"augment": Photo(2), "workers": workers} for workers in (0, 1)),
        {"augment": Crops(0)},
        *({"repeats": repeats} for repeats in (2, 7)),
        {"mix": lambda share: Mix(0.3, 1.0, 2, share, 1)},
    ],
)
def test_global_batches_do_not_depend_on_ranks_and_micro_batches(options: dict[str, Any]) -> None:
    pixels = torch.randint(0, 256, (48, 3, 6, 6), dtype=torch.uint8, generator=generator("pixels"))
    arrays = Arrays(pixels, torch.arange(48) % 2)
    data = DataSet(arrays, arrays, "small", Preprocessing.of_arrays(("a", "b"), (0.0,) * 3, (1.0,) * 3, 6))
    state = torch.get_rng_state()
    first, second = global_batches(data, 6, 24, 1, 1, **options)
    assert not torch.equal(first[0].sum(), second[0].sum())
    for world, accumulate in ((1, 12), (2, 3), (4, 1)):
        cut = global_batches(data, 6, 24, world, accumulate, **options)
        for ours, theirs in zip((first, second), cut, strict=True):
            assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    assert torch.equal(state, torch.get_rng_state())


class Squares(torch.utils.data.Dataset[Any]):
    """Ten noisy images of 5×6 pixels."""

    classes = ("a", "b")

    def __init__(self, odd: int = -1) -> None:
        self.odd = odd

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        image = torch.randint(0, 256, (2, 5, 6), dtype=torch.uint8)
        return (image.float() if index == self.odd else image), index % 2


def squares(what: str = "both", image_size: int = 0) -> Any:
    """Return data sets of the user's; `image_size` is what the configuration says."""
    assert image_size == 5
    return {"both": (Squares(), Squares(odd=9)), "one": (Squares(), None), "three": (1, 2, 3)}[what]


def test_a_data_set_of_ones_own() -> None:
    own = ("data._target_=test_data.squares", "data.image_size=5", "allow=[test_data]")

    def loaded(*keys: str) -> data.DataSet:
        config = composed(*own, *keys)
        return data.load(config.data, config.allow)

    found = loaded()
    assert (len(found.train), len(found.val)) == (10, 10)
    assert (found.classes, found.preprocessing.channels) == (("a", "b"), 2)
    first, second = (train_feed(loaded(), 5, steps=range(2)) for _ in range(2))
    for ours, again in zip(first, second, strict=True):  # random changes are those of the image's position
        assert torch.equal(ours.images, again.images)
    split = loaded("data.what=one", "data.validation=0.2", "data.mean=[0.5]", "data.std=[0.25,0.5]")
    assert (len(split.train), len(split.val), split.test) == (8, 2, None)
    assert (split.preprocessing.mean, split.preprocessing.std) == ((0.5, 0.5), (0.25, 0.5))
    for key, message in (
        ("data.what=three", "expected a training set and a validation set"),
        ("data.wat=one", r"unknown key data.wat; did you mean what\? \(valid: what, image_size\)"),
        ("data.mean=[1,1,1]", r"data.mean=\[1.0, 1.0, 1.0\]: expected one value, or 2, one per channel"),
    ):
        with pytest.raises(UserError, match=message):
            loaded(key)
    wrong = r"squares: the validation set: image 9 is torch.float32 \[2, 5, 6\], expected uint8 \[channels"
    with pytest.raises(UserError, match=wrong):
        found.val[[9]]


def test_photographs_as_a_fine_tuner_wants_them(tmp_path: Path) -> None:
    """Without `val/`, and without random crops and mirrors where nothing is augmented."""
    write_folders(tmp_path, 12)
    config = folder(tmp_path)
    shutil.rmtree(tmp_path / "val")
    found = data.load(replace(config, validation=3, interpolation="bicubic", limit=8))
    assert (len(found.train), len(found.val), found.test) == (8, 3, None)
    assert found.val.source.source.transform.transforms[0].transforms[0].interpolation.value == "bicubic"
    for augment, random in (("none", False), ("imagefolder", True)):
        keys = (f"augment={augment}", "data=imagefolder")
        feed, _, _ = feeds(replace(composed(*keys), data=config), found, Share(2, 1, 0, 1), CPU, range(2))
        assert feed.loader.dataset.data.random == random
    image = torch.arange(6.0).view(1, 1, 1, 6)
    assert torch.equal(Photo(0, flip="none")(image, torch.full((1, 8), 0.9)), image)
    assert not torch.equal(Photo(0)(image, torch.full((1, 8), 0.9)), image)


@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 70))
def test_evaluation_counts_every_image_once(images: int, world_size: int, batch_size: int) -> None:
    samplers = [EvalSampler(images, batch_size, Share(1, 1, rank, world_size)) for rank in range(world_size)]
    lists = [list(sampler) for sampler in samplers]
    assert len({tuple(map(len, rank)) for rank in lists}) == 1
    counted = [
        index
        for sampler, rank in zip(samplers, lists, strict=True)
        for batch, indices in enumerate(rank)
        for index in indices[: sampler.valid[batch]]
    ]
    assert sorted(counted) == list(range(images))


def test_batches_are_normalised_and_the_last_one_is_filled_up() -> None:
    images = torch.randint(0, 256, (10, 3, 6, 6), dtype=torch.uint8, generator=generator("test"))
    arrays = Arrays(images, torch.arange(10))
    mean = (10 / 255, 20 / 255, 30 / 255)
    std = (2 / 255, 4 / 255, 8 / 255)
    how = Preprocessing.of_arrays(numbered(10), mean, std, 6)
    with patch("shardtrain.data.feed.EVAL_BATCH", 4):
        batches = list(data.EvalFeed(arrays, Share(4, 1, 0, 1), data.Prepare(how, 6, CPU), workers=0))
    assert [batch.valid for batch in batches] == [4, 4, 2]
    assert torch.allclose(batches[0].images[:, 1], (images[:4, 1].float() - 20) / 4)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_a_worker_starts_does_not_end_it(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(worker: int) -> None:
        os.kill(os.getpid(), number)
        end_with_parent(worker)

    monkeypatch.setattr("shardtrain.data.feed.end_with_parent", late)
    others = {*multiprocessing.active_children()}
    batches = iter(train_feed(data.load(DIGITS), 8, workers=1, steps=range(3)))
    next(batches)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()).isdisjoint(SIGNALS)
    (worker,) = {*multiprocessing.active_children()} - others
    # torchrun and Slurm signal all processes of a job
    subprocess.run(["kill", f"-{int(number)}", str(worker.pid)], check=True)
    assert len(list(batches)) == 2
    worker.terminate()
    worker.join(20)
    assert worker.exitcode == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            ["train/a/1.png", "val/1.png"],
            r"no folder of a class in .*val; expected val/<class>/<image> in .*, or data.validation=0.2",
        ),
        (["train/a/1.png", "val"], r"Not a directory"),
        (["train/cat/notes.txt"], r"no image in .*cat; expected train/<class>/<image> in .*, found train"),
        (["train.tar", "test/a"], r"No such file .*train'; expected .* in .*, found test, train.tar"),
    ],
)
def test_advice_about_folders(tmp_path: Path, make: list[str], message: str) -> None:
    for name in make:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=message):
        data.load(folder(tmp_path))


@pytest.mark.parametrize("place", ["train", "val/class1", "train/class0/deep"])
def test_folders_that_cannot_be_read_are_refused(tmp_path: Path, place: str) -> None:
    write_folders(tmp_path)
    (tmp_path / place).mkdir(exist_ok=True)
    usual = os.scandir

    def scandir(path: Any) -> Any:
        if os.fspath(path) == str(tmp_path / place):
            raise PermissionError(13, "Permission denied", str(path))
        return usual(path)

    told = rf"data\.root={tmp_path}.*: \[Errno 13\] Permission denied: '{tmp_path / place}'; expected "
    # `Path.iterdir` of Python 3.11 and 3.12 calls listdir.
    with patch("os.scandir", scandir), patch("os.listdir", lambda path: [e.name for e in scandir(path)]):
        with pytest.raises(UserError, match=told):
            data.load(folder(tmp_path))
        with pytest.raises(UserError, match=told):
            images_in(tmp_path / place.partition("/")[0])


def test_paths_that_may_not_be_entered_are_mistakes(tmp_path: Path) -> None:
    write_folders(tmp_path)
    keys = {"data.root": tmp_path, "model.weights": tmp_path / "a.pth", "data.table": tmp_path / "a.csv"}
    with closed(tmp_path):
        for key, path in keys.items():
            told = refused(path_of, key, str(path))
            assert told.startswith(f"{key}={path}: [Errno 13] Permission denied: "), told
        assert refused(data.load, folder(tmp_path)).startswith(f"data.root={tmp_path}: [Errno 13] ")


def test_a_folder_that_is_not_there_or_one_too_deep_is_named(tmp_path: Path) -> None:
    write_folders(tmp_path)
    told = refused(data.load, folder(tmp_path / "photoz"))
    assert told == f"data.root={tmp_path}/photoz: there is no such folder; it would be {tmp_path}/photoz"
    for part in ("train", "val"):
        assert refused(data.load, folder(tmp_path / part)) == (
            f"data.root={tmp_path / part}: there is no train in it, but beside it: "
            f"did you mean data.root={tmp_path}?"
        )


LOST = """
import os
import torch.utils.data._utils as torchs
from torch.utils.data import DataLoader
from shardtrain.data.workers import arriving

torchs.MP_STATUS_CHECK_INTERVAL = 0.1  # the time after which a worker that reads for ever is ended

class Items(list):
    def __getitem__(self, index):
        return os.read(os.pipe()[0], 1)

loader = DataLoader(Items([1]), sampler=[0], batch_size=None, num_workers=2, timeout=1)
try:
    next(arriving(loader))
except ValueError as error:
    print(error)
"""


@pytest.mark.long
def test_a_batch_that_never_arrives_is_an_error() -> None:
    """As in files that never answer."""
    done = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    told = r"data.workers=2: no batch has come for 1 s: a worker waits for its files, or has lost the batch; "
    assert re.match(told, done.stdout), done.stdout
    assert done.stdout.count("\n") == 1


def test_hidden_folders_and_files_are_no_classes_and_no_images(tmp_path: Path) -> None:
    write_folders(tmp_path)
    for place in ("train/.Trash", "train/class0/.ipynb_checkpoints"):
        (tmp_path / place).mkdir()
        shutil.copy(tmp_path / "train/class0/0.png", tmp_path / place / "0.png")
    shutil.copy(tmp_path / "train/class0/0.png", tmp_path / "train/class0/._0.png")
    found = data.load(folder(tmp_path))
    assert (len(found.classes), len(found.train), len(found.val)) == (2, 4, 4)

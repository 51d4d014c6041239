"""Which files are images, what of them a run says before it trains, and a dry run that reads all of them."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image

from shardtrain import data
from shardtrain.config.errors import UserError
from shardtrain.data import check
from shardtrain.data.check import require_readable
from shardtrain.plan.__main__ import plan, read
from shardtrain.recipes.photos import images_in, opened_image
from shardtrain.train.loop import train

from tiny import ALONE, CPU, VIT, composed, context, write_folders

PHOTOS: dict[str, Any] = {"image_size": 8, "resize": 8, "workers": 0}


def folder(root: Path, **options: Any) -> Any:
    return replace(composed("data=imagefolder", "data.root=.").data, root=str(root), **PHOTOS | options)


def test_image_files_are_those_that_pillow_decodes(tmp_path: Path, monkeypatch: Any) -> None:
    write_folders(tmp_path, 2)
    place = tmp_path / "train/class0"
    for ending in ("jfif", "gif", "avif", "jp2", "JPE", "apng", "dds"):
        Image.new("RGB", (12, 14)).save(place / f"a.{ending}")
    assert data.load(folder(tmp_path)).notes == ()
    for name in ("b.heic", "c.heic", "film.mpg", "page.eps", "table.h5", "notes", "._0.png"):
        (place / name).touch()
    Image.new("RGB", (12, 14)).save(tmp_path / "train/lonely.png")
    (tmp_path / "val/README.md").touch()
    found = data.load(folder(tmp_path))
    assert len(found.train) == 2 + 7
    assert found.train[[*range(9)]][0].shape == (9, 3, 8, 8)
    assert found.notes == (
        f"left out of {tmp_path}/train: 6 files that Pillow does not read (2 .heic, 1 .eps, 1 .h5, 1 .mpg, "
        "1 without an ending) and 1 image beside the folders of classes",
        f"left out of {tmp_path}/val: 1 file that Pillow does not read (1 .md)",
    )
    paths, notes = images_in(tmp_path / "train")
    assert len(paths) == 10
    assert notes[0].startswith(f"left out of {tmp_path}/train: 6 files that Pillow does not read (2 .heic, ")
    # What another package registers in Pillow is read, too.
    monkeypatch.setitem(Image.EXTENSION, ".heic", "HEIF")
    monkeypatch.setitem(Image.OPEN, "HEIF", (Image.Image, None))
    assert len(images_in(tmp_path / "train")[0]) == 12


def test_grey_images_of_16_bits_that_hold_fewer_are_warned_of(tmp_path: Path) -> None:
    write_folders(tmp_path)
    assert data.load(folder(tmp_path)).notes == ()  # 8 bits in 8
    (tmp_path / "train/class0/0.png").write_bytes(b"")  # which another message is about
    for highest, told in {
        255: "values up to 255, which is 8 bits, and become dark or black, .*: multiply their values by 256",
        4095: "values up to 4095, which is 12 bits, .*: multiply their values by 16",
        12000: "values up to 12000, which is 14 bits, .*: multiply their values by 4",
        40000: "",
    }.items():
        for path in tmp_path.glob("train/*/1.png"):
            Image.fromarray(np.full((12, 14), highest, np.uint16)).save(path)
        notes = data.load(folder(tmp_path)).notes
        assert [bool(re.search(told, note)) for note in notes] == [True] * bool(told)


def test_dark_images_are_counted_beside_bright_ones(tmp_path: Path) -> None:
    """A full-range image, or many of 8 bits, must not hide those that hold 12 of 16 bits."""
    write_folders(tmp_path, 20)
    for name, highest in (("train/class0/1", 40000), ("train/class1/13", 4095), ("val/class0/0", 255)):
        Image.fromarray(np.full((12, 14), highest, np.uint16)).save(tmp_path / f"{name}.png")
    (note,) = data.load(folder(tmp_path)).notes
    assert note.startswith("warning: 2 of 3 16-bit grey images that were looked at have values up to 4095, ")
    (tmp_path / "val/class0/0.png").unlink()
    assert "warning: 1 of 2 " in data.load(folder(tmp_path)).notes[0]


def test_pgm_of_12_bits_is_read_as_bright_as_it_is(tmp_path: Path) -> None:
    """Pillow scales its values to 16 bits, unlike those of other files."""
    write_folders(tmp_path)
    (tmp_path / "train/class0/0.png").unlink()
    path = tmp_path / "train/class0/0.pgm"
    path.write_bytes(b"P5 14 12 4095\n" + np.full((12, 14), 2048, ">u2").tobytes())
    found = data.load(folder(tmp_path))
    assert found.notes == ()
    assert np.asarray(opened_image(found.train.source, 0)).max() == 128


def test_classes_without_a_training_image_are_refused_or_named(tmp_path: Path) -> None:
    pixels = np.zeros((6, 4, 4), np.uint8)
    config = replace(composed("data=arrays", "data.root=.").data, root=f"{tmp_path}/a.npz")
    for labels, absent in (
        ([1, 2, 3, 1, 2, 3], "class 0 of 0 to 3"),
        ([0, 3, 0, 3, 0, 3], "class 1; 2 of 0 to 3"),
    ):
        parts = {"train_labels": labels, "test_labels": labels}
        np.savez(tmp_path / "a.npz", train_images=pixels, test_images=pixels, **parts)
        with pytest.raises(UserError, match=f"no training image of {absent}; each needs some; expected an"):
            data.load(config)
    write_folders(tmp_path, 4)
    (tmp_path / "train/class1/1.png").unlink()
    # Whichever is held out of three, with half of them one class may be left without.
    split = [data.load(folder(tmp_path, validation=0.7, split=number)) for number in range(3)]
    for found in split:
        absent_names = [name for name, count in found.counts["train"].items() if not count]
        assert found.notes == tuple(f"warning: no training image of {name}" for name in absent_names)
    assert any(found.notes for found in split)


class FromOne(list[Any]):
    """Labels from 1, and no names of classes."""


def from_one() -> Any:
    items = FromOne((torch.zeros(1, 4, 4, dtype=torch.uint8), 1 + number % 2) for number in range(6))
    return items, items


def test_labels_of_a_function_begin_at_0() -> None:
    config = composed("data._target_=test_image_files.from_one", "allow=[test_image_files]")
    message = "the training set: no training image of class 0 of 0 to 2; each needs some; an attribute `cl"
    with pytest.raises(UserError, match=message):
        data.load(config.data, config.allow)


def broken(root: Path) -> list[Path]:
    """Break five images, of both parts; return them."""
    write_folders(root, 20)
    paths = [*sorted(root.glob("train/*/*"))[::6], *sorted(root.glob("val/*/*"))[:1]]
    for path in paths:
        path.write_bytes(path.read_bytes()[:40])
    assert len(paths) == 5
    return paths


ON_FOLDERS = ("data=imagefolder", "data.image_size=16", "data.resize=16", "data.workers=0")


def test_a_check_reads_every_image_and_lists_those_that_it_cannot(tmp_path: Path) -> None:
    root = tmp_path / "images"
    broken(root)
    said: list[str] = []
    config = composed(*ON_FOLDERS, f"data.root={root}").data
    found = data.load(config)
    parts = {"train": found.train_as_val, "val": found.val, "test": None}
    told = r"^data=imagefolder: 5 of 40 images cannot be read; they are listed"
    sizes = patch.multiple(check, CHUNK=3, REPORTS=2)
    with sizes, pytest.raises(UserError, match=told):
        require_readable(parts, config, said.append)
    bad = sorted(line.split()[4].rstrip(":") for line in said if line.startswith("cannot read the image "))
    assert bad == sorted(str(path) for path in root.glob("*/*/*") if path.stat().st_size <= 40)
    progress = [line for line in said if line.endswith(" images read")]
    assert progress[-1] == "val: 20 of 20 images read"
    assert progress[0] == "train: 12 of 20 images read"


def test_a_check_lists_all_images_where_a_run_stops_at_the_first(tmp_path: Path, capsys: Any) -> None:
    """An augmentation is tried on image 0 before the first step."""
    broken(tmp_path)
    keys = (*VIT, "train.batch_size=4", *ON_FOLDERS, f"data.root={tmp_path}", "augment=photo")
    settings = read([*keys, "check=true"], False)
    assert settings is not None
    with pytest.raises(UserError, match="5 of 40 images cannot be read"):
        plan(settings, ALONE, CPU)
    assert capsys.readouterr().out.count("cannot read the image") == 5
    told = r"^cannot read the image .*; python -m shardtrain.plan … check=true lists all images that cannot"
    with pytest.raises(UserError, match=told):
        train(composed(*keys, "augment.policy=trivial"), context(tmp_path / "run"))
    with pytest.raises(UserError, match=r"^model.weights=nowhere.pth: there is no such file"):
        plan(read([*keys, "check=true", "model.weights=nowhere.pth"], False), ALONE, CPU)


class Failing(FromOne):
    """A data set whose fourth image raises what no program expects."""

    classes = ("a", "b")

    def __getitem__(self, index: Any) -> Any:
        if index == 3:
            raise OSError("no such\nkey")
        return super().__getitem__(index)


def failing() -> Any:
    items = Failing((torch.zeros(1, 4, 4, dtype=torch.uint8), number % 2) for number in range(600))
    return items, items


def test_a_data_set_of_ones_own_is_read_too() -> None:
    config = composed("data._target_=test_image_files.failing", "allow=[test_image_files]")
    found = data.load(config.data, config.allow)
    said: list[str] = []
    with pytest.raises(UserError, match=r"^data=own: 1 of 600 images cannot be read"):
        require_readable({"train": found.train}, config.data, said.append)
    assert said[0].startswith("image 3 of train: OSError: no such (")

"""Photographs in folders, tar files and Hugging Face's data sets; and those that cannot be read."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from shardtrain.job import data
from shardtrain.job.config import HuggingFace, WebDataset
from shardtrain.job.schema import UserError

from test_data import PHOTOS, encoded, folder, write_folders
from tiny import train_feed


def shards(root: Path, **options: Any) -> WebDataset:
    names = {"train": "train-*.tar", "val": "val.tar"}
    return WebDataset(**{**PHOTOS, **names, "name": "webdataset", "root": str(root), **options})


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def feed(found: data.DataSet, workers: int = 0) -> list[data.Batch]:
    return list(train_feed(found, 8, workers=workers))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            ["train/a/1.png", "val/1.png"],
            r"find any class folder in .*val.*; expected val/<class>/<image> in ",
        ),
        (["train/a/1.png", "val"], r"Not a directory"),
        (["train/cat/notes.txt"], r"Found no valid file for the classes cat"),
        (["train.tar", "test/a"], r"No such file .*train'; expected .* in .*, found test, train.tar"),
        ([], r"No such file .*train'; expected .*, found nothing"),
    ],
)
def test_advice_about_folders(tmp_path: Path, make: list[str], message: str) -> None:
    for name in make:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=message):
        data.load(folder(tmp_path))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_corrupt_image_is_named(tmp_path: Path, workers: int) -> None:
    config = write_folders(tmp_path)
    broken = tmp_path / "train/class1/0.png"
    broken.write_bytes(broken.read_bytes()[:40])
    with pytest.raises(UserError) as caught:
        feed(data.load(config), workers)
    assert str(caught.value).startswith(f"cannot read the image {broken}: ")
    assert "\n" not in str(caught.value)


def test_tar_files_give_what_folders_give(tmp_path: Path) -> None:
    """The same images in the same order: the same batches, bit for bit."""
    in_folders = data.load(write_folders(tmp_path / "folders", 6))
    members = {}
    for index in range(6):
        label, number = divmod(index, 3)
        members[f"a/{index:03}.png"] = encoded(10 * label + number)
        members[f"a/{index:03}.cls"] = f"{label}\n".encode()
    items = list(members.items())
    write_tar(tmp_path / "train-0.tar", dict(items[:8]))
    write_tar(tmp_path / "train-1.tar", dict(items[8:]))
    write_tar(tmp_path / "val.tar", members)
    for _ in range(2):  # from the headers, then from the index beside the shard
        found = data.load(shards(tmp_path))
        assert (len(found.train), len(found.val), found.classes) == (6, 6, 2)
        for ours, theirs in zip(feed(found), feed(in_folders), strict=True):
            assert torch.equal(ours.images, theirs.images)
            assert torch.equal(ours.labels, theirs.labels)
        assert (tmp_path / "train-1.tar.index").is_file()
    write_tar(tmp_path / "train-1.tar", dict(items[:2]))  # another shard of that name
    assert len(data.load(shards(tmp_path)).train) == 5


def test_an_index_that_cannot_be_kept_is_done_without(tmp_path: Path) -> None:
    write_tar(tmp_path / "val.tar", {"0.jpg": encoded(1, "jpeg"), "0.cls": b"4"})
    (tmp_path / "val.tar.index").mkdir()
    found = data.load(shards(tmp_path, train="val.tar"))
    assert (len(found.train), found.classes) == (1, 5)
    assert {path.name for path in tmp_path.iterdir()} == {"val.tar", "val.tar.index"}
    (tmp_path / "val.tar.index").rmdir()
    for damaged in (b"no array", b""):
        (tmp_path / "val.tar.index").write_bytes(damaged)
        assert len(data.load(shards(tmp_path, train="val.tar")).train) == 1


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"0.jpg": b"x"}, r"val.tar: 0 has no label \(.cls\)"),
        ({"b/1.cls": b"1"}, r"val.tar: b/1 has no image \(.jpg, .png, …\)"),
        ({"0.jpg": b"x", "0.cls": b"cat"}, r"val.tar: 0.cls holds 'cat', expected the number of a class"),
        ({"0.txt": b"x"}, r"val.tar: no images in it; expected <key>.jpg and <key>.cls"),
        (None, r"val.tar: .*; expected an uncompressed tar file"),
    ],
)
def test_tar_files_that_do_not_fit_are_named(
    tmp_path: Path, members: dict[str, bytes] | None, message: str
) -> None:
    if members is None:
        (tmp_path / "val.tar").write_bytes(b"this is not a tar file" * 100)
    else:
        write_tar(tmp_path / "val.tar", members)
    with pytest.raises(UserError, match=message):
        data.load(shards(tmp_path, train="val.tar"))


def test_a_corrupt_image_in_a_tar_file_is_named(tmp_path: Path) -> None:
    write_tar(tmp_path / "val.tar", {"0.jpg": b"no image", "0.cls": b"0"})
    with pytest.raises(UserError, match=r"cannot read the image of 8 bytes from byte \d+ of .*val.tar: "):
        data.load(shards(tmp_path, train="val.tar")).val[[0]]
    with pytest.raises(UserError, match=r"data.train=train-\*.tar: no such file in data.root="):
        data.load(shards(tmp_path))


def hub(root: Path, **options: Any) -> HuggingFace:
    names = {"train": "train", "val": "test", "image": "image", "label": "label"}
    return HuggingFace(**{**PHOTOS, **names, "name": "huggingface", "root": str(root), **options})


def test_hugging_faces_package_is_an_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(
        UserError, match=r"data=huggingface needs its package: pip install 'shardtrain\[hugging"
    ):
        data.load(hub(tmp_path))


def test_hugging_faces_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One saved by the package, and a folder of images that it loads itself."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    datasets.disable_progress_bars()
    in_folders = data.load(write_folders(tmp_path / "images"))
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["class0", "class1"])}
    )
    rows = {"image": [{"bytes": encoded(v), "path": None} for v in (0, 1, 10, 11)], "label": [0, 0, 1, 1]}
    part = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(str(tmp_path / "saved"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for config in (hub(tmp_path / "saved"), hub(tmp_path / "images", val="validation")):
        found = data.load(config)
        assert (len(found.train), len(found.val), found.classes) == (4, 4, 2)
        for ours, theirs in zip(feed(found), feed(in_folders), strict=True):
            assert torch.equal(ours.images, theirs.images)
    for options, message in [
        ({"val": "tset"}, r"data.val=tset: .* has no such split; did you mean test\? \(valid: train, test\)"),
        ({"label": "lable"}, r"data.label=lable: .* has no such column; did you mean label\?"),
        ({"root": str(tmp_path / "none")}, r"data.root=.*none: datasets cannot load it: "),
    ]:
        with pytest.raises(UserError, match=message):
            data.load(hub(**{"root": tmp_path / "saved", **options}))

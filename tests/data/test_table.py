"""Photographs of mixed sizes whose labels are in a table, and data sets that users' functions return."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from shardtrain import data
from shardtrain.config.errors import UserError
from shardtrain.data import Share
from shardtrain.data.items import Items
from shardtrain.data.preprocessing import Preprocessing
from shardtrain.data.sets import stratified

from tiny import CPU, composed

LABELS = ["dog"] * 10 + ["cat"] * 6 + ["bird"] * 4


def write_table(root: Path, text: str | None = None, images: int = len(LABELS), **keys: Any) -> Any:
    """Write images of grey value 10 × number, no two of one size, and a table; return the configuration."""
    for number in range(images):
        Image.new("L", (12 + number, 30 - number), 10 * number).save(root / f"{number}.png")
    lines = [f"{number}.png,{label}" for number, label in enumerate(LABELS)]
    (root / "labels.csv").write_text(
        "\n".join(["image,label", *lines]) if text is None else text, encoding="utf-8-sig"
    )
    config = composed("data=csv", "data.root=.", "data.table=.", "data.image_size=8", "data.workers=0").data
    return replace(config, root=str(root), table=f"{root}/labels.csv", **keys)


def held_out(found: data.DataSet) -> list[int]:
    return found.val.indices.tolist()  # type: ignore[attr-defined, no-any-return]


def test_a_table_gives_labels_and_a_split_of_every_class(tmp_path: Path) -> None:
    config = write_table(tmp_path, validation=0.5)
    found = data.load(config)
    assert found.classes == ("bird", "cat", "dog")
    counts = {"bird": 2, "cat": 3, "dog": 5}
    assert found.counts == {"train": counts, "val": counts}
    images, labels = found.val[[*range(10)]]
    assert images.shape == (10, 3, 8, 8)
    names = [found.classes[label] for label in labels]
    assert names == [LABELS[number] for number in held_out(found)]
    assert images[:, 0, 4, 4].tolist() == [10 * number for number in held_out(found)]
    assert held_out(data.load(config)) == held_out(found) != held_out(data.load(replace(config, split=1)))
    assert found.train.random
    assert not found.val.random


def test_every_beginning_of_a_stratified_order_has_about_the_same_part_of_each_class() -> None:
    labels = torch.tensor([0] * 50 + [1] * 28 + [2] * 12)
    order = stratified(labels, split=3)
    assert order.sort().values.tolist() == [*range(90)]
    for count in range(91):
        found = labels[order[:count]].bincount(minlength=3)
        assert (found - count * labels.bincount() / 90).abs().max() <= 1


def test_a_table_has_a_split_of_its_own_and_numbers_for_labels(tmp_path: Path) -> None:
    rows = ["0.png,10,train", "1.png,9,train", " 2.png , 9 , val", '"3.png","10",test']
    config = write_table(tmp_path, "\n".join(["image, label, split", *rows]))
    found = data.load(config)
    assert found.classes == ("9", "10")
    assert found.counts == {"train": {"9": 1, "10": 1}, "val": {"9": 1, "10": 0}, "test": {"9": 0, "10": 1}}
    assert found.test is not None
    assert found.test[[0]][0].unique().tolist() == [30]
    assert found.notes == ()
    Image.fromarray(np.full((9, 9), 4095, np.uint16)).save(tmp_path / "3.png")
    assert (
        data.load(config).notes[0].startswith("warning: 1 of 1 16-bit grey images that were looked at have")
    )
    found = data.load(write_table(tmp_path, "split,label,image\ntest,1,0.png\ntrain,1,1.png"))
    assert "no row has split=val, so those of split=test decide the best step" in found.notes[0]
    assert (len(found.val), found.test) == (1, None)  # what is not trained on is what training is judged by


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["image;label", "0.png;a"], "its first line has image;label; expected a CSV file with the columns"),
        (["image,label"], "no line follows the first"),
        (["image,label", "0.png"], "line 2 has no label"),
        (["image,label,split", "0.png,a,valid"], "line 2 has split=valid; did you mean val? (valid: train,"),
        (["image,label", "0.png,a,b"], "line 2 has more cells than the first line; a text with a comma goes"),
        (["image,label", "0.png,a", "./0.png,b"], "0.png and ./0.png is in 2 lines; expected each image"),
        (["image,label", "x/../0.png,a", "{root}/0.png,b"], "x/../0.png and {root}/0.png is in 2 lines; ex"),
        (["image,label", "0.png,a", "x.png,b", "y.png,b"], "2 of 3 images are not in data.root={root}: x.pn"),
        (["image,label", "0.png,a"], "no image to evaluate by; data.validation=0.2 holds out a fifth of eac"),
        (["image,label,split", "0.png,a,train", "1.png,b,val"], "no training image of b; each class needs"),
        (["image,label", '"0.png,a'], "unexpected end of data; expected a CSV file"),
    ],
)
def test_mistakes_in_a_table_are_named(tmp_path: Path, rows: list[str], message: str) -> None:
    config = write_table(tmp_path, "\n".join(rows).format(root=tmp_path), images=2)
    (tmp_path / "x").mkdir()
    with pytest.raises(UserError) as caught:
        data.load(config)
    assert str(caught.value).startswith(f"data.table={tmp_path}/labels.csv: ")
    assert message.format(root=tmp_path) in str(caught.value)


def test_labels_that_are_nan_come_after_numbers(tmp_path: Path) -> None:
    rows = [f"{number}.png,{label}" for number, label in enumerate(["10", "nan", "9", "1.0", "1"])]
    found = data.load(write_table(tmp_path, "\n".join(["image,label", *rows]), validation=1))
    assert found.classes == ("1", "1.0", "9", "10", "nan")
    assert found.notes[0] == "warning: nan is a class, perhaps of labels that are missing"


def test_class_names_are_given_where_a_data_set_has_none(tmp_path: Path) -> None:
    ten = tuple("abcdefghij")
    assert data.load(replace(composed("data=digits").data, classes=ten)).classes == ten
    config = write_table(tmp_path, validation=2, classes=("bird", "cat", "dog"))
    assert data.load(config).classes == ("bird", "cat", "dog")
    told = r"\[dog,cat,bird\]: the classes of csv .* have names: bird, cat, dog"
    with pytest.raises(UserError, match=told):
        data.load(replace(config, classes=("dog", "cat", "bird")))


class Mixed(list[Any]):
    """Items of a list, as a data set."""

    classes: Any = ("a", "b")


class Targets(Mixed):
    """Items whose labels are known before they are read."""

    targets = np.array([1, 1])


def picture(width: int = 9, height: int = 9, mode: str = "RGB") -> Image.Image:
    return Image.new(mode, (width, height))


ONE = Preprocessing.of_arrays(("a",), (0.0,), (1.0,), 8)
GOOD = [(picture(), 0), (picture(), 1)]
RETURNED: dict[str, Any] = {
    "generator": (iter(GOOD), GOOD),
    "empty": (GOOD, []),
    "alone": ([picture()], GOOD),
    "array": ([(np.zeros((9, 8, 3), np.uint8), 0)], GOOD),
    "palette": ([(picture(mode="P"), 0)], GOOD),
    "name": ([(picture(), "cat")], GOOD),
    "label": (GOOD, [(picture(), 2)]),
    "negative": ([(picture(), -1)], GOOD),
    "mixed": (Mixed([*GOOD, (picture(12, 6), 1)]), GOOD),
    "grey": (GOOD, [(picture(mode="L"), 0)]),
    "number": (type("Ten", (Mixed,), {"classes": 10})(GOOD), GOOD),
    "targets": (Targets(GOOD), GOOD),
    "ours": data.DataSet(None, None, "", replace(ONE, classes=10)),  # type: ignore[arg-type]
}


def returned(what: str) -> Any:
    return RETURNED[what] if isinstance(RETURNED[what], data.DataSet) else tuple(RETURNED[what])


def sized(image_size: int) -> Any:
    return GOOD, [(picture(image_size, 5 * image_size), 0)]


def of_own(function: str, image_size: int = 0, **keywords: str) -> data.DataSet:
    config = composed("data._target_=test_table.returned", "allow=[test_table]")
    target = f"test_table.{function}"
    keys: Any = replace(config.data, _target_=target, image_size=image_size, keywords=keywords)
    return data.load(keys, config.allow)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("generator", "the training set is a list_iterator, expected a data set with items[i] and len(items"),
        ("empty", "the validation set is empty"),
        ("alone", "the training set: item 0 is a Image, expected (image, label)"),
        ("array", "image 0 is uint8 [9, 8, 3], expected uint8 [channels, height, width] or an image of Pill"),
        ("palette", 'image 0 is of mode P; image.convert("RGB") gives 8 bits per channel'),
        ("name", "the label of image 0 is 'cat', expected the number of a class"),
        ("label", "the validation set: the label of image 0 is 2, expected 0 to 1; an attribute `classes` o"),
        ("negative", "the training set: the label of image 0 is -1, expected 0 or more; an"),
        ("mixed", "image 2 is [3, 6, 12], image 0 of the training set is [3, 9, 9]; data.image_size=N resiz"),
        ("grey", "image 0 is [1, 9, 9], image 0 of the training set is [3, 9, 9]; image.convert("),
        ("number", "the training set has classes=10, expected a list of names, by label"),
        ("ours", "classes is 10, expected a tuple of names, by label"),
    ],
)
def test_what_a_function_returns_is_refused_by_name_and_shape(what: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        of_own("returned", what=what).val[[0]]
    assert str(caught.value).startswith("data._target_=test_table.returned: ")
    assert message in str(caught.value)


def test_images_of_mixed_sizes_are_cropped_to_the_size_that_is_asked_for() -> None:
    found = of_own("returned", 6, what="mixed")
    images, labels = found.train[[0, 2]]
    assert (images.shape, labels.tolist(), found.preprocessing.resize) == ((2, 3, 6, 6), [0, 1], 6)
    found = of_own("sized", 6)  # whose function takes the size
    assert found.val[[0]][0].shape == (1, 3, 6, 6)
    told = r"^data: .*missing 1 required .*'image_size'; \S+.sized does not take"
    with pytest.raises(UserError, match=told):
        of_own("sized")


def test_a_wrong_item_in_a_worker_has_no_traceback() -> None:
    prepare = data.Prepare(ONE, 9, CPU)
    wrong = Items([(picture(), "cat")], "found")
    with pytest.raises(UserError) as caught:
        next(iter(data.EvalFeed(wrong, Share(1, 1, 0, 1), prepare, workers=1)))
    assert str(caught.value) == "found: the label of image 0 is 'cat', expected the number of a class"


def test_labels_that_are_known_are_counted() -> None:
    assert of_own("returned", what="label").counts == {}
    assert of_own("returned", what="targets").counts == {"train": {"a": 0, "b": 2}}

"""What a run continues with: the same images of each class, and a learning rate that goes on."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardtrain import comm
from shardtrain.job.errors import UserError
from shardtrain.train.loop import train

from pool import each_rank
from tiny import QUIET, VIT, composed, context, result_of, write_folders

SHORT = (
    *("data=imagefolder", "data.image_size=8", "data.resize=8", "data.workers=0", "train.batch_size=4"),
    *("train.epochs=2", "sched.warmup_epochs=0", "optim.lr=0.05", "augment=none", QUIET),
)


def ending(root: Path, run: str, *words: str) -> str:
    """Train on the images in ``root``; return what the run says at its start, or its mistake."""
    place = root.parent / run
    try:
        train(composed(*SHORT, *VIT, f"data.root={root}", *words), context(place))
    except UserError as error:
        return str(error)
    finally:
        comm.barrier()
    return (place / "log.txt").read_text()


def trained(tmp_path: Path) -> Path:
    """Return the images of a run that has ended, `tmp_path/run`."""
    root = tmp_path / "images"
    if comm.rank() == 0:
        write_folders(root, 16)
    comm.barrier()
    assert "error" not in ending(root, "run")
    return root


def move(root: Path, source: str, target: str) -> None:
    if comm.rank() == 0:
        shutil.move(root / source, root / target)
    comm.barrier()


@each_rank(1, transport="auto")
def test_images_that_moved_to_another_class_are_named(tmp_path: Path) -> None:
    root = trained(tmp_path)
    move(root, "train/class0/0.png", "train/class1/00.png")
    said = ending(root, "run", "train.epochs=3")
    expected = (
        "with images of class class0=8, this one has 7; images of class class1=8, this one has 9; choose"
    )
    assert expected in said
    way_out = re.search(r"; (resume=\S+) continues it with other settings$", said)
    assert way_out is not None
    assert "continuing after step 8 of 12" in ending(root, "other", "train.epochs=3", way_out[1])
    assert "this one has 7; images of class class1=8, this one has 9, and it has no step" in ending(
        root, "run"
    )
    move(root, "train/class1/00.png", "train/class0/0.png")
    move(root, "val/class0/0.png", "val/class1/00.png")
    said = ending(root, "run", "train.epochs=3")
    assert "warning: the validation images have changed (class0 8 → 7; class1 8 → 9): scores" in said
    assert "continuing after step 8 of 12" in said


def test_labels_of_a_table_that_were_exchanged_are_noticed(tmp_path: Path) -> None:
    """As many images of each class as before."""
    root = tmp_path / "images"
    write_folders(root, 16)
    files = sorted(path.relative_to(root) for path in root.glob("train/*/*"))
    labels = [path.parent.name for path in files]
    words = ("data=csv", f"data.table={tmp_path}/labels.csv", "data.validation=0.5")

    def write() -> None:
        lines = [f"{path},{label}" for path, label in zip(files, labels, strict=True)]
        (tmp_path / "labels.csv").write_text("\n".join(["image,label,split", *lines]).replace(",split", ""))

    write()
    assert "error" not in ending(root, "run", *words)
    labels.reverse()
    write()
    said = ending(root, "run", *words, "train.epochs=3")
    assert re.search(
        r"with labels of the images \(their digest\)=\w{16}, this one has \w{16}; choose", said
    ), said


@pytest.mark.parametrize(
    ("first", "then", "told"),
    [
        ("", "train.epochs=4", r"train.epochs=2 → 4: .* from 0.0019 in step 8 to 0.025 in step 9"),
        pytest.param(
            "sched=linear",
            "train.epochs=4",
            r"from 0.00625 in step 8 to 0.025 in step 9, since sched=linear ends",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "train.max_steps=5",
            "train.max_steps=null",
            "train.max_steps=5 → null: .* from 0.00477 in step 5 to 0.0154 in step 6",
            marks=pytest.mark.long,
        ),
        pytest.param("sched=constant", "train.epochs=4", None, marks=pytest.mark.long),
        pytest.param("sched=step sched.epochs=[1]", "train.epochs=4", None, marks=pytest.mark.long),
    ],
)
def test_a_length_that_makes_the_learning_rate_jump_is_named(
    tmp_path: Path, first: str, then: str, told: Any
) -> None:
    root = tmp_path / "images"
    write_folders(root, 16)
    assert "jumps" not in ending(root, "run", *first.split())
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    words = [*(word for word in first.split() if "max_steps" not in word), then]
    said = ending(root, "again", *words)
    if told is None:
        assert "jumps" not in said
        return
    assert re.search(f"warning: .*{told}", said), said
    # What the line advises continues at the last rate.
    advice = re.search(r"; resume=(\S+) run.name=NEW (.*) goes on at the last rate", said)
    assert advice is not None
    before = advice[1].replace("/again/", "/run/")
    ending(root, "new", then, *advice[2].split(), f"resume={before}")
    result = result_of(tmp_path / "new")
    assert (result["status"], result["lr/group0"]) == ("finished", float(advice[2].rpartition("=")[2]))

"""What a run continues with: the same images of each class, and a learning rate that goes on."""

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from shardtrain import __version__, comm
from shardtrain.config.command import EVERYTHING, require_version
from shardtrain.config.config import Config
from shardtrain.config.errors import UserError
from shardtrain.config.marks import Change, changed_keys, record_of
from shardtrain.config.schema import flat
from shardtrain.train.continuation import forgotten, named_of, refused
from shardtrain.train.loop import train

from key_table import ROWS, keys_of
from pool import each_rank
from tiny import QUIET, VIT, commanded, composed, context, write_folders

SHORT = (
    *("data=imagefolder", "data.image_size=8", "data.resize=8", "data.workers=0", "train.batch_size=4"),
    *("train.epochs=2", "sched.warmup_epochs=0", "optim.lr=0.05", "augment=none", QUIET),
)


def ending(root: Path, run: str, *words: str) -> str:
    """Train on the images in ``root``; return what the run says at its start, or its mistake."""
    place = root.parent / run
    try:
        command = (*SHORT, *VIT, f"data.root={root}", *words)
        train(composed(*command), context(place, *command))
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
    moved = r"train labels \(their digest\)=\w{16}, this one has \w{16}"
    assert re.search(f"with {moved}; choose", said), said
    way_out = re.search(r"; (resume=\S+) continues it with other settings$", said)
    assert way_out is not None
    assert "continuing after step 8 of 12" in ending(root, "other", "train.epochs=3", way_out[1])
    assert re.search(f"{moved}, and it has no step", ending(root, "run"))
    move(root, "train/class1/00.png", "train/class0/0.png")
    move(root, "val/class0/0.png", "val/class1/00.png")
    said = ending(root, "run", "train.epochs=3")
    moved = moved.replace("train", "val")
    assert re.search(rf"warning: the validation data have changed \({moved}\): scores", said), said
    assert "continuing after step 8 of 12" in said


def test_labels_of_a_table_that_were_exchanged_are_noticed(tmp_path: Path) -> None:
    """As many images of each class as before."""
    root = tmp_path / "images"
    write_folders(root, 16)
    files = sorted(path.relative_to(root) for path in root.glob("train/*/*"))
    labels = [path.parent.name for path in files]
    words = ("data=csv", f"data.table={tmp_path}/labels.csv", "data.validation=0.5")

    def ending_of_table(*more: str) -> str:
        lines = [f"{path},{label}" for path, label in zip(files, labels, strict=True)]
        (tmp_path / "labels.csv").write_text("\n".join(["image,label", *lines]))
        return ending(root, "run", *words, *more)

    assert "error" not in ending_of_table()
    labels.reverse()
    told = r"with train labels \(their digest\)=\w{16}, this one has \w{16}; choose"
    assert re.search(told, ending_of_table("train.epochs=3"))


PHOTOS = "data=imagefolder data.root=photos"
# Words of a command, and after the & a key with another value than its usual one, for keys without a row in
# `key_table.py`.
OTHER_VALUES = """
& device=cpu
& threads=1
& data.workers=1
& model.weights=w.pth
& model.reset_head=true
& model.freeze=[body]
& train.loss={_target_:torch.nn.MultiMarginLoss}
& train.channels_last=true
& train.capture=true
& train.best=loss/val
& train.hooks=[a.Hook]
& monitor.scores=[]
& parallel.compile=true
& parallel.offload=true
& parallel.activation_checkpoint=true
& parallel.virtual_ranks=2
parallel.virtual_ranks=2 & train.replay_every=2
& checkpoint.memory_every_steps=1
& data.classes=[a,b]
& data.eval_size=9
data=imagefolder & data.root=elsewhere
data=imagefolder & data._target_=shardtrain.recipes.table.image_table
data=csv data.root=a & data.table=b
& optim=adamw
& augment=none
& model=resnet34
& data=fake
"""
# Keys that a run may continue with another value of.
MAY_CHANGE = """
checkpoint.every_steps checkpoint.keep checkpoint.memory_every_steps data.root data.table data.workers device
monitor.profile_at monitor.scores monitor.writers parallel.activation_checkpoint parallel.compile
parallel.layout parallel.offload parallel.replicate parallel.reshard_after_forward parallel.virtual_ranks
threads train.accumulate train.best train.capture train.channels_last train.epochs train.eval_every
train.hooks train.log_every train.max_steps train.patience train.replay_every
"""


# Rows that need words of `FOUR_STEPS`, and one whose value is the usual one without them.
REPLACED = {
    "data.channels=3": "data=fake & data.channels=4",
    "{photos} & data.resize=20": f"{PHOTOS} data.image_size=8 & data.resize=20",
    "monitor.writers=[tensorboard]": "monitor.writers=[]",
}


def words_by_key() -> Iterator[tuple[list[str], str]]:
    """Yield the words of a command, and a further one that gives a key another value."""
    for _, row in ROWS:
        text = REPLACED.get(row, row)
        both, _, change = text.replace("{photos}", PHOTOS).replace("{units}", "").rpartition(" & ")
        name = change.partition("=")[0]
        yield [word for word in both.split() if not word.startswith(("SHARDTRAIN", f"{name}="))], change
    for line in OTHER_VALUES.strip().splitlines():
        both, _, change = line.partition("& ")
        yield both.split(), change


def changes_of(saved: Sequence[str], words: Sequence[str]) -> list[Change]:
    """Return what the command ``words`` changes in a run of the command ``saved``."""
    return changed_keys(record_of(composed(*saved)), dataclasses.asdict(composed(*words)))


def usual_word(words: Sequence[str], name: str) -> str:
    """Return the word that names the usual value of a key."""
    groups = {"optim": "sgd", "model": "resnet18", "data": "digits", "augment": "digits"}
    if name in groups:
        return f"{name}={groups[name]}"
    value = flat(dataclasses.asdict(composed(*words)))[name]
    return f"{name}={json.dumps(value)}"


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.long)])
def test_every_key_is_silent_printed_or_refused(part: int) -> None:
    seen = set()
    may_change = {*MAY_CHANGE.split()}
    for number, (words, change) in enumerate(words_by_key()):
        name = change.partition("=")[0]
        seen.add(name)
        if number % 2 != part:
            continue
        command = [*words, change]
        assert changes_of(command, command) == [], change
        if name != "data.table":  # which has to be given
            left_out = changes_of(command, words)
            assert left_out, change
            assert named_of(left_out, commanded(*words).words) == [], change
            assert named_of(left_out, EVERYTHING) == left_out  # with config=FILE every key is named
        usual = [*words, "data.table=c" if name == "data.table" else usual_word(words, name)]
        changes = changes_of(command, usual)
        named = named_of(changes, commanded(*usual).words)
        assert named, change
        is_printed = named == changes and not refused(named, strict=True)
        assert is_printed == (name in may_change), change
    assert may_change <= seen
    assert keys_of(Config) - seen == {"allow", "config", "resume", "run.name", "run.dir", "optim._target_"}


def test_what_belongs_to_the_command_is_no_change() -> None:
    words = ["run.name=a", "resume=none", "allow=[mine]"]
    assert changes_of(words, ["run.dir=b"]) == []
    assert changes_of(["run.name=a"], ["run.name=a", "seed=3"])[0].in_words() == "seed=0, this one has 3"


def test_the_line_to_paste_keeps_what_the_command_names() -> None:
    saved = ["run.name=a", "optim.lr=0.5", "train.epochs=3"]
    words = ["run.name=a", "train.epochs=4", "allow=[mine]", "data=digits", "seed=0"]
    changes = changes_of(saved, words)
    given = commanded(*words).words
    named = named_of(changes, given)
    left_out = [each for each in changes if each not in named]
    assert str(forgotten(left_out, named, given, Path("a.yaml"))) == (
        "resume: the run has optim.lr=0.5, this one has 0.04, which the command does not name; this "
        "continues it: config=a.yaml run.name=a train.epochs=4 'allow=[mine]'"
    )


def test_an_explicit_base_is_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    saved = composed("data=fake", "data.limit=7", "optim=adamw", "optim.lr=0.3", "run.name=a", "threads=1")
    file.write_text(OmegaConf.to_yaml(record_of(saved)))
    found = composed(f"config={file}", "train.epochs=2")
    assert EVERYTHING.items() <= commanded(f"config={file}", "train.epochs=2").words.items()
    run = dataclasses.replace(saved.run, name=None)
    train = dataclasses.replace(saved.train, epochs=2)
    assert found == dataclasses.replace(saved, config=str(file), run=run, train=train)
    other = composed(f"config={file}", "optim=sgd")  # a group takes the place of the section
    assert (other.optim.name, other.optim.lr, other.data.limit) == ("sgd", 0.04, 7)
    told = "recipe: config=FILE has all keys already; leave out one of the two"
    with pytest.raises(UserError, match=re.escape(told)):
        composed(f"config={file}", "+recipe=resnet")


def test_a_run_of_another_version_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    for version in ("0.3.0", None):
        file.write_text(OmegaConf.to_yaml({**record_of(composed()), "version": version, "eval_only": False}))
        told = f"config={file}: of shardtrain {version or '0.3.0 or older'}, and this is {__version__}: "
        with pytest.raises(UserError, match=f"^{re.escape(told)}.*$"):
            composed(f"config={file}")
    require_version("0.4.7", "here")


def test_a_package_that_the_base_allowed_is_not_allowed(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(OmegaConf.to_yaml(record_of(composed("allow=[mine]", "model._target_=mine.Net"))))
    assert composed(f"config={file}").allow == ()

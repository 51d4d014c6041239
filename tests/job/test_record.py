"""A run's `config.yaml` is the run: what scores, exports, continues or repeats it agrees, key by key."""

import contextlib
import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image

from shardtrain import comm, data
from shardtrain.checkpoint.store import step_name
from shardtrain.config.command import Command
from shardtrain.config.config import Config
from shardtrain.config.errors import UserError
from shardtrain.config.schema import flat, typed
from shardtrain.evaluate.__main__ import read as read_evaluation
from shardtrain.evaluate.__main__ import score
from shardtrain.export import __main__ as exporting
from shardtrain.job.inference import Inference
from shardtrain.job.model import load_weights, plain_model, read_weights
from shardtrain.predict import __main__ as predicting
from shardtrain.train.loop import train

from key_table import FOUR_STEPS, photos
from pool import each_rank
from tiny import ALONE, CPU, VIT, composed, context, result_of

QUIET = ("monitor.writers=[]",)


def ran(folder: Path, *words: str) -> dict[str, Any]:
    """Train in ``folder``, and return result.json."""
    with contextlib.redirect_stdout(io.StringIO()):
        command = (f"run.dir={folder}", *words)
        train(composed(*command), context(folder, *command))
    comm.barrier()
    return result_of(folder)


def evaluation(*words: str) -> Command:
    command = read_evaluation(words)
    assert command is not None
    return command


def scored_by(*words: str) -> dict[str, float]:
    """Return the scores that `shardtrain.evaluate` prints on rank 0."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        score(evaluation(*words), context("nowhere").rank_info, CPU)
    texts = comm.gather_texts(said.getvalue(), comm.plain_transport())
    scores: dict[str, float] = json.loads(texts[0].splitlines()[-1])
    return scores


def exported(run: Path, out: Path, **options: Any) -> None:
    keys = exporting.ExportSettings(run=str(run), out=str(out), **options)
    with contextlib.redirect_stdout(io.StringIO()):
        exporting.export(keys, ALONE, CPU)


def accuracy_of_plain_model(out: Path, config: Config) -> float:
    """Return the percentage that the exported file gets right on held-out images, in plain PyTorch."""
    card = typed(Inference, json.loads(Path(f"{out}.json").read_text()), "")
    model = plain_model(config.model).eval()
    load_weights(model, read_weights(out), out)
    images, labels = data.load(config.data).val[[*range(len(data.load(config.data).val))]]
    pixels = images / 255
    normal = (pixels - torch.tensor(card.mean)[:, None, None]) / torch.tensor(card.std)[:, None, None]
    size = [card.image_size] * 2
    if normal.shape[-1] != card.image_size:
        normal = torch.nn.functional.interpolate(normal, size, mode="bilinear", antialias=True)
    with torch.no_grad():
        right = model(normal).argmax(1) == labels
    return 100 * right.double().mean().item()


def differences(run: Path, other: Path) -> set[str]:
    """Return the keys in which two records differ."""
    one, two = (flat(OmegaConf.to_container(OmegaConf.load(each / "config.yaml"))) for each in (run, other))
    return {key for key in {**one, **two} if one.get(key) != two.get(key)}


def require_agreement(folder: Path, words: list[str]) -> None:
    """Train with ``words``; evaluate, export, resume, start from the run, and run its record again."""
    run = folder / "run"
    usual = [word for word in FOUR_STEPS if words[:1] != ["data=imagefolder"] or word[:4] != "data"]
    usual.remove("checkpoint.keep=0")
    result = ran(run, *VIT, *usual, *words)
    names = [name for name in result if {"val", "test"} & {*name.split("/")[1:2]}]
    assert "loss/val" in names
    numbers = {name: pytest.approx(result[name], rel=1e-6) for name in names}
    for scored_run in (run, run / "checkpoints" / step_name(result["step"])):
        found = scored_by(f"run={scored_run}")
        assert {name: found[name] for name in names} == numbers, f"evaluate run={scored_run}"
    if comm.world_size() == 1:
        require_equal_export(run, folder / "out.pth", result)
    require_equal_continuations(run, folder, result, numbers)


def require_equal_export(run: Path, out: Path, result: dict[str, Any]) -> None:
    """Export the run, and score the file in plain PyTorch."""
    exported(run, out)
    config = composed(f"config={run}/config.yaml")
    assert accuracy_of_plain_model(out, config) == pytest.approx(result["acc1/val"])


def require_equal_continuations(
    run: Path, folder: Path, result: dict[str, Any], numbers: dict[str, Any]
) -> None:
    """Resume the run, start from it, and run its record again."""
    base = f"config={run}/config.yaml"
    again = ran(run, base)  # no word but the directory
    assert {name: again[name] for name in numbers} == numbers, "resume"
    assert again["step"] == result["step"]

    start = folder / "start"
    ran(start, base, f"resume={run}", f"train.max_steps={result['step'] + 1}", "train.patience=null")
    allowed = {"train.max_steps", "train.patience", "run.dir", "resume"}
    others = differences(run, start) - allowed
    assert not others, f"resume=PATH: {others}"

    repeated = ran(folder / "repeated", base)
    assert {name: repeated[name] for name in numbers} == numbers, "config=FILE"
    others = differences(run, folder / "repeated") - {"run.dir"}
    assert not others, f"config=FILE: {others}"


# What the program computes of the data, and does not say in a word: sizes, a split, values of pixels.
WORDS = (
    "data=imagefolder data.root={} data.image_size=8 data.resize=20",
    "data.validation=0.25 data.split=1",
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("words", WORDS)
def test_what_follows_a_run_agrees_with_it(words: str, tmp_path: Path) -> None:
    own = words.format(photos(tmp_path / "photos")).split()
    require_agreement(tmp_path, [*own, "data.workers=0", "augment=none", "data.mean=[0.2]", "seed=3"])


@pytest.mark.long
@each_rank(2, transport="auto")
def test_what_follows_a_run_of_two_ranks_agrees_with_it(tmp_path: Path) -> None:
    require_agreement(tmp_path, ["parallel.replicate=2"])


def photo_run(folder: Path, *words: str) -> Path:
    """Train two epochs on photographs in folders; return the run."""
    if comm.rank() == 0:
        photos(folder / "photos")
    comm.barrier()
    files = (f"data.root={folder / 'photos'}", "data.image_size=8", "data.workers=0", "data.mean=[0.4]")
    length = ("train.batch_size=8", "train.epochs=2", "optim.lr=0.2")
    with contextlib.redirect_stdout(io.StringIO()):
        words = (f"run.dir={folder / 'run'}", "data=imagefolder", *files, *length, *VIT, *QUIET, *words)
        train(composed(*words), context(folder / "run", *words))
    comm.barrier()
    return folder / "run"


def predicted(run: Path, root: Path, out: Path, **keys: Any) -> list[list[str]]:
    """Predict on the ranks of this group; return the lines of the table after the first."""
    where = predicting.Where(root=str(root), table=keys.pop("table", None), batch_size=3)
    settings = predicting.PredictKeys(run=str(run), out=str(out), data=where)
    ranks = context(run).rank_info
    with contextlib.redirect_stdout(io.StringIO()) as said:
        predicting.predict(settings, ranks, CPU)
    comm.barrier()
    assert ranks.rank > 0 or " of 16 images\n" in said.getvalue()
    lines = [*csv.reader(out.read_text().splitlines())]
    assert lines.pop(0) == ["file", "class", "probability"]
    return lines


def right_of(run: Path, new: Path, out: Path) -> list[list[str]]:
    """Predict on the ranks of this group; require as many right as an evaluation finds; return the lines."""
    lines = predicted(run, new, out)
    assert [path for path, *_ in lines] == sorted(map(str, new.rglob("*.png")))
    right = [path.split("/")[-2] == name for path, name, _ in lines]
    found = scored_by(f"run={run}", f"data.root={new}")
    assert found["acc1/val"] == pytest.approx(100 * sum(right) / len(right)) == result_of(run)["acc1/val"]
    return lines


@pytest.mark.long
@each_rank(2, transport="auto")
def test_predictions_of_two_ranks_are_those_of_an_evaluation(tmp_path: Path) -> None:
    right_of(photo_run(tmp_path), tmp_path / "photos/val", tmp_path / "classes.csv")


def test_an_image_that_cannot_be_read_has_no_class_and_costs_no_other_its_own(
    tmp_path: Path, capsys: Any
) -> None:
    run = photo_run(tmp_path)
    root = tmp_path / "photos/val"
    before = predicted(run, root, tmp_path / "before.csv")
    bad = [Path(before[index][0]) for index in (0, 5)]
    for path in bad:
        path.write_bytes(path.read_bytes()[:40])
    dark = Path(before[1][0])
    Image.fromarray(np.full((9, 9), 4095, np.uint16)).save(dark)
    out = tmp_path / "classes.csv"
    words = [f"run={run}", f"data.root={root}", f"out={out}", "data.workers=1", "data.batch_size=3"]
    settings = predicting.read(words, False)
    assert settings is not None
    told = r"^out=.*classes.csv: 2 of 16 images cannot be read; they are listed"
    with pytest.raises(UserError, match=told):
        predicting.predict(settings, context(run).rank_info, CPU)
    said = capsys.readouterr().out
    assert re.findall(r"^cannot read the image (.*?): ", said, re.M) == [*map(str, bad)]
    assert "warning: 1 of 1 16-bit grey images that were looked at have values up to 4095, " in said
    _, *after = csv.reader(out.read_text().splitlines())
    assert [line for line in after if line[1:] == ["", ""]] == [[str(path), "", ""] for path in bad]
    kept = [index for index in range(16) if index not in (0, 1, 5)]
    assert [after[index] for index in kept] == [before[index] for index in kept]


def test_other_images_are_scored_without_any_to_train_on(tmp_path: Path) -> None:
    run = photo_run(tmp_path, "data.validation=4")
    new = tmp_path / "photos/val"
    by_folder = scored_by(f"run={run}", f"data.root={new}")
    table = tmp_path / "new.csv"
    lines = [f"{path.relative_to(new)},{path.parent.name}" for path in new.rglob("*.png")]
    table.write_text("\n".join(["image,label", *lines]))
    words = (f"run={run}", "data=csv", f"data.root={new}", f"data.table={table}")
    assert scored_by(*words) == pytest.approx(by_folder)
    config = evaluation(*words).config.data
    assert (config.mean, config.classes, config.image_size) == ((0.4,) * 3, ("cat", "dog"), 8)
    (new / "cow").mkdir()
    Image.new("RGB", (9, 9)).save(new / "cow/0.png")
    with pytest.raises(UserError, match=r"^data.root=.*val: the run has no class cow \(valid: cat, dog\)$"):
        scored_by(f"run={run}", f"data.root={new}")
    with pytest.raises(UserError, match=r"^unknown key data.all_held_out"):
        evaluation(f"run={run}", "data.all_held_out=true")


def test_balanced_weights_are_those_of_the_run_where_none_can_be_counted(tmp_path: Path) -> None:
    for number in range(8):  # more cats than dogs
        file = tmp_path / f"photos/train/cat/more{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (30 * number, 0, 0)).save(file)
    run = photo_run(tmp_path, "train.class_weights=balanced", "data.validation=4")
    new = tmp_path / "photos/val"
    found = scored_by(f"run={run}", f"data.root={new}")
    assert found["loss/val"] == pytest.approx(result_of(run)["loss/test"])
    plain = scored_by(f"run={run}", f"data.root={new}", "train.class_weights=null")
    assert plain["loss/val"] != pytest.approx(found["loss/val"])
    other = photo_run(tmp_path / "unweighted")
    with pytest.raises(UserError, match=r"class_weights=balanced needs the training images; train.class_w"):
        scored_by(f"run={other}", f"data.root={new}", "train.class_weights=balanced")


@pytest.mark.long
def test_what_an_evaluation_or_a_prediction_lacks_is_named(tmp_path: Path) -> None:
    run = photo_run(tmp_path)
    for words, told in {
        "run=nowhere": r"^run=nowhere: neither a run with checkpoints nor a che",
        f"run={run} resume=none": r"^resume=none: run=RUN alone says what is scored$",
        "data=imagefolder data.root=photos": r"^nothing to score: name a run \(run=RUN\), or plain weights",
    }.items():
        with pytest.raises(UserError, match=told):
            evaluation(*words.split())
    (tmp_path / "empty").mkdir()
    table = tmp_path / "t.csv"
    for name, first, told in (
        ("nowhere", None, r"^data.root=.*nowhere: there is no such folder"),
        ("empty", None, r"^data.root=.*empty: no image in it or in its folders$"),
        ("empty", "image", r"t.csv: 1 of 1 images are not in data.root=.*: none.png$"),
        ("empty", "file", r"its first line has file; expected a CSV file with a column image$"),
    ):
        table.write_text(f"{first}\nnone.png\n")
        with pytest.raises(UserError, match=told):
            predicted(run, tmp_path / name, tmp_path / "out.csv", table=first and str(table))
    with pytest.raises(UserError, match=r"t.csv exists already; choose another name or remove it$"):
        predicted(run, tmp_path / "photos", table)


def test_a_start_from_a_run_that_patience_ended_trains_and_has_a_best_step_of_its_own(tmp_path: Path) -> None:
    tiny = (*FOUR_STEPS[:-2], *QUIET, *VIT, "train.epochs=6", "train.patience=1")
    stopped = ran(tmp_path / "a", *tiny, "optim.lr=1e-30")
    assert stopped["step"] == 4 < 12
    words = (f"config={tmp_path}/a/config.yaml", f"resume={tmp_path}/a", "optim.lr=0.01", "train.patience=9")
    started = ran(tmp_path / "b", *words)
    assert (started["step"], started["best/step"] > 4) == (12, True)
    assert "its best score and its patience begin anew" in (tmp_path / "b/log.txt").read_text()
    exported(tmp_path / "b/best", tmp_path / "b.pth")
    with pytest.raises(UserError, match=r"has no moving average; its run had ema.decay=null"):
        exported(tmp_path / "b", tmp_path / "c.pth", weights="ema")


def test_the_same_command_resumes_silently_and_another_says_what_changes(tmp_path: Path) -> None:
    words = (*FOUR_STEPS[:-2], *QUIET, *VIT, "train.max_steps=1", "optim=adamw")
    ran(tmp_path, *words, "data.mean=[0.3]", "seed=7")
    log = tmp_path / "log.txt"
    ran(tmp_path, *words, "data.mean=[0.3]", "seed=7")
    assert "changed " not in log.read_text()
    for other, told in (
        (
            (*words, "seed=7"),
            r"run has data.mean=\[0.3\], .* name; this continues it: config=\S+ run.dir=\S+$",
        ),
        (("data=fake", "seed=7"), r"the run has train.epochs=2, this one has 9; .* name; this continues"),
        ((*words, "data.mean=[0.3]", "seed=8"), r"saved by a run with seed=7, this one has 8, so its place"),
    ):
        with pytest.raises(UserError, match=told):
            ran(tmp_path, *other)
    ran(tmp_path, f"config={tmp_path}/config.yaml", "train.max_steps=2", "train.log_every=2")
    for key in ("train.max_steps", "train.log_every"):
        assert f"  changed   {key}  1 → 2\n" in log.read_text()
    assert result_of(tmp_path)["step"] == 2


def test_weights_come_with_their_card(tmp_path: Path) -> None:
    run = photo_run(tmp_path)
    out = tmp_path / "w.pth"
    exported(run, out)
    files = (f"data.root={tmp_path}/photos", "data.image_size=8", "data.workers=0", "train.batch_size=8")
    words = ("data=imagefolder", *files, *VIT, f"model.weights={out}")
    assert scored_by(*words)["loss/val"] == pytest.approx(result_of(run)["loss/val"], rel=1e-6)
    for part in ("train", "val"):
        for old, new in (("cat", "dog"), ("dog", "fox")):
            (tmp_path / "photos" / part / old).rename(tmp_path / "photos" / part / f"{new}.")
    told = r"json: its classes are cat; dog, and those of .* are 0: dog.; 1: fox"
    with pytest.raises(UserError, match=told):
        scored_by(*words)
    assert scored_by(*words, "model.reset_head=true")["step"] == 0

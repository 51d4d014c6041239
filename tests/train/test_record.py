"""A run's `config.yaml` is the run: what scores, exports, continues or repeats it agrees with it, key by key."""

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from shardtrain.export import __main__ as exporting
from shardtrain.job import data
from shardtrain.job.config import Config
from shardtrain.job.errors import UserError
from shardtrain.job.inference import Inference
from shardtrain.job.model import load_weights, plain_model, read_weights
from shardtrain.job.read import read_config
from shardtrain.job.schema import flat, typed
from shardtrain.train.loop import train

from test_keys import FOUR_STEPS, ROWS, UNITS, photos
from tiny import ALONE, CPU, VIT, context, result_of

QUIET = ("monitor.tensorboard=false",)
# Keys without a row of their own in `test_keys.py`, with a value for this test.
OTHERS = (
    *("train.best=val/loss", "train.eval_batch_size=3", "train.channels_last=true", "data.eval_size=9"),
    *("data.classes=[a,b,c,d,e,f,g,h,i,j]", "parallel.virtual_ranks=2", "checkpoint.memory_every_steps=1"),
    *("optim._target_=torch.optim.RAdam", "train.loss._target_=torch.nn.MultiMarginLoss", "threads=1"),
    *("augment=none", "model.freeze=[body]", "monitor.scores=[]", "data.validation=0.25 seed=3"),
    *("parallel.virtual_ranks=2 train.replay_every=1", "train.best_mode=min", "data.workers=1"),
)


def command(*words: str) -> Config:
    """Return the configuration of a command line, of the run that it continues, scores or starts from."""
    config = read_config(words, False)
    assert config is not None
    return config


def ran(folder: Path, *words: str) -> dict[str, Any]:
    """Train in ``folder``, and return result.json."""
    with contextlib.redirect_stdout(io.StringIO()):
        train(command(f"run.dir={folder}", *words), context(folder))
    return result_of(folder)


def scored(config: Config) -> dict[str, float]:
    """Return the scores of an evaluation alone."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        train(config, context(config.run.dir or "nowhere"))
    scores: dict[str, float] = json.loads(said.getvalue().splitlines()[-1])
    return scores


def exported(run: Path, out: Path) -> None:
    keys = exporting.ExportSettings((), str(run), str(out), "cpu", None, "raw")
    with contextlib.redirect_stdout(io.StringIO()):
        exporting.export(keys, ALONE, CPU)


def accuracy_of_plain_model(out: Path, config: Config) -> float:
    """Return the percentage that the exported file gets right on the run's held-out images, in plain PyTorch."""
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
    if result["status"] != "finished" or "val/loss" not in result:
        return
    names = [name for name in result if name.startswith(("val/", "test/"))]
    numbers = {name: pytest.approx(result[name], nan_ok=True, rel=1e-6) for name in names}

    found = scored(command("eval_only=true", f"resume={run}"))
    assert {name: found[name] for name in names} == numbers, "eval_only"
    found = scored(command("eval_only=true", f"run.dir={run}"))
    assert {name: found[name] for name in names} == numbers, "eval_only by run.dir"

    exported(run, folder / "out.pth")
    config = command(f"config={run}/config.yaml")
    if config.train.tta == 0 and config.ema.decay is None and config.parallel.precision == "fp32":
        assert accuracy_of_plain_model(folder / "out.pth", config) == pytest.approx(result["val/acc1"])

    again = ran(run)  # no word but the directory
    assert {name: again[name] for name in names} == numbers, "resume"
    assert again["step"] == result["step"]

    start = folder / "start"
    ran(start, f"resume={run}", f"train.max_steps={result['step'] + 1}", "train.patience=null")
    allowed = {"train.max_steps", "train.patience", "run.dir"}
    assert differences(run, start) <= allowed, "resume=PATH"

    repeated = ran(folder / "repeated", f"config={run}/config.yaml")
    assert {name: repeated[name] for name in names} == numbers, "config=FILE"
    assert differences(run, folder / "repeated") <= {"run.dir"}


def rows(folder: Path) -> Iterator[list[str]]:
    """Yield the words of a run for each key."""
    files = f"data=imagefolder data.root={photos(folder / 'photos')} data.image_size=8"
    photographs = f"{files} data.workers=0 augment=none"
    for _, text in ROWS:
        words = text.replace(" & ", " ").format(photos=photographs, units=" ".join(UNITS)).split()
        if not {"dry_run=true", "checkpoint.keep=1", "parallel.replicate=2"} & {*words}:
            yield words
    yield from (text.split() for text in OTHERS)


FEW = ("data.mean", "data.validation=0.25", "optim.betas", "train.loss._target_", "data.resize", "border")


def test_what_follows_a_run_agrees_with_it(tmp_path: Path) -> None:
    for number, words in enumerate(rows(tmp_path)):
        if any(word in " ".join(words) for word in FEW):
            require_agreement(tmp_path / str(number), words)


@pytest.mark.long
def test_what_follows_a_run_agrees_with_it_for_every_key(tmp_path: Path) -> None:
    wrong = []
    for number, words in enumerate(rows(tmp_path)):
        if not any(word in " ".join(words) for word in FEW):
            try:
                require_agreement(tmp_path / str(number), words)
            except (AssertionError, UserError) as error:
                wrong.append(f"{' '.join(words)}: {type(error).__name__} {str(error)[:300]}")
    assert not wrong, "\n".join(wrong)

"""Whole weights out of a run, and in."""

import faulthandler
import json
import os
import sys
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torchvision.models import mobilenet_v3_small, resnet18

from shardtrain import comm
from shardtrain.config.errors import UserError
from shardtrain.export import __main__ as program
from shardtrain.job import inference as reader
from shardtrain.job.model import initial_model, load_weights, named_weights, read_weights
from shardtrain.launch import launcher
from shardtrain.recipes.models import classifier
from shardtrain.train.loop import train

from pool import once
from tiny import SHORT, composed, configure, context, result_of

STOCK = (
    *("model=mobilenet_v3_small", "data.channels=3", "augment=digits", "optim=adamw"),
    *("ema.decay=0.9", "monitor.writers=[]", "train.epochs=1"),
)


def run(folder: Path, *arguments: str) -> str:
    """Train a model of torchvision's, and return how the run ended on this rank."""
    try:
        words = ("+recipe=resnet", *SHORT, *STOCK, *arguments)
        train(composed(*words), context(folder, *words))
    except UserError as error:
        return str(error)
    finally:
        comm.barrier()
    return "finished"


trained = once(run)


@pytest.fixture
def export(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """``export("run=…", "out=…")`` runs the command in ``tmp_path`` and returns its exit code."""
    monkeypatch.chdir(tmp_path)
    # Torch's `record` points it at stderr, which is no file where pytest captures it.
    monkeypatch.setattr(faulthandler, "enable", lambda **_: None)

    def exported(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["export", *arguments, "threads=1"])
        try:
            launcher.start(program.read, program.export)
        except SystemExit as left:
            return int(left.code or 0)
        return 0

    return exported


@pytest.mark.parametrize(
    ("suffix", "weights"), [pytest.param("safetensors", "raw", marks=pytest.mark.long), ("pth", "ema")]
)
def test_the_stock_model_loads_an_export(
    tmp_path: Path, trained: Path, export: Any, capsys: Any, suffix: str, weights: str
) -> None:
    out = tmp_path / f"new/weights.{suffix}"
    assert export(f"run={trained}", f"out={out}", f"weights={weights}") == 0
    said = capsys.readouterr().out
    assert "shardtrain.load_exported answers as the checkpoint does to 32 random images" in said
    assert "step-00000005" in said
    state = load_file(out) if suffix == "safetensors" else torch.load(out, weights_only=True)
    mobilenet_v3_small(num_classes=10).load_state_dict(state)
    assert all(value.any() for name, value in state.items() if name.endswith("running_mean"))
    assert {path.name for path in out.parent.iterdir()} == {out.name, f"{out.name}.json"}
    inference = json.loads((out.parent / f"{out.name}.json").read_text())
    manifest = json.loads((trained / "checkpoints/step-00000005/manifest.json").read_text())
    assert inference == manifest["facts"]["inference"] == result_of(trained)["inference"]
    assert inference["model"]["target"] == "torchvision.models.mobilenet_v3_small"
    assert (inference["classes"], inference["image_size"]) == ([*"0123456789"], 8)
    resolved = OmegaConf.load(trained / "config.yaml").data
    assert (inference["classes"], inference["mean"]) == (resolved.classes, resolved.mean)


def test_a_file_that_answers_otherwise_is_not_left(
    tmp_path: Path, trained: Path, export: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = reader.load_weights

    def loading(model: torch.nn.Module, state: dict[str, torch.Tensor], source: Path) -> None:
        load(model, state | {"classifier.3.bias": state["classifier.3.bias"] + 0.01}, source)

    monkeypatch.setattr(reader, "load_weights", loading)
    assert export(f"run={trained}", f"out={tmp_path / 'weights.pth'}") == 2
    assert (
        "weights.pth answers otherwise than the checkpoint: logits differ by 0.01" in capsys.readouterr().err
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_weights_are_a_start(tmp_path: Path, trained: Path, export: Any) -> None:
    out = tmp_path / "weights.safetensors"
    checkpoint = trained / "checkpoints/step-00000005"
    assert export(f"run={checkpoint}", f"out={out}") == 0
    run_dir = tmp_path / "run"
    still = ("optim.lr=1e-30", "optim.weight_decay=0", f"model.weights={out}", "train.max_steps=1")
    assert run(run_dir, *still) == "finished"
    again = tmp_path / "again.safetensors"
    assert export(f"run={run_dir}", f"out={again}") == 0
    before = load_file(out)
    after = load_file(again)
    assert all(torch.equal(before[name], after[name]) for name in before if name.endswith("weight"))
    ending = run(tmp_path / "other", "model.num_classes=11", f"model.weights={out}")
    assert "does not fit the model: classifier.3.weight has shape (10, 1024), expected (11, 1024)" in ending
    # fine-tuning: a new head for other classes, and what is frozen stays bit for bit
    tuning = ("model.num_classes=11", f"model.weights={out}", "model.reset_head=true", "model.freeze=[body]")
    assert run(tmp_path / "tuned", *tuning) == "finished"
    assert export(f"run={tmp_path / 'tuned'}", f"out={tmp_path / 'tuned.pth'}") == 0
    tuned = torch.load(tmp_path / "tuned.pth", weights_only=True)
    parameters = [name for name, _ in mobilenet_v3_small().named_parameters()]
    assert all(torch.equal(before[n], tuned[n]) for n in parameters if not n.startswith("classifier.3."))
    assert tuned["classifier.3.weight"].shape == (11, 1024)


MISTAKES = """
run=/nowhere out=x.pth | run=/nowhere: neither a run with checkpoints nor a checkpoint
run={run} out=x.onnx | error: x.onnx: expected a name that ends in .safetensors, .pth, .pt
run={run} out=file.pth | error: file.pth exists already; choose another name or remove it
run={run} out=file.pth/x.pth | error: out=file.pth/x.pth:
run={run} out=x.pth weights=avg | error: weights=avg (valid: raw, ema)
"""


@pytest.mark.long
def test_mistakes_are_named(tmp_path: Path, trained: Path, export: Any, capsys: Any) -> None:
    (tmp_path / "file.pth").write_text("")
    for line in MISTAKES.strip().splitlines():
        words, _, told = line.partition(" | ")
        assert export(*words.format(run=trained).split()) == 2
        assert told in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file.pth"]


def test_weights_never_run_code(tmp_path: Path) -> None:
    class Plant:
        """A pickle that makes a directory when it is loaded."""

        def __reduce__(self) -> Any:
            return os.mkdir, (f"{tmp_path}/planted",)

    for name in ("x.pth", "x.safetensors"):
        torch.save({"a": Plant()}, tmp_path / name)
        with pytest.raises(UserError, match="no weights that can be read without running code"):
            read_weights(tmp_path / name)
    assert not (tmp_path / "planted").exists()
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(UserError, match="expected a state dict, names with tensors, found list"):
        read_weights(tmp_path / "list.pth")


@pytest.mark.long
def test_torchvisions_weights_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetched once; older files of theirs lack BatchNorm's counts."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    theirs = mobilenet_v3_small()
    fetched: list[str] = []

    def fetch(url: str, path: str, digest: str, progress: bool) -> None:
        if fetched:
            raise urllib.error.URLError("no network")
        fetched.append(f"{url} {digest}")
        state = {key: value for key, value in theirs.state_dict().items() if "num_batches" not in key}
        torch.save(state, path)

    monkeypatch.setattr(torch.hub, "download_url_to_file", fetch)
    sizes = ("model.num_classes=10", "model.in_channels=3", "model.image_size=32")
    weights = ("model.weights=IMAGENET1K_V1", "model.reset_head=true")
    found = dict(initial_model(configure("model=mobilenet_v3_small", *sizes, *weights)).named_parameters())
    for name, value in theirs.named_parameters():
        assert torch.equal(found[name], value) == ("classifier.3" not in name), name
    assert fetched == ["https://download.pytorch.org/models/mobilenet_v3_small-047dcff4.pth 047dcff4"]
    with pytest.raises(UserError, match=r"no network>; cannot fetch https.*; fetch it elsewhere, and give"):
        named_weights("IMAGENET1K_V1", "resnet18")


def test_foreign_weights_are_told_by_what_they_are(tmp_path: Path) -> None:
    state = dict(torch.nn.Linear(3, 2).state_dict())
    for name in ("model", "state_dict"):
        torch.save({name: state, "epoch": 3}, tmp_path / "a.pth")
        with pytest.raises(UserError, match=f"a checkpoint with its weights under '{name}': save that dict"):
            read_weights(tmp_path / "a.pth")
    stock = resnet18(num_classes=3).state_dict()
    for reset_head in (False, True):
        with pytest.raises(UserError, match=r"3, 3, 3\).*; model.stem=standard has 7×7 weights"):
            load_weights(classifier("resnet18", 10, 3, 32), stock, "a.pth", reset_head)

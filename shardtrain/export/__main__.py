"""Export the full weights of a run, with what an answer needs beside them, and check both.

    python -m shardtrain.export run=outputs/NAME out=weights.safetensors weights=ema

One process reads the newest complete checkpoint, written by any number of ranks. It writes every full
parameter, or its moving average, with the mean of the ranks' buffers, and an `Inference` as JSON beside them.
Then it loads the file into the plain model, and compares its outputs for random images with those of the
checkpoint, loaded as by a training run. Last it runs the six lines that it prints.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

import shardtrain
from shardtrain.checkpoint.files import write_tensors
from shardtrain.device import ACCELERATOR
from shardtrain.export.timm_folder import timm_config
from shardtrain.job import launch
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.errors import UserError, path_of, reading
from shardtrain.job.format import MIB
from shardtrain.job.inference import TIMM, Inference, call_of, program
from shardtrain.job.model import load_weights, plain_model, read_weights
from shardtrain.job.read import read_keys
from shardtrain.job.schema import MANDATORY, key, typed
from shardtrain.job.target import RECIPES
from shardtrain.train.resume import load_saved, open_saved

IMAGES = 32  # random images in the comparison
MOST_DIFFERENCE = 1e-3  # of logits
SUFFIXES = (".safetensors", ".pth", ".pt")


@dataclass(frozen=True)
class ExportSettings:
    """The keys of an export."""

    allow: tuple[str, ...] = key(
        (), "packages of the run's model._target_, as the run's own command allowed them"
    )
    run: str = key(
        MANDATORY,
        "a run directory, whose newest complete checkpoint is taken, or one of its checkpoints, as RUN/best",
    )
    out: str = key(
        MANDATORY,
        "FILE.safetensors or FILE.pth, or for a model of timm a FOLDER; must not exist. FILE.json gets what "
        "answers need",
    )
    weights: str = key("raw", "raw | ema: the weights, or their moving average", choices=("raw", "ema"))
    device: str = key("cpu", "cpu | cuda: where the check computes", choices=("auto", "cpu", ACCELERATOR))
    threads: int | None = key(None, "CPU threads; null: all cores", at_least=1)


class Files:
    """Write the files of an export: all of them, or none if what follows in the ``with`` block fails."""

    def __init__(self, out: Path, folder: bool) -> None:
        """folder: ``out`` may be a folder, for timm. Raises UserError for a wrong name or one that exists."""
        suffixes = ", ".join(SUFFIXES)
        if out.suffix not in SUFFIXES and not (folder and not out.suffix):
            also = ", or without an ending for timm's folder" if folder else ""
            raise UserError(f"{out}: expected a name that ends in {suffixes}{also}")
        self.out = out
        self.card = Path(f"{out}.json")
        self.weights = out if out.suffix else out / "model.safetensors"
        self.config = None if out.suffix else out / "config.json"
        for path in (out, self.card):
            if path.exists():
                raise UserError(f"{path} exists already; choose another name or remove it")
        self.written: list[Path] = []

    def write(self, path: Path, make: Callable[[Path], object]) -> None:
        """Have ``make`` write a new file, complete or absent. Raises UserError if it cannot be written."""
        with reading(f"out={self.out}", "cannot write there; choose another out", (OSError, RuntimeError)):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".tmp-", dir=path.parent) as folder:
                temporary = Path(folder, path.name)
                make(temporary)
                os.rename(temporary, path)
        self.written.append(path)

    def __enter__(self) -> Files:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            return
        for path in self.written:
            path.unlink()
        if not self.out.suffix and self.out.exists():
            self.out.rmdir()


read = partial(read_keys, ExportSettings)


def export(settings: ExportSettings, rank_info: RankInfo, device: torch.device) -> None:
    if rank_info.world_size > 1:
        raise UserError("export is one process: start it with python -m shardtrain.export")
    opened = open_saved(settings.run, settings.weights)
    facts = opened.manifest.facts
    keys = facts["config"]["model"]
    side = facts["config"]["data"]["image_size"]
    model, plain = (plain_model(keys, settings.allow) for _ in range(2))
    inference = None
    if "inference" in facts:  # older checkpoints do not have it
        inference = typed(Inference, facts["inference"], "inference")
        inference = replace(inference, model=call_of(keys, plain, settings.allow))
    files = Files(path_of("out", settings.out), inference is not None and inference.model.target == TIMM)
    shardtrain.shard(model.to(device))
    with load_saved(opened, model, settings.weights, settings.run), files, torch.no_grad():
        state = shardtrain.full_state_dict(model)
        files.write(files.weights, partial(write_weights, state))
        load_weights(plain, read_weights(files.weights), files.weights)
        channels = facts.get("channels", keys.get("in_channels", 3))  # of checkpoints without `inference`
        if inference is not None:
            channels = inference.channels
        images = torch.randn(IMAGES, channels, side, side, generator=torch.Generator().manual_seed(0))
        expected = model.eval()(images.to(device)).cpu()
        _require_equal(expected, plain.eval()(images), files.weights)
        mib = sum(value.nbytes for value in state.values()) / MIB
        print(f"{files.weights}: {len(state)} tensors, {mib:.1f} MiB, from {opened.path}")
        print(f"checked: the plain model answers as the checkpoint does to {IMAGES} random images")
        if inference is not None:
            _write_inference(files, inference, plain)
            data = facts["config"]["data"]
            if data["name"] == "own":
                print(f"\n{data['_target_']} made the images; what it does to them comes before these lines")
            if inference.model.target.startswith(f"{RECIPES}."):
                print(f"\n{inference.model.target} is this package's, so these lines need it")


def _require_equal(expected: Tensor, logits: Tensor, source: Path) -> None:
    largest = float((expected - logits).abs().max())
    if not largest < MOST_DIFFERENCE:
        raise UserError(f"{source} answers otherwise than the checkpoint: logits differ by {largest:.3g}")


def write_weights(state: Mapping[str, Tensor], path: Path) -> None:
    if path.suffix == ".safetensors":
        write_tensors(path, state, {"format": "pt"})
    else:
        torch.save(dict(state), path)


def _write_inference(files: Files, inference: Inference, plain: nn.Module) -> None:
    """Write what an answer needs beside the weights; print the lines that classify an image, and run them."""
    text = json.dumps(asdict(inference), indent=2, ensure_ascii=False)
    files.write(files.card, lambda path: path.write_text(text + "\n", encoding="utf-8"))
    print(f"{files.card}: the model's call, {len(inference.classes)} classes, mean, std, sizes")
    if files.config is not None:
        text = json.dumps(timm_config(inference, plain), indent=2, ensure_ascii=False)
        files.write(files.config, lambda path: path.write_text(text + "\n", encoding="utf-8"))
    lines = program(inference, files.out, files.card)
    if not lines:
        print(f"no lines that classify an image: Pillow has none of {inference.channels} channels")
        return
    with tempfile.TemporaryDirectory() as folder:
        noise = Path(folder, "noise.png")
        _write_noise(noise, inference)
        with contextlib.redirect_stdout(io.StringIO()) as answer:
            scope = _run(program(inference, files.out, files.card, str(noise)))
    _require_equal(plain(scope["pixels"]), scope["model"](scope["pixels"]), files.out)
    print(f"checked: these lines classify an image of noise, as {answer.getvalue().strip()}\n")
    print("\n".join(lines))


def _write_noise(path: Path, inference: Inference) -> None:
    """Write an image of random pixels, wider than high, of the mode that the program expects."""
    height = inference.image_size
    shape = (height, 2 * height, inference.channels)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    Image.fromarray(pixels.squeeze(2).numpy()).save(path)


def _run(lines: Sequence[str]) -> dict[str, Any]:
    """Run a program that this package has written, and return its variables."""
    scope: dict[str, Any] = {}
    exec("\n".join(lines), scope)
    return scope


main = partial(launch.start, read, export)

if __name__ == "__main__":
    main()

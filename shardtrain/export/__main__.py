"""Export the full weights of a run, with what an answer needs beside them, and check both.

    python -m shardtrain.export run=outputs/NAME out=weights.safetensors weights=ema

One process reads the newest complete checkpoint, written by any number of ranks. It writes every full
parameter, or its moving average, with the mean of the ranks' buffers, and an `Inference` as JSON beside them.
Then it reads both by `shardtrain.load_exported`, and compares the model's outputs for random images with
those of the checkpoint, loaded as by a training run.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shardtrain
from shardtrain.checkpoint.files import write_tensors
from shardtrain.device import ACCELERATOR
from shardtrain.export.timm_folder import timm_config
from shardtrain.job import launch
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.errors import UserError, path_of, reading
from shardtrain.job.format import MIB
from shardtrain.job.hydra_app import compose, program_configs
from shardtrain.job.inference import TIMM, Inference, load_exported
from shardtrain.job.model import plain_model
from shardtrain.job.schema import at_least, checked, one_of, typed
from shardtrain.train.resume import load_saved, open_saved

IMAGES = 32  # random images in the comparison
MOST_DIFFERENCE = 1e-3  # of logits
SUFFIXES = (".safetensors", ".pth", ".pt")


@dataclass(frozen=True)
class ExportSettings:
    allow: tuple[str, ...]
    run: str
    out: str
    device: str = one_of("auto", "cpu", ACCELERATOR)
    threads: int | None = at_least(1)
    weights: str = one_of("raw", "ema")


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


def read(arguments: Sequence[str], speak: bool) -> ExportSettings | None:
    program_configs()  # makes the recipes of a checkout that is not installed importable
    raw = compose(arguments, speak=speak, folder=Path(__file__).parent / "configs")
    return None if raw is None else checked(raw, ExportSettings)


def export(settings: ExportSettings, rank_info: RankInfo, device: torch.device) -> None:
    if rank_info.world_size > 1:
        raise UserError("export is one process: start it with python -m shardtrain.export")
    opened = open_saved(settings.run, settings.weights)
    facts = opened.manifest.facts
    inference = typed(Inference, facts["inference"], "inference")
    model = plain_model(facts["config"]["model"], settings.allow)
    files = Files(path_of("out", settings.out), folder=inference.model.target == TIMM)
    shardtrain.shard(model.to(device))
    with load_saved(opened, model, settings.weights, settings.run), files, torch.no_grad():
        state = shardtrain.full_state_dict(model)
        files.write(files.weights, partial(write_weights, state))
        files.write(files.card, partial(write_json, asdict(inference)))
        plain, _, _ = load_exported(files.out, settings.allow)
        if files.config is not None:
            files.write(files.config, partial(write_json, timm_config(inference, plain)))
        shape = (IMAGES, inference.channels, inference.image_size, inference.image_size)
        images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        expected = model.eval()(images.to(device)).cpu()
        _require_equal(expected, plain(images), files.weights)
    mib = sum(value.nbytes for value in state.values()) / MIB
    print(f"{files.weights}: {len(state)} tensors, {mib:.1f} MiB, from {opened.path}")
    print(f"{files.card}: the model's call, {len(inference.classes)} classes, mean, std, sizes")
    print(f"checked: shardtrain.load_exported answers as the checkpoint does to {IMAGES} random images")
    data = facts["config"]["data"]
    if data["name"] == "own":
        print(f"{data['_target_']} made the images; what it does to them is not in {files.card}")


def _require_equal(expected: Tensor, logits: Tensor, source: Path) -> None:
    largest = float((expected - logits).abs().max())
    if not largest < MOST_DIFFERENCE:
        raise UserError(f"{source} answers otherwise than the checkpoint: logits differ by {largest:.3g}")


def write_weights(state: Mapping[str, Tensor], path: Path) -> None:
    if path.suffix == ".safetensors":
        write_tensors(path, state, {"format": "pt"})
    else:
        torch.save(dict(state), path)


def write_json(values: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


main = partial(launch.start, read, export)

if __name__ == "__main__":
    main()

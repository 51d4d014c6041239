"""Export the full weights of a run, and check them.

    python -m shardtrain.export run=outputs/NAME out=weights.safetensors weights=ema

One process reads the newest complete checkpoint, written by any number of ranks. It writes every full
parameter, or its moving average, with the mean of the ranks' buffers. Then it loads the file into the plain
model, and compares its outputs for random images with those of the checkpoint, loaded as by a training run.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import shardtrain
from shardtrain.checkpoint import Damaged
from shardtrain.checkpoint.files import write_tensors
from shardtrain.checkpoint.loading import load_into
from shardtrain.device import ACCELERATOR
from shardtrain.job import launch
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.errors import UserError, path_of, reading
from shardtrain.job.format import MIB
from shardtrain.job.hydra_app import compose, program_configs
from shardtrain.job.model import load_weights, plain_model, read_weights
from shardtrain.job.schema import at_least, checked, one_of
from shardtrain.optim import Ema
from shardtrain.train.resume import open_named

IMAGES = 32  # random images in the comparison
SUFFIXES = (".safetensors", ".pth", ".pt")


@dataclass(frozen=True)
class ExportSettings:
    allow: tuple[str, ...]
    run: str
    out: str
    device: str = one_of("auto", "cpu", ACCELERATOR)
    threads: int | None = at_least(1)
    weights: str = one_of("raw", "ema")


def read(arguments: Sequence[str], speak: bool) -> ExportSettings | None:
    program_configs()  # makes the recipes of a checkout that is not installed importable
    raw = compose(arguments, speak=speak, folder=Path(__file__).parent / "configs")
    return None if raw is None else checked(raw, ExportSettings)


def export(settings: ExportSettings, rank_info: RankInfo, device: torch.device) -> None:
    if rank_info.world_size > 1:
        raise UserError("export is one process: start it with python -m shardtrain.export")
    run = path_of("run", settings.run)
    with reading(f"run={run}", "choose another step or run", Damaged):
        opened = open_named(run).opened
    if opened is None or "config" not in opened.manifest.facts:
        raise UserError(f"run={run}: neither a run with checkpoints nor a checkpoint of a run")
    facts = opened.manifest.facts
    averaged = settings.weights == "ema"
    out = path_of("out", settings.out)
    if averaged and not opened.manifest.ema:
        raise UserError(f"weights=ema: {opened.path} has no moving average; its run had ema.decay=null")
    keys = facts["config"]["model"]
    side = facts["config"]["data"]["image_size"]
    model, plain = (plain_model(keys, settings.allow) for _ in range(2))
    shardtrain.shard(model.to(device))
    ema = Ema(model, 0.0) if averaged else None
    with reading(f"run={run}", "the model was built otherwise then", ValueError):
        extra = load_into(opened, model, averages=ema.averages if ema else None)
    if ema is not None:
        ema.restore(extra["ema"], opened.manifest.world_size)
    with ema.swapped() if ema is not None else contextlib.nullcontext(), torch.no_grad():
        state = shardtrain.full_state_dict(model)
        write_weights(out, state)
        load_weights(plain, read_weights(out), out)
        channels = facts.get("channels", keys.get("in_channels", 3))  # older checkpoints do not have it
        images = torch.randn(IMAGES, channels, side, side, generator=torch.Generator().manual_seed(0))
        images = images.to(device)
        largest = float((model.eval()(images) - plain.to(device).eval()(images)).abs().max())
    if not largest < 1e-3:
        out.unlink()
        raise UserError(f"{out} answers otherwise than the checkpoint: logits differ by {largest:.3g}")
    mib = sum(value.nbytes for value in state.values()) / MIB
    print(f"{out}: {len(state)} tensors, {mib:.1f} MiB, from {opened.path}")
    print(f"checked: the plain model answers as the checkpoint does to {IMAGES} random images")


def write_weights(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write a new file, complete or absent. Raises UserError if it exists or cannot be written."""
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: expected a name that ends in {', '.join(SUFFIXES)}")
    if path.exists():
        raise UserError(f"{path} exists already; choose another name or remove it")
    with reading(f"out={path}", "cannot write there; choose another out", (OSError, RuntimeError)):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=path.parent) as folder:
            temporary = Path(folder, path.name)
            if path.suffix == ".safetensors":
                write_tensors(temporary, state, {"format": "pt"})
            else:
                torch.save(dict(state), temporary)
            os.rename(temporary, path)


main = partial(launch.start, read, export)

if __name__ == "__main__":
    main()

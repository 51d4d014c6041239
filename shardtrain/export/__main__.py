"""Export the full weights of a run, checked.

    python -m shardtrain.export run=outputs/NAME out=weights.safetensors weights=ema

One process reads the newest complete checkpoint, whatever the number of ranks that wrote it, and writes every
full parameter, or its moving average, with the mean of the ranks' buffers. Then it loads the file into the
plain model, and compares its answers to the validation images with those of the checkpoint, loaded as a
training run would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

import shardtrain
from shardtrain import comm
from shardtrain.checkpoint import Damaged
from shardtrain.checkpoint.loading import Opened, load_into, open_checkpoint
from shardtrain.checkpoint.manifest import NAME
from shardtrain.checkpoint.store import newest
from shardtrain.device import ACCELERATOR
from shardtrain.job import data, launch
from shardtrain.job.config import Data
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.format import MIB
from shardtrain.job.hydra_app import compose, config_folder
from shardtrain.job.model import load_weights, plain_model, write_weights
from shardtrain.job.schema import UserError, at_least, checked, one_of
from shardtrain.optim import Ema
from shardtrain.train.resume import CHECKPOINTS

_RANDOM_IMAGES = 32
FORMER_KEYS = ("read", "corrupt")  # of data sets, in runs of earlier versions


@dataclass(frozen=True)
class ExportSettings:
    run: str
    out: str
    device: str = one_of("auto", "cpu", ACCELERATOR)
    threads: int | None = at_least(1)
    weights: str = one_of("raw", "ema")


@dataclass(frozen=True)
class SavedConfig:
    """What an export reads of a run's saved configuration. Other keys come and go with versions."""

    model: dict[str, Any]
    data: Data


class Comparison(NamedTuple):
    images: int
    acc1: float | None  # percent; None of random images
    largest: float  # difference between two logits


def main() -> None:
    launch.start(_read, _export)


def _read(arguments: Sequence[str], speak: bool) -> ExportSettings | None:
    config_folder()  # a checkout that is not installed finds its recipes by this
    raw = compose(arguments, speak=speak, folder=Path(__file__).parent / "configs")
    return None if raw is None else checked(raw, ExportSettings)


def _export(settings: ExportSettings, rank_info: RankInfo, device: torch.device) -> None:
    if rank_info.world_size > 1:
        raise UserError("export is one process: start it with python -m shardtrain.export")
    opened = _find_checkpoint(Path(settings.run).expanduser(), device)
    saved = opened.manifest.facts["config"]
    images = {key: value for key, value in saved["data"].items() if key not in FORMER_KEYS} | {"grow": []}
    config = checked(OmegaConf.create({"model": saved["model"], "data": images}), SavedConfig)
    model = shardtrain.shard(plain_model(config.model).to(device))
    with _loaded(opened, model, settings):
        _write(opened, config, model, Path(settings.out).expanduser(), device)


@contextlib.contextmanager
def _loaded(opened: Opened, model: nn.Module, settings: ExportSettings) -> Iterator[None]:
    """Give the model the checkpoint's weights, or their average while inside."""
    if settings.weights == "ema" and not opened.manifest.ema:
        raise UserError(f"weights=ema: {opened.path} has no moving average; its run had ema.decay=null")
    ema = Ema(model, 0.0) if settings.weights == "ema" else None
    try:
        extra = load_into(opened, model, averages=ema.averages if ema else None)
    except ValueError as error:
        raise UserError(str(error)) from None
    if ema is not None:
        ema.restore(extra["ema"], opened.manifest.world_size)
    with ema.swapped() if ema is not None else contextlib.nullcontext():
        yield


def _write(opened: Opened, config: SavedConfig, model: nn.Module, out: Path, device: torch.device) -> None:
    state = shardtrain.full_state_dict(model)
    write_weights(out, state)
    plain = plain_model(config.model)
    load_weights(plain, out)
    check = _compare(config, model.eval(), plain.to(device).eval(), device)
    if not check.largest < 1e-3:
        out.unlink()
        raise UserError(f"{out} answers otherwise than the checkpoint: logits differ by {check.largest:.3g}")
    mib = sum(value.nbytes for value in state.values()) / MIB
    answers = "random images" if check.acc1 is None else f"validation images, acc1 {check.acc1:.2f} %"
    print(f"{out}: {len(state)} tensors, {mib:.1f} MiB, from {opened.path}")
    print(f"checked: the plain model answers as the checkpoint does to {check.images} {answers}")


def _find_checkpoint(run: Path, device: torch.device) -> Opened:
    """Open the checkpoint ``run``, or the newest complete one of the run ``run``."""
    alone = comm.Alone()
    try:
        if (run / NAME).exists():
            opened: Opened | None = open_checkpoint(run, alone, device)
        else:
            opened = newest(run / CHECKPOINTS, alone, device).opened
    except Damaged as error:
        raise UserError(f"run={run}: {error}") from None
    if opened is None or "config" not in opened.manifest.facts:
        raise UserError(f"run={run}: neither a run with checkpoints nor a checkpoint of a run")
    return opened


@torch.no_grad()
def _compare(config: SavedConfig, model: nn.Module, plain: nn.Module, device: torch.device) -> Comparison:
    """Compare both models' answers to the validation images, or to random ones if the data set is missing."""
    right, count, largest, labelled = 0, 0, 0.0, True
    for images, labels in _images(config, device):
        ours, theirs = model(images), plain(images)
        largest = max(largest, float((ours - theirs).abs().max()))
        labelled = labels is not None
        count += len(images)
        right += 0 if labels is None else int((theirs.argmax(1) == labels).sum())
    return Comparison(count, 100 * right / count if labelled else None, largest)


def _images(config: SavedConfig, device: torch.device) -> Iterator[tuple[Tensor, Tensor | None]]:
    try:
        validation = data.load(config.data)
    except UserError:
        side = config.data.image_size
        shape = (_RANDOM_IMAGES, config.model["in_channels"], side, side)
        yield torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device), None
        return
    prepare = data.Prepare(validation, config.data.side_in_eval, device)
    share = data.Share(1, 1, 0, 1)
    for batch in data.EvalFeed(validation, share, prepare, workers=config.data.workers):
        yield batch.images[: batch.valid], batch.labels[: batch.valid]


if __name__ == "__main__":
    main()

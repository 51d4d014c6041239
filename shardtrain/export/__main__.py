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
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

import shardtrain
from shardtrain.checkpoint import Damaged
from shardtrain.checkpoint.loading import Opened, load_into
from shardtrain.device import ACCELERATOR
from shardtrain.job import data, launch
from shardtrain.job.config import Data
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.format import MIB
from shardtrain.job.hydra_app import compose, config_folder
from shardtrain.job.model import load_weights, plain_model, write_weights
from shardtrain.job.schema import UserError, at_least, checked, one_of
from shardtrain.optim import Ema
from shardtrain.train.resume import open_named

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
    data_config = {k: v for k, v in saved["data"].items() if k not in FORMER_KEYS} | {"grow": []}
    config = checked(OmegaConf.create({"model": saved["model"], "data": data_config}), SavedConfig)
    model, plain = shardtrain.shard(plain_model(config.model).to(device)), plain_model(config.model)
    out = Path(settings.out).expanduser()
    with _loaded(opened, model, settings):
        state = shardtrain.full_state_dict(model)
        write_weights(out, state)
        load_weights(plain, out)
        images, what, largest = _compare(config, model.eval(), plain.to(device).eval(), device)
    if not largest < 1e-3:
        out.unlink()
        raise UserError(f"{out} answers otherwise than the checkpoint: logits differ by {largest:.3g}")
    mib = sum(value.nbytes for value in state.values()) / MIB
    print(f"{out}: {len(state)} tensors, {mib:.1f} MiB, from {opened.path}")
    print(f"checked: the plain model answers as the checkpoint does to {images} {what} images")


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


def _find_checkpoint(run: Path, device: torch.device) -> Opened:
    """Open the checkpoint ``run``, or the newest complete one of the run ``run``."""
    try:
        opened = open_named(run, device).opened
    except Damaged as error:
        raise UserError(f"run={run}: {error}") from None
    if opened is None or "config" not in opened.manifest.facts:
        raise UserError(f"run={run}: neither a run with checkpoints nor a checkpoint of a run")
    return opened


@torch.no_grad()
def _compare(
    config: SavedConfig, model: nn.Module, plain: nn.Module, device: torch.device
) -> tuple[int, str, float]:
    """Show both models the validation images, or random ones if the data set is missing.

    Returns:
        How many images, of which kind, and the largest difference between two logits.
    """
    try:
        batches, what = _validation(config, device), "validation"
    except UserError:
        shape = (_RANDOM_IMAGES, config.model["in_channels"], *[config.data.image_size] * 2)
        images = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
        batches, what = iter([images]), "random"
    count, largest = 0, 0.0
    for images in batches:
        count += len(images)
        largest = max(largest, float((model(images) - plain(images)).abs().max()))
    return count, what, largest


def _validation(config: SavedConfig, device: torch.device) -> Iterator[Tensor]:
    validation = data.load(config.data)
    prepare = data.Prepare(validation, config.data.side_in_eval, device)
    feed = data.EvalFeed(validation, data.Share(1, 1, 0, 1), prepare, workers=config.data.workers)
    return (batch.images[: batch.valid] for batch in feed)


if __name__ == "__main__":
    main()

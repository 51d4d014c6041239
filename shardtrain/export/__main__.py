"""Export the full weights of a run, with what an answer needs beside them, and check both.

    python -m shardtrain.export run=outputs/NAME out=weights.safetensors weights=ema

One process reads the newest complete checkpoint, written by any number of ranks. It writes every full
parameter, or its moving average, with the mean of the ranks' buffers, and an `Inference` as JSON beside them.
Then it reads both by `shardtrain.load_exported`, and compares the model's outputs for random images with
those of the checkpoint, loaded as by a training run.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import shardtrain
from shardtrain.checkpoint.files import write_tensors
from shardtrain.config.command import read_keys
from shardtrain.config.errors import UserError, path_of, reading
from shardtrain.config.format import MIB
from shardtrain.config.schema import key, typed
from shardtrain.job.inference import Inference, load_exported
from shardtrain.launch import launcher
from shardtrain.launch.ranks import RankInfo
from shardtrain.train.resume import SavedKeys, open_saved, saved_model

IMAGES = 32  # random images in the comparison
MOST_DIFFERENCE = 1e-3  # of logits
SUFFIXES = (".safetensors", ".pth", ".pt")


@dataclass(frozen=True, kw_only=True)
class ExportSettings(SavedKeys):
    """The keys of an export."""

    # FILE.safetensors or FILE.pth; must not exist. FILE.json gets what answers need
    out: str = key()
    # cpu | cuda: where the check computes
    device: str = key("cpu")


read = partial(read_keys, ExportSettings)


def export(settings: ExportSettings, rank_info: RankInfo, device: torch.device) -> None:
    if rank_info.world_size > 1:
        raise UserError("export is one process: start it with python -m shardtrain.export")
    opened = open_saved(settings.run, settings.weights)
    facts = opened.manifest.facts
    inference = typed(Inference, facts["inference"], "inference")
    out = new_path(path_of("out", settings.out))
    with saved_model(opened, settings, device) as model:
        state = shardtrain.full_state_dict(model)
        shape = (IMAGES, inference.channels, inference.image_size, inference.image_size)
        images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        expected = model(images.to(device)).cpu()
        with draft_of(out) as draft:
            write_weights(state, draft)
            text = json.dumps(asdict(inference), indent=2, ensure_ascii=False)
            Path(f"{draft}.json").write_text(f"{text}\n", encoding="utf-8")
            plain, _, _ = load_exported(draft, settings.allow)
            _require_equal(expected, plain(images), out)
    mib = sum(value.nbytes for value in state.values()) / MIB
    print(f"{out}: {len(state)} tensors, {mib:.1f} MiB, from {opened.path}")
    print(f"{out}.json: the model's call, {len(inference.classes)} classes, mean, std, sizes")
    print(f"checked: shardtrain.load_exported answers as the checkpoint does to {IMAGES} random images")
    data = facts["config"]["data"]
    if data["name"] == "own":
        print(f"{data['_target_']} made the images; what it does to them is not in {out}.json")


def new_path(out: Path) -> Path:
    """Return ``out``. Raises UserError for a wrong name, or one that exists."""
    if out.suffix not in SUFFIXES:
        raise UserError(f"{out}: expected a name that ends in {', '.join(SUFFIXES)}")
    for path in (out, Path(f"{out}.json")):
        if path.exists():
            raise UserError(f"{path} exists already; choose another name or remove it")
    return out


@contextlib.contextmanager
def draft_of(out: Path) -> Iterator[Path]:
    """Give a path; what is written there is moved to ``out`` if the block succeeds. Raises UserError."""
    # torch.save raises RuntimeError for a full disk.
    with reading(f"out={out}", "cannot write there; choose another out", (OSError, RuntimeError)):
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=out.parent) as folder:
            draft = Path(folder, out.name)
            yield draft
            for path in [*Path(folder).iterdir()]:
                path.rename(out.parent / path.name)


def _require_equal(expected: Tensor, logits: Tensor, source: Path) -> None:
    largest = float((expected - logits).abs().max())
    if not largest < MOST_DIFFERENCE:
        raise UserError(f"{source} answers otherwise than the checkpoint: logits differ by {largest:.3g}")


def write_weights(state: Mapping[str, Tensor], path: Path) -> None:
    if path.suffix == ".safetensors":
        write_tensors(path, state, {"format": "pt"})
    else:
        torch.save(dict(state), path)


main = partial(launcher.start, read, export)

if __name__ == "__main__":
    main()

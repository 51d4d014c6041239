"""Steps that are no number, in this process; over several ranks they are in `test_resume.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from shardtrain.job.config import from_hydra
from shardtrain.job.data import Prepare
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.hydra_app import compose
from shardtrain.job.launch import Context
from shardtrain.train.loop import train

VIT = (
    *("model=vit_cifar", "model.layers=1", "model.heads=1", "model.width=64", "model.mlp_width=64"),
    *("data=fake", "data.image_size=8", "data.train_images=12", "data.val_images=4", "augment=none"),
    *("train.batch_size=4", "train.epochs=1", "train.log_every=1", "train.nonfinite=skip"),
    *("checkpoint.keep=0", "monitor.progress=none", "monitor.tensorboard=false", "monitor.plan=false"),
)


def test_a_model_without_buffers_skips_a_step(tmp_path: Path) -> None:
    prepare, calls = Prepare.__call__, []

    def spoil(self: Prepare, *arguments: Any) -> torch.Tensor:
        calls.append(1)
        return prepare(self, *arguments) * (float("nan") if len(calls) == 2 else 1.0)

    raw = compose(VIT)
    assert raw is not None
    with patch.object(Prepare, "__call__", spoil):
        train(from_hydra(raw), Context(RankInfo(0, 1, 0, 1), torch.device("cpu"), tmp_path))
    assert "skipped step 2: loss nan on rank 0" in (tmp_path / "log.txt").read_text()
    assert json.loads((tmp_path / "result.json").read_text())["step"] == 3

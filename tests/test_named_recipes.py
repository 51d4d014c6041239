"""Each named recipe against its card, and a few steps of each."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from PIL import Image

from shardtrain import comm
from shardtrain.job.hydra_app import config_folder
from shardtrain.monitor.tables import end_table
from shardtrain.recipes import digits
from shardtrain.train.loop import train

from tiny import composed, context, result_of

NAMES = sorted(path.stem for path in (config_folder() / "recipe").glob("*.yaml"))

# What recipes do not say themselves: settings that they take from the defaults.
FROM_DEFAULTS = {
    "resnet": "optim.nesterov=true optim.weight_decay=5e-4 optim.decay_all=false sched.warmup_epochs=2 "
    "sched.final_lr=0",
    "resnet18_cifar10": "model.stem=auto data.image_size=32 sched.warmup_epochs=0 augment.pad=4 "
    "augment.policy=none augment.erase=0",
    "vit_cifar10": "model.patch=4 model.layers=7 model.heads=12 model.width=384 model.mlp_width=384 "
    "augment.pad=4",
    "resnet50_imagenet_v1": "data.crop_area=0.08 train.label_smoothing=0 train.mixup=0 train.cutmix=0 "
    "ema.decay=null sched.warmup_epochs=0 augment.pad=0 augment.policy=none augment.erase=0",
    "resnet50_imagenet_v2": "train.loss=cross_entropy optim.decay_all=false sched.final_lr=0",
    "resnet50_imagenet_a3": "data.repeats=1 train.label_smoothing=0 ema.decay=null optim.decay_all=false "
    "sched.final_lr=0 augment.erase=0",
    "resnet50_imagenet_16ep": "optim.decay_all=false sched.final_lr=0 augment.policy=none",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_what_it_is(name: str) -> None:
    text = (config_folder() / "recipe" / f"{name}.yaml").read_text()
    assert re.match(r"# @package _global_\n# [A-Z][^\n]*\.\n#\n# data ", text), "title, then the card"
    for row in ("model", "training"):
        assert f"\n# {row} " in text
    config = composed(f"+recipe={name}")
    assert config.reference is not None
    assert f"{config.reference.accuracy} %" in text
    assert composed(f"+recipe={name}", *FROM_DEFAULTS[name].split()) == config
    if name.endswith("v2"):
        assert config.ema.decay == pytest.approx(1 - (1 - 0.99998) * 1024 * 32 / 600, abs=1e-6)


def test_images_grow_as_published() -> None:
    data = composed("+recipe=resnet50_imagenet_16ep").data
    assert [data.side_in(epoch) for epoch in range(16)] == [160] * 12 + [192] * 4


# Tiny in everything but what the recipe is about.
TINY = (
    *("train.epochs=2", "train.log_every=1", "checkpoint.keep=0"),
    *("monitor.tensorboard=false", "monitor.progress=none"),
)
FAKE = ("data=fake", "data.classes=7", "data.val_images=9", "data.train_images=16", "train.batch_size=8")
SMALL = {
    "resnet": (*FAKE, "data.channels=1", "data.image_size=8"),
    "cifar": (*FAKE, "data.image_size=16"),
    "imagenet": (
        *("data.image_size=32", "data.eval_size=40", "data.resize=44", "data.workers=0"),
        *("train.batch_size=4", "model=resnet18", "parallel.precision=fp32"),
    ),
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An ImageNet of two classes."""
    root = tmp_path_factory.mktemp("photos")
    for part, count in (("train", 4), ("val", 3)):
        for name in ("ant", "bee"):
            (root / part / name).mkdir(parents=True)
            for index in range(count):
                pixels = torch.randint(0, 256, (40, 48, 3), dtype=torch.uint8).numpy()
                Image.fromarray(pixels).save(root / part / name / f"{index}.jpg")
    return str(root)


def tiny_run(folder: str, name: str, photos: str) -> dict[str, Any]:
    sizes = next(sizes for part, sizes in reversed(SMALL.items()) if part in name)
    source = (f"data.root={photos}",) if "imagenet" in name else ()
    if "16ep" in name:
        source += ("data.grow=[16]",)
    if "cifar" in name:  # whose augmentation goes with the data set
        source = (f"augment={composed(f'+recipe={name}').data.name}",)
    config = composed(f"+recipe={name}", *sizes, *TINY, *source)
    train(config, context(folder))
    comm.barrier()
    return result_of(folder)


AGAIN = {
    "resnet18_cifar10",
    "resnet50_imagenet_v1",
    "resnet50_imagenet_v2",
    "resnet50_imagenet_a3",
}  # others have all their parts


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in AGAIN else ()) for name in NAMES]
)
def test_each_recipe_trains_two_epochs_on_two_ranks(
    on_ranks: Any, tmp_path: Path, name: str, photos: str
) -> None:
    result = on_ranks(2, tiny_run, str(tmp_path), name, photos)[0]
    assert (result["status"], result["epoch"]) == ("finished", 2.0)
    yours = result.get("val/ema_acc1", result["val/acc1"])
    assert f"acc1      yours {yours:.2f} %, reference " in end_table(result)


def test_the_report_on_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, acc1 in ((0, 99.0), (1, 100.0)):
        (tmp_path / str(seed)).mkdir()
        result = {"status": "finished", "val/acc1": acc1, "seconds": 61.5}
        (tmp_path / str(seed) / "result.json").write_text(json.dumps(result))
    with patch.dict(sys.modules, {"sklearn.svm": None}):
        digits.main(["--out", str(tmp_path), "--seeds", "2"])
    said = capsys.readouterr().out
    assert "1     100.00     61.5" in said
    assert "mean of 2: 99.50 %; RBF-SVM on the same split: scikit-learn is not installed" in said
    assert "360 held-out images, so one is 0.28 points" in said
    with patch.object(subprocess, "run") as started, pytest.raises(FileNotFoundError):
        digits.main(["--out", str(tmp_path), "--seeds", "3", "--ranks", "2", "train.epochs=1"])
    command = started.call_args.args[0]
    assert command[1:5] == ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    assert {"+recipe=resnet", "seed=2", "train.epochs=1"} <= {*command}

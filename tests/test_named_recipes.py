"""Each named recipe against its card, and a few steps of each."""

from __future__ import annotations

import dataclasses
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
from shardtrain.job.build import lr_factor
from shardtrain.job.config import Config, from_hydra
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.hydra_app import compose, config_folder
from shardtrain.job.launch import Context
from shardtrain.monitor.tables import end_table
from shardtrain.recipes import digits
from shardtrain.train.loop import train

CPU = torch.device("cpu")
NAMES = sorted(path.stem for path in (config_folder() / "recipe").glob("*.yaml"))

# What has been published, key by key, and the accuracy reached with it.
CARDS: dict[str, tuple[float, dict[str, Any]]] = {
    "resnet": (
        99.17,
        {
            "model.name": "resnet18",
            "data.name": "digits",
            "train.epochs": 16,
            "train.batch_size": 48,
            "train.label_smoothing": 0.05,
            "train.mixup": 0.2,
            "optim.lr": 0.03,
            "optim.nesterov": True,
            "optim.weight_decay": 5e-4,
            "optim.decay_all": False,
            "sched": {"name": "cosine", "warmup_epochs": 2.0, "final_lr": 0.0},
        },
    ),
    "resnet18_cifar10": (
        93.02,
        {
            "model.name": "resnet18",
            "model.stem": "auto",  # small, of images of 32 pixels
            "data.name": "cifar10",
            "data.image_size": 32,
            "train.epochs": 350,
            "train.batch_size": 128,
            "optim.name": "sgd",
            "optim.lr": 0.1,
            "optim.momentum": 0.9,
            "optim.nesterov": False,
            "optim.weight_decay": 5e-4,
            "optim.decay_all": True,
            "sched": {"name": "step", "epochs": (150.0, 250.0), "factor": 0.1, "warmup_epochs": 0.0},
            "augment.pad": 4,
            "augment.policy": "none",
            "augment.erase": 0.0,
        },
    ),
    "vit_cifar10": (
        90.92,
        {
            "model.patch": 4,
            "model.layers": 7,
            "model.heads": 12,
            "model.width": 384,
            "model.mlp_width": 384,
            "data.name": "cifar10",
            "train.epochs": 200,
            "train.batch_size": 128,
            "train.label_smoothing": 0.1,
            "optim.name": "adamw",
            "optim.lr": 1e-3,
            "optim.betas": (0.9, 0.999),
            "optim.weight_decay": 5e-5,
            "optim.decay_all": True,
            "sched": {"name": "cosine", "warmup_epochs": 5.0, "final_lr": 0.01},
            "augment.pad": 4,
            "augment.policy": "cifar10",
        },
    ),
    "resnet50_imagenet_v1": (
        76.13,
        {
            "model.name": "resnet50",
            "data.name": "imagefolder",
            "data.image_size": 224,
            "data.resize": 256,
            "data.crop_area": 0.08,
            "train.epochs": 90,
            "train.batch_size": 256,
            "train.label_smoothing": 0.0,
            "train.mixup": 0.0,
            "train.cutmix": 0.0,
            "ema.decay": None,
            "optim.name": "sgd",
            "optim.lr": 0.1,
            "optim.momentum": 0.9,
            "optim.nesterov": False,
            "optim.weight_decay": 1e-4,
            "optim.decay_all": True,
            "sched": {"name": "step", "epochs": (30.0, 60.0), "factor": 0.1, "warmup_epochs": 0.0},
            "augment.pad": 0,
            "augment.policy": "none",
            "augment.erase": 0.0,
        },
    ),
    "resnet50_imagenet_v2": (
        80.858,
        {
            "model.name": "resnet50",
            "data.name": "imagefolder",
            "data.image_size": 176,
            "data.eval_size": 224,
            "data.resize": 232,
            "data.repeats": 4,
            "train.epochs": 600,
            "train.batch_size": 1024,
            "train.loss": "cross_entropy",
            "train.label_smoothing": 0.1,
            "train.mixup": 0.2,
            "train.cutmix": 1.0,
            "ema.every_steps": 32,
            "ema.after_epochs": 5.0,
            "ema.decay": pytest.approx(1 - (1 - 0.99998) * 1024 * 32 / 600, abs=1e-6),
            "optim.name": "sgd",
            "optim.lr": 0.5,
            "optim.momentum": 0.9,
            "optim.nesterov": False,
            "optim.weight_decay": 2e-5,
            "optim.decay_all": False,
            "sched": {"name": "cosine", "warmup_epochs": 5.0, "final_lr": 0.0},
            "augment.policy": "trivial",
            "augment.erase": 0.1,
        },
    ),
    "resnet50_imagenet_a3": (
        78.05,
        {
            "model.name": "resnet50",
            "data.image_size": 160,
            "data.eval_size": 224,
            "data.resize": 236,
            "data.repeats": 1,
            "train.epochs": 100,
            "train.batch_size": 2048,
            "train.loss": "bce",
            "train.label_smoothing": 0.0,
            "train.mixup": 0.1,
            "train.cutmix": 1.0,
            "ema.decay": None,
            "optim.name": "adamw",
            "optim.weight_decay": 0.02,
            "optim.decay_all": False,
            "sched": {"name": "cosine", "warmup_epochs": 5.0, "final_lr": 0.0},
            "augment.policy": "rand",
            "augment.magnitude": 18,  # of 30, as 6 of 10
            "augment.erase": 0.0,
        },
    ),
    "resnet50_imagenet_16ep": (
        73.8,
        {
            "model.name": "resnet50",
            "data.image_size": 192,
            "data.eval_size": 256,
            "data.resize": 293,
            "data.grow": {"from_": 160, "epochs": 13, "after": 11, "multiple": 32},
            "train.epochs": 16,
            "train.batch_size": 4096,
            "train.label_smoothing": 0.1,
            "train.channels_last": True,
            "train.eval_flip": True,
            "optim.name": "sgd",
            "optim.lr": 1.7,
            "optim.momentum": 0.9,
            "optim.nesterov": False,
            "optim.weight_decay": 1e-4,
            "optim.decay_all": False,
            "sched": {"name": "linear", "warmup_epochs": 2.0, "final_lr": 0.0},
            "augment.policy": "none",
        },
    ),
}


def configure(*arguments: str) -> Config:
    raw = compose(arguments)
    assert raw is not None
    return from_hydra(raw)


def effective(config: Config, key: str) -> Any:
    node: Any = dataclasses.asdict(config)
    for part in key.split("."):
        node = node[part]
    return node


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_what_it_is(name: str) -> None:
    text = (config_folder() / "recipe" / f"{name}.yaml").read_text()
    assert re.match(r"# @package _global_\n# [A-Z][^\n]*\.\n#\n# data ", text), "title, then the card"
    for row in ("model", "training"):
        assert f"\n# {row} " in text
    config = configure(f"+recipe={name}")
    accuracy, settings = CARDS[name]
    assert config.reference is not None
    assert config.reference.accuracy == accuracy
    assert f"{accuracy} %" in text
    assert {key: effective(config, key) for key in settings} == settings


def test_images_grow_as_published() -> None:
    data = configure("+recipe=resnet50_imagenet_16ep").data
    assert [data.side_in(epoch) for epoch in range(16)] == [160] * 12 + [192] * 4


def test_the_learning_rate_of_the_first_weights() -> None:
    factor = lr_factor(configure("+recipe=resnet50_imagenet_v1").sched, 90 * 5004, 5004)
    assert [factor(epoch * 5004) for epoch in (0, 29, 30, 59, 60, 89)] == pytest.approx(
        [1, 1, 0.1, 0.1, 0.01, 0.01]
    )


# Tiny in everything but what the recipe is about.
TINY = (
    "train.epochs=2",
    "train.log_every=1",
    "monitor.tensorboard=false",
    "monitor.progress=none",
    "monitor.plan=false",
    "checkpoint.keep=0",
)
FAKE = ("data=fake", "data.classes=7", "data.val_images=9")
SMALL = {
    "resnet": (*FAKE, "data.train_images=16", "data.channels=1", "data.image_size=8", "train.batch_size=8"),
    "cifar": (*FAKE, "data.train_images=16", "data.image_size=16", "train.batch_size=8"),
    "imagenet": (
        "data.image_size=32",
        "data.eval_size=40",
        "data.resize=44",
        "data.workers=0",
        "train.batch_size=4",
        "model=resnet18",
        "parallel.precision=fp32",
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
    rank_info = RankInfo(comm.rank(), comm.world_size(), comm.rank(), comm.world_size())
    sizes = next(sizes for part, sizes in reversed(SMALL.items()) if part in name)
    source = (f"data.root={photos}",) if "imagenet" in name else ()
    if "16ep" in name:
        source += ("data.grow={from: 16, after: 0, epochs: 1, multiple: 1}",)
    if "cifar" in name:  # whose augmentation goes with the data set
        source = (f"augment={configure(f'+recipe={name}').data.name}",)
    config = configure(f"+recipe={name}", *sizes, *TINY, *source)
    train(config, Context(rank_info, CPU, Path(folder)))
    comm.barrier()
    result = json.loads((Path(folder) / "result.json").read_text())
    assert isinstance(result, dict)
    return result


@pytest.mark.parametrize("name", NAMES)
def test_each_recipe_trains_two_epochs_on_two_ranks(
    on_ranks: Any, tmp_path: Path, name: str, photos: str
) -> None:
    result = on_ranks(2, tiny_run, str(tmp_path), name, photos)[0]
    assert (result["status"], result["epoch"]) == ("finished", 2.0)
    yours = result.get("val/ema_acc1", result["val/acc1"])
    assert f"acc1      yours {yours:.2f} %, reference {CARDS[name][0]:.2f} % (" in end_table(result)


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
    assert digits.report({0: {"val/acc1": 99.0, "seconds": 1.0}}, 98.5).count("98.50 %") == 1
    with patch.object(subprocess, "run") as started, pytest.raises(FileNotFoundError):
        digits.main(["--out", str(tmp_path), "--seeds", "3", "--ranks", "2", "train.epochs=1"])
    command = " ".join(started.call_args.args[0][1:])
    assert command.startswith(
        "-m torch.distributed.run --nproc-per-node 2 -m shardtrain.train +recipe=resnet seed=2"
    )
    assert command.endswith("train.epochs=1")

"""The table of keys of the training program: what must differ, and the words that make it differ."""

import dataclasses
import typing
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

import numpy as np
from PIL import Image

FOUR_STEPS = (
    *("data=fake", "data.limit=24", "data.channels=1", "data.image_size=8"),
    *("train.batch_size=12", "train.epochs=2", "train.log_every=1", "checkpoint.keep=0"),
    "monitor.writers=[]",
)

# A model that is cut into units whatever `parallel` says.
UNITS = ("model=vit_cifar", "model.layers=2", "model.width=192", "model.heads=3", "model.mlp_width=768")

# What must differ between two runs, and the words of the second one; before the & stand those of both.
ACTS = """
losses   seed=1
losses   train.batch_size=6
losses   train.label_smoothing=0.1
losses   train.class_weights=balanced
losses   train.mixup=1
losses   train.cutmix=1
losses   train.clip_grad_norm=0.01
losses   data.image_size=16
losses   data.repeats=2
losses   data.mean=[0.2]
losses   data.std=[0.9]
losses   {photos} & data.interpolation=bicubic
losses   data.limit=20
losses   data.channels=3
losses   optim.lr=0.5
losses   optim.momentum=0.5
losses   optim.nesterov=false
losses   optim.weight_decay=0.5
losses   optim.weight_decay=0.5 & optim.decay_all=true
losses   optim=adamw & optim.betas=[0.5,0.5]
losses   parallel.precision=bf16
losses   parallel.reduce=bf16
losses   model.num_classes=11
losses   augment=photo augment.pad=1 & augment.pad=2
losses   augment=photo & augment.policy=trivial
losses   augment=photo & augment.erase=1
losses   augment=photo & augment.flip=none
losses   augment=digits & augment.rotate=90
losses   augment=digits & augment.zoom=0.5
losses   augment=digits & augment.shift=0.5
losses   {photos} augment=photo & data.crop_area=0.9
scores   {photos} & data.resize=20
scores   data.validation=0.25
scores   data.validation=0.25 & data.split=1
scores   train.eval_every=2
average  ema.decay=0.5 & ema.decay=0.9
average  ema.decay=0.5 & ema.every_steps=2
steps    train.epochs=1
steps    train.max_steps=3
steps    train.epochs=4 optim.lr=1e-30 & train.patience=1
steps    train.log_every=2
lr       sched.warmup_epochs=0
lr       sched.final_lr_fraction=0.5
lr       sched=step sched.epochs=[1] & sched.epochs=[]
lr       sched=step sched.epochs=[1] & sched.factor=0.5
traffic  SHARDTRAIN_TRANSPORT=process_group & train.accumulate=2
traffic  SHARDTRAIN_TRANSPORT=process_group & parallel.replicate=2
held     SHARDTRAIN_TRANSPORT=process_group parallel.activation_checkpoint=true & parallel.layout=whole
held     SHARDTRAIN_TRANSPORT=process_group parallel.activation_checkpoint=true & parallel.reshard_after_forward=false
files    checkpoint.keep=9 & checkpoint.every_steps=1
files    checkpoint.keep=9 checkpoint.every_steps=1 & checkpoint.keep=1
files    monitor.writers=[tensorboard]
files    monitor.profile_at=2
"""  # noqa: E501
ROWS = [line.split(maxsplit=1) for line in ACTS.strip().splitlines()]


def photos(folder: Path) -> Path:
    for number in range(32):
        place = folder / ("train", "val")[number % 2] / ("cat", "dog")[number // 16]
        place.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(number).integers(256, size=(24, 30, 3), dtype=np.uint8)
        Image.fromarray(noise).save(place / f"{number}.png")
    return folder


def keys_of(kind: Any, prefix: str = "") -> set[str]:
    """Return the keys of a section, of any of the choices that it has."""
    if isinstance(kind, UnionType) or typing.get_origin(kind) is typing.Union:
        return set().union(*(keys_of(each, prefix) for each in get_args(kind)))
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        # A user's own keywords are no key, nor is what the choice from a group sets, nor another base.
        kept = {"others", "chosen"}
        names = [field.name for field in dataclasses.fields(kind) if kept.isdisjoint(field.metadata)]
        return set().union(*(keys_of(hints[name], f"{prefix}.{name}".lstrip(".")) for name in names))
    return {prefix} - {"", "model", "augment"}  # of these two the files have the keys

"""A training run of seconds, and one that is interrupted, for tests of the program around the engine."""

import contextlib
import functools
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from PIL import Image
from torch import nn

from shardtrain import comm
from shardtrain.checkpoint.store import Store, step_name
from shardtrain.config.command import Command, read_command
from shardtrain.config.config import Config
from shardtrain.config.errors import UserError
from shardtrain.launch.launcher import Context
from shardtrain.launch.ranks import RankInfo
from shardtrain.launch.signals import SIGNALS, Stopped
from shardtrain.monitor import Monitor
from shardtrain.recipes import models
from shardtrain.train.loop import train

CPU = torch.device("cpu")
ALONE = RankInfo(0, 1, 0, 1)
SHORT = (
    *("data=fake", "data.limit=60", "data.channels=1", "data.image_size=8"),
    *("train.batch_size=12", "train.epochs=2", "train.log_every=5"),
)
# 6,362 parameters for images of three channels. Neither BatchNorm nor dropout.
VIT = (*("model=vit_cifar", "model.layers=1", "model.width=24", "model.heads=2"), "model.mlp_width=16")
TINY = (*SHORT, *VIT)
_save = Store.save  # each of which ends, with `at_once`, before training goes on
at_once = patch.object(Store, "save", lambda *args, **to: (_save(*args, **to), args[0].finish())[0])


@functools.cache
def commanded(*arguments: str) -> Command:
    """Return what a command line says."""
    command = read_command(arguments)
    assert command is not None
    return command


def composed(*arguments: str) -> Config:
    """Return the configuration of a command line."""
    return commanded(*arguments).config


@contextlib.contextmanager
def over_transport(words: Sequence[str]) -> Iterator[list[str]]:
    """Give ``words`` without `SHARDTRAIN_TRANSPORT=NAME`, which is in the environment inside."""
    variable = "SHARDTRAIN_TRANSPORT"
    named = [word.partition("=")[2] for word in words if word.startswith(variable)]
    with patch.dict(os.environ, {variable: named[0] if named else "auto"}):
        yield [word for word in words if not word.startswith(variable)]


def configure(*arguments: str) -> Config:
    return composed("+recipe=resnet", *arguments)


def context(folder: str | Path, *words: str) -> Context:
    """Return the context of a run in ``folder`` on the ranks of this group, by a command of ``words``."""
    rank_info = RankInfo(comm.rank(), comm.world_size(), comm.rank(), comm.world_size())
    return Context(rank_info, CPU, Path(folder), commanded(*words).words)


def run(folder: str, *arguments: str) -> dict[str, Any]:
    """Train in ``folder`` on the ranks of this group, and return result.json."""
    words = ("+recipe=resnet", *TINY, *arguments)
    train(composed(*words), context(folder, *words))
    comm.barrier()
    return result_of(folder)


def write_folders(root: Path, images: int = 4) -> None:
    """Write images of value 10 × class + number, in two classes and two parts."""
    for part, label, number in product(("train", "val"), range(2), range(images // 2)):
        folder = root / part / f"class{label}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("L", (12, 14), 10 * label + number).save(folder / f"{number}.png")


def small_model(name: str, num_classes: int, image_size: int) -> nn.Module:
    """Build what stands for torchvision's models: the mobile net has dropout and buffers, others neither."""
    chance = name == "mobilenet_v3_small"
    layers: list[nn.Module] = []
    for inputs, stride in ((3, 2), (9, 2)):
        norm = nn.BatchNorm2d(9) if chance else nn.Identity()
        layers.append(nn.Sequential(nn.Conv2d(inputs, 9, 3, stride), norm, nn.ReLU()))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2 * chance), nn.Linear(9, num_classes)]
    return nn.Sequential(*layers)


def result_of(folder: str | Path) -> dict[str, Any]:
    return dict(json.loads((Path(folder) / "result.json").read_text()))


def events_of(folder: Path) -> Any:
    """What TensorBoard reads from a run directory."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


TEN_STEPS = (
    *("model=mobilenet_v3_small", "data=fake", "augment=digits", "optim=adamw", "ema.decay=0.9"),
    *("train.batch_size=12", "train.epochs=2", "train.log_every=3", "checkpoint.every_steps=4"),
)
QUIET = "monitor.writers=[]"
# Groups of tags that no run repeats: a process's first step gathers more; a repeated epoch has two points.
MEASURED = ("system",)


def crash() -> None:
    """Do what stands for whatever ends a process."""
    raise RuntimeError("crash")


@contextlib.contextmanager
def handlers_restored() -> Iterator[None]:
    """Restore the handlers of signals after the block."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_to_end(folder: str, *arguments: str, at: dict[int, Any] | None = None) -> str:
    """Train in ``folder``, with ``at[step]()`` after a step's reports; return how the run ended here."""
    report = Monitor.step

    def step_and_more(monitor: Monitor, step: int) -> None:
        report(monitor, step)
        (at or {}).get(step, lambda: None)()

    sizes = [] if "data=imagefolder" in arguments else ["data.limit=60"]
    try:
        with (
            handlers_restored(),  # a run that was stopped goes on ignoring signals
            patch.object(Monitor, "step", step_and_more),
            patch.object(models, "_build", small_model),
        ):
            words = ("+recipe=resnet", *TEN_STEPS, *sizes, *arguments)
            train(composed(*words), context(folder, *words))
    except (Stopped, UserError, RuntimeError) as error:
        return f"{type(error).__name__} {error}"
    finally:
        comm.barrier()
    return "finished"


def files_of(checkpoint: Path) -> dict[str, Any]:
    """Return the digests of a checkpoint's files, which are the same for the same state."""
    return dict(json.loads((checkpoint / "manifest.json").read_text())["files"])


def final(folder: Path) -> dict[str, Any]:
    """Return the digests of the last step: of parameters, optimizer, buffers, random numbers and sums."""
    return files_of(folder / "checkpoints" / step_name(10))


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return TensorBoard's points, but for those that measure time, memory and traffic."""
    events = events_of(folder)
    points = {}
    for tag in events.Tags()["scalars"]:
        if tag.split("/")[0] not in MEASURED:
            points[tag] = [(event.step, event.value) for event in events.Scalars(tag)]
    return points


def refused(body: Callable[..., Any], *arguments: Any) -> str:
    """What this rank is told."""
    try:
        body(*arguments)
    except UserError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def closed(folder: Path) -> Iterator[None]:
    """Inside, this process may not enter ``folder``; not as root either, who may enter any."""
    user = os.geteuid()
    folder.chmod(0)
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o700)

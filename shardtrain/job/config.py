"""Define the training program's configuration: types, ranges, and combinations that are refused.

All code after this file uses these frozen dataclasses. The files in `configs/` have the same keys, with
their defaults and meanings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from shardtrain.device import ACCELERATOR
from shardtrain.job.errors import UnknownKey, UserError, not_valid, reading
from shardtrain.job.schema import Mark, above, at_least, chosen, marked, one_of, optional
from shardtrain.job.target import instantiate
from shardtrain.layout import Policy

REPORTED = Mark.CHANGES | Mark.HIDDEN  # how a run is watched and saved, not what it learns
COMMAND = Mark.COMMAND | REPORTED
PROCESS = Mark.PER_HOST | REPORTED
data_set = partial(chosen, mark=Mark.IMAGES)


@dataclass(frozen=True)
class RunConfig:
    name: str | None
    dir: str | None

    def __post_init__(self) -> None:
        parts = Path(self.name or "default").parts
        if not parts or ".." in parts or parts[0] == "/":
            raise UserError(f"run.name={self.name}: expected a name inside outputs/; run.dir takes any path")


@dataclass(frozen=True, kw_only=True)
class Train:
    epochs: int = at_least(1, mark=Mark.CHANGES)
    max_steps: int | None = at_least(1, mark=REPORTED)
    batch_size: int = at_least(1, mark=Mark.IMAGES)
    accumulate: int = at_least(1, mark=Mark.CHANGES)
    channels_last: bool = marked(Mark.CHANGES)
    loss: str | dict[str, Any] = one_of("cross_entropy")
    class_weights: str | tuple[float, ...] | None = one_of("balanced", above=0)
    label_smoothing: float = at_least(0, below=1)
    mixup: float = at_least(0)
    cutmix: float = at_least(0)
    clip_grad_norm: float | None = above(0)
    replay_every: int = at_least(0, mark=REPORTED)
    capture: bool = marked(Mark.CHANGES)
    log_every: int = at_least(1, mark=REPORTED)
    eval_every: int = at_least(1, mark=REPORTED)
    best: str = marked(REPORTED)
    patience: int | None = at_least(1, mark=REPORTED)
    hooks: tuple[str, ...] = marked(REPORTED)

    def __post_init__(self) -> None:
        for path in self.hooks:
            if "." not in path:
                raise UserError(f"train.hooks=[{path}]: expected PACKAGE.CLASS, with allow=[PACKAGE]")
        if isinstance(self.loss, str):
            return
        if "_target_" not in self.loss:
            key = next(iter(self.loss), "_target_")
            raise UserError(
                f"train.loss.{key}: only a loss of your own has keywords, train.loss._target_=PACKAGE.CLASS; "
                "train.class_weights=[…] weights cross-entropy by classes"
            )
        if self.class_weights is not None:
            raise UserError(
                "train.class_weights is for train.loss=cross_entropy; your own loss weights classes itself"
            )


@dataclass(frozen=True)
class EmaConfig:
    decay: float | None = at_least(0, below=1)
    every_steps: int = at_least(1)


@dataclass(frozen=True, kw_only=True)
class Images:
    """Hold the keys that all data sets have."""

    name: str
    image_size: int = at_least(1, at_most=10**5)
    eval_size: int | None = at_least(1, at_most=10**5)
    repeats: int = at_least(1, mark=Mark.IMAGES)
    validation: float = at_least(0, mark=Mark.IMAGES)
    split: int = at_least(0, mark=Mark.IMAGES)
    limit: int | None = at_least(1, mark=Mark.IMAGES)
    # `completed` fills in what is open of the next three.
    classes: tuple[str, ...] | None = marked(Mark.IMAGES | Mark.HIDDEN)
    mean: tuple[float, ...] | None = at_least(0, at_most=1)
    std: tuple[float, ...] | None = above(0, at_most=1)
    workers: int = at_least(0, at_most=1024, mark=Mark.PER_HOST | REPORTED)

    @property
    def side_in_eval(self) -> int:
        """Pixels per side in evaluation."""
        return self.eval_size or self.image_size

    @property
    def sides(self) -> set[int]:
        """All image sizes that the model gets, in pixels per side."""
        return {self.side_in_eval, self.image_size}


@dataclass(frozen=True, kw_only=True)
class Digits(Images):
    name: str = data_set("digits")


@dataclass(frozen=True, kw_only=True)
class Npz(Images):
    name: str = data_set("arrays")
    root: str = marked(Mark.PER_HOST)
    image_size: int = at_least(0)  # 0: the images' own size, which `completed` fills in


@dataclass(frozen=True, kw_only=True)
class Cifar(Images):
    name: str = data_set("cifar10", "cifar100")
    root: str = marked(Mark.PER_HOST)


@dataclass(frozen=True, kw_only=True)
class ImageFolder(Images):
    """Hold the keys of photographs, files of any size in folders; `_target_` opens them."""

    name: str = data_set("imagefolder")
    _target_: str = marked(Mark.IMAGES)
    root: str = marked(Mark.PER_HOST)
    resize: int | None = at_least(1)
    crop_area: float = above(0, at_most=1)
    interpolation: str = one_of("bilinear", "bicubic")

    def __post_init__(self) -> None:
        if self.resize is not None and self.resize < self.side_in_eval:
            key = "image_size" if self.eval_size is None else "eval_size"
            raise UserError(f"data.resize={self.resize}: expected at least data.{key}={self.side_in_eval}")


@dataclass(frozen=True, kw_only=True)
class Csv(ImageFolder):
    """Hold the keys of photographs in a folder, with a table of their labels."""

    name: str = data_set("csv")
    table: str = marked(Mark.PER_HOST)


@dataclass(frozen=True, kw_only=True)
class Fake(Images):
    name: str = data_set("fake")
    limit: int = at_least(1, at_most=10**8, mark=Mark.IMAGES)  # of training images, as many as are asked for
    channels: int = at_least(1, at_most=1024)


@dataclass(frozen=True, kw_only=True)
class OwnData(Images):
    """Take the data set that a function returns, of a package that the command line allows."""

    name: str = data_set("own")
    _target_: str = marked(Mark.IMAGES)
    image_size: int = at_least(0)  # 0: the images' own size, which `completed` fills in
    keywords: dict[str, Any] = field(metadata={"others": True})


Data = OwnData | Digits | Npz | Cifar | ImageFolder | Csv | Fake


@dataclass(frozen=True, kw_only=True)
class Optim:
    """Hold an optimizer's class, `_target_`, and its keywords, which are the other keys."""

    name: str = chosen("sgd", "adamw", "muon", "own")
    _target_: str
    lr: float = above(0)
    weight_decay: float = at_least(0)
    decay_all: bool
    momentum: float | None = optional(at_least=0, below=1)
    nesterov: bool | None = optional()
    betas: tuple[float, ...] | None = optional(at_least=0, below=1)
    keywords: dict[str, Any] = field(metadata={"others": True})

    def __post_init__(self) -> None:
        if self.name == "own":
            return
        for key in self.keywords:
            hidden = ("name", "keywords")
            known = [name for name, value in vars(self).items() if value is not None and name not in hidden]
            error = not_valid(f"unknown key optim.{key}", key, known, "optim.")
            raise UnknownKey(f"optim.{key}", error)
        if self.betas is not None and len(self.betas) != 2:
            raise UserError(f"optim.betas={[*self.betas]}: expected a list of 2 numbers")

    @property
    def layout(self) -> Policy:
        """How units are cut, unless `parallel.layout` is set: Muon orthogonalises whole matrices."""
        return "whole" if self.name == "muon" else "even"

    def make(self, groups: list[dict[str, Any]], allow: Sequence[str] = ()) -> torch.optim.Optimizer:
        """Return the optimizer of ``groups``, each with its own weight decay."""
        other = ("name", "decay_all", "keywords", *(() if self.weight_decay else ("weight_decay",)))
        own = {key: value for key, value in vars(self).items() if key not in other and value is not None}

        if self.name in ("sgd", "adamw"):
            own["fused"] = True  # one pass over all parameters

        def made(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
            node = {**own, **self.keywords}
            kind = torch.optim.Optimizer
            optimizer: torch.optim.Optimizer = instantiate(node, "optim", kind, allow, groups)
            return optimizer

        optimizer = made(groups)
        if self.name == "own":
            tried = torch.nn.Parameter(torch.ones(2, 2))
            tried.grad = torch.ones_like(tried)
            with reading(f"optim._target_={self._target_}", "choose another optimizer, or other keys"):
                made([{"params": [tried]}]).step()
                optimizer.step()  # changes nothing without gradients, and refuses what is wrong on pieces
        return optimizer


@dataclass(frozen=True, kw_only=True)
class Constant:
    """Schedule the learning rate: linear up over the warm-up, then `optim.lr` times `scale`."""

    name: str = chosen("constant")
    warmup_epochs: float = at_least(0, at_most=10**9)

    def scale(self, epoch: float, progress: float) -> float:
        """Return the factor of `optim.lr`. ``progress``: 0 at the warm-up's end, 1 at the run's end."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Linear(Constant):
    name: str = chosen("linear")
    final_lr_fraction: float = at_least(0, below=1)

    def scale(self, epoch: float, progress: float) -> float:
        return self.final_lr_fraction + (1 - self.final_lr_fraction) * (1 - progress)


@dataclass(frozen=True, kw_only=True)
class Cosine(Linear):
    """Schedule half a cosine down to `final_lr_fraction`."""

    name: str = chosen("cosine")

    def scale(self, epoch: float, progress: float) -> float:
        return super().scale(epoch, 0.5 - 0.5 * math.cos(math.pi * progress))


@dataclass(frozen=True, kw_only=True)
class Steps(Constant):
    """Multiply the learning rate by ``factor`` after each of ``epochs``."""

    name: str = chosen("step")
    epochs: tuple[float, ...]
    factor: float = above(0)

    def scale(self, epoch: float, progress: float) -> float:
        return math.prod(self.factor for end in self.epochs if epoch >= end)


Sched = Cosine | Linear | Steps | Constant


@dataclass(frozen=True, kw_only=True)
class Parallel:
    replicate: int = at_least(1, mark=Mark.CHANGES)
    reshard_after_forward: bool = marked(Mark.CHANGES)
    precision: str = one_of("fp32", "bf16", "fp16")
    reduce: str | None = one_of("bf16")
    layout: str | None = one_of("even", "whole", mark=Mark.CHANGES)
    virtual_ranks: int = at_least(0, at_most=1024, mark=Mark.CHANGES)
    activation_checkpoint: bool = marked(Mark.CHANGES)
    compile: bool = marked(Mark.CHANGES)
    offload: bool = marked(Mark.CHANGES)

    def __post_init__(self) -> None:
        if self.virtual_ranks & (self.virtual_ranks - 1):
            raise UserError(f"parallel.virtual_ranks={self.virtual_ranks}: expected a power of two")
        if self.virtual_ranks and self.reduce is not None:
            raise UserError(
                f"parallel.reduce={self.reduce} rounds what is sent, and parallel.virtual_ranks must not: "
                "choose one of them"
            )


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    every_steps: int | None = at_least(1)
    keep: int = at_least(0)
    memory_every_steps: int = at_least(0)


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    TENSORBOARD: ClassVar[str] = "tensorboard"  # the program's own writer

    profile_at: int | None = at_least(2)
    scores: tuple[str | dict[str, Any], ...]
    writers: tuple[str, ...]

    def __post_init__(self) -> None:
        for path in self.writers:
            if path != self.TENSORBOARD and "." not in path:
                raise not_valid(f"monitor.writers=[{path}]: expected PACKAGE.CLASS", path, [self.TENSORBOARD])


@dataclass(frozen=True, kw_only=True)
class Config:
    # Groups whose files set keys of other sections and have none of their own.
    KEYLESS_GROUPS: ClassVar[tuple[str, ...]] = ("recipe", "debug")

    allow: tuple[str, ...] = marked(COMMAND)
    seed: int = at_least(0, mark=Mark.IMAGES)
    device: str = one_of("auto", "cpu", ACCELERATOR, mark=PROCESS)
    threads: int | None = at_least(1, at_most=1024, mark=PROCESS)
    resume: str = marked(COMMAND)
    run: RunConfig = marked(Mark.PER_HOST | COMMAND)
    train: Train
    ema: EmaConfig
    model: dict[str, Any]
    data: Data
    augment: dict[str, Any]
    optim: Optim
    sched: Sched
    parallel: Parallel
    checkpoint: Checkpoint = marked(REPORTED)
    monitor: MonitorConfig = marked(REPORTED)

    def __post_init__(self) -> None:
        if self.parallel.layout == "even" and self.optim.layout == "whole":
            raise UserError(
                f"parallel.layout=even: optim={self.optim.name} needs whole matrices; leave it out"
            )
        if self.parallel.virtual_ranks and self.train.accumulate > 1:
            raise UserError(
                f"train.accumulate={self.train.accumulate}: leave it out, since parallel.virtual_ranks="
                f"{self.parallel.virtual_ranks} is the number of micro-batches per step over all ranks"
            )
        if self.train.replay_every and not self.parallel.virtual_ranks:
            raise UserError(
                f"train.replay_every={self.train.replay_every}: a rank can only check another one by "
                "computing the same bits; choose parallel.virtual_ranks=V, a power of two"
            )

    def virtual_ranks(self, ranks: int) -> int:
        """Return the number of virtual ranks that ``ranks`` ranks compute; 0 for none, or if they cannot."""
        virtual = self.parallel.virtual_ranks
        return 0 if ranks > virtual or ranks & (ranks - 1) else virtual

    def micro_batches(self, ranks: int) -> int:
        """Return the micro-batches per step of each of ``ranks`` ranks."""
        return self.virtual_ranks(ranks) // ranks or self.train.accumulate

    @property
    def model_name(self) -> str:
        """The name of the model: torchvision's, timm's, or the path of the function that builds it."""
        return str(next(filter(None, map(self.model.get, ("name", "model_name", "_target_"))), None))

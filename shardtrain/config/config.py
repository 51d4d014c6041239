"""The training program's configuration: keys, defaults, ranges, and combinations that are refused.

Hydra begins with the defaults here. The comment above a field is the help of its key. All code after this
file uses these frozen dataclasses. Of `model` and `augment` the files in `configs/` have the keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from shardtrain.config.errors import UserError, not_valid
from shardtrain.config.schema import Mark, key
from shardtrain.layout import Policy

REPORTED = Mark.CHANGES | Mark.HIDDEN  # how a run is watched and saved, not what it learns
COMMAND = Mark.COMMAND | REPORTED
PROCESS = Mark.PER_HOST | REPORTED


def choice(*names: str, mark: Mark = Mark.NONE) -> Any:
    """Declare the field with the name that was chosen from a group; it is no key."""
    return key(choices=names, chosen=True, mark=mark)


data_set = partial(choice, mark=Mark.IMAGES)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    # null: data set, model and the time of the start
    name: str | None = key(None)
    # null: outputs/<run.name>
    dir: str | None = key(None)

    def __post_init__(self) -> None:
        parts = Path(self.name or "default").parts
        if not parts or ".." in parts or parts[0] == "/":
            raise UserError(f"run.name={self.name}: expected a name inside outputs/; run.dir takes any path")


@dataclass(frozen=True, kw_only=True)
class Train:
    # how often the training images are seen
    epochs: int = key(9, at_least=1, mark=Mark.CHANGES)
    # optimizer steps; null: as many as the epochs have
    max_steps: int | None = key(None, at_least=1, mark=REPORTED)
    # images of one optimizer step, over all ranks and micro-batches
    batch_size: int = key(96, at_least=1, mark=Mark.IMAGES)
    # micro-batches of one optimizer step
    accumulate: int = key(1, at_least=1, mark=Mark.CHANGES)
    # store filters, and so activations, pixel by pixel: faster on GPUs
    channels_last: bool = key(False, mark=Mark.CHANGES)
    # cross_entropy | loss._target_=PACKAGE.CLASS and its keywords
    loss: str | dict[str, Any] = key("cross_entropy", choices=("cross_entropy",))
    # of the loss: balanced | one per class: [1,5,2]; over the weights of all images of the step; null: all 1
    class_weights: str | tuple[float, ...] | None = key(None, choices=("balanced",), above=0)
    # part of each target that is spread over all classes
    label_smoothing: float = key(0.0, at_least=0, below=1)
    # alpha: blend pairs of images; 0: off. With cutmix, each image is given one of the two
    mixup: float = key(0.0, at_least=0)
    # alpha: put a box of one image into another; 0: off
    cutmix: float = key(0.0, at_least=0)
    # largest global gradient norm; null: no clipping
    clip_grad_norm: float | None = key(None, above=0)
    # K: every K steps a neighbour computes a micro-batch again; the run stops if bits differ; 0: never
    replay_every: int = key(0, at_least=0, mark=REPORTED)
    # launch each step as one CUDA graph, for steps that wait for Python; learning rates are rounded to fp32
    capture: bool = key(False, mark=Mark.CHANGES)
    # optimizer steps; null: 10, or fewer, so that a short run has ten points
    log_every: int | None = key(None, at_least=1, mark=REPORTED)
    # epochs; the last step is evaluated, too, unless a hook ends the run before it
    eval_every: int = key(1, at_least=1, mark=REPORTED)
    # the score that decides the best step, patience and the order of a sweep: loss/val, balanced/val, …
    best: str = key("acc1/val", mark=REPORTED)
    # evaluations without a better score after which training ends; null: it goes on
    patience: int | None = key(None, at_least=1, mark=REPORTED)
    # PACKAGE.CLASS, with allow=[PACKAGE]: subclasses of shardtrain.train.Hook, for steps and evaluations
    hooks: tuple[str, ...] = key((), mark=REPORTED)

    def __post_init__(self) -> None:
        if not isinstance(self.loss, str) and self.class_weights is not None:
            raise UserError(
                "train.class_weights is for train.loss=cross_entropy; your own loss weights classes itself"
            )


@dataclass(frozen=True, kw_only=True)
class EmaConfig:
    # of the moving average of the weights, per update, after the warm-up; null: no average is kept
    decay: float | None = key(None, at_least=0, below=1)
    # optimizer steps between updates
    every_steps: int = key(1, at_least=1)


@dataclass(frozen=True, kw_only=True)
class Images:
    """What all data sets have."""

    name: str
    # pixels of a side
    image_size: int = key(at_least=1, at_most=10**5)
    # pixels of a side in evaluation; null: as image_size
    eval_size: int | None = key(None, at_least=1, at_most=10**5)
    # N: N versions of each image, augmented apart, and 1/N of the images per epoch
    repeats: int = key(1, at_least=1, mark=Mark.IMAGES)
    # training images to choose by, a fraction or number; what was validation is then a test, once, at the end
    validation: float = key(0, at_least=0, mark=Mark.IMAGES)
    # which images `validation` holds out, of each class the same part: another number, others; never by seed
    split: int = key(0, at_least=0, mark=Mark.IMAGES)
    # images of each part that are used, evenly spaced; null: all
    limit: int | None = key(None, at_least=1, mark=Mark.IMAGES)
    # `completed` fills in what is null of the next three.

    # names of the classes by label, [cat,dog], for a data set without names; null: its own, else 0, 1, …
    classes: tuple[str, ...] | None = key(None, mark=Mark.IMAGES | Mark.HIDDEN)
    # of pixels from 0 to 1, one or one per channel: [0.5]; null: the data set's, of photographs ImageNet's
    mean: tuple[float, ...] | None = key(None, at_least=0, at_most=1)
    # likewise, their standard deviation
    std: tuple[float, ...] | None = key(None, above=0, at_most=1)
    # processes of a rank that load images; 0: none beside itself
    workers: int = key(0, at_least=0, at_most=1024, mark=PROCESS)

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
    """1,797 scanned digits of 8x8 pixels, part of this package."""

    name: str = data_set("digits")
    # pixels; images come as 8x8 and are resized when this differs
    image_size: int = key(8, at_least=1, at_most=10**5)


@dataclass(frozen=True, kw_only=True)
class Npz(Images):
    """One .npz of images and labels, as MedMNIST has them."""

    name: str = data_set("arrays")
    # FILE.npz as MedMNIST's: train_images, train_labels, val_… or test_…; uint8, channels last, first or none
    root: str = key(mark=Mark.PER_HOST)
    # pixels; 0: as they are; images of another size are resized
    image_size: int = key(0, at_least=0)


@dataclass(frozen=True, kw_only=True)
class Cifar(Images):
    """CIFAR-10 or CIFAR-100, in torchvision's copy."""

    name: str = data_set("cifar10", "cifar100")
    # folder with torchvision's copy of the data set, which is fetched if it is not there
    root: str = key("data", mark=Mark.PER_HOST)
    # pixels; images come as 32x32 and are resized when this differs
    image_size: int = key(32, at_least=1, at_most=10**5)


@dataclass(frozen=True, kw_only=True)
class ImageFolder(Images):
    """Photographs, a folder per class."""

    name: str = data_set("imagefolder")
    _target_: str = key("shardtrain.recipes.photos.image_folder", mark=Mark.IMAGES)
    # folder with train/<class>/<image> and val/<class>/<image>
    root: str = key("data", mark=Mark.PER_HOST)
    # pixels, of training crops and, without eval_size, of evaluation's centre crop
    image_size: int = key(224, at_least=1, at_most=10**5)
    # pixels of the shorter side before the centre crop; null: 256/224 of the crop's
    resize: int | None = key(None, at_least=1)
    # smallest part of an image's area in a random crop
    crop_area: float = key(0.08, above=0, at_most=1)
    # bilinear | bicubic: how photographs are resized
    interpolation: str = key("bilinear", choices=("bilinear", "bicubic"))
    workers: int = key(2, at_least=0, at_most=1024, mark=PROCESS)

    def __post_init__(self) -> None:
        if self.resize is not None and self.resize < self.side_in_eval:
            name = "image_size" if self.eval_size is None else "eval_size"
            raise UserError(f"data.resize={self.resize}: expected at least data.{name}={self.side_in_eval}")


@dataclass(frozen=True, kw_only=True)
class Csv(ImageFolder):
    """Photographs in one folder, and a table of their labels."""

    name: str = data_set("csv")
    _target_: str = key("shardtrain.recipes.table.image_table", mark=Mark.IMAGES)
    # folder of the images
    root: str = key(mark=Mark.PER_HOST)
    # FILE.csv with columns image (a path in root), label (name or number), perhaps split (train, val or test)
    table: str = key(mark=Mark.PER_HOST)


@dataclass(frozen=True, kw_only=True)
class Fake(Images):
    """Random images of ten classes, the same on every run; a quarter as many are held out."""

    name: str = data_set("fake")
    # training images
    limit: int = key(1280, at_least=1, at_most=10**8, mark=Mark.IMAGES)
    # of each image
    channels: int = key(3, at_least=1, at_most=1024)
    image_size: int = key(32, at_least=1, at_most=10**5)


@dataclass(frozen=True, kw_only=True)
class OwnData(Images):
    """What a function of your own returns: data._target_=PACKAGE.FUNCTION allow=[PACKAGE]."""

    name: str = data_set("own")
    # PACKAGE.FUNCTION with allow=[PACKAGE], which returns training and validation sets; other keys: keywords
    _target_: str = key(mark=Mark.IMAGES)
    # pixels; 0: as they are; images of another size are resized
    image_size: int = key(0, at_least=0)
    keywords: dict[str, Any] = field(metadata={"others": True})


Data = OwnData | Digits | Npz | Cifar | ImageFolder | Csv | Fake


@dataclass(frozen=True, kw_only=True)
class Optim:
    """An optimizer's class, `_target_`, and its keywords, which are the other keys."""

    name: str
    _target_: str
    # learning rate after the warm-up
    lr: float = key(1e-3, above=0)
    # of weights of two or more dimensions
    weight_decay: float = key(0.05, at_least=0)
    # true: normalisation layers and biases decay, too
    decay_all: bool = key(False)

    @property
    def layout(self) -> Policy:
        """How units are cut, unless `parallel.layout` is set: Muon orthogonalises whole matrices."""
        return "whole" if self.name == "muon" else "even"


@dataclass(frozen=True, kw_only=True)
class Sgd(Optim):
    """SGD with momentum."""

    name: str = choice("sgd")
    _target_: str = key("torch.optim.SGD")
    lr: float = key(0.04, above=0)
    # 0: none, which goes with nesterov=false
    momentum: float = key(0.9, at_least=0, below=1)
    # look ahead along the momentum
    nesterov: bool = key(True)
    weight_decay: float = key(5e-4, at_least=0)


@dataclass(frozen=True, kw_only=True)
class AdamW(Optim):
    """AdamW."""

    name: str = choice("adamw")
    _target_: str = key("torch.optim.AdamW")
    # of the means of gradients and of their squares
    betas: tuple[float, float] = key((0.9, 0.999), at_least=0, below=1)


@dataclass(frozen=True, kw_only=True)
class Muon(Optim):
    """Muon for hidden matrices and filters, AdamW for the rest."""

    name: str = choice("muon")
    _target_: str = key("shardtrain.recipes.muon.Muon")
    # of all parameters; as for AdamW, or somewhat more
    lr: float = key(2e-3, above=0)
    # of hidden matrices and filters, whose updates are orthogonalised (Jordan et al., 2024)
    momentum: float = key(0.95, at_least=0, below=1)
    # look ahead along the momentum
    nesterov: bool = key(True)
    # of AdamW, for norms, biases, embeddings, the first and the last layer
    betas: tuple[float, float] = key((0.9, 0.95), at_least=0, below=1)


@dataclass(frozen=True, kw_only=True)
class OwnOptim(Optim):
    """Another class of torch's, optim._target_=torch.optim.RAdam, or your own, with allow=[PACKAGE]."""

    name: str = choice("own")
    # torch.optim.RAdam, or PACKAGE.CLASS with allow=[PACKAGE]; other keys are its keywords
    _target_: str
    weight_decay: float = key(0.0, at_least=0)
    keywords: dict[str, Any] = field(metadata={"others": True})


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A warm-up, then optim.lr to the end."""

    name: str = choice("constant")
    # epochs of linear increase, at most half the run
    warmup_epochs: float = key(0.0, at_least=0, at_most=10**9)

    def scale(self, epoch: float, progress: float) -> float:
        """Return the factor of `optim.lr`. ``progress``: 0 at the warm-up's end, 1 at the run's end."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Linear(Constant):
    """A warm-up, then a line down."""

    name: str = choice("linear")
    warmup_epochs: float = key(2.0, at_least=0, at_most=10**9)
    # fraction of optim.lr that is left at the end
    final_lr_fraction: float = key(0.0, at_least=0, below=1)

    def scale(self, epoch: float, progress: float) -> float:
        return self.final_lr_fraction + (1 - self.final_lr_fraction) * (1 - progress)


@dataclass(frozen=True, kw_only=True)
class Cosine(Linear):
    """A warm-up, then half a cosine down."""

    name: str = choice("cosine")

    def scale(self, epoch: float, progress: float) -> float:
        return super().scale(epoch, 0.5 - 0.5 * math.cos(math.pi * progress))


@dataclass(frozen=True, kw_only=True)
class Steps(Constant):
    """A warm-up, then steps down."""

    name: str = choice("step")
    # after each of them the learning rate is multiplied by factor
    epochs: tuple[float, ...] = key((30, 60, 80))
    # by which it is multiplied
    factor: float = key(0.1, above=0)

    def scale(self, epoch: float, progress: float) -> float:
        return math.prod(self.factor for end in self.epochs if epoch >= end)


Sched = Cosine | Linear | Steps | Constant


@dataclass(frozen=True, kw_only=True)
class Parallel:
    # copies of the model, each cut over ranks / replicate consecutive ranks; gradients are averaged across
    replicate: int = key(1, at_least=1, mark=Mark.CHANGES)
    # false: keep parameters gathered until backward, trading memory for traffic
    reshard_after_forward: bool = key(True, mark=Mark.CHANGES)
    # true: shards, gradients and optimizer state in host memory, updates on the CPU; GPUs only
    offload: bool = key(False, mark=Mark.CHANGES)
    # true: keep units' inputs only, compute the rest again in backward: less memory, one more forward
    activation_checkpoint: bool = key(False, mark=Mark.CHANGES)
    # true: torch.compile each unit: a faster step after a slow first one
    compile: bool = key(False, mark=Mark.CHANGES)
    # fp32 | bf16 | fp16: compute and communicate so; normalisation, loss, update in fp32
    precision: str = key("fp32", choices=("fp32", "bf16", "fp16"))
    # null: as the optimizer needs | even | whole: cut between parameters, as LAMB and Adafactor need it
    layout: str | None = key(None, choices=("even", "whole"), mark=Mark.CHANGES)
    # bf16: gradients travel in bf16, whatever computes; null: in the dtype that computes
    reduce: str | None = key(None, choices=("bf16",))
    # V: compute as V ranks would, to the same bits on any N that divides V, both powers of two; 0: as N ranks
    virtual_ranks: int = key(0, at_least=0, at_most=1024, mark=Mark.CHANGES)

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
    # optimizer steps; null: once an epoch. The end and every best score are saved, too
    every_steps: int | None = key(None, at_least=1)
    # newest checkpoints that are kept, besides the best one; 0: none are written
    keep: int = key(2, at_least=0)
    # also keep the newest in /dev/shm, for restarts on one host; 0: never. docs/failures.md
    memory_every_steps: int = key(0, at_least=0)


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    TENSORBOARD: ClassVar[str] = "tensorboard"  # the program's own writer

    # recall of each class, their mean balanced/val, confusion matrix; not of more than 50 classes |
    # PACKAGE.FUNCTION of all logits and labels, with allow=[PACKAGE], or {_target_: …, KEYWORD: VALUE}
    scores: tuple[str | dict[str, Any], ...] = key(("per_class",))
    # event files | PACKAGE.CLASS, with allow=[PACKAGE]: subclasses of shardtrain.monitor.Writer; []: none
    writers: tuple[str, ...] = key((TENSORBOARD,))
    # the first of three steps that torch's profiler records; null: none
    profile_at: int | None = key(None, at_least=2)

    def __post_init__(self) -> None:
        for path in self.writers:
            if path != self.TENSORBOARD and "." not in path:
                raise not_valid(f"monitor.writers=[{path}]: expected PACKAGE.CLASS", path, [self.TENSORBOARD])


@dataclass(frozen=True, kw_only=True)
class Config:
    # Groups whose files set keys of other sections and have none of their own.
    KEYLESS_GROUPS: ClassVar[tuple[str, ...]] = ("recipe", "debug")

    # on the command line alone: packages that keys may name (model._target_, …), which runs their code
    allow: tuple[str, ...] = key((), mark=COMMAND)
    # of initial values, order of images, augmentation, dropout
    seed: int = key(0, at_least=0, mark=Mark.IMAGES)
    # auto | cpu | cuda
    device: str = key("auto", mark=PROCESS)
    # CPU threads of a rank; null: the cores of this host over its ranks
    threads: int | None = key(None, at_least=1, at_most=1024, mark=PROCESS)
    # FILE: a run's config.yaml in place of the defaults here
    config: str | None = key(None, mark=COMMAND)
    # auto: from the run directory's newest checkpoint | none | a checkpoint or run to start from
    resume: str = key("auto", mark=COMMAND)
    run: RunConfig = key(mark=Mark.PER_HOST | COMMAND)
    train: Train
    ema: EmaConfig
    model: dict[str, Any] = key(group=True)
    data: Data = key(group=True)
    augment: dict[str, Any] = key(group=True)
    optim: Sgd | AdamW | Muon | OwnOptim = key(group=True)
    sched: Sched = key(group=True)
    parallel: Parallel = key(group=True)
    checkpoint: Checkpoint = key(group=True, mark=REPORTED)
    monitor: MonitorConfig = key(group=True, mark=REPORTED)

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

"""The typed configuration of the training program.

Everything behind this file works on frozen dataclasses whose values `checked.py` has checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from omegaconf import DictConfig

from shardtrain.job.schema import UserError, above, at_least, checked, fraction, one_of, variants
from shardtrain.layout import Policy


@dataclass(frozen=True)
class Run:
    name: str | None
    dir: str | None


@dataclass(frozen=True)
class Train:
    channels_last: bool
    """Whether convolutions work on images that are stored pixel by pixel."""
    eval_flip: bool
    """Whether an evaluation takes the mean over an image and its mirror image."""
    epochs: int = at_least(1)
    max_steps: int | None = at_least(1)
    batch_size: int = at_least(1)
    """Images of one optimizer step, over all ranks and micro-batches."""
    accumulate: int = at_least(1)
    """Micro-batches of one optimizer step."""
    loss: str = one_of("cross_entropy", "bce")
    label_smoothing: float = fraction()
    mixup: float = at_least(0)
    """Alpha of the Beta distribution; 0: off."""
    cutmix: float = at_least(0)
    clip_grad_norm: float | None = above(0)
    log_every: int = at_least(1)
    """Steps."""
    eval_every: int = at_least(1)
    """Epochs."""
    nonfinite: str = one_of("stop", "skip")
    """What to do about a step whose loss or gradient is no number."""
    skip_at_most: int = at_least(1)
    """Steps in a row."""


@dataclass(frozen=True)
class Ema:
    decay: float | None = fraction()
    """Of the average, at each of its updates; None: no average is kept."""
    every_steps: int = at_least(1)
    after_epochs: float = at_least(0)
    """Until then the average is a copy."""


@dataclass(frozen=True)
class Reference:
    """What has been published of a recipe."""

    source: str
    conditions: str
    accuracy: float = at_least(0)
    """Percent, at first guess."""


@dataclass(frozen=True)
class Grow:
    """Training images that grow to `data.image_size`, linearly, an epoch at a time."""

    from_: int = at_least(1)
    """Pixels of a side at first."""
    epochs: int = at_least(1)
    """The epoch, counted from 0, that has the full size."""
    after: int = field(default=0, metadata={"at_least": 0})
    """Epochs at the first size."""
    multiple: int = field(default=32, metadata={"at_least": 1})
    """Sizes on the way are multiples of so many pixels."""


@dataclass(frozen=True, kw_only=True)
class Images:
    """What all data sets have."""

    name: str
    image_size: int = at_least(1)
    eval_size: int | None = at_least(1)
    """None: as `image_size`."""
    grow: Grow | None
    repeats: int = at_least(1)
    """Times that an epoch shows an image, each time augmented anew; it shows as many fewer images."""
    limit: int | None = at_least(1)
    """Images of each part that are used."""
    read: str = one_of("each", "one_per_host")
    """Which ranks read images from storage."""
    workers: int = at_least(0)


@dataclass(frozen=True, kw_only=True)
class Digits(Images):
    pass


@dataclass(frozen=True, kw_only=True)
class Cifar(Images):
    root: str
    download: bool


@dataclass(frozen=True, kw_only=True)
class Photos(Images):
    """Images in files, of any size, read when they are needed."""

    root: str
    resize: int = at_least(1)
    """Shorter side before the centre crop of evaluation."""
    crop_area: float = above(0)
    """Smallest part of an image's area that a random crop of training takes."""
    corrupt: str = one_of("fatal", "skip")
    """What to do about an image that cannot be read."""


@dataclass(frozen=True, kw_only=True)
class ImageFolder(Photos):
    pass


@dataclass(frozen=True, kw_only=True)
class WebDataset(Photos):
    train: str
    """Shards, as a pattern below `root`."""
    val: str


@dataclass(frozen=True, kw_only=True)
class HuggingFace(Photos):
    train: str
    """A split."""
    val: str
    image: str
    """A column."""
    label: str


@dataclass(frozen=True, kw_only=True)
class Fake(Images):
    train_images: int = at_least(1)
    val_images: int = at_least(1)
    classes: int = at_least(2)
    channels: int = at_least(1)


@dataclass(frozen=True)
class Sgd:
    name: str
    nesterov: bool
    decay_all: bool
    """Whether normalisation layers and biases decay, too."""
    lr: float = above(0)
    momentum: float = fraction()
    weight_decay: float = at_least(0)

    def moments(self, hidden_matrix: bool) -> int:
        """Tensors that the optimizer keeps of a parameter, each of the parameter's size."""
        return int(self.momentum > 0)


@dataclass(frozen=True)
class AdamW:
    name: str
    decay_all: bool
    betas: tuple[float, float] = fraction()
    lr: float = above(0)
    eps: float = above(0)
    weight_decay: float = at_least(0)

    def moments(self, hidden_matrix: bool) -> int:
        return 2


@dataclass(frozen=True)
class Muon:
    name: str
    nesterov: bool
    decay_all: bool
    betas: tuple[float, float] = fraction()
    """AdamW's, which steps on what is no hidden matrix."""
    lr: float = above(0)
    momentum: float = fraction()
    eps: float = above(0)
    weight_decay: float = at_least(0)

    def moments(self, hidden_matrix: bool) -> int:
        return 1 if hidden_matrix else 2


@dataclass(frozen=True)
class Cosine:
    name: str
    warmup_epochs: float = at_least(0)
    final_lr: float = fraction()
    """Where the cosine ends, as a fraction of `optim.lr`."""


@dataclass(frozen=True)
class Linear:
    name: str
    warmup_epochs: float = at_least(0)
    final_lr: float = fraction()


@dataclass(frozen=True)
class Step:
    name: str
    epochs: tuple[float, ...]
    """After each of them the learning rate is multiplied by `factor`."""
    factor: float = above(0)
    warmup_epochs: float = at_least(0)


@dataclass(frozen=True)
class Constant:
    name: str
    warmup_epochs: float = at_least(0)


@dataclass(frozen=True)
class Parallel:
    reshard_after_forward: bool
    sync_batchnorm: bool
    """Whether BatchNorm's statistics are those of all ranks' images."""
    activation_checkpoint: bool
    """Whether units compute their activations again in backward."""
    compile: bool
    """Whether units run by torch.compile."""
    offload: bool
    """Whether shards lie in host memory while units compute on a GPU."""
    replicate: int = at_least(1)
    """Copies of the model, each cut over a shard group."""
    shard: int | None = at_least(1)
    """Ranks of a shard group; None: as many as there are, over `replicate`."""
    layout: str = one_of("auto", "even", "whole")
    transport: str = one_of("auto", "process_group", "shared_memory")
    precision: str = one_of("fp32", "bf16", "fp16")
    traffic: str | None = one_of("int8", "int8_gathers", "int8_reductions")
    """What moves as int8 in blocks; None: nothing."""

    def __post_init__(self) -> None:
        if self.traffic is not None and self.replicate > 1:
            raise UserError(
                f"parallel.traffic={self.traffic} is for one shard group; choose parallel.replicate=1, or "
                "parallel.traffic=null"
            )
        if self.traffic is not None and self.transport == "shared_memory":
            raise UserError(
                f"parallel.traffic={self.traffic}: ranks that share memory send nothing that could be made "
                "smaller; choose parallel.transport=process_group, or parallel.traffic=null"
            )


@dataclass(frozen=True)
class Checkpoint:
    asynchronous: bool
    every_steps: int | None = at_least(1)
    """None: once an epoch."""
    keep: int = at_least(0)
    """Besides the best one; 0 writes none at all."""
    on_failure: str = one_of("continue", "stop")


@dataclass(frozen=True)
class Monitor:
    tensorboard: bool
    norms: bool
    """Of every parameter's gradient, weight and update."""
    plan: bool
    """Compare the run with its plan at the end."""
    profile_at: int | None = at_least(2)
    """Step. None: when asked."""
    progress: str = one_of("auto", "bar", "lines", "none")


@dataclass(frozen=True)
class Sweep:
    """Read with `--multirun` only."""

    trials: int | None = at_least(1)
    """None: every combination."""


DATA = variants(
    digits=Digits,
    cifar10=Cifar,
    cifar100=Cifar,
    imagefolder=ImageFolder,
    webdataset=WebDataset,
    huggingface=HuggingFace,
    fake=Fake,
)
OPTIM = variants(sgd=Sgd, adamw=AdamW, muon=Muon)
SCHED = variants(cosine=Cosine, linear=Linear, step=Step, constant=Constant)
Data = Digits | Cifar | ImageFolder | WebDataset | HuggingFace | Fake
Optim = Sgd | AdamW | Muon
Sched = Cosine | Linear | Step | Constant


@dataclass(frozen=True)
class Config:
    # Groups whose files set keys of other sections and have none of their own.
    KEYLESS_GROUPS: ClassVar[tuple[str, ...]] = ("recipe", "debug")

    dry_run: bool
    run: Run
    train: Train
    model: dict[str, Any]
    ema: Ema
    augment: dict[str, Any]
    parallel: Parallel
    checkpoint: Checkpoint
    monitor: Monitor
    sweep: Sweep
    resume: str
    eval_only: bool
    reference: Reference | None
    data: Data = field(metadata=DATA)
    optim: Optim = field(metadata=OPTIM)
    sched: Sched = field(metadata=SCHED)
    seed: int = at_least(0)
    device: str = one_of("auto", "cpu", "cuda")
    threads: int | None = at_least(1)


def from_hydra(raw: DictConfig) -> Config:
    """Checks names, types, ranges and what does not go together, and returns the frozen configuration."""
    config = checked(raw, Config)
    if isinstance(config.optim, Muon) and config.parallel.layout == "even":
        raise UserError(
            "optim=muon needs whole matrices, and parallel.layout=even cuts them: leave parallel.layout at "
            "auto, or set it to whole"
        )
    return config


def layout_of(config: Config) -> Policy:
    """The layout for `shard`: whole parameters where the optimizer needs them, else what balances best."""
    asked = config.parallel.layout
    return "whole" if asked == "whole" or (asked == "auto" and isinstance(config.optim, Muon)) else "even"


def require_equal_groups(parallel: Parallel, world_size: int) -> None:
    """Refuses replicas that the ranks cannot be divided among."""
    replicate, shard = parallel.replicate, parallel.shard
    if shard is not None and shard * replicate != world_size:
        raise UserError(
            f"parallel.shard={shard} × parallel.replicate={replicate} is not the number of ranks, "
            f"{world_size}; parallel.shard=null leaves it to parallel.replicate"
        )
    if world_size % replicate:
        fitting = [str(count) for count in range(1, world_size + 1) if world_size % count == 0]
        raise UserError(
            f"parallel.replicate={replicate} does not divide {world_size} ranks; {', '.join(fitting)} would"
        )


def require_equal_parts(train: Train, world_size: int) -> None:
    """Refuses a batch that ranks and micro-batches do not divide."""
    parts = world_size * train.accumulate
    if train.batch_size % parts:
        below = train.batch_size // parts * parts
        fitting = [str(size) for size in (below, below + parts) if size]
        raise UserError(
            f"train.batch_size={train.batch_size} is not divisible by {world_size} ranks × "
            f"train.accumulate={train.accumulate}; {' or '.join(fitting)} would fit"
        )

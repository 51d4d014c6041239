"""The job of a configuration: data, model, loss, learning rates and length."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import shardtrain
from shardtrain import data
from shardtrain import device as devices
from shardtrain.config.config import Config, ImageFolder, Parallel, Sched, Train
from shardtrain.config.errors import UserError, not_valid, reading
from shardtrain.config.schema import typed
from shardtrain.config.target import REFUSALS, instantiate
from shardtrain.data.sampler import generator
from shardtrain.job import tags
from shardtrain.job.evaluation import FEW_CLASSES, Evaluation, Scores, Scoring
from shardtrain.job.inference import Inference, as_on_card, inference_of
from shardtrain.job.losses import CrossEntropy, Loss, rehearse_loss, weights_of
from shardtrain.job.model import converted, ema_of, initial_model, model_notes, shard_with_optimizer
from shardtrain.job.scores import chosen_scores, rehearse
from shardtrain.launch.ranks import together
from shardtrain.optim import Ema, GradScaler

INITIAL_IMAGES = 5000  # training images that a model's method `init_from_images` gets


class Job(NamedTuple):
    """Everything that the training loop needs."""

    model: nn.Module
    loss: Loss
    optimizer: torch.optim.Optimizer
    schedule: LambdaLR
    scaler: GradScaler  # of the loss; it does nothing unless the model computes in fp16
    ema: Ema | None
    scoring: Scoring  # of images to evaluate
    train: data.TrainFeed
    val: data.EvalFeed
    test: data.EvalFeed | None  # images evaluated once, at the end; they influence no decision
    device: torch.device  # of computation and batches; shards may lie in host memory
    inference: Inference | None  # None: the model does not get images of the program's data sets
    class_counts: Mapping[str, Mapping[str, int]]  # images by part (train, val, test) and class, where known
    labels: Mapping[str, str]  # their digest by part (train, val), "" where they are not known
    steps: int
    first_step: int  # steps that earlier processes have done
    steps_per_epoch: int
    data_name: str
    notes: Sequence[str] = ()  # lines that the run prints at its start


def build(
    config: Config, rank: int, world_size: int, device: torch.device, first_step: int = 0
) -> tuple[Job, Config]:
    """Build the job after ``first_step`` steps; return it with the configuration completed from its data."""
    share = share_of(config, rank, world_size)
    images = load_images(config)
    config = completed(config, images)
    length = length_of(config, images, share)
    steps = length[0]
    model = initial_model(config, deferred=True, resumed=first_step > 0)
    sample = (max(1, share.micro_batch), images.preprocessing.channels)
    for side in sorted(config.data.sides):  # a size that the model refuses fails now, not after hours
        require_logits(model, (*sample, side, side), len(images.classes))
    inference = inference_of(config, images.preprocessing, model)
    notes = (*images.notes, *model_notes(model, config.model, resumed=first_step > 0))
    model = converted(model, config, device)
    optimizer = shard_with_optimizer(model, config, device=device)
    if first_step == 0 and not config.model.get("weights"):
        initialize_from_images(model, images, config.data.image_size, device)
    seed_process(device, config.seed, rank, first_step)
    train, val, test = feeds(config, images, share, device, range(first_step, steps))
    loss = rehearsed_loss(config, images, sample[0], device)
    job = Job(
        loss=loss,
        scoring=scoring_of(config, images, loss),
        train=train,
        val=val,
        test=test,
        inference=inference,
        class_counts=images.counts,
        labels=images.labels,
        data_name=name_and_sizes(images),
        notes=notes,
        **update_of(config, model, optimizer, device, first_step, length),
    )
    return job, config


def update_of(
    config: Config,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    first_step: int,
    length: tuple[int, int],
) -> dict[str, Any]:
    """Return the fields of a `Job` that its data do not decide. ``length``: see `length_of`."""
    steps, steps_per_epoch = length
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    factor = lr_factor(config.sched, steps, steps_per_epoch)
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": LambdaLR(optimizer, factor, last_epoch=first_step - 1),
        "scaler": GradScaler(device.type, enabled=config.parallel.precision == "fp16"),
        "ema": ema_of(model, config, warmup_of(config.sched, steps, steps_per_epoch)),
        "device": device,
        "steps": steps,
        "first_step": first_step,
        "steps_per_epoch": steps_per_epoch,
    }


def load_images(config: Config, *, all_held_out: bool = False) -> data.DataSet:
    """Load the data set, to be prepared as the card of `model.weights` says. Collective.

    all_held_out: all images are to be scored, none is to train on.
    """
    # Data may be missing on one host only.
    images = together(lambda: data.load(config.data, config.allow, all_held_out=all_held_out))
    preprocessing, notes = as_on_card(config, images.preprocessing, images.name)
    return images._replace(preprocessing=preprocessing, notes=(*images.notes, *notes))


def name_and_sizes(images: data.DataSet) -> str:
    to_test = f" + {len(images.test):,} to test" if images.test else ""
    return f"{images.name}, {len(images.train):,} + {len(images.val):,} held out{to_test}"


def share_of(config: Config, rank: int, world_size: int) -> data.Share:
    """Return the part of each batch that ``rank`` computes. Raises UserError if the parts are not equal."""
    require_equal_parts(config, world_size)
    require_equal_groups(config.parallel, world_size)
    micro_batches = config.micro_batches(world_size)
    virtual = config.virtual_ranks(world_size)
    return data.Share(config.train.batch_size, micro_batches, rank, world_size, virtual)


def length_of(config: Config, images: data.DataSet, share: data.Share) -> tuple[int, int]:
    """Return the steps of the run, and of an epoch. Raises UserError if not one batch can be filled."""
    per_epoch = len(images.train) // share.batch_size
    if per_epoch == 0:
        raise UserError(
            f"train.batch_size={share.batch_size} is more than the {len(images.train)} training images of "
            f"{images.name}"
        )
    steps = per_epoch * config.train.epochs
    return min(steps, config.train.max_steps or steps), per_epoch


def initialize_from_images(model: nn.Module, images: data.DataSet, side: int, device: torch.device) -> None:
    """Call a sharded model's method `init_from_images`, if it has one, with prepared training images."""
    init_from_images = getattr(model, "init_from_images", None)
    if init_from_images is not None:
        first, _ = images.train[list(range(min(INITIAL_IMAGES, len(images.train))))]
        with shardtrain.unsharded(model):
            init_from_images(data.Prepare(images.preprocessing, side, device)(first))


def seed_process(device: torch.device, seed: int, rank: int, step: int) -> None:
    """Seed what draws random numbers on ``rank`` in ``step``: torch, Python, NumPy and the device."""
    # By the step, so that dropout depends neither on evaluations nor on where a run resumed.
    seed = generator("step", seed, rank, step).initial_seed()
    devices.seed(device, seed)
    np.random.seed(seed % (1 << 32))


def require_logits(model: nn.Module, sample: tuple[int, ...], classes: int) -> None:
    """Raise UserError unless ``model`` takes images of shape ``sample`` and returns logits of all classes."""
    meta = {name: value.detach().to("meta") for name, value in model.state_dict(keep_vars=True).items()}
    what = f"the model does not take images of shape {'×'.join(map(str, sample))}"
    refusals = (RuntimeError, ValueError, AssertionError)
    with reading(what, "data.image_size and train.batch_size decide the shape", refusals):
        try:
            logits = torch.func.functional_call(model, meta, (torch.empty(sample, device="meta"),))
        except RuntimeError as error:
            if "meta tensor" in str(error):  # its forward reads values, so it cannot be tried without data
                return
            raise
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < classes:
        result = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise UserError(f"the model returns {result}, expected logits for at least {classes} classes")


def completed(config: Config, images: data.DataSet) -> Config:
    """Return the configuration with open values filled in from the data set."""
    preprocessing = images.preprocessing
    known: dict[str, Any] = {name: getattr(preprocessing, name) for name in ("classes", "mean", "std")}
    if config.data.image_size == 0:
        known["image_size"] = images.side
    if isinstance(config.data, ImageFolder):
        known["resize"] = preprocessing.resize
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, **known))
    decided = {
        "num_classes": len(preprocessing.classes),
        "in_channels": preprocessing.channels,
        "image_size": config.data.image_size,
    }
    model = {"num_classes": None, "in_channels": None, "image_size": None, **config.model}
    for key, expected in decided.items():
        value = expected if model[key] is None else typed(int, model[key], f"model.{key}")
        model[key] = value
        if key == "num_classes" and value < expected:
            raise UserError(f"model.num_classes={value}: {images.name} has {expected} classes")
        if key != "num_classes" and value != expected:
            raise UserError(f"model.{key}={value}, but the images of {images.name} have {expected}")
    return dataclasses.replace(config, model=model)


def feeds(
    config: Config, images: data.DataSet, share: data.Share, device: torch.device, steps: range
) -> tuple[data.TrainFeed, data.EvalFeed, data.EvalFeed | None]:
    """Return the batches to train on in ``steps``, to evaluate by, and to test by."""
    keys = config.data
    mix = None
    augment = None
    if config.augment.get("_target_") is None:
        images = images._replace(train=images.train_as_val or images.train)  # no random crops either
    else:
        augment = instantiate(config.augment, "augment", object, config.allow)
        if change := getattr(augment, "image", None):
            shape = f"{images.preprocessing.channels} channels"
            with reading("augment", f"choose another one for images of {shape}", REFUSALS):
                change(images.train[[0]][0][0])
    if config.train.mixup or config.train.cutmix:
        classes = config.model.get("num_classes", len(images.classes))
        mix = data.Mix(config.train.mixup, config.train.cutmix, classes, share, config.seed)
    train = data.TrainFeed(
        images.train,
        share,
        data.Prepare(images.preprocessing, keys.image_size, device),
        seed=config.seed,
        steps=steps,
        repeats=keys.repeats,
        workers=keys.workers,
        augment=augment,
        mix=mix,
    )
    prepare = data.Prepare(images.preprocessing, images.preprocessing.image_size, device)
    evaluated = partial(data.EvalFeed, share=share, prepare=prepare, workers=keys.workers)
    return train, evaluated(images.val), evaluated(images.test) if images.test else None


def rehearsed_loss(config: Config, images: data.DataSet, batch_size: int, device: torch.device) -> Loss:
    """Return the loss on ``device``, after it was called once as training will call it."""
    loss = loss_of(config.train, config.allow, weights_of(config.train.class_weights, images))
    if isinstance(loss, nn.Module):  # it may have weights
        loss.to(device)
    soft = bool(config.train.mixup or config.train.cutmix)
    columns = config.model.get("num_classes") or len(images.classes)
    rehearse_loss(loss, images.classes, (batch_size, columns), soft=soft, device=device)
    return loss


def loss_of(train: Train, allow: Sequence[str] = (), class_weights: Tensor | None = None) -> Loss:
    """Return cross-entropy, weighted by classes or not, or what the keys of `train.loss` describe."""
    smoothing = train.label_smoothing
    if isinstance(train.loss, Mapping):
        smoothed = {"label_smoothing": smoothing} if smoothing else {}  # refused where it has none
        loss: Loss = instantiate({**smoothed, **train.loss}, "train.loss", Callable, allow)  # type: ignore[arg-type]
        return loss
    return CrossEntropy(class_weights, smoothing)


def scoring_of(config: Config, images: data.DataSet, loss: Loss) -> Scoring:
    """Return what an evaluation computes. Collective.

    Raises UserError if it has no score that `train.best` names, or if a function of `monitor.scores` fails.
    """
    train = config.train
    classes = images.classes
    functions = chosen_scores(config.monitor.scores, len(classes), config.allow)
    mixed = bool(train.mixup or train.cutmix)
    fifth = 0.0 if config.model["num_classes"] > FEW_CLASSES else None
    results = rehearse(functions, classes)
    known = Evaluation(Scores(0.0, 0.0, fifth), results=results).ranking()
    if train.best not in known:
        raise not_valid(f"train.best={train.best}: no such score", train.best, known)
    lower_is_better = [name for name, higher in results.higher_is_better.items() if not higher]
    minimised = [tags.VAL_LOSS, *(tags.score("val", name) for name in lower_is_better)]
    return Scoring(loss, mixed, functions, classes, is_minimised=train.best in minimised)


def lr_factor(sched: Sched, steps: int, steps_per_epoch: int) -> Callable[[int], float]:
    """Return a function from a step, counted from 0, to its learning rate as a fraction of `optim.lr`.

    The rate rises linearly over the warm-up, then follows the schedule. torch's schedules have state that is
    saved; this one depends only on the step.
    """
    warmup = warmup_of(sched, steps, steps_per_epoch)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        return sched.scale(step / steps_per_epoch, progress)

    return factor


def warmup_of(sched: Sched, steps: int, steps_per_epoch: int) -> int:
    """Return the steps of the warm-up: at most half the run."""
    return min(round(sched.warmup_epochs * steps_per_epoch), steps // 2)


def require_equal_groups(parallel: Parallel, world_size: int) -> None:
    """Raise UserError if the ranks cannot be divided into `parallel.replicate` groups."""
    replicate = parallel.replicate
    if world_size % replicate:
        fitting = ", ".join(str(count) for count in range(1, world_size + 1) if world_size % count == 0)
        raise UserError(f"parallel.replicate={replicate} does not divide {world_size} ranks; {fitting} would")


def require_equal_parts(config: Config, world_size: int) -> None:
    """Raise UserError if ranks and micro-batches, of pairs if images are mixed, do not divide the batch."""
    train = config.train
    size = train.batch_size
    virtual = config.virtual_ranks(world_size)
    parts = world_size * config.micro_batches(world_size)
    # A virtual rank's batch is the same on any number of ranks. Of an odd one the last image is not mixed.
    mixes = (train.mixup or train.cutmix) and not virtual
    if mixes:
        parts *= 2
    if size % parts:
        below = size // parts * parts
        fitting = " or ".join(str(fits) for fits in (below, below + parts) if fits)
        by = f"{world_size} ranks × train.accumulate={train.accumulate}"
        by = f"parallel.virtual_ranks={virtual}" if virtual else by
        by += " × 2 images that train.mixup or train.cutmix mixes" if mixes else ""
        raise UserError(f"train.batch_size={size} is not divisible by {by}; {fitting} would fit")

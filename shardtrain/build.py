"""From the configuration to what the loop needs: data, model, optimizer and schedule."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.flop_counter import FlopCounterMode

import shardtrain
from shardtrain import comm, data, targets
from shardtrain.comm import Transport
from shardtrain.config import AdamW, Config, Optim, Parallel, Sgd, layout_of, micro_batch, shard_group
from shardtrain.data.mixing import Mix, Mixed
from shardtrain.data.sampler import generator
from shardtrain.errors import UserError
from shardtrain.losses import Loss, loss_of
from shardtrain.optim import Ema, GradScaler, Muon
from shardtrain.optim.muon import hidden_matrices
from shardtrain.precision import Precision
from shardtrain.schedules import lr_factor
from shardtrain.weights import load_weights

# Logits, and so the loss, are fp32 in any case.
PRECISIONS = {
    "fp32": None,
    "bf16": Precision(param=torch.bfloat16, output=torch.float32),
    "fp16": Precision(param=torch.float16, output=torch.float32),
}

EVAL_BATCH = 256  # images of a rank in one forward of an evaluation, at most


class Job(NamedTuple):
    """Everything that the loop works on."""

    model: nn.Module
    loss: Loss
    optimizer: torch.optim.Optimizer
    schedule: LambdaLR
    scaler: GradScaler
    """Of the loss; it does nothing unless the model computes in fp16."""
    ema: Ema | None
    train: data.TrainFeed | Mixed
    val: data.EvalFeed
    share: data.Share
    steps: int
    first_step: int  # steps that an earlier process has done
    steps_per_epoch: int
    data_name: str
    forward_flops: float  # of one image


def build(
    config: Config, rank: int, world_size: int, device: torch.device, first_step: int = 0
) -> tuple[Job, Config]:
    """The job after ``first_step`` steps, and the configuration completed by what the data set decides."""
    micro_batch(config.train, world_size)
    shard_group(config.parallel, world_size)
    share = data.Share(config.train.batch_size, config.train.accumulate, rank, world_size)
    images = data.load(config.data)
    config = dataclasses.replace(config, model=completed(config, images))
    steps_per_epoch = _steps_per_epoch(config, images)
    steps = steps_per_epoch * config.train.epochs
    steps = min(steps, config.train.max_steps or steps)

    model = start_model(config)
    sample = (share.micro_batch, images.channels, config.data.image_size, config.data.image_size)
    flops = forward_flops(model, sample, images.classes)
    for side in data.sides(config.data) - {config.data.image_size}:
        forward_flops(model, (*sample[:2], side, side), images.classes)  # refused now, not after hours
    model = converted(model, config, device)
    optimizer = shard_with_optimizer(model, config, device=device)
    seed_process("rank", config.seed, rank)  # dropout differs between ranks

    train, val = _feeds(config, images, share, device, range(first_step, steps))
    job = Job(
        model=model,
        loss=loss_of(config.train.loss, config.train.label_smoothing),
        optimizer=optimizer,
        schedule=_schedule(optimizer, lr_factor(config.sched, steps, steps_per_epoch), first_step),
        scaler=GradScaler(device.type, enabled=config.parallel.precision == "fp16"),
        ema=ema_of(model, config, steps_per_epoch),
        train=train,
        val=val,
        share=share,
        steps=steps,
        first_step=first_step,
        steps_per_epoch=steps_per_epoch,
        data_name=f"{images.name}, {len(images.train):,} + {len(images.val):,} held out",
        forward_flops=flops / share.micro_batch,
    )
    return job, config


def seed_process(*key: int | str) -> None:
    """Make whatever draws random numbers in this process depend on ``key`` alone."""
    seed = generator(*key).initial_seed()
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


def initial_model(config: Config) -> nn.Module:
    """The unsharded model before the first step, the same on every rank."""
    torch.manual_seed(config.seed)
    model = plain_model(config.model)
    if config.model.get("weights") is not None:
        load_weights(model, Path(config.model["weights"]).expanduser())
    return model


def start_model(config: Config) -> nn.Module:
    """The same for `shard`: values that are drawn, not loaded, are computed when it cuts them."""
    if config.model.get("weights") is not None:
        return initial_model(config)
    torch.manual_seed(config.seed)
    return shardtrain.deferred(plain_model, config.model)


def plain_model(model: Mapping[str, Any]) -> nn.Module:
    """The unsharded model that the config group names, with values of its own initialisation."""
    built = targets.build({key: value for key, value in model.items() if key != "weights"}, "model")
    assert isinstance(built, nn.Module)
    return built


def placed(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """``model`` on ``device``, as the configuration asks for."""
    return converted(model, config, device).to(device)


def converted(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """``model`` with the BatchNorm and the memory format that the configuration asks for on ``device``."""
    if config.parallel.sync_batchnorm:
        model = synchronised(model, device)
    if config.train.channels_last:
        model.to(memory_format=torch.channels_last)
    return model


def synchronised(model: nn.Module, device: torch.device) -> nn.Module:
    """Torch's SyncBatchNorm in place of every BatchNorm: statistics of the whole micro-batch of all ranks."""
    if device.type != "cuda":
        raise UserError(
            f"parallel.sync_batchnorm=true needs CUDA, found {device.type}: torch's SyncBatchNorm computes "
            "on GPUs only"
        )
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert isinstance(converted, nn.Module)
    return converted


def forward_flops(model: nn.Module, sample: tuple[int, ...], classes: int) -> float:
    """Operations of a forward of shape `sample`, from a forward without data; refuses what does not fit."""
    meta = {name: value.detach().to("meta") for name, value in model.state_dict(keep_vars=True).items()}
    shape = "×".join(map(str, sample))
    try:
        with FlopCounterMode(display=False) as counter:
            logits = torch.func.functional_call(model, meta, (torch.empty(sample, device="meta"),))
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = str(error).split("\n", 1)[0]
        raise UserError(
            f"the model does not take images of shape {shape}: {reason} "
            f"(data.image_size and train.batch_size decide the shape)"
        ) from error
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < classes:
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise UserError(f"the model returns {found}, expected logits for at least {classes} classes")
    return float(counter.get_total_flops())


def _schedule(optimizer: torch.optim.Optimizer, factor: Callable[[int], float], first_step: int) -> LambdaLR:
    """A pure function of the step, so that to continue it takes no more than the step."""
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return LambdaLR(optimizer, factor, last_epoch=first_step - 1)


def parameter_groups(model: nn.Module, weight_decay: float, decay_all: bool = False) -> list[dict[str, Any]]:
    """Decay for matrices and filters; for biases and normalisation layers only with `decay_all`.

    Told apart by shape, so call it before `shard` makes every parameter one-dimensional.
    """
    decayed = [param for param in model.parameters() if decay_all or param.ndim > 1]
    exempt = [param for param in model.parameters() if not decay_all and param.ndim <= 1]
    groups = [(decayed, weight_decay), (exempt, 0.0)]
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]


def precision_of(parallel: Parallel) -> Precision:
    """The dtypes that the configuration asks for."""
    return dataclasses.replace(
        PRECISIONS[parallel.precision] or Precision(),
        gather=torch.int8 if parallel.traffic in ("int8", "int8_gathers") else None,
        reduce=torch.int8 if parallel.traffic in ("int8", "int8_reductions") else None,
    )


def shard_with_optimizer(
    model: nn.Module, config: Config, transport: Transport | None = None, device: torch.device | None = None
) -> torch.optim.Optimizer:
    """Shard ``model`` in place, over ``transport`` and on ``device`` if given, and make its optimizer."""
    groups = _groups(model, config.optim)
    shardtrain.shard(
        model,
        layout=layout_of(config),
        precision=precision_of(config.parallel),
        reshard_after_forward=config.parallel.reshard_after_forward,
        transport=transport or config.parallel.transport,
        device=device,
        offload=config.parallel.offload,
        mesh=None if transport else _mesh(config.parallel),
    )
    _exchange_forwards(model, config)
    return _optimizer(config.optim, groups)


def uncompiled(config: Config) -> Config:
    """The same without compiling."""
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, compile=False))


def _exchange_forwards(model: nn.Module, config: Config) -> None:
    """Let units compile and checkpoint as the configuration says."""
    try:
        if config.parallel.compile:
            shardtrain.compile_units(model)
        if config.parallel.activation_checkpoint:
            shardtrain.checkpoint_activations(model)
    except ValueError as error:
        raise UserError(str(error)) from None


def _mesh(parallel: Parallel) -> DeviceMesh | None:
    """Shard groups of consecutive ranks, so that a host holds whole ones; None for a single group."""
    world = comm.world_size()
    group = shard_group(parallel, world)
    if group == world:
        return None
    device = comm.control_device().type
    return init_device_mesh(device, (parallel.replicate, group), mesh_dim_names=("replicate", "shard"))


def plain_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """The optimizer of ``model`` as it is, unsharded."""
    return _optimizer(config.optim, _groups(model, config.optim))


def _groups(model: nn.Module, optim: Optim) -> list[dict[str, Any]]:
    groups = parameter_groups(model, optim.weight_decay, optim.decay_all)
    if isinstance(optim, Sgd | AdamW):
        return groups
    matrices = set(hidden_matrices(model))
    split = [
        {**group, "params": [p for p in group["params"] if (p in matrices) is muon], "use_muon": muon}
        for group in groups
        for muon in (True, False)
    ]
    return [group for group in split if group["params"]]


def _optimizer(optim: Optim, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if isinstance(optim, Sgd):
        return torch.optim.SGD(
            groups, lr=optim.lr, momentum=optim.momentum, nesterov=optim.nesterov, fused=True
        )
    if isinstance(optim, AdamW):
        return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
    return Muon(
        groups,
        lr=optim.lr,
        momentum=optim.momentum,
        nesterov=optim.nesterov,
        betas=optim.betas,
        eps=optim.eps,
    )


def ema_of(model: nn.Module, config: Config, steps_per_epoch: int) -> Ema | None:
    """The moving average of a sharded ``model``'s weights, if the configuration asks for one."""
    if config.ema.decay is None:
        return None
    after = round(config.ema.after_epochs * steps_per_epoch)
    return Ema(model, config.ema.decay, every=config.ema.every_steps, after=after)


def completed(config: Config, images: data.DataSet) -> dict[str, Any]:
    """The model's keys, those left open taken from the data set."""
    decided = {
        "num_classes": images.classes,
        "in_channels": images.channels,
        "image_size": config.data.image_size,
    }
    model = dict(config.model)
    for key, value in decided.items():
        if key in model and model[key] is None:
            model[key] = value
    for key in ("in_channels", "image_size"):
        if model.get(key, decided[key]) != decided[key]:
            raise UserError(f"model.{key}={model[key]}, but the images of {images.name} have {decided[key]}")
    if model.get("num_classes", images.classes) < images.classes:
        raise UserError(
            f"model.num_classes={model['num_classes']}: {images.name} has {images.classes} classes"
        )
    return model


def _steps_per_epoch(config: Config, images: data.DataSet) -> int:
    steps = len(images.train) // config.train.batch_size
    if steps == 0:
        raise UserError(
            f"train.batch_size={config.train.batch_size} is more than the {len(images.train)} "
            f"training images of {images.name}"
        )
    return steps


def _feeds(
    config: Config, images: data.DataSet, share: data.Share, device: torch.device, steps: range
) -> tuple[data.TrainFeed | Mixed, data.EvalFeed]:
    prepare = data.Prepare(images, config.data.image_size, device)
    augment = None
    if config.augment.get("_target_") is not None:
        augment = targets.build(config.augment, "augment")
    workers = config.data.workers
    image = getattr(augment, "image", None)
    scatter = comm.host_scatter() if config.data.read == "one_per_host" else None
    train = data.TrainFeed(
        images._replace(train=data.Augmented(images.train, image)) if image else images,
        share,
        prepare,
        augment=augment,
        seed=config.seed,
        workers=workers,
        first_step=steps.start,
        last_step=steps.stop,
        repeats=config.data.repeats,
        side=partial(data.side_in, grow=config.data.grow, full=config.data.image_size),
        scatter=scatter,
    )
    prepare = data.Prepare(images, data.eval_size(config.data), device)
    val = data.EvalFeed(images, share, prepare, batch_size=EVAL_BATCH, workers=workers, scatter=scatter)
    mixup, cutmix = config.train.mixup, config.train.cutmix
    if not (mixup or cutmix):
        return train, val
    classes = config.model.get("num_classes", images.classes)
    return Mixed(train, Mix(mixup, cutmix, classes, share, config.seed)), val

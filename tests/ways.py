"""The ways to shard a model and to take a step: one table, for the CPU, a real device and a simulated one.

`WAYS` has them by name. `sharded` shards the table's model in a way, and `train` takes its steps.
`train_plain` takes the same steps with the plain model, which computes the micro-batches of all ranks.
`deviation` compares the two. Nothing here asks which device or transport it runs with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardtrain
from shardtrain import Precision
from shardtrain.optim import Ema

from small import Block, MakeOptimizer, OddNet, images, sgd

STEPS = 4
VIRTUAL_RANKS = 8
LOW = torch.bfloat16


@dataclass(frozen=True)
class Way:
    """Describe how a model is sharded, and what a step does besides forward, backward and update.

    ``tolerance``: how far the updates may be from those of the plain model in fp32, see `deviation`.
    """

    options: dict[str, Any] = field(default_factory=dict)  # of `shard`
    precision: Precision = field(default_factory=Precision)
    micro_batches: int = 1  # per rank and step; all but the last under `no_sync`
    clip: float = 0.0  # the largest norm of a gradient; 0: any
    scale: float = 0.0  # what a scaled loss is first multiplied by; 0: it is not scaled
    frozen: str = ""  # parameters whose names begin so require no gradient
    recomputes: bool = False  # blocks are checkpointed
    deferred: bool = False  # the model has values on rank 0 only
    placed: bool = False  # the model is on the CPU, and `shard(device=...)` moves it
    averages: float = 0.0  # the decay of an `Ema`, which is compared instead of the weights; 0: there is none
    saves: bool = False  # a checkpoint is saved after a step, and loaded after the parameters have changed
    replicas: bool = False  # two; the caller of `sharded` gives a mesh or a transport that has them
    tolerance: float = 1e-4

    @property
    def virtual(self) -> bool:
        return "virtual_ranks" in self.options

    def count(self, world: int) -> int:
        """Return the micro-batches per rank and step."""
        return VIRTUAL_RANKS // world if self.virtual else self.micro_batches


OFFLOAD = {"offload": True}
KEPT = {"reshard_after_forward": False}
WHOLE = {"layout": "whole"}
VIRTUAL = {"virtual_ranks": VIRTUAL_RANKS}
JOINED = {"unit_bytes": 4000}  # the first two blocks are one unit, and all three in bf16
BF16 = Precision(LOW)
FP16 = Precision(torch.float16)

WAYS = {
    "even": Way(),
    "one unit": Way({"units": []}),
    "whole": Way(WHOLE),
    "kept": Way(KEPT),
    "offload": Way(OFFLOAD),
    "bf16": Way(precision=BF16, tolerance=0.1),
    "fp16 scaled": Way(precision=FP16, scale=2.0**8, clip=0.5, tolerance=0.02),
    "reduce bf16": Way(precision=Precision(reduce=LOW), tolerance=0.02),
    "bf16, reduce fp32": Way(precision=Precision(LOW, reduce=torch.float32), tolerance=0.1),
    "frozen": Way(frozen="blocks.1"),
    "no_sync": Way(micro_batches=3),
    "clip": Way(clip=0.3),
    "recomputed": Way(recomputes=True),
    "checkpoint": Way(saves=True),
    "deferred": Way(deferred=True, placed=True),
    "device=": Way(placed=True),
    "EMA": Way(averages=0.5),
    "virtual ranks": Way(VIRTUAL),
    "replicas": Way(replicas=True),
    "joined": Way(JOINED),
    # Several at once, where one may disturb another.
    "whole, bf16": Way(WHOLE, BF16, tolerance=0.1),
    "kept, no_sync": Way(KEPT, micro_batches=3),
    "frozen, no_sync, clip": Way(frozen="stem", micro_batches=3, clip=0.3),
    "offload, kept": Way(OFFLOAD | KEPT),
    "offload, bf16": Way(OFFLOAD, BF16, tolerance=0.1),
    "offload, frozen": Way(OFFLOAD, frozen="blocks.1"),
    "offload, no_sync, clip": Way(OFFLOAD, micro_batches=3, clip=0.3),
    "offload, fp16 scaled": Way(OFFLOAD, FP16, scale=2.0**8, clip=0.5, tolerance=0.02),
    "offload, recomputed": Way(OFFLOAD, recomputes=True),
    "offload, checkpoint": Way(OFFLOAD, saves=True),
    "offload, deferred": Way(OFFLOAD, deferred=True, placed=True),
    "offload, EMA": Way(OFFLOAD, averages=0.5),
    "offload, virtual ranks": Way(OFFLOAD | VIRTUAL),
    "offload, replicas": Way(OFFLOAD, replicas=True),
    "virtual ranks, bf16": Way(VIRTUAL, BF16, tolerance=0.1),
    "virtual ranks, replicas": Way(VIRTUAL, replicas=True),
    "kept, bf16": Way(KEPT, BF16, tolerance=0.1),
    "replicas, bf16": Way(precision=BF16, replicas=True, tolerance=0.1),
    "offload, reduce bf16": Way(OFFLOAD, Precision(reduce=LOW), tolerance=0.02),
    "offload, replicas, bf16": Way(OFFLOAD, BF16, micro_batches=2, clip=0.3, replicas=True, tolerance=0.1),
    "joined, bf16": Way(JOINED, BF16, micro_batches=2, clip=0.3, tolerance=0.1),
    "joined, frozen, no_sync": Way(JOINED, frozen="blocks.1", micro_batches=3),
    "joined, kept, recomputed": Way(JOINED | KEPT, recomputes=True),
    "joined, offload, recomputed": Way(JOINED | OFFLOAD, recomputes=True),
    "joined, whole": Way(JOINED | WHOLE),
    "joined, virtual ranks": Way(JOINED | VIRTUAL),
    "joined, replicas, checkpoint": Way(JOINED, replicas=True, saves=True),
    "offload, virtual ranks, replicas": Way(OFFLOAD | VIRTUAL, replicas=True),
}


class Result(NamedTuple):
    """Hold this rank's losses, and by how much each parameter, or its average, has changed."""

    losses: list[float]
    updates: dict[str, Tensor]


def build(way: Way) -> nn.Module:
    """Return the model of the table on the CPU, the same at every call."""
    torch.manual_seed(0)
    model = shardtrain.deferred(OddNet) if way.deferred else OddNet()
    for name, param in model.named_parameters():
        param.requires_grad_(not way.frozen or not name.startswith(way.frozen))
    if way.recomputes:
        options = {"preserve_rng_state": False, "determinism_check": "none"}
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
    return model


def sharded(way: Way, device: torch.device, **usual: Any) -> nn.Module:
    """Return the model of the table on ``device``, sharded; ``usual``: options of `shard` for all ways."""
    model = build(way)
    if way.placed:
        usual["device"] = device
    else:
        model.to(device)
    return shardtrain.shard(model, **{"units": [Block], "precision": way.precision, **usual, **way.options})


def loss_of(model: nn.Module, step: int, number: int, device: torch.device) -> Tensor:
    """Return the mean loss on micro-batch ``number`` of the step."""
    x, y = images(step, number)
    return F.cross_entropy(model(x.to(device)).float(), y.to(device))


def compute(
    model: nn.Module, way: Way, scaler: shardtrain.GradScaler, numbers: range, step: int, device: torch.device
) -> list[Tensor]:
    """Run forward and backward of the micro-batches ``numbers`` of the step; return their losses."""
    losses = []
    for number in numbers:
        if way.virtual:
            within = shardtrain.virtual_rank(model, number, seed=0, step=step)
            share = 1
        else:
            within = contextlib.nullcontext() if number == numbers[-1] else shardtrain.no_sync(model)
            share = len(numbers)
        with within:
            loss = loss_of(model, step, number, device)
            scaler.scale(loss / share).backward()
        losses.append(loss.detach())
    return losses


def train(
    model: nn.Module,
    way: Way,
    device: torch.device,
    rank: int,
    world: int,
    folder: Path | None = None,
    optimizer: MakeOptimizer = sgd,
    each_step: Callable[[int], object] = lambda step: None,
) -> Result:
    """Take `STEPS` steps with what `sharded` returned. Collective.

    ``folder``: of all ranks, empty, for a way that saves. ``each_step(step)`` is called before each step.
    """
    start = dict(build(Way()).named_parameters())
    updates = optimizer(model)
    scaler = shardtrain.GradScaler(device.type, init_scale=way.scale or 1.0, enabled=way.scale > 0)
    ema = Ema(model, way.averages) if way.averages else None
    count = way.count(world)
    numbers = range(rank * count, (rank + 1) * count)
    losses: list[Tensor] = []
    for step in range(STEPS):
        each_step(step)
        losses += compute(model, way, scaler, numbers, step, device)
        if way.clip:
            scaler.unscale_(updates)
            shardtrain.clip_grad_norm_(model, way.clip)
        scaler.step(updates)
        scaler.update()
        updates.zero_grad()
        if ema is not None:
            ema.update(step + 1)
        if way.saves and step == 1:
            assert folder is not None
            load_again(model, updates, folder / "saved")
    with contextlib.nullcontext() if ema is None else ema.swapped():
        state = shardtrain.full_state_dict(model)
    changes = {name: state[name].float() - value.detach() for name, value in start.items()}
    return Result([loss.item() for loss in losses], changes)


def load_again(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Save a checkpoint, spoil what it has, and load it."""
    shardtrain.checkpoint.save(path, model, optimizer)
    for param in model.parameters():
        param.data.fill_(7.0)
        optimizer.state[param]["momentum_buffer"].fill_(7.0)
    shardtrain.checkpoint.load(path, model, optimizer)


def train_plain(
    way: Way, device: torch.device, rank: int, world: int, optimizer: MakeOptimizer = sgd
) -> Result:
    """Take the steps of `train` with the plain model in fp32. Each rank computes for all ranks."""
    model = build(Way(frozen=way.frozen)).to(device)
    start = {name: param.detach().cpu().clone() for name, param in model.named_parameters()}
    updates = optimizer(model)
    averages = {name: param.detach().clone() for name, param in model.named_parameters()}
    count = way.count(world)
    losses: list[float] = []
    for step in range(STEPS):
        for number in range(world * count):
            loss = loss_of(model, step, number, device)
            (loss / (world * count)).backward()
            if number // count == rank:
                losses.append(loss.item())
        if way.clip:
            nn.utils.clip_grad_norm_(model.parameters(), way.clip)
        updates.step()
        updates.zero_grad()
        for name, param in model.named_parameters():
            averages[name].lerp_(param.detach(), 1 - way.averages)
    return Result(losses, {name: value.cpu() - start[name] for name, value in averages.items()})


def deviation(result: Result, expected: Result) -> float:
    """Return how far two results are apart: the largest difference of losses, or that of updates, relatively.

    Updates are one long vector: the length of the difference over the length of what is expected.
    """
    assert len(result.losses) == len(expected.losses)
    losses = max(abs(a - b) for a, b in zip(result.losses, expected.losses, strict=True))
    names = expected.updates
    difference = torch.cat([(result.updates[name] - names[name]).flatten() for name in names])
    length = torch.cat([update.flatten() for update in names.values()]).norm()
    return max(losses, (difference.norm() / length).item())

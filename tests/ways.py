"""The ways to shard a model and to take a step: one table, for the CPU, a real device and a simulated one.

`WAYS` has them by name. `sharded` shards the table's model in a way, and `train` takes its steps.
`train_plain` takes the same steps with the plain model, which computes the micro-batches of all ranks.
`deviation` compares the two. `Recurrent` is a model of its own, since cuDNN moves its weights. Which device
or transport runs decides the caller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardtrain
from shardtrain import Precision
from shardtrain import device as devices
from shardtrain.optim import Ema

from small import Block, MakeOptimizer, OddNet, images, sgd

STEPS = 4
VIRTUAL_RANKS = 8
LOW = torch.bfloat16
CARDS = torch.cuda.device_count()  # real ones
Between = Callable[[nn.Module, torch.optim.Optimizer, torch.device], object]
Around = Callable[[torch.device], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class Way:
    """How a model is sharded, and what a step does besides forward, backward and update.

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
    reduces_each: bool = False  # all micro-batches are reduced: none is under `no_sync`
    together: bool = False  # one backward follows the forwards of all micro-batches
    compiled: str = ""  # "blocks", before they are sharded, or "model", afterwards
    wrapped: bool = False  # torch's wrapper checkpoints blocks
    autocast: bool = False  # forwards run under autocast in bf16
    moved: bool = False  # the model is sharded on the CPU, and `.to` moves it
    around: Around | None = None  # all steps run inside
    between: Between | None = None  # called after the first two steps
    replicas: bool = False  # two; the caller of `sharded` gives a mesh or a transport that has them
    tolerance: float = 1e-4

    @property
    def virtual(self) -> bool:
        return "virtual_ranks" in self.options

    def count(self, world: int) -> int:
        """Return the micro-batches per rank and step."""
        return VIRTUAL_RANKS // world if self.virtual else self.micro_batches


def evaluate(model: nn.Module, _: torch.optim.Optimizer, device: torch.device) -> None:
    model.eval()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            loss_of(model, 90, 0, device)
    model.train()


def read_full_states(model: nn.Module, optimizer: torch.optim.Optimizer, _: torch.device) -> None:
    with shardtrain.unsharded(model):
        assert all(param.isfinite().all() for param in model.parameters())
    shardtrain.full_state_dict(model)
    shardtrain.optimizer_state_dict(model, optimizer)


def work_late(_: nn.Module, __: torch.optim.Optimizer, device: torch.device) -> None:
    """Let the device be far behind the host, and fill memory that is free with what is no number."""
    if CARDS:
        torch.cuda._sleep(20_000_000)  # cycles
    for _ in range(20):
        torch.full((1 << 16,), float("nan"), device=device)


@contextlib.contextmanager
def on_own_stream(device: torch.device) -> Iterator[None]:
    """Launch what is inside on a stream of the user's. A CPU has none."""
    stream = devices.new_stream(device)
    if stream is None:
        yield
        return
    before = devices.current_stream(device)
    stream.wait_stream(before)
    with devices.inside(stream):
        yield
    before.wait_stream(stream)


def nested(name: str, _: nn.Module) -> bool:
    return name in ("blocks", "blocks.0", "blocks.1.conv", "fc")


def leaves(_: str, module: nn.Module) -> bool:
    return next(module.children(), None) is None


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
    "fp16 scaled": Way(precision=FP16, scale=2.0**8, clip=0.5, tolerance=0.03),
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
    "automatic units": Way({"units": None}),
    "each reduced": Way(micro_batches=3, reduces_each=True),
    "two forwards": Way(micro_batches=2, together=True),
    "autocast": Way(autocast=True, tolerance=0.1),
    "stream": Way(around=on_own_stream),
    "wrapped": Way(wrapped=True),
    "moved": Way(moved=True),
    "compiled model": Way(compiled="model"),
    "evaluation": Way(between=evaluate),
    "full states": Way(between=read_full_states),
    "late kernels": Way(between=work_late),
    "nested": Way({"units": nested}),
    "every leaf": Way({"units": leaves}),
    # Several at once, where one may disturb another.
    "whole, one unit, kept": Way(WHOLE | KEPT | {"units": []}),
    "whole, frozen": Way(WHOLE, frozen="blocks.0.conv"),
    "kept, no_sync": Way(KEPT, micro_batches=3),
    "frozen, no_sync, clip": Way(frozen="stem", micro_batches=3, clip=0.3),
    "offload, bf16": Way(OFFLOAD, BF16, tolerance=0.1),
    "offload, no_sync, clip": Way(OFFLOAD, micro_batches=3, clip=0.3),
    "offload, fp16 scaled": Way(OFFLOAD, FP16, scale=2.0**8, clip=0.5, tolerance=0.03),
    "offload, checkpoint": Way(OFFLOAD, saves=True),
    "offload, virtual ranks, replicas": Way(OFFLOAD | VIRTUAL, replicas=True),
    "offload, replicas, bf16": Way(OFFLOAD, BF16, micro_batches=2, clip=0.3, replicas=True, tolerance=0.1),
    "whole, bf16, checkpoint": Way(WHOLE, BF16, saves=True, tolerance=0.1),
    "joined, bf16": Way(JOINED, BF16, micro_batches=2, clip=0.3, tolerance=0.1),
    "joined, frozen, no_sync": Way(JOINED, frozen="blocks.1", micro_batches=3),
    "joined, compiled blocks": Way(JOINED, compiled="blocks"),
    "joined, replicas, checkpoint": Way(JOINED, replicas=True, saves=True),
}


# Captured, a way that offloads, scales its loss or has virtual ranks is refused. Averages and checkpoints are
# no part of a step, and what `step_of` does not do tells nothing there.
CAPTURABLE = [
    name
    for name, way in WAYS.items()
    if not (way.virtual or way.scale or "offload" in way.options)
    and not (way.around or way.between or way.autocast or way.together or way.reduces_each or way.compiled)
    and name not in ("EMA", "checkpoint", "whole, bf16, checkpoint")
]


class Result(NamedTuple):
    """This rank's losses, and by how much each parameter, or its average, has changed."""

    losses: list[float]
    updates: dict[str, Tensor]


def build(way: Way) -> nn.Module:
    """Return the model of the table on the CPU, the same at every call."""
    torch.manual_seed(0)
    model = shardtrain.deferred(OddNet) if way.deferred else OddNet()
    for name, param in model.named_parameters():
        param.requires_grad_(not way.frozen or not name.startswith(way.frozen))
    options = {"preserve_rng_state": False, "determinism_check": "none"}
    if way.recomputes:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
    if way.wrapped:
        wrapper = partial(checkpoint_wrapper, **options)
        apply_activation_checkpointing(model, wrapper, lambda module: isinstance(module, Block))
    return model


def sharded(way: Way, device: torch.device, compiler: str = "eager", **usual: Any) -> nn.Module:
    """Return the model of the table on ``device``, sharded.

    ``compiler``: the backend of torch.compile. ``usual``: options of `shard` for all ways.
    """
    model = build(way)
    if way.placed:
        usual["device"] = device
    elif not way.moved:
        model.to(device)
    if way.compiled == "blocks":
        for block in model.blocks:
            block.compile(backend=compiler)
    shardtrain.shard(model, **{"units": [Block], "precision": way.precision, **usual, **way.options})
    if way.compiled == "model":
        model.compile(backend=compiler)
    return model.to(device) if way.moved else model


def loss_of(model: nn.Module, step: int, number: int, device: torch.device, autocast: bool = False) -> Tensor:
    """Return the mean loss on micro-batch ``number`` of the step."""
    x, y = images(step, number)
    with torch.autocast(device.type, LOW, enabled=autocast):
        logits = model(x.to(device))
    return F.cross_entropy(logits.float(), y.to(device))


def compute(
    model: nn.Module, way: Way, scaler: shardtrain.GradScaler, numbers: range, step: int, device: torch.device
) -> list[Tensor]:
    """Run forward and backward of the micro-batches ``numbers`` of the step; return their losses."""
    if way.together:
        losses = [loss_of(model, step, number, device) for number in numbers]
        scaler.scale(torch.stack(losses).mean()).backward()
        return [loss.detach() for loss in losses]
    losses = []
    for number in numbers:
        if way.virtual:
            within = shardtrain.virtual_rank(model, number, seed=0, step=step)
            share = 1
        else:
            reduces = way.reduces_each or number == numbers[-1]
            within = contextlib.nullcontext() if reduces else shardtrain.no_sync(model)
            share = len(numbers)
        with within:
            loss = loss_of(model, step, number, device, way.autocast)
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
    with (way.around or contextlib.nullcontext)(device):
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
            if way.between is not None and step < 2:
                way.between(model, updates, device)
        with contextlib.nullcontext() if ema is None else ema.swapped():
            state = shardtrain.full_state_dict(model)
        changes = {name: state[name].float() - value.detach() for name, value in start.items()}
        return Result([loss.item() for loss in losses], changes)


def step_of(way: Way, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., list[Tensor]]:
    """Return a step of a way that is `CAPTURABLE`; it takes micro-batches, and returns losses and norms."""

    def step(*batches: Any) -> list[Tensor]:
        losses = []
        for number, (x, y) in enumerate(batches, 1):
            with contextlib.nullcontext() if number == len(batches) else shardtrain.no_sync(model):
                loss = F.cross_entropy(model(x).float(), y)
                (loss / len(batches)).backward()
            losses.append(loss)
        if way.clip:
            losses.append(shardtrain.clip_grad_norm_(model, way.clip))
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return step


def load_again(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Save a checkpoint, spoil what it has, and load it."""
    shardtrain.checkpoint.save(path, model, optimizer)
    for param in model.parameters():
        param.data.fill_(7.0)
        for value in optimizer.state.get(param, {}).values():  # none of a parameter that is elsewhere
            value.fill_(7.0)
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


class Recurrent(nn.Module):
    """A recurrent network after `flatten_parameters`, as torch advises: it moves weights."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.memory = kind(5, 7, batch_first=True)
        self.fc = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.memory.flatten_parameters()
        return self.fc(self.memory(x.flatten(1, 2))[0][:, -1])


def recurrent(place: torch.device, kind: type[nn.RNNBase] = nn.LSTM) -> nn.Module:
    torch.manual_seed(0)
    return Recurrent(kind).to(place)


def recurrent_steps(
    model: nn.Module,
    device: torch.device,
    rank: int,
    size: int,
    next_step: Callable[[], None] = lambda: None,
) -> list[float]:
    """Return the losses of a rank's batches; a model that is not sharded computes those of all ranks."""
    optimizer = sgd(model)
    losses = []
    for step in range(3):
        next_step()
        for number in range(size):
            x, y = images(step, rank if size == 1 else number)
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            (loss / size).backward()
            if number == rank or size == 1:
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses

"""Steps captured by `shardtrain.capture` on one GPU, beside eager ones: bits, milliseconds, reserved memory.

The part ``captured`` of ``gpu_first.py`` runs `findings`, one per scene. A scene takes ten steps on changing
inputs as they are, and again captured: losses and parameters must be equal in every bit. Its peers, the plain
model, DDP and FSDP2, are captured by hand. Dry it runs on the simulated device: do the scenes run at all?
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torchvision.models.vision_transformer import EncoderBlock, VisionTransformer

import shardtrain
from shardtrain import Precision, comm
from shardtrain import device as devices

DEVICE = torch.device("cuda", 0)
STEPS = 10
LOW = torch.bfloat16
Step = Callable[..., Any]


class Scene(NamedTuple):
    """Say which wrapper computes, and what a step does besides forward, backward and update."""

    wrapper: str = "nccl"  # plain, ddp, fsdp2, silent, nccl, or nccl with all in bf16
    micro_batches: int = 1
    clip: float = 0.0
    dropout: float = 0.0
    schedules: bool = False
    saves: bool = False


SCENES = {
    "silent": Scene("silent"),
    "nccl": Scene(),
    "nccl, all in bf16": Scene("bf16"),
    "plain": Scene("plain"),
    "DDP": Scene("ddp"),
    "FSDP2": Scene("fsdp2"),
    "clip": Scene(clip=1.0),
    "accumulate 4": Scene(micro_batches=4),
    "dropout": Scene(dropout=0.1),
    "another rate in each step": Scene(schedules=True),
    "saved and loaded between": Scene(saves=True),
}


def wrapped(scene: Scene, sizes: tuple[int, ...]) -> nn.Module:
    """Return the scene's model: a ViT-S, or one of ``sizes``."""
    torch.manual_seed(0)
    image, patch, layers, heads, width, mlp = sizes
    model: nn.Module = VisionTransformer(
        image, patch, layers, heads, width, mlp, dropout=scene.dropout, num_classes=100
    ).to(DEVICE)
    if scene.wrapper == "plain":
        return model
    if scene.wrapper == "ddp":
        return DistributedDataParallel(model, device_ids=[0])
    if scene.wrapper == "fsdp2":
        policy = MixedPrecisionPolicy(param_dtype=LOW)
        for module in model.modules():
            if isinstance(module, EncoderBlock):
                fully_shard(module, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)
    precision = Precision(LOW, keep=()) if scene.wrapper == "bf16" else Precision(LOW)
    transport: Any = "auto" if scene.wrapper == "silent" else comm.ProcessGroupTransport(dist.group.WORLD)
    return shardtrain.shard(model, units=[EncoderBlock], precision=precision, transport=transport)


def step_of(scene: Scene, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    own = scene.wrapper in ("silent", "nccl", "bf16")
    casts = scene.wrapper in ("plain", "ddp")

    def step(*batches: Any) -> list[Tensor]:
        losses = []
        for number, (x, y) in enumerate(batches, 1):
            synced = number == len(batches) or not own
            with contextlib.nullcontext() if synced else shardtrain.no_sync(model):
                with torch.autocast("cuda", LOW, enabled=casts):
                    loss = F.cross_entropy(model(x).float(), y)
                (loss / len(batches)).backward()
            losses.append(loss.detach())
        if scene.clip:
            shardtrain.clip_grad_norm_(model, scene.clip)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return step


def by_hand(step: Step, warmup: int) -> Step:
    """Return ``step`` captured as the package does it, for models that it does not know."""
    recorder = devices.recorder(DEVICE)
    assert recorder is not None
    state: dict[str, Any] = {"calls": 0}

    def call(*batches: Any) -> Any:
        state["calls"] += 1
        if state["calls"] <= warmup:
            return recorder.warm_up(partial(step, *batches))
        if "launch" not in state:
            state["inputs"] = [(x.clone(), y.clone()) for x, y in batches]
            state["results"], state["launch"] = recorder.record(partial(step, *state["inputs"]))
        for own, new in zip(state["inputs"], batches, strict=True):
            for to, source in zip(own, new, strict=True):
                to.copy_(source)
        state["launch"]()
        return [result.clone() for result in state["results"]]

    return call


class Figures(NamedTuple):
    losses: list[float]
    digest: str
    ms: float
    reserved_mb: int
    summary: str


def digest_of(model: nn.Module) -> str:
    found = hashlib.sha256()
    for param in model.parameters():
        value = param.detach()
        value = value.to_local() if hasattr(value, "to_local") else value  # FSDP2's
        found.update(value.float().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def milliseconds(action: Callable[[], object], rounds: int) -> float:
    """Return the time of one ``action``, after three to warm up."""
    for _ in range(3):
        action()
    torch.accelerator.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        action()
    torch.accelerator.synchronize()
    return (time.perf_counter() - start) / rounds * 1e3


def play(scene: Scene, captures: bool, sizes: tuple[int, ...], batch_size: int, rounds: int) -> Figures:
    """Take the scene's steps, and time more of them."""
    model = wrapped(scene, sizes)
    rate = torch.tensor(1e-4, device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)
    step = step_of(scene, model, optimizer)
    if captures and scene.wrapper in ("plain", "ddp", "fsdp2"):
        step = by_hand(step, 11 if scene.wrapper == "ddp" else 3)
    elif captures:
        step = shardtrain.capture(step, model, optimizer)

    def batches(number: int) -> list[tuple[Tensor, Tensor]]:
        drawn = []
        for micro in range(scene.micro_batches):
            random = torch.Generator().manual_seed(100 * number + micro)
            x = torch.randn(batch_size, 3, sizes[0], sizes[0], generator=random)
            y = torch.randint(100, (batch_size,), generator=random)
            drawn.append((x.to(DEVICE), y.to(DEVICE)))
        return drawn

    losses = list[float]()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(STEPS + 8 * (scene.wrapper == "ddp")):
            torch.manual_seed(number)
            losses += [loss.item() for loss in step(*batches(number))]
            if scene.schedules:
                optimizer.param_groups[0]["lr"].fill_(1e-4 / (number + 2))
            if scene.saves and number == 5:
                shardtrain.checkpoint.save(Path(folder) / "saved", model, optimizer)
            if scene.saves and number == 7:
                shardtrain.checkpoint.load(Path(folder) / "saved", model, optimizer)
                optimizer.param_groups[0]["lr"] = rate
    digest = digest_of(model)
    ms = milliseconds(partial(step, *batches(0)), rounds)
    reserved = torch.accelerator.memory_reserved() >> 20
    return Figures(losses, digest, round(ms, 2), reserved, getattr(step, "summary", ""))


def findings(is_dry: bool, seconds_left: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """Yield of each scene an error, or figures of both kinds of step, and whether bits are equal."""
    sizes = (8, 4, 1, 2, 16, 32) if is_dry else (224, 16, 12, 6, 384, 1536)
    for name, scene in SCENES.items():
        if seconds_left() < 20:
            yield {"what": name, "cut": "no time was left"}
            continue
        found: dict[str, Any] = {"what": name}
        peer = scene.wrapper in ("plain", "ddp", "fsdp2")
        try:
            eager, captured = (
                play(scene, on, sizes, 2 if is_dry else 64, 2 if is_dry else 20) for on in (False, True)
            )
            found |= {"eager_ms": eager.ms, "captured_ms": captured.ms, "summary": captured.summary}
            found |= {"eager_reserved_mb": eager.reserved_mb, "captured_reserved_mb": captured.reserved_mb}
            found["right"] = eager.losses == captured.losses and eager.digest == captured.digest
            found["off"] = max(abs(a - b) for a, b in zip(eager.losses, captured.losses, strict=True))
        except Exception as error:
            found["peer_error" if peer else "error"] = f"{type(error).__name__}: {error}"[:600]
        yield found
        gc.collect()
        torch.accelerator.empty_cache()

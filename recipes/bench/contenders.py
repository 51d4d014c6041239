"""Build the contenders of the benchmark, a few torchvision models, and their data.

Every contender is set up as in its documentation, on the same initial model. If a peer has a faster setting
that changes nothing else, it is used: DDP keeps gradients as views of its buckets, and does not broadcast
BatchNorm's statistics every step, as no other contender does. In bf16, FSDP1 and FSDP2 compute everything in
bf16; shardtrain and autocast keep normalisation layers in fp32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.models.vision_transformer import EncoderBlock, VisionTransformer

import shardtrain
from shardtrain import comm
from shardtrain.comm import Alone, ProcessGroupTransport
from shardtrain.device import is_accelerator
from shardtrain.job.errors import UserError
from shardtrain.job.step import accumulate

Batch = tuple[Tensor, Tensor]  # images, float32 [batch, 3, size, size], and labels, int64 [batch]

Dtype = torch.dtype | None  # the dtype of computation; None: the parameters' own, fp32
PRECISIONS: dict[str, Dtype] = {"fp32": None, "bf16": torch.bfloat16}

# The modules that peers shard one by one: residual blocks and encoder blocks.
BLOCKS: tuple[type[nn.Module], ...] = (BasicBlock, Bottleneck, EncoderBlock)


@dataclass(frozen=True)
class Contender:
    """Hold a wrapped model and its optimizer."""

    model: nn.Module
    optimizer: Optimizer | LeastWork
    no_sync: Callable[[], AbstractContextManager[object]]  # in which backward reduces nothing
    autocast: torch.dtype | None = None  # the dtype of forward, unless the wrapper sets it

    def step(self, batches: Sequence[Batch]) -> Tensor:
        """Run one optimizer step over micro-batches; return this rank's mean loss before the update."""
        losses: list[Tensor] = []
        accumulate(
            self._forward,
            lambda logits, labels: F.cross_entropy(logits.float(), labels),
            iter(batches),
            len(batches),
            self.no_sync,
            observe=lambda images, loss, logits, labels: losses.append(loss.detach()),
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean()

    def _forward(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, self.autocast, enabled=self.autocast is not None):
            logits: Tensor = self.model(images)
        return logits


def build(name: str, model: nn.Module, precision: str, device: torch.device) -> Contender:
    """Return contender ``name`` for ``model``. Exceptions of the peer are not caught."""
    return _CONTENDERS[name][1](model, PRECISIONS[precision], device)


def adamw(model: nn.Module) -> Optimizer:
    """Return fused AdamW; call it after the model is wrapped, since FSDP2 replaces parameters."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def to_run(asked: Sequence[str] | None) -> list[str]:
    """Return the contenders in ``asked``; for None the usual ones that differ here. Collective."""
    messages = isinstance(comm.open_transport("auto"), ProcessGroupTransport | Alone)
    left_out = {*FOR_SLOW_LINKS, *(["shardtrain_process_group"] if messages else [])}
    return list(asked or (name for name in TITLES if name not in left_out))


def _shardtrain(model: nn.Module, dtype: Dtype, _: object, **options: Any) -> Contender:
    shardtrain.shard(model, precision=shardtrain.Precision(dtype), **options)
    return Contender(model, adamw(model), lambda: shardtrain.no_sync(model))


def _fsdp2(model: nn.Module, dtype: Dtype, device: torch.device, reshard: bool = True) -> Contender:
    model.to(memory_format=torch.contiguous_format)  # FSDP2 refuses parameters that are not contiguous
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        "mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=dtype),
        "reshard_after_forward": reshard,
    }
    for module in model.modules():
        if isinstance(module, BLOCKS):
            fsdp.fully_shard(module, **options)
    sharded: fsdp.FSDPModule = fsdp.fully_shard(model, **options)

    def no_sync() -> AbstractContextManager[object]:
        sharded.set_requires_gradient_sync(False)
        stack = contextlib.ExitStack()
        stack.callback(sharded.set_requires_gradient_sync, True)
        return stack

    return Contender(model, adamw(model), no_sync)


def _fsdp1(model: nn.Module, dtype: Dtype, device: torch.device) -> Contender:
    wrapped = fsdp.FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy(BLOCKS),
        mixed_precision=fsdp.MixedPrecision(param_dtype=dtype),
        use_orig_params=True,
        device_id=device,
    )
    return Contender(wrapped, adamw(wrapped), wrapped.no_sync)


class LeastWork:
    """Stand for an optimizer: do once per step what ranks that share memory must, and wait for nobody.

    A rank writes the gradients that others own, adds those that it is sent to its own, and updates what it
    owns, here the first part of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        world, total = dist.get_world_size(), sum(param.numel() for param in model.parameters())
        left = share = -(-total // world)
        self._cuts: list[tuple[nn.Parameter, nn.Parameter]] = []  # parameters, and their parts of this rank
        for param in model.parameters():
            own = min(param.numel(), left)
            left -= own
            self._cuts.append((param, nn.Parameter(_flat(param.detach())[:own])))
        self._sent = torch.zeros(total - share, device=param.device)
        self._received = [torch.ones_like(own) for _ in range(1, world) for _, own in self._cuts]
        self._optimizer = torch.optim.AdamW([own for _, own in self._cuts], lr=1e-4, fused=True)

    def step(self) -> None:
        grads = [_flat(param.grad) for param, _ in self._cuts if param.grad is not None]
        parts = [grad[: len(own)] for grad, (_, own) in zip(grads, self._cuts, strict=True)]
        others = [grad[len(own) :] for grad, own in zip(grads, parts, strict=True)]
        torch._foreach_copy_([*self._sent.split([len(part) for part in others])], others)
        for first in range(0, len(self._received), len(parts)):
            torch._foreach_add_(parts, self._received[first : first + len(parts)])
        for (_, own), part in zip(self._cuts, parts, strict=True):
            own.grad = part
        self._optimizer.step()

    def zero_grad(self) -> None:
        for param, _ in self._cuts:
            param.grad = None


def _flat(tensor: Tensor) -> Tensor:
    """Return all elements of a dense ``tensor`` as 1-D, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _bound(model: nn.Module, dtype: Dtype, _: object) -> Contender:
    return Contender(model, LeastWork(model), contextlib.nullcontext, dtype)


def _ddp(model: nn.Module, dtype: Dtype, device: torch.device) -> Contender:
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device.index] if is_accelerator(device) else None,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
    )
    return Contender(wrapped, adamw(wrapped), wrapped.no_sync, dtype)


_CONTENDERS: dict[str, tuple[str, Callable[[nn.Module, Dtype, torch.device], Contender]]] = {
    "shardtrain": ("shardtrain", _shardtrain),
    "shardtrain_process_group": (
        "shardtrain, process group",
        partial(_shardtrain, transport="process_group"),
    ),
    "shardtrain_kept": ("shardtrain, kept", partial(_shardtrain, reshard_after_forward=False)),
    "shardtrain_bf16": ("shardtrain, bf16", lambda model, _, at: _shardtrain(model, torch.bfloat16, at)),
    "fsdp2": ("FSDP2", _fsdp2),
    "fsdp2_no_reshard": ("FSDP2, no resharding", partial(_fsdp2, reshard=False)),
    "fsdp1": ("FSDP1", _fsdp1),
    "ddp": ("DDP", _ddp),
    "no_communication": (
        "no communication",
        lambda model, dtype, _: Contender(model, adamw(model), contextlib.nullcontext, dtype),
    ),
    "bound": ("no waiting", _bound),
}
TITLES = {name: title for name, (title, _) in _CONTENDERS.items()}
FOR_SLOW_LINKS = ("shardtrain_kept", "shardtrain_bf16")  # measured if asked for


CLASSES = 10
POOL = 4  # steps with different data, after which the data repeat
PATCH = 4  # pixels
VITS = {"vit": (6, 6, 384), "tiny": (2, 2, 32)}  # layers, heads and width


@dataclass(frozen=True)
class Case:
    """Describe a model and its images."""

    name: str
    image_size: int  # pixels
    batch_size: int  # images per rank and micro-batch
    memory_format: torch.memory_format = torch.contiguous_format  # of images and filters

    def __post_init__(self) -> None:
        if self.name in VITS and self.image_size % PATCH:
            side = f"image_size={self.image_size}"
            raise UserError(f"{side}: the ViT's patches of {PATCH} pixels do not divide it")

    @property
    def architecture(self) -> str:
        return self.name.partition("_")[0]

    @property
    def shape(self) -> str:
        return f"{self.architecture}@{self.image_size}×{self.batch_size}"

    def build_model(self, seed: int, device: torch.device) -> nn.Module:
        """Return the model with the same initial parameters at every call, on every rank."""
        torch.manual_seed(seed)
        if self.name not in VITS:
            model: nn.Module = torchvision.models.get_model(self.architecture, num_classes=CLASSES)
        else:
            *depth, width = VITS[self.name]
            model = VisionTransformer(self.image_size, PATCH, *depth, width, 4 * width, num_classes=CLASSES)
        return model.to(device).to(memory_format=self.memory_format)

    def build_data(self, accumulate: int, seed: int, rank: int, device: torch.device) -> list[list[Batch]]:
        """Return ``POOL`` steps of ``accumulate`` micro-batches, different on every rank."""
        random = torch.Generator().manual_seed(seed * 1_000_003 + rank)

        def batch() -> Batch:
            images = torch.randn(self.batch_size, 3, self.image_size, self.image_size, generator=random)
            labels = torch.randint(CLASSES, (self.batch_size,), generator=random)
            return images.to(device).to(memory_format=self.memory_format), labels.to(device)

        return [[batch() for _ in range(accumulate)] for _ in range(POOL)]


CASES = {
    case.name: case
    for case in (
        Case("resnet18", 32, 32),
        Case("resnet50", 32, 32),
        Case("resnet50_64", 64, 16),
        Case("vit", 32, 32),
        Case("resnet152", 32, 8),
        Case("resnet50_224", 224, 128),  # for GPUs
        Case("tiny", 8, 2),  # for tests of the benchmark
    )
}
SUITE = ("resnet18", "resnet50", "resnet50_64", "vit")

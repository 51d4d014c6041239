"""Build the contenders of the bench, a few torchvision models, and their data.

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
from shardtrain.device import is_accelerator

Batch = tuple[Tensor, Tensor]  # images, float32 [batch, 3, size, size], and labels, int64 [batch]

Dtype = torch.dtype | None  # the dtype of computation; None: the parameters' own, fp32
PRECISIONS: dict[str, Dtype] = {"fp32": None, "bf16": torch.bfloat16}

# The modules that peers shard one by one: residual blocks and encoder blocks.
BLOCKS: tuple[type[nn.Module], ...] = (BasicBlock, Bottleneck, EncoderBlock)


@dataclass(frozen=True)
class Contender:
    """A wrapped model and its optimizer."""

    model: nn.Module
    optimizer: Optimizer | LeastWork
    no_sync: Callable[[], AbstractContextManager[object]]  # in which backward reduces nothing
    autocast: torch.dtype | None = None  # the dtype of forward, unless the wrapper sets it

    def step(self, batches: Sequence[Batch]) -> Tensor:
        """Run one optimizer step over micro-batches; return this rank's mean loss before the update."""
        losses: list[Tensor] = []
        for number, (images, labels) in enumerate(batches, start=1):
            reduces = number == len(batches)
            with contextlib.nullcontext() if reduces else self.no_sync():
                with torch.autocast(images.device.type, self.autocast, enabled=self.autocast is not None):
                    logits = self.model(images)
                loss = F.cross_entropy(logits.float(), labels)
                (loss / len(batches)).backward()
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean()


def build(name: str, model: nn.Module, precision: str, device: torch.device) -> Contender:
    """Return contender ``name`` for ``model``. Exceptions of the peer are not caught."""
    return _CONTENDERS[name][1](model, PRECISIONS[precision], device)


def adamw(model: nn.Module) -> Optimizer:
    """Return fused AdamW; call it after the model is wrapped, since FSDP2 replaces parameters."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def usual() -> tuple[str, ...]:
    """Return the contenders that differ on these ranks. Collective."""
    messages = isinstance(comm.open_transport("auto").transport, comm.ProcessGroupTransport)
    return tuple(name for name in TITLES if not (messages and name == "shardtrain_process_group"))


def _shardtrain(model: nn.Module, dtype: Dtype, device: torch.device, kind: str = "auto") -> Contender:
    transport: Any = kind
    if kind == "process_group" and comm.world_size() == 1:  # "process_group" would open nothing
        transport = comm.ProcessGroupTransport(dist.group.WORLD)  # type: ignore[arg-type]
    shardtrain.shard(model, precision=shardtrain.Precision(dtype), transport=transport)
    return Contender(model, adamw(model), lambda: shardtrain.no_sync(model))


def _fsdp2(model: nn.Module, dtype: Dtype, device: torch.device) -> Contender:
    model.to(memory_format=torch.contiguous_format)  # FSDP2 refuses parameters that are not contiguous
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        "mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=dtype),
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


def _ddp(model: nn.Module, dtype: Dtype, device: torch.device) -> Contender:
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device.index] if is_accelerator(device) else None,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
    )
    return Contender(wrapped, adamw(wrapped), wrapped.no_sync, dtype)


def _no_communication(model: nn.Module, dtype: Dtype, device: torch.device) -> Contender:
    return Contender(model, adamw(model), contextlib.nullcontext, dtype)


def _bound(model: nn.Module, dtype: Dtype, device: torch.device) -> Contender:
    return Contender(model, LeastWork(model), contextlib.nullcontext, dtype)


class LeastWork:
    """An optimizer's stand-in that does per step what ranks that share memory must, and waits for nobody.

    A rank writes the gradients that others own, adds those that it is sent to its own, and updates what it
    owns, here the first part of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        world = dist.get_world_size()
        total = sum(param.numel() for param in model.parameters())
        share = -(-total // world)
        left = share
        self._cuts: list[tuple[nn.Parameter, nn.Parameter]] = []  # parameters, and their parts of this rank
        for param in model.parameters():
            length = min(param.numel(), left)
            left -= length
            self._cuts.append((param, nn.Parameter(_flat(param.detach())[:length])))
        parts = [part for _, part in self._cuts]
        self._sent = torch.zeros(total - share, device=parts[0].device)
        self._received: list[list[Tensor]] = []
        for _ in range(1, world):
            self._received.append([torch.ones_like(part) for part in parts])
        self._optimizer = torch.optim.AdamW(parts, lr=1e-4, fused=True)

    def step(self) -> None:
        grads = [_flat(param.grad) for param, _ in self._cuts if param.grad is not None]
        parts = [grad[: len(part)] for grad, (_, part) in zip(grads, self._cuts, strict=True)]
        others = [grad[len(part) :] for grad, part in zip(grads, parts, strict=True)]
        torch._foreach_copy_([*self._sent.split([len(other) for other in others])], others)
        for received in self._received:
            torch._foreach_add_(parts, received)
        for (_, param), grad in zip(self._cuts, parts, strict=True):
            param.grad = grad
        self._optimizer.step()

    def zero_grad(self) -> None:
        for param, _ in self._cuts:
            param.grad = None


def _flat(tensor: Tensor) -> Tensor:
    """Return all elements of a dense ``tensor`` as 1-D, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


# Their titles in tables, and what builds them.
_CONTENDERS: dict[str, tuple[str, Callable[[nn.Module, Dtype, torch.device], Contender]]] = {
    "shardtrain": ("shardtrain", _shardtrain),
    "shardtrain_process_group": ("shardtrain, process group", partial(_shardtrain, kind="process_group")),
    "fsdp2": ("FSDP2", _fsdp2),
    "fsdp1": ("FSDP1", _fsdp1),
    "ddp": ("DDP", _ddp),
    "no_communication": ("no communication", _no_communication),
    "bound": ("no waiting", _bound),
}
TITLES = {name: title for name, (title, _) in _CONTENDERS.items()}

CLASSES = 10
POOL = 4  # steps with different data, after which the data repeat
PATCH = 4  # pixels
VITS = {"vit": (6, 6, 384), "tiny": (2, 2, 32)}  # layers, heads and width


@dataclass(frozen=True)
class Case:
    """A model and its images."""

    architecture: str
    image_size: int  # pixels
    batch_size: int  # images per rank and micro-batch
    memory_format: torch.memory_format = torch.contiguous_format  # of images and filters

    @property
    def shape(self) -> str:
        return f"{self.architecture}@{self.image_size}×{self.batch_size}"

    def build_model(self, device: torch.device) -> nn.Module:
        """Return the model with the same initial parameters at every call, on every rank."""
        torch.manual_seed(0)
        if self.architecture not in VITS:
            model: nn.Module = torchvision.models.get_model(self.architecture, num_classes=CLASSES)
        else:
            *depth, width = VITS[self.architecture]
            model = VisionTransformer(self.image_size, PATCH, *depth, width, 4 * width, num_classes=CLASSES)
        return model.to(device).to(memory_format=self.memory_format)

    def build_data(self, accumulate: int, rank: int, device: torch.device) -> list[list[Batch]]:
        """Return ``POOL`` steps of ``accumulate`` micro-batches, different on every rank."""
        random = torch.Generator().manual_seed(rank)

        def batch() -> Batch:
            images = torch.randn(self.batch_size, 3, self.image_size, self.image_size, generator=random)
            labels = torch.randint(CLASSES, (self.batch_size,), generator=random)
            return images.to(device).to(memory_format=self.memory_format), labels.to(device)

        batches = [batch() for _ in range(POOL * accumulate)]
        return [batches[first : first + accumulate] for first in range(0, len(batches), accumulate)]


CASES = {
    "resnet18": Case("resnet18", 32, 32),
    "resnet50": Case("resnet50", 32, 32),
    "resnet50_64": Case("resnet50", 64, 16),
    "vit": Case("vit", 32, 32),
    "resnet152": Case("resnet152", 32, 8),
    "resnet50_224": Case("resnet50", 224, 128),  # for GPUs
    "tiny": Case("tiny", 8, 2),  # for tests of the bench
}
SUITE = ("resnet18", "resnet50", "resnet50_64", "vit")

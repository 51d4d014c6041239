"""Who is compared, and on what: the contenders, a few torchvision models, and their data.

Every contender is set up as its documentation shows, on the same initial model. Where a peer has a faster
setting that changes nothing else, it has it: DDP keeps gradients as views of its buckets and does not
broadcast BatchNorm's statistics every step, which no other contender does either. In bf16, FSDP1 and FSDP2
compute everything in it; shardtrain and autocast keep normalisation layers in fp32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.models.vision_transformer import EncoderBlock, VisionTransformer

import shardtrain
from shardtrain import comm
from shardtrain.comm import Alone, ProcessGroupTransport
from shardtrain.device import is_accelerator
from shardtrain.job.schema import UserError
from shardtrain.job.step import accumulate

Batch = tuple[Tensor, Tensor]  # images, float32 [batch, 3, size, size], and labels, int64 [batch]

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"fused": True}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
}
PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}

GROUP = "process_group"

HALVED = range(4, 2**20, 2)  # numbers of ranks that make two replicas of at least 2 ranks

# What peers are told to shard one by one: residual blocks and encoder blocks.
BLOCKS: tuple[type[nn.Module], ...] = (BasicBlock, Bottleneck, EncoderBlock)


@dataclass(frozen=True)
class Contender:
    """A model in training.

    ``no_sync()``: a context in which backward reduces nothing. ``autocast``: the dtype of forward, where the
    wrapper itself does not decide it.
    """

    model: nn.Module
    optimizer: Optimizer
    no_sync: Callable[[], AbstractContextManager[object]]
    autocast: torch.dtype | None = None

    def step(self, batches: Sequence[Batch]) -> Tensor:
        """Take one optimizer step over micro-batches; return this rank's mean loss before the update."""
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


class Setup(NamedTuple):
    """What all contenders have in common. ``dtype``: to compute in, if another than fp32."""

    optimizer: str
    lr: float
    dtype: torch.dtype | None
    device: torch.device

    def optimizer_of(self, model: nn.Module, zero1: bool = False) -> Optimizer:
        """Return the optimizer of a model that has its final parameters."""
        kind, options = OPTIMIZERS[self.optimizer]
        if zero1:
            return ZeroRedundancyOptimizer(model.parameters(), kind, lr=self.lr, **options)
        return kind(model.parameters(), lr=self.lr, **options)  # type: ignore[call-arg]


def build(name: str, model: nn.Module, setup: Setup) -> Contender:
    """Return contender ``name`` around ``model``. What the peer raises comes through."""
    return _CONTENDERS[name][1](model, setup)


def superfluous() -> set[str]:
    """Return contenders that equal another one here, or that need more ranks. Collective."""
    equal = {"shardtrain_process_group"} if default_is_process_group() else set()
    return equal | (set() if comm.world_size() in HALVED else {"shardtrain_hybrid", "fsdp2_hybrid"})


def default_is_process_group() -> bool:
    """Return whether transport ``"auto"`` is the process group here. Collective."""
    return isinstance(comm.open_transport("auto"), ProcessGroupTransport | Alone)


def _mesh(device: torch.device, hybrid: bool) -> DeviceMesh:
    """Return all ranks, or two replicas of half of them."""
    world = dist.get_world_size()
    if not hybrid:
        return init_device_mesh(device.type, (world,))
    if world not in HALVED:
        raise ValueError(f"two replicas take an even number of ranks, at least 4, and there are {world}")
    return init_device_mesh(device.type, (2, world // 2), mesh_dim_names=("replicate", "shard"))


def _shardtrain(model: nn.Module, setup: Setup, transport: str = "auto", hybrid: bool = False) -> Contender:
    precision = shardtrain.Precision(setup.dtype) if setup.dtype is not None else None
    mesh = _mesh(setup.device, hybrid) if hybrid else None
    shardtrain.shard(model, transport=transport, precision=precision, mesh=mesh)
    return Contender(model, setup.optimizer_of(model), lambda: shardtrain.no_sync(model))


def _fsdp2(model: nn.Module, setup: Setup, reshard: bool = True, hybrid: bool = False) -> Contender:
    options: dict[str, Any] = {
        "mesh": _mesh(setup.device, hybrid),
        "mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=setup.dtype),
        "reshard_after_forward": reshard,
    }
    for module in model.modules():
        if isinstance(module, BLOCKS):
            fsdp.fully_shard(module, **options)
    sharded: fsdp.FSDPModule = fsdp.fully_shard(model, **options)

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            sharded.set_requires_gradient_sync(True)

    return Contender(model, setup.optimizer_of(model), no_sync)


def _fsdp1(model: nn.Module, setup: Setup) -> Contender:
    wrapped = fsdp.FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy(BLOCKS),
        mixed_precision=fsdp.MixedPrecision(param_dtype=setup.dtype),
        use_orig_params=True,
        device_id=setup.device,
    )
    return Contender(wrapped, setup.optimizer_of(wrapped), wrapped.no_sync)


def _ddp(model: nn.Module, setup: Setup, zero1: bool = False) -> Contender:
    wrapped = DistributedDataParallel(
        model,
        device_ids=[setup.device.index] if is_accelerator(setup.device) else None,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
    )
    return Contender(wrapped, setup.optimizer_of(wrapped, zero1), wrapped.no_sync, setup.dtype)


_CONTENDERS: dict[str, tuple[str, Callable[[nn.Module, Setup], Contender]]] = {
    "shardtrain": ("shardtrain", _shardtrain),
    "shardtrain_process_group": ("shardtrain, process group", partial(_shardtrain, transport=GROUP)),
    "fsdp2": ("FSDP2", _fsdp2),
    "fsdp2_no_reshard": ("FSDP2, no resharding", partial(_fsdp2, reshard=False)),
    "shardtrain_hybrid": ("shardtrain, two replicas", partial(_shardtrain, hybrid=True)),
    "fsdp2_hybrid": ("FSDP2, two replicas", partial(_fsdp2, hybrid=True)),
    "fsdp1": ("FSDP1", _fsdp1),
    "ddp": ("DDP", _ddp),
    "zero1": ("DDP + ZeroRedundancyOptimizer", partial(_ddp, zero1=True)),
    "no_communication": (
        "no communication",
        lambda model, setup: Contender(model, setup.optimizer_of(model), contextlib.nullcontext, setup.dtype),
    ),
}
TITLES = {name: title for name, (title, _) in _CONTENDERS.items()}


CLASSES = 10
POOL = 4  # steps with data of their own; then the data repeat


@dataclass(frozen=True)
class Case:
    """A model with the size of its images and the number of images per rank and micro-batch."""

    name: str
    model: Callable[[int], nn.Module]  # from the image size
    image_size: int
    batch_size: int

    @property
    def shape(self) -> str:
        return f"{self.name.removesuffix('_64')}@{self.image_size}×{self.batch_size}"

    def build_model(self, seed: int, device: torch.device) -> nn.Module:
        """Return the model with the same initial parameters at every call, on every rank."""
        torch.manual_seed(seed)
        return self.model(self.image_size).to(device)

    def build_data(self, accumulate: int, seed: int, rank: int, device: torch.device) -> list[list[Batch]]:
        """Return ``POOL`` steps of ``accumulate`` micro-batches, different on every rank."""
        random = torch.Generator().manual_seed(seed * 1_000_003 + rank)

        def batch() -> Batch:
            images = torch.randn(self.batch_size, 3, self.image_size, self.image_size, generator=random)
            labels = torch.randint(CLASSES, (self.batch_size,), generator=random)
            return images.to(device), labels.to(device)

        return [[batch() for _ in range(accumulate)] for _ in range(POOL)]


def _resnet(name: str, image_size: int) -> nn.Module:
    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=CLASSES)
    return model


def _vit(layers: int, width: int, heads: int, image_size: int) -> nn.Module:
    if image_size % 4:
        raise UserError(f"image_size={image_size}: the ViT's patches of 4 pixels do not divide it")
    model: nn.Module = VisionTransformer(image_size, 4, layers, heads, width, 4 * width, num_classes=CLASSES)
    return model


CASES = {
    case.name: case
    for case in (
        Case("resnet18", partial(_resnet, "resnet18"), 32, 32),
        Case("resnet50", partial(_resnet, "resnet50"), 32, 32),
        Case("resnet50_64", partial(_resnet, "resnet50"), 64, 16),
        Case("vit", partial(_vit, 6, 384, 6), 32, 32),
        Case("resnet152", partial(_resnet, "resnet152"), 32, 8),
        Case("tiny", partial(_vit, 2, 32, 2), 8, 2),  # for trying the benchmark out
    )
}
SUITE = ("resnet18", "resnet50", "resnet50_64", "vit")

"""Who is compared. Every contender is set up as its documentation shows, on the same initial model.

Where a peer has a faster setting that changes nothing else, it has it: DDP keeps gradients as views of its
buckets and does not broadcast BatchNorm's statistics every step, which no other contender does either.
In bf16, FSDP1 and FSDP2 compute everything in it, shardtrain and autocast keep normalisation layers in fp32.
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torchvision.models import VisionTransformer
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.models.vision_transformer import EncoderBlock

import shardtrain
from shardtrain import comm
from shardtrain.comm import Alone, ProcessGroupTransport
from shardtrain.job.schema import UserError

TITLES = {
    "shardtrain": "shardtrain",
    "shardtrain_process_group": "shardtrain, process group",
    "fsdp2": "FSDP2",
    "fsdp2_no_reshard": "FSDP2, no resharding",
    "shardtrain_hybrid": "shardtrain, two replicas",
    "fsdp2_hybrid": "FSDP2, two replicas",
    "fsdp1": "FSDP1",
    "ddp": "DDP",
    "zero1": "DDP + ZeroRedundancyOptimizer",
    "no_communication": "no communication",
}

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"fused": True}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
}

PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Contender:
    """A model on its way through training.

    ``no_sync()``: backward inside it reduces nothing. ``autocast``: what forward computes in, where the
    wrapper itself does not decide that.
    """

    model: nn.Module
    optimizer: Optimizer
    no_sync: Callable[[], AbstractContextManager[object]]
    autocast: torch.dtype | None = None

    def step(self, batches: Sequence[Batch]) -> Tensor:
        """One optimizer step over micro-batches; the mean loss of this rank, before the update."""
        losses = []
        for index, (images, labels) in enumerate(batches):
            last = index == len(batches) - 1
            with contextlib.nullcontext() if last else self.no_sync():
                with torch.autocast(images.device.type, self.autocast, enabled=self.autocast is not None):
                    logits = self.model(images)
                loss = F.cross_entropy(logits.float(), labels) / len(batches)
                loss.backward()
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).sum()


class Setup(NamedTuple):
    """What all contenders have in common. ``dtype``: to compute in, if another than fp32."""

    optimizer: str
    lr: float
    dtype: torch.dtype | None
    device: torch.device

    @property
    def options(self) -> dict[str, Any]:
        return {**OPTIMIZERS[self.optimizer][1], "lr": self.lr}

    def optimizer_of(self, model: nn.Module) -> Optimizer:
        """Call it once the model has its final parameters."""
        return OPTIMIZERS[self.optimizer][0](model.parameters(), **self.options)


def build(name: str, model: nn.Module, setup: Setup) -> Contender:
    """The contender ``name`` around ``model``. Whatever the peer raises comes through."""
    return _BUILDERS[name](model, setup)


def superfluous() -> set[str]:
    """Contenders that are like another one here, or that these ranks are too few for. Collective."""
    alike = {"shardtrain_process_group"} if default_is_process_group() else set()
    return alike | (set() if _has_halves() else {"shardtrain_hybrid", "fsdp2_hybrid"})


def default_is_process_group() -> bool:
    """Whether ``"auto"`` is the process group, so that asking for it changes nothing. Collective."""
    return isinstance(comm.open_transport("auto"), ProcessGroupTransport | Alone)


def _has_halves() -> bool:
    """Whether two replicas have as many ranks, and each something to shard over."""
    return comm.world_size() >= 4 and comm.world_size() % 2 == 0


def _halves(device: torch.device) -> DeviceMesh:
    world = dist.get_world_size()
    if not _has_halves():
        raise ValueError(f"two replicas take an even number of ranks, at least 4, and there are {world}")
    return init_device_mesh(device.type, (2, world // 2), mesh_dim_names=("replicate", "shard"))


def _shardtrain(model: nn.Module, setup: Setup, transport: str = "auto", hybrid: bool = False) -> Contender:
    precision = shardtrain.Precision(setup.dtype) if setup.dtype is not None else None
    mesh = _halves(setup.device) if hybrid else None
    shardtrain.shard(model, transport=transport, precision=precision, mesh=mesh)
    return Contender(model, setup.optimizer_of(model), lambda: shardtrain.no_sync(model))


def _fsdp2(model: nn.Module, setup: Setup, reshard: bool = True, hybrid: bool = False) -> Contender:
    everyone = init_device_mesh(setup.device.type, (dist.get_world_size(),))
    options: dict[str, Any] = {
        "mesh": _halves(setup.device) if hybrid else everyone,
        "mp_policy": MixedPrecisionPolicy(param_dtype=setup.dtype),
        "reshard_after_forward": reshard,
    }
    for module in model.modules():
        if isinstance(module, BLOCKS):
            fully_shard(module, **options)
    sharded: FSDPModule = fully_shard(model, **options)

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            sharded.set_requires_gradient_sync(True)

    return Contender(model, setup.optimizer_of(model), no_sync)


def _fsdp1(model: nn.Module, setup: Setup) -> Contender:
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy(BLOCKS),
        mixed_precision=MixedPrecision(param_dtype=setup.dtype),
        use_orig_params=True,
        device_id=setup.device,
    )
    return Contender(wrapped, setup.optimizer_of(wrapped), wrapped.no_sync)


def _ddp(model: nn.Module, setup: Setup) -> Contender:
    wrapped = _data_parallel(model, setup.device)
    return Contender(wrapped, setup.optimizer_of(wrapped), wrapped.no_sync, setup.dtype)


def _zero1(model: nn.Module, setup: Setup) -> Contender:
    wrapped = _data_parallel(model, setup.device)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), OPTIMIZERS[setup.optimizer][0], **setup.options)
    return Contender(wrapped, optimizer, wrapped.no_sync, setup.dtype)


def _data_parallel(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
    )


def _no_communication(model: nn.Module, setup: Setup) -> Contender:
    return Contender(model, setup.optimizer_of(model), contextlib.nullcontext, setup.dtype)


_BUILDERS: dict[str, Callable[[nn.Module, Setup], Contender]] = {
    "shardtrain": _shardtrain,
    "shardtrain_process_group": partial(_shardtrain, transport="process_group"),
    "fsdp2": _fsdp2,
    "fsdp2_no_reshard": partial(_fsdp2, reshard=False),
    "shardtrain_hybrid": partial(_shardtrain, hybrid=True),
    "fsdp2_hybrid": partial(_fsdp2, hybrid=True),
    "fsdp1": _fsdp1,
    "ddp": _ddp,
    "zero1": _zero1,
    "no_communication": _no_communication,
}


# What is trained: a small set of torchvision models, each with an image size and images a rank.

CLASSES = 10
POOL = 4  # steps with data of their own; then the data repeat

# What peers are told to shard one by one: residual blocks and encoder blocks.
BLOCKS: tuple[type[nn.Module], ...] = (BasicBlock, Bottleneck, EncoderBlock)


def _vit(layers: int, width: int, heads: int) -> Callable[[int], nn.Module]:
    def build(image_size: int) -> nn.Module:
        if image_size % 4:
            raise UserError(f"image_size={image_size}: the ViT's patches of 4 pixels do not divide it")
        model: nn.Module = VisionTransformer(
            image_size, 4, layers, heads, width, 4 * width, num_classes=CLASSES
        )
        return model

    return build


def _resnet(name: str) -> Callable[[int], nn.Module]:
    def build(_: int) -> nn.Module:
        model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=CLASSES)
        return model

    return build


@dataclass(frozen=True)
class Case:
    """``batch_size`` counts the images of one rank and micro-batch, of ``image_size`` × ``image_size``."""

    name: str
    build: Callable[[int], nn.Module]  # image size → model
    image_size: int
    batch_size: int

    @property
    def shape(self) -> str:
        return f"{self.name.removesuffix('_64')}@{self.image_size}×{self.batch_size}"


CASES = {
    case.name: case
    for case in (
        Case("resnet18", _resnet("resnet18"), 32, 32),
        Case("resnet50", _resnet("resnet50"), 32, 32),
        Case("resnet50_64", _resnet("resnet50"), 64, 16),
        Case("vit", _vit(layers=6, width=384, heads=6), 32, 32),
        Case("resnet152", _resnet("resnet152"), 32, 8),
        Case("tiny", _vit(layers=2, width=32, heads=2), 8, 2),  # for trying the benchmark out
    )
}
SUITE = ("resnet18", "resnet50", "resnet50_64", "vit")


class Batch(NamedTuple):
    images: Tensor  # float32 [batch, 3, size, size]
    labels: Tensor  # int64 [batch]


def build_model(case: Case, seed: int, device: torch.device) -> nn.Module:
    """The same initial parameters at every call, on every rank."""
    torch.manual_seed(seed)
    return case.build(case.image_size).to(device)


def build_data(case: Case, accumulate: int, seed: int, rank: int, device: torch.device) -> list[list[Batch]]:
    """``POOL`` steps of ``accumulate`` micro-batches, different on every rank."""
    random = torch.Generator().manual_seed(seed * 1_000_003 + rank)
    shape = (case.batch_size, 3, case.image_size, case.image_size)

    def batch() -> Batch:
        images = torch.randn(shape, generator=random)
        labels = torch.randint(CLASSES, (case.batch_size,), generator=random)
        return Batch(images.to(device), labels.to(device))

    return [[batch() for _ in range(accumulate)] for _ in range(POOL)]

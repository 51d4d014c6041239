"""Adapters of the judge for wrappers that must be installed first: `wrapper=[accelerate,deepspeed]`."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from shardtrain.judge.wrappers import NotOffered, Replica


class Accelerate:
    """Hugging Face's. On CPUs it wraps in DDP, and does so, too, if it is given an FSDP plugin."""

    def shard(self, model: nn.Module) -> nn.Module:
        from accelerate import Accelerator, DistributedDataParallelKwargs

        environment()
        options = DistributedDataParallelKwargs(find_unused_parameters=True)
        self.accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
        wrapped: nn.Module = self.accelerator.prepare(model)
        wrapped.__class__ = Replica  # has the attributes of the model inside
        return wrapped

    def prepare(self, model: nn.Module, optimizer: Any) -> Any:
        return self.accelerator.prepare(optimizer)

    def clip_grad_norm_(self, model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
        norm: Tensor = self.accelerator.clip_grad_norm_(model.parameters(), max_norm, norm_type)
        return norm

    def no_sync(self, model: nn.Module) -> Any:
        return self.accelerator.no_sync(model)


class Deepspeed:
    """DeepSpeed's ZeRO-3. Its engine needs the optimizer, so until `prepare` the model is not sharded."""

    def shard(self, model: nn.Module) -> nn.Module:
        return Late(model)

    def prepare(self, model: Any, optimizer: Any) -> Any:
        model.engine.append(deepspeed().initialize(model=model.module, optimizer=optimizer, config=CONFIG)[0])
        return Stepping(model.engine[-1])

    def full_state_dict(self, model: Any) -> dict[str, Tensor]:
        with deepspeed().zero.GatheredParameters([*model.module.parameters()]):
            return {name: value.detach().clone() for name, value in model.module.state_dict().items()}

    def load_full_state_dict(self, model: Any, state: dict[str, Tensor]) -> None:
        with deepspeed().zero.GatheredParameters([*model.module.parameters()], modifier_rank=0):
            model.module.load_state_dict(state)

    def clip_grad_norm_(self, *_: object, **options: object) -> Tensor:
        raise NotOffered("clipping is a key of its configuration")

    def no_sync(self, model: Any) -> Any:
        return model.engine[-1].no_sync()

    def save(self, path: str, model: Any, optimizer: Any) -> None:
        model.engine[-1].save_checkpoint(path)

    def load(self, path: str, model: Any, optimizer: Any) -> None:
        model.engine[-1].load_checkpoint(path)


CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},  # shard small parameters, too
    "gradient_clipping": 0.0,  # it clips norms to 1 where nothing is said
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def deepspeed() -> Any:
    environment()
    os.environ["DS_ACCELERATOR"] = "cpu"
    return importlib.import_module("deepspeed")


class Late(nn.Module):
    """A model that computes through its engine once it has one, with the attributes of the model inside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module, self.engine = model, [model]  # a list, so that the engine is no module inside

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.engine[-1](*args, **options)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class Stepping:
    """The optimizer of an engine that steps by itself."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.zero_grad = engine, engine.zero_grad

    def step(self) -> None:
        self.engine.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine.optimizer, name)


def environment() -> None:
    """Set what torchrun sets, for this rank: the judge's ranks have their own group."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)

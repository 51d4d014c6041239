"""The wrappers that the rows know, and how those of others are found.

A wrapper is a function from a model to a model. What else it offers are functions beside it, in its module or
class: the methods of `Verbs`, which has torch's own for most of them.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn.parallel import DistributedDataParallel

import shardtrain
from shardtrain import comm
from shardtrain import fsdp as own_names

import small

Wrapper = Any  # has the function `shard`, and `Verbs`
WHOLE = states.StateDictOptions(full_state_dict=True)


class NotOffered(Exception):
    """A wrapper has no such verb."""


def units(model: nn.Module) -> list[nn.Module]:
    """Return what the adapters wrap one by one, inner modules first: the members of containers."""
    members: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.Sequential | nn.ModuleList):
            members.update(module)
    return [m for m in reversed(list(model.modules())) if m in members and [*m.parameters()]]


class Verbs:
    """What a wrapper may offer. These are torch's, which understand DTensors, FSDP1 and DDP."""

    full_state_dict = staticmethod(partial(states.get_model_state_dict, options=WHOLE))
    load_full_state_dict = staticmethod(partial(states.set_model_state_dict, options=WHOLE))
    set_time_out = staticmethod(dist.distributed_c10d._set_pg_timeout)

    @staticmethod
    def prepare(model: nn.Module, optimizer: Any) -> Any:
        """Return the optimizer that steps the wrapped model."""
        return optimizer

    @staticmethod
    def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
        whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return whole

    @staticmethod
    def no_sync(model: Any) -> AbstractContextManager[object]:
        if not hasattr(model, "no_sync"):
            raise NotOffered("no_sync")
        context: AbstractContextManager[object] = model.no_sync()
        return context

    @staticmethod
    def forward_method(model: nn.Module, name: str) -> None:
        """Let the method ``name`` of a model or unit use whole parameters."""

    @staticmethod
    def shard_in_bf16(model: nn.Module) -> nn.Module:
        raise NotOffered("shard_in_bf16")

    @staticmethod
    def save(path: str, model: nn.Module, optimizer: Any) -> None:
        state: Any = dict(zip("mo", states.get_state_dict(model, optimizer), strict=True))
        dcp.state_dict_saver.save(state, checkpoint_id=path)

    @staticmethod
    def load(path: str, model: nn.Module, optimizer: Any) -> None:
        state: Any = dict(zip("mo", states.get_state_dict(model, optimizer), strict=True))
        dcp.state_dict_loader.load(state, checkpoint_id=path)
        states.set_state_dict(model, optimizer, model_state_dict=state["m"], optim_state_dict=state["o"])


class Shardtrain:
    full_state_dict = staticmethod(shardtrain.full_state_dict)
    load_full_state_dict = staticmethod(shardtrain.load_full_state_dict)
    set_time_out = staticmethod(comm.set_time_out)
    no_sync = staticmethod(shardtrain.no_sync)
    forward_method = staticmethod(shardtrain.forward_method)
    save = staticmethod(shardtrain.checkpoint.save)
    load = staticmethod(shardtrain.checkpoint.load)

    @staticmethod
    def shard(model: nn.Module, **options: Any) -> nn.Module:
        chosen = units(model)
        return small.shard(model, units=lambda _, module: module in chosen, **options)

    def shard_in_bf16(self, model: nn.Module) -> nn.Module:
        return self.shard(model, precision=shardtrain.Precision(param=torch.bfloat16))


class Fsdp2:
    names: Any = fsdp

    def forward_method(self, model: nn.Module, name: str) -> None:
        self.names.register_fsdp_forward_method(model, name)

    @staticmethod
    def no_sync(model: Any) -> AbstractContextManager[object]:
        model.set_requires_gradient_sync(False)
        stack = contextlib.ExitStack()
        stack.callback(model.set_requires_gradient_sync, True)
        return stack

    def shard(self, model: nn.Module, **options: Any) -> nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in [*units(model), model]:
            self.names.fully_shard(module, mesh=mesh, **options)
        return model

    def shard_in_bf16(self, model: nn.Module) -> nn.Module:
        return self.shard(model, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16))


class FullyShard(Fsdp2, Shardtrain):  # FSDP2's verbs come first
    """FSDP2's names for wrapping, as shardtrain has them."""

    names: Any = own_names

    def shard(self, model: nn.Module, **options: Any) -> nn.Module:
        return super().shard(model, transport=os.environ["SHARDTRAIN_TEST_TRANSPORT"], **options)


class Fsdp1:
    clip_grad_norm_ = staticmethod(fsdp.FullyShardedDataParallel.clip_grad_norm_)

    @staticmethod
    def shard(model: nn.Module) -> nn.Module:
        policy = CustomPolicy(set(units(model)).__contains__)
        cpu = torch.device("cpu")
        return fsdp.FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=cpu
        )


class Ddp:
    @staticmethod
    def shard(model: nn.Module) -> nn.Module:
        return Replica(model, find_unused_parameters=True)


class Replica(DistributedDataParallel):
    """DDP, with the attributes of the model inside."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class Accelerate:
    """Hugging Face's. On CPUs it wraps in DDP, and does so, too, if it is given an FSDP plugin."""

    def __init__(self) -> None:
        self.library = importlib.import_module("accelerate")

    def shard(self, model: nn.Module) -> nn.Module:
        rank = str(dist.get_rank())
        world = str(dist.get_world_size())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
        options = self.library.DistributedDataParallelKwargs(find_unused_parameters=True)
        self.accelerator = self.library.Accelerator(cpu=True, kwargs_handlers=[options])
        wrapped: nn.Module = self.accelerator.prepare(model)
        wrapped.__class__ = Replica  # has the attributes of the model inside
        return wrapped

    def prepare(self, model: nn.Module, optimizer: Any) -> Any:
        return self.accelerator.prepare(optimizer)

    def clip_grad_norm_(self, model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
        return self.accelerator.clip_grad_norm_(model.parameters(), max_norm, norm_type)

    def no_sync(self, model: nn.Module) -> Any:
        return self.accelerator.no_sync(model)


OWN = {"shardtrain.shard": Shardtrain, "shardtrain.fsdp.fully_shard": FullyShard}
KNOWN = {**OWN, "fsdp2": Fsdp2, "fsdp1": Fsdp1, "ddp": Ddp, "accelerate": Accelerate}


def find(path: str) -> Wrapper:
    """Return the wrapper ``PACKAGE.FUNCTION``, whose verbs are beside it in the package, class or object."""
    owner_path, _, name = path.rpartition(".")
    owner = KNOWN[path] if path in KNOWN else pkgutil.resolve_name(owner_path)
    return with_verbs(owner() if isinstance(owner, type) else owner, "shard" if path in KNOWN else name)


def with_verbs(owner: object, name: str = "shard") -> Wrapper:
    verbs = {verb: getattr(owner, verb, getattr(Verbs, verb)) for verb in vars(Verbs) if verb[0] != "_"}
    return SimpleNamespace(shard=getattr(owner, name), **verbs)

"""The model that a configuration asks for, unsharded and sharded, with its optimizer and its average."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import os
import pickle
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardtrain
from shardtrain import comm
from shardtrain.checkpoint.files import sync_directory, write_tensors
from shardtrain.comm import Transport
from shardtrain.engine.precision import Precision
from shardtrain.engine.state_dict import Spec, differences
from shardtrain.job import config
from shardtrain.job.config import AdamW, Config, Optim, Parallel, Sgd, layout_of
from shardtrain.job.schema import UserError, nearest, typed
from shardtrain.optim import Ema, Muon
from shardtrain.optim.muon import hidden_matrices

# Logits, and so the loss, are fp32 in any case.
PRECISIONS = {
    "fp32": None,
    "bf16": Precision(param=torch.bfloat16, output=torch.float32),
    "fp16": Precision(param=torch.float16, output=torch.float32),
}


def initial_model(config: Config) -> nn.Module:
    """The unsharded model before the first step, the same on every rank."""
    torch.manual_seed(config.seed)
    model = plain_model(config.model)
    weights = _weights(config)
    if weights is not None:
        load_weights(model, weights)
    return model


def start_model(config: Config) -> nn.Module:
    """The same for `shard`: values that are drawn, not loaded, are computed when it cuts them."""
    if _weights(config) is not None:
        return initial_model(config)
    torch.manual_seed(config.seed)
    return shardtrain.deferred(plain_model, config.model)


def _weights(config: Config) -> Path | None:
    """The file that the first values are loaded from, if they are not drawn."""
    given = typed(str | None, config.model.get("weights"), "model.weights")
    return None if given is None else Path(given).expanduser()


def plain_model(model: Mapping[str, Any]) -> nn.Module:
    """The unsharded model that the config group names, with values of its own initialisation."""
    built = build({key: value for key, value in model.items() if key != "weights"}, "model")
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
    if parallel.replicate == 1:
        return None
    sizes = (parallel.replicate, comm.world_size() // parallel.replicate)
    return init_device_mesh(comm.control_device().type, sizes, mesh_dim_names=("replicate", "shard"))


def plain_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """The optimizer of ``model`` as it is, unsharded."""
    return _optimizer(config.optim, _groups(model, config.optim))


def _groups(model: nn.Module, optim: Optim) -> list[dict[str, Any]]:
    groups = parameter_groups(model, optim.weight_decay, optim.decay_all)
    if not isinstance(optim, config.Muon):
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
    if isinstance(optim, config.Muon):
        return Muon(
            groups,
            lr=optim.lr,
            momentum=optim.momentum,
            nesterov=optim.nesterov,
            betas=optim.betas,
            eps=optim.eps,
        )
    raise NotImplementedError(f"_optimizer() does not make {type(optim).__name__}, which config.OPTIM lists")


def ema_of(model: nn.Module, config: Config, steps_per_epoch: int) -> Ema | None:
    """The moving average of a sharded ``model``'s weights, if the configuration asks for one."""
    if config.ema.decay is None:
        return None
    after = round(config.ema.after_epochs * steps_per_epoch)
    return Ema(model, config.ema.decay, every=config.ema.every_steps, after=after)


# Building what a config names in `_target_`.
#
# A `_target_` is code that a file chooses, so only callables that a recipe module itself defines are called:
# not what such a module imports, and nothing outside `shardtrain.recipes`. Its annotations say which values
# are
# right, as a dataclass's fields do for the rest of the configuration.

ALLOWED = "shardtrain.recipes."

# Annotations that are checked, also as the texts that they are in a module which postpones them. What else a
# callable takes it has to check itself.
SIMPLE: dict[object, type] = {
    annotation: kind for kind in (bool, int, float, str) for annotation in (kind, kind.__name__)
}


def build(node: Mapping[str, Any], section: str) -> Any:
    """Calls `node["_target_"]` with the other keys; `section` names the config group in messages."""
    target = _find(str(node.get("_target_")), section)
    valid = inspect.signature(target).parameters
    arguments = {key: value for key, value in node.items() if key != "_target_"}
    for key, value in arguments.items():
        if key not in valid:
            raise UserError(f"unknown key {section}.{key}{nearest(key, valid)} (valid: {', '.join(valid)})")
        if valid[key].annotation in SIMPLE:
            arguments[key] = typed(SIMPLE[valid[key].annotation], value, f"{section}.{key}")
    try:
        return target(**arguments)
    except (ValueError, TypeError) as error:
        raise UserError(f"{section}: {error}") from error


def _find(path: str, section: str) -> Callable[..., Any]:
    module_name, _, name = path.rpartition(".")
    if not path.startswith(ALLOWED):
        raise UserError(f"{section}._target_={path}: only callables of {ALLOWED}* are built")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError:
        raise UserError(f"{section}._target_={path}: there is no module {module_name}") from None
    valid = _own_callables(module)
    if name not in valid:
        raise UserError(
            f"{section}._target_={path}: {module_name} does not define {name}{nearest(name, valid)}"
        )
    return valid[name]


def _own_callables(module: ModuleType) -> dict[str, Callable[..., Any]]:
    return {
        name: value
        for name, value in vars(module).items()
        if callable(value)
        and not name.startswith("_")
        and getattr(value, "__module__", "") == module.__name__
    }


# Plain weights: one file with a whole state dict, as stock PyTorch and safetensors tools have them.
#
# Reading one never runs code that it brings along: safetensors has none, and `torch.load` is told to
# unpickle tensors only.

_NAMED = 5  # differences that a refusal names
SUFFIXES = (".safetensors", ".pth", ".pt")


def read_weights(path: Path) -> dict[str, Tensor]:
    """The state dict in ``path``, on the CPU.

    Raises:
        UserError: it is missing, unreadable, or holds more than tensors.
    """
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = str(error).split("\n", 1)[0]
        raise UserError(f"{path}: no weights that can be read without running code ({reason})") from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{path}: expected a state dict, names with tensors, found {type(state).__name__}")
    return state


def write_weights(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write a new file, whole or not at all.

    Raises:
        UserError: it exists, or cannot be written.
    """
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: expected a name that ends in {', '.join(SUFFIXES)}")
    if path.exists():
        raise UserError(f"{path} exists already; choose another name or remove it")
    temporary = path.with_name(f".tmp-{secrets.token_hex(4)}-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            write_tensors(temporary, state, {"format": "pt"})
        else:
            with temporary.open("xb") as file:
                torch.save(dict(state), file)
                file.flush()
                os.fsync(file.fileno())
        os.rename(temporary, path)
        sync_directory(path.parent)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UserError(f"{path}: cannot be written ({str(error).splitlines()[0]})") from None


def load_weights(model: nn.Module, path: Path) -> None:
    """Fill an unsharded ``model``.

    Raises:
        UserError: naming what is missing, unexpected, misshapen or of another dtype; nothing is loaded then.
    """
    state = read_weights(path)
    expected = {name: Spec.of(value) for name, value in model.state_dict().items()}
    problems = differences(expected, {name: Spec.of(value) for name, value in state.items()})
    if problems:
        more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
        raise UserError(f"{path} does not fit the model: {'; '.join(problems[:_NAMED])}{more}")
    model.load_state_dict(state)

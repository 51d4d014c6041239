"""The model that a configuration names, built and sharded; its optimizer and moving average.

Reading plain weights runs no code: safetensors files have none, and `torch.load` unpickles only tensors.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torchvision import models

import shardtrain
from shardtrain import Precision, comm
from shardtrain.checkpoint.loading import Spec, differences
from shardtrain.comm import Channel
from shardtrain.config.config import Config, Optim
from shardtrain.config.errors import UserError, not_valid, path_of, plain_file, reading
from shardtrain.config.format import first_of
from shardtrain.config.schema import typed
from shardtrain.config.target import find_target, instantiate
from shardtrain.device import is_accelerator, unit_bytes_on
from shardtrain.job.blocks import checkpoint_blocks, compile_blocks
from shardtrain.launch.ranks import together
from shardtrain.optim import Ema

# Logits, and so the loss, are always fp32.
PRECISIONS = {
    "fp32": None,
    "bf16": Precision(param=torch.bfloat16, output=torch.float32),
    "fp16": Precision(param=torch.float16, output=torch.float32),
}


def initial_model(config: Config, *, deferred: bool = False, resumed: bool = False) -> nn.Module:
    """Build the unsharded model before the first step, the same on every rank.

    With ``deferred``, rank 0 alone has values, those of `model.weights` too, and `shard` distributes them. A
    ``resumed`` model gets its values from a checkpoint, so `model.weights` are not read.
    """
    weights = None if resumed else typed(str | None, config.model.get("weights"), "model.weights")
    reset_head = typed(bool, config.model.get("reset_head", False), "model.reset_head")

    def build_with_weights() -> nn.Module:
        model = plain_model(config.model, config.allow)
        if weights is not None and not any(param.is_meta for param in model.parameters()):
            load_weights(model, named_weights(weights, config.model_name), weights, reset_head)
        return model

    torch.manual_seed(config.seed)
    return together(lambda: shardtrain.deferred(build_with_weights)) if deferred else build_with_weights()


def plain_model(model: Mapping[str, Any], allow: Sequence[str] = ()) -> nn.Module:
    """Build the unsharded model that the config group names, with its own initial values."""
    built: nn.Module = instantiate(target_node(model), "model", nn.Module, allow)
    for name, part in built.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise UserError(
                f"model: {name or 'the model'} is scripted or traced, so its forward gathers no parameters; "
                "build it without torch.jit; parallel.compile=true compiles"
            )
    freeze_parts(built, typed(tuple[str, ...], model.get("freeze", []), "model.freeze"))
    return built


def target_node(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the config group that are the builder's, with its ``_target_``."""
    return {key: value for key, value in model.items() if key not in ("weights", "reset_head", "freeze")}


def freeze_parts(model: nn.Module, parts: Sequence[str]) -> None:
    """Freeze the parameters whose names begin with one of ``parts``.

    `body` is all parameters but those of the head. Raises UserError for a part without parameters.
    """
    names = [name for name, _ in model.named_parameters()]
    for part in parts:
        chosen = [name for name in names if f"{name}.".startswith(f"{part}.")]
        if part == "body":
            head = f"{head_of(model)}."
            chosen = [name for name in names if not name.startswith(head)]
        if not chosen:
            valid = ["body", *dict.fromkeys(name.partition(".")[0] for name in names)]
            raise not_valid(f"model.freeze=[{part}]: no parameter is in {part}", part, valid)
        for name in chosen:
            model.get_parameter(name).requires_grad_(False)


def head_of(model: nn.Module) -> str:
    """Return the name of the head: the last linear layer or convolution. Raises UserError without one."""
    kinds = (nn.Linear, nn.Conv2d)
    layers: list[str] = [name for name, part in model.named_modules() if isinstance(part, kinds)]
    if not layers:
        raise UserError("the model has no linear layer or convolution, so it is not known what its head is")
    return layers[-1]


def model_notes(model: nn.Module, keys: Mapping[str, Any], *, resumed: bool) -> list[str]:
    """Return lines about what the keys of an unsharded ``model`` have chosen: a new head, what trains."""
    notes = []
    if keys.get("weights") and keys.get("reset_head") and not resumed:
        notes.append(f"model.reset_head: {head_of(model)} is new, all else is from {keys['weights']}")
    sizes = [param.numel() for param in model.parameters()]
    trained = [param.numel() for param in model.parameters() if param.requires_grad]
    if len(trained) < len(sizes):
        notes.append(f"model.freeze: {sum(trained):,} of {sum(sizes):,} parameters are trained")
    return notes


def converted(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """Return ``model`` with the memory format of the configuration.

    Raises UserError for keys that need a GPU where there is none, and for keys that exclude each other.
    """
    if config.parallel.offload and not is_accelerator(device):
        raise UserError(f"parallel.offload=true needs a GPU, found {device.type}")
    if config.train.capture and config.parallel.activation_checkpoint:
        raise UserError(
            "train.capture=true: parallel.activation_checkpoint has the host read random states in each "
            "step; leave one of the two out"
        )
    if config.train.channels_last:
        model.to(memory_format=torch.channels_last)
    return model


def uncompiled(config: Config) -> Config:
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, compile=False))


def shard_with_optimizer(
    model: nn.Module, config: Config, transport: Channel | None = None, device: torch.device | None = None
) -> torch.optim.Optimizer:
    """Shard ``model`` in place, over ``transport`` and on ``device`` if given; return its optimizer."""
    groups = parameter_groups(model, config.optim, config.allow)
    sharded(model, config, transport, device)
    return optimizer_of(config.optim, groups, config.allow)


def sharded(
    model: nn.Module, config: Config, transport: Channel | None = None, device: torch.device | None = None
) -> nn.Module:
    """Shard ``model`` in place, over ``transport`` and on ``device`` if given; return it."""
    parallel = config.parallel
    mesh = None
    if parallel.replicate > 1 and transport is None:  # consecutive ranks, so that a host holds whole groups
        sizes = (parallel.replicate, comm.world_size() // parallel.replicate)
        names = ("replicate", "shard")
        mesh = init_device_mesh((device or torch.device("cpu")).type, sizes, mesh_dim_names=names)
    precision = PRECISIONS[parallel.precision] or Precision()
    if parallel.reduce == "bf16":
        precision = dataclasses.replace(precision, reduce=torch.bfloat16)
    layout: Any = parallel.layout or config.optim.layout
    inside = parallel.compile or parallel.activation_checkpoint  # both change blocks, which become units
    if parallel.compile:
        compile_blocks(model, device or torch.device("cpu"))
    if parallel.activation_checkpoint:
        checkpoint_blocks(model)
    # A plan shards on the CPU, as a run would on the configuration's device.
    planned = torch.device("cpu" if config.device == "auto" else config.device)
    return shardtrain.shard(
        model,
        units="blocks" if inside else None,
        unit_bytes=unit_bytes_on(device or planned),
        layout=layout,
        precision=precision,
        reshard_after_forward=parallel.reshard_after_forward,
        transport=transport or transport_name(),
        device=device,
        offload=parallel.offload,
        mesh=mesh,
        virtual_ranks=config.virtual_ranks(transport.all_ranks.world if transport else comm.world_size()),
    )


def transport_name() -> str:
    """Return the transport that tests ask for by `SHARDTRAIN_TRANSPORT`; `auto` otherwise."""
    return os.environ.get("SHARDTRAIN_TRANSPORT", "auto")


def parameter_groups(model: nn.Module, optim: Optim, allow: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return groups by weight decay (of biases and norms: ``optim.decay_all``), and as the class has them."""
    optimizer = find_target(optim._target_, "optim", torch.optim.Optimizer, allow)
    # A class with a function `groups` of a model, as Muon's, makes its own, which are divided further.
    groups_of = getattr(optimizer, "groups", None)
    kinds = [{"params": [*model.parameters()]}] if groups_of is None else groups_of(model)
    groups = []
    for decays, kind in itertools.product((True, False), kinds):
        params = [param for param in kind["params"] if (optim.decay_all or param.ndim > 1) == decays]
        groups.append({**kind, "params": params, "weight_decay": optim.weight_decay if decays else 0.0})
    return [group for group in groups if group["params"]]


def optimizer_of(
    keys: Optim, groups: list[dict[str, Any]], allow: Sequence[str] = ()
) -> torch.optim.Optimizer:
    """Return the optimizer of ``groups``, each with its own weight decay."""
    others = ("name", "decay_all", "keywords", *(() if keys.weight_decay else ("weight_decay",)))
    node = {name: value for name, value in vars(keys).items() if name not in others}
    node |= vars(keys).get("keywords", {})
    if keys.name in ("sgd", "adamw"):
        node["fused"] = True  # one pass over all parameters
    made = partial(instantiate, node, "optim", torch.optim.Optimizer, allow)
    optimizer: torch.optim.Optimizer = made(groups)
    if keys.name == "own":
        tried = torch.nn.Parameter(torch.ones(2, 2))
        tried.grad = torch.ones_like(tried)
        with reading(f"optim._target_={keys._target_}", "choose another optimizer, or other keys"):
            made([{"params": [tried]}]).step()
            optimizer.step()  # changes nothing without gradients, and refuses what is wrong on pieces
    return optimizer


def ema_of(model: nn.Module, config: Config, warmup: int) -> Ema | None:
    """Return the moving average of a sharded ``model``'s weights; None unless the configuration has one.

    During the ``warmup`` of the learning rate, in steps, it is a copy of the weights.
    """
    if config.ema.decay is None:
        return None
    return Ema(model, config.ema.decay, every=config.ema.every_steps, after=warmup)


def named_weights(weights: str, model: str) -> dict[str, Tensor]:
    """Return the state dict of ``weights``: a file's, or torchvision's for ``model``, downloaded once."""
    path = path_of("model.weights", weights)
    name = model.rpartition(".")[2]
    known = models.get_model_weights(name).__members__ if name in models.list_models() else {}
    if path.suffix or os.path.exists(path) or not known:
        if not os.path.isfile(path):
            raise UserError(f"model.weights={path}: there is no such file")
        return read_weights(path)
    if weights not in known:
        raise not_valid(f"model.weights={weights}: no file, and not torchvision's for {name}", weights, known)
    way_out = f"cannot fetch {known[weights].url}; fetch it elsewhere, and give model.weights=FILE"
    with reading(f"model.weights={weights}", way_out):  # no network, or not the hash in the file's name
        options = {"map_location": "cpu", "progress": False, "check_hash": True, "weights_only": True}
        return dict(known[weights].get_state_dict(**options))


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the state dict in ``path``, on the CPU. Raises UserError if it is not one of tensors alone."""
    with reading(str(path), "no weights that can be read without running code"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about formats that are refused anyway
        if plain_file(path).suffix == ".safetensors":
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    for name, inner in state.items() if isinstance(state, dict) else ():
        if isinstance(inner, dict) and inner and all(isinstance(value, Tensor) for value in inner.values()):
            raise UserError(f"{path}: a checkpoint with its weights under {name!r}: save that dict alone")
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{path}: expected a state dict, names with tensors, found {type(state).__name__}")
    return state


def load_weights(
    model: nn.Module, weights: Mapping[str, Tensor], source: object, reset_head: bool = False
) -> None:
    """Load ``weights`` into an unsharded ``model``. With ``reset_head`` the last layer stays as it is.

    Raises UserError for keys that are missing, unexpected, or of another shape or dtype, and loads nothing.
    """
    own = model.state_dict()
    counts = {key: value for key, value in own.items() if key.endswith("num_batches_tracked")}
    state = counts | dict(weights)  # files from before PyTorch 0.4.1 lack these counts
    if reset_head:
        head = head_of(model)
        state |= {key: value for key, value in own.items() if key.startswith(f"{head}.")}
    expected = {name: Spec.of(value) for name, value in own.items()}
    problems = differences(expected, {name: Spec.of(value) for name, value in state.items()})
    if problems:
        hint = "" if reset_head else "; model.reset_head=true makes the last layer anew"
        if isinstance(model, models.ResNet) and "conv1.weight has shape" in "".join(problems):
            hint += "; model.stem=standard has 7×7 weights in conv1, model.stem=small 3×3"
        raise UserError(f"{source} does not fit the model: {first_of(problems)}{hint}")
    model.load_state_dict(state)

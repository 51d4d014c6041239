"""FSDP2 scripts with the import changed and nothing else: losses equal FSDP2's, or a refusal by name."""

import copy
import importlib
import itertools
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as theirs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import shardtrain
from shardtrain import fsdp as ours

from pool import each_rank

BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


class Layer(nn.Module):
    def __init__(self, width: int = 9) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 19)
        self.down = nn.Linear(19, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Decoder(nn.Module):
    """torchtitan's parts: ``tok_embeddings``, ``layers``, ``norm``, ``output``."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(23, 9)
        self.layers = nn.ModuleDict({str(number): Layer() for number in range(3)})
        self.norm = nn.LayerNorm(9)
        self.output = nn.Linear(9, 23, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(ids)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


def decoder(**options: Any) -> Decoder:
    torch.manual_seed(3)
    return Decoder(**options)


def train(model: Any, steps: int = 4, before: Callable[[int], object] = id, micro: int = 1) -> list[float]:
    """Return the losses of a few steps, other data on each rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())
    losses = []
    for number in range(steps * micro):
        before(number)
        ids = torch.randint(23, (2, 7))
        loss = nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.roll(1).flatten())
        loss.backward()
        losses.append(loss.item())
        if number % micro == micro - 1:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def tutorial(names: Any) -> list[float]:
    """PyTorch's "Getting started with FSDP2": the meta device, precision, explicit prefetching."""
    with torch.device("meta"):
        model = Decoder()
    policy = names.MixedPrecisionPolicy(**BF16)
    for layer in model.layers.values():
        names.fully_shard(layer, mp_policy=policy)
    names.fully_shard(model, mp_policy=policy)
    layers = list(model.layers.values())
    for layer, following in itertools.pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([layer])
    model.to_empty(device="cpu")
    assert sum(param.numel() for param in layers[0].parameters()) < 400
    for param in model.parameters():
        nn.init.constant_(param, 0.01)
    model.unshard(async_op=True)
    return train(model)


def clipped(names: Any) -> list[float]:
    """Clip with torch's function, whose norm FSDP2 returns as a DTensor."""
    model = decoder()
    for layer in model.layers.values():
        names.fully_shard(layer)
    names.fully_shard(model)
    norms = list[float]()

    def clip(number: int) -> None:
        if number % 2:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3).full_tensor().item())

    losses = train(model, steps=3, before=clip, micro=2)
    return [*losses, *norms]


def torchtitan(names: Any) -> list[float]:
    """``apply_fsdp``: replicas, a list of modules, options per module, no division of gradients."""
    model = decoder()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    config: Any = {"mesh": mesh, "mp_policy": names.MixedPrecisionPolicy(**BF16)}
    names.fully_shard(model.tok_embeddings, **config, reshard_after_forward=True)
    for number, layer in enumerate(model.layers.values()):
        names.fully_shard(layer, **config, reshard_after_forward=number < 2)
    names.fully_shard([model.norm, model.output], **config, reshard_after_forward=False)
    names.fully_shard(model, **config)
    for module in model.modules():
        if isinstance(module, names.FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # as gloo needs it
    return train(model)


def accumulation(names: Any) -> list[float]:
    """Gradients reduced on the last of three micro-batches; one layer's on every one of them."""
    model = decoder()
    for layer in model.layers.values():
        names.fully_shard(layer, reshard_after_forward=2)
    names.fully_shard(model)

    def before(number: int) -> None:
        model.set_requires_gradient_sync(number % 3 == 2)
        model.layers["1"].set_requires_gradient_sync(True, recurse=False)
        model.set_requires_all_reduce(number % 3 == 2)
        model.set_is_last_backward(number % 3 == 2)
        model.set_reshard_after_forward(number % 2 == 0)

    return train(model, before=before, micro=3)


def nested(names: Any) -> list[float]:
    """A sharded model inside another, tied weights, a frozen and an ignored parameter."""
    model = decoder(tied=True)
    model.layers["2"].up.weight.requires_grad_(False)
    body = nn.Sequential(*model.layers.values())
    body.forward = nn.Sequential.forward.__get__(body)
    ignored = {model.norm.bias}
    for layer in body:
        names.fully_shard(layer)
    names.fully_shard(body)
    model.layers = nn.ModuleDict({"body": body})
    names.fully_shard(model, ignored_params=ignored)
    model.norm.bias.requires_grad_(False)
    return train(model)


def alone(names: Any) -> list[float]:
    """One call alone, and a method in the place of forward."""
    model = decoder()
    names.fully_shard(model)
    model.generate = lambda: 0
    return train(model)


SCRIPTS = (tutorial, clipped, torchtitan, accumulation, nested, alone)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
@each_rank(2, transport="auto")
def test_a_script_has_the_losses_of_fsdp2(script: Any) -> None:
    expected = script(theirs)
    found = script(ours)
    assert found == pytest.approx(expected, rel=1e-6)
    assert len(set(found)) > 1


def distributed(model: Any) -> None:
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    model.norm.weight = nn.Parameter(distribute_tensor(model.norm.weight.detach(), mesh))
    ours.fully_shard(model.norm)


def inside(model: Any) -> None:
    ours.fully_shard(model.layers["0"])
    ours.fully_shard(model)
    ours.fully_shard(model.layers["1"])


def apart(model: Any, **options: Any) -> None:
    ours.fully_shard(model.norm, **options)
    ours.fully_shard(model)


def edited(model: Any) -> None:
    ours.fully_shard(model).unshard()
    with torch.no_grad():
        model.norm.weight.add_(1)
    model.reshard()


@each_rank(2, transport="auto")
def test_what_changes_no_result_is_accepted() -> None:
    losses = []
    for options in (
        {},
        {"shard_placement_fn": lambda param: Shard(param.ndim - 1) if param.ndim > 1 else None},
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
        for layer in model:
            ours.fully_shard(layer, **options)
        ours.fully_shard(model, **options)
        if options:
            model.set_post_optim_event(None)
            model._set_unshard_async_op(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            loss = model(torch.ones(3, 6)).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:2] == losses[2:]


def in_two_units(model: Any) -> Any:
    """Return ``model``, sharded by the call that encloses another."""
    ours.fully_shard(model.norm)
    return ours.fully_shard(model)


def checkpointed(model: Any) -> None:
    in_two_units(model)
    name = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"  # the refusal knows it by its file
    importlib.import_module(name).apply_activation_checkpointing(model, check_fn=lambda module: True)


REFUSALS: dict[str, Callable[[Any], object]] = {
    r"fully_shard\(shard_placement_fn=...\) that returns no Shard\(dim\), for .*, of FSDP2": lambda m: (
        ours.fully_shard(m, shard_placement_fn=id)
    ),
    r"fully_shard\(dp_mesh_dims=...\) of FSDP2 is not supported": lambda m: ours.fully_shard(
        m, dp_mesh_dims=1
    ),
    "parameter weight is a .*DTensor, expected a plain torch.Tensor": distributed,
    "ModuleDict, which has no forward of its own": lambda m: ours.fully_shard(m.layers),
    "this FSDPLayerNorm is a unit already": lambda m: ours.fully_shard([m.norm, m.norm]),
    "this Layer is a unit already, or inside a sharded model": inside,
    r"norm was given ranks \[RANK\], expected the root's ranks \[0, 1\]": lambda m: apart(
        m, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"]
    ),
    r"norm was given ranks \[0, 1\] and offload": lambda m: apart(m, offload_policy=ours.CPUOffloadPolicy()),
    r"set_custom_all_gather\(\) of FSDP2 is not supported": lambda m: ours.fully_shard(
        m.norm
    ).set_custom_all_gather(1),
    "norm.weight changed while the root was whole": edited,
    r"cannot be copied: .* copy before shard\(\)": lambda m: copy.deepcopy(ours.fully_shard(m)),
    r"apply_activation_checkpointing\(\) .* before shard\(\)": checkpointed,
    r"no DTensor and has no device_mesh; .*ram_efficient_loading=False": lambda m: (
        in_two_units(m).state_dict()["norm.weight"].device_mesh
    ),
}


@pytest.mark.parametrize("message", REFUSALS)
@each_rank(2, transport="auto")
def test_what_has_no_meaning_is_refused_at_the_call(message: str) -> None:
    with pytest.raises((ValueError, AttributeError), match=message.replace("RANK", str(dist.get_rank()))):
        REFUSALS[message](decoder())


@each_rank(2)
def test_units_show_full_parameters_between_unshard_and_reshard() -> None:
    model = decoder()
    plain = decoder()
    transport = os.environ["SHARDTRAIN_TEST_TRANSPORT"]
    for module in (*model.layers.values(), model):
        ours.fully_shard(module, transport=transport)
    layer = model.layers["0"]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    layer.unshard()
    assert layer.up.weight.equal(plain.layers["0"].up.weight)
    layer.reshard()
    assert layer.up.weight.shape[1:] == (1,)
    ours.register_fsdp_forward_method(layer, "forward")
    ours.register_fsdp_forward_method(plain, "no method: a module that is no unit is left alone")
    layer.unshard()
    model(torch.arange(5)[None]).sum().backward()  # a forward without reshard
    optimizer.step()
    layer.unshard()
    assert not layer.up.weight.equal(plain.layers["0"].up.weight)
    optimizer.zero_grad()
    assert isinstance(layer, Layer)
    assert list(shardtrain.full_state_dict(model)) == list(plain.state_dict())


@each_rank(2)
def test_blocks_without_their_root_are_warned_of() -> None:
    model = decoder()
    for layer in model.layers.values():
        ours.fully_shard(layer)
    with pytest.warns(UserWarning, match=r"4 that belong to no sharded model, .* shard the root, too"):
        train(model, 1)
    whole = decoder()
    for layer in whole.layers.values():
        ours.fully_shard(layer)
    ours.fully_shard(whole)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(whole, 1)

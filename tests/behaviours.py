"""What a model may throw at a sharding wrapper: a scene for each behaviour, of shardtrain and of FSDP2.

    python tests/behaviours.py > docs/behaviours.md

writes the table. Every scene runs on two ranks in processes of its own, since some hang and some end the
process. Most compare with a replica whose gradients are averaged by hand. `test_behaviours.py` runs the
scenes of shardtrain with the other tests.
"""

import contextlib
import copy
import gc
import io
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import shardtrain
from shardtrain import comm

import test_user_code as user
from small import Block, OddNet, average_gradients, classify, sgd, three_steps
from test_user_code import Lars, Net, Outer, Unit, batch, squares

LIMIT_S = 30.0
WORLD = 2
UNITS = (Unit, Outer, Block, nn.Embedding)
WHOLE = dcp_state.StateDictOptions(full_state_dict=True)

Make = Callable[[], nn.Module]
Change = Callable[[Any], object]


class Shardtrain:
    """The wrapper of this package, as a scene sees it."""

    full = staticmethod(shardtrain.full_state_dict)
    load = staticmethod(shardtrain.load_full_state_dict)
    method = staticmethod(shardtrain.forward_method)
    save = staticmethod(shardtrain.checkpoint.save)
    resume = staticmethod(shardtrain.checkpoint.load)
    time_out = staticmethod(comm.set_time_out)

    def options(self, which: str) -> dict[str, Any]:
        transport = ("shared_memory", "process_group")[dist.get_rank() % 2]
        half = shardtrain.Precision(param=torch.bfloat16)
        different = {"differing": {"transport": transport}, "messages": {"transport": "process_group"}}
        return {**different, "half": {"precision": half}, "whole": {"layout": "whole"}, "": {}}[which]

    def clip(self, model: nn.Module, norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), norm, norm_type)

    def shard(self, model: nn.Module, units: Any = UNITS, **options: Any) -> nn.Module:
        transport = os.environ.get("SHARDTRAIN_TEST_TRANSPORT", "auto")
        chosen = lambda _, module: isinstance(module, units)  # noqa: E731
        return shardtrain.shard(model, **{"units": chosen, "transport": transport, **options})


class FSDP2:
    """torch's ``fully_shard``, used as its documentation says."""

    full = staticmethod(partial(dcp_state.get_model_state_dict, options=WHOLE))
    load = staticmethod(partial(dcp_state.set_model_state_dict, options=WHOLE))
    method = staticmethod(register_fsdp_forward_method)
    time_out = staticmethod(dist.distributed_c10d._set_pg_timeout)

    def options(self, which: str) -> dict[str, Any]:
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        different = {"differing": {"reshard_after_forward": dist.get_rank() == 0}}
        return {**different, "half": {"mp_policy": half}}.get(which, {})

    def shard(self, model: nn.Module, units: Any = UNITS, ignored: Any = (), **options: Any) -> nn.Module:
        options["mesh"] = init_device_mesh("cpu", (dist.get_world_size(),))
        options["ignored_params"] = {p for m in ignored for p in m.parameters()}
        inner = [m for m in model.modules() if isinstance(m, units) and m is not model]
        for module in sorted(inner, key=lambda module: len(list(module.modules()))):  # from the inside
            fully_shard(module, **options)
        return fully_shard(model, **options)

    def clip(self, model: nn.Module, norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), norm, norm_type).full_tensor()

    def save(self, path: str, model: nn.Module, optimizer: Any) -> None:
        self.saved = dcp_state.get_state_dict(model, optimizer)

    def resume(self, path: str, *into: Any) -> None:
        dcp_state.set_state_dict(*into, model_state_dict=self.saved[0], optim_state_dict=self.saved[1])


Api = Shardtrain | FSDP2


# how a scene is written


class Scene(NamedTuple):
    kind: str
    run: Callable[[Api], None]
    refused: str | None  # what shardtrain's refusal says, a regular expression; else it is equal


SCENES: dict[str, Scene] = {}


def scene(kind: str, refused: str | None = None, role: str = "") -> Callable[[Any], Any]:
    """Make a function a row of the table, whose docstring is the row's name.

    The function gets a wrapper, or is the part ``role`` of `like_a_replica`.
    """

    def register(function: Any) -> Any:
        row(kind, function.__doc__, refused, **({role: function} if role else {"run": function}))
        return function

    return register


def row(kind: str, name: str, refused: str | None = None, run: Any = None, **parts: Any) -> None:
    """Add a row: what ``run`` does with a wrapper and ``parts``, or `like_a_replica` does."""
    SCENES[name[0].upper() + name[1:]] = Scene(kind, partial(run or like_a_replica, **parts), refused)


def pair(
    api: Api, make: Make = Net, before: Change = lambda _: None, options: str = "", scalars: bool = False
) -> tuple[Any, Any]:
    """Return the model sharded, and its replica. FSDP2 takes no scalars, which have a row of their own."""
    torch.manual_seed(0)
    replica = make()
    before(replica)
    for module in () if scalars else replica.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if not param.ndim:
                setattr(module, name, nn.Parameter(param.detach()[None]))
    return api.shard(copy.deepcopy(replica), **api.options(options)), replica


def advance(
    model: nn.Module,
    replica: nn.Module,
    step: Callable[[Any, int], object] = squares,
    optimizer: Callable[[nn.Module], Any] = sgd,
) -> None:
    """Train both, the replica with gradients averaged by hand; ``step`` is forward and backward."""
    three_steps(model, optimizer(model), step)
    three_steps(replica, optimizer(replica), step, average_gradients)


def same(api: Api, model: nn.Module, replica: nn.Module) -> None:
    whole = api.full(model)
    for name, param in replica.named_parameters():
        assert whole[name].shape == param.shape, f"{name} has another shape"
        torch.testing.assert_close(
            whole[name], param.detach(), rtol=1e-4, atol=1e-5, msg=f"{name} differs from the replica's"
        )


def like_a_replica(
    api: Api,
    make: Make | None = None,
    unit: Any = None,
    root: Any = None,
    change: Change = lambda _: None,
    step: Callable[[Any, int], object] = squares,
    optimizer: Callable[[nn.Module], Any] = sgd,
    **how: Any,
) -> None:
    """Train a model sharded, and a replica.

    ``unit`` and ``root`` are forwards of a `Net`. ``before`` is what is done to it before wrapping,
    ``change`` what is done to both models after.
    """
    model, replica = pair(api, make or (lambda: Net(unit, root)), **how)
    for net in (model, replica):
        torch.manual_seed(1)
        change(net)
    advance(model, replica, step, optimizer)
    same(api, model, replica)


def through(net: Any, x: torch.Tensor, *blocks: int) -> torch.Tensor:
    """Return what the stem and the blocks of these numbers make of ``x``."""
    x = net.stem(x)
    for index in blocks:
        x = net.blocks[index](x)
    return x


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7, bias=False), nn.ReLU(), nn.Linear(7, 6, bias=False))


def on_images(net: nn.Module, number: int) -> None:
    classify(net, number).backward()


# wrapping

row("Wrapping", "Training equals a replica's", make=OddNet, step=on_images)
to_last = partial(nn.Module.to, memory_format=torch.channels_last)
row("Wrapping", "channels_last convolutions", make=OddNet, before=to_last, step=on_images)
row("Wrapping", "A 0-dim parameter", scalars=True)
text = "transport= differs between ranks: rank 1 has '.*' where rank 0 has '.*'"
row("Wrapping", "Options that differ between ranks", text, options="differing")


@scene("Wrapping")
def divergent_weights(api: Api) -> None:
    """Initial weights that differ between ranks become rank 0's"""
    torch.manual_seed(dist.get_rank())
    model = api.shard(two_layers(), nn.Linear)
    torch.manual_seed(0)
    same(api, model, two_layers())


@scene("Wrapping", "the model to shard differs between ranks")
def different_models(api: Api) -> None:
    """Models that differ between ranks"""
    squares(api.shard(nn.Linear(5, 7 + 2 * dist.get_rank())), 0)
    raise AssertionError("nothing is said")


# optimizers


def named(name: str, **options: Any) -> Callable[[nn.Module], Any]:
    return lambda net: getattr(torch.optim, name)(net.parameters(), lr=0.01, **options)


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation, of all parameters together. Cannot be built from groups alone."""

    def __init__(self, params: Any, base: type[torch.optim.Optimizer]) -> None:
        super().__init__(params, {})
        self.base = base(self.param_groups, lr=0.05)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [param for group in self.param_groups for param in group["params"]]
        if closure is not None:
            norm = torch.stack([param.grad.norm() for param in params]).norm()
            moves = [0.05 * param.grad / norm for param in params]
            torch._foreach_add_(params, moves)
            torch.enable_grad()(closure)()
            torch._foreach_sub_(params, moves)
        return self.base.step()


CANNOT = "cannot step on a sharded model"
row("Optimizers", "`SGD(fused=True)`", optimizer=named("SGD", fused=True))
by_sam = lambda net: Sam(net.parameters(), torch.optim.SGD)  # noqa: E731
row("Optimizers", "SAM: cannot be built from its groups alone", "Sam cannot be tried", optimizer=by_sam)
for name in ("Adafactor", "Muon"):
    of = {"make": two_layers, "optimizer": named(name)}
    row("Optimizers", name, f"{name} {CANNOT}", **of)
    row("Optimizers", f'{name}, with `layout="whole"`', options="whole", **of)


@scene("Optimizers", role="optimizer")
def grouped(net: nn.Module) -> Any:
    """Groups chosen by `p.ndim` after wrapping"""
    decayed, others = ([p for p in net.parameters() if (p.ndim < 2) is flat] for flat in (False, True))
    return torch.optim.SGD([{"params": decayed, "weight_decay": 0.5}, {"params": others}], lr=0.05)


@scene("Optimizers", f"Lars {CANNOT}", role="optimizer")
def warming_up(net: nn.Module) -> Any:
    """LARS in a warm-up that begins with a learning rate of 0"""
    optimizer = Lars(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 9)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer


class From32(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in (p for group in self.param_groups for p in group["params"]):
            if param.ndim == 2 and min(param.shape) >= 32:
                param.grad.div_(param.grad.norm())
        return super().step(closure)


row(
    "Optimizers",
    "One that looks at whole matrices from 32 × 32 upwards, as timm's Adafactor does",
    f"From32 {CANNOT}",
    make=lambda: nn.Sequential(nn.Linear(5, 33), nn.Linear(33, 33)),
    optimizer=lambda net: From32(net.parameters(), lr=0.01),
)


def spoil(net: nn.Module, value: float) -> None:
    """Multiply the gradients of rank 1."""
    if dist.get_rank() == 1:
        torch._foreach_mul_([param.grad for param in net.parameters() if param.grad is not None], value)


def scaled(net: nn.Module) -> Any:
    optimizer, scaler = sgd(net), torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    step = lambda: (scaler.step(optimizer), scaler.update())  # noqa: E731
    return SimpleNamespace(zero_grad=optimizer.zero_grad, step=step)


row(
    "Optimizers",
    "torch's `GradScaler`, where one rank's gradients overflow",
    "use shardtrain.GradScaler",
    step=lambda net, number: (squares(net, number), spoil(net, torch.inf if number == 1 else 1.0)),
    optimizer=scaled,
)


@scene("Optimizers")
def optimizer_before(api: Api) -> None:
    """Built before wrapping"""
    torch.manual_seed(0)
    model = two_layers()
    replica, early = copy.deepcopy(model), sgd(model)
    advance(api.shard(model), replica, optimizer=lambda net: early if net is model else sgd(net))
    same(api, model, replica)


@scene("Optimizers")
def optimizer_in_backward(api: Api) -> None:
    """One for each parameter, which steps in backward"""
    model, replica = pair(api)
    for param in model.parameters():
        own = torch.optim.SGD([param], 0.05)
        param.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    squares(model, 0)
    squares(replica, 0)
    average_gradients(replica)
    torch.optim.SGD(replica.parameters(), 0.05).step()
    same(api, model, replica)


@scene("Optimizers")
def clips_a_nan(api: Api) -> None:
    """`torch.nn.utils.clip_grad_norm_` by the largest gradient, where one rank has a NaN"""
    model, _ = pair(api)
    squares(model, 0)
    spoil(model, torch.nan)
    assert api.clip(model, 1.0, norm_type=torch.inf).isnan(), "the norm is a number"


@scene("Optimizers")
def clips_a_mixture(api: Api) -> None:
    """`torch.nn.utils.clip_grad_norm_` with ignored parameters"""
    torch.manual_seed(0)
    replica = two_layers()
    model = copy.deepcopy(replica)
    for net in (api.shard(model, ignored=[model[2]]), replica):
        net(torch.ones(2, 5)).square().mean().backward()  # equal on all ranks, as nothing reduces the ignored
    expected = nn.utils.clip_grad_norm_(replica.parameters(), 0.1)
    torch.testing.assert_close(api.clip(model, 0.1), expected, msg="another norm than the replica's")


# outputs, calls, edits: most are tables of `test_user_code.py`

KIND = "Outputs, calls, edits"
for name, (make, step) in user.SCENES.items():
    row(KIND, name, make=make, step=step)
for name, make in user.CALLS.items():
    row(KIND, name, make=make)

# part of `like_a_replica`: names and values
PARTS: dict[str, dict[str, Any]] = {
    "unit": {
        "A parameter used on one rank only": lambda self, x: self.norm(
            x if dist.get_rank() else self.inside(x)
        ),
        "A parameter used nowhere, in a unit that ran": lambda self, x: self.norm(x),
    },
    "root": {
        "A unit whose output matters on one rank only": lambda self, x: [
            block(self.stem(x)) for block in self.blocks
        ][dist.get_rank() > 0],
        "The parent reads a unit's weight": lambda self, x: F.linear(
            through(self, x, 0, 1, 2), self.blocks[0].inside.weight
        ),
        "Reentrant activation checkpointing": lambda self, x: self.head(
            checkpoint(self.blocks[0], self.stem(x), use_reentrant=True)
        ),
    },
    "step": {
        "`torch.compile(model)`": lambda net, n: squares(torch.compile(net, backend="eager"), n),
        "`vmap`": lambda net, n: torch.func.vmap(net)(batch(n)).mean().backward(),
        "`jvp`": lambda net, n: torch.func.jvp(net, (batch(n),), (batch(9),))[1].mean().backward(),
        "A penalty on parameters in the same backward": lambda net, n: (
            net(batch(n)).mean() + sum(param.norm() for param in net.parameters())
        ).backward(),
    },
    "before": {
        "Weights tied across units": lambda net: setattr(
            net.blocks[2].inside, "weight", net.blocks[0].inside.weight
        ),
        "Units compiled before wrapping": lambda net: [b.compile(backend="eager") for b in net.blocks],
    },
    "change": {
        "`model.compile()`": lambda net: net.compile(backend="eager"),
        "`inference_mode`, then training": lambda net: torch.inference_mode()(lambda: net(batch(0)))(),
        "Pruning after wrapping": lambda net: prune.l1_unstructured(net.head, "weight", amount=0.3),
        "`layer.bias = None` after wrapping": lambda net: setattr(net.head, "bias", None),
        "A module attached after wrapping": lambda net: setattr(net, "head", nn.Linear(7, 3)),
    },
}
REFUSED = {
    "`vmap`": "cannot run inside jvp, vmap",
    "`jvp`": "cannot run inside jvp, vmap",
    "Pruning after wrapping": "head.weight is no longer where shard.. found it.*before shard",
    "`layer.bias = None` after wrapping": "head.bias is no longer where",
    "A module attached after wrapping": "parameters attached after shard",
    "The parent reads a unit's weight": "blocks.0.inside.weight is this rank's piece while blocks.0 does "
    "not run, and the forward of Net reads it: call blocks.0 as a module",
    "A penalty on parameters in the same backward": "for a penalty on weights use",
}
for part, rows in PARTS.items():
    for name, value in rows.items():
        row(KIND, name, REFUSED.get(name), **{part: value})
row(
    KIND,
    "Unfreezing parameters later",
    before=lambda net: net.blocks.requires_grad_(False),
    step=lambda net, number: (net.blocks.requires_grad_(number > 0), squares(net, number)),
)
row(
    KIND,
    "An embedding with `max_norm`",
    "^ValueError: 0.weight changed while 0 was whole",
    make=lambda: nn.Sequential(nn.Embedding(11, 7, max_norm=0.01), nn.Linear(7, 3)),
    step=lambda net, number: net(torch.arange(9) + number % 2).square().mean().backward(),
)


@scene(KIND, "double backward .* is not supported", role="step")
def gradient_penalty(net: nn.Module, number: int) -> None:
    """Double backward"""
    x = batch(number).requires_grad_()
    (slope,) = torch.autograd.grad(net(x).tanh().sum(), x, create_graph=True)
    slope.square().sum().backward()


@scene(KIND, "autograd.grad over parameters of a sharded model", role="step")
def autograd_grad(net: nn.Module, number: int) -> None:
    """`autograd.grad` over parameters"""
    params = list(net.parameters())
    slopes = torch.autograd.grad(net(batch(number)).square().mean(), params, allow_unused=True)
    for param, slope in zip(params, slopes, strict=True):
        param.grad = slope


@scene(KIND)
def other_methods(api: Api) -> None:
    """A method other than `forward`, once it is declared"""
    model, replica = pair(api)
    api.method(model, "encode")
    api.method(model.blocks[0], "plain")
    advance(model, replica, lambda net, n: (net.encode(batch(n)) + net(batch(n)).mean()).sum().backward())
    same(api, model, replica)


def interrupted(api: Api, where: str) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    model, replica = pair(api)
    handle = getattr(model.blocks[0].norm, f"register_{where}_hook")(interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        squares(model, 9)
    handle.remove()
    same(api, model, replica)
    advance(model, replica)
    same(api, model, replica)


row(KIND, "Ctrl-C in forward, then a full state dict and steps", run=interrupted, where="forward")
row(KIND, "Ctrl-C in backward, then the same", run=interrupted, where="full_backward")


@scene(KIND)
def containers_in_bf16(api: Api) -> None:
    """Lists and a `defaultdict` that a unit fills, in bf16"""

    def unit(self: Any, x: torch.Tensor, kept: Any) -> torch.Tensor:
        kept["h"].append(x)
        return self.plain(x)

    kept: Any = defaultdict(list)
    pair(api, lambda: Net(unit), options="half")[0].blocks[0](torch.ones(4, 7), kept)
    assert len(kept["h"]) == 1, "they stay empty"


row(KIND, "bf16 with BatchNorm", run=lambda api: on_images(pair(api, OddNet, options="half")[0], 0))


@contextlib.contextmanager
def folder() -> Iterator[str]:
    """Yield a directory that all ranks see."""
    path = [tempfile.mkdtemp()]
    dist.broadcast_object_list(path, 0)
    yield path[0]
    dist.barrier()
    shutil.rmtree(path[0], ignore_errors=True)


def loads_nothing(api: Api, model: nn.Module, replica: nn.Module, load: Callable[[], object]) -> None:
    """Require that ``load`` raises, and that the model is as it was."""
    try:
        load()
    except Exception:
        same(api, model, replica)
        raise
    raise AssertionError("it was loaded without a word")


@scene("State")
def dcp_of_local_state(api: Api) -> None:
    """`dcp.save(model.state_dict())`, loaded into a plain model"""
    model, plain = pair(api, two_layers)[0], two_layers()
    with folder() as path:
        dcp.save(model.state_dict(), checkpoint_id=path)
        dcp.load(plain.state_dict(), checkpoint_id=path)
    same(api, model, plain)


@scene("State", "a rank's piece of 0.weight must not be pickled")
def torch_save(api: Api) -> None:
    """`torch.save(model.state_dict())` (`save_pretrained`), loaded into a plain model"""
    model, plain = pair(api, two_layers)[0], two_layers()
    stored = io.BytesIO()
    torch.save(model.state_dict(), stored)
    plain.load_state_dict(torch.load(io.BytesIO(stored.getvalue()), weights_only=False))
    same(api, model, plain)


@scene("State", r"full_state_dict=True\) cannot gather a sharded model: use shardtrain")
def full_state(api: Api) -> None:
    """`get_model_state_dict(full_state_dict=True)`"""
    model, replica = pair(api, two_layers)
    state = dcp_state.get_model_state_dict(model, options=WHOLE)
    assert state["0.weight"].equal(replica[0].weight), "it returns pieces"


def bad_state(api: Api, dtype: torch.dtype | None) -> None:
    model, replica = pair(api)
    state = {name: value + 1 for name, value in replica.state_dict().items()}
    bias = state.pop("head.bias")
    state.update({"head.bias": bias.to(dtype)} if dtype else {})
    loads_nothing(api, model, replica, lambda: api.load(model, state))


for name, value, refused in (
    ("without a key", None, "is missing"),
    ("in float64", torch.float64, "is torch.f"),
):
    title = f"Loading a full state dict {name}: nothing is loaded"
    row("State", title, f"nothing was loaded: head.bias {refused}", bad_state, dtype=value)


@scene("State", "does not fit, nothing was loaded")
def impossible_options(api: Api) -> None:
    """Loading a checkpoint whose optimizer has `betas: 5`: nothing is loaded"""
    with folder() as path:
        model, replica = pair(api)
        optimizer = torch.optim.AdamW(model.parameters())
        squares(model, 0)
        optimizer.step()
        optimizer.param_groups[0]["betas"] = 5
        api.save(f"{path}/one", model, optimizer)
        model, replica = pair(api)
        optimizer = torch.optim.AdamW(model.parameters())
        loads_nothing(api, model, replica, lambda: api.resume(f"{path}/one", model, optimizer))


@scene("State")
def batch_norm_saves(api: Api) -> None:
    """BatchNorm: a save does not depend on the rank"""
    model, _ = pair(api, OddNet)
    on_images(model, 0)
    mean = api.full(model)["blocks.0.norm.running_mean"]
    means = [torch.empty_like(mean) for _ in range(dist.get_world_size())]
    dist.all_gather(means, mean.contiguous())
    assert torch.equal(means[0], means[1]), "what is saved depends on the rank"


def at_once(api: Api, **forwards: Any) -> None:
    """Train a model of seven units, and count those that are whole while a unit computes."""
    model, replica = pair(api, lambda: Net(**forwards, blocks=7))
    counts = []

    def count(*args: Any) -> None:
        weights = [block.inside.weight for block in model.blocks]
        counts.append(sum(type(weight.data) is torch.Tensor and weight.shape == (7, 7) for weight in weights))
        if args[-1].grad_fn:  # in forward
            args[-1].register_hook(count)

    for block in model.blocks:
        block.norm.register_forward_hook(count)
    advance(model, replica)
    same(api, model, replica)
    assert max(counts) <= 3, f"{max(counts)} of 7 units are whole at once"


def teacher(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = through(self, x, *range(7))
    with torch.no_grad():
        target = through(self, x.flip(0), *range(7))
    return self.head(h - target)


title = "A tensor that passes through all units (T5's position bias): three are whole at most"
row("Memory", title, run=at_once, unit=user.with_bias, root=user.passes_through)
title = "Trainable units run once more, last, without gradients (BYOL): the same"
row("Memory", title, run=at_once, root=teacher)


@scene("Memory")
def threads(api: Api) -> None:
    """A model that is gone leaves no threads behind"""
    running = []
    for _ in range(4):
        squares(pair(api, options="messages")[0], 0)
        gc.collect()
        time.sleep(0.5)  # gloo's end a moment later
        running.append(len(os.listdir("/proc/self/task")))
    assert running[-1] <= min(running[:2]), f"{running} threads after each model"


# transport


@scene("Transport")
def many_movements(api: Api) -> None:
    """300 units under `no_grad`"""
    with torch.no_grad():
        api.shard(nn.Sequential(*(nn.Linear(5, 5) for _ in range(300))), nn.Linear)(batch(0))


title, orders = "Ranks that run units in another order", ((0, 1, 2), (0, 2, 1))
swapped = {"root": lambda self, x: self.head(through(self, x, *orders[dist.get_rank() > 0]))}
row("Transport", title, "take different paths", **swapped)


@scene("Transport", "has ended")
def unequal_steps(api: Api) -> None:
    """Unequal numbers of steps"""
    model, _ = pair(api)
    for number in range(3 - dist.get_rank()):
        squares(model, number)


@scene("Transport", "rank 1 does not answer")
def stopped(api: Api) -> None:
    """A rank that is stopped: the time-out of 2 s says so"""
    model, _ = pair(api)
    squares(model, 0)
    api.time_out(timedelta(seconds=2))
    if dist.get_rank() == 1:
        subprocess.Popen(["sh", "-c", f"sleep 6; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        squares(model, 1)


@scene("Transport")
def busy(api: Api) -> None:
    """A rank that is at work between steps for longer than the time-out"""
    model, _ = pair(api)
    squares(model, 0)
    api.time_out(timedelta(seconds=1.5))
    time.sleep(4.0 * dist.get_rank())
    squares(model, 1)


# the table


def outcome(api: Api, name: str) -> str:
    """Return ``equal``, or what came instead."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", message=".* cannot be tried on pieces")
            SCENES[name].run(api)
    except BaseException as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename).name
        # An assertion inside of a wrapper is a refusal like others.
        if isinstance(error, AssertionError) and raised_in in (Path(__file__).name, "_comparison.py"):
            return f"**wrong**: {str(error).splitlines()[0]}"
        text = next((line for line in str(error).splitlines() if line.strip()), "")
        return ". ".join([f"{type(error).__name__}: {text}", *getattr(error, "__notes__", ())])
    return "equal"


def _rank(api: Api, name: str, rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    Path(folder, str(rank)).write_text(outcome(api, name))
    os._exit(0)  # no farewell to a group that may be broken


def in_processes(api: Api, name: str) -> str:
    """Return the outcome on rank 0, in fresh processes; on rank 1 if that tells more."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "shardtrain", "behaviours"])
    with tempfile.TemporaryDirectory() as place:
        ranks = [
            context.Process(target=_rank, args=(api, name, rank, place), daemon=True) for rank in range(WORLD)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + LIMIT_S
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        ended = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
        texts = [path.read_text() for path in sorted(Path(place).glob("[01]"))]
    if any(ended):
        return f"**ends the process** (exit code {next(filter(None, ended))})"
    if None in ended:
        return f"**hangs** (still after {LIMIT_S:.0f} s)"
    return next((text for text in texts if text != "equal"), "equal")


def table() -> str:
    lines = [
        "# Behaviours",
        "",
        f"What each wrapper does, tried on {WORLD} ranks on the CPU by"
        f" `python tests/behaviours.py > docs/behaviours.md`: torch {torch.__version__}, Python"
        f" {sys.version.split()[0]}, {date.today().isoformat()}. FSDP2 is"
        " `torch.distributed.fsdp.fully_shard` over gloo. *Equal*: the same parameters as a replica whose"
        " gradients are averaged by hand, or what the row says. Other words are the error's, cut short.",
    ]
    kind = ""
    for name, scene in SCENES.items():
        if scene.kind != kind:
            kind = scene.kind
            lines += ["", f"## {kind}", "", "| behaviour | shardtrain | FSDP2 |", "| --- | --- | --- |"]
        texts = [in_processes(api, name).replace("|", "\\|") for api in (Shardtrain(), FSDP2())]
        texts = [re.sub(rf"{tempfile.gettempdir()}/\w+", "…", text) for text in texts]
        cells = [text if len(text) <= 150 else f"{text[:150]}…" for text in texts]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr)
    return "\n".join(lines)


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # so that the forkserver finds this file
    print(table())

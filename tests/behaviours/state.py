"""Rows of state, memory and failures."""

from __future__ import annotations

import contextlib
import gc
import io
import math
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from behaviours.rows import (
    Net,
    Wrong,
    advance,
    batch,
    conv_net,
    pair,
    require,
    row,
    same,
    scene,
    squares,
    three_steps,
    two_layers,
)
from behaviours.wrappers import Wrapper
from small import average_gradients, sgd

# state


@contextlib.contextmanager
def folder() -> Iterator[str]:
    """Yield a directory that all ranks see."""
    path = [tempfile.mkdtemp()]
    dist.broadcast_object_list(path, 0)
    yield path[0]
    dist.barrier()
    shutil.rmtree(path[0], ignore_errors=True)


@scene("State")
def resumed(api: Wrapper) -> None:
    """Saved, loaded into a new model, and trained on"""
    model, replica = pair(api)
    optimizer = sgd(model)
    theirs = sgd(replica)
    three_steps(model, api.prepare(model, optimizer), squares)
    three_steps(replica, theirs, squares, average_gradients)
    with folder() as path:
        api.save(f"{path}/one", model, optimizer)
        model = api.shard(Net())
        optimizer = sgd(model)
        api.load(f"{path}/one", model, optimizer)
    advance(api, model, replica, optimizer=lambda net: optimizer if net is model else theirs)


@scene("State")
def dcp_of_local_state(api: Wrapper) -> None:
    """`dcp.save(model.state_dict())`, loaded into a plain model"""
    model = pair(api, two_layers)[0]
    plain = two_layers()
    with folder() as path:
        dcp.save(model.state_dict(), checkpoint_id=path)
        dcp.load(plain.state_dict(), checkpoint_id=path)
    same(api, model, plain)


@scene("State")
def torch_save(api: Wrapper) -> None:
    """`torch.save(model.state_dict())` (`save_pretrained`), loaded into a plain model"""
    model = pair(api, two_layers)[0]
    plain = two_layers()
    stored = io.BytesIO()
    torch.save(model.state_dict(), stored)
    plain.load_state_dict(torch.load(io.BytesIO(stored.getvalue()), weights_only=False))
    same(api, model, plain)


def bad_state(api: Wrapper, dtype: torch.dtype | None) -> None:
    model, replica = pair(api)
    state = {name: value + 1 for name, value in replica.state_dict().items()}
    bias = state.pop("head.bias")
    state.update({"head.bias": bias.to(dtype)} if dtype else {})
    try:
        api.load_full_state_dict(model, state)
    except Exception:
        same(api, model, replica)
        raise
    raise Wrong("it was loaded without a word")


row("State", "Loading a full state dict without a key: nothing is loaded", "head.bias", bad_state, dtype=None)
row(
    "State",
    "Loading a full state dict in float64: nothing is loaded",
    "head.bias",
    bad_state,
    dtype=torch.float64,
)


@scene("State")
def loaded(api: Wrapper) -> None:
    """A full state dict, loaded"""
    model, replica = pair(api)
    state = {name: value + 1 for name, value in replica.state_dict().items()}
    replica.load_state_dict(state)
    api.load_full_state_dict(model, state)
    same(api, model, replica)


@scene("State")
def full_state(api: Wrapper) -> None:
    """`get_model_state_dict(full_state_dict=True)`"""
    model, replica = pair(api, two_layers)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    require(state["0.weight"].equal(replica[0].weight), "it returns pieces")


@scene("State")
def batch_norm_saves(api: Wrapper) -> None:
    """BatchNorm: a save does not depend on the rank"""
    model, _ = pair(api, conv_net)
    squares(model, 0)
    mean = api.full_state_dict(model)["3.running_mean"].contiguous()
    means = [torch.empty_like(mean) for _ in range(dist.get_world_size())]
    dist.all_gather(means, mean)
    require(torch.equal(means[0], means[1]), "what is saved depends on the rank")


# memory


def with_bias(self: Any, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    bias = self.inside(x).mean(0) if bias is None else bias
    return self.norm(self.inside(x) + bias), bias


def passes_through(self: Any, x: Tensor) -> Any:
    """T5's position bias is made by the first block, and returned by all."""
    h = self.stem(x)
    bias = None
    for block in self.blocks:
        h, bias = block(h, bias)
    return self.head(h)


def teacher(self: Any, x: Tensor) -> Any:
    h = self.through(x, *range(7))
    with torch.no_grad():
        target = self.through(x.flip(0), *range(7))
    return self.head(h - target)


def is_whole(weight: nn.Parameter) -> bool:
    """A wrapper may refuse to say so of a unit that is not called."""
    try:
        return type(weight.data) is Tensor and weight.shape == (7, 7)
    except ValueError:
        return False


def at_once(api: Wrapper, **forwards: Any) -> None:
    """Train a model of seven units, and count those that are whole while a unit computes."""
    model, replica = pair(api, lambda: Net(**forwards, blocks=7))
    counts = []

    def count(*args: Any) -> None:
        counts.append(sum(is_whole(block.inside.weight) for block in model.blocks))
        if args[-1].grad_fn:  # in forward
            args[-1].register_hook(count)

    for block in model.blocks:
        block.norm.register_forward_hook(count)
    advance(api, model, replica)
    require(max(counts) <= 3, f"{max(counts)} of 7 units are whole at once")


title = "A tensor that passes through all units (T5's position bias): three are whole at most"
row("Memory", title, run=at_once, unit=with_bias, root=passes_through)
title = "Trainable units run once more, last, without gradients (BYOL): the same"
row("Memory", title, run=at_once, root=teacher)


@scene("Memory")
def threads(api: Wrapper) -> None:
    """A model that is gone leaves no threads behind"""
    running = []
    for _ in range(4):
        squares(pair(api)[0], 0)
        gc.collect()
        time.sleep(0.5)  # gloo's end a moment later
        running.append(len(os.listdir("/proc/self/task")))
    require(running[-1] <= min(running[:2]), f"{running} threads after each model")


# failures


def many(api: Wrapper) -> None:
    with torch.no_grad():
        api.shard(nn.Sequential(*(nn.Linear(5, 5) for _ in range(300))))(batch(0))


row("Failures", "300 units under `no_grad`", run=many)
orders = ((0, 1, 2), (0, 2, 1))
swapped = lambda self, x: self.head(self.through(x, *orders[dist.get_rank() > 0]))  # noqa: E731
row("Failures", "Ranks that run units in another order", r"\branks?\b.*block", root=swapped)


@scene("Failures", "rank [12]")
def unequal_steps(api: Wrapper) -> None:
    """Unequal numbers of steps"""
    model, _ = pair(api)
    for number in range(3 - dist.get_rank()):
        squares(model, number)


@scene("Failures", "rank 1")
def stopped(api: Wrapper) -> None:
    """A rank that is stopped: the time-out of 2 s says so"""
    model, _ = pair(api)
    squares(model, 0)
    api.set_time_out(timedelta(seconds=2))
    if dist.get_rank() == 1:
        subprocess.Popen(["sh", "-c", f"sleep 6; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        squares(model, 1)


@scene("Failures")
def busy(api: Wrapper) -> None:
    """A rank that is at work between steps for longer than the time-out"""
    model, _ = pair(api)
    squares(model, 0)
    api.set_time_out(timedelta(seconds=1.5))
    until_s = time.monotonic() + (4.0 if dist.get_rank() == 1 else 0.0)
    while time.monotonic() < until_s:
        math.sqrt(2.0)
    squares(model, 1)

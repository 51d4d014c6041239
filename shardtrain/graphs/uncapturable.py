"""Why a step cannot be captured: what a graph cannot hold is refused by name.

`capture` refuses where it can, the rest in warm-up (`watched`), or while the step is recorded (`Operations`,
`refuse_drawn`). What the step changes of what is fixed is found in ``capture.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from shardtrain import device as devices
from shardtrain import torch_private
from shardtrain.engine.hooks import Engine

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_GENERATORS = ("torch's generator of the CPU", "Python's random", "NumPy's random")


class Shape(NamedTuple):
    """An input's shape, for which a graph has a buffer."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def refusal(engine: Engine, optimizer: Optimizer, recorder: devices.Recorder | None) -> str | None:
    """Return why steps of the model cannot be captured, before one has run; None if nothing is known."""
    channel = engine.channel
    if recorder is None:
        return f"only steps on a CUDA device can be captured, and the model is on {engine.driver.device}"
    if channel.uploads:
        return "offload has the host wait for gradients in each step: shard without offload=True"
    if engine.virtual_count:
        return "virtual ranks compute and compare on the host: shard without virtual_ranks"
    if recorder.only_capturable and not channel.transport.capturable:
        kind = type(channel.transport).__name__
        return f"collectives of {kind} need the host: open a process group of NCCL"
    allocator = [os.environ.get(name, "").lower() for name in _ALLOCATOR]
    expands = any("expandable_segments:true" in options for options in allocator)
    if channel.all_ranks.world > 1 and expands and os.environ.get("NCCL_GRAPH_REGISTER") != "0":
        return (
            "NCCL registers the memory of a graph's collectives, which hangs with expandable_segments:True "
            "of PYTORCH_CUDA_ALLOC_CONF: set NCCL_GRAPH_REGISTER=0 before the process group is opened"
        )
    return _refusal_of(optimizer)


def _refusal_of(optimizer: Optimizer) -> str | None:
    name = type(optimizer).__name__
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    for group in optimizer.param_groups:
        if is_torchs and name == "SGD":
            if not group.get("fused"):
                return "SGD reads its learning rate on the host unless it is fused: SGD(..., fused=True)"
        elif not group.get("capturable"):
            return f"{name} decides on the host unless it is capturable: {name}(..., capturable=True)"
        elif not (isinstance(group["lr"], Tensor) or (is_torchs and name in ("Adam", "AdamW"))):
            return f"{name} would keep its learning rate, a number, for ever: give it a tensor, or use AdamW"
    return None


def kind_of(inputs: Any, device: torch.device) -> Any:
    """Return what inputs must share with recorded ones, in containers like theirs.

    Raises ValueError for what no graph can have as an input.
    """
    return torch_private.tree_map(partial(_kind_of_one, device), inputs)


def _kind_of_one(device: torch.device, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if not isinstance(value, Tensor):
        raise ValueError(
            f"an input of a captured step is a {type(value).__name__}, in which tensors would go unseen: "
            "pass tensors, numbers and strings, in tuples, lists and dicts"
        )
    if value.device != device:
        raise ValueError(
            f"an input of a captured step is on {value.device}, the model on {device}: move it there "
            "before the call, since the copy would wait"
        )
    if value.requires_grad:
        raise ValueError("an input of a captured step requires a gradient, which no caller would see")
    return Shape(tuple(value.shape), value.stride(), value.dtype)


@contextmanager
def watched(engine: Engine, optimizer: Optimizer) -> Iterator[list[str]]:
    """Yield what is found in the step that runs inside, and that a graph cannot hold."""
    asked = engine.driver.asked
    asked.clear()
    params = set(engine.module.parameters())
    reasons = list[str]()

    def before(stepped: Optimizer, args: Any, kwargs: Any) -> None:
        if stepped is optimizer:
            if hasattr(stepped, "found_inf"):  # a scaler sets it
                reasons.append("a GradScaler has the host decide whether to step: compute in bf16")
        elif not all(params.isdisjoint(group["params"]) for group in stepped.param_groups):
            reasons.append(f"{type(stepped).__name__} steps the model, which capture() was not given")

    handle = register_optimizer_step_pre_hook(before)
    try:
        yield reasons
    finally:
        handle.remove()
    if asked:
        reasons.append(
            f"{next(iter(asked))} has no gradient on this rank, and the host must ask whether another rank "
            "has one: freeze it with requires_grad_(False), or use it in each step"
        )


class Operations(torch_private.TorchDispatchMode):  # type: ignore[misc]
    """The memory from before a recording that its operations use. Collectives on the CPU are refused.

    Such a collective would run while the step is recorded, and never again. ``held``: storages, so that a
    replay finds at their addresses what it has found, even if users have replaced tensors that nobody sees.
    """

    def __init__(self, recorder: devices.Recorder) -> None:
        super().__init__()
        self.held: dict[int, torch.UntypedStorage] = {}
        self._recorder = recorder
        self._made = set[int]()  # the graph's own storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch_private.DisableTorchFunction():  # which has run: these are operations
            arguments = tensors_of((args, kwargs))
            if func.namespace == "c10d" and not all(map(self._recorder.holds, arguments)):
                raise ValueError(
                    f"the step calls a collective ({func.name()}) on the CPU, which no replay would call: do "
                    "so before or after the captured step"
                )
            for storage in _storages(arguments):
                if storage._cdata not in self._made:
                    self.held[storage._cdata] = storage
            result = func(*args, **(kwargs or {}))
            made = {storage._cdata for storage in _storages(tensors_of(result))}
            self._made |= made - self.held.keys()
            return result


def tensors_of(values: Any) -> list[Tensor]:
    return [leaf for leaf in torch_private.tree_leaves(values) if isinstance(leaf, Tensor)]


def _storages(tensors: Sequence[Tensor]) -> list[torch.UntypedStorage]:
    return [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]


def refuse_drawn(before: Sequence[Any], after: Sequence[Any]) -> None:
    """Raise ValueError if a generator of the host was advanced between two `device.random_state` of it."""
    for generator, was, now in zip(_GENERATORS, _comparable(before), _comparable(after), strict=True):
        if was != now:
            raise ValueError(
                f"the step draws from {generator}, and each replay would use what was drawn when it was "
                "recorded: draw on the device, or before the call and pass what was drawn as an input"
            )


def _comparable(states: Sequence[Any]) -> tuple[Any, ...]:
    of_torch, of_python, (_, keys, *rest) = states
    return of_torch.numpy().tobytes(), of_python, (keys.tobytes(), *rest)

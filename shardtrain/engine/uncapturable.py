"""Say why a step cannot be captured: what a graph cannot hold is refused by name.

Each reason is found as early as it can be::

    by capture()        `refusal`: the device, the transport, options of `shard`, the optimizer
    while warming up    `WarmUp`: gradients that may be absent, a GradScaler, another optimizer
    while recording     `NoHostCollectives`, and `explained`: what waits for the device, with its line

What a step itself changes of what a graph fixes is found while recording, too: see ``graph.py``.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardtrain import device as devices
from shardtrain import torch_private
from shardtrain.engine.hooks import Engine

_INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))  # no user's code


def refusal(
    engine: Engine, optimizer: torch.optim.Optimizer, recorder: devices.Recorder | None
) -> str | None:
    """Return why steps of the model cannot be captured, before one has run; None if nothing is known."""
    channel = engine.channel
    if recorder is None:
        return f"only steps on a CUDA device can be captured, and the model is on {engine.driver.device}"
    if channel.uploads:
        return "offload has the host wait for gradients in each step: shard without offload=True"
    if engine.virtual is not None:
        return "virtual ranks compute and compare on the host: shard without virtual_ranks"
    if recorder.only_capturable and not channel.transport.capturable:
        kind = type(channel.transport).__name__
        return f"collectives of {kind} need the host: open a process group of NCCL"
    if channel.all_ranks.world > 1 and _segments_expand() and os.environ.get("NCCL_GRAPH_REGISTER") != "0":
        return (
            "NCCL registers the memory of a graph's collectives, which hangs with expandable_segments:True "
            "of PYTORCH_CUDA_ALLOC_CONF: set NCCL_GRAPH_REGISTER=0 before the process group is opened"
        )
    return _refusal_of(optimizer)


def _segments_expand() -> bool:
    """Return whether torch's allocator is told to map more memory to a segment as it grows."""
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    return any("expandable_segments:true" in os.environ.get(name, "").lower() for name in names)


def _refusal_of(optimizer: torch.optim.Optimizer) -> str | None:
    """Return why steps of ``optimizer`` cannot be captured, or None."""
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


class WarmUp:
    """Watch steps that run as they are for what a graph cannot hold. ``reason``: "" if there was nothing."""

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        self.reason = ""
        self._engine = engine
        self._optimizer = optimizer

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the step that runs inside."""
        asked = self._engine.driver.asked
        asked.clear()
        stepped = False
        params = set(self._engine.module.parameters())

        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            nonlocal stepped
            if optimizer is self._optimizer:
                stepped = True
                if _is_scaled():
                    self.reason = "a GradScaler has the host decide whether to step: compute in bf16"
            elif not all(params.isdisjoint(group["params"]) for group in optimizer.param_groups):
                self.reason = f"{type(optimizer).__name__} steps the model, which capture() was not given"

        handle = register_optimizer_step_pre_hook(before)
        try:
            yield
        finally:
            handle.remove()
        if asked:
            self.reason = (
                f"{next(iter(asked))} has no gradient on this rank, and the host must ask whether another "
                "rank has one: freeze it with requires_grad_(False), or use it in each step"
            )
        elif not stepped and not self.reason:
            self.reason = f"the step did not step its {type(self._optimizer).__name__}"


def _is_scaled() -> bool:
    """Return whether a GradScaler that is enabled is among the callers."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        scaler = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
            return True
    return False


class NoHostCollectives(torch_private.TorchDispatchMode):  # type: ignore[misc]
    """Refuse collectives on the CPU, which would run while a step is recorded, and never again."""

    def __init__(self, recorder: devices.Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def _is_of_host(self, argument: Any) -> bool:
        return isinstance(argument, Tensor) and not self._recorder.holds(argument)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and any(map(self._is_of_host, torch_private.tree_leaves(args))):
            raise ValueError(
                f"the step calls a collective ({func.name()}) on the CPU, which no replay would call: do so "
                "before or after the captured step"
            )
        with torch_private.DisableTorchFunction():  # which has run: these are operations
            return func(*args, **(kwargs or {}))


def explained(error: BaseException) -> BaseException:
    """Return what ended a recording, in words if it is what torch refuses while it captures."""
    text = str(error)
    if not (isinstance(error, RuntimeError) and "captur" in text):
        return error
    line = _users_line(error)
    where = f" at {line}" if line else ""
    first_line = text.splitlines()[0]
    return ValueError(
        f"the step cannot be captured{where}: {first_line}. Code in a captured step may not wait for the "
        "device: read values, print, and move tensors after it. torch.utils.checkpoint reads random states "
        "unless preserve_rng_state=False, which is right where nothing is drawn"
    )


def _users_line(error: BaseException) -> str:
    """Return where ``error`` left code that is neither torch's nor this package's, or ""."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if not frame.filename.startswith(_INSIDE):
            return f"{frame.filename}:{frame.lineno}, `{frame.line}`"
    return ""

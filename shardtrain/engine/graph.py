"""Record one training step as a graph, and replay it: its memory, and what the host does besides launching.

A graph repeats launches on the memory that they had. So it holds the tensors that the step reads and writes
which nobody else does: its inputs, and the gradients that were there before. What the step returned, and the
gradients that it left, are its own memory. Recording launches nothing::

    record    buffers for the inputs; run the step; let gradients and counts be as before
    replay    copy the inputs, note the replay in the path, launch, show the gradients that it left

Graphs and their launches are the recorder's, of ``device.py``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardtrain import device as devices
from shardtrain import torch_private
from shardtrain.comm import trace
from shardtrain.comm.trace import REPLAY
from shardtrain.engine.hooks import Engine
from shardtrain.engine.uncapturable import NoHostCollectives, explained

Shapes = Any  # containers like the inputs', with a `Shape` for each tensor, and all other values as they are
Gradients = list[tuple[nn.Parameter, Tensor | None]]


class Shape(NamedTuple):
    """Describe an input that a graph has a buffer for."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def shapes_of(inputs: Any, device: torch.device) -> Shapes:
    """Return what inputs must share with recorded ones. Raises ValueError for what no graph can have."""
    return torch_private.tree_map(partial(_shape_of, device), inputs)


def _shape_of(device: torch.device, value: Any) -> Any:
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


@dataclass
class Counts:
    """Hold what the host counts in one step: traffic, forwards, and the peak of what is gathered."""

    sent: trace.Meter
    forwards: int = 0
    peak: tuple[int, int] = (0, 0)


class Graph(NamedTuple):
    """Hold a recorded step.

    ``inputs``, ``outputs``: what it reads and writes. ``before``, ``left``: each parameter with its gradient
    before the step, and after it. ``name``: of the replay in the path.
    """

    shapes: Shapes
    inputs: Any
    outputs: Any
    launch: Callable[[], None]
    before: Gradients
    left: Gradients
    counts: Counts
    name: str

    @property
    def changed_gradient(self) -> tuple[nn.Parameter, bool] | None:
        """A parameter and whether it has a gradient, if it had none when recorded, or the reverse."""
        for param, grad in self.before:
            if (param.grad is None) != (grad is None):
                return param, param.grad is not None
        return None

    def replay(self, engine: Engine, inputs: Any) -> None:
        """Launch the recorded step on ``inputs``, and do what the host does in a step besides."""
        self._fill(inputs)
        channel = engine.channel
        paths = channel.guard.paths
        channel.fence(REPLAY, self.name)  # at its first forward, as ranks that run the step
        paths.forward += self.counts.forwards - 1
        if channel.all_ranks.world > 1:
            with channel.guard.waiting(paths.end - 1):
                self.launch()
        else:
            self.launch()
        for param, grad in self.left:
            if param.grad is not grad:
                param.grad = grad
        trace.replayed(self.counts.sent)
        engine.units[0].account.saw(self.counts.peak)

    def _fill(self, inputs: Any) -> None:
        """Copy inputs, and gradients that are there before the step, which may read them."""
        targets = _tensors(self.inputs)
        sources = _tensors(inputs)
        for param, grad in self.before:
            if grad is not None and param.grad is not grad:
                assert param.grad is not None
                targets.append(grad)
                sources.append(param.grad)
        with torch.no_grad(), torch_private.DisableTorchFunctionSubclass():
            if targets:
                torch._foreach_copy_(targets, sources)


def record(
    step: Callable[..., Any],
    inputs: Any,
    engine: Engine,
    recorder: devices.Recorder,
    *,
    title: str,
    require_unchanged: Callable[[], None],
) -> Graph:
    """Record ``step`` on ``inputs``, which does not run. ``title``: what it is, the same on all ranks.

    Raises ValueError if the step does what a graph cannot hold. So does ``require_unchanged`` if the step has
    changed what a graph fixes. Then the model is as before.
    """
    buffers = torch_private.tree_map(copied, inputs)
    before = _gradients(engine)
    attempt = _Attempt(step, buffers, recorder)
    with _counted_apart(engine) as counts:
        try:
            outputs, launch = recorder.record(attempt)
            require_unchanged()
        except BaseException as error:
            _recover(engine, before)
            raise explained(attempt.error or error) from error
    left = _gradients(engine)
    for param, grad in before:  # nothing has run
        param.grad = grad
    return Graph(
        shapes=shapes_of(inputs, engine.driver.device),
        inputs=buffers,
        outputs=outputs,
        launch=launch,
        before=before,
        left=left,
        counts=counts,
        name=f"a step ({zlib.crc32(title.encode()):08x})",
    )


class _Attempt:
    """Run a step on ``buffers``. ``error``: with which it ended; the end of its recording raises another."""

    def __init__(self, step: Callable[..., Any], buffers: Any, recorder: devices.Recorder) -> None:
        self.error: BaseException | None = None
        self._step = step
        self._buffers = buffers
        self._recorder = recorder

    def __call__(self) -> Any:
        try:
            with NoHostCollectives(self._recorder):
                # Without its autograd graph, whose nodes would live as long as the outputs.
                return detached(self._step(*self._buffers))
        except BaseException as error:
            self.error = error
            raise


@contextmanager
def _counted_apart(engine: Engine) -> Iterator[Counts]:
    """Yield the counts of what is recorded inside. It has not run: each replay counts it."""
    account = engine.units[0].account
    paths = engine.channel.guard.paths
    peak = account.peak
    first_forward = paths.forward
    account.peak = account.now.copy()
    paths.recording = True
    try:
        with trace.captured() as sent:
            counts = Counts(sent)
            yield counts
    finally:
        counts.peak = (account.peak[0], account.peak[1])
        counts.forwards = paths.forward - first_forward
        account.peak = [max(pair) for pair in zip(peak, counts.peak, strict=True)]
        paths.forward = first_forward  # which the replay counts
        paths.recording = False


def _recover(engine: Engine, before: Sequence[tuple[nn.Parameter, Tensor | None]]) -> None:
    """Let the model be as before a recording that failed."""
    engine.driver.reset_failed_backward()
    engine.optimizers.end_steps()
    for param, _ in before:
        param.grad = None
    engine.require_rest("a step cannot be captured")
    for param, grad in before:
        param.grad = grad


def _gradients(engine: Engine) -> Gradients:
    return [(param, param.grad) for param in engine.module.parameters()]


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in torch_private.tree_leaves(values) if isinstance(leaf, Tensor)]


def copied(value: Any) -> Any:
    """Return a copy of a tensor, and any other value as it is."""
    return value.clone() if isinstance(value, Tensor) else value


def detached(values: Any) -> Any:
    """Return ``values`` with tensors that need no gradient."""
    return torch_private.tree_map(lambda each: each.detach() if isinstance(each, Tensor) else each, values)

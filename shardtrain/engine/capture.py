"""Capture a whole training step as one graph of launches, and replay it without Python.

A step of small kernels waits for the host, which launches them one by one. A graph repeats a step's launches
in one call. It repeats them exactly, so the rest is this file's: what a graph cannot hold is refused by name
(`_refusal`), what it has fixed is compared at each call (``fixed.py``), and what the host does in a step
besides launching is done at each replay (`Captured._replay`). One call of `Captured`::

    between steps      gradients wait nowhere, edits are adopted, learning rates are in tensors
    something changed  drop the graph, and say so in one line of the log
    no graph           run the step, a step like any other; or record it, once nothing has changed since
    other shapes       run the step
    else               copy the inputs, note the replay in the path, launch, show the gradients that it left

Recording launches nothing, so the call that records replays at once. Graph and replay are the recorder's, of
``device.py``. Tests put a recorder for the CPU in its place.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardtrain import device as devices
from shardtrain import torch_private
from shardtrain.comm import trace
from shardtrain.comm.agreement import gather_texts, require_same
from shardtrain.comm.trace import REPLAY
from shardtrain.engine.fixed import Fixed, Watch
from shardtrain.engine.hooks import Engine, engine_of

_log = logging.getLogger("shardtrain")
_INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))  # no user's code

# Why a step was not replayed.
WARM_UP = "to warm up"
CHANGED = "after a change"
SHAPES = "with other inputs"
FAILED = "since it cannot be captured"

Shapes = Any  # containers like the inputs', with a `Shape` for each tensor, and all other values as they are


class Shape(NamedTuple):
    """Describe an input that a graph has a buffer for."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Graph(NamedTuple):
    """Hold a recorded step.

    ``inputs``, ``outputs``: what it reads and writes. ``before``, ``left``: each parameter with its gradient
    before the step, and after it. ``sent``: what it communicates. ``forwards``: how many it has. ``peak``: of
    what is gathered. ``name``: of the replay in the path.
    """

    shapes: Shapes
    inputs: Any
    outputs: Any
    launch: Callable[[], None]
    before: list[tuple[nn.Parameter, Tensor | None]]
    left: list[tuple[nn.Parameter, Tensor | None]]
    sent: trace.Meter
    forwards: int
    peak: tuple[int, int]
    name: str


def capture(
    step: Callable[..., Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    warmup: int = 3,
    copies: bool = True,
) -> Captured:
    """Return ``step`` so that its launches become one CUDA graph, which later calls replay without Python.

    ``step(*inputs)`` is a whole training step: forward, backward, clipping, accumulation over its inputs,
    ``optimizer.step()``. The first calls run it as it is, and are training steps. Then one call records it,
    and each later call with inputs of the same shapes copies them into its own buffers and replays it. Other
    inputs, such as an epoch's last batch, run it as it is::

        def step(images, labels):
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = shardtrain.capture(step, model, optimizer)
        for images, labels in batches:
            loss = step(images, labels)
            schedule.step()

    Learning rates become tensors, so that schedules act, and code that sets ``group["lr"]``. If anything else
    changes that a graph has fixed (what requires gradients, modes, hooks, options, memory of parameters or
    state), one line of the log says what, and the step is recorded again. Code in ``step`` that only the host
    runs, such as a print or a counter, does not run in a replay.

    Args:
        step: it must not read values of tensors on the host, nor change what a graph fixes.
        model: what `shard` returned, on CUDA devices; ranks communicate by NCCL.
        optimizer: the only one that steps the model in ``step``: ``SGD(fused=True)``, or Adam or AdamW with
            ``capturable=True``, or another one with ``capturable=True`` whose learning rates are tensors.
        warmup: calls that run ``step`` as it is before one records it, at least 1.
        copies: return copies of the tensors that ``step`` returns. Without, the next call overwrites them.

    Raises:
        ValueError: the step cannot be captured, with the reason. Some reasons are found in the call that
            records. Later calls then run ``step`` as it is.
    """
    engine = engine_of(model)
    engine.require_rest("capture() cannot be called")
    recorder = devices.recorder(engine.driver.device)
    if warmup < 1:
        raise ValueError(f"capture(warmup={warmup}): expected at least 1, since the first step makes state")
    if reason := _refusal(engine, optimizer, recorder):
        raise ValueError(f"capture(): {reason}")
    assert recorder is not None
    lines = [f"capture of steps with {type(optimizer).__name__}, warmup={warmup}"]
    require_same(lines, "what is to be captured", engine.channel.all_ranks)
    engine.channel.guard.paths.captures = True
    return Captured(step, engine, optimizer, recorder, warmup=warmup, copies=copies)


class Captured:
    """Run, record and replay one training step. See `capture`.

    ``replayed``: how many calls replayed it. ``eager``: how many ran it as it is, by the reason.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        recorder: devices.Recorder,
        *,
        warmup: int,
        copies: bool,
    ) -> None:
        self.replayed = 0
        self.eager = Counter[str]()
        self._step = step
        self._engine = engine
        self._optimizer = optimizer
        self._recorder = recorder
        self._warmup = warmup
        self._copies = copies
        self._watch = Watch(engine, optimizer)
        self._rates = Rates(optimizer, engine.driver.device)
        self._graph: Graph | None = None
        self._fixed: Fixed | None = None  # what the graph, or else the latest call, has fixed
        self._shapes: Shapes = None  # of the inputs that were recorded
        self._calls: list[tuple[Shapes, int]] = []  # before the first recording, by shapes
        self._settled = False  # whether the step has run since something changed
        self._reason = ""  # why the step cannot be captured, as warm-up has shown
        self._failed = False
        self._error: BaseException | None = None  # that has ended the step while it was recorded

    def __call__(self, *inputs: Any) -> Any:
        self._engine.require_rest("a captured step cannot be called")
        self._engine.driver.require_reduced("a captured step")
        self._rates.hold()
        if self._failed:
            return self._run(inputs, FAILED)
        shapes = torch_private.tree_map(self._shape_of, inputs)
        self._notice_changes()
        if self._graph is None and self._is_ready(shapes):
            self._graph = self._record(shapes, inputs)
            self._shapes = shapes
        if self._graph is None:
            return self._warm_up(shapes, inputs)
        if self._graph.shapes != shapes:
            return self._run(inputs, SHAPES)
        return self._replay(self._graph, inputs)

    def release(self) -> None:
        """Delete the graph, and free its memory. The next call with inputs of its shapes records it again.

        Call it before ``torch.distributed.destroy_process_group()``, which otherwise waits for the graph,
        for ever: NCCL counts the graphs that have its collectives.
        """
        self._graph = None
        self._recorder.release()

    @property
    def summary(self) -> str:
        """How many calls replayed the step, and why the others did not."""
        reasons = [f"{count} {reason}" for reason, count in self.eager.items()]
        return f"{self.replayed} replayed, {sum(self.eager.values())} not" + (
            f": {', '.join(reasons)}" if reasons else ""
        )

    def _shape_of(self, value: Any) -> Any:
        """Return what an input must have in common with the recorded one. Raises ValueError for others."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if not isinstance(value, Tensor):
            raise ValueError(
                f"an input of a captured step is a {type(value).__name__}, in which tensors would go unseen: "
                "pass tensors, numbers and strings, in tuples, lists and dicts"
            )
        device = self._engine.driver.device
        if value.device != device:
            raise ValueError(
                f"an input of a captured step is on {value.device}, the model on {device}: move it there "
                "before the call, since the copy would wait"
            )
        if value.requires_grad:
            raise ValueError("an input of a captured step requires a gradient, which no caller would see")
        return Shape(tuple(value.shape), value.stride(), value.dtype)

    # what may change between calls

    def _notice_changes(self) -> None:
        """Drop the graph if something has changed that it has fixed."""
        fixed = self._watch.note()
        change = ""
        if self._fixed is not None and fixed != self._fixed:
            change = self._watch.difference(self._fixed, fixed)
        elif self._graph is not None:
            odd = [param for param, grad in self._graph.before if (param.grad is None) != (grad is None)]
            if odd:
                there = "no gradient" if odd[0].grad is None else "a gradient"
                change = f"{_name_of(self._engine, odd[0])} has {there} before the step, unlike when recorded"
        self._fixed = fixed
        if change:
            self._settled = False
            if self._graph is not None:
                _log.warning("the captured step is recorded again: %s", change)
            self.release()

    # steps as they are

    def _run(self, inputs: Any, reason: str) -> Any:
        self.eager[reason] += 1
        return _detached(self._step(*inputs))

    def _warm_up(self, shapes: Shapes, inputs: Any) -> Any:
        """Run the step where it will be recorded, and see what it does that a graph cannot hold."""
        driver = self._engine.driver
        driver.asked.clear()
        with self._seeing_optimizers() as stepped:
            result = self._recorder.warm_up(partial(self._run, inputs, self._why_not))
        if driver.asked:
            self._reason = (
                f"{next(iter(driver.asked))} has no gradient on this rank, and the host must ask whether "
                "another rank has one: freeze it with requires_grad_(False), or use it in each step"
            )
        elif not stepped and not self._reason:
            self._reason = f"the step did not step its {type(self._optimizer).__name__}"
        self._fixed = self._watch.note()
        self._settled = True
        if self._shapes is None:
            times = sum(count for known, count in self._calls if known == shapes)
            self._calls = [(known, count) for known, count in self._calls if known != shapes]
            self._calls.append((shapes, times + 1))
        return result

    @property
    def _why_not(self) -> str:
        return WARM_UP if self._shapes is None else CHANGED

    @contextmanager
    def _seeing_optimizers(self) -> Iterator[list[torch.optim.Optimizer]]:
        """Yield a list that gets the optimizer as it steps. Note what else steps the model, and a scaler."""
        stepped = list[torch.optim.Optimizer]()
        params = set(self._engine.module.parameters())

        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if optimizer is self._optimizer:
                stepped.append(optimizer)
                if _is_scaled():
                    self._reason = "a GradScaler has the host decide whether to step: compute in bf16"
            elif not all(params.isdisjoint(group["params"]) for group in optimizer.param_groups):
                self._reason = f"{type(optimizer).__name__} steps the model, which capture() was not given"

        handle = register_optimizer_step_pre_hook(before)
        try:
            yield stepped
        finally:
            handle.remove()

    # recording

    def _is_ready(self, shapes: Shapes) -> bool:
        """Return whether to record this call. Collective in the calls after warm-up until one records.

        Raises ValueError on every rank if a rank cannot capture the step, or if ranks differ.
        """
        if self._shapes is not None:  # a rank alone may see a change: the guard tells, at the next comparison
            return self._settled and shapes == self._shapes
        if sum(count for _, count in self._calls) < self._warmup:
            return False
        is_ready = self._settled and (shapes, self._warmup) in [
            (known, min(count, self._warmup)) for known, count in self._calls
        ]
        all_ranks = self._engine.channel.all_ranks
        reasons = [*enumerate(gather_texts(self._reason, all_ranks))]
        for rank, reason in reasons:
            if reason:
                self._failed = True
                where = f" (rank {rank})" if all_ranks.world > 1 else ""
                raise ValueError(f"the step cannot be captured: {reason}{where}")
        assert self._fixed is not None
        lines = [f"a step on {shapes}, recorded now: {is_ready}", *self._watch.lines(self._fixed)]
        require_same(lines, "a captured step", all_ranks)
        return is_ready

    def _record(self, shapes: Shapes, inputs: Any) -> Graph:
        """Record the step. Raises ValueError if it does what a graph cannot hold; then nothing is left."""
        engine = self._engine
        paths = engine.channel.guard.paths
        account = engine.units[0].account
        buffers = torch_private.tree_map(_copied, inputs)
        before = _gradients(engine)
        versions = self._rates.versions
        first_step = paths.step
        peak = account.peak
        account.peak = account.now.copy()
        paths.recording = True
        try:
            with trace.captured() as sent:
                outputs, launch = self._recorder.record(partial(self._step_on, buffers))
            self._require_unchanged(versions)
        except BaseException as error:
            self._failed = True
            self._recover(before)
            raise self._explained(error) from error
        finally:
            own_peak = tuple(account.peak)
            account.peak = [max(pair) for pair in zip(peak, own_peak, strict=True)]
            forwards = paths.step - first_step
            paths.step = first_step  # which the replay counts
            paths.recording = False
            self._error = None
        assert self._fixed is not None
        left = _gradients(engine)
        for param, grad in before:  # nothing has run
            param.grad = grad
        text = "\n".join([str(shapes), *self._watch.lines(self._fixed)])
        return Graph(
            shapes=shapes,
            inputs=buffers,
            outputs=outputs,
            launch=launch,
            before=before,
            left=left,
            sent=sent,
            forwards=forwards,
            peak=(own_peak[0], own_peak[1]),
            name=f"a step ({zlib.crc32(text.encode()):08x})",
        )

    def _step_on(self, buffers: Any) -> Any:
        try:
            with _NoHostCollectives(self._recorder):
                # Without its autograd graph, whose nodes would live as long as the outputs.
                return _detached(self._step(*buffers))
        except BaseException as error:  # what ends the recording raises another one
            self._error = error
            raise

    def _require_unchanged(self, versions: Sequence[int]) -> None:
        """Raise ValueError if the step itself, as it was recorded, changed what a graph fixes."""
        if self._rates.versions != versions:
            raise ValueError(
                "the step changes its learning rate, which a replay would set to the same value each time: "
                "call the schedule after the captured step"
            )
        fixed = self._watch.note()
        assert self._fixed is not None
        if fixed != self._fixed:
            raise ValueError(
                f"the step changes what a replay cannot: {self._watch.difference(self._fixed, fixed)}; do "
                "that outside of the captured step"
            )
        self._engine.driver.require_reduced("the end of a captured step")

    def _recover(self, before: Sequence[tuple[nn.Parameter, Tensor | None]]) -> None:
        """Let the model be as before a recording that failed."""
        self._engine.driver.reset_failed_backward()
        self._engine.optimizers.end_steps()
        for param, _ in before:
            param.grad = None
        self._engine.require_rest("a step cannot be captured")
        for param, grad in before:
            param.grad = grad

    def _explained(self, error: BaseException) -> BaseException:
        """Return what ended a recording, in words if it is what torch refuses while it captures."""
        cause = self._error or error
        text = str(cause)
        if not (isinstance(cause, RuntimeError) and "captur" in text):
            return cause
        line = _users_line(cause)
        where = f" at {line}" if line else ""
        first_line = text.splitlines()[0]
        return ValueError(
            f"the step cannot be captured{where}: {first_line}. Code in a captured step may not wait for the "
            "device: read values, print, and move tensors after it. torch.utils.checkpoint reads random "
            "states unless preserve_rng_state=False, which is right where nothing is drawn"
        )

    # replaying

    def _replay(self, graph: Graph, inputs: Any) -> Any:
        """Launch the recorded step on ``inputs``, and do what the host does in a step besides."""
        targets = _tensors(graph.inputs)
        sources = _tensors(inputs)
        for param, grad in graph.before:
            if grad is not None and param.grad is not grad:  # the step may read it
                assert param.grad is not None
                targets.append(grad)
                sources.append(param.grad)
        with torch.no_grad(), torch_private.DisableTorchFunctionSubclass():
            if targets:
                torch._foreach_copy_(targets, sources)
        channel = self._engine.channel
        paths = channel.guard.paths
        paths.step += graph.forwards - 1
        channel.fence(REPLAY, graph.name)
        if channel.all_ranks.world > 1:
            with channel.guard.waiting(paths.end - 1):
                graph.launch()
        else:
            graph.launch()
        for param, grad in graph.left:
            if param.grad is not grad:
                param.grad = grad
        trace.replayed(graph.sent)
        self._engine.units[0].account.saw(graph.peak)
        self.replayed += 1
        return torch_private.tree_map(_copied, graph.outputs) if self._copies else graph.outputs


class _NoHostCollectives(torch_private.TorchDispatchMode):  # type: ignore[misc]
    """Refuse collectives on the CPU, which would run while a step is recorded, and never again."""

    def __init__(self, recorder: devices.Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and not all(map(self._recorder.holds, _tensors(args))):
            raise ValueError(
                f"the step calls a collective ({func.name()}) on the CPU, which no replay would call: do so "
                "before or after the captured step"
            )
        with torch_private.DisableTorchFunction():  # which has run: these are operations
            return func(*args, **(kwargs or {}))


class Rates:
    """Keep the learning rates of an optimizer in tensors, which graphs read, whatever users set them to."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._device = device
        self._tensors: list[Tensor] = []  # of each group

    def hold(self) -> None:
        """Copy rates that are not in their tensors into these. The host does not wait."""
        for number, group in enumerate(self._optimizer.param_groups):
            rate = group["lr"]
            if number == len(self._tensors):
                self._tensors.append(torch.empty((), dtype=torch.float32, device=self._device))
            own = self._tensors[number]
            if rate is own:
                continue
            if isinstance(rate, Tensor):
                own.copy_(rate.detach().squeeze())
            else:
                own.fill_(rate)
            group["lr"] = own

    @property
    def versions(self) -> list[int]:
        """Autograd's versions of the tensors: whether they are written."""
        return [tensor._version for tensor in self._tensors]


def _refusal(
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


def _gradients(engine: Engine) -> list[tuple[nn.Parameter, Tensor | None]]:
    return [(param, param.grad) for param in engine.module.parameters()]


def _name_of(engine: Engine, param: nn.Parameter) -> str:
    return next(name for name, other in engine.module.named_parameters() if other is param)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in torch_private.tree_leaves(values) if isinstance(leaf, Tensor)]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _detached(values: Any) -> Any:
    return torch_private.tree_map(lambda each: each.detach() if isinstance(each, Tensor) else each, values)


def _is_scaled() -> bool:
    """Return whether a GradScaler that is enabled is among the callers."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        scaler = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
            return True
    return False


def _users_line(error: BaseException) -> str:
    """Return where ``error`` left code that is neither torch's nor this package's, or ""."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if not frame.filename.startswith(_INSIDE):
            return f"{frame.filename}:{frame.lineno}, `{frame.line}`"
    return ""

"""Capture a whole training step as one graph of launches, and replay it without Python.

A step of small kernels waits for the host, which launches them one by one. A graph repeats a step's launches
in one call. This file is the life of a captured step, from its first calls to replays; the rest has files of
its own::

    uncapturable.py    what a graph cannot hold, refused by name
    fixed.py           what a graph has fixed, noted and compared at each call
    rates.py           learning rates in tensors, which a graph reads
    graph.py           one recorded step: its memory, its launches, and the host's part of a replay
    watchdog.py        replays that do not end

One call of `Captured`::

    between steps      gradients wait nowhere, edits are adopted, learning rates are in tensors
    something changed  drop the graph, and say so in one line of the log
    no graph           run the step, a step like any other; or record it, once nothing has changed since
    other shapes       run the step
    else               replay it

Recording launches nothing, so the call that records replays at once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from shardtrain import device as devices
from shardtrain import torch_private
from shardtrain.comm.agreement import gather_texts, require_same
from shardtrain.comm.native import time_out_s
from shardtrain.comm.process_group import ProcessGroupTransport
from shardtrain.engine.fixed import Fixed, Watch
from shardtrain.engine.graph import Graph, Shapes, copied, detached, record, shapes_of
from shardtrain.engine.hooks import Engine, engine_of
from shardtrain.engine.rates import Rates
from shardtrain.engine.uncapturable import WarmUp, refusal
from shardtrain.engine.watchdog import Watchdog

_log = logging.getLogger("shardtrain")

# Why a step was not replayed.
WARM_UP = "to warm up"
CHANGED = "after a change"
SHAPES = "with other inputs"
FAILED = "since it cannot be captured"


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
    if reason := refusal(engine, optimizer, recorder):
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
        self._recorder = recorder
        self._warmup = warmup
        self._copies = copies
        self._watch = Watch(engine, optimizer)
        self._rates = Rates(optimizer, engine.driver.device)
        self._warm_up = WarmUp(engine, optimizer)
        self._graph: Graph | None = None
        self._watchdog: Watchdog | None = None  # from the first recording on, if there are other ranks
        self._fixed: Fixed | None = None  # what the graph, or else the latest call, has fixed
        self._shapes: Shapes = None  # of the inputs that were recorded
        self._seen: list[Shapes] = []  # of calls before the first recording, each at most ``warmup`` times
        self._settled = False  # whether the step has run since something changed
        self._failed = False

    def __call__(self, *inputs: Any) -> Any:
        self._engine.require_rest("a captured step cannot be called")
        self._engine.driver.require_reduced("a captured step")
        self._rates.hold()
        if self._failed:
            return self._run(inputs, FAILED)
        shapes = shapes_of(inputs, self._engine.driver.device)
        self._notice_changes()
        if self._graph is None and self._is_ready(shapes):
            self._graph = self._record(shapes, inputs)
            self._shapes = shapes
            self._watchdog = self._watchdog or self._watch_replays()
        if self._graph is None:
            return self._run_watched(shapes, inputs)
        if self._graph.shapes != shapes:
            return self._run(inputs, SHAPES)
        self._graph.replay(self._engine, inputs)
        self.replayed += 1
        if self._watchdog is not None:
            self._watchdog.launched(self.replayed)
        outputs = self._graph.outputs
        return torch_private.tree_map(copied, outputs) if self._copies else outputs

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

    def _notice_changes(self) -> None:
        """Drop the graph if something has changed that it has fixed."""
        fixed = self._watch.note()
        change = ""
        if self._fixed is not None and fixed != self._fixed:
            change = self._watch.difference(self._fixed, fixed)
        elif self._graph is not None and (changed := self._graph.changed_gradient):
            param, has_gradient = changed
            there = "a gradient" if has_gradient else "no gradient"
            change = f"{self._watch.name_of(param)} has {there} before the step, unlike when recorded"
        self._fixed = fixed
        if change:
            self._settled = False
            if self._graph is not None:
                _log.warning("the captured step is recorded again: %s", change)
            self.release()

    # steps as they are

    def _run(self, inputs: Any, reason: str) -> Any:
        self.eager[reason] += 1
        return detached(self._step(*inputs))

    def _run_watched(self, shapes: Shapes, inputs: Any) -> Any:
        """Run the step where it will be recorded, and see what it does that a graph cannot hold."""
        reason = WARM_UP if self._shapes is None else CHANGED
        with self._warm_up.watching():
            result = self._recorder.warm_up(partial(self._run, inputs, reason))
        self._fixed = self._watch.note()
        self._settled = True
        if self._shapes is None and self._seen.count(shapes) < self._warmup:
            self._seen.append(shapes)
        return result

    # recording

    def _is_ready(self, shapes: Shapes) -> bool:
        """Return whether to record this call. Collective in the calls after warm-up until one records.

        Raises ValueError on every rank if a rank cannot capture the step, or if ranks differ.
        """
        if self._shapes is not None:  # a rank alone may see a change: the guard tells, at the next comparison
            return self._settled and shapes == self._shapes
        if len(self._seen) < self._warmup:
            return False
        is_ready = self._settled and self._seen.count(shapes) == self._warmup
        all_ranks = self._engine.channel.all_ranks
        reasons = [*enumerate(gather_texts(self._warm_up.reason, all_ranks))]
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
        assert self._fixed is not None
        unchanged = partial(self._require_unchanged, self._rates.versions)
        title = "\n".join([str(shapes), *self._watch.lines(self._fixed)])
        try:
            return record(
                self._step, inputs, self._engine, self._recorder, title=title, require_unchanged=unchanged
            )
        except BaseException:
            self._failed = True
            self.release()
            raise

    def _watch_replays(self) -> Watchdog | None:
        """Watch replays for other ranks that hang, if there are any."""
        transport = self._engine.channel.all_ranks.transport
        if transport.world == 1 or not isinstance(transport, ProcessGroupTransport):
            return None
        device = self._engine.driver.device
        paths = self._engine.channel.guard.paths
        return Watchdog(device, paths, lambda: time_out_s(transport.group, device.type))

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

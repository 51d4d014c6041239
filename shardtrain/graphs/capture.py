"""A whole training step, captured as one graph of launches and replayed without Python.

One call of `Captured`::

    between steps      gradients wait nowhere, learning rates are in tensors
    something changed  drop the graph, and say so in one line of the log
    no graph           run the step; or record it, once nothing has changed since, and replay it
    other inputs       run the step
    else               replay it
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardtrain import device as devices
from shardtrain import torch_private
from shardtrain.comm.channel import gather_texts, require_same
from shardtrain.engine.hooks import Engine, engine_of
from shardtrain.graphs.comparison import Fixed, Rates
from shardtrain.graphs.recording import Recording, copied, detached, gradients, record
from shardtrain.graphs.uncapturable import kind_of, refusal, watched

Step = Callable[..., Any]
_log = logging.getLogger("shardtrain")

_TOLD = 10  # the call that says why none was replayed


def capture(
    step: Callable[..., Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    warmup: int = 3,
) -> Captured:
    """Return ``step`` so that its launches become one CUDA graph, which later calls replay without Python.

    ``step(*inputs)`` is a whole training step: forward, backward, clipping, accumulation over its inputs,
    ``optimizer.step()``. The first calls run it as it is. Then one call records it, and later calls with
    inputs of the same shapes replay it. Other inputs, such as an epoch's last batch, run it as it is::

        step = shardtrain.capture(step, model, optimizer)
        for images, labels in batches:
            loss = step(images, labels)
            schedule.step()

    Learning rates become tensors, so that schedules and ``group["lr"] = ...`` act. If something changes that
    is compared (modules, their modes, what requires gradients, options, memory of parameters, buffers and
    state), the log says what in one line, and the step is recorded again. Hooks, attributes of modules,
    globals and switches of torch are not: after a change of these call the step's ``release()``. What only
    the host does in ``step``, such as a print, is not done in a replay. Results are copies.

    Args:
        step: it must not read values of tensors on the host, draw there, or change what a graph fixes.
        model: what `shard` returned, on CUDA devices; ranks communicate by NCCL.
        optimizer: the only one that steps the model in ``step``: ``SGD(fused=True)``, or Adam or AdamW with
            ``capturable=True``, or another one with ``capturable=True`` whose learning rates are tensors.
        warmup: calls that run ``step`` as it is before one records it, at least 1.

    Raises:
        ValueError: the step cannot be captured, with the reason, which the call that records may find. Later
            calls then run ``step`` as it is. If ``step`` waits for the device, the error is torch's.
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
    return Captured(step, engine, optimizer, recorder, warmup)


class Captured:
    """A training step that is run, recorded and replayed. See `capture`.

    ``replayed``: how many calls replayed it. ``eager``: how many ran it as it is, by why they did not replay.
    """

    def __init__(
        self,
        step: Step,
        engine: Engine,
        optimizer: Optimizer,
        recorder: devices.Recorder,
        warmup: int,
    ) -> None:
        self.replayed = 0
        self.eager = Counter[str]()
        self._step = step
        self._engine = engine
        self._optimizer = optimizer
        self._recorder = recorder
        self._warmup = warmup
        self._rates = Rates(optimizer, engine.driver.device)
        self._reason = ""  # why it cannot be captured, as warm-up has found
        self._graph: Recording | None = None
        self._fixed: Fixed | None = None  # as the step has run or was recorded, unless something has changed
        self._kind: Any = None  # of the inputs that were recorded
        self._seen = Counter[str]()  # kinds of inputs that steps had in warm-up
        self._hindrance = f"no shapes and numbers of inputs came {warmup} times"  # what was in the way last
        self._failed = False

    def __call__(self, *inputs: Any) -> Any:
        engine = self._engine
        engine.require_idle("a captured step cannot be called")
        engine.require_reduced("a captured step")
        self._rates.hold()
        if self._failed:
            return self._run(inputs, "since it cannot be captured")
        kind = kind_of(inputs, engine.driver.device)
        grads = gradients(engine.module.parameters() if self._graph is None else self._graph.params.values())
        self._notice_changes(grads)
        if self._graph is None and self._is_ready(kind):
            self._record(kind, inputs)
        if self._graph is None:
            return self._run_watched(kind, inputs)
        if kind != self._kind:
            return self._run(inputs, "with other inputs")
        self._graph.replay(engine, inputs, grads)
        self.replayed += 1
        return torch_private.tree_map(copied, self._graph.outputs)

    def release(self) -> None:
        """Delete the graph, and free its memory. The next call runs the step as it is, then one records it.

        Call it after a change that is not compared, and before ``torch.distributed.destroy_process_group()``,
        which otherwise waits, for ever, for the graph that has collectives of NCCL.
        """
        self._graph = None
        self._fixed = None
        self._recorder.release()

    @property
    def summary(self) -> str:
        """How many calls replayed the step, and why the others did not."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.eager.items())
        return f"{self.replayed} replayed, {self.eager.total()} not{reasons and ': '}{reasons}"

    def _notice_changes(self, grads: Sequence[Tensor | None]) -> None:
        """Drop the graph if something has changed that it has fixed. ``grads``: that parameters have now."""
        if not (self._graph is None or self._change(grads)):
            return
        self._engine.adopt_changes()  # other memory of parameters is copied into that which is fixed
        if change := self._change(grads):
            self._hindrance = change
            if self._graph is not None:
                _log.warning("the captured step is recorded again: %s", change)
            self.release()

    def _change(self, grads: Sequence[Tensor | None]) -> str:
        change = self._fixed.change() if self._fixed is not None else ""
        return change or (self._graph.changed_gradient(grads) if self._graph is not None else "")

    def _run(self, inputs: Any, reason: str) -> Any:
        self.eager[reason] += 1
        calls = self.eager.total()
        if not self.replayed and calls == max(_TOLD, self._warmup + 1):
            _log.warning("the captured step was replayed in none of %d calls: %s", calls, self._hindrance)
        return detached(self._step(*inputs))

    def _run_watched(self, kind: Any, inputs: Any) -> Any:
        """Run the step where it will be recorded, and see what it does that a graph cannot hold."""
        reason = "to warm up" if self._kind is None else "after a change"
        with watched(self._engine, self._optimizer) as reasons:
            result = self._recorder.warm_up(partial(self._run, inputs, reason))
        self._reason = next(iter(reasons), self._reason)
        self._fixed = Fixed(self._engine, self._optimizer)
        if self._kind is None:
            self._seen[str(kind)] += 1
        return result

    def _is_ready(self, kind: Any) -> bool:
        """Return whether to record this call. Collective in the calls after warm-up until one records.

        Raises ValueError on every rank if a rank cannot capture the step, or if ranks differ.
        """
        if self._kind is not None:  # a rank alone may see a change: the guard tells, at the next comparison
            return self._fixed is not None and kind == self._kind
        if self._seen.total() < self._warmup:
            return False
        is_ready = self._fixed is not None and self._seen[str(kind)] >= self._warmup
        all_ranks = self._engine.channel.all_ranks
        for rank, reason in enumerate(gather_texts(self._reason, all_ranks)):
            if reason:
                where = f" (rank {rank})" if all_ranks.world > 1 else ""
                self._failed = True
                self._hindrance = f"{reason}{where}"
                raise ValueError(f"the step cannot be captured: {self._hindrance}")
        fixed = self._fixed or Fixed(self._engine, self._optimizer)
        lines = [f"a step on {kind}, recorded now: {is_ready}", *fixed.lines()]
        require_same(lines, "a captured step", all_ranks)
        return is_ready

    def _record(self, kind: Any, inputs: Any) -> None:
        """Record the step. Raises ValueError if it does what a graph cannot hold; then nothing is left."""
        assert self._fixed is not None
        title = "\n".join([str(kind), *self._fixed.lines()])
        unchanged = partial(self._require_unchanged, self._fixed, self._rates.versions())
        try:
            self._graph = record(self._step, inputs, self._engine, self._recorder, title, unchanged)
        except BaseException as error:
            self._failed = True
            self._hindrance = str(error)
            self.release()
            raise
        self._kind = kind

    def _require_unchanged(self, fixed: Fixed, versions: Sequence[int]) -> None:
        """Raise ValueError if the step itself, as it was recorded, changed what a graph fixes."""
        if self._rates.versions() != versions:
            raise ValueError(
                "the step changes its learning rate, which a replay would set to the same value each time: "
                "call the schedule after the captured step"
            )
        if change := fixed.change():
            raise ValueError(f"the step changes what a replay cannot: {change}; do so outside of the step")
        self._engine.require_reduced("the end of a captured step")

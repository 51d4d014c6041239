"""One training step, recorded as a graph: its memory, and what the host does besides launching.

A graph repeats launches on the memory that they had. So the recorded step holds all memory that it uses.
Recording launches nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardtrain import device as devices
from shardtrain import torch_private
from shardtrain.comm import trace
from shardtrain.comm.trace import GRAPH
from shardtrain.engine.hooks import Engine
from shardtrain.graphs.uncapturable import Operations, refuse_drawn, tensors_of
from shardtrain.guardrails.attachment import Guardrails

_CPU = torch.device("cpu")
_GRAD: Any = Tensor.grad


@dataclass
class Counts:
    """What the host counts in one step: traffic, forwards, and the peak of what is gathered."""

    sent: trace.Meter
    forwards: int = 0
    peak: tuple[int, int] = (0, 0)


class Recording(NamedTuple):
    """A recorded step."""

    inputs: Any  # what it reads
    outputs: Any  # what it writes
    launch: Callable[[], None]
    params: dict[str, nn.Parameter]
    before: list[Tensor | None]  # gradients of `params` before the step
    left: list[Tensor | None]  # gradients of `params` after the step
    counts: Counts
    name: str  # of the replay in the path
    held: Sequence[torch.UntypedStorage]  # memory from before the recording

    def changed_gradient(self, grads: Sequence[Tensor | None]) -> str:
        """Return in words which of ``grads`` is there, or is not, unlike when recorded; "" if none."""
        for name, grad, recorded in zip(self.params, grads, self.before, strict=True):
            if (grad is None) != (recorded is None):
                there = "no gradient" if grad is None else "a gradient"
                return f"{name} has {there} before the step, unlike when recorded"
        return ""

    def replay(self, engine: Engine, inputs: Any, grads: Sequence[Tensor | None]) -> None:
        """Launch the recorded step on ``inputs`` and ``grads``, which parameters have now."""
        self._fill(inputs, grads)
        channel = engine.channel
        paths = channel.guard.paths
        channel.fence(GRAPH, self.name)  # at its first forward, as ranks that run the step
        paths.forward += self.counts.forwards - 1
        waits = channel.all_ranks.world > 1
        with channel.guard.waiting(paths.end - 1) if waits else nullcontext():
            self.launch()
        if not all(map(is_, grads, self.left)):
            set_gradients(self.params.values(), self.left)
        trace.add_graph(self.counts.sent)
        engine.units[0].account.saw(self.counts.peak)

    def _fill(self, inputs: Any, grads: Sequence[Tensor | None]) -> None:
        """Copy inputs, and gradients that are there before the step, which may read them."""
        targets = tensors_of(self.inputs)
        sources = tensors_of(inputs)
        for grad, own in zip(grads, self.before, strict=True):
            if grad is not own:
                assert grad is not None
                assert own is not None
                targets.append(own)
                sources.append(grad)
        with torch.no_grad(), torch_private.DisableTorchFunctionSubclass():
            if targets:
                torch._foreach_copy_(targets, sources)


def record(
    step: Callable[..., Any],
    inputs: Any,
    engine: Engine,
    recorder: devices.Recorder,
    title: str,
    require_unchanged: Callable[[], None],
) -> Recording:
    """Record ``step`` on ``inputs``, which does not run. ``title``: what it is, the same on all ranks.

    Raises ValueError if the step does what a graph cannot hold. So does ``require_unchanged`` if the step has
    changed what a graph fixes. Then the model is as before.
    """
    buffers = torch_private.tree_map(copied, inputs)
    params = dict(engine.module.named_parameters())
    before = gradients(params.values())
    random_state = devices.random_state(_CPU)
    operations = Operations(recorder)
    errors = list[BaseException]()  # with which the step ended; the end of its recording raises another

    def run() -> Any:
        try:
            with operations:
                # Without its autograd graph, whose nodes would live as long as the outputs.
                return detached(step(*buffers))
        except BaseException as error:
            errors.append(error)
            raise

    with _counted_apart(engine) as counts:
        try:
            outputs, launch = recorder.record(run)
            refuse_drawn(random_state, devices.random_state(_CPU))
            require_unchanged()
        except BaseException as error:
            devices.set_random_state(_CPU, random_state)
            _recover(engine)
            set_gradients(params.values(), before)
            raise [*errors, error][0] from None
    return Recording(
        inputs=buffers,
        outputs=outputs,
        launch=launch,
        params=params,
        before=before,
        left=gradients(params.values()),  # which the first replay computes, at once
        counts=counts,
        name=f"a step ({zlib.crc32(title.encode()):08x})",
        held=[*operations.held.values()],
    )


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


def _recover(engine: Engine) -> None:
    """Let the model be as before a recording that failed, without gradients."""
    engine.driver.reset_failed_backward()
    engine.attached(Guardrails).optimizers.end_steps()
    for param in engine.module.parameters():
        param.grad = None
    engine.require_rest("a step cannot be captured")


def gradients(params: Iterable[nn.Parameter]) -> list[Tensor | None]:
    """Return the gradients of ``params``, in a third of the time that attributes of shards take."""
    with torch_private.DisableTorchFunctionSubclass():
        return [*map(_GRAD.__get__, params)]


def set_gradients(params: Iterable[nn.Parameter], grads: Sequence[Tensor | None]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def detached(values: Any) -> Any:
    return torch_private.tree_map(lambda each: each.detach() if isinstance(each, Tensor) else each, values)

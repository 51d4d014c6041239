"""Run one optimizer step. The training loop, the planner and the doctor share it."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardtrain import capture, clip_grad_norm_, introspect, no_sync, replay, virtual_rank
from shardtrain.job.build import Job
from shardtrain.job.errors import UserError, reading
from shardtrain.job.evaluate import table_of, table_rows
from shardtrain.job.losses import CrossEntropy, Loss
from shardtrain.optim import Ema, GradScaler

Phase = Callable[[str], AbstractContextManager[object]]
Scale = Callable[[Tensor], Tensor]
Observer = Callable[[Tensor, Tensor, Tensor, Tensor], object]  # of images, loss, logits, labels


def ignore(*_: Any) -> None:
    """Observe nothing."""


def accumulate(
    model: Callable[[Tensor], Tensor],
    loss: Loss,
    batches: Iterator[Sequence[Any]],
    count: int,
    no_sync: Callable[[], AbstractContextManager[object]],
    *,
    scale: Scale = lambda loss: loss,
    phase: Phase = contextlib.nullcontext,
    observe: Observer = ignore,
) -> None:
    """Accumulate the gradients of the mean loss over the next ``count`` micro-batches.

    Args:
        no_sync: a context in which backward reduces nothing; the last micro-batch runs outside it.

    For others see `forward_backward`.
    """
    for micro in range(count):
        with contextlib.nullcontext() if micro == count - 1 else no_sync():
            forward_backward(model, loss, batches, lambda value: scale(value / count), phase, observe)


def forward_backward(
    model: Callable[[Tensor], Tensor],
    loss: Loss,
    batches: Iterator[Sequence[Any]],
    scale: Scale,
    phase: Phase,
    observe: Observer,
) -> Tensor:
    """Compute the gradients of the next micro-batch, and return its loss, 0-dim.

    Args:
        model: from images [batch, channels, height, width] to logits [batch, classes].
        batches: yields images, labels, and further items, which are ignored.
        scale: multiplies the loss before backward, as `GradScaler.scale` does.
        phase: called with ``data``, ``forward`` and ``backward``; each runs inside the context returned.
        observe: called at the end.
    """
    with phase("data"):
        images, labels, *_ = next(batches)
    with phase("forward"):
        logits = model(images)
        value = loss(logits, labels)
    with phase("backward"):
        scale(value).backward()  # type: ignore[no-untyped-call]
    observe(images, value, logits, labels)
    return value


class Step(NamedTuple):
    """Run the training program's step: gradients of some micro-batches, clipping, and the update."""

    model: nn.Module  # sharded
    loss: Loss
    optimizer: torch.optim.Optimizer
    max_norm: float | None
    ema: Ema | None = None
    scaler: GradScaler = GradScaler(enabled=False)

    @classmethod
    def of(cls, job: Job, max_norm: float | None) -> Step:
        """Return the step of ``job``."""
        return cls(job.model, job.loss, job.optimizer, max_norm, job.ema, job.scaler)

    def gradients(self, batches: Iterator[Sequence[Any]], count: int, *args: Any, **kwargs: Any) -> Tensor:
        """Call `backward`, and clip the gradients; return their norm before that, 0-dim."""
        self.backward(batches, count, *args, **kwargs)
        self.scaler.unscale_(self.optimizer)
        return clip_grad_norm_(self.model, self.max_norm or math.inf)  # inf measures and does not clip

    def backward(
        self,
        batches: Iterator[Sequence[Any]],
        count: int,
        phase: Phase = contextlib.nullcontext,
        observe: Observer = ignore,
        seed: Callable[[int], object] = lambda rank: None,
        again: Callable[[int], Sequence[Any]] | None = None,
        step: int | None = None,
        *,
        first: bool = False,
    ) -> None:
        """Compute the gradients of ``count`` micro-batches, and reduce them.

        ``seed`` is called with the number of each virtual rank, before its micro-batch. With ``again``, from
        such a number to its images and labels in this ``step``, a neighbour checks this rank by a replay.
        In the ``first`` step this rank checks itself otherwise: its first virtual rank, computed again, must
        have the same bits.
        """
        batches, loss = self._weighted(batches, count, phase)
        ranks = introspect(self.model).virtual_ranks
        scale = self.scaler.scale
        if not ranks:
            synced = partial(no_sync, self.model)
            accumulate(self.model, loss, batches, count, synced, scale=scale, phase=phase, observe=observe)
            return

        def compute(number: int, feed: Iterator[Sequence[Any]], observe: Observer) -> Tensor:
            with virtual_rank(self.model, number):
                seed(number)
                return forward_backward(self.model, loss, feed, scale, phase, observe)

        if not first and again is None:
            for number in ranks:
                compute(number, batches, observe)
            return
        with phase("data"):
            own = dict(zip(ranks, batches, strict=False))
        unseen = {*ranks}

        def compute_again(number: int) -> Tensor:
            batch = own[number] if number in own or again is None else again(number)
            sees = observe if number in unseen else ignore  # each image counts once
            unseen.discard(number)
            return compute(number, iter([batch]), sees)

        replay(self.model, compute_again, step=step, neighbour=again is not None)

    def _weighted(
        self, batches: Iterator[Sequence[Any]], count: int, phase: Phase
    ) -> tuple[Iterator[Sequence[Any]], Loss]:
        """Return the batches and the loss. One with weights of classes needs the labels of all batches."""
        loss = self.loss
        if not isinstance(loss, CrossEntropy) or loss.weight is None:
            return batches, loss
        with phase("data"):
            loaded = list(itertools.islice(batches, count))
        weight = self.weight_of(loaded)
        assert weight is not None
        return iter(loaded), partial(loss.over, weight)

    def weight_of(self, batches: Sequence[Sequence[Any]]) -> Tensor | None:
        """Return the weight of all images of the step, over the number of micro-batches of all ranks.

        None if classes have no weights. Else collective, with the same bits on any number of ranks that
        compute the same virtual ranks. The mean over micro-batches of their sums divided by this is the
        weighted mean over all images.
        """
        loss = self.loss
        if not isinstance(loss, CrossEntropy) or loss.weight is None:
            return None
        rows = table_rows(self.model)
        weights = torch.stack([loss.weight_of(labels) for _, labels, *_ in batches])
        table = table_of(weights.view(len(rows), -1), rows)
        return table.sum() / table.numel()

    def update(self, step: int | None = None) -> None:
        """Update the parameters, and the moving average as after step number ``step``.

        Raises UserError if the optimizer is not right on shards.
        """
        kind = type(self.optimizer)
        optimizer = f"optim._target_={kind.__module__}.{kind.__qualname__}"
        with reading(optimizer, "choose another optimizer", ValueError):
            self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.ema is not None:
            self.ema.update(self.ema.every if step is None else step)

    def __call__(self, batches: Sequence[Sequence[Any]]) -> None:
        """Run the whole step over ``batches``, and clear the gradients."""
        self.gradients(iter(batches), len(batches))
        self.update()
        self.optimizer.zero_grad()


class CapturedStep:
    """Run a `Step` as one CUDA graph: all micro-batches, clipping and the update. See `shardtrain.capture`.

    Observers are called after the whole step, the update included. Two things are outside the graph: the
    moving average, since its weight depends on the number of the step, and the weight of all images if
    classes have weights, since a collective sums it.

    Raises UserError if the step cannot be captured.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        if step.scaler.is_enabled():
            raise UserError(
                "train.capture=true: parallel.precision=fp16 has the host decide on updates; choose bf16"
            )
        for group in step.optimizer.param_groups:
            if group.get("fused") and "capturable" in group:  # its counts of steps are on the device already
                group["capturable"] = True
        with _as_mistake():
            self._run = capture(self._compute, step.model, step.optimizer)

    def _compute(
        self, weight: Tensor | None, *batches: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the gradients' norm, and loss and logits of each micro-batch; ``weight``: of all images."""
        results = list[tuple[Tensor, Tensor]]()
        loss = self._step.loss
        if weight is not None:
            assert isinstance(loss, CrossEntropy)
            loss = partial(loss.over, weight)
        norm = self._step._replace(loss=loss).gradients(
            iter(batches),
            len(batches),
            observe=lambda images, loss, logits, labels: results.append((loss, logits)),
        )
        self._step.optimizer.step()
        return norm, results

    def __call__(
        self, batches: Iterator[Sequence[Any]], count: int, phase: Phase, observe: Observer, step: int
    ) -> Tensor:
        """Run step number ``step`` on ``count`` micro-batches; return the gradients' norm, 0-dim."""
        with phase("data"):
            own = [(images, labels) for images, labels, *_ in itertools.islice(batches, count)]
            weight = self._step.weight_of(own)
        with phase("forward"), _as_mistake():
            norm: Tensor
            norm, results = self._run(weight, *own)
        for (images, labels), (loss, logits) in zip(own, results, strict=True):
            observe(images, loss, logits, labels)
        if self._step.ema is not None:
            self._step.ema.update(step)
        return norm

    def release(self) -> None:
        """Delete the graph, for which the end of a process group would wait for ever."""
        self._run.release()

    @property
    def summary(self) -> str:
        """How many steps were replayed, and why others were not."""
        return self._run.summary


@contextlib.contextmanager
def _as_mistake() -> Iterator[None]:
    """Turn a ValueError of `capture` inside into a UserError."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"train.capture=true: {error}") from error

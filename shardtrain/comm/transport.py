"""What a transport is: it allocates flat vectors, and moves them between the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from shardtrain.comm.guard import Guard
from shardtrain.comm.trace import Movement, waiting
from shardtrain.layout import Layout

T = TypeVar("T")
S = TypeVar("S")


class Vector(NamedTuple):
    """A flat vector of a segment, and this rank's interval of it: of parameters, or of their gradient.

    ``full``: 1-D, ``layout.padded`` elements. ``local``: 1-D, ``layout.length(rank)`` elements, of the same
    dtype and device. A gather reads ``local`` and fills ``full``. A reduction reads ``full``, which
    `Transport.gradient` has made, and of which ``local`` is a view. Its mean is of ``dtype``, that of
    ``full`` or a wider one. ``terms``: see `arithmetic.merge`; unless 0, ranks are summed in its tree on
    every backend.
    """

    full: Tensor
    local: Tensor
    layout: Layout
    dtype: torch.dtype = torch.float32
    terms: int = 0

    @property
    def parts(self) -> list[Tensor]:
        """Every rank's interval of ``full``, as views."""
        return [self.full[self.layout.interval(rank)] for rank in range(self.layout.world)]

    def new_mean(self) -> Tensor:
        """Allocate the mean of this rank's interval: 1-D, uninitialized."""
        return torch.empty_like(self.local, dtype=self.dtype)


# What is sent to each rank, and what is received from it: 1-D tensors, one per rank.
Move = tuple[Sequence[Tensor], Sequence[Tensor]]


class Collective(NamedTuple):
    """A collective of this rank, for those who watch its wait."""

    guard: Guard
    position: int  # in the path that ``guard`` has
    movement: Movement
    unit: str
    device: torch.device  # where the unit's vectors lie

    def wait_for(self, finish: Callable[[], T]) -> T:
        """Return what ``finish`` returns, which waits for other ranks: under the guard, and measured."""
        with waiting(self.movement, self.unit, self.device), self.guard.waiting(self.position):
            return finish()


class Pending(Generic[T]):
    """A collective under way. ``wait()`` calls ``finish`` once, and returns what that returned."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._call: Collective | None = None
        self._result: T

    def of(self, call: Collective) -> Pending[T]:
        """Wait from now on as part of ``call``. A channel says so; a transport returns one without a call."""
        self._call = call
        return self

    @classmethod
    def done(cls, result: T) -> Pending[T]:
        """Return a collective that has ended with ``result``."""
        pending = cls(lambda: result)
        pending.wait()
        return pending

    def then(self, step: Callable[[T], S]) -> Pending[S]:
        """Return this collective with a further ``step``, from its result to another one."""
        return Pending(lambda: step(self.wait()))

    def wait(self) -> T:
        if self._finish is not None:
            finish = self._finish
            self._finish = None
            self._result = finish() if self._call is None else self._call.wait_for(finish)
        return self._result

    def settle(self) -> None:
        """Wait, so that no memory is in use, unless `wait` was called before, even if that raised."""
        if self._finish is not None:
            self.wait()


class Transport:
    """The movement of bytes between the ranks of one shard group, of which this one is ``rank`` of ``world``.

    A subclass needs `all_gather`, `reduce_scatter`, `all_reduce` and `broadcast`. `Channel` adds what is the
    same for all: the guard, the meter, and ranges for the profiler. All ranks make the same calls in the same
    order, and one may be under way while the next one starts. `transport_check.check_transport` tests it.

    ``in_place``: the local interval that `allocate` returns lies inside the full vector, so a gather copies
    nothing and a release frees nothing. ``returns_memory``: a `gradient` is the caller's again when its
    reduction has ended.
    """

    rank: int
    world: int
    in_place = False
    returns_memory = False

    def on(self, devices: Iterable[torch.device]) -> Transport:
        """Return the transport for flat vectors on ``devices``: this one, unless another moves these."""
        return self

    @property
    def reserved(self) -> int:
        """Bytes of this rank's memory that are reserved for gradients under way."""
        return 0

    @property
    def capturable(self) -> bool:
        """Whether its collectives may be captured and replayed by an accelerator, without the host."""
        return False

    def open_guard(self) -> Guard | None:
        """Return what notices that ranks differ, or None: ranks then compare before each collective."""
        return None

    def allocate(self, layout: Layout, like: Tensor, gradient_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return a full vector and this rank's interval of ``like``'s dtype and device, uninitialized.

        ``gradient_dtype``: of its gradients. Collective. Unless ``in_place``, the caller may resize the full
        vector's storage.
        """
        return like.new_empty(layout.padded), like.new_empty(layout.length(self.rank))

    def gradient(self, layout: Layout, like: Tensor) -> Tensor:
        """Return a full gradient for `reduce_scatter`: 1-D, of ``like``'s dtype, uninitialized."""
        return like.new_empty(layout.padded)

    def discard(self, gradient: Tensor) -> None:
        """Free a result of `gradient` that will not be reduced."""

    def all_gather(self, flats: Sequence[Vector]) -> Pending[None]:
        """Start filling every ``full`` from all ranks' ``local``."""
        raise NotImplementedError

    def reduce_scatter(self, gradients: Sequence[Vector]) -> Pending[list[Tensor]]:
        """Start reducing ``gradients``, whose memory is the transport's now.

        The result has for each of them the mean over all ranks of this rank's interval: 1-D, of ``dtype``.
        `arithmetic.merge` computes it in the order that gives equal bits on every transport.
        """
        raise NotImplementedError

    def average(self, gradients: Sequence[Vector], means: Pending[list[Tensor]]) -> Pending[list[Tensor]]:
        """Start averaging the ``means`` of ``gradients`` over ranks that have the same interval: replicas.

        A stage of a reduction computes ``means``. They are sent in the dtype of each ``full``. With
        ``terms`` they are sums, which this divides. Only replicas need it.
        """
        raise NotImplementedError

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """Overwrite ``tensor`` on every rank with rank ``src``'s. Returns when that is done."""
        raise NotImplementedError

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        """Overwrite ``tensor`` on every rank with the ``sum``, ``max`` or ``min`` over ranks."""
        raise NotImplementedError

    def fence(self, what: Movement) -> None:
        """Wait for every rank that shares memory: at ``ENTER``, before parameters are read, and at ``LEAVE``.

        `trace.NOTES` do not wait: this rank's optimizer has stepped, or other parameters train than before.
        """


class Alone(Transport):
    """The transport of a single rank: its interval is the full vector, and nothing moves."""

    rank = 0
    world = 1
    in_place = True
    capturable = True

    def allocate(self, layout: Layout, like: Tensor, gradient_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        full = like.new_empty(layout.padded)
        return full, full

    def all_gather(self, flats: Sequence[Vector]) -> Pending[None]:
        return Pending.done(None)

    def reduce_scatter(self, gradients: Sequence[Vector]) -> Pending[list[Tensor]]:
        means = []
        for gradient in gradients:
            mean = gradient.full.to(gradient.dtype)
            if gradient.terms > 1:
                mean.div_(gradient.terms)
            means.append(mean)
        return Pending.done(means)

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        pass

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        pass

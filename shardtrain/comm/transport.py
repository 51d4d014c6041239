"""Define what the engine needs of a transport: memory for flat vectors, gathers and reductions.

A transport moves the intervals of one shard group. Buffers and the gradient's norm concern all ranks. With
several replicas there are more ranks than in one shard group::

    all ranks      ranks 0, 1, 2, 3
    shard groups   ranks 0, 1   and   ranks 2, 3        `rank` and `world` count within one
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from shardtrain.comm.trace import Movement
from shardtrain.layout import Layout

T = TypeVar("T")
S = TypeVar("S")


class Flat(NamedTuple):
    """Hold one flat vector to be gathered, and this rank's interval of it.

    ``full``: 1-D, ``layout.padded`` elements. ``local``: 1-D, ``layout.length(rank)`` elements, of the same
    dtype and device unless the transport ``uploads``. A gather reads ``local`` and fills ``full``.
    """

    full: Tensor
    local: Tensor
    layout: Layout

    @property
    def sent(self) -> int:
        """Bytes that this rank sends to other ranks."""
        return self.local.nbytes * (self.layout.world - 1)


class Gradient(NamedTuple):
    """Hold the flat gradient of rank ``rank``, to be reduced.

    ``full``: 1-D, ``layout.padded`` elements, from `Transport.gradient`. ``dtype``: the mean's, that of
    ``full`` or a wider one. ``terms``: see `arithmetic.merge`; unless 0, ranks are summed in its tree on
    every backend.
    """

    full: Tensor
    layout: Layout
    rank: int
    dtype: torch.dtype
    terms: int = 0

    @property
    def parts(self) -> list[Tensor]:
        """Every rank's interval of ``full``, as views."""
        return intervals(self.full, self.layout)

    @property
    def own(self) -> Tensor:
        """This rank's interval of ``full``, as a view."""
        return self.full[self.layout.interval(self.rank)]

    @property
    def sent(self) -> int:
        """Bytes that this rank sends to other ranks."""
        return (self.layout.padded - self.layout.length(self.rank)) * self.full.element_size()

    def of_a_stage(self) -> Gradient:
        """Return the same, for a stage of the reduction that another follows: with ``terms`` it only sums."""
        return self._replace(terms=min(self.terms, 1))

    def new_mean(self) -> Tensor:
        """Allocate the mean of this rank's interval: 1-D, uninitialized."""
        return self.full.new_empty(self.layout.length(self.rank), dtype=self.dtype)


# What is sent to each rank, and what is received from it: 1-D tensors, one per rank.
Move = tuple[Sequence[Tensor], Sequence[Tensor]]


class Pending(Generic[T]):
    """Represent a collective under way. ``wait()`` calls ``finish`` once, and returns what that returned."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._result: T

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
            self._result = finish()
        return self._result

    def settle(self) -> None:
        """Wait, unless that was done before, so that no memory is in use. A failure was raised elsewhere."""
        if self._finish is not None:
            with suppress(RuntimeError):
                self.wait()


class Transport:
    """Move bytes between the ranks of one shard group, of which this one is ``rank`` of ``world``.

    ``in_place``: the local interval that `allocate` returns lies inside the full vector, so a gather copies
    nothing and a release frees nothing. ``uploads``: shards lie in host memory, and a gather casts them.
    ``stages``: the shard groups, whose gradients are summed first, where replicas are a second stage. A
    transport whose shard group is all ranks needs `broadcast` and `all_reduce`, too.
    """

    rank: int
    world: int
    in_place = False
    uploads = False
    stages: Sequence[Sequence[int]] = ()
    _all_ranks: Transport | None = None

    @property
    def reserved(self) -> int:
        """Bytes of this rank's memory that are reserved for gradients under way."""
        return 0

    @property
    def all_ranks(self) -> Transport:
        """The transport of all ranks that train the model. Errors name ranks by their numbers here."""
        return self._all_ranks or self

    @property
    def silent(self) -> bool:
        """Whether no other rank exists."""
        return isinstance(self.all_ranks, Alone)

    @property
    def primary_ranks(self) -> Sequence[int]:
        """The ranks of the first shard group, in order. They count or save what replicas hold alike."""
        return range(self.world) if self.all_ranks.world == self.world else self.stages[0]

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """Overwrite ``tensor`` on every rank with rank ``src``'s. Returns when that is done."""
        raise NotImplementedError

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        """Overwrite ``tensor`` on every rank with the ``sum``, ``max`` or ``min`` over ranks."""
        raise NotImplementedError

    def allocate(self, layout: Layout, like: Tensor, reduced: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return a full vector and this rank's interval of ``like``'s dtype and device, uninitialized.

        ``reduced``: the dtype that its gradients will have. Collective. Unless ``in_place``, the caller may
        resize the full vector's storage.
        """
        return like.new_empty(layout.padded), like.new_empty(layout.length(self.rank))

    def gradient(self, layout: Layout, like: Tensor) -> Tensor:
        """Return a full gradient for `reduce`: 1-D, of ``like``'s dtype, uninitialized."""
        return like.new_empty(layout.padded)

    def discard(self, gradient: Tensor) -> None:
        """Free a result of `gradient` that will not be reduced."""

    def gather(self, name: str, flats: Sequence[Flat]) -> Pending[None]:
        """Start filling every ``full`` from all ranks' ``local``. ``name``: the unit's, on all ranks."""
        raise NotImplementedError

    def reduce(self, name: str, gradients: Sequence[Gradient]) -> Pending[list[Tensor]]:
        """Start reducing ``gradients``, whose memory is the transport's now.

        The result has for each of them the mean over all ranks of this rank's interval: 1-D, of ``dtype``.
        """
        raise NotImplementedError

    def average(
        self, name: str, gradients: Sequence[Gradient], means: Pending[list[Tensor]]
    ) -> Pending[list[Tensor]]:
        """Start averaging over replicas the ``means`` of ``gradients`` that a stage of a reduction computes.

        They are sent in the dtype of each ``full``. With ``terms``, ``means`` are complete already, on every
        rank. The interval is the same on all ranks.
        """
        raise NotImplementedError

    def fence(self, what: Movement) -> None:
        """Wait for every rank that shares memory: at ``ENTER``, before parameters are read, and at ``LEAVE``.

        ``STEP`` does not wait. It tells the other ranks that an optimizer has stepped on this rank.
        """


Ranks = Transport  # where `Transport.all_ranks` is meant


class TransportWrapper(Transport):
    """Wrap the transport ``inner``, and forward all that subclasses do not override."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.world = inner.world
        self.in_place = inner.in_place
        self.stages = inner.stages
        self._all_ranks = inner.all_ranks

    @property
    def reserved(self) -> int:
        return self.inner.reserved

    def allocate(self, layout: Layout, like: Tensor, reduced: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.inner.allocate(layout, like, reduced)

    def gradient(self, layout: Layout, like: Tensor) -> Tensor:
        return self.inner.gradient(layout, like)

    def discard(self, gradient: Tensor) -> None:
        self.inner.discard(gradient)

    def fence(self, what: Movement) -> None:
        self.inner.fence(what)


class Alone(Transport):
    """Serve a single rank: its interval is the full vector, and nothing moves."""

    rank = 0
    world = 1
    in_place = True

    def allocate(self, layout: Layout, like: Tensor, reduced: torch.dtype) -> tuple[Tensor, Tensor]:
        full = like.new_empty(layout.padded)
        return full, full

    def gather(self, name: str, flats: Sequence[Flat]) -> Pending[None]:
        return Pending.done(None)

    def reduce(self, name: str, gradients: Sequence[Gradient]) -> Pending[list[Tensor]]:
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


def intervals(full: Tensor, layout: Layout) -> list[Tensor]:
    """Return every rank's interval of ``full``, as views."""
    return [full[layout.interval(rank)] for rank in range(layout.world)]

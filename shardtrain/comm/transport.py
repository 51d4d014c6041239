"""Define what the engine needs of a transport: memory for flat vectors, gathers and reductions.

A transport moves the intervals of one shard group. Buffers and the gradient's norm concern all ranks. With
several replicas there are more ranks than in one shard group::

    all ranks      ranks 0, 1, 2, 3
    shard groups   ranks 0, 1   and   ranks 2, 3        `rank` and `world` count within one
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardtrain.comm.trace import Movement
from shardtrain.layout import Layout, Piece


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
    """Hold one flat gradient to be reduced.

    ``full``: 1-D, ``layout.padded`` elements, from `Transport.gradient`. It holds this rank's gradient in the
    other ranks' intervals; the transport may use the rank's own interval. ``own``: this rank's gradient in
    its own interval: one 1-D tensor for each of ``pieces``, which are ``layout.pieces(rank)``, of ``full``'s
    dtype or a wider one. The reduction turns them into the mean over all ranks, or replaces them by it.
    ``mean``: if given, the mean's dtype; ``full`` then holds this rank's own gradient, too, and ``own`` only
    empty tensors, since one launch copies all gradients. ``terms``: see `arithmetic.merge`; unless 0, ranks
    are summed in its tree on every backend.
    """

    full: Tensor
    own: list[Tensor]
    layout: Layout
    pieces: tuple[Piece, ...]
    mean: torch.dtype | None = None
    terms: int = 0

    def of_a_stage(self) -> Gradient:
        """Return the same, for a stage of the reduction that another follows: with ``terms`` it only sums."""
        return self._replace(terms=min(self.terms, 1))

    def sent_by(self, rank: int) -> int:
        """Return the bytes that rank ``rank`` sends to other ranks."""
        return (self.layout.padded - self.layout.length(rank)) * self.full.element_size()

    def new_mean(self, rank: int) -> Tensor:
        """Allocate the mean of rank ``rank``'s interval, and make ``own`` views of it; return it (1-D)."""
        wide = self.mean or (self.own[0].dtype if self.own else self.full.dtype)
        interval = self.full.new_empty(self.layout.length(rank), dtype=wide)
        for index, (start, stop, offset) in enumerate(self.pieces):
            if start < stop:
                self.own[index] = interval[offset : offset + stop - start]
        return interval

    def pack_own(self, rank: int) -> Tensor:
        """Copy ``own`` into one vector, rank ``rank``'s interval, unless it lies so; return the vector.

        Empty pieces keep their tensors: on many ranks most pieces are empty.
        """
        own = self.own
        length = self.layout.length(rank)
        held = [(tensor, piece.offset) for tensor, piece in zip(own, self.pieces, strict=True) if piece.numel]
        if held:
            first = held[0][0]
            memory = first.untyped_storage()
            if memory.nbytes() == length * first.element_size() and all(
                tensor.untyped_storage()._cdata == memory._cdata and tensor.storage_offset() == offset
                for tensor, offset in held
            ):
                return first.as_strided((length,), (1,), 0)  # the pieces lie in one interval already
        interval = self.new_mean(rank)
        if self.mean is not None:
            return interval.copy_(self.full[self.layout.interval(rank)])
        for tensor, offset in held:
            interval[offset : offset + len(tensor)].copy_(tensor)
        return interval


# What is sent to each rank, and what is received from it: 1-D tensors, one per rank.
Move = tuple[Sequence[Tensor], Sequence[Tensor]]

# Values that are averaged in place, and the dtype in which they are sent.
Interval = tuple[Tensor, torch.dtype]


class Pending:
    """Represent a collective under way. ``wait()`` runs its ``steps``; then its results may be read."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self.steps = steps

    def then(self, step: Callable[[], object]) -> Pending:
        """Return this collective with a further ``step``, which completes its results."""
        return Pending(self.wait, step)

    def wait(self) -> None:
        steps = self.steps
        self.steps = ()
        for step in steps:
            step()


class Transport:
    """Move bytes between the ranks of one shard group, of which this one is ``rank`` of ``world``.

    ``in_place``: the local interval that `allocate` returns lies inside the full vector, so a gather copies
    nothing and a release frees nothing. ``uploads``: shards lie in host memory, and a gather casts them.
    ``stages``: the shard groups, whose gradients are summed first, where replicas are a second stage.
    ``stepping``: an optimizer that was tried steps now; the engine's (see ``norms.py``). A
    transport whose shard group is all ranks needs `broadcast` and `all_reduce`, too.
    """

    rank: int
    world: int
    in_place = False
    uploads = False
    stages: Sequence[Sequence[int]] = ()
    stepping = False
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

    def gather(self, name: str, flats: Sequence[Flat]) -> Pending:
        """Start filling every ``full`` from all ranks' ``local``. ``name``: the unit's, on all ranks."""
        raise NotImplementedError

    def reduce(self, name: str, gradients: Sequence[Gradient]) -> Pending:
        """Start turning each ``own`` into the mean over all ranks. The transport owns each ``full`` now."""
        raise NotImplementedError

    def average(self, name: str, intervals: Sequence[Interval], after: Pending, terms: int) -> Pending:
        """Start turning each interval, which ``after`` completes on every rank, into its mean over ranks.

        For replicas only. The interval is the same on all ranks. ``terms``: as of `Gradient`; unless 0, the
        intervals are complete already.
        """
        raise NotImplementedError

    def fence(self, what: Movement, name: str = "the model") -> None:
        """Wait for every rank that shares memory: at ``ENTER``, before parameters are read, and at ``LEAVE``.

        ``STEP`` does not wait. It tells the other ranks that an optimizer has stepped on this rank; ``name``
        says which, and with which options.
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

    def fence(self, what: Movement, name: str = "the model") -> None:
        self.inner.fence(what, name)


class Alone(Transport):
    """Serve a single rank: its interval is the full vector, and nothing moves."""

    rank = 0
    world = 1
    in_place = True

    def allocate(self, layout: Layout, like: Tensor, reduced: torch.dtype) -> tuple[Tensor, Tensor]:
        full = like.new_empty(layout.padded)
        return full, full

    def gradient(self, layout: Layout, like: Tensor) -> Tensor:
        return like.new_empty(0)  # no element belongs to another rank

    def gather(self, name: str, flats: Sequence[Flat]) -> Pending:
        return Pending()

    def reduce(self, name: str, gradients: Sequence[Gradient]) -> Pending:
        for gradient in gradients:
            if gradient.terms > 1 and gradient.own:
                torch._foreach_div_(gradient.own, gradient.terms)
        return Pending()

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        pass

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        pass


def intervals(full: Tensor, layout: Layout) -> list[Tensor]:
    """Return every rank's interval of ``full``, as views."""
    return [full[layout.interval(rank)] for rank in range(layout.world)]

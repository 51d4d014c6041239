"""What the engine asks of a transport: memory for flat vectors, and two movements between ranks.

A transport moves the intervals of one shard group; buffers and the gradient's norm concern all ranks. With
several replicas there are more ranks than one shard group has::

    all ranks      ranks 0, 1, 2, 3
    shard groups   ranks 0, 1   and   ranks 2, 3        `rank` and `world` count within one

A movement is started now and finished later. Between movements, `fence` keeps ranks that write parameters
apart from ranks that read them where ranks share memory. Elsewhere it costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shardtrain.comm.movement import Movement
from shardtrain.layout import Layout, Piece


class Tag(NamedTuple):
    """Which movement: ``number`` is unique to it within a step, ``name`` is for people."""

    number: int
    name: str


class Flat(NamedTuple):
    """One flat vector to be gathered, with this rank's interval of it.

    ``full``: 1-D, ``layout.padded`` elements. ``local``: 1-D, ``layout.length(rank)`` elements, same
    dtype and device. A gather reads ``local`` and fills ``full``. ``quantised``: it may travel as int8.
    """

    full: Tensor
    local: Tensor
    layout: Layout
    quantised: bool = False


class Gradient(NamedTuple):
    """One flat gradient to be reduced.

    ``full``: 1-D, ``layout.padded`` elements, from `Transport.gradient`: this rank's gradient in the other
    ranks' intervals; its own interval is the transport's to use. ``own``: this rank's gradient in its own
    interval, 1-D, one tensor for each of ``pieces``, its ``layout.pieces(rank)``, of ``full``'s dtype or a
    wider one. When the reduction is done ``own`` holds the mean over all ranks, in the same tensors or in
    others. ``quantised``: it may travel as int8.
    """

    full: Tensor
    own: list[Tensor]
    layout: Layout
    pieces: tuple[Piece, ...]
    quantised: bool = False


class Interval(NamedTuple):
    """Values that are to be averaged in place; ``wire``: the dtype in which they move."""

    values: Tensor
    wire: torch.dtype


def is_in_place(flats: Sequence[Flat]) -> bool:
    """Return whether every ``local`` lies in its ``full``, rather than in memory of its own."""
    return all(
        flat.full.untyped_storage().data_ptr() == flat.local.untyped_storage().data_ptr() for flat in flats
    )


def sent_by(gradient: Gradient, rank: int) -> int:
    """Return the bytes of ``gradient`` that rank ``rank`` sends to the others."""
    return (gradient.layout.padded - gradient.layout.length(rank)) * gradient.full.element_size()


class Pending:
    """A movement under way. ``wait()`` returns once its results may be read by the current stream."""

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


def all_of(movements: Sequence[Pending]) -> Pending:
    """Return all ``movements`` as one."""

    def finish() -> None:
        for each in movements:
            each.wait()

    return Pending(finish)


def staged(start: Callable[[], Pending], finish: Callable[[], None]) -> Pending:
    """Start a movement now with ``start``, and ``finish`` it when it is waited for."""
    moving = start()

    def both() -> None:
        moving.wait()
        finish()

    return Pending(both)


class Ranks(Protocol):
    """Ranks that do something together: this one is ``rank`` of ``world``."""

    rank: int
    world: int

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """Overwrite ``tensor`` on every rank with rank ``src``'s, and return when that is done."""

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        """Overwrite ``tensor`` on every rank with the ``sum``, ``max`` or ``min`` over ranks."""


class Transport:
    """Moves bytes between the ranks of one shard group, of which this one is ``rank`` of ``world``.

    ``in_place``: `allocate` returns a local interval that lies inside the full vector, so a gather copies
    nothing and a release can give nothing back. ``silent``: nothing comes from other ranks, because there are
    none, so what this rank lacks is not to be had.
    """

    rank: int
    world: int
    in_place = False
    silent = False

    @property
    def reserved(self) -> int:
        """Bytes of this rank's memory that are set aside for gradients under way."""
        return 0

    @property
    def all_ranks(self) -> Ranks:
        """All ranks that train the model, of one shard group or of several; errors name their numbers."""
        return self

    @property
    def primary_ranks(self) -> Sequence[int]:
        """The ranks of the first shard group in their order: they answer for what all replicas hold alike."""
        return range(self.world)

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """See `Ranks`, and so for the next one. Both concern a transport whose shard group is all ranks."""
        raise NotImplementedError

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        raise NotImplementedError

    def allocate(self, layout: Layout, like: Tensor, reduced: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return a full vector and this rank's interval, of ``like``'s dtype and device; values undefined.

        ``reduced``: the dtype that its gradients will have. Collective. Unless ``in_place``, the full
        vector's storage may be resized at will.
        """
        return like.new_empty(layout.padded), like.new_empty(layout.length(self.rank))

    def gradient(self, layout: Layout, like: Tensor) -> Tensor:
        """Return memory for a full gradient that `reduce` will read; 1-D, ``like``'s dtype, undefined."""
        return like.new_empty(layout.padded)

    def discard(self, gradient: Tensor) -> None:
        """Take back memory that `gradient` gave and that will not be reduced."""

    def gather(self, tag: Tag, flats: Sequence[Flat]) -> Pending:
        """Start filling every ``full`` from all ranks' ``local``."""
        raise NotImplementedError

    def reduce(self, tag: Tag, gradients: Sequence[Gradient]) -> Pending:
        """Start turning each ``own`` into the mean over all ranks; each ``full`` is then the transport's."""
        raise NotImplementedError

    def fence(self, what: Movement) -> None:
        """Return when every rank is there: at ``ENTER``, before parameters are read, or at ``LEAVE``.

        ``STEP`` waits for nobody: it lets the others know that an optimizer has stepped on this rank.
        """


class Carrier(Transport):
    """A transport that also serves others, which make movements of their own of it: int8 packets, say."""

    def exchange(self, tag: Tag, outgoing: Tensor, sizes: Sequence[int], incoming: Tensor) -> Pending:
        """Start sending ``sizes[r]`` elements of ``outgoing`` to rank r, and filling ``incoming`` from all.

        Both are 1-D, in rank order; from every rank come equally many. This carries a reduction: whoever
        asks for that counts it.
        """
        return Pending()

    def note(self, kind: Movement, tag: Tag) -> None:
        """Let the guard know of a collective that is made by other means."""

    def sharing(self) -> AbstractContextManager[None]:
        """Inside, this rank waits for others by other means than messages; all ranks hear of its errors."""
        return nullcontext()

    def staged(
        self, device: torch.device, start: Callable[[], Pending], finish: Callable[[], None]
    ) -> Pending:
        """Start a movement and finish it: when it is waited for, or on ``device``'s communication stream."""
        return staged(start, finish)


class TransportWrapper(Transport):
    """A transport around ``inner``, to which it passes on what subclasses do not change."""

    def __init__(self, inner: Transport, all_ranks: Ranks | None = None) -> None:
        self.inner = inner
        self.rank, self.world = inner.rank, inner.world
        self.in_place, self.silent = inner.in_place, inner.silent
        self._all_ranks = all_ranks or inner.all_ranks

    @property
    def reserved(self) -> int:
        return self.inner.reserved

    @property
    def all_ranks(self) -> Ranks:
        return self._all_ranks

    @property
    def primary_ranks(self) -> Sequence[int]:
        return self.inner.primary_ranks

    def allocate(self, layout: Layout, like: Tensor, reduced: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.inner.allocate(layout, like, reduced)

    def gradient(self, layout: Layout, like: Tensor) -> Tensor:
        return self.inner.gradient(layout, like)

    def discard(self, gradient: Tensor) -> None:
        self.inner.discard(gradient)

    def fence(self, what: Movement) -> None:
        self.inner.fence(what)


class Alone(Carrier):
    """The transport of a single rank: the interval is the whole vector, and nothing ever moves."""

    rank = 0
    world = 1
    in_place = True
    silent = True

    def allocate(self, layout: Layout, like: Tensor, reduced: torch.dtype) -> tuple[Tensor, Tensor]:
        full = like.new_empty(layout.padded)
        return full, full

    def gradient(self, layout: Layout, like: Tensor) -> Tensor:
        return like.new_empty(0)  # nothing is for other ranks

    def gather(self, tag: Tag, flats: Sequence[Flat]) -> Pending:
        return Pending()

    def reduce(self, tag: Tag, gradients: Sequence[Gradient]) -> Pending:
        return Pending()

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        pass

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        pass


# Intervals of flat vectors as backends and messages want them: each alone and in one piece.


def intervals(full: Tensor, layout: Layout) -> list[Tensor]:
    """Return every rank's interval of ``full``; views."""
    return [full[layout.interval(rank)] for rank in range(layout.world)]


def pack_own(gradient: Gradient, rank: int) -> Tensor:
    """Let ``gradient.own`` lie in one interval, that of rank ``rank``; return the interval.

    Empty pieces stay as they are: on many ranks most are.
    """
    full, own, layout, pieces, _ = gradient
    length = layout.length(rank)
    interval = _laid_out(own, pieces, length)
    if interval is not None:
        return interval
    interval = full.new_empty(length, dtype=own[0].dtype if own else full.dtype)
    for index, piece in enumerate(pieces):
        if piece.numel:
            own[index] = interval[piece.offset : piece.offset + piece.numel].copy_(own[index])
    return interval


def _laid_out(own: Sequence[Tensor], pieces: Sequence[Piece], length: int) -> Tensor | None:
    """Return the interval that the pieces are views of, if there is one that is alone in its memory."""
    held = [(part, piece.offset) for part, piece in zip(own, pieces, strict=True) if piece.numel]
    if not held or held[0][0].untyped_storage().nbytes() != length * held[0][0].element_size():
        return None
    first = held[0][0]
    memory = first.untyped_storage()._cdata
    if any(p.untyped_storage()._cdata != memory or p.storage_offset() != offset for p, offset in held):
        return None
    return first.as_strided((length,), (1,), 0)

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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardtrain.comm.trace import Movement
from shardtrain.layout import Layout, Piece


class Tag(NamedTuple):
    """Which movement: ``number`` is unique to it within a step, ``name`` is for people."""

    number: int
    name: str


class Flat(NamedTuple):
    """One flat vector to be gathered, with this rank's interval of it.

    ``full``: 1-D, ``layout.padded`` elements. ``local``: 1-D, ``layout.length(rank)`` elements, same
    dtype and device, unless the transport ``uploads``. A gather reads ``local`` and fills ``full``.
    ``quantised``: it may travel as int8.
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

    ``mean``: the dtype of the mean, where ``full`` has this rank's own gradient, too, and ``own`` nothing yet
    but empty pieces. So one launch lays out all gradients.
    """

    full: Tensor
    own: list[Tensor]
    layout: Layout
    pieces: tuple[Piece, ...]
    quantised: bool = False
    mean: torch.dtype | None = None

    def sent_by(self, rank: int) -> int:
        """Return the bytes that rank ``rank`` sends to the others."""
        return (self.layout.padded - self.layout.length(rank)) * self.full.element_size()

    def new_mean(self, rank: int) -> Tensor:
        """Return memory for the mean of rank ``rank``'s interval, which ``own`` shows from now on."""
        wide = self.mean or (self.own[0].dtype if self.own else self.full.dtype)
        interval = self.full.new_empty(self.layout.length(rank), dtype=wide)
        for index, (start, stop, offset) in enumerate(self.pieces):
            if start < stop:
                self.own[index] = interval[offset : offset + stop - start]
        return interval

    def pack_own(self, rank: int) -> Tensor:
        """Let ``own`` lie in one interval, that of rank ``rank``; return the interval.

        Empty pieces stay as they are: on many ranks most are.
        """
        own, length = self.own, self.layout.length(rank)
        held = [(index, piece.offset, piece.numel) for index, piece in enumerate(self.pieces) if piece.numel]
        if held:
            first = own[held[0][0]]
            memory = first.untyped_storage()
            if memory.nbytes() == length * first.element_size() and all(
                own[index].untyped_storage()._cdata == memory._cdata and own[index].storage_offset() == offset
                for index, offset, _ in held
            ):
                return first.as_strided((length,), (1,), 0)  # they lie in one already
        given = list(own)
        interval = self.new_mean(rank)
        if self.mean is not None:
            return interval.copy_(self.full[self.layout.interval(rank)])
        for index, _, _ in held:
            own[index].copy_(given[index])
        return interval


class Shipment(NamedTuple):
    """A flat vector of which every rank sends the others their intervals, whatever these hold.

    ``incoming``: [world, ``layout.length(rank)``], of ``full``'s dtype; a row for what each rank sends.
    """

    full: Tensor
    layout: Layout
    incoming: Tensor


class Interval(NamedTuple):
    """Values that are to be averaged in place; ``wire``: the dtype in which they move."""

    values: Tensor
    wire: torch.dtype


class Pending:
    """A movement under way. ``wait()`` takes the ``steps`` that are left; then its results may be read.

    ``ended``: if a trace is open, the moment at which it ends in a stream of its own.
    """

    def __init__(self, *steps: Callable[[], None], ended: Any = None) -> None:
        self._steps, self.ended = steps, ended

    def then(self, step: Callable[[], None]) -> Pending:
        """Return this movement with a further ``step``, which makes its results what they are to be."""
        return Pending(self.wait, step, ended=self.ended)

    def wait(self) -> None:
        steps, self._steps = self._steps, ()
        for step in steps:
            step()


class Transport:
    """Moves bytes between the ranks of one shard group, of which this one is ``rank`` of ``world``.

    ``in_place``: the local interval that `allocate` returns lies inside the full vector, so a gather copies
    nothing and a release gives nothing back. ``uploads``: shards lie in host memory, and a gather casts them.
    ``silent``: there are no other ranks to hear from.
    """

    rank: int
    world: int
    in_place = uploads = silent = False

    @property
    def reserved(self) -> int:
        """Bytes of this rank's memory that are set aside for gradients under way."""
        return 0

    @property
    def all_ranks(self) -> Transport:
        """All ranks that train the model, of one shard group or of several; errors name their numbers."""
        return self

    @property
    def primary_ranks(self) -> Sequence[int]:
        """The ranks of the first shard group in their order: they answer for what all replicas hold alike."""
        return range(self.world)

    # These two concern all ranks: a transport needs them whose shard group is all of them.

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """Overwrite ``tensor`` on every rank with rank ``src``'s, and return when that is done."""
        raise NotImplementedError

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        """Overwrite ``tensor`` on every rank with the ``sum``, ``max`` or ``min`` over ranks."""
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

    # For other transports, which make collectives of their own of these: int8 packets, say.

    def exchange(self, tag: Tag, shipments: Sequence[Shipment]) -> Pending:
        """Start sending each rank its interval of every ``full``, and filling the rows of every ``incoming``.

        This carries a reduction: whoever asks for that counts it.
        """
        raise NotImplementedError


Ranks = Transport  # where `Transport.all_ranks` is meant


class TransportWrapper(Transport):
    """A transport around ``inner``, to which it passes on what subclasses do not change."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.rank, self.world = inner.rank, inner.world
        self.in_place, self.silent = inner.in_place, inner.silent

    @property
    def reserved(self) -> int:
        return self.inner.reserved

    @property
    def all_ranks(self) -> Transport:
        return self.inner.all_ranks

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


class Alone(Transport):
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

    def exchange(self, tag: Tag, shipments: Sequence[Shipment]) -> Pending:
        return Pending()

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        pass

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        pass


def intervals(full: Tensor, layout: Layout) -> list[Tensor]:
    """Return every rank's interval of ``full``; views."""
    return [full[layout.interval(rank)] for rank in range(layout.world)]

"""The collectives of a model. What is the same over every transport is done here, once.

Each collective enters this rank's path, which the guard compares with the others', and is counted by the
meter. While torch's profiler runs, its start and the wait for its result are ranges. The transport moves the
bytes, and returns a `Pending`, whose wait is guarded and measured, too.

`Ranks` agree on texts (bytes, never pickles), buffers and norms. A `Channel` gathers and reduces the vectors
of a model between the ranks of one shard group. With several replicas there are more ranks than in one::

    all ranks      ranks 0, 1, 2, 3
    shard groups   ranks 0, 1   and   ranks 2, 3        `rank` and `world` count within one
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardtrain.comm import trace
from shardtrain.comm.guard import Guard, Handshake
from shardtrain.comm.trace import Movement, count
from shardtrain.comm.transport import Alone, Collective, Pending, Transport, Vector
from shardtrain.layout import Layout

T = TypeVar("T")


class Ranks:
    """The collectives of a transport's ranks: buffers, norms, texts, barriers. ``guard``: its own if None."""

    def __init__(self, transport: Transport, guard: Guard | None = None) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.world = transport.world
        self.in_place = transport.in_place
        guard = guard or transport.open_guard()
        self.guard: Guard = guard or Handshake(self.rank, self.world, transport.all_reduce)

    @property
    def silent(self) -> bool:
        """Whether no other rank exists."""
        return isinstance(self.transport, Alone)

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """Overwrite ``tensor`` on every rank with rank ``src``'s. Returns when that is done."""
        if self.world == 1:
            return
        count(trace.BROADCAST, [tensor.nbytes * (self.world - 1) if self.rank == src else 0])
        position = self.guard.post(trace.BROADCAST, f"{tensor.nbytes} bytes")
        with self.guard.waiting(position):
            self.transport.broadcast(tensor, src)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        """Overwrite ``tensor`` on every rank with the ``sum``, ``max`` or ``min`` over ranks."""
        if self.world == 1:
            return
        count(trace.ALL_REDUCE, [2 * tensor.nbytes * (self.world - 1) // self.world])
        kind = f"{op} of {str(tensor.dtype).removeprefix('torch.')}"
        position = self.guard.post(trace.ALL_REDUCE, f"{tensor.nbytes} bytes ({kind})")
        with self.guard.waiting(position):
            self.transport.all_reduce(tensor, op)

    def fence(self, what: Movement, name: str = "the model") -> None:
        """Wait for ranks that share memory, at ``ENTER`` and ``LEAVE``; do not wait for `trace.NOTES`.

        ``name``: what is noted: which optimizer steps, with which options, or which parameters train. A
        replay of a captured step begins with ``GRAPH`` where another rank's step begins with ``ENTER``.
        """
        if self.world == 1:
            return
        paths = self.guard.paths
        if what in (trace.ENTER, trace.GRAPH):
            paths.forward += 1
        is_begin = what is trace.GRAPH or (what is trace.ENTER and paths.captures)
        if what in trace.NOTES or self.in_place or is_begin:
            self.guard.post(what, name)
        self.transport.fence(what)


class Channel(Ranks):
    """The gathers and reductions of a model's flat vectors, between the ranks of one shard group.

    ``all_ranks``: all ranks that train the model; None if these are the transport's. Errors name ranks by
    their numbers there. ``stages``: the shard groups, whose gradients are summed first, where replicas are a
    second stage.
    """

    uploads = False  # whether shards lie in host memory, and a gather casts them
    # `OptimizerStep`, while an optimizer makes one on pieces; set by ``guardrails/optimizers.py``.
    step: Any = None
    stages: Sequence[Sequence[int]] = ()

    def __init__(
        self, transport: Transport, all_ranks: Ranks | None = None, guard: Guard | None = None
    ) -> None:
        super().__init__(transport, guard)
        self._all_ranks = all_ranks

    @property
    def all_ranks(self) -> Ranks:
        return self._all_ranks or self

    @property
    def silent(self) -> bool:
        return isinstance(self.all_ranks.transport, Alone)

    @property
    def primary_ranks(self) -> Sequence[int]:
        """The ranks of the first shard group, in order. They count or save what replicas hold alike."""
        return range(self.world) if self.all_ranks.world == self.world else self.stages[0]

    def place(self, devices: Iterable[torch.device]) -> None:
        """Let flat vectors lie on ``devices`` from now on. Models that share a channel share devices."""
        self.transport = self.transport.on(devices)

    def allocate(self, layout: Layout, like: Tensor, gradient_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See `Transport.allocate`."""
        return self.transport.allocate(layout, like, gradient_dtype)

    def gradient(self, layout: Layout, like: Tensor) -> Tensor:
        """See `Transport.gradient`."""
        return self.transport.gradient(layout, like)

    def gather(self, name: str, flats: Sequence[Vector]) -> Pending[None]:
        """Start filling every ``full`` from all ranks' ``local``. ``name``: the unit's, on all ranks."""
        sent = (flat.local.nbytes * (self.world - 1) for flat in flats)
        return self._start(trace.GATHER, "gather", name, flats, sent, self.transport.all_gather)

    def reduce(self, name: str, gradients: Sequence[Vector]) -> Pending[list[Tensor]]:
        """Start reducing ``gradients`` of the unit ``name``. See `Transport.reduce_scatter`."""
        sent = (gradient.full.nbytes - gradient.local.nbytes for gradient in gradients)
        return self._start(trace.REDUCE, "reduce", name, gradients, sent, self.transport.reduce_scatter)

    def average(
        self, name: str, gradients: Sequence[Vector], means: Pending[list[Tensor]]
    ) -> Pending[list[Tensor]]:
        """Start averaging ``means`` of the unit ``name`` over replicas. See `Transport.average`."""
        sizes = [gradient.local.nbytes for gradient in gradients]
        count(trace.AVERAGE, (2 * size * (self.world - 1) // self.world for size in sizes))
        call = self._call(trace.AVERAGE, name, gradients)
        return self._guarded(call, lambda: self.transport.average(gradients, means))

    def _start(
        self,
        kind: Movement,
        verb: str,
        name: str,
        vectors: Sequence[Vector],
        sent: Iterable[int],
        start: Callable[[Sequence[Vector]], Pending[T]],
    ) -> Pending[T]:
        """Call ``start``. ``verb``: of the profiler's range. ``sent``: bytes that this rank sends."""
        if self.world == 1:
            return start(vectors)
        count(kind, sent)
        call = self._call(kind, name, vectors)
        trace.begin(verb, name)
        pending = self._guarded(call, lambda: start(vectors))
        trace.end(verb, name)
        return pending

    def _guarded(self, call: Collective, start: Callable[[], Pending[T]]) -> Pending[T]:
        """Call ``start`` as part of ``call``, whose guard names the cause of an error."""
        try:
            return start().of(call)
        except RuntimeError as error:  # such as of a connection that the other end has closed
            self.guard.fail(call.position, error)
            raise

    def _call(self, kind: Movement, name: str, vectors: Sequence[Vector]) -> Collective:
        """Post the next collective."""
        return Collective(self.guard, self.guard.post(kind, name), kind, name, vectors[0].full.device)


def gather_texts(text: str, ranks: Ranks) -> list[str]:
    """Return every rank's ``text``, in rank order, on every rank. Collective: two all-reduces."""
    data = text.encode()
    lengths = torch.zeros(ranks.world, dtype=torch.int64, device="cpu")
    lengths[ranks.rank] = len(data)
    ranks.all_reduce(lengths)
    sizes = lengths.tolist()
    joined = torch.zeros(sum(sizes), dtype=torch.uint8, device="cpu")
    joined.split(sizes)[ranks.rank].copy_(torch.frombuffer(bytearray(data + b"\0"), dtype=torch.uint8)[:-1])
    if joined.numel():
        ranks.all_reduce(joined)
    return [part.numpy().tobytes().decode() for part in joined.split(sizes)]


def require_same(lines: Sequence[str], subject: str, ranks: Ranks) -> None:
    """Check that all ranks have the same ``lines``. Collective: two all-reduces of one number.

    Raises ValueError, on every rank, with the first line in which each rank differs from rank 0.
    """
    digest = zlib.crc32("\n".join(lines).encode())
    low, high = (torch.tensor([digest], device="cpu") for _ in range(2))
    ranks.all_reduce(low, "min")
    ranks.all_reduce(high, "max")
    if low.item() == high.item():  # fake tensors know their value if it is one number
        return
    first, *others = (text.split("\n") for text in gather_texts("\n".join(lines), ranks))
    differences = []
    for rank, text in enumerate(others, 1):
        pairs = zip_longest(text, first, fillvalue="no more")
        if differing := [pair for pair in pairs if pair[0] != pair[1]]:
            line, wanted = differing[0]
            differences.append(f"rank {rank} has {line} where rank 0 has {wanted}")
    raise ValueError(f"{subject} differs between ranks: {'; '.join(differences)}")

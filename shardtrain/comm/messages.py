"""Collectives for gloo, built from point-to-point messages, and the tags of all messages.

Gloo's own reduce-scatter is an all-reduce per rank, and its all-gather a ring. Sending every interval
directly to the rank that needs it takes about half the time at tens of megabytes. Two ranks, intervals ``[a
b]``::

    exchange         rank 0 sends rank 1 its part, and rank 1 sends rank 0 its part
                     (a gather: the same part to everyone; an all-to-all: another part to each)
    reduce-scatter   rank 0 sends its values of b, rank 1 its values of a; each merges what it receives
                     with its own: rank 0 gets a = a0 + a1, rank 1 gets b = b0 + b1

Values are merged in one tree (``arithmetic.py``) whichever message came first, so timing changes no result.

Messages longer than ``CHUNK_BYTES`` are sent in chunks. A reduction receives into an inbox of ``WINDOW``
chunks per peer, which is used again and again: a chunk is merged while it is in the cache and the next ones
arrive. At 64 MiB this took 0.5 to 0.9 of the time of one message per peer (2 and 4 ranks on 2 busy cores).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardtrain.comm.arithmetic import merge

CHUNK_BYTES = 2 << 20
WINDOW = 4
FOREVER = timedelta(days=300)


class Mailbox(NamedTuple):
    """A rank's messages within ``group``. Sender and receiver must use the same tag."""

    group: dist.ProcessGroup | None  # None only for a single rank
    rank: int
    world: int
    members: Sequence[int] | None = None  # of ``group``, if not all; ``rank`` and peers count among them
    guarded: bool = False  # `Reports` limits waits: at gloo's own time-out all connections would close

    def peers(self) -> list[int]:
        """Return the other ranks from the next one on, so that not all ranks begin with the same peer."""
        return [(self.rank + step) % self.world for step in range(1, self.world)]

    def wait(self, works: Sequence[dist.Work]) -> None:
        for work in works:
            work.wait(FOREVER) if self.guarded else work.wait()

    def post(self, method: str, vector: torch.Tensor, peer: int, tag: int) -> list[dist.Work]:
        """Start to ``"send"`` or ``"recv"`` the 1-D ``vector``, one message per chunk."""
        # The group's own method, since `dist.irecv` doubles the time of each call.
        post = getattr(self.group, method)
        peer = peer if self.members is None else self.members[peer]
        return [post([vector[span]], peer, tag) for span in chunks(vector.numel(), vector.element_size())]


def start_exchange(
    mailbox: Mailbox, tag: int, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]
) -> Callable[[], None]:
    """Start sending ``outgoing[r]`` to rank ``r`` and filling ``incoming[r]`` with what rank ``r`` sends.

    Returns what waits until that is done.

    ``outgoing``, ``incoming``: ``world`` contiguous 1-D tensors. What one rank sends has as many bytes as
    the other expects. A part without elements is no message.
    """
    works = []
    for peer in mailbox.peers():
        works += mailbox.post("recv", incoming[peer], peer, tag)
    for peer in mailbox.peers():
        works += mailbox.post("send", outgoing[peer], peer, tag)
    sent = outgoing[mailbox.rank]
    received = incoming[mailbox.rank]
    if sent.data_ptr() != received.data_ptr():
        received.copy_(sent)
    return lambda: mailbox.wait(works)


def start_reduce_scatter(
    mailbox: Mailbox,
    tag: int,
    parts: Sequence[torch.Tensor],
    dtype: torch.dtype,
    op: object,
    terms: int = 0,
    out: torch.Tensor | None = None,
) -> Callable[[], torch.Tensor]:
    """Start sending ``parts[r]`` to rank ``r``.

    Returns what waits, and returns all ranks' ``parts[rank]``, merged with ``op``.

    ``op``, ``terms``: see `arithmetic.merge`.
    ``parts``: ``world`` contiguous 1-D tensors, of the same sizes on every rank and of one dtype, but
    ``parts[rank]`` may be wider. ``dtype``: the result's, the widest of theirs or a wider one. ``out``: where
    the result is to be. Receives of further chunks are posted while finishing. Until then no other collective
    between these ranks may use the same tag.
    """
    own_part = parts[mailbox.rank]
    sent = parts[mailbox.rank - 1]
    spans = chunks(own_part.numel(), sent.element_size())
    inbox = open_inbox(sent, mailbox.world, own_part.numel())
    slots = len(inbox)

    def receive(index: int) -> list[dist.Work]:
        places = inbox[index % slots, :, : spans[index].stop - spans[index].start]
        works = []
        for peer in mailbox.peers():
            place = peer - (peer > mailbox.rank)  # in the order of ranks, without this one
            works += mailbox.post("recv", places[place], peer, tag)
        return works

    arriving = deque(receive(index) for index in range(slots))
    sends = []
    for peer in mailbox.peers():
        sends += mailbox.post("send", parts[peer], peer, tag)

    def finish() -> torch.Tensor:
        merged = torch.empty_like(own_part, dtype=dtype) if out is None else out
        for index, span in enumerate(spans):
            mailbox.wait(arriving.popleft())
            own_chunk = own_part[span]
            chunks_by_rank = [place[: own_chunk.numel()] for place in inbox[index % slots]]
            chunks_by_rank.insert(mailbox.rank, own_chunk)
            merge(chunks_by_rank, merged[span], op, terms)
            if index + slots < len(spans):
                arriving.append(receive(index + slots))
        mailbox.wait(sends)
        return merged

    return finish


def open_inbox(like: torch.Tensor, world: int, elements: int) -> torch.Tensor:
    """Return an inbox [slot, peer, element] of ``like``'s dtype, for ``WINDOW`` chunks of each part."""
    spans = chunks(elements, like.element_size())
    return like.new_empty((min(WINDOW, len(spans)), world - 1, spans[0].stop if spans else 0))


def chunks(elements: int, element_size: int) -> list[slice]:
    """Return slices of ``CHUNK_BYTES`` that cover ``elements`` elements, the last one shorter."""
    length = CHUNK_BYTES // element_size
    return [slice(start, min(start + length, elements)) for start in range(0, elements, length)]


# Tags. Messages of one tag between two ranks match in the order in which they are sent and received::
#
#     from        to          what
#     0           2**20 - 1   users' own messages on the same group
#     2**20       2**27 - 1   the engine's collectives: 2**20 hashes at each of 127 positions, in turn
#     2**27       2**28 - 2   reports, four tags per transport: head, pulse, collectives, none
#     2**28 - 1               the row in which a rank announces a public collective
#     2**28       2**31 - 1   public collectives: rank 0's clock in microseconds, repeating after 31 minutes

_HASHES = 1 << 20
_REPORTS = 1 << 27
_POSITIONS = _REPORTS // _HASHES - 1
_CALLS = 1 << 28
ROW = _CALLS - 1


def collective_tag(position: int, digest: int, segment: int) -> int:
    """Return the tag of one segment of the collective at ``position``, up to which ``digest`` is the hash."""
    return (1 + position % _POSITIONS) * _HASHES + (digest + segment) % _HASHES


def report_tag(number: int) -> int:
    """Return the tag of reports of the transport ``number`` (below 2**24), which has the next three, too."""
    return _REPORTS + 4 * number


def call_tag(clock: int) -> int:
    """Return the tag of the public collective that rank 0 called at ``clock`` (microseconds)."""
    return _CALLS + clock % (7 * _CALLS)

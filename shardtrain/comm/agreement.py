"""Exchange texts between ranks, and check that all ranks call the same public collective.

Texts are sent as bytes in small collectives, never as pickles.

Before a public collective moves data, each rank sends every other rank a row of numbers. It describes the
call, or says that this rank's arguments are wrong. All ranks have the same table of rows, so they reach the
same verdict. Known tables are cached. Only a refusal needs texts. Two ranks, one gathering int64 ``[2]``, the
other ``[3]``::

    row of rank 0    0   digest of (all_gather, int64, [2], cpu)   1   16 16   16 16
    row of rank 1    0   another digest                            1   24 24   24 24

On gloo a row is the head of a message, and a part of at most ``EAGER_BYTES`` follows in the same message: a
small call needs no extra round trip. Each receive has room for the longest first message, and gloo accepts a
shorter one, so first messages match whatever ranks call. Longer parts are messages of their own, sent at
once. If ranks disagree that is harmless: tags hold sizes, and a refusal sends or receives the missing
counterparts. On other backends the rows are one small all-gather before the payload, for which the host
waits. Over torch's fake process group, which moves nothing, a rank only checks its own arguments.
"""

from __future__ import annotations

import ctypes
import functools
import zlib
from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain.comm import native
from shardtrain.comm.messages import ROW, TEXT, Mailbox
from shardtrain.comm.transport import Pending, Ranks

_TEXT_BYTES = 1024
_NAMED = 4  # ranks that a refusal names in full
EAGER_BYTES = 1 << 15  # parts up to this size are sent with the row

# Address and bytes of a part in host memory, since a view of torch's costs 10 us where caches are cold.
Part = tuple[int, int]


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


def require_same(lines: Sequence[str], what: str, ranks: Ranks) -> None:
    """Check that all ranks have the same ``lines``. Collective: two all-reduces of one number.

    Raises:
        ValueError: on every rank, with the first line in which each rank differs from rank 0.
    """
    digest = zlib.crc32("\n".join(lines).encode())
    low, high = (torch.tensor([digest], device="cpu") for _ in range(2))
    ranks.all_reduce(low, "min")
    ranks.all_reduce(high, "max")
    if low.item() == high.item():  # fake tensors know their value if it is one number
        return
    first, *others = (text.split("\n") for text in gather_texts("\n".join(lines), ranks))
    odd = []
    for rank, text in enumerate(others, 1):
        pairs = zip_longest(text, first, fillvalue="no more")
        if differing := [pair for pair in pairs if pair[0] != pair[1]]:
            theirs, wanted = differing[0]
            odd.append(f"rank {rank} has {theirs} where rank 0 has {wanted}")
    raise ValueError(f"{what} differs between ranks: {'; '.join(odd)}")


class Agreement:
    """Exchange what ranks are about to call. The constructor starts to send this rank's row.

    ``row``: int64s: whether this rank's arguments are wrong, a digest of what must be the same on every rank,
    whether its payload is sent as messages, then the bytes for each rank, and the bytes from each. ``words``:
    the call in words, or what is wrong with it. ``parts``: one per rank if they are sent as messages.
    """

    def __init__(self, mailbox: Mailbox, row: list[int], words: str, parts: Sequence[Part]) -> None:
        self._mailbox, self._words, self._parts = mailbox, words, parts
        self._row = array("q", row).tobytes()
        group = mailbox.group
        self._alone = group is None or mailbox.world == 1 or not (parts or native.moves_bytes(group))
        if not self._alone:
            self._came, self._pending = self._share(self._row, ROW, parts, EAGER_BYTES)

    def settle(self, moving: Pending) -> None:
        """Wait for all rows. Raises ValueError, the same on every rank, if they do not agree.

        ``moving``: the payload, if it is under way. A refusal completes it first.
        """
        if self._alone:
            if self._row[0]:
                raise ValueError(f"rank {self._mailbox.rank}: {self._words}")
            return
        self._pending.wait()
        rows = rows_of(*(ctypes.string_at(came.data_ptr(), len(self._row)) for came in self._came))
        if rows.agree:
            return
        supplied = rows.supply(self._mailbox)
        moving.wait()
        self._mailbox.wait(supplied)
        came, pending = self._share(self._words.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES), TEXT)
        pending.wait()
        texts = [bytes(text.tolist()).rstrip().decode(errors="replace") for text in came]
        raise ValueError("; ".join(rows.complaints(texts)))

    def arrived(self) -> list[Tensor]:
        """After `settle`, return what followed each rank's row: uint8, padded to the longest part."""
        return [came[len(self._row) :] for came in self._came]

    def deliver(self, into: Sequence[Part]) -> None:
        """Copy the short parts that have arrived, and this rank's own, to ``into``; after `settle`."""
        for rank, (address, size) in enumerate(into):
            if rank == self._mailbox.rank:
                ctypes.memmove(address, self._parts[rank][0], size)
            elif size <= EAGER_BYTES:
                ctypes.memmove(address, self._came[rank].data_ptr() + len(self._row), size)

    def _share(
        self, mine: bytes, tag: int, parts: Sequence[Part] = (), room: int = 0
    ) -> tuple[list[Tensor], Pending]:
        """Start sending ``mine`` to every rank, followed by ``parts[r]`` to rank r if that is short.

        Returns the message from each rank (uint8), with ``room`` bytes after its ``mine``.
        """
        mailbox, group, head = self._mailbox, self._mailbox.group, len(mine)
        assert group is not None, "a rank alone shares nothing"
        own = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        if not parts and not native.has_gloo(group):
            own = own.to(native.device_types(group)[0])
            table = own.new_empty((mailbox.world, head))
            native.all_gather(table.view(-1), own, group)
            return list(table.cpu()), Pending()
        came = [own if peer == mailbox.rank else own.new_empty(head + room) for peer in range(mailbox.world)]
        works = [group.recv([came[peer]], peer, tag) for peer in mailbox.peers()]
        for peer in mailbox.peers():
            address, size = parts[peer] if parts and parts[peer][1] <= EAGER_BYTES else (0, 0)
            message = own.new_empty(head + size)
            ctypes.memmove(message.data_ptr(), mine, head)
            ctypes.memmove(message.data_ptr() + head, address, size)
            works.append(group.send([message], peer, tag))
        return came, Pending(lambda: mailbox.wait(works))


class Rows:
    """Hold all ranks' rows: ``s`` sends ``sent[s][r]`` bytes to ``r``, which expects ``expected[s][r]``."""

    def __init__(self, *rows: bytes) -> None:
        world, table = len(rows), [memoryview(row).cast("q").tolist() for row in rows]
        self.faults, self.digests, self.posted = ([row[column] for row in table] for column in range(3))
        self.sent = [row[3 : 3 + world] for row in table]
        self.expected = [list(column) for column in zip(*(row[3 + world :] for row in table), strict=True)]
        self.agree = not any(self.faults) and len(set(self.digests)) == 1 and self.sent == self.expected

    def supply(self, mailbox: Mailbox) -> list[dist.Work]:
        """Post the counterpart of every message to or from this rank that has none, with any content.

        If rank 0 sends 48,000 bytes to rank 1, which expects 64,000, then rank 1 also receives 48,000, and
        rank 0 also sends 64,000.
        """
        works = []
        for peer in mailbox.peers():
            for sender, receiver in ((peer, mailbox.rank), (mailbox.rank, peer)):
                sent = self.sent[sender][receiver] * self.posted[sender]
                wanted = self.expected[sender][receiver] * self.posted[receiver]
                sent, wanted = (size if size > EAGER_BYTES else 0 for size in (sent, wanted))
                if sent != wanted:
                    method, size = ("recv", sent) if sender == peer else ("send", wanted)
                    works += mailbox.post(method, torch.zeros(size, dtype=torch.uint8), peer)
        return works

    def complaints(self, texts: list[str]) -> list[str]:
        """Return one sentence per rank that differs, at most ``_NAMED`` of them."""
        usual = Counter(self.digests).most_common(1)[0][0]
        model, every = self.digests.index(usual), range(len(texts))
        found = [f"rank {rank}: {texts[rank]}" for rank in every if self.faults[rank]] or [
            f"rank {rank}: expected the same as on rank {model}, {texts[model]}, found {texts[rank]}"
            for rank in every
            if self.digests[rank] != usual
        ]
        if found:
            more = len(found) - _NAMED
            return [*found[:_NAMED], f"and {more} more ranks"] if more > 0 else found
        s, r = next((s, r) for s in every for r in every if self.sent[s][r] != self.expected[s][r])
        wanted = f"rank {r}: expected {self.expected[s][r]} bytes from rank {s} ({texts[r]})"
        return [f"{wanted}, found that rank {s} sends it {self.sent[s][r]} ({texts[s]})"]


rows_of = functools.lru_cache(maxsize=1024)(Rows)

"""Texts between ranks, and how they find out whether they all mean the same.

Texts travel as bytes in small collectives, never as pickles.

In a public collective every rank sends every other one a row of numbers: what it is about to do, or that its
arguments are wrong. All ranks judge the same table, so they come to the same verdict. Only a refusal needs
texts. Two ranks, one gathering int64 ``[2]`` and the other ``[3]``::

    row of rank 0    0   digest of (all_gather, int64, [2], cpu)   1   16 16   16 16
    row of rank 1    0   another digest                            1   24 24   24 24

On gloo rows are messages, and the payload does not wait for them, since one more round of messages costs
milliseconds on busy machines. Where ranks disagree it does no harm: tags hold sizes, so only messages of one
size meet, and a refusal sends or receives what has no counterpart. On other backends the rows are one small
all-gather before the payload, for which the host waits. Over torch's fake process group, which moves nothing,
a rank checks its own arguments only.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain.comm import native
from shardtrain.comm.messages import ROW, TEXT, Mailbox, start_exchange
from shardtrain.comm.transport import Pending, Ranks

_TEXT_BYTES = 1024
_NAMED = 4  # ranks that a refusal names in full


def broadcast_text(text: str, ranks: Ranks, device: torch.device, src: int = 0) -> str:
    """Return rank ``src``'s ``text`` on every rank; an empty one where ``src`` is only simulated."""
    return gather_texts(text if ranks.rank == src else "", ranks, device)[src]


def gather_texts(text: str, ranks: Ranks, device: torch.device) -> list[str]:
    """Return every rank's ``text``, in rank order, on every rank, by two all-reduces."""
    data = text.encode()
    lengths = torch.zeros(ranks.world, dtype=torch.int64)
    lengths[ranks.rank] = len(data)
    lengths = lengths.to(device)
    ranks.all_reduce(lengths)
    sizes = lengths.tolist()
    joined = torch.zeros(sum(sizes), dtype=torch.uint8)
    joined.split(sizes)[ranks.rank].copy_(torch.frombuffer(bytearray(data + b"\0"), dtype=torch.uint8)[:-1])
    joined = joined.to(device)
    if joined.numel():
        ranks.all_reduce(joined)
    return [part.cpu().numpy().tobytes().decode() for part in joined.split(sizes)]


def require_same(lines: Sequence[str], what: str, ranks: Ranks, device: torch.device) -> None:
    """Return if all ranks have the same ``lines``. Collective: two all-reduces of one number.

    Raises:
        ValueError: they differ; on every rank, with the first line in which each differs from rank 0.
    """
    digest = zlib.crc32("\n".join(lines).encode())
    low, high = (torch.tensor([digest], device=device) for _ in range(2))
    ranks.all_reduce(low, "min")
    ranks.all_reduce(high, "max")
    if low.item() == high.item():
        return
    first, *others = (text.split("\n") for text in gather_texts("\n".join(lines), ranks, device))
    odd = []
    for rank, text in enumerate(others, 1):
        pairs = zip_longest(text, first, fillvalue="no more")
        theirs, wanted = next(((a, b) for a, b in pairs if a != b), ("", ""))
        odd += [f"rank {rank} has {theirs} where rank 0 has {wanted}"] if theirs != wanted else []
    raise ValueError(f"{what} differs between ranks: {'; '.join(odd)}")


class Agreement:
    """What all ranks say that they are about to do; their rows are on their way from construction on.

    ``row``: whether this rank is at fault, a digest of what must be the same on every rank, whether its
    payload goes as messages and at once, then bytes for each rank, and bytes from each. ``words``: returns
    the call in words, or what is wrong with it.
    """

    def __init__(self, mailbox: Mailbox, row: list[int], words: Callable[[], str]) -> None:
        self._mailbox, self._row, self._words = mailbox, row, words
        self._alone = mailbox.group is None or mailbox.world == 1 or not native.moves_bytes(mailbox.group)
        if not self._alone:
            self._table, self._pending = self._share(torch.tensor(row, dtype=torch.int64), ROW)

    def settle(self, moving: Pending) -> None:
        """Wait for all rows; raise the refusal that every rank raises, if there is one.

        ``moving``: the payload, if it is under way already. A refusal completes it first.
        """
        if self._alone:
            if self._row[0]:
                raise ValueError(f"rank {self._mailbox.rank}: {self._words()}")
            return
        self._pending.wait()
        rows = Rows(self._table.tolist())
        if any(rows.faults) or len(set(rows.digests)) > 1 or rows.sent != rows.expected:
            supplied = rows.supply(self._mailbox)
            moving.wait()
            self._mailbox.wait(supplied)
            raise ValueError("; ".join(rows.complaints(self._texts())))

    def _texts(self) -> list[str]:
        """Gather every rank's call in words."""
        words = self._words().encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        table, pending = self._share(torch.frombuffer(bytearray(words), dtype=torch.uint8), TEXT)
        pending.wait()
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in table]

    def _share(self, mine: Tensor, tag: int) -> tuple[Tensor, Pending]:
        """Start sending ``mine`` to every rank; return the table ``[world, len(mine)]`` of all ranks'."""
        world, group = self._mailbox.world, self._mailbox.group
        assert group is not None, "a rank alone shares nothing"
        if native.has_gloo(group):
            table = mine.new_empty((world, mine.numel()))
            return table, start_exchange(self._mailbox, tag, [mine] * world, list(table))
        mine = mine.to(native.device_types(group)[0])
        table = mine.new_empty((world, mine.numel()))
        native.all_gather(table.view(-1), mine, group)
        return table, Pending()


class Rows:
    """All ranks' rows: ``s`` sends ``sent[s][r]`` bytes to ``r``, which expects ``expected[s][r]``."""

    def __init__(self, table: list[list[int]]) -> None:
        world = len(table)
        self.faults, self.digests, self.posted = ([row[column] for row in table] for column in range(3))
        self.sent = [row[3 : 3 + world] for row in table]
        self.expected = [list(column) for column in zip(*(row[3 + world :] for row in table), strict=True)]

    def supply(self, mailbox: Mailbox) -> list[dist.Work]:
        """Post the counterpart, of any content, of every message to or from this rank that has none.

        If rank 0 sends 16 bytes to rank 1, which expects 24: rank 1 receives 16 more, rank 0 sends 24 more.
        """
        works = []
        for peer in mailbox.peers():
            for sender, receiver in ((peer, mailbox.rank), (mailbox.rank, peer)):
                sent = self.sent[sender][receiver] * self.posted[sender]
                wanted = self.expected[sender][receiver] * self.posted[receiver]
                if sent != wanted:
                    transfer = mailbox.receive if sender == peer else mailbox.send
                    scratch = torch.zeros(sent if sender == peer else wanted, dtype=torch.uint8)
                    works += transfer(scratch, peer)
        return works

    def complaints(self, texts: list[str]) -> list[str]:
        """Return one sentence for each rank at odds, the first few of them."""
        usual = Counter(self.digests).most_common(1)[0][0]
        model = self.digests.index(usual)
        found = [f"rank {rank}: {texts[rank]}" for rank, fault in enumerate(self.faults) if fault] or [
            f"rank {rank}: expected the same as on rank {model}, {texts[model]}, found {texts[rank]}"
            for rank, digest in enumerate(self.digests)
            if digest != usual
        ]
        more = [f"and {len(found) - _NAMED} more ranks"] if len(found) > _NAMED else []
        return [*found[:_NAMED], *more] or [self._mismatch(texts)]

    def _mismatch(self, texts: list[str]) -> str:
        """Name the first two ranks of which one sends another number of bytes than the other expects."""
        every = range(len(texts))
        pairs = ((s, r) for s in every for r in every if self.sent[s][r] != self.expected[s][r])
        sender, receiver = next(pairs)
        return (
            f"rank {receiver}: expected {self.expected[sender][receiver]} bytes from rank {sender} "
            f"({texts[receiver]}), found that rank {sender} sends it {self.sent[sender][receiver]} "
            f"({texts[sender]})"
        )

"""How the ranks of a public collective find out whether they all mean the same call.

Every rank tells every other, in one small message of fixed size, what it is about to do. All ranks then
judge the same table, so they agree without another word: go on, or refuse. Only when they refuse do they
exchange texts, and every rank raises the same ``ValueError``, saying which rank, what was expected and
what was found. A rank whose own arguments are no good says so in its row and takes part to the end:
raising at once would leave the others waiting for it.

Two ranks, one gathering int64 ``[2]`` and the other ``[3]``::

    row of rank 0    0   digest of ("all_gather", int64, [2], "cpu")   1   16 16   16 16
    row of rank 1    0   another digest                                1   24 24   24 24

On gloo the rows are messages, and the payload is not held up for them: a round of messages more costs
milliseconds on busy machines. So payloads must not do harm where ranks disagree. Their messages are
tagged with their size, and only messages of one size meet; a refusal then finds from the rows which ones
have no counterpart, and supplies it. Nothing is left behind, and the group stays usable.

On other backends the rows are one small all-gather on the backend's device before the payload, which the
host waits for: some tens of microseconds, and the calls of that group issued earlier. Over torch's fake
process group, which moves nothing, a rank looks at its own arguments only.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardtrain.comm import native
from shardtrain.comm.messages import ROW, TEXT, Mailbox, size_tag, start_exchange, wait_all
from shardtrain.comm.transport import Pending

_TEXT_BYTES = 1024
_NAMED = 4  # ranks that a refusal names in full


def by_size(part: torch.Tensor) -> int:
    """The tag of a payload: messages of different sizes never meet, whatever their ranks believe."""
    return size_tag(part.nbytes)


class Claim(NamedTuple):
    """What one rank is about to do.

    ``signature``: what must be the same on every rank. ``sends[r]``, ``expects[r]``: bytes for and from
    rank ``r``; zeros if nothing can be done. ``posted``: whether they go as messages, and at once.
    ``text``: the call in words, or if ``fault``, why it cannot be done.
    """

    signature: tuple[object, ...]
    sends: Sequence[int]
    expects: Sequence[int]
    text: Callable[[], str]
    posted: bool = False
    fault: bool = False


class _Row(NamedTuple):
    """What the others know of a rank's claim."""

    fault: int
    digest: int
    posted: int
    sends: list[int]
    expects: list[int]

    @classmethod
    def of(cls, numbers: list[int]) -> _Row:
        counts = numbers[3:]
        return cls(numbers[0], numbers[1], numbers[2], counts[: len(counts) // 2], counts[len(counts) // 2 :])


class Agreement:
    """One call's rows, under way from construction on."""

    def __init__(self, mailbox: Mailbox, claim: Claim) -> None:
        self._mailbox, self._claim = mailbox, claim
        self._alone = mailbox.group is None or mailbox.world == 1 or not native.moves_bytes(mailbox.group)
        if self._alone:
            return
        digest = zlib.crc32(repr(claim.signature).encode())
        row = [claim.fault, digest, claim.posted, *claim.sends, *claim.expects]
        self._table, self._pending = self._share(torch.tensor(row, dtype=torch.int64), ROW)

    def settle(self, moving: Pending) -> None:
        """Wait for all rows; raise the refusal that every rank raises, if there is one.

        ``moving``: the payload, if it is under way already. A refusal completes it first.
        """
        if self._alone:
            if self._claim.fault:
                raise ValueError(f"refused on every rank: rank {self._mailbox.rank}: {self._claim.text()}")
            return
        self._pending.wait()
        rows = [_Row.of(numbers) for numbers in self._table.tolist()]
        if any(row.fault for row in rows) or len({row.digest for row in rows}) > 1 or _first_crossing(rows):
            supplied = _supply(self._mailbox, rows)
            moving.wait()
            wait_all(supplied)
            raise ValueError("refused on every rank: " + "; ".join(_complaints(rows, self._texts())))

    def _texts(self) -> list[str]:
        """Every rank's call in words."""
        words = self._claim.text().encode()[:_TEXT_BYTES]
        mine = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        mine[: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        table, pending = self._share(mine, TEXT)
        pending.wait()
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in table]

    def _share(self, mine: torch.Tensor, tag: int) -> tuple[torch.Tensor, Pending]:
        """Start sending ``mine`` to every rank; the table ``[world, len(mine)]`` of what all of them send."""
        world, group = self._mailbox.world, self._mailbox.group
        assert group is not None, "a rank alone shares nothing"
        if native.has_gloo(group):
            table = mine.new_empty((world, mine.numel()))
            return table, start_exchange(self._mailbox, lambda _: tag, [mine] * world, list(table))
        mine = mine.to(native.device_types(group)[0])
        table = mine.new_empty((world, mine.numel()))
        native.all_gather(table.view(-1), mine, group)
        return table, Pending()


def _supply(mailbox: Mailbox, rows: list[_Row]) -> list[dist.Work]:
    """Post the counterpart, of any content, of every message to or from this rank that has none.

    If rank 0 sends 16 bytes to rank 1, which expects 24: rank 1 receives 16 more, rank 0 sends 24 more.
    """
    rank = mailbox.rank
    works = []
    for peer in mailbox.peers():
        sent, wanted = (
            _posted(rows[peer].sends[rank], rows[peer]),
            _posted(rows[rank].expects[peer], rows[rank]),
        )
        if sent != wanted:
            scratch = torch.empty(sent, dtype=torch.uint8)
            works += mailbox.receive(scratch, peer, by_size(scratch))
        sent, wanted = (
            _posted(rows[rank].sends[peer], rows[rank]),
            _posted(rows[peer].expects[rank], rows[peer]),
        )
        if sent != wanted:
            scratch = torch.zeros(wanted, dtype=torch.uint8)
            works += mailbox.send(scratch, peer, by_size(scratch))
    return works


def _posted(size: int, row: _Row) -> int:
    return size if row.posted else 0


def _first_crossing(rows: list[_Row]) -> tuple[int, int] | None:
    """The first pair of ranks of which one sends another number of bytes than the other expects."""
    for sender, row in enumerate(rows):
        for receiver, sent in enumerate(row.sends):
            if sent != rows[receiver].expects[sender]:
                return sender, receiver
    return None


def _complaints(rows: list[_Row], texts: list[str]) -> list[str]:
    """One sentence for each rank that is at odds, the first few of them."""
    found = [f"rank {rank}: {texts[rank]}" for rank, row in enumerate(rows) if row.fault]
    found = found or _odd_ones_out(rows, texts) or [_mismatch(rows, texts)]
    more = [f"and {len(found) - _NAMED} more ranks"] if len(found) > _NAMED else []
    return found[:_NAMED] + more


def _odd_ones_out(rows: list[_Row], texts: list[str]) -> list[str]:
    usual = Counter(row.digest for row in rows).most_common(1)[0][0]
    model = next(rank for rank, row in enumerate(rows) if row.digest == usual)
    return [
        f"rank {rank}: expected the same as on rank {model}, {texts[model]}, found {texts[rank]}"
        for rank, row in enumerate(rows)
        if row.digest != usual
    ]


def _mismatch(rows: list[_Row], texts: list[str]) -> str:
    crossing = _first_crossing(rows)
    assert crossing is not None, "a refusal has a reason"
    sender, receiver = crossing
    return (
        f"rank {receiver}: expected {rows[receiver].expects[sender]} bytes from rank {sender} "
        f"({texts[receiver]}), found that rank {sender} sends it {rows[sender].sends[receiver]} "
        f"({texts[sender]})"
    )

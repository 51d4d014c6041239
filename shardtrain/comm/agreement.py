"""Before anything moves, the ranks of a public collective find out whether they all mean the same call.

Every rank tells every other, in one small message of fixed size, what it is about to do. All ranks then
judge the same table, so they agree without another word: go on, or refuse. Only when they refuse do they
exchange texts, and every rank raises the same ``ValueError``, saying which rank, what was expected and
what was found. A rank whose own arguments are no good says so in its row and takes part to the end:
raising at once would leave the others waiting for it.

Two ranks, one gathering int64 ``[2]`` and the other ``[3]``::

    row of rank 0    0   digest of ("all_gather_into_tensor", int64, [2], cpu)   ticket   counts
    row of rank 1    0   another digest                                          ticket   counts

On gloo the rows are messages; the payload is posted when they have come, so a refusal leaves nothing
behind and the group stays usable. On other backends the rows are one small all-gather on the tensors'
device, which the host waits for: some tens of microseconds, and the calls of that group issued earlier.
Over torch's fake process group, which moves nothing, a rank hears only itself.
"""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from shardtrain.comm import native
from shardtrain.comm.messages import Mailbox, start_exchange
from shardtrain.comm.transport import Pending

# Tags of rows, texts and payloads, out of the way of the engine's tags (below) and of small user tags.
_ROW_TAG = 1 << 29
_TEXT_TAG = _ROW_TAG + 1
_FIRST_TICKET_TAG = 1 << 30
_TICKETS = (1 << 30) - 1
_TEXT_BYTES = 1024
_NAMED = 4

# Numbers this process's calls, so that the messages of calls under way at the same time keep apart. The
# number travels in the row, so ranks need not count alike.
_tickets = itertools.count()


class Claim(NamedTuple):
    """What one rank is about to do.

    ``signature``: what must be the same on every rank. ``sends[r]``, ``expects[r]``: elements for and from
    rank ``r``, where ranks may differ. ``text``: the call in words. ``fault``: why it cannot be done.
    """

    signature: tuple[object, ...] = ()
    sends: Sequence[int] = ()
    expects: Sequence[int] = ()
    text: Callable[[], str] = str
    fault: str | None = None


class Agreement:
    """One call's rows, under way from construction on."""

    def __init__(self, mailbox: Mailbox, claim: Claim) -> None:
        self._mailbox, self._claim = mailbox, claim
        row = [claim.fault is not None, zlib.crc32(repr(claim.signature).encode()), next(_tickets) % _TICKETS]
        row += [*claim.sends, *claim.expects] or [0] * (2 * mailbox.world)
        mine = torch.tensor(row, dtype=torch.int64)
        self._table, self._pending = self._share(mine, _ROW_TAG)

    def settle(self) -> list[int]:
        """Wait for all rows; the tags of every rank's payload, or the refusal that every rank raises."""
        self._pending.wait()
        rows = self._table.tolist()
        if any(row[0] for row in rows) or len({row[1] for row in rows}) > 1 or _first_crossing(rows):
            raise ValueError(self._refusal(rows))
        return [_FIRST_TICKET_TAG + row[2] for row in rows]

    def _refusal(self, rows: list[list[int]]) -> str:
        claim = self._claim
        words = (claim.fault if claim.fault is not None else claim.text()).encode()[:_TEXT_BYTES]
        mine = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        mine[: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        table, pending = self._share(mine, _TEXT_TAG)
        pending.wait()
        texts = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in table]
        return "refused on every rank: " + "; ".join(_complaints(rows, texts))

    def _share(self, mine: torch.Tensor, tag: int) -> tuple[torch.Tensor, Pending]:
        """Start sending ``mine`` to every rank; the table ``[world, len(mine)]`` of what all of them send."""
        world = self._mailbox.world
        group = self._mailbox.group
        if group is None or world == 1 or not native.moves_bytes(group):
            return mine.expand(world, -1), Pending()
        if native.has_gloo(group):
            table = mine.new_empty((world, mine.numel()))
            return table, start_exchange(self._mailbox, [tag] * world, [mine] * world, list(table))
        mine = mine.to(native.device_types(group)[0])
        table = mine.new_empty((world, mine.numel()))
        native.all_gather(table.view(-1), mine, group)
        return table, Pending()


def _first_crossing(rows: list[list[int]]) -> tuple[int, int] | None:
    """The first pair of ranks of which one sends another number of elements than the other expects."""
    world = len(rows)
    for sender, row in enumerate(rows):
        for receiver in range(world):
            if row[3 + receiver] != rows[receiver][3 + world + sender]:
                return sender, receiver
    return None


def _complaints(rows: list[list[int]], texts: list[str]) -> list[str]:
    """One sentence for each rank that is at odds, the first few of them."""
    world = len(rows)
    found = [f"rank {rank}: {texts[rank]}" for rank, row in enumerate(rows) if row[0]]
    if not found:
        usual = Counter(row[1] for row in rows).most_common(1)[0][0]
        model = next(rank for rank, row in enumerate(rows) if row[1] == usual)
        found = [
            f"rank {rank}: expected the same as on rank {model}, {texts[model]}, found {texts[rank]}"
            for rank, row in enumerate(rows)
            if row[1] != usual
        ]
    if not found:
        crossing = _first_crossing(rows)
        assert crossing is not None, "a refusal has a reason"
        sender, receiver = crossing
        sent, expected = rows[sender][3 + receiver], rows[receiver][3 + world + sender]
        found = [
            f"rank {receiver}: expected {expected} elements from rank {sender} ({texts[receiver]}), "
            f"found that rank {sender} sends it {sent} ({texts[sender]})"
        ]
    more = [f"and {len(found) - _NAMED} more ranks"] if len(found) > _NAMED else []
    return found[:_NAMED] + more

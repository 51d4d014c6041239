"""The check that all ranks call the same public collective.

Before a collective moves data, one small all-gather gives each rank the row of every rank. A row describes
the call, or says that this rank's arguments are wrong. All ranks have the same rows, so they reach the same
verdict. After a refusal nothing has been sent, and the group is as good as before. Two ranks, one gathering
int64 ``[2]``, the other ``[3]``::

    row of rank 0    right   digest of (all_gather, int64, [2], cpu)   sends 16 16   expects 16 16   its text
    row of rank 1    right   another digest                            sends 24 24   expects 24 24   its text

Rows move over gloo where the group has it, and the host does not wait for an accelerator. Over torch's fake
process group, which moves nothing, a rank only checks its own arguments.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardtrain.comm import backends
from shardtrain.comm.messages import ROW, Mailbox, call_tag, start_exchange

_WORDS = 1024  # characters of a rank's words that others get
_NAMED = 4  # ranks that a refusal names in full


class Row(NamedTuple):
    """A rank's description, for the other ranks, of what it is about to call."""

    words: str  # the call in words, or what is wrong with its arguments
    is_wrong: bool
    digest: int  # of what must be the same on every rank
    sent: list[int]  # the bytes for each rank
    expected: list[int]  # the bytes from each rank
    clock: int = 0  # microseconds as it was packed. No two calls have the same: rank 0's identifies the call


def start_sharing(row: Row, group: dist.ProcessGroup | None, rank: int) -> Callable[[], dict[int, Row]]:
    """Start sending ``row`` to every rank. Return a function that waits for all rows, by rank.

    Without ranks to ask, these are only this rank's ``row``.
    """
    if group is None or group.size() == 1 or not backends.moves_bytes(group):
        return lambda: {rank: row}
    world = group.size()
    has_gloo = backends.has_gloo(group)
    device = "cpu" if has_gloo else backends.device_types(group)[0]
    # Printable ASCII takes at most two bytes per character, and a number 24, so all rows have one length.
    row = row._replace(words=ascii(row.words)[1:-1][:_WORDS], clock=time.perf_counter_ns() // 1000)
    data = json.dumps(row).encode().ljust(2 * _WORDS + 24 * (2 * world + 3))
    packed = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    table = packed.new_empty((world, len(packed)))
    finish: Callable[[], None] | None = None
    if has_gloo:
        # A third faster than gloo's own all-gather, and posted in the order of the calls as well.
        finish = start_exchange(Mailbox(group, rank, world), ROW, [packed] * world, [*table])
    else:
        backends.all_gather(table.view(-1), packed, group)

    def wait() -> dict[int, Row]:
        if finish is not None:
            finish()
        return {other: Row(*json.loads(each.numpy().tobytes())) for other, each in enumerate(table.cpu())}

    return wait


def check_agreement(name: str, rows: Mapping[int, Row]) -> int:
    """Return the tag of the messages of the collective ``name``, which all ``rows`` describe.

    Raises ValueError, the same on every rank, if they do not.
    """
    complaints = [f"rank {rank}: {row.words}" for rank, row in rows.items() if row.is_wrong]
    complaints = complaints or _differences(rows)
    if (omitted := len(complaints) - _NAMED) > 0:
        complaints[_NAMED:] = [f"and {omitted} more ranks"]
    if complaints:
        raise ValueError(f"{name} refused on every rank: {'; '.join(complaints)}")
    return call_tag(next(iter(rows.values())).clock)


def _differences(rows: Mapping[int, Row]) -> list[str]:
    """Return one sentence per rank that calls something else than most; else the first size that differs."""
    usual = Counter(row.digest for row in rows.values()).most_common(1)[0][0]
    model = next(rank for rank, row in rows.items() if row.digest == usual)
    deviating = [(rank, row) for rank, row in rows.items() if row.digest != usual]
    if deviating:
        expected = f"expected the same as on rank {model}, {rows[model].words}"
        return [f"rank {rank}: {expected}, found {row.words}" for rank, row in deviating]
    for r, receiver in rows.items():
        for s, sender in rows.items():
            sent = sender.sent[r]
            wanted = receiver.expected[s]
            if sent != wanted:
                expected = f"expected {wanted} bytes from rank {s} ({receiver.words})"
                return [f"rank {r}: {expected}, found that rank {s} sends it {sent} ({sender.words})"]
    return []

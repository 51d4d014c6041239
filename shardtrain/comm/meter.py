"""Counts what this rank puts on the wire, by the kind of movement that was asked for.

A movement is counted under its own name whatever carried it: a gather built from point-to-point
messages is one ``all_gather``. Bytes are those this rank sends: N ranks gathering K bytes in all send
(N-1)/N * K bytes each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


class Meter:
    """``calls[kind]`` and ``bytes[kind]`` of this rank, for the kinds in ``KINDS``."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()


# The one piece of process-wide state: `meter()` takes no argument, and backward runs in other threads,
# so the open meters can live neither in an engine nor in a context variable.
_open: list[Meter] = []


@contextmanager
def meter() -> Iterator[Meter]:
    """Count every movement of this process inside the ``with`` block. Meters may be nested."""
    current = Meter()
    _open.append(current)
    try:
        yield current
    finally:
        _open.remove(current)


def count(kind: str, sent: int) -> None:
    """Add one movement of ``kind`` in which this rank sends ``sent`` bytes."""
    for current in _open:
        current.calls[kind] += 1
        current.bytes[kind] += sent

"""Count what this rank sends and how long it waits for others, by the kind of collective.

A collective is counted under its own name whatever carried it: a gather built from point-to-point messages is
one ``all_gather``. N ranks gathering K bytes in all send (N-1)/N * K bytes each.

Communication that computation does not hide is *exposed*: the time from asking for a collective's result
until it is there, on the CPU with the summation. On an accelerator it is the time for which the compute
stream waits, measured by events, so that the host does not wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from shardtrain import device as devices
from shardtrain.comm import trace
from shardtrain.comm.trace import Movement


class Wait(NamedTuple):
    """Name a wait: the collective's kind as it is counted, the unit, and `Meter.during` at that time."""

    kind: str
    unit: str
    during: str = ""


class Meter:
    """Hold this rank's traffic while the meter is open.

    ``calls[kind]``, ``bytes[kind]``: collectives and bytes sent, for kinds such as ``"all_gather"``: see
    `Movement.counted`. ``during``: what its owner is doing, by which waits are grouped.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.during = ""
        self._seconds: dict[Wait, float] = {}
        self._moments: list[tuple[Wait, Any, Any]] = []  # begins and ends not yet added to the seconds

    def exposed(self) -> dict[Wait, float]:
        """Return seconds of exposed communication. The host waits for an accelerator."""
        for what, start, end in self._moments:
            self._seconds[what] = self._seconds.get(what, 0.0) + devices.seconds(start, end)
        self._moments.clear()
        return self._seconds


# The one piece of process-wide state: `meter()` takes no argument, and backward runs in other threads,
# so the open meters can live neither in an engine nor in a context variable.
_open: list[Meter] = []


@contextmanager
def meter() -> Iterator[Meter]:
    """Count every collective of this process inside the ``with`` block. Meters may be nested."""
    current = Meter()
    _open.append(current)
    try:
        yield current
    finally:
        _open.remove(current)


def count(movement: Movement, sent: Iterable[int]) -> None:
    """Count one ``movement`` in which this rank sends ``sent`` bytes. Sums them only if a meter is open."""
    if not _open:
        return
    total = sum(sent)
    for current in _open:
        current.calls[movement.counted] += 1
        current.bytes[movement.counted] += total


@contextmanager
def waiting(movement: Movement, unit: str, device: torch.device, ended: Any = None) -> Iterator[None]:
    """Count the block as a wait on ``device`` for a collective of ``unit``, unless it raises.

    ``ended``: the moment at which the collective ends, if that differs from the block's end: see `Pending`.
    """
    if not (_open or trace.opened):
        yield
        return
    start = devices.moment(device)
    yield
    end = devices.moment(device)
    for meter in _open:
        meter._moments.append((Wait(movement.counted, unit, meter.during), start, end))
        if isinstance(start, float):  # add at once, since a meter may be open for a whole run
            meter.exposed()
    for current in trace.opened:
        current.noted.append(("wait", f"{movement.counted} of {unit}", start, end))
    trace.end(movement.traced, unit, ended)

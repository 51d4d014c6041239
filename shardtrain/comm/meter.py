"""Counts what this rank sends and how long it waits for others, by the kind of movement.

A movement is counted under its own name whatever carried it: a gather built from point-to-point messages is
one ``all_gather``. N ranks gathering K bytes in all send (N-1)/N * K bytes each.

A wait that computation does not hide is *exposed*: the time between asking for a movement's result and having
it, with adding up what came on the CPU. On an accelerator it is the time that the compute stream stands
still, measured by events, so that the host need not stop.
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
    """What was waited for: a `Movement`, as it is counted, and the unit's name; and `Meter.during` then."""

    kind: str
    unit: str
    during: str = ""


class Meter:
    """This rank's traffic while the meter is open.

    ``calls[kind]``, ``bytes[kind]``: movements and bytes sent, for kinds such as ``"all_gather"``: see
    `Movement.counted`. ``during``: what its owner is doing; waits are filed under it.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.during = ""
        self._seconds: dict[Wait, float] = {}
        self._moments: list[tuple[Wait, Any, Any]] = []  # what is not among the seconds yet

    def exposed(self) -> dict[Wait, float]:
        """Return seconds of exposed communication; the host waits for an accelerator."""
        for what, start, end in self._moments:
            self._seconds[what] = self._seconds.get(what, 0.0) + devices.seconds(start, end)
        self._moments.clear()
        return self._seconds

    def add_wait(self, movement: Movement, unit: str, start: Any, end: Any) -> None:
        """Add a wait between two moments."""
        self._moments.append((Wait(movement.counted, unit, self.during), start, end))
        if isinstance(start, float):  # at once: a meter may be open for as long as a run
            self.exposed()


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


def count(movement: Movement, sent: Iterable[int]) -> None:
    """Add one ``movement`` in which this rank sends ``sent`` bytes, added up if anyone counts."""
    if not _open:
        return
    total = sum(sent)
    for current in _open:
        current.calls[movement.counted] += 1
        current.bytes[movement.counted] += total


@contextmanager
def waiting(movement: Movement, unit: str, device: torch.device, ended: Any = None) -> Iterator[None]:
    """Count the block as waiting on ``device`` for a movement of ``unit``, unless it ends in an error.

    ``ended``: the moment at which the movement itself ends, if it is another: see `Pending`.
    """
    if not (_open or trace.opened):
        yield
        return
    start = devices.moment(device)
    yield
    end = devices.moment(device)
    for meter in _open:
        meter.add_wait(movement, unit, start, end)
    for current in trace.opened:
        current.noted.append(("wait", f"{movement.counted} of {unit}", start, end))
    trace.end(movement.traced, unit, ended)

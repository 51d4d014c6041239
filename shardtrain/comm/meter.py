"""Counts what this rank sends and how long it waits for others, by the kind of movement.

A movement is counted under its own name whatever carried it: a gather built from point-to-point messages is
one ``all_gather``. Bytes are those that this rank sends: N ranks gathering K bytes in all send (N-1)/N * K
bytes each.

A wait that computation does not hide is *exposed*: the time between asking for a movement's result and having
it. On the CPU that includes adding up what came. On an accelerator it is the time that the compute stream
stands still, measured by events, so that the host need not stop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from shardtrain import device as devices
from shardtrain.comm import trace
from shardtrain.comm.movement import Movement


class Wait(NamedTuple):
    """What was waited for: a `Movement`, as it is counted, and the unit's name."""

    kind: str
    unit: str


class Meter:
    """This rank's traffic while the meter is open.

    ``calls[kind]``, ``bytes[kind]``: movements and bytes sent, for kinds such as ``"all_gather"``: see
    `Movement.counted`. ``during``: what its owner is doing; waits are filed under it.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.during = ""
        self._seconds: dict[tuple[str, Wait], float] = {}
        self._on_device: list[tuple[str, Wait, Any, Any]] = []  # between two moments

    def exposed(self) -> dict[Wait, float]:
        """Return seconds of exposed communication by kind and unit; the host waits for an accelerator."""
        sums: dict[Wait, float] = {}
        for (_, what), seconds in self._waits().items():
            sums[what] = sums.get(what, 0.0) + seconds
        return sums

    def exposed_during(self) -> dict[str, float]:
        """Return the same by what the owner was doing."""
        sums: dict[str, float] = {}
        for (during, _), seconds in self._waits().items():
            sums[during] = sums.get(during, 0.0) + seconds
        return sums

    def add_wait(self, what: Wait, start: Any, end: Any) -> None:
        """Add a wait between two moments."""
        self._on_device.append((self.during, what, start, end))
        if isinstance(start, float):  # at once: a meter may be open for as long as a run
            self._waits()

    def _waits(self) -> dict[tuple[str, Wait], float]:
        for during, what, start, end in self._on_device:
            key = during, what
            self._seconds[key] = self._seconds.get(key, 0.0) + devices.seconds(start, end)
        self._on_device.clear()
        return self._seconds


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


def waiting(movement: Movement, unit: str, device: torch.device) -> AbstractContextManager[None]:
    """Count the block as waiting on ``device`` for a movement of ``unit``, and end its span after it."""
    return _Timed(movement, unit, device) if _open or trace.is_open() else _UNTIMED


_UNTIMED = nullcontext()


class _Timed(AbstractContextManager[None]):
    """Counts the time in it, unless that ends in an error. A step has dozens, so it is no generator."""

    def __init__(self, movement: Movement, unit: str, device: torch.device) -> None:
        self._movement, self._unit, self._device = movement, unit, device

    def __enter__(self) -> None:
        self._start = devices.moment(self._device)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        end = devices.moment(self._device)
        for current in _open:
            current.add_wait(Wait(self._movement.counted, self._unit), self._start, end)
        trace.note("wait", f"{self._movement.counted} of {self._unit}", self._start, end)
        if self._movement.traced:
            trace.end(self._movement.traced, self._unit)

"""Counts what this rank puts on the wire and how long it waits for others, by the kind of movement.

A movement is counted under its own name whatever carried it: a gather built from point-to-point
messages is one ``all_gather``. Bytes are those this rank sends: N ranks gathering K bytes in all send
(N-1)/N * K bytes each.

A movement that computation hides costs nothing; what is not hidden is *exposed*: the time between asking
for a movement's result and having it. On the CPU that includes adding up what came. On CUDA it is the time
that the compute stream stands still, measured by events, so that the host need not stop.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, TypeVar

import torch

from shardtrain.comm import trace
from shardtrain.comm.movement import Movement
from shardtrain.comm.trace import Moment, moment, seconds


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
        self._seconds: defaultdict[tuple[str, Wait], float] = defaultdict(float)
        self._on_device: list[tuple[str, Wait, Moment, Moment]] = []

    def exposed(self) -> dict[Wait, float]:
        """Seconds of exposed communication by kind and unit. On CUDA the host waits for the device here."""
        return _sums((what, value) for (_, what), value in self._waits().items())

    def exposed_during(self) -> dict[str, float]:
        """The same by what the owner was doing."""
        return _sums((during, value) for (during, _), value in self._waits().items())

    def add_wait(self, what: Wait, start: Moment, end: Moment) -> None:
        """On the CPU it is added up at once: a meter may be open for as long as a run."""
        if isinstance(start, float):
            self._seconds[self.during, what] += seconds(start, end)
        else:
            self._on_device.append((self.during, what, start, end))

    def _waits(self) -> dict[tuple[str, Wait], float]:
        for during, what, start, end in self._on_device:
            self._seconds[during, what] += seconds(start, end)
        self._on_device.clear()
        return self._seconds


Key = TypeVar("Key")


def _sums(pairs: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    sums: defaultdict[Key, float] = defaultdict(float)
    for key, value in pairs:
        sums[key] += value
    return dict(sums)


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
        self._start = moment(self._device)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        end = moment(self._device)
        for current in _open:
            current.add_wait(Wait(self._movement.counted, self._unit), self._start, end)
        trace.note("wait", f"{self._movement.counted} of {self._unit}", self._start, end)
        if self._movement.traced:
            trace.end(self._movement.traced, self._unit)

"""The names of collectives between ranks, the bytes that they send, and the time that they expose.

A collective is counted under its own name whatever carried it: a gather built from point-to-point messages is
one ``all_gather``. N ranks gathering K bytes in all send (N-1)/N * K bytes each.

Communication that computation does not hide is *exposed*: the time from asking for a collective's result
until it is there, on the CPU with the summation. On an accelerator it is the time for which the compute
stream waits, measured by events, so that the host does not wait.

While torch's profiler runs, its trace has named ranges (``record_function``): ``forward UNIT`` and ``backward
UNIT``, ``gather UNIT`` and ``reduce UNIT``, which start a collective, and ``wait all_gather of UNIT``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from shardtrain import device as devices
from shardtrain import torch_private


class Movement(Enum):
    """The kinds of what ranks do together: collectives, barriers, and steps of the optimizer.

    ``counted``: the key in `Meter`, as torch calls it. ``doing``: the verb in the guard's errors.
    ``number``: its code in the guard's messages.
    """

    GATHER = "all_gather", "gathering"
    REDUCE = "reduce_scatter", "reducing"
    AVERAGE = "all_reduce", "averaging"  # across replicas, as part of a reduction
    ALL_REDUCE = "all_reduce", "all-reducing"
    BROADCAST = "broadcast", "broadcasting"
    ALL_TO_ALL = "all_to_all", "exchanging"
    ENTER = "fence", "entering"
    LEAVE = "fence", "leaving"
    STEP = "fence", "stepping"  # the optimizer, since the last forward
    SHARE = "", "sharing"  # memory, between the ranks of a host
    TRAIN = "fence", "training"  # other parameters than before: users have frozen some, or set them free
    GRAPH = "fence", "replaying"  # a step that was captured
    ADD = "fence", "adding"  # to gradients that `zero_grad` has not cleared

    def __init__(self, counted: str, doing: str) -> None:
        self.counted = counted
        self.doing = doing
        self.number = len(type(self).__members__)


# Module-level names, since every unit uses them in every step: `Movement.GATHER` takes ten times as long.
MOVEMENTS = tuple(Movement)
GATHER, REDUCE, AVERAGE, ALL_REDUCE, BROADCAST, ALL_TO_ALL, ENTER, LEAVE, STEP, SHARE, TRAIN, GRAPH, ADD = (
    Movement
)

# What a rank notes in its path, where nothing moves.
NOTES = (STEP, TRAIN, ADD)


class WaitKey(NamedTuple):
    """A wait's collective, by its kind as it is counted; its unit; and `Meter.during` at that time."""

    kind: str
    unit: str
    during: str = ""


class Meter:
    """This rank's traffic while the meter is open.

    ``calls[kind]``, ``bytes[kind]``: collectives and bytes sent, for kinds such as ``"all_gather"``: see
    `Movement.counted`. ``during``: what its owner is doing, by which waits are grouped. ``times``: it also
    measures waits.
    """

    def __init__(self, times: bool = True) -> None:
        self.times = times
        self.calls = Counter[str]()
        self.bytes = Counter[str]()
        self.during = ""
        self._seconds: dict[WaitKey, float] = {}
        self._moments: list[tuple[WaitKey, Any, Any]] = []  # begins and ends not yet added to the seconds

    def exposed(self) -> dict[WaitKey, float]:
        """Return seconds of exposed communication. The host waits for an accelerator."""
        for wait, start, end in self._moments:
            self._seconds[wait] = self._seconds.get(wait, 0.0) + devices.seconds(start, end)
        self._moments.clear()
        return self._seconds


# Process-wide, since `meter()` takes no argument, and backward runs in other threads: neither an engine nor a
# context variable can hold them.
_meters: list[Meter] = []
_ranges: dict[tuple[str, str], record_function] = {}  # begun and not ended, by kind and name
_NOTHING = nullcontext()


def begin(kind: str, name: str) -> None:
    """Begin a named range of torch's profiler, if one is active on this thread."""
    if torch_private.profiler_enabled():
        current = record_function(f"{kind} {name}")
        current.__enter__()
        _ranges[kind, name] = current


def end(kind: str, name: str) -> None:
    """End the range that `begin` began, if there is one."""
    current = _ranges.pop((kind, name), None) if _ranges else None
    if current is not None:
        current.__exit__(None, None, None)


@contextmanager
def meter() -> Iterator[Meter]:
    """Count every collective of this process inside the ``with`` block. Meters may be nested."""
    current = Meter()
    _meters.append(current)
    try:
        yield current
    finally:
        _meters.remove(current)


@contextmanager
def captured() -> Iterator[Meter]:
    """Count the collectives inside the ``with`` block apart: they are recorded, and have not run yet.

    No meter measures a wait there. `add_graph` counts them at each launch of the graph.
    """
    open_meters = _meters.copy()
    current = Meter(times=False)
    _meters[:] = [current]
    try:
        yield current
    finally:
        _meters[:] = open_meters


def add_graph(recorded: Meter) -> None:
    """Count the collectives that ``recorded`` has, once more."""
    for current in _meters:
        current.calls.update(recorded.calls)
        current.bytes.update(recorded.bytes)


def count(movement: Movement, sent: Iterable[int]) -> None:
    """Count one ``movement`` in which this rank sends ``sent`` bytes. Sums them only if a meter is open."""
    if not _meters:
        return
    total = sum(sent)
    for current in _meters:
        current.calls[movement.counted] += 1
        current.bytes[movement.counted] += total


def waiting(movement: Movement, unit: str, device: torch.device) -> AbstractContextManager[None]:
    """Count the block as a wait on ``device`` for a collective of ``unit``, unless it raises."""
    is_timed = (_meters and _meters[-1].times) or torch_private.profiler_enabled()
    return _recorded(movement, unit, device) if is_timed else _NOTHING


@contextmanager
def _recorded(movement: Movement, unit: str, device: torch.device) -> Iterator[None]:
    start = devices.moment(device)
    is_profiled = torch_private.profiler_enabled()
    with record_function(f"wait {movement.counted} of {unit}") if is_profiled else _NOTHING:
        yield
    stop = devices.moment(device)
    for current in _meters:
        current._moments.append((WaitKey(movement.counted, unit, current.during), start, stop))
        if isinstance(start, float):  # add at once, since a meter may be open for a whole run
            current.exposed()

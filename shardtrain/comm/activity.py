"""The measure of whether this process works.

A rank whose main thread waits for something that never comes still answers reports, since threads answer.
Work shows in processor time, of this process and of those that it started, and in bytes that its main thread
and these processes read and wrote. A host that waits for a device spins, which is processor time. The guard's
own threads do not count: where the time-out is a few seconds they take as much as `SHARE`.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

GUARD = "shardtrain-reports"  # the name of the guard's threads
SHARE = 0.01  # of a processor: a process that takes less does nothing
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class _Spent(NamedTuple):
    """What processes have spent so far."""

    seconds: dict[int, float]  # of processor time, by process
    bytes: int


class Activity:
    """The record of when this process was last seen at work."""

    def __init__(self) -> None:
        self._looked_s = 0.0
        self._spent: _Spent | None = None
        self._worked_s = 0.0

    def last_s(self, span: float) -> float:
        """Return when this process was last seen at work. Looks at most every ``span`` seconds."""
        now_s = time.monotonic()
        elapsed = now_s - self._looked_s
        if elapsed >= span:
            spent = _spent()
            if self._spent is None or elapsed > 20 * span or _has_worked(self._spent, spent, elapsed):
                self._worked_s = now_s
            self._spent = spent
            self._looked_s = now_s
        return self._worked_s


def _has_worked(earlier: _Spent, spent: _Spent, elapsed: float) -> bool:
    if earlier.seconds.keys() != spent.seconds.keys() or earlier.bytes != spent.bytes:
        return True  # a process began or ended, or bytes have moved
    seconds = sum(spent_s - earlier.seconds[process] for process, spent_s in spent.seconds.items())
    return seconds > SHARE * elapsed


def _spent() -> _Spent:
    own = os.getpid()
    guards = [thread.native_id for thread in threading.enumerate() if thread.name == GUARD]
    seconds = {own: time.process_time() - sum(_thread_s(guard) for guard in guards)}
    # Bytes of the main thread alone: others carry reports.
    moved = _bytes(f"/proc/self/task/{threading.main_thread().native_id}/io")
    for process in _descendants(own):
        seconds[process] = _process_s(process)
        moved += _bytes(f"/proc/{process}/io")
    return _Spent(seconds, moved)


def _descendants(process: int) -> list[int]:
    """Return the processes that ``process`` has started, and those that these have started."""
    processes = list[int]()
    with suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{process}/task"):
            for child in map(int, _read(Path(f"/proc/{process}/task/{thread}/children")).split()):
                processes += [child, *_descendants(child)]
    return processes


def _thread_s(thread: int | None) -> float:
    nanoseconds = _read(Path(f"/proc/self/task/{thread}/schedstat")).partition(" ")[0]
    return int(nanoseconds or 0) / 1e9


def _process_s(process: int) -> float:
    ticks = _read(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) * _TICK_S


def _bytes(file: str) -> int:
    lines = [line.partition(": ") for line in _read(Path(file)).splitlines()]
    return sum(int(value) for name, _, value in lines if name in ("rchar", "wchar"))


def _read(file: Path) -> str:
    with suppress(OSError):  # no such system, or the thread or process has ended
        return file.read_text(errors="replace")  # a process may have any name
    return ""

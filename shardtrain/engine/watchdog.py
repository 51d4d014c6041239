"""End a rank whose replay does not end: another rank hangs, has ended, or makes other collectives.

Collectives that are launched one by one are watched by torch's own thread, which ends a process whose
collective exceeds the time-out of its process group. It sees none of a graph. And the host may wait in any
line, such as a user's ``loss.item()``, where no code of Python runs. So a thread looks, for graphs only::

    the host      launches replay 7, and after it: write 7 to memory of the host
    the device    replays 7; writes 7
    the thread    looks ten times per time-out: is less written than launched, and still the same?

The thread calls nothing of CUDA. Such a call can wait for the host's own call, which may wait for the replay,
and it can end a recording of somebody else's graph. Looks are counted, not seconds, so that a program which
is stopped for a while goes on. Its own file, since it knows no graph.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable

import torch

from shardtrain.comm.activity import main_thread
from shardtrain.comm.guard import Paths
from shardtrain.device import HostNumber

LOOKS = 10  # per time-out

_log = logging.getLogger("shardtrain")


class Watchdog:
    """Watch the replays on ``device``. ``time_out_s``: returns the time-out now; ValueError ends the watch.

    Its thread ends with it, and with the program.
    """

    def __init__(self, device: torch.device, paths: Paths, time_out_s: Callable[[], float]) -> None:
        self.time_out_s = time_out_s
        self._paths = paths
        self._ended = HostNumber(device)  # the latest replay that the device is done with
        self._launched = 0
        self._seen = 0  # what was written as the thread last looked
        self._looks = 0  # at which nothing more was written, though it was to come
        stop = threading.Event()
        weakref.finalize(self, stop.set)
        threading.Thread(
            target=_watch, args=(weakref.ref(self), stop), name="shardtrain-replays", daemon=True
        ).start()

    def launched(self, number: int) -> None:
        """Note that replay ``number`` has been launched on the current stream."""
        self._ended.write(number)
        self._launched = number

    def look(self) -> str:
        """Return why this rank is to end, or "". Called by the thread, at equal intervals."""
        ended = self._ended.read()
        is_waited_for = ended < self._launched and ended == self._seen
        self._looks = self._looks + 1 if is_waited_for else 0
        self._seen = ended
        if self._looks <= LOOKS:  # the first look may have come right after the launch
            return ""
        return (
            f"rank {self._paths.rank} ends: replay {ended + 1} of the captured step has taken more than "
            f"{self.time_out_s():.0f} s, the time-out of the process group. The host was at "
            f"{self._paths.where(self._paths.end - 1)}, its main thread at {main_thread()}. Another rank "
            "hangs, has ended or makes other collectives: see where the others are"
        )


def _watch(known: weakref.ref[Watchdog], stop: threading.Event) -> None:
    while (watchdog := known()) is not None:
        try:
            interval_s = watchdog.time_out_s() / LOOKS
        except ValueError:  # the process group has been destroyed
            return
        if reason := watchdog.look():
            _log.error(reason)
            os._exit(1)  # the main thread does not run Python: no error can reach it
        del watchdog
        if stop.wait(interval_s):
            return

"""Being asked to stop: a scheduler's SIGTERM or SIGUSR1, a terminal that closes, or Ctrl-C.

While training, a signal is only noted. The ranks exchange what they have noted with every step (see
`train/saving.py`) and every batch of an evaluation (`StoppableFeed`). So they stop together, with the step
saved, whichever rank got the signal. This is an own file because the launcher and the loop share it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, Generic, TypeVar

import torch

from shardtrain import comm
from shardtrain.device import HostCopy

TERMINATED, INTERRUPTED = 143, 130
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
PR_SET_PDEATHSIG = 1  # of Linux's prctl
SAME_S = 1.0  # seconds in which a Ctrl-C may come twice: from the terminal, and passed on by torchrun

Batch = TypeVar("Batch")


class Stopped(KeyboardInterrupt):
    """Raised on all ranks at the same point, because one was asked to stop."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.exit_code = INTERRUPTED if number == signal.SIGINT else TERMINATED
        super().__init__(f"stopped by {signal.Signals(number).name}")


def leave_with_launcher() -> None:
    """Have the end of torchrun, even by SIGKILL, send this rank SIGTERM. Otherwise it would train on alone.

    Linux sends it when the thread that started this process ends: in torchrun that is the main thread.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        launcher = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != launcher:
            os.kill(os.getpid(), signal.SIGTERM)


class StopSignals:
    """A context in which signals that ask to stop are noted; a second Ctrl-C stops at once.

    One that is ignored stays so, as SIGHUP under nohup.
    ``noted``: the number of the signal that came first; 0: none.
    """

    def __init__(self) -> None:
        self.noted = 0
        self._noted_at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Launchers repeat themselves: what stopped the run must not disturb its clean-up.
        stopped = kind is not None and issubclass(kind, KeyboardInterrupt)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if stopped else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == self.noted == signal.SIGINT and time.monotonic() - self._noted_at > SAME_S:
            raise KeyboardInterrupt
        if not self.noted:
            self.noted, self._noted_at = number, time.monotonic()


class StoppableFeed(Generic[Batch]):
    """Batches, equally many on all ranks; a signal to one rank ends them on all. Collective.

    With each batch the ranks exchange what they have noted, and read what they exchanged the batch before.
    """

    def __init__(self, batches: Iterable[Batch], signals: StopSignals, device: torch.device) -> None:
        self._batches, self._signals, self._device = batches, signals, device

    def __iter__(self) -> Iterator[Batch]:
        """
        Raises:
            Stopped: on every rank, before the same batch.
        """
        exchanged: HostCopy | None = None
        for batch in self._batches:
            if exchanged is not None and (number := exchanged.read().item()):
                raise Stopped(int(number))
            noted = torch.tensor(self._signals.noted).to(self._device, non_blocking=True)
            exchanged = HostCopy(comm.all_reduce(noted, "max"))
            yield batch

"""The signals that stop a run: a scheduler's SIGTERM or SIGUSR1, a terminal's SIGHUP, or Ctrl-C.

During training a signal is only noted. Ranks exchange what they have noted with every step and every batch
of an evaluation (see `train/saving.py`). So they stop together, with the step saved, whichever rank got it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from threading import Thread
from types import FrameType
from typing import Any

TERMINATED = 143
INTERRUPTED = 130
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
PR_SET_PDEATHSIG = 1  # of Linux's prctl
SAME_S = 1.0  # seconds within which one Ctrl-C may arrive twice, from the terminal and from torchrun


class Stopped(KeyboardInterrupt):
    """A signal to stop that a rank got, raised on all ranks at the same point."""

    def __init__(self, number: int, ending: str = "") -> None:
        self.number = number
        self.ending = ending  # of the run's report: what is saved and how to resume; "" without a report
        self.exit_code = INTERRUPTED if number == signal.SIGINT else TERMINATED
        super().__init__(f"stopped by {signal.Signals(number).name}")


def leave_with_launcher() -> None:
    """Have Linux send this rank SIGTERM when torchrun ends, even by SIGKILL. Else it would train on alone."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        launcher = os.getppid()
        # Sent when the thread that started this process ends; in torchrun that is the main thread.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != launcher:
            os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Have the handlers of stop signals after the context as before it."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        # Launchers repeat signals, which must not disturb the exit that follows an exception.
        if sys.exc_info()[0] is None or "RANK" not in os.environ:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Hold stop signals back inside the context. Processes that start there inherit that, and keep it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent(worker: int) -> None:
    """Make this loader worker ignore stop signals, except its parent's SIGTERM.

    torchrun and Slurm signal all processes, but a rank needs its workers for the step that it saves. Without
    the rank they end by themselves. Until the worker gets here, signals must be `held_back`.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    Thread(target=wait, daemon=True).start()


class StopSignals:
    """The signals to stop that arrive inside it. A second Ctrl-C raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.noted = 0  # the number of the first signal; 0: none
        self._noted_at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        # Signals that are ignored stay so, such as SIGHUP under nohup.
        heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Launchers repeat signals: the one that stopped the run must not disturb its clean-up.
        stopped = kind is not None and issubclass(kind, KeyboardInterrupt)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if stopped else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == self.noted == signal.SIGINT and time.monotonic() - self._noted_at > SAME_S:
            raise KeyboardInterrupt
        if not self.noted:
            self.noted = number
            self._noted_at = time.monotonic()

"""Being asked to leave: a scheduler's SIGTERM or SIGUSR1, or Ctrl-C.

While training, a signal is only noted. The ranks exchange what they have noted with every step (see
`keeper.Keeper`), so they stop together, wherever the signal went, with the step saved.
"""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

TERMINATED, INTERRUPTED = 143, 130
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAME_S = 1.0  # seconds in which a Ctrl-C may come twice: from the terminal, and passed on by torchrun


class Stopped(KeyboardInterrupt):
    """All ranks have stopped after the same step, because one was asked to."""

    def __init__(self, number: int) -> None:
        self.name = signal.Signals(number).name
        self.exit_code = INTERRUPTED if number == signal.SIGINT else TERMINATED
        super().__init__(f"stopped by {self.name}")


class StopSignals:
    """Inside, signals that ask to leave are noted; a second Ctrl-C leaves at once.

    ``noted``: the number of the signal that came first; 0: none.
    """

    def __init__(self) -> None:
        self.noted = 0
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Launchers repeat themselves: what stopped the run must not disturb its clean-up.
        stopped = kind is not None and issubclass(kind, KeyboardInterrupt)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if stopped else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        again = self.noted == signal.SIGINT and time.monotonic() - self._since > SAME_S
        if number == signal.SIGINT and again:
            raise KeyboardInterrupt
        if not self.noted:
            self.noted, self._since = number, time.monotonic()

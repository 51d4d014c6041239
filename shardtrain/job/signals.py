"""Being asked to leave: a scheduler's SIGTERM or SIGUSR1, or Ctrl-C.

While training, a signal is only noted. The ranks exchange what they have noted with every step (see
`keeper.Saver`) and every batch of an evaluation (`Listening`), so they stop together, wherever the signal
went, with the step saved.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, Generic, TypeVar

import torch

from shardtrain import comm

TERMINATED, INTERRUPTED = 143, 130
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAME_S = 1.0  # seconds in which a Ctrl-C may come twice: from the terminal, and passed on by torchrun


Batch = TypeVar("Batch")


class Stopped(KeyboardInterrupt):
    """All ranks have stopped at the same place, because one was asked to."""

    def __init__(self, number: int) -> None:
        self.number = number
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


class Listening(Generic[Batch]):
    """Batches, of which all ranks have as many; a signal to one of them ends them on all. Collective.

    With each batch the ranks exchange what they have noted, and read what they exchanged the batch before,
    so on a GPU nobody waits for the exchange.
    """

    def __init__(self, batches: Iterable[Batch], signals: StopSignals) -> None:
        self._batches, self._signals = batches, signals

    def __iter__(self) -> Iterator[Batch]:
        """
        Raises:
            Stopped: on every rank, before the same batch.
        """
        said: torch.Tensor | None = None
        for batch in self._batches:
            if said is not None and said.item():
                raise Stopped(int(said.item()))
            said = comm.all_reduce(torch.tensor(self._signals.noted, device=comm.control_device()), "max")
            yield batch

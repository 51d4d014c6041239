"""Progress of a long measurement: a bar on a terminal, otherwise a line now and then; rank 0 alone."""

from __future__ import annotations

import sys
import time

WIDTH = 24  # characters of the bar
MOST_ROUNDS = 20  # between two lines


class Progress:
    """``tick()`` after each of ``rounds`` rounds; about ``lines`` lines where there is no terminal."""

    def __init__(self, title: str, rounds: int, speaks: bool, lines: int = 5) -> None:
        self.title, self.rounds, self.speaks = title, rounds, speaks
        self.every = max(1, min(rounds // lines, MOST_ROUNDS))
        self.done = 0
        self.started = time.perf_counter()
        self.bar = sys.stdout.isatty()

    def tick(self) -> None:
        self.done += 1
        if not self.speaks:
            return
        if self.bar:
            filled = WIDTH * self.done // self.rounds
            drawn = "█" * filled + "·" * (WIDTH - filled)
            end = "\r\x1b[K" if self.done == self.rounds else ""
            print(f"\r\x1b[K{drawn} {self._report()}", end=end, flush=True)
        elif self.done % self.every == 0 or self.done == self.rounds:
            print(self._report(), flush=True)

    def _report(self) -> str:
        left = (time.perf_counter() - self.started) / self.done * (self.rounds - self.done)
        return f"{self.title}  round {self.done}/{self.rounds}  {left:.0f} s left"

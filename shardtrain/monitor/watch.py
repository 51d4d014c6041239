"""What is looked at between steps: ranks that fall behind, steps that somebody wants to see."""

from __future__ import annotations

from shardtrain.monitor import Monitor
from shardtrain.monitor.window import Window


class Watch:
    """Called after every step, on every rank."""

    def __init__(self, window: Window, monitor: Monitor) -> None:
        self._window, self._monitor = window, monitor
        self._named: tuple[int, str] | None = None  # the slow rank that was told of last

    def step_done(self, step: int) -> None:
        slow = self._window.slow
        found = (slow.rank, slow.phase) if slow else None
        if found != self._named:
            if slow:
                self._monitor.say(f"step {step}: {slow}")
            elif self._named:
                self._monitor.say(f"step {step}: rank {self._named[0]} keeps up again")
            self._named = found

"""Where reports go. A sink overrides what it cares about."""

from __future__ import annotations

from collections.abc import Mapping


class Sink:
    """Ignores everything."""

    def say(self, text: str) -> None:
        """Lines for people."""

    def step(self, step: int) -> None:
        """A step is done; called after each."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Scalars by TensorBoard tag, at `step`."""

    def flush(self) -> None:
        """Everything told so far must survive the end of the process."""

    def close(self, status: str) -> None:
        """The run is over: `finished`, `interrupted` or `failed`."""

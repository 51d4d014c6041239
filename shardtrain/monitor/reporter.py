"""The monitor: one sink in front of all others."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shardtrain.job.data import Batch
from shardtrain.job.evaluate import Evaluation

# Where reports go. A sink overrides what it cares about.


class Sink:
    """Ignores everything."""

    def say(self, text: str) -> None:
        """Lines for people."""

    def step(self, step: int) -> None:
        """A step is done; called after each."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Scalars by TensorBoard tag, at `step`."""

    def details(self, step: int, scalars: Mapping[str, float]) -> None:
        """Scalars in such numbers that only a plot can hold them."""

    def samples(self, batch: Batch) -> None:
        """The first batch that is trained on."""

    def evaluated(self, found: Evaluation) -> None:
        """What an evaluation found; its scalars have been told."""

    def picture(self, tag: str, image: np.ndarray[Any, Any]) -> None:
        """An image, uint8 [height, width, 3], at the latest step."""

    def facts(self, facts: Mapping[str, Any]) -> None:
        """What result.json says of the run and no curve could."""

    def flush(self) -> None:
        """Everything told so far must survive the end of the process."""

    def close(self, status: str) -> None:
        """The run is over: `finished`, `interrupted` or `failed`."""


class Monitor(Sink):
    """Passes reports on, in the order of its sinks. One that cannot write does not end the run.

    It is warned of once, and told everything all the same: a disk that is full may have room again.
    """

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self.sinks = sinks
        self._warned: set[Sink] = set()

    def say(self, text: str) -> None:
        self._tell(lambda sink: sink.say(text))

    def step(self, step: int) -> None:
        self._tell(lambda sink: sink.step(step))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._tell(lambda sink: sink.log(step, scalars))

    def details(self, step: int, scalars: Mapping[str, float]) -> None:
        self._tell(lambda sink: sink.details(step, scalars))

    def samples(self, batch: Batch) -> None:
        self._tell(lambda sink: sink.samples(batch))

    def evaluated(self, found: Evaluation) -> None:
        self._tell(lambda sink: sink.evaluated(found))

    def picture(self, tag: str, image: np.ndarray[Any, Any]) -> None:
        self._tell(lambda sink: sink.picture(tag, image))

    def facts(self, facts: Mapping[str, Any]) -> None:
        self._tell(lambda sink: sink.facts(facts))

    def flush(self) -> None:
        self._tell(lambda sink: sink.flush())

    def close(self, status: str) -> None:
        self._tell(lambda sink: sink.close(status))

    def showing(self, feed: Iterable[Batch]) -> Iterator[Batch]:
        """The feed's batches; the first is put on show as it comes."""
        batches = iter(feed)
        for batch in batches:
            self.samples(batch)
            yield batch
            yield from batches

    def _tell(self, report: Callable[[Sink], None]) -> None:
        for sink in self.sinks:
            try:
                report(sink)
            except OSError as error:
                if sink not in self._warned:
                    self._warned.add(sink)
                    _warn(f"warning: {type(sink).__name__}: {error}; training goes on")


def _warn(text: str) -> None:
    with contextlib.suppress(OSError):  # it may be the very thing that is gone
        print(text, file=sys.stderr, flush=True)

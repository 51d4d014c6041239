"""Where reports go. A sink overrides what it cares about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shardtrain.data import Batch
from shardtrain.evaluate import Evaluation


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

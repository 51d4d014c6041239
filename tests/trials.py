"""Let torch's own optimizers be tried once per process, and not again for each model.

A trial takes as long as two steps of a small model on two ranks, and most tests have a model of their own.
`tests/optim/` is about trials, and tries every optimizer in a process that remembers none.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shardtrain.engine.optimizers import Optimizers, Tryable

TORCHS = "[Kind(cls=<class 'torch.optim."


class Passed(set[str]):
    """What a model's optimizers have passed, and what torch's own have with any model that is tried alike."""

    def __init__(self, of_all_models: set[str]) -> None:
        super().__init__()
        self.of_all_models = of_all_models

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self.of_all_models

    def add(self, key: str) -> None:
        if key.startswith(TORCHS):
            self.of_all_models.add(key)
        else:
            super().add(key)


@contextmanager
def remembered() -> Iterator[None]:
    """Remember inside what torch's optimizers have passed."""
    tryable = Optimizers._tryable
    passed = defaultdict[object, set[str]](set)

    def with_passed(optimizers: Optimizers) -> Tryable:
        model = tryable(optimizers)
        if not isinstance(model.passed, Passed):
            alike = str(model.device), model.layout, model.virtual
            optimizers._passed = Passed(passed[alike])
        return model._replace(passed=optimizers._passed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optimizers, "_tryable", with_passed)
        yield

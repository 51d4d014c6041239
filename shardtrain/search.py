"""What a sweep tries next: every combination of values, or what Optuna suggests.

Optuna is an extra: pip install 'shardtrain[sweep]'.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException

from shardtrain import comm
from shardtrain.errors import UserError


class Outcome(NamedTuple):
    """What became of a job."""

    overrides: list[str]  # those in which jobs differ
    objective: float | None
    problem: str  # "": none


class Search(Protocol):
    def next(self, done: Sequence[Outcome]) -> list[str] | None:
        """The overrides of the job after those that are done; None: there is none. Collective."""
        ...


class Combinations:
    """Every value with every other, the last key's fastest."""

    def __init__(self, swept: Sequence[Override]) -> None:
        random.seed(0)  # what shuffle(…) draws from: alike on all ranks
        try:
            choices = [[(o, value) for value in o.sweep_string_iterator()] for o in swept]
        except HydraException:
            intervals = ", ".join(o.input_line or "" for o in swept if o.is_interval_sweep())
            raise UserError(f"{intervals}: an interval is searched; say how long: sweep.trials=20") from None
        self.jobs = [[written(o, value) for o, value in job] for job in itertools.product(*choices)]

    def next(self, done: Sequence[Outcome]) -> list[str] | None:
        return self.jobs[len(done)] if len(done) < len(self.jobs) else None


def written(override: Override, value: object) -> str:
    """One value of a swept key, as on the command line."""
    return f"{override.get_key_element()}={value}"


class Suggestions:
    """As many jobs as there are `trials`. Rank 0 asks Optuna and tells the others.

    A study lives as long as its process, but it depends on the seed and on what its jobs gave alone: a sweep
    that is started again in its directory gets the same suggestions, and finds those jobs done.
    """

    def __init__(self, swept: Sequence[Override], trials: int, seed: int) -> None:
        try:
            import optuna
        except ImportError:
            raise UserError(
                f"sweep.trials={trials} needs Optuna: pip install 'shardtrain[sweep]'; without sweep.trials, "
                "every combination of the values is run"
            ) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=seed)
        self.study = optuna.create_study(direction="maximize", sampler=sampler)
        self.swept, self.trials = swept, trials
        self.space = {o.get_key_element(): _distribution(o, optuna.distributions) for o in swept}
        self.failed = optuna.trial.TrialState.FAIL
        self.asked: Any = None  # the trial under way

    def next(self, done: Sequence[Outcome]) -> list[str] | None:
        if len(done) == self.trials:
            return None
        text = json.dumps(self._ask(done)) if comm.rank() == 0 else ""
        overrides = json.loads(comm.broadcast_text(text, comm.plain_transport(), comm.control_device()))
        assert isinstance(overrides, list)
        return overrides

    def _ask(self, done: Sequence[Outcome]) -> list[str]:
        if self.asked is not None:
            objective = done[-1].objective
            self.study.tell(self.asked, objective, state=self.failed if objective is None else None)
        self.asked = self.study.ask(self.space)
        return [written(override, self.asked.params[override.get_key_element()]) for override in self.swept]


def _distribution(override: Override, kinds: Any) -> Any:
    """An interval, of whole numbers if tagged `int`, by powers if tagged `log`; else the values given."""
    value = override.value()
    if not isinstance(value, IntervalSweep):
        return kinds.CategoricalDistribution(list(override.sweep_string_iterator()))
    assert value.start is not None
    assert value.end is not None
    log = "log" in value.tags
    if "int" in value.tags:
        return kinds.IntDistribution(int(value.start), int(value.end), log=log)
    return kinds.FloatDistribution(value.start, value.end, log=log)

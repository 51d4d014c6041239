"""Whole training steps: every contender on one case, then what their times say."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field

import torch

from shardtrain import comm
from shardtrain.bench import contenders
from shardtrain.bench.contenders import POOL, TITLES, Case, Contender, build_data, build_model
from shardtrain.bench.interleave import (
    Progress,
    Runner,
    Spread,
    Track,
    attempt,
    difference,
    interleave,
    judge_of,
    objection,
    ratios,
    spread,
)
from shardtrain.bench.settings import Settings


@dataclass(frozen=True)
class Verdict:
    """What is said of one contender. ``status``: ok, wrong (other losses than the judge's) or failed."""

    status: str
    reason: str | None = None
    seconds: Spread | None = None
    ratio: Spread | None = None  # to the reference
    loss_difference: float | None = None  # relative to the judge's losses


@dataclass
class Measurement:
    """One case under way, or done."""

    case: Case
    reference: str
    tracks: dict[str, Track] = field(default_factory=dict)
    precision: str = "fp32"

    @property
    def rounds(self) -> int:
        return max((len(track.seconds) for track in self.tracks.values()), default=0)

    @property
    def judge(self) -> str | None:
        """Whose losses count as right."""
        return judge_of(self.tracks)

    def verdicts(self) -> dict[str, Verdict]:
        return {name: self._verdict(name) for name in self.tracks}

    def ratios_to(self, reference: str) -> dict[str, Spread]:
        """Of the right ones, in their own order; nothing when the reference itself is not right."""
        verdicts = self.verdicts()
        if reference not in verdicts or verdicts[reference].status != "ok":
            return {}
        base = self.tracks[reference].seconds
        right = [name for name, verdict in verdicts.items() if verdict.status == "ok"]
        return {name: ratios(self.tracks[name].seconds, base) for name in right}

    def _verdict(self, name: str) -> Verdict:
        track = self.tracks[name]
        if track.failure is not None or not track.seconds:
            return Verdict("failed", track.failure or "interrupted before its first timed round")
        apart = difference(name, self.tracks)
        wrong = objection(name, self.tracks, self.precision)
        if wrong is not None:
            return Verdict("wrong", wrong, loss_difference=apart)
        base = self.tracks[self.reference] if self.reference in self.tracks else Track()
        comparable = base.seconds and base.failure is None
        ratio = ratios(track.seconds, base.seconds) if comparable else None
        return Verdict("ok", None, spread(track.seconds), ratio, apart)


def measure(measurement: Measurement, settings: Settings, device: torch.device) -> None:
    """Fill ``measurement``, which holds what has been measured so far at any moment."""
    gc.collect()  # wrappers refer to one another: the case before is freed only now
    case = measurement.case
    data = build_data(case, settings.accumulate, settings.seed, comm.rank(), device)
    setup = settings.setup(device)
    runners: dict[str, Runner] = {}
    for name in to_run(settings):
        track = measurement.tracks[name] = Track()
        built: list[Contender] = []

        def build(name: str = name, built: list[Contender] = built) -> None:
            model = build_model(case, settings.seed, device)
            built.append(contenders.build(name, model, setup))

        track.failure = attempt(build, device)
        if track.failure is None:
            runners[name] = lambda number, contender=built[0]: contender.step(data[number % POOL])  # type: ignore[misc]
    gc.collect()
    progress = Progress(case.shape, settings.warmup + settings.rounds, speaks=comm.rank() == 0)
    interleave(
        runners,
        measurement.tracks,
        device,
        warmup=settings.warmup,
        rounds=settings.rounds,
        tick=progress.tick,
    )


def to_run(settings: Settings) -> list[str]:
    """The contenders asked for; if none are, those that differ on these ranks, and the reference."""
    if settings.contenders is not None:
        return settings.chosen
    superfluous = contenders.superfluous() - {settings.reference}
    return [name for name in TITLES if name not in superfluous]

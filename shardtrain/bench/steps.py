"""Whole training steps: every contender on one case, then what their times say."""

from __future__ import annotations

import dataclasses
import gc
from dataclasses import dataclass, field

import torch

from shardtrain import comm
from shardtrain.bench import contenders
from shardtrain.bench.cases import CASES, POOL, Case, build_data, build_model
from shardtrain.bench.contenders import EXEMPT, JUDGES, PRECISIONS, Contender, Setup
from shardtrain.bench.interleave import Runner, Track, attempt, interleave
from shardtrain.bench.progress import Progress
from shardtrain.bench.settings import Settings
from shardtrain.bench.statistics import Spread, loss_difference, losses_agree, ratios, spread


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
        sound = [name for name in JUDGES if name in self.tracks and self.tracks[name].failure is None]
        return sound[0] if sound else None

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
        difference = self._loss_difference(track)
        if difference is not None and name not in EXEMPT and not self._agrees(track):
            reason = f"losses differ from {self.judge}'s by up to {difference:.1e} of their value"
            return Verdict("wrong", reason, loss_difference=difference)
        base = self.tracks[self.reference] if self.reference in self.tracks else Track()
        comparable = base.seconds and base.failure is None
        ratio = ratios(track.seconds, base.seconds) if comparable else None
        return Verdict("ok", None, spread(track.seconds), ratio, difference)

    def _agrees(self, track: Track) -> bool:
        if self.judge is None:
            return True
        return losses_agree(track.losses, self.tracks[self.judge].losses, self.precision)

    def _loss_difference(self, track: Track) -> float | None:
        return None if self.judge is None else loss_difference(track.losses, self.tracks[self.judge].losses)


def case_of(settings: Settings, name: str) -> Case:
    """The named case with the sizes that the settings ask for."""
    case = CASES[name]
    return dataclasses.replace(
        case,
        image_size=settings.image_size or case.image_size,
        batch_size=settings.batch_size or case.batch_size,
    )


def measure(measurement: Measurement, settings: Settings, device: torch.device) -> None:
    """Fill ``measurement``, which holds what has been measured so far at any moment."""
    gc.collect()  # wrappers refer to one another: the case before is freed only now
    case = measurement.case
    data = build_data(case, settings.accumulate, settings.seed, comm.rank(), device)
    setup = Setup(settings.optimizer, settings.lr, PRECISIONS[settings.precision], device)
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
    rounds = settings.warmup + settings.rounds
    progress = Progress(case.shape, rounds, speaks=comm.rank() == 0)
    for span, timed in ((range(settings.warmup), False), (range(settings.warmup, rounds), True)):
        interleave(runners, measurement.tracks, span, device, timed=timed, tick=progress.tick)


def to_run(settings: Settings) -> list[str]:
    """The contenders asked for; the process group by itself only where the default is something else."""
    names = settings.chosen
    named = settings.contenders is not None or settings.reference == "shardtrain_process_group"
    if not named and contenders.default_is_process_group():
        names.remove("shardtrain_process_group")
    return names

"""``-m shardtrain.bench [collectives|host] [key=value ...]``: which program, on which ranks."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch

from shardtrain.bench import collectives, host, memory, report, settings, steps
from shardtrain.bench.contenders import SUITE
from shardtrain.bench.host import process_group
from shardtrain.bench.report import Report
from shardtrain.bench.settings import Settings
from shardtrain.job import launch
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.schema import UserError

STEPS, COLLECTIVES, HOST = "steps", "collectives", "host"


def bench(chosen: Settings, program: str, place: RankInfo, device: torch.device) -> None:
    """Measure, and report also what an interruption leaves."""
    if program == HOST:
        _bench_host(chosen, place)
        return
    output = Report(chosen, program, place, device)
    alone = place.world_size == 1
    with _quiet_peers(), process_group(place, device, "") if alone else contextlib.nullcontext():
        if program == COLLECTIVES:
            points = collectives.Points()
            _reporting(
                lambda: collectives.measure(points, chosen, device),
                lambda interrupted: collectives.report(output, points, interrupted),
            )
        elif chosen.memory:
            peaks = memory.Peaks()
            _reporting(
                lambda: memory.measure(peaks, chosen, place, device),
                lambda interrupted: memory.report(output, peaks, interrupted),
            )
        else:
            _bench_steps(chosen, output, device)


def _bench_host(chosen: Settings, place: RankInfo) -> None:
    if place.world_size > 1:
        raise UserError("the host's time is measured in one process: python -m shardtrain.bench host")
    points, output = host.Points(), Report(chosen, HOST, place, torch.device("cpu"))
    with _quiet_peers():
        _reporting(
            lambda: host.measure(points, chosen),
            lambda interrupted: host.report(output, points, interrupted),
        )


def _bench_steps(chosen: Settings, output: Report, device: torch.device) -> None:
    measurements: list[steps.Measurement] = []

    def run() -> None:
        for name in SUITE if chosen.suite else (chosen.model,):
            measurements.append(
                steps.Measurement(chosen.case(name), chosen.reference, precision=chosen.precision)
            )
            steps.measure(measurements[-1], chosen, device)

    _reporting(run, lambda interrupted: report.of_steps(output, measurements, interrupted))


def _reporting(run: Callable[[], None], tell: Callable[[bool], None]) -> None:
    """``tell(interrupted)`` after ``run()``, whether it ended by itself or by Ctrl-C."""
    try:
        run()
    except KeyboardInterrupt:
        tell(True)
        raise
    tell(False)


@contextlib.contextmanager
def _quiet_peers() -> Iterator[None]:
    """Peers warn of their own deprecations at every step; a table has no room for that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def main() -> None:
    named = sys.argv[1] if sys.argv[1:2] in ([COLLECTIVES], [HOST]) else None
    program = named or STEPS

    def read(arguments: Sequence[str], speak: bool) -> Settings | None:
        found = settings.read(arguments[1:] if named else arguments, speak)
        return found and settings.with_default_threads(found, RankInfo.from_environment(os.environ))

    launch.start(read, lambda chosen, place, device: bench(chosen, program, place, device))


if __name__ == "__main__":
    main()

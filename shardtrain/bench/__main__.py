"""Run one of the benchmark's programs: ``-m shardtrain.bench [collectives|host] [key=value ...]``."""

from __future__ import annotations

import contextlib
import warnings

import torch
import torch.distributed as dist

from shardtrain.bench import collectives, host, memory, report, settings, steps
from shardtrain.bench.report import Bench
from shardtrain.bench.settings import Settings
from shardtrain.job import dist_env, launch
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.schema import UserError
from shardtrain.plan.report import Output


def run(settings: Settings, rank_info: RankInfo, device: torch.device) -> None:
    """Run a program, and write its results; after Ctrl-C those measured until then."""
    name = settings.program
    if name == "host":
        if rank_info.world_size > 1:
            raise UserError("the host's time is measured in one process: python -m shardtrain.bench host")
        device = torch.device("cpu")
    hardware = report.hardware(device, rank_info.world_size, rank_info.local_world_size)
    versions = dist_env.versions()
    measured = ("memory-" if settings.memory else "") + ("suite" if settings.suite else settings.model)
    title = measured if name == "steps" else name
    output = Output("bench", settings.out, f"{title}-{rank_info.world_size}ranks")
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # peers warn of their own deprecations at every step
        if rank_info.world_size == 1 and name != "host":  # peers need a group even for a single rank
            launch.open_process_group(rank_info, device, dist.HashStore())  # type: ignore[attr-defined]
            stack.callback(launch.close_process_group)
        programs = {"collectives": collectives, "host": host, "steps": memory if settings.memory else steps}
        bench = Bench(settings, rank_info, device)
        interrupt = None
        try:
            programs[name].measure(bench)
        except KeyboardInterrupt as error:
            interrupt = error
        if rank_info.rank == 0:
            note = ["interrupted: what was measured until then"] if interrupt else []
            text = "\n".join([report.in_words(hardware, versions), *note, "", bench.text()]).rstrip()
            facts = {"program": name, "settings": settings, "hardware": hardware, "versions": versions}
            output.write(text, {**facts, "interrupted": interrupt is not None, **bench.facts})
        if interrupt is not None:
            raise interrupt


if __name__ == "__main__":
    launch.start(settings.read, run)

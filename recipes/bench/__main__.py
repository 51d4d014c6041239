"""Run one of the benchmark's programs: ``-m shardtrain.recipes.bench [WORD] [key=value ...]``."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from shardtrain import device as devices
from shardtrain.job import dist_env, launch
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.errors import UserError
from shardtrain.plan.report import Output

from . import collectives, host, memory, results, settings, steps
from .compared import Bench, geometric_means
from .settings import Settings

PROGRAMS = {"steps": steps, "suite": steps, "memory": memory, "collectives": collectives, "host": host}


def hardware(device: torch.device, ranks: RankInfo) -> dict[str, str | int]:
    """Return the facts on which measurements depend."""
    gpu = {"gpu": devices.name(device)} if devices.is_accelerator(device) else {}
    return {
        "cpu": devices.processor(),
        "cores": dist_env.cores(),
        "memory_gib": round(devices.total_memory(torch.device("cpu")) / 2**30),
        **gpu,
        "ranks": ranks.world_size,
        "ranks_per_host": ranks.local_world_size,
        "threads_per_rank": torch.get_num_threads(),
        "backend": devices.BACKENDS[device.type],
    }


def run(settings: Settings, rank_info: RankInfo, device: torch.device) -> None:
    """Run a program, and write its results; after Ctrl-C those measured until then."""
    name = settings.program
    if name == "host":
        if rank_info.world_size > 1:
            raise UserError("host measures one process: python -m shardtrain.recipes.bench host")
        device = torch.device("cpu")
    measured = f"{name}-{settings.model}" if name in ("steps", "memory") else name
    output = Output("bench", settings.out, f"{measured}-{rank_info.world_size}ranks")
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # peers warn of their own deprecations at every step
        if rank_info.world_size == 1 and name != "host":  # peers need a group even for a single rank
            launch.open_process_group(rank_info, device, dist.HashStore())  # type: ignore[attr-defined]
            stack.callback(launch.close_process_group)
        bench = Bench(settings, rank_info, device)
        interrupt = None
        try:
            PROGRAMS[name].measure(bench)
        except KeyboardInterrupt as error:
            interrupt = error
        if rank_info.rank == 0:
            note = ["interrupted: what was measured until then"] if interrupt else []
            conditions = hardware(device, rank_info) | dist_env.versions()
            words = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in conditions.items())
            text = "\n".join([words, *note, "", bench.text()]).rstrip()
            facts = {
                "settings": settings,
                "conditions": conditions,
                "interrupted": interrupt is not None,
                "comparisons": [comparison.facts() for comparison in bench.comparisons],
                "geometric_means": geometric_means(bench.comparisons) if name == "suite" else None,
            }
            output.write(text, facts)
            if settings.results is not None:
                more = f", accumulate {settings.accumulate}" if settings.accumulate > 1 else ""
                results.append(Path(settings.results), bench.comparisons, more, conditions)
        if interrupt is not None:
            raise interrupt


if __name__ == "__main__":
    launch.start(settings.read, run)

"""The plan of a training run that has been built."""

from __future__ import annotations

from shardtrain.build import Job
from shardtrain.config import Config
from shardtrain.engine import engine_of
from shardtrain.plan.report import rank_table
from shardtrain.plan.simulate import Plan, Question, simulate


def plan_of(config: Config, job: Job, rank: int | None = None) -> Plan:
    """The plan of a job that has been built: its ranks, transport and batch. ``rank``: see `Question`."""
    transport = engine_of(job.model).transport
    in_place = transport.in_place and transport.world > 1
    on_cpu = job.device.type == "cpu"
    question = Question(
        world_size=transport.everyone.world,
        replicate=transport.everyone.world // transport.world,
        micro_batch=job.share.micro_batch,
        channels=job.channels,
        in_place=in_place,
        inbox=on_cpu and not in_place,
        rank=rank,
    )
    return simulate(config, question)


def foretold(config: Config, job: Job) -> str:
    """What `dry_run` adds to the start table."""
    return "\n" + rank_table(plan_of(config, job))

"""One step watched: is what this rank holds and sends what the plan says?"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import torch

from shardtrain import comm, introspect
from shardtrain.doctor.installation import FAILED, OK, WARNING, Finding
from shardtrain.job import pictures
from shardtrain.job.build import Job
from shardtrain.job.config import Config
from shardtrain.job.format import MIB
from shardtrain.job.schema import writing
from shardtrain.job.step import Step
from shardtrain.plan.memory import MemoryTimeline, memory_of_step, optimizer_tensors
from shardtrain.plan.simulate import Plan, plan_of

MARGIN = 0.1  # between the planned peak and the measured one


def check(job: Job, config: Config, out: str | None) -> list[Finding]:
    """Take two steps, the second one watched; with ``out``, draw this rank's memory there. Collective."""
    step = Step.of(job, config.train.clip_grad_norm)
    batches = [batch[:2] for batch in itertools.islice(iter(job.train), config.train.accumulate)]
    present = [tensor for batch in batches for tensor in batch]
    present += job.ema.held() if job.ema is not None else []
    step(batches)
    with comm.meter() as traffic:
        timeline = memory_of_step(job.model, job.optimizer, present, lambda: step(batches))
    found = [_draw(timeline, Path(out))] if out is not None else []
    if comm.rank() == 0:  # plans are rank 0's
        found.append(compare(plan_of(config, job, rank=0), held(job), traffic.bytes, timeline.peak.total))
    return found


def held(job: Job) -> dict[str, int]:
    """Bytes of this rank's parameters and optimizer state."""
    return {
        "parameters": sum(param.nbytes for param in job.model.parameters()),
        "optimizer": sum(value.nbytes for value in optimizer_tensors(job.optimizer)),
    }


def checkpoint_bytes(job: Job) -> int:
    """What all ranks will save of parameters, their optimizer and their averages. Collective."""
    inside = introspect(job.model)
    averages = job.ema.averages.values() if job.ema is not None else ()
    own = sum(held(job).values()) + sum(average.nbytes for average in averages)
    saves = comm.rank() in inside.primary_ranks  # other replicas have the same
    return int(comm.all_reduce(torch.tensor(own * saves, device=inside.device)))


def compare(plan: Plan, held: Mapping[str, int], sent: Mapping[str, int], peak: int) -> Finding:
    """State and traffic exactly, the peak to a margin."""
    planned = {name: getattr(plan, name) for name in held} | {kind: plan.sent.get(kind, 0) for kind in sent}
    found = {**held, **sent}
    wrong = [
        f"{name} {found[name]:,} for {planned[name]:,}" for name in found if found[name] != planned[name]
    ]
    if wrong:
        return Finding(FAILED, f"other bytes than planned: {'; '.join(wrong)}", "is every rank alike?")
    apart = peak / plan.peak - 1
    sizes = f"peak {peak / MIB:.1f} MiB, planned {plan.peak / MIB:.1f} ({100 * apart:+.1f} %)"
    text = f"state and traffic are as planned; {sizes}"
    if abs(apart) > MARGIN:
        return Finding(WARNING, text, "leave room for the difference")
    return Finding(OK, text)


def _draw(timeline: MemoryTimeline, folder: Path) -> Finding:
    path, picture = folder / f"memory-rank{comm.rank()}.png", timeline.picture()
    if isinstance(picture, str):
        return Finding(WARNING, picture)
    with writing("out", folder):
        pictures.save(path, picture)
    return Finding(OK, f"{path}: {timeline.words()}")

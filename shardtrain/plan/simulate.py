"""Simulate one rank of any world without data: the engine's own layouts, schedule and optimizer.

The model is built on the meta device, and then gets tensors with shapes and storages but no memory. It takes
two steps: the first makes the optimizer's state and shows the order of the units, the second is recorded.
Nothing here repeats what the engine does, so a plan follows the engine when that changes.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from shardtrain import UnitInfo, comm, device, introspect, torch_private
from shardtrain.job.build import Job, loss_of
from shardtrain.job.config import Config
from shardtrain.job.errors import reading
from shardtrain.job.model import ema_of, plain_model, shard_with_optimizer, uncompiled
from shardtrain.job.step import Step
from shardtrain.plan.memory import MemoryTimeline, memory_of_step, state_bytes
from shardtrain.plan.transport import simulated


@dataclass(frozen=True)
class Question:
    """Describe what to plan for. ``in_place``, ``inbox``: see `Simulated`."""

    world_size: int
    replicate: int
    micro_batch: int  # images per rank in one forward
    channels: int
    in_place: bool
    inbox: bool
    rank: int | None = None  # the rank to plan for; None: the first that holds most


@dataclass(frozen=True)
class Plan:
    """Hold the plan of ``question.rank`` for one step. Sizes are in bytes."""

    question: Question
    accumulate: int
    uneven: bool  # other ranks hold less
    units: tuple[UnitInfo, ...]
    parameters: int  # of this rank, without padding, like the next three
    optimizer: int
    averages: int  # moving averages of parameters and buffers
    gradients: int
    buffers: int
    gathered: int  # the peak of full vectors
    timeline: MemoryTimeline
    sent: dict[str, int]  # by kind of collective
    calls: dict[str, int]
    flops: int

    @property
    def peak(self) -> int:
        return self.timeline.peak.total


def simulate(config: Config, question: Question) -> Plan:
    """Return the plan for ``config``, whose model's keys are complete, as if nothing were compiled."""
    config = uncompiled(config)
    with warnings.catch_warnings(), torch_private.FakeTensorMode():
        # The engine compares addresses to notice replaced parameters; here all are 0.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        model, optimizer = _sharded(config, question)
        bytes_by_rank = introspect(model).bytes_by_rank
        if question.rank is None:
            question = replace(question, rank=bytes_by_rank.index(max(bytes_by_rank)))
            if question.rank:
                model, optimizer = _sharded(config, question)
        ema = ema_of(model, config, warmup=0)
        loss = loss_of(config.train, config.allow)
        step = Step(model, loss, optimizer, config.train.clip_grad_norm, ema)
        side = config.data.image_size
        shape = (question.micro_batch, question.channels, side, side)
        labels = torch.zeros(question.micro_batch, dtype=torch.int64)
        batches = [
            (torch.empty(shape), labels.clone()) for _ in range(config.micro_batches(question.world_size))
        ]
        what = f"the model does not take images of shape {'×'.join(map(str, shape))}"
        refusals = reading(what, "micro_batch and data.image_size decide the shape", ValueError)
        # In the first step, since the counter keeps recomputed activations alive.
        with refusals, FlopCounterMode(display=False) as flops:
            step(batches)
        inside = introspect(model)
        inside.take_gathered_peak()
        with comm.meter() as traffic:
            timeline = memory_of_step(step, batches)
        return Plan(
            question=question,
            accumulate=len(batches),
            uneven=min(bytes_by_rank) < max(bytes_by_rank),
            units=tuple(inside.units),
            **state_bytes(model, optimizer, ema),
            gathered=inside.take_gathered_peak().bytes,
            timeline=timeline,
            sent=dict(traffic.bytes),
            calls=dict(traffic.calls),
            flops=flops.get_total_flops(),
        )


def plan_of(config: Config, job: Job) -> Plan:
    """Return the plan for a job: its ranks, transport and batch."""
    transport = introspect(job.model).transport
    in_place = transport.in_place and transport.world > 1
    question = Question(
        world_size=transport.all_ranks.world,
        replicate=transport.all_ranks.world // transport.world,
        micro_batch=job.train.share.micro_batch,
        channels=job.inference.channels,
        in_place=in_place,
        inbox=not (in_place or device.is_accelerator(job.device)),
    )
    return simulate(replace(config, device=job.device.type), question)


def _sharded(config: Config, question: Question) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model on the question's rank (default: 0), and its optimizer."""
    model = _unsharded(config)
    ranks = question.world_size, question.replicate, question.rank or 0
    transport = simulated(*ranks, in_place=question.in_place, inbox=question.inbox)
    return model, shard_with_optimizer(model, config, transport)


def _unsharded(config: Config) -> nn.Module:
    """Return the model of the configuration, of tensors without memory."""
    # On the meta device initialisation costs nothing; torch 2.11 refuses meta inside `FakeTensorMode`.
    with torch_private.disable_current_modes(), torch.device("meta"):
        model = plain_model(config.model, config.allow)
        if config.train.channels_last:
            model.to(memory_format=torch.channels_last)
    made: dict[Tensor, Tensor] = {}  # so that tied parameters stay tied
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor not in made:
                    made[tensor] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
                    if isinstance(tensor, nn.Parameter):
                        made[tensor] = nn.Parameter(made[tensor], tensor.requires_grad)
                tensors[name] = None if tensor is None else made[tensor]  # type: ignore[assignment]
    return model

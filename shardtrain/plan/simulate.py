"""One rank of any world, run without data: the engine's own layouts, schedule and optimizer, and no process.

The model is built on the meta device and then given tensors that have shapes and storages but no memory.
Two steps are taken: the first makes the optimizer's state and shows the order of the units, the second is
looked at. Nothing here repeats what the engine does, so a plan follows it when it changes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode

from shardtrain import UnitInfo, comm, introspect
from shardtrain.job.build import loss_of
from shardtrain.job.config import Config
from shardtrain.job.model import ema_of, plain_model, shard_with_optimizer, uncompiled
from shardtrain.job.schema import UserError
from shardtrain.job.step import Step
from shardtrain.plan.live import optimizer_tensors
from shardtrain.plan.memory import MemoryTimeline, memory_of_step


@dataclass(frozen=True)
class Question:
    """What to plan for. ``in_place``, ``inbox``: see `comm.Simulated`. ``rank``: whose memory and traffic;
    None for the one that holds most parameters, the lowest of several."""

    world_size: int
    replicate: int
    micro_batch: int  # images of a rank in one forward
    channels: int
    in_place: bool
    inbox: bool
    rank: int | None = None


@dataclass(frozen=True)
class Plan:
    """What ``question.rank`` will do in one step. Bytes, movements, operations.

    ``uneven``: other ranks hold less.
    """

    question: Question
    accumulate: int
    uneven: bool
    units: tuple[UnitInfo, ...]
    by_rows: int  # of this rank's parameters, were they cut as FSDP2 does; see `rows.py`
    parameters: int  # of this rank, without padding, and so are the next two
    gradients: int
    optimizer: int
    buffers: int
    averages: int  # of parameters and buffers, over time
    gathered: int  # at most at once, whoever holds it
    timeline: MemoryTimeline
    sent: dict[str, int]  # by kind of movement
    calls: dict[str, int]
    flops: int

    @property
    def peak(self) -> int:
        return self.timeline.peak.total

    def seconds(self, bandwidth: float, flops: float) -> tuple[float, float]:
        """Of computation and of communication at GB/s sent and TFLOP/s, each at full speed."""
        return self.flops / (flops * 1e12), sum(self.sent.values()) / (bandwidth * 1e9)


def simulate(config: Config, question: Question) -> Plan:
    """Plan for ``config``, whose model's keys are complete. What a compiler would save is not known."""
    config = uncompiled(config)
    with _without_data():
        model, optimizer, by_rows = _sharded(config, question)
        held = introspect(model).bytes_by_rank
        if question.rank is None:
            question = replace(question, rank=held.index(max(held)))
            if question.rank:
                model, optimizer, by_rows = _sharded(config, question)
        ema = ema_of(model, config, steps_per_epoch=1)
        loss = loss_of(config.train.loss, config.train.label_smoothing)
        step = Step(model, loss, optimizer, config.train.clip_grad_norm, ema)
        batches = [_batch(config, question) for _ in range(config.train.accumulate)]
        try:
            with FlopCounterMode(display=False) as flops:  # it keeps alive what backward computes again
                step(batches)
        except ValueError as error:
            shape = "×".join(map(str, batches[0][0].shape))
            raise UserError(
                f"the model does not take images of shape {shape}: {error} "
                "(micro_batch and data.image_size decide the shape)"
            ) from error
        inside = introspect(model)
        inside.take_gathered_peak()
        averages = ema.held() if ema is not None else []
        present = [tensor for batch in batches for tensor in batch] + averages
        with comm.meter() as traffic:
            timeline = memory_of_step(model, optimizer, present, lambda: step(batches))
        parameters = _bytes(model.parameters())
        return Plan(
            question=question,
            accumulate=config.train.accumulate,
            uneven=min(held) < max(held),
            units=tuple(inside.units),
            by_rows=by_rows,
            parameters=parameters,
            gradients=_bytes(param for param in model.parameters() if param.requires_grad),
            optimizer=_bytes(optimizer_tensors(optimizer)),
            buffers=_bytes(model.buffers()),
            averages=_bytes(averages),
            gathered=inside.take_gathered_peak().bytes,
            timeline=timeline,
            sent=dict(traffic.bytes),
            calls=dict(traffic.calls),
            flops=flops.get_total_flops(),
        )


def _sharded(config: Config, question: Question) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    """The model as the question's rank has it, rank 0 if it names none; its optimizer; see `Plan.by_rows`."""
    model = _on_meta(config)
    _give_storages(model)
    by_rows = held_by_rows(model.parameters(), question.world_size // question.replicate)
    transport = comm.simulated(
        question.world_size,
        question.replicate,
        question.rank or 0,
        in_place=question.in_place,
        inbox=question.inbox,
    )
    optimizer = shard_with_optimizer(model, config, transport)
    return model, optimizer, by_rows


@contextmanager
def _without_data() -> Iterator[None]:
    """Tensors made in here have a shape and a storage, and no memory."""
    with warnings.catch_warnings(), FakeTensorMode():
        # The engine compares addresses to see whether users replaced a parameter; here all are 0.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield


def _on_meta(config: Config) -> nn.Module:
    """The unsharded model in training. On the meta device its initialisation costs nothing."""
    with _disable_current_modes(), torch.device("meta"):  # in the mode without data, torch 2.11 refuses meta
        model = plain_model(config.model)
        if config.train.channels_last:
            model.to(memory_format=torch.channels_last)
        return model


def _give_storages(model: nn.Module) -> None:
    """Put parameters and buffers of the CPU in the place of those on the meta device."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and tensor not in made:
                    made[tensor] = _on_cpu(tensor)
                held[name] = None if tensor is None else made[tensor]  # type: ignore[assignment]


def _on_cpu(tensor: Tensor) -> Tensor:
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return nn.Parameter(like, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else like


def _batch(config: Config, question: Question) -> tuple[Tensor, Tensor]:
    side = config.data.image_size
    images = torch.empty(question.micro_batch, question.channels, side, side)
    return images, torch.zeros(question.micro_batch, dtype=torch.int64)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


# The measure for what a flat vector saves: every parameter cut for itself, as FSDP2 does it.
#
# FSDP2 gives each rank as many rows (first dimension) of every parameter as the first rank gets, and pads the
# rest. Three ranks, a parameter of 4 rows: 2 rows each, so 6 are held for 4. On many ranks most parameters
# have fewer rows than there are ranks, and each rank holds one row of each.


def held_by_rows(parameters: Iterable[Tensor], world: int) -> int:
    """Bytes of a rank's shards of ``parameters``, padding included; a number counts as one row."""
    held = 0
    for parameter in parameters:
        rows = parameter.shape[0] if parameter.dim() else 1
        held += -(-rows // world) * (parameter.nbytes // rows) if rows else 0
    return held

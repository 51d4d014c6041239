"""One rank of any world without data: the engine's own layouts, schedule and optimizer.

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

from shardtrain import UnitInfo, comm, introspect, torch_private
from shardtrain.config.config import Config
from shardtrain.config.errors import UserError, reading
from shardtrain.config.target import REFUSALS, instantiate
from shardtrain.job.build import loss_of
from shardtrain.job.losses import Loss
from shardtrain.job.model import ema_of, plain_model, shard_with_optimizer, target_node, uncompiled
from shardtrain.job.step import Step
from shardtrain.plan.memory import MemoryTimeline, memory_of_step, state_bytes
from shardtrain.plan.transport import simulated


@dataclass(frozen=True)
class Question:
    """What to plan for. ``in_place``, ``inbox``: see `Simulated`."""

    world_size: int
    replicate: int
    micro_batch: int  # images per rank in one forward
    channels: int
    in_place: bool
    inbox: bool
    rank: int | None = None  # the rank to plan for; None: the first that holds most
    any_module: bool = False  # the model may take and return anything


@dataclass(frozen=True)
class Plan:
    """The plan of ``question.rank`` for one step. Sizes are in bytes."""

    question: Question
    accumulate: int
    uneven: bool  # other ranks hold less
    units: tuple[UnitInfo, ...]
    inputs: tuple[tuple[int, ...], ...]  # their shapes, if the module came with them
    state: dict[str, int]  # of this rank, by kind, as `state_bytes` has it
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
        loss: Loss = (lambda total, _: total) if question.any_module else loss_of(config.train, config.allow)
        step = Step(model, loss, optimizer, config.train.clip_grad_norm, ema)
        side = config.data.image_size
        shape = (question.micro_batch, question.channels, side, side)
        labels = torch.zeros(question.micro_batch, dtype=torch.int64)
        inputs = model.inputs if isinstance(model, AnyModule) else ()
        batches = [
            (torch.empty(shape), labels.clone(), *inputs)
            for _ in range(config.micro_batches(question.world_size))
        ]
        what = f"the model does not take images of shape {'×'.join(map(str, shape))}"
        expected = "micro_batch and data.image_size decide the shape"
        if question.any_module:
            expected += ", unless the function returns the inputs, too, in a tuple"
        refusals = reading(what, expected, REFUSALS if question.any_module else ValueError)
        # In the first step, since the counter keeps recomputed activations alive.
        with refusals, FlopCounterMode(display=False) as flops:
            step(batches)
        with comm.meter() as traffic:
            timeline = memory_of_step(step, batches)
        return Plan(
            question=question,
            accumulate=len(batches),
            uneven=min(bytes_by_rank) < max(bytes_by_rank),
            units=tuple(introspect(model).units),
            inputs=tuple(tuple(each.shape) for each in inputs),
            state=state_bytes(model, optimizer, ema),
            timeline=timeline,
            sent=dict(traffic.bytes),
            calls=dict(traffic.calls),
            flops=flops.get_total_flops(),
        )


def _sharded(config: Config, question: Question) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model on the question's rank (default: 0), and its optimizer."""
    model = _unsharded(config, any_module=question.any_module)
    ranks = question.world_size, question.replicate, question.rank or 0
    transport = simulated(*ranks, in_place=question.in_place, inbox=question.inbox)
    return model, shard_with_optimizer(model, config, transport)


class AnyModule(nn.Module):
    """A module that takes and returns anything. Its result is the sum of the means of what that returns.

    ``inputs``: of its forward; empty for images.
    """

    def __init__(self, module: nn.Module, *inputs: Tensor) -> None:
        super().__init__()
        self.module = module
        self.inputs = inputs

    def forward(self, images: Tensor) -> Tensor:
        outputs = self.module(*(self.inputs or (images,)))
        leaves = torch_private.tree_leaves(outputs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not tensors:
            raise ValueError(f"the module returns {type(outputs).__name__} without a tensor to train by")
        return torch.stack([tensor.float().mean() for tensor in tensors]).sum()


def _any_module(config: Config) -> AnyModule:
    """Return what the function of `model._target_` makes: a module, or a module and its inputs."""
    made = instantiate(target_node(config.model), "model", (nn.Module, tuple), config.allow)
    parts = made if isinstance(made, tuple) else (made,)
    if not isinstance(parts[0], nn.Module) or not all(isinstance(each, Tensor) for each in parts[1:]):
        kinds = ", ".join(type(each).__name__ for each in parts)
        raise UserError(
            f"{config.model['_target_']}: returned ({kinds}), expected a module, or a module and tensors"
        )
    return AnyModule(*parts)


def _unsharded(config: Config, *, any_module: bool) -> nn.Module:
    """Return the model of the configuration, of tensors without memory."""
    # On the meta device initialisation costs nothing; torch 2.11 refuses meta inside `FakeTensorMode`.
    with torch_private.disable_current_modes(), torch.device("meta"):
        model = _any_module(config) if any_module else plain_model(config.model, config.allow)
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
    if isinstance(model, AnyModule):
        model.inputs = tuple(
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype) for each in model.inputs
        )
    return model

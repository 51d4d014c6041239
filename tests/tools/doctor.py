"""The doctor takes a few steps sharded beside the same steps unsharded, and compares them.

  python tests/tools/doctor.py +recipe=resnet
  torchrun --nproc-per-node 2 tests/tools/doctor.py +recipe=resnet

It names the first tensor that differs, by how much, in which unit and phase. Exit code 0: nothing differs; 1:
something does. It takes every key of shardtrain.train, and these:
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.nn.utils import clip_grad_norm_ as clip_unsharded
from torch.testing import assert_close

import shardtrain
from shardtrain import comm, introspect, recording
from shardtrain.comm.arithmetic import merge
from shardtrain.config.command import Command, Program, read_command
from shardtrain.config.config import Config
from shardtrain.config.errors import UserError
from shardtrain.config.format import counted
from shardtrain.config.schema import key
from shardtrain.device import is_accelerator
from shardtrain.job.build import Job, build
from shardtrain.job.model import (
    PRECISIONS,
    converted,
    initial_model,
    optimizer_of,
    parameter_groups,
    shard_with_optimizer,
    uncompiled,
)
from shardtrain.job.step import accumulate
from shardtrain.launch import launcher
from shardtrain.launch.ranks import RankInfo

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}  # fractions of the largest element
UPDATE_TOLERANCE = 1e-6  # also a fraction of the largest element
Comparison = tuple[int, str, Mapping[str, Tensor], Mapping[str, Tensor]]  # step, phase, found, expected


class Twins:
    """A job's sharded model, and its unsharded twin.

    Every rank holds an unsharded twin of the model beside its shards, and runs the same steps with both on
    its share of the batch. The twin's gradients are averaged as replicas' are: summed in a fixed tree and
    divided by the number of ranks. Tensors are compared in the order of their computation, and the first that
    differs ends the check::

        output           of each unit, in the order of forward
        own gradient     of each parameter, on this rank, last unit first
        mean gradient    over ranks
        parameter        after the update
        buffer

    Shared memory and messages over gloo sum in that tree, too, so outputs and gradients have equal bits.
    Elsewhere (NCCL's sums, replicas, bf16 with micro-batches, CUDA's convolutions) rounding may differ, and
    tensors must be equal to TOLERANCE of their largest element. Updates may always round differently, since a
    fused optimizer's vector instructions end at a shard's end. They have UPDATE_TOLERANCE, and then the twin
    gets the sharded parameters, so that each step begins equal. In bf16 and fp16 the twin is the engine on a
    single rank, since nothing else casts as the engine does.
    """

    def __init__(self, job: Job, config: Config) -> None:
        self.job = job
        self.config = config
        inside = introspect(job.model)
        self.world = inside.transport.all_ranks.world
        self._unit_of = inside.unit_of_parameter
        whole = converted(initial_model(config), config, job.device).to(job.device)
        self._units = [*chain.from_iterable([unit.modules for unit in inside.units])]
        if PRECISIONS[config.parallel.precision] is None:
            optimizer = optimizer_of(
                config.optim, parameter_groups(whole, config.optim, config.allow), config.allow
            )
            self._engines = [job.model]
        else:
            optimizer = shard_with_optimizer(whole, config, comm.Channel(comm.Alone()))
            self._engines = [job.model, whole]
        self.models = (job.model, whole)
        self.optimizers = (job.optimizer, optimizer)
        self.params = [dict[str, Tensor](model.named_parameters()) for model in self.models]

    def examine(self, steps: int) -> tuple[bool, str]:
        """Run ``steps`` steps; return whether all is equal, and a line about it. Collective."""
        compared = 0
        with contextlib.closing(self._comparisons(steps)) as comparisons:
            for step, phase, found, expected in comparisons:
                names = [name for name in found if name in expected]
                compared += len(names)
                texts = (self._difference(phase, name, found[name], expected[name]) for name in names)
                first = next(filter(None, texts), "")
                if found_by := _ranks_with(f"step {step}, {phase} of {first}" if first else ""):
                    return False, f"failed   {found_by}"
        others = self._tolerance("output")
        updates = self._tolerance("parameter")
        how = f"outputs and gradients {f'to {others:g}' if others else 'bit for bit'}, updates to {updates:g}"
        ranks = counted(self.world, "rank")
        text = f"{steps} steps sharded over {ranks} equal unsharded ones ({how}); {compared:,} tensors"
        return True, f"ok       {text}"

    def _difference(self, phase: str, key: str, found: Tensor, expected: Tensor) -> str:
        """Return the name of a tensor that differs, and by how much; "" if within the tolerance."""
        text = difference(found.detach(), expected.detach(), self._tolerance(phase))
        name = key.partition("#")[0]
        unit = self._unit_of.get(name, name if phase == "output" else "") or "the root"
        return f"{name or 'the model'} in unit {unit}: {text}" if text else ""

    def _tolerance(self, phase: str) -> float:
        """Return the allowed difference of tensors, as a fraction of the largest element."""
        transport = introspect(self.job.model).transport.transport
        precision = self.config.parallel.precision
        in_one_order = isinstance(transport, comm.Alone | comm.MessagesTransport | comm.SharedMemoryTransport)
        one_rounding = precision == "fp32" or self.job.train.share.accumulate == 1
        if not (in_one_order and one_rounding) or is_accelerator(self.job.device):
            return TOLERANCE[precision]
        return UPDATE_TOLERANCE if phase == "parameter" else 0.0

    def _comparisons(self, steps: int) -> Generator[Comparison, None, None]:
        """Run the steps with both models, and yield each comparison as soon as its tensors exist."""
        sharded, twin = self.models
        found, expected = self.params
        job = self.job
        batches = iter(job.train)
        count = job.train.share.accumulate
        with self._unsharded():
            yield 0, "initial value", found, expected
        for step in range(1, steps + 1):
            micro = list(islice(batches, count))
            with recording(twin, Tensor.clone, self._units) as right, torch.random.fork_rng():
                accumulate(twin, job.loss, micro, contextlib.nullcontext)
            with recording(sharded, Tensor.clone, self._units) as record:  # with the same dropout masks
                accumulate(sharded, job.loss, micro, partial(shardtrain.no_sync, sharded))
            yield step, "output", record.outputs, right.outputs
            yield step, "own gradient", record.gradients, right.gradients
            self._average()
            with self._unsharded():
                yield step, "mean gradient", held_gradients(found), held_gradients(expected)
            self._update()
            with self._unsharded():
                yield step, "parameter", found, expected
                for name, param in found.items():
                    expected[name].detach().copy_(param.detach())
            yield step, "buffer", dict(sharded.named_buffers()), dict(twin.named_buffers())

    def _unsharded(self) -> contextlib.ExitStack:
        """Return a context in which both models have full parameters and gradients."""
        stack = contextlib.ExitStack()
        for model in self._engines:
            stack.enter_context(shardtrain.unsharded(model, grads=True))
        return stack

    def _average(self) -> None:
        """Replace the twin's gradients by their means over ranks, summed in the engine's tree."""
        for param in self.params[1].values():
            if self.world > 1 and param.requires_grad:
                own = torch.zeros_like(param) if param.grad is None else param.grad
                gathered = own.new_empty((self.world, *own.shape))
                comm.all_gather_into_tensor(gathered, own.contiguous())
                mean = own.new_empty(own.numel())
                merge([*gathered.view(self.world, -1)], mean, ReduceOp.AVG)
                param.grad = torch.empty_like(own).copy_(mean.view_as(own))  # in its order of memory

    def _update(self) -> None:
        """Clip and update both models, at the schedule's learning rate."""
        max_norm = self.config.train.clip_grad_norm
        for sharded, twin in zip(*(optimizer.param_groups for optimizer in self.optimizers), strict=True):
            twin["lr"] = sharded["lr"]
        if max_norm is not None:
            shardtrain.clip_grad_norm_(self.job.model, max_norm)
            clip_unsharded(self.params[1].values(), max_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.job.schedule.step()


def held_gradients(params: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of the parameters that train, last parameter first. None counts as zeros."""
    trained = [(name, param) for name, param in reversed(params.items()) if param.requires_grad]
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained}


def _ranks_with(text: str) -> str:
    """Return the first text that is not empty, after its ranks' numbers unless all have it. Collective."""
    texts = comm.gather_texts(text, comm.plain_transport())
    first = next(filter(None, texts), "")
    ranks = [str(rank) for rank, own in enumerate(texts) if own == first]
    return first if len(ranks) == len(texts) else f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {first}"


def difference(found: Tensor, expected: Tensor, tolerance: float = 0.0) -> str:
    """Return how two tensors of one shape and dtype differ; NaN equals NaN.

    Returns "" if they are equal to ``tolerance`` of the largest expected magnitude.
    """
    magnitudes = expected.double().nan_to_num(0, 0, 0).abs()
    largest = magnitudes.max().item() if magnitudes.numel() else 0.0
    try:
        assert_close(found, expected, rtol=0, atol=tolerance * largest, equal_nan=True)
    except AssertionError as error:
        return "; ".join(line for line in str(error).splitlines()[1:] if line)
    return ""


@dataclass(frozen=True)
class DoctorKeys:
    """The doctor's own keys."""

    # optimizer steps that the sharded model and an unsharded one take side by side, at most the run's
    steps: int = key(3, at_least=1)


read = partial(read_command, program=Program(DoctorKeys))


def examine(settings: Command, rank_info: RankInfo, device: torch.device) -> None:
    """Print the finding on rank 0; exit with code 1 if sharding changes anything."""
    reduce = settings.config.parallel.reduce
    if reduce is not None:
        raise UserError(
            f"parallel.reduce={reduce}: the doctor compares with an unsharded model, whose gradients are not "
            "rounded for sending; examine the job with parallel.reduce=null"
        )
    # Uncompiled, since a compiler rounds and draws random numbers differently. Micro-batches of virtual ranks
    # are accumulated, as the twin's are.
    uncompiled_config = uncompiled(settings.config)
    world = rank_info.world_size
    train = dataclasses.replace(uncompiled_config.train, accumulate=uncompiled_config.micro_batches(world))
    parallel = dataclasses.replace(uncompiled_config.parallel, virtual_ranks=0)
    plain = dataclasses.replace(uncompiled_config, train=train, parallel=parallel)
    job, config = build(plain, rank_info.rank, world, device)
    equal, finding = Twins(job, config).examine(min(settings.keys.steps, job.steps))
    if rank_info.rank == 0:
        print(finding, flush=True)
    if not equal:
        sys.exit(1)


main = partial(launcher.start, read, examine)

if __name__ == "__main__":
    main()

"""The same steps sharded and unsharded, compared tensor by tensor in the order in which they come about.

Every rank holds an unsharded twin of the model beside its shards, gives both its share of the batch, and
averages the twin's gradients as replicas do: all ranks' gradients are added in rank order and divided by the
number of ranks. Five comparisons a step, and the first tensor that differs ends it::

    output           of each unit, in the order of forward
    own gradient     of each parameter, on this rank, last unit first
    mean gradient    over ranks
    parameter        after the update
    buffer

Shared memory on one host and messages over gloo add in that order, too, so outputs and gradients are equal
bit for bit. Elsewhere (NCCL's sums, several hosts, bf16 with micro-batches, CUDA's convolutions) rounding may
differ, and tensors have to be equal to TOLERANCE of their largest element. An update may round otherwise in
any case, where a fused optimizer's vector instructions end at a piece's end: it has UPDATE_TOLERANCE, and
then the twin takes over the sharded parameters, so that each step begins alike. In bf16 and fp16 the twin
is the engine's own single rank, since nothing else casts as it does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as clip_whole

import shardtrain
from shardtrain import comm
from shardtrain.doctor.installation import FAILED, OK, Finding, shared
from shardtrain.engine.hooks import engine_of, is_sharded
from shardtrain.engine.precision import tensors_in
from shardtrain.job.build import Job, Loss
from shardtrain.job.config import Config
from shardtrain.job.data import Batch
from shardtrain.job.format import counted
from shardtrain.job.model import PRECISIONS, initial_model, placed, plain_optimizer, shard_with_optimizer

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}  # of the largest element
UPDATE_TOLERANCE = 1e-6  # likewise
ADVICE = {
    "initial value": "parameters were changed between shard() and the first step, on one rank perhaps",
    "output": "the unit computed with other parameters or inputs; does it use parameters of another unit?",
    "own gradient": "something on that rank changed it before it was reduced: a hook, a fault, a random draw",
    "mean gradient": "the reduction over ranks went wrong; compare parallel.transport=process_group",
    "parameter": "the optimizer treats pieces otherwise than whole parameters; compare optim=sgd",
    "buffer": "a module changes it otherwise when sharded",
}


class Pair(NamedTuple):
    """What is compared, and where it belongs."""

    phase: str
    name: str
    unit: str
    found: Tensor
    expected: Tensor


class Twins:
    """A job's sharded model and its unsharded twin."""

    def __init__(self, job: Job, config: Config) -> None:
        self.job, self.config = job, config
        engine = engine_of(job.model)
        self.world = engine.transport.all_ranks.world
        whole = placed(initial_model(config), config, job.device)
        casts = PRECISIONS[config.parallel.precision] is not None
        optimizer = (
            shard_with_optimizer(whole, config, comm.Alone()) if casts else plain_optimizer(whole, config)
        )
        units = [unit.name for unit in engine.units]
        self.sharded, self.whole = Side(job.model, job.optimizer, units), Side(whole, optimizer, units)
        self._units = {
            info.name: unit.title for unit in engine.units for s in unit.segments for info in s.infos
        }
        self.exact = _is_exact(job, config)

    def examine(self, steps: int) -> Finding:
        """Take ``steps`` steps; what was found first, the same on every rank. Collective."""
        compared = 0
        batches = iter(self.job.train)
        with self.sharded, self.whole:
            for step in range(steps + 1):
                micro = [next(batches) for _ in range(self.config.train.accumulate if step else 0)]
                for pairs in self._step(micro) if step else [self._whole_values("initial value")]:
                    findings = shared(self._differences(step, pairs))
                    if findings:
                        return findings[0]
                    compared += len(pairs)
        gradients = "bit for bit" if self.exact else f"to {self._tolerance('output'):g}"
        how = f"outputs and gradients {gradients}, updates to {self._tolerance('parameter'):g}"
        ranks = counted(self.world, "rank")
        return Finding(
            OK,
            f"{steps} steps sharded over {ranks} equal unsharded ones ({how}); {compared:,} tensors",
        )

    def _differences(self, step: int, pairs: list[Pair]) -> list[Finding]:
        """The first difference among ``pairs``, in a list that is empty when there is none."""
        for pair in pairs:
            found = difference(pair.found, pair.expected)
            if found is not None and found.relative > self._tolerance(pair.phase):
                when = f"step {step}, {pair.phase} of {pair.name} in unit {pair.unit}: {found}"
                return [Finding(FAILED, when, ADVICE[pair.phase])]
        return []

    def _tolerance(self, phase: str) -> float:
        if not self.exact:
            return TOLERANCE[self.config.parallel.precision]
        return UPDATE_TOLERANCE if phase == "parameter" else 0.0

    def _step(self, micro: list[Batch]) -> Iterator[list[Pair]]:
        """One step of both, handing out what is to be compared as soon as it is there."""
        random = torch.random.fork_rng()  # dropout: both draw the same
        with random:
            self.whole.run(micro, self.job.loss, contextlib.nullcontext)
        self.sharded.run(micro, self.job.loss, lambda: shardtrain.no_sync(self.job.model))
        yield self._outputs()
        yield self._own_gradients()
        self._average()
        with self._opened():
            yield self._mean_gradients()
        self._update()
        yield self._whole_values("parameter")
        yield self._buffers()
        self._take_over()

    def _outputs(self) -> list[Pair]:
        both = zip(self.sharded.outputs, self.whole.outputs, strict=True)
        return [
            Pair("output", f"{a.unit or 'the model'}", a.unit or "the root", a.value, b.value)
            for a, b in both
        ]

    def _own_gradients(self) -> list[Pair]:
        expected = self.whole.gradients
        names = reversed(self._names())
        return [
            self._pair("own gradient", name, self.sharded.gradients[name], expected[name])
            for name in names
            if name in self.sharded.gradients and name in expected
        ]

    def _average(self) -> None:
        """The twin's gradients become the mean over ranks, added in rank order."""
        for param in self.whole.model.parameters():
            if self.world == 1 or not param.requires_grad:
                continue
            own = torch.zeros_like(param) if param.grad is None else param.grad
            everyone = own.new_empty((self.world, *own.shape))
            comm.all_gather_into_tensor(everyone, own.contiguous())
            total = everyone[0].clone()
            for gradient in everyone[1:]:
                total += gradient
            param.grad = total / self.world

    def _mean_gradients(self) -> list[Pair]:
        found, expected = (dict(side.model.named_parameters()) for side in (self.sharded, self.whole))
        pairs = []
        for name in reversed(self._names()):
            mine, theirs = found[name].grad, expected[name].grad
            if mine is not None and theirs is not None:
                pairs.append(self._pair("mean gradient", name, mine, theirs))
        return pairs

    def _update(self) -> None:
        groups = zip(self.sharded.optimizer.param_groups, self.whole.optimizer.param_groups, strict=True)
        for sharded, whole in groups:
            whole["lr"] = sharded["lr"]  # the schedule's
        if self.config.train.clip_grad_norm is not None:
            shardtrain.clip_grad_norm_(self.job.model, self.config.train.clip_grad_norm)
            clip_whole(self.whole.model.parameters(), self.config.train.clip_grad_norm)
        for side in (self.sharded, self.whole):
            side.optimizer.step()
            side.optimizer.zero_grad()
        self.job.schedule.step()

    def _whole_values(self, phase: str) -> list[Pair]:
        with self._opened(grads=False):
            found, expected = (dict(side.model.named_parameters()) for side in (self.sharded, self.whole))
            return [
                self._pair(phase, name, found[name].detach(), expected[name].detach())
                for name in self._names()
            ]

    def _take_over(self) -> None:
        """Give the twin the sharded model's parameters."""
        with self._opened(grads=False, writeback=True), torch.no_grad():
            found, expected = (dict(side.model.named_parameters()) for side in (self.sharded, self.whole))
            for name in self._names():
                expected[name].copy_(found[name])

    def _buffers(self) -> list[Pair]:
        found, expected = (dict(side.model.named_buffers()) for side in (self.sharded, self.whole))
        return [Pair("buffer", name, "the root", found[name], expected[name]) for name in found]

    @contextlib.contextmanager
    def _opened(self, grads: bool = True, writeback: bool = False) -> Iterator[None]:
        """Parameters whole on both sides, and gradients if asked."""
        with contextlib.ExitStack() as stack:
            for side in (self.sharded, self.whole):
                if is_sharded(side.model):
                    stack.enter_context(shardtrain.unsharded(side.model, writeback=writeback, grads=grads))
            yield

    def _pair(self, phase: str, name: str, found: Tensor, expected: Tensor) -> Pair:
        return Pair(phase, name, self._units[name], found, expected)

    def _names(self) -> list[str]:
        """Parameters in the order of the model."""
        return [name for name, _ in self.job.model.named_parameters() if name in self._units]


def _is_exact(job: Job, config: Config) -> bool:
    """Whether sums are taken here in rank order, of what the twin sums."""
    transport = engine_of(job.model).transport
    here = isinstance(transport, comm.Alone | comm.SharedMemoryTransport) or (
        isinstance(transport, comm.ProcessGroupTransport) and transport.has_gloo
    )
    on_cpu = job.device.type == "cpu"
    one_rounding = config.parallel.precision == "fp32" or config.train.accumulate == 1
    return here and on_cpu and one_rounding


# One of the two models that the doctor compares, with everything that it does in a step laid open.


class Output(NamedTuple):
    """One output of a unit's module, in the order in which forward leaves units."""

    unit: str
    value: Tensor


class Side:
    """``units``: names of the modules whose outputs are kept. It is a context that takes its hooks away."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, units: Sequence[str]) -> None:
        self.model, self.optimizer = model, optimizer
        self.outputs: list[Output] = []
        self.gradients: dict[str, Tensor] = {}  # this rank's own, summed over micro-batches
        self._hooks = contextlib.ExitStack()
        for name in units:
            handle = model.get_submodule(name).register_forward_hook(self._keep_output(name))
            self._hooks.callback(handle.remove)
        for name, param in model.named_parameters():
            if param.requires_grad:
                self._hooks.callback(param.register_hook(self._keep_gradient(name)).remove)

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _keep_output(self, unit: str) -> Callable[[nn.Module, object, object], None]:
        def keep(_: nn.Module, __: object, output: object) -> None:
            # What follows may change it in place.
            self.outputs += [Output(unit, tensor.detach().clone()) for tensor in tensors_in(output)]

        return keep

    def _keep_gradient(self, name: str) -> Callable[[Tensor], None]:
        def keep(gradient: Tensor) -> None:
            before = self.gradients.get(name)
            self.gradients[name] = gradient.detach().clone() if before is None else before + gradient

        return keep

    def run(
        self,
        batches: Sequence[Batch],
        loss: Loss,
        waiting: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        """Forward and backward over micro-batches, all but the last inside ``waiting()``."""
        self.outputs.clear()
        self.gradients.clear()
        for index, batch in enumerate(batches):
            with contextlib.nullcontext() if index == len(batches) - 1 else waiting():
                (loss(self.model(batch.images), batch.labels) / len(batches)).backward()


# The first element in which two tensors differ, and how far apart they are.
#
# Floating-point numbers of one dtype are ordered like the integers that their bits spell, so their distance
# in
# units in the last place (ulps) is a difference of integers. In fp32: 1.0 and the next larger number are 1
# ulp
# apart, 1.0 and 1.001 are 8,389, 1.0 and -1.0 are 2,130,706,432.

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Difference(NamedTuple):
    """Between ``found`` and ``expected``: how many elements differ, and the one that does most."""

    elements: int
    differing: int
    at: tuple[int, ...]
    found: float
    expected: float
    ulps: int
    relative: float  # the largest difference over the largest expected magnitude

    def __str__(self) -> str:
        where = ", ".join(map(str, self.at))
        return (
            f"{self.differing:,} of {self.elements:,} elements differ, most of all [{where}]: "
            f"{self.found:.9g}, expected {self.expected:.9g}, {self.ulps:,} ulps apart"
        )


def difference(found: Tensor, expected: Tensor) -> Difference | None:
    """None where both are equal, element by element; no number equals no number.

    Both: one shape, one dtype.
    """
    equal = (found == expected) | (found.isnan() & expected.isnan())
    if bool(equal.all()):
        return None
    apart = torch.where(equal, 0, (ordered(found) - ordered(expected)).abs())
    at = int(apart.argmax())
    index = tuple(int(part) for part in torch.unravel_index(torch.tensor(at), found.shape))
    gap = (found.double() - expected.double()).abs().nan_to_num(torch.inf).max()
    return Difference(
        elements=found.numel(),
        differing=int((~equal).sum()),
        at=index,
        found=found[index].item(),
        expected=expected[index].item(),
        ulps=int(apart.flatten()[at]),
        relative=float(gap / expected.double().abs().max().clamp(min=torch.finfo(torch.float32).tiny)),
    )


def ordered(values: Tensor) -> Tensor:
    """``values`` as int64 in the same order, consecutive for neighbouring numbers; both zeros are 0."""
    if not values.dtype.is_floating_point:
        return values.long()
    bits = values.contiguous().view(_INTEGERS[values.element_size()]).long()
    lowest = torch.iinfo(_INTEGERS[values.element_size()]).min
    return torch.where(bits < 0, lowest - bits, bits)

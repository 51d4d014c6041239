"""Steps that are captured and replayed, on the simulated device with a recorder of graphs for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardtrain
from shardtrain import comm

import ways
from simulated_device import DEVICE, SimulatedDevice
from simulated_graph import Recorder, recorder
from small import Block, OddNet, images, mesh
from ways import WAYS, Way

Step = Callable[..., Any]

# Captured, a way that offloads, scales its loss or has virtual ranks is refused.
CAPTURABLE = [
    name for name, way in WAYS.items() if not (way.virtual or way.scale or "offload" in way.options)
]


# A silent rank; a rank over a group of one, with streams and launches of NCCL; and rank 2 of eight.
WORLDS = {"silent": 0, "one": 1, "eight": 8}


@contextmanager
def simulated(size: int = 0) -> Iterator[tuple[SimulatedDevice, Recorder]]:
    """Let this process be the last rank of a fake group of ``size``, or a silent one; steps are captured."""
    with SimulatedDevice()(pytest.MonkeyPatch()) as device, recorder(device) as records:
        if size:
            dist.init_process_group("cpu:fake,cuda:fake", store=FakeStore(), rank=size // 4, world_size=size)
        try:
            yield device, records
        finally:
            if size:
                dist.destroy_process_group()


@pytest.fixture
def records() -> Iterator[Recorder]:
    with simulated() as (device, made):
        yield made
        assert list(device.findings) == []


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True, capturable=True, **options)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True, **options)


def batch(step: int, rank: int = 0, n: int = 6) -> list[Tensor]:
    return [tensor.to(DEVICE) for tensor in images(step, rank, n)]


def sharded(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return shardtrain.shard(OddNet().to(DEVICE), units=[Block], **options)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Return the step that clears gradients last."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


class Run:
    """A model, its optimizer and its step, captured or not."""

    def __init__(
        self,
        captures: bool,
        make: Callable[..., torch.optim.Optimizer] = sgd,
        step: Callable[..., Step] = plain_step,
        model: nn.Module | None = None,
        **options: Any,
    ) -> None:
        self.model = model if model is not None else sharded()
        self.optimizer = make(self.model)
        # The rates of steps that are not captured are tensors, too: a number is not rounded to fp32.
        for group in self.optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"], device=DEVICE)
        self.step = step(self.model, self.optimizer)
        if captures:
            self.step = shardtrain.capture(self.step, self.model, self.optimizer, **options)

    def losses(self, steps: range) -> list[float]:
        return [self.step(*batch(number)).item() for number in steps]

    def state(self) -> dict[str, Tensor]:
        """Return everything that training changes."""
        state = {**shardtrain.full_state_dict(self.model)}
        for name, param in self.model.named_parameters():
            for key, value in self.optimizer.state[param].items():
                state[f"{name} {key}"] = value.detach().cpu().clone()
            state[f"{name} gradient"] = torch.zeros(0) if param.grad is None else param.grad.cpu()
        return state


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Return the names of what differs in any bit."""
    return [name for name in {**one, **other} if not torch.equal(one[name], other[name])]


def test_a_replay_is_a_step(records: Recorder) -> None:
    """Losses, parameters, statistics and the optimizer's state have the bits of steps as they are."""
    for make in (sgd, adamw):
        eager = Run(False, make)
        captured = Run(True, make)
        assert eager.losses(range(8)) == captured.losses(range(8))
        assert same(eager.state(), captured.state()) == []
        assert captured.step.replayed == 5
        assert captured.step.eager == {"to warm up": 3}


def in_way(way: Way, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Return a whole step of ``way`` on its micro-batches."""

    def step(*batches: Any) -> list[Tensor]:
        losses = []
        for number, (x, y) in enumerate(batches, 1):
            with nullcontext() if number == len(batches) else shardtrain.no_sync(model):
                loss = F.cross_entropy(model(x).float(), y)
                (loss / len(batches)).backward()
            losses.append(loss)
        if way.clip:
            losses.append(shardtrain.clip_grad_norm_(model, way.clip))
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return step


def train_in_way(way: Way, captures: bool, rank: int = 0, **options: Any) -> tuple[list[float], Run]:
    """Take steps of ``way``; return what they returned, and the run."""
    model = ways.sharded(way, DEVICE, **options)
    run = Run(captures, step=partial(in_way, way), model=model, warmup=2)
    results: list[float] = []
    for number in range(5):
        batches = [batch(10 * number + micro, rank) for micro in range(way.micro_batches)]
        results += [value.item() for value in run.step(*batches)]
    return results, run


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, id=f"{name}, {world}")
        for world, size in WORLDS.items()
        for name in CAPTURABLE
        if not WAYS[name].replicas or size == 1
    ],
)
def test_every_way_can_be_captured(name: str, size: int) -> None:
    way = WAYS[name]
    with simulated(size) as (device, _):
        options: dict[str, Any] = {}
        if way.replicas:
            options["mesh"] = mesh(1, 1)
        elif size == 1:
            options["transport"] = comm.ProcessGroupTransport(dist.group.WORLD)
        expected, eager = train_in_way(way, False, **options)
        device.next_step()
        results, captured = train_in_way(way, True, **options)
        if size <= 1:  # what a fake group gathers is nobody's values
            assert results == expected
            assert same(eager.state(), captured.state()) == []
        assert captured.step.summary == "3 replayed, 2 not: 2 to warm up"
        assert list(device.findings) == []

"""Four exercises: climb from a right FSDP to a fast one. This says on which rung yours stands.

    torchrun --nproc-per-node 2 -m shardtrain.recipes.ladder mine

``mine.py`` has a function ``shard(model)`` as `recipes/mini.py` has, and calls collectives as ``dist.…``.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record

from shardtrain.recipes.behaviours import average_gradients

BLOCKS = 4


class Probe(torch.autograd.Function):
    """The identity, which tells when backward comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, events: list[str]) -> Tensor:
        ctx.events = events
        events.append("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.events.append("backward")
        return grad, None


class Block(nn.Module):
    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.inside, self.events = nn.Linear(7, 7), events

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Probe.apply(self.inside(x).tanh(), self.events)
        return out


class Work:
    """A collective under way, which tells when it is waited for."""

    def __init__(self, work: Any, name: str, events: list[str]) -> None:
        self.work, self.name, self.events = work, name, events

    def wait(self) -> None:
        self.events.append(f"wait {self.name}")
        self.work.wait()


class Recorded:
    """torch.distributed, with an event for every gather and reduction."""

    def __init__(self, events: list[str]) -> None:
        self.events, self.reductions = events, 0

    def __getattr__(self, name: str) -> Any:
        function = getattr(dist, name)
        if name not in ("all_gather", "all_gather_into_tensor", "all_to_all_single", "reduce_scatter_tensor"):
            return function

        def call(*args: Any, **options: Any) -> Any:
            if not args[1].numel():  # of a root without parameters
                return function(*args, **options)
            self.reductions += "gather" not in name
            label = "gather" if "gather" in name else f"reduce {self.reductions}"
            self.events.append(label)
            work = function(*args, **options)
            return Work(work, label, self.events) if work is not None else None

        return call


def train(module: ModuleType | None) -> tuple[list[float], list[str]]:
    """Return the losses of three steps, and the events of the last; without ``module`` those of a replica."""
    events: list[str] = []
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Block(events) for _ in range(BLOCKS)))
    if module:
        module.dist = Recorded(events)  # type: ignore[attr-defined]
        model = module.shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(3):
        events.clear()
        x = torch.randn(5, 7, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if not module:
            average_gradients(model)
        optimizer.step()
        losses.append(loss.item())
    return losses, events


def rungs(module: ModuleType) -> list[tuple[str, bool]]:
    """Return each rung, and whether ``module`` stands on it."""
    losses, events = train(module)
    expected, _ = train(None)
    forwards = [at for at, event in enumerate(events) if event == "forward"]
    ahead = [events[:at].count("gather") >= min(BLOCKS, block + 1) for block, at in enumerate(forwards, 1)]
    pairs = [(events.index(each), events.index(f"wait {each}")) for each in events if each[:6] == "reduce"]
    overlapped = sum("backward" in events[start:end] for start, end in pairs)
    return [
        ("1 right: the losses are a replica's", losses == expected),
        ("2 prefetch: the next block is being gathered while one computes", all(ahead)),
        ("3 overlap: reductions run during the backward of other blocks", overlapped >= BLOCKS - 1),
        ("4 keep: blocks stay after forward, each is gathered once", events.count("gather") <= BLOCKS),
    ]


@record
def main() -> None:
    dist.init_process_group("gloo")
    try:
        for rung, stands in rungs(importlib.import_module(sys.argv[1])):
            if dist.get_rank() == 0:
                print("yes " if stands else "no  ", rung)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

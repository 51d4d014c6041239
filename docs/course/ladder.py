"""Check five exercises, from a right FSDP to a fast one: print on which rungs yours stands.

    torchrun --nproc-per-node 2 docs/course/ladder.py mine

``mine.py`` has a function ``shard(model)`` as `docs/course/mini.py` has, and calls collectives as ``dist.…``,
where they are recorded. `docs/engine.md` has a hint for every rung.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils._pytree import tree_leaves

BLOCKS = 4
WIDTH = 7
COLLECTIVES = r"(all_gather|all_reduce|all_to_all|reduce_scatter)(?!_obj)"


class Probe(torch.autograd.Function):
    """A function that returns its input unchanged, and notes when forward and backward pass."""

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
        self.inside = nn.Linear(WIDTH, WIDTH)
        self.events = events

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Probe.apply(self.inside(x).tanh(), self.events)
        return out


class Work:
    """A collective under way, which notes when it is waited for."""

    def __init__(self, work: Any, name: str, events: list[str]) -> None:
        self.work = work
        self.name = name
        self.events = events

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)

    def wait(self) -> None:
        self.events.append(f"wait {self.name}")
        self.work.wait()


class Recorded:
    """A stand-in for torch.distributed: notes each gathered element, each reduction, and the wait for it."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.reductions = 0

    def __getattr__(self, name: str) -> Any:
        function = getattr(dist, name)
        if not re.match(COLLECTIVES, name):
            return function

        def call(*args: Any, **options: Any) -> Any:
            elements = sum(leaf.numel() for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor))
            if "gather" in name or not elements:  # none: of a root without parameters
                self.events += ["gather"] * elements
                return function(*args, **options)
            self.reductions += 1
            label = f"reduce {self.reductions}"
            self.events.append(label)
            work = function(*args, **options)
            if work is None:
                self.events.append(f"wait {label}")
                return None
            return Work(work, label, self.events)

        return call


def refuse(text: str) -> NoReturn:
    """End every rank because of a mistake, which the first one prints."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr)
    sys.exit(2)


def module_of(words: list[str]) -> ModuleType:
    """Import the module that the command line names."""
    if len(words) != 1:
        refuse(f"expected the name of one module, such as mine; found {' '.join(words) or 'none'}")
    name = words[0]
    sys.path.append(os.getcwd())
    if name.endswith(".py") or os.sep in name:
        refuse(f"{name}: expected the name of a module; say {Path(name).stem}, in the folder of the file")
    if not all(part.isidentifier() for part in name.split(".")) or not is_importable(name):
        refuse(
            f"{name}: there is no module of this name; expected {name}.py in {os.getcwd()}, or a package's"
        )
    if "RANK" not in os.environ:
        refuse(f"no ranks: torchrun --nproc-per-node 2 docs/course/ladder.py {name}")
    module = importlib.import_module(name)
    if not callable(getattr(module, "shard", None)):
        refuse(f"{name}: expected a function shard(model) in {module.__file__}")
    return module


def is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # what is before the last dot
        return False


def train(module: ModuleType | None) -> tuple[list[float], list[str], int]:
    """Train for three steps; without ``module`` a replica.

    Return the losses, the events of the last step, and the number of blocks whose whole weight autograd held
    after its forward. It saves none for the first block, whose input needs no gradient.
    """
    events: list[str] = []
    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Block(events) for _ in range(BLOCKS)))
    if module:
        module.dist = Recorded(events)  # type: ignore[attr-defined]
        model = module.shard(model)
        if not isinstance(model, nn.Module):
            refuse(f"{module.__name__}.shard: expected to return the model, returned {model!r}")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(3):
        events.clear()
        saved.clear()
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        with saved_tensors_hooks(save, lambda tensor: tensor):
            loss = model(x).square().mean()
        whole = sum(
            tensor.shape == (WIDTH, WIDTH) and tensor.untyped_storage().nbytes() > 0 for tensor in saved
        )
        optimizer.zero_grad()
        loss.backward()
        if not module:
            for param in model.parameters():
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        optimizer.step()
        losses.append(loss.item())
    return losses, events, whole


def rungs(module: ModuleType) -> list[tuple[str, bool]]:
    """Return each rung, and whether ``module`` stands on it."""
    losses, events, whole = train(module)
    expected = train(None)[0]
    difference = "" if losses == expected else f": {losses} where a replica has {expected}"
    forwards = [at for at, event in enumerate(events) if event == "forward"]
    if not forwards:
        refuse(f"{module.__name__}.shard: the model that it returns calls none of the four blocks")
    gathered = [events[:at].count("gather") for at in forwards]
    blocks = [min(number, BLOCKS) for number in range(2, BLOCKS + 2)]  # one more than computes
    ahead = [part * BLOCKS >= gathered[-1] * least > 0 for part, least in zip(gathered, blocks, strict=True)]
    reductions = [(at, event) for at, event in enumerate(events) if event[:6] == "reduce"]
    ends = [[*events, f"wait {event}"].index(f"wait {event}") for _, event in reductions]
    overlapped = ["backward" in events[at:end] for (at, _), end in zip(reductions, ends, strict=True)]
    return [
        (f"1 right: the losses are a replica's{difference}", not difference),
        ("2 release: after forward at most two blocks are whole, also for autograd", whole <= 2),
        ("3 prefetch: in forward the next block is being gathered while one computes", all(ahead)),
        (
            "4 overlap: reductions run during the backward of other blocks",
            sum(overlapped) * BLOCKS >= len(overlapped) * (BLOCKS - 1) > 0,
        ),
        ("5 keep, instead of 2: backward gathers nothing", "gather" not in events[forwards[-1] :]),
    ]


@record
def main() -> None:
    module = module_of(sys.argv[1:])
    dist.init_process_group("gloo")
    try:
        for rung, stands in rungs(module):
            if dist.get_rank() == 0:
                print("yes " if stands else "no  ", rung)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Draw the memory and the trace of one step of `recipes/mini.py` beside the engine's, as one picture.

    torchrun --nproc-per-node 2 -m shardtrain.recipes.beside

Both train the same ResNet-18 in the same units over messages. `outputs/beside/beside.png` shows rank 0:
memory by kind over the operations of one step, and the fastest of ten other steps.
"""

from __future__ import annotations

import time
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from PIL import Image
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardtrain
from shardtrain.comm import trace
from shardtrain.job.format import MIB
from shardtrain.job.pictures import plot
from shardtrain.monitor.timeline import STYLES
from shardtrain.plan.memory import MEMORY_KINDS, optimizer_tensors
from shardtrain.recipes import mini

CPU = torch.device("cpu")
STEPS = 10
PHASES = ("forward", "backward", "optimizer")
MADE = dict(zip(PHASES, ("activations", "gradients", "other"), strict=True))  # what operations make
Row = tuple[str, list[int]]  # a phase, and bytes by kind


class Unit(mini.Unit):
    """`mini`'s, with spans of its collectives and waits."""

    count = 0

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.title = f"block {Unit.count}" if Unit.count else "the root"
        Unit.count += 1
        super().__init__(params)

    def gather(self) -> None:
        if not self.full.untyped_storage().nbytes():
            trace.begin(trace.GATHER.traced, self.title)
        super().gather()

    def wait(self) -> None:
        self.gather()
        if self.gathering is not None:
            with trace.waiting(trace.GATHER, self.title, CPU):
                super().wait()

    def reduce(self) -> None:
        super().reduce()
        trace.begin(trace.REDUCE.traced, self.title)

    def finish(self) -> None:
        with trace.waiting(trace.REDUCE, self.title, CPU):
            super().finish()


class Schedule(mini.Schedule):
    """`mini`'s, with spans of units that compute."""

    def enter(self, unit: Any) -> None:
        super().enter(unit)
        trace.begin("forward", unit.title)

    def leave(self, unit: Any, output: Any) -> None:
        trace.end("forward", unit.title)
        super().leave(unit, output)

    def descend(self, moment: int) -> None:
        if 0 <= self.position < len(self.calls):
            trace.end("backward", self.calls[self.position].title)
        super().descend(moment)
        if self.position >= 0:
            trace.begin("backward", self.calls[self.position].title)


class Memory(TorchDispatchMode):
    """Note the bytes of all storages by kind after every operation. A released storage has 0."""

    def __init__(self, known: dict[str, list[Tensor]]) -> None:
        super().__init__()
        self.phase, self.rows, self.kept = "forward", [], []  # type: str, list[Row], list[str]
        self.alive: dict[Any, tuple[weakref.ref[Any], str]] = {}
        for kind, tensors in known.items():
            self.see(tensors, kind)

    def see(self, tree: object, kind: str) -> None:
        for storage in (leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)):
            known = self.alive.get(storage._cdata)
            if known is None or known[0]() is None:
                self.alive[storage._cdata] = weakref.ref(storage), kind

    def whole(self, module: nn.Module, _: object) -> None:
        """Before a module computes: what its parameters show then is gathered."""
        for param in module.parameters(recurse=False):
            storage = param.untyped_storage()
            self.alive[storage._cdata] = weakref.ref(storage), "gathered"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.see((args, kwargs), "gathered" if self.phase == "forward" else "gradients")
        result = func(*args, **(kwargs or {}))
        self.see(result, MADE[self.phase])
        sizes = dict.fromkeys(MEMORY_KINDS, 0)
        for storage, kind in [(reference(), kind) for reference, kind in self.alive.values()]:
            if storage is not None:
                sizes[kind] += storage.nbytes()
        self.rows.append((self.phase, list(sizes.values())))
        return result


def remembered(model: nn.Module, step: Any, optimizer: Any, batch: list[Tensor]) -> list[Row]:
    """Return the memory of the second step; the first one makes the optimizer's state."""
    memory = Memory({"parameters": [*model.parameters()], "other": [*model.buffers(), *batch]})
    hooks = [module.register_forward_pre_hook(memory.whole) for module in model.modules()]
    step(memory)
    memory.see(optimizer_tensors(optimizer), "optimizer")
    memory.rows.clear()
    with memory:
        step(memory)
    for hook in hooks:
        hook.remove()
    return memory.rows


def observed(model: nn.Module, rank: int) -> tuple[list[Row], list[trace.Span], float]:
    """Train ``model``; return one step's memory, the fastest step's spans, from 0 on, and its seconds."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    generator = torch.Generator().manual_seed(rank)
    images, labels = torch.randn(16, 3, 32, 32, generator=generator), torch.arange(16) % 10

    def step(memory: Any = None) -> None:
        for phase in PHASES:
            if memory:
                memory.phase = phase
            trace.begin("phase", phase)
            if phase == "forward":
                loss = nn.functional.cross_entropy(model(images), labels)
            elif phase == "backward":
                loss.backward()
            else:
                optimizer.step()
                optimizer.zero_grad()
            trace.end("phase", phase)

    rows = remembered(model, step, optimizer, [images, labels])
    steps = []
    for _ in range(STEPS):
        dist.barrier()
        start = time.perf_counter()
        with trace.record(CPU) as taken:
            step()
        seconds = time.perf_counter() - start
        spans = [span._replace(start=span.start - start, end=span.end - start) for span in taken.spans()]
        steps.append((seconds, spans))
    seconds, spans = min(steps)
    return rows, spans, seconds


def draw(figure: Any, found: dict[str, tuple[list[Row], list[trace.Span], float]]) -> None:
    """Draw memory above and spans below; a column of each."""
    above, below = figure.subplots(2, 2, sharey="row", height_ratios=(5, 2))
    for axes, lane, (title, (rows, spans, seconds)) in zip(above, below, found.items(), strict=True):
        sizes = list(zip(*([size / MIB for size in row] for _, row in rows), strict=True))
        axes.stackplot(range(len(rows)), sizes, labels=MEMORY_KINDS, colors=MEMORY_KINDS.values(), lw=0)
        for phase in PHASES[:2]:
            first = next(at for at, row in enumerate(rows) if row[0] == phase)
            axes.axvline(first, color="0.3", lw=0.8)
            axes.text(first, 0.97, f" {phase}", va="top", fontsize=8, transform=axes.get_xaxis_transform())
        peak = max(sum(row) for _, row in rows) / MIB
        axes.set_title(f"{title}: a peak of {peak:.0f} MiB, a step of {1e3 * seconds:.0f} ms", fontsize=10)
        axes.margins(x=0)
        axes.set_xlabel("operations of a step", fontsize=8)
        for kind, name, start, end in spans:
            color, top, height, _ = STYLES.get(f"{kind} {name}") or STYLES[kind]
            if name != "the root" or kind not in ("forward", "backward"):  # the root's contains the others
                where = top + height / 2, 1e3 * (end - start), height, 1e3 * start
                lane.barh(*where, color=color, edgecolor="white", lw=0.4, zorder=kind != "phase")
        lane.set(ylim=(0.95, 0), yticks=[], xlim=(0, 1e3 * max(found[each][2] for each in found)))
        lane.set_xlabel("ms", fontsize=8)
    above[0].set_ylabel("MiB of rank 0")
    above[0].legend(loc="upper left", bbox_to_anchor=(0, 0.92), fontsize=8, reverse=True)
    used = [style for key, style in STYLES.items() if key != "phase data"]
    handles = [below[0].barh([0], [0], color=color, label=label) for color, _, _, label in used]
    figure.legend(handles=handles, ncols=len(handles), fontsize=8, loc="outside lower center")


def sharded(model: nn.Module) -> nn.Module:
    blocks = mini.members(model)
    return shardtrain.shard(model, units=lambda _, module: module in blocks, transport="process_group")


@record
def main() -> None:
    dist.init_process_group("gloo")
    try:
        mini.Unit, mini.Schedule = Unit, Schedule
        found = {}
        for title, wrap in (("mini.py", mini.shard), ("the engine", sharded)):
            torch.manual_seed(0)
            found[title] = observed(wrap(torchvision.models.resnet18(num_classes=10)), dist.get_rank())
        if dist.get_rank() == 0:
            picture = plot(lambda figure: draw(figure, found), (12, 6.5))
            folder = Path("outputs/beside")
            folder.mkdir(parents=True, exist_ok=True)
            if not isinstance(picture, str):  # else it says why there is none
                Image.fromarray(picture).save(folder / "beside.png")
                picture = f"written to {folder}/beside.png"
            print(picture)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

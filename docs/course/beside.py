"""Draw the memory and the messages of one step of `docs/course/mini.py` beside the engine's, as one picture.

    torchrun --nproc-per-node 2 docs/course/beside.py

Both train the same ResNet-18 in the same units over messages. `outputs/beside/beside.png` shows rank 0:
memory by kind over the operations of one step, and when another step computes and sends.
"""

import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mini
import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardtrain

KINDS = ("parameters", "optimizer", "gradients", "gathered", "activations", "other")
ROUNDS = 8
COLORS = ("#123c69", "tab:cyan", "tab:purple", "tab:orange", "tab:green", "0.7")
PHASES = {"forward": "activations", "backward": "gradients"}  # and the kind of what operations make there


class Memory(TorchDispatchMode):
    """The bytes of all storages by kind after every operation. A released storage has 0."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "forward"
        self.points: list[tuple[str, list[int]]] = []  # a phase, and bytes by kind
        self.storages: dict[Any, tuple[weakref.ref[Any], str]] = {}

    def see(self, tree: object, kind: str, again: bool = False) -> None:
        """Note the storages in ``tree`` that are new, or all of them ``again``, as ``kind``."""
        for tensor in [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]:
            storage = tensor.untyped_storage()
            known = self.storages.get(storage._cdata)
            if again or known is None or known[0]() is None:
                self.storages[storage._cdata] = (weakref.ref(storage), kind)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.see((args, kwargs), "gathered" if self.phase == "forward" else "gradients")
        result = func(*args, **(kwargs or {}))
        self.see(result, PHASES[self.phase])
        sizes = dict.fromkeys(KINDS, 0)
        for reference, kind in self.storages.values():
            storage = reference()
            sizes[kind] += storage.nbytes() if storage is not None else 0
        self.points.append((self.phase, list(sizes.values())))
        return result


def observed(wrap: Any) -> tuple[Memory, Callable[[], None]]:
    """Return the memory of the second step, and a function that takes another step."""
    torch.manual_seed(0)
    model = wrap(torchvision.models.resnet18(num_classes=10))
    memory = Memory()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    images = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    labels = torch.arange(16) % 10

    def step() -> None:
        memory.phase = "forward"
        loss = nn.functional.cross_entropy(model(images), labels)
        memory.phase = "backward"
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # makes the optimizer's state
    memory.see(list(model.parameters()), "parameters")
    memory.see(list(optimizer.state.values()), "optimizer")
    memory.see([*model.buffers(), images, labels], "other")
    for module in model.modules():  # what its parameters show while it computes is gathered
        module.register_forward_pre_hook(lambda it, _: memory.see([*it.parameters(False)], "gathered", True))
    with memory:
        step()
    return memory, step


def length(events: list[Any]) -> float:
    """Return the microseconds from the first event to the last one's end."""
    ranges = [event.time_range for event in events]
    return float(max(each.end for each in ranges) - min(each.start for each in ranges))


def shortest(*steps: Callable[[], None]) -> list[list[Any]]:
    """Return the profiler's events of the shortest of `ROUNDS` runs of each step.

    The steps take turns, since other programs disturb some runs.
    """
    runs: list[list[list[Any]]] = [[] for _ in steps]
    for _ in range(ROUNDS):
        for own, step in zip(runs, steps, strict=True):
            with profile() as seen:
                step()
            own.append([*seen.events()])
    return [min(own, key=length) for own in runs]


def draw(title: str, memory: Memory, events: list[Any], above: Any, below: Any) -> None:
    """Draw a column: memory above; below when torch computes and when gloo's messages are under way."""
    sizes = torch.tensor([point for _, point in memory.points]) / 2**20
    above.stackplot(range(len(sizes)), sizes.T, labels=KINDS, colors=COLORS, lw=0)
    above.axvline([phase for phase, _ in memory.points].index("backward"), color="0.3", lw=0.8)
    above.set_title(f"{title}: a peak of {sizes.sum(1).max():.0f} MiB")
    above.set(xlabel="operations of a step; from the line on, backward", xmargin=0)
    for lane, (name, color) in enumerate({"aten::": "tab:blue", "gloo:": "tab:orange"}.items()):
        spans = [event.time_range for event in events if event.name.startswith(name)]
        bars = [(span.start / 1e3, (span.end - span.start) / 1e3) for span in spans]
        below.broken_barh(bars, (lane, 0.8), color=color, lw=0)
    below.set(yticks=[0.4, 1.4], yticklabels=["operations", "messages"], xlabel="ms")


def main() -> None:
    from matplotlib.figure import Figure

    dist.init_process_group("gloo")
    figure = Figure(figsize=(12, 6.5), dpi=110, layout="constrained")
    above, below = figure.subplots(2, 2, sharey="row", height_ratios=(5, 1))
    of_mini, step_of_mini = observed(mini.shard)
    of_engine, step_of_engine = observed(partial(shardtrain.shard, units="blocks", transport="process_group"))
    events = shortest(step_of_mini, step_of_engine)
    draw("mini.py", of_mini, events[0], above[0], below[0])
    draw("the engine", of_engine, events[1], above[1], below[1])
    above[0].legend(title="MiB of rank 0", loc="upper left", fontsize=8, reverse=True)
    if dist.get_rank() == 0:
        Path("outputs/beside").mkdir(parents=True, exist_ok=True)
        figure.savefig("outputs/beside/beside.png")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

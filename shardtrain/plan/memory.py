"""Record the memory of one step: which storages exist when, by what they hold; as numbers and as a picture.

Every operation passes through a dispatch mode, which sees every new tensor. Weak references report when a
storage is freed. This works with and without data (torch's ``FakeTensorMode``), so that plans and
measurements can be compared. Temporary memory of kernels and the allocator's reserve are not counted.

The engine knows its own memory: shards, full vectors, buffers for gradients. Other memory is classified by
the time at which it was allocated::

    forward                                  activations
    backward, in a parameter's own node      gradients: as they arrive, are laid out, and are reduced
    backward, elsewhere                      activations, their gradients included
    before forward, update                   other, with the batch and buffers
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardtrain import introspect
from shardtrain.job.format import MIB
from shardtrain.job.pictures import Picture, plot
from shardtrain.job.step import Step
from shardtrain.optim import Ema

# What a tensor can hold, and its colour in pictures; `monitor.metrics.PHASES` has the colours of time.
MEMORY_KINDS = {
    "parameters": "#123c69",
    "optimizer": "tab:cyan",
    "gradients": "tab:purple",
    "gathered": "tab:orange",
    "activations": "tab:green",
    "other": "0.7",
}
_LAYS_OUT = torch.ops.aten._foreach_copy_.default  # in backward, what the engine does with gradients
MOST_NAMES = 60  # units named along the axis
LONGEST_NAME = 20  # characters of a unit's name there; longer names are shown by their ends


class MemoryPoint(NamedTuple):
    """Hold the memory of one rank after one operation of the step. ``bytes``: one number per MEMORY_KIND."""

    phase: str  # forward | backward | update
    unit: str
    bytes: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.bytes)


class MemoryTimeline(NamedTuple):
    """Hold the memory of one rank over one step, operation by operation."""

    points: tuple[MemoryPoint, ...]

    @property
    def peak(self) -> MemoryPoint:
        return max(self.points, key=lambda point: point.total)

    def most(self, kind: str) -> int:
        """Return the most bytes of ``kind`` at any point."""
        index = list(MEMORY_KINDS).index(kind)
        return max(point.bytes[index] for point in self.points)

    def words(self) -> str:
        """Return a text such as ``The peak of 93.1 MiB, in backward of layer4.1, consists of …``."""
        peak = self.peak
        parts = sorted(zip(peak.bytes, MEMORY_KINDS, strict=True), reverse=True)
        held = [f"{size / MIB:.1f} MiB {kind}" for size, kind in parts if size >= MIB / 20]
        listed = f"{', '.join(held[:-1])} and {held[-1]}" if len(held) > 1 else held[0]
        where = peak.phase if peak.phase == "update" else f"{peak.phase} of {peak.unit}"
        return f"The peak of {peak.total / MIB:.1f} MiB, in {where}, consists of {listed}."

    def picture(self, capacity: float | None = None) -> Picture | str:
        """Draw stacked areas over the step, below a line of the ``capacity`` in bytes; or return why not."""
        return plot(partial(self._draw, capacity), inches=(11, 5))

    def _draw(self, capacity: float | None, figure: Any) -> None:
        axes = figure.subplots()
        rows = [[size / MIB for size in sizes] for sizes in zip(*(p.bytes for p in self.points), strict=True)]
        colors = list(MEMORY_KINDS.values())
        axes.stackplot(range(len(self.points)), rows, labels=MEMORY_KINDS, colors=colors, linewidth=0)
        self._mark_units(axes)
        at = self.points.index(self.peak)
        highest = top = self.peak.total / MIB
        axes.annotate(f"{top:.1f} MiB", (at, top), (0, 4), textcoords="offset points", ha="center")
        if capacity is not None:  # above the picture where it is far from what is needed
            room = capacity / MIB
            axes.axhline(room, color="black", linestyle="--", label=f"a rank has {room:,.0f} MiB")
            highest = max(top, min(room, 2 * top))
        axes.margins(x=0)
        axes.set_ylim(0, 1.12 * highest)
        axes.set(xlabel="operations of the step, by unit", ylabel="MiB per rank")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, reverse=True)
        figure.suptitle(self.words(), fontsize=9, wrap=True)

    def _mark_units(self, axes: Any) -> None:
        for phase, run in groupby(enumerate(self.points), key=lambda item: item[1].phase):
            first = next(run)[0]
            axes.axvline(first, color="0.3", linewidth=0.8)
            axes.text(first, 1.01, phase, fontsize=8, transform=axes.get_xaxis_transform())
        named: dict[int, str] = {}  # by the first of consecutive points in one unit
        for (_, unit), run in groupby(enumerate(self.points), key=lambda item: item[1][:2]):
            first = next(run)[0]
            if not named or first - max(named) >= len(self.points) / MOST_NAMES:
                named[first] = unit if len(unit) <= LONGEST_NAME else f"…{unit[1 - LONGEST_NAME :]}"
        axes.set_xticks(list(named), list(named.values()), rotation=90, fontsize=7)


@dataclass(eq=False)
class Life:
    """Record one storage: its size, what it holds, and the instants at which it was made and freed."""

    size: int
    kind: str
    born: int
    died: int = sys.maxsize


class LiveTensors(TorchDispatchMode):
    """Record every operation of a ``step`` over ``batches``, and the life of every storage, while entered."""

    def __init__(self, step: Step, batches: Sequence[Sequence[Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._instants: list[tuple[str, str, int]] = []  # phase, unit, bytes that the engine had gathered
        self._lives: list[Life] = []
        self._model = inside = introspect(step.model)
        self._known: dict[int, Life] = {}  # existing storages, by address
        self._watches: list[weakref.ref[Any]] = []
        self._phase = ""  # the last one that the engine named
        self._fixed = {"parameters": inside.shard_bytes, "gradients": inside.transport.reserved}
        ours = {_address(tensor) for tensor in inside.tensors}
        averages = step.ema.held() if step.ema is not None else []
        present = {
            "gradients": [p.grad for p in step.model.parameters() if p.grad is not None],
            "optimizer": optimizer_tensors(step.optimizer),
            "other": [*step.model.buffers(), *chain(*batches), *averages],
        }
        for kind, tensors in present.items():
            for tensor in tensors:
                if _address(tensor) not in ours:
                    self._see(tensor, kind)

    def timeline(self) -> MemoryTimeline:
        """Return what was recorded."""
        count = len(self._instants)
        changes = {kind: [self._fixed.get(kind, 0)] + [0] * count for kind in MEMORY_KINDS}
        for life in self._lives:
            changes[life.kind][min(life.born, count)] += life.size
            changes[life.kind][min(life.died, count)] -= life.size
        rows = {kind: list(accumulate(row[:count])) for kind, row in changes.items()}
        phases, units, rows["gathered"] = (list(column) for column in zip(*self._instants, strict=True))
        sizes = zip(*rows.values(), strict=True)
        return MemoryTimeline(tuple(map(MemoryPoint, phases, units, sizes)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)  # a query of a tensor's properties, which only fake tensors get here
        given = _addresses((args, kwargs))
        result = func(*args, **kwargs)
        self._note(func, given.keys(), _addresses(result))
        return result

    def _note(self, func: Any, given: Set[int], made: dict[int, Tensor]) -> None:
        phase, unit = self._model.under_way
        if phase != "rest":
            self._phase = phase
        else:  # the batch comes before a forward, the loss after it, and the update after a backward
            phase = "update" if self._phase == "backward" else "forward"
        kind = "activations" if phase != "update" and self._phase else "other"
        if phase == "backward" and (func is _LAYS_OUT or _in_gradient()):
            kind = "gradients"
            for address in given & self._known.keys():
                life = self._known[address]
                life.kind = kind if life.kind == "activations" else life.kind
        for address in made.keys() - given:  # views of an argument are no new memory
            self._see(made[address], kind)
        gathered = 0 if self._model.transport.in_place else self._model.gathered.bytes
        self._instants.append((phase, unit, gathered))

    def _see(self, tensor: Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._known or not storage.nbytes():
            return
        life = Life(storage.nbytes(), kind, len(self._instants))
        self._lives.append(life)
        self._known[address] = life

        def ended(_: object) -> None:
            life.died = len(self._instants)
            if self._known.get(address) is life:
                del self._known[address]

        self._watches.append(weakref.ref(storage, ended))


def memory_of_step(step: Step, batches: Sequence[Sequence[Tensor]]) -> MemoryTimeline:
    """Run a ``step``, not the first one, and return this rank's memory during it. Works without data, too."""
    live = LiveTensors(step, batches)
    with live:
        step(batches)
    return live.timeline()


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, ema: Ema | None) -> dict[str, int]:
    """Return the bytes of this rank's state, without padding. Every trainable parameter has a gradient."""
    state: dict[str, Iterable[Tensor]] = {
        "parameters": model.parameters(),
        "gradients": [param for param in model.parameters() if param.requires_grad],
        "optimizer": optimizer_tensors(optimizer),
        "averages": ema.held() if ema is not None else [],
        "buffers": model.buffers(),
    }
    return {kind: sum(tensor.nbytes for tensor in tensors) for kind, tensors in state.items()}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all tensors of ``optimizer``'s state."""
    return [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)]


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _addresses(tree: object) -> dict[int, Tensor]:
    """Return the tensors in ``tree`` by storage, one per storage."""
    return {_address(leaf): leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}


def _in_gradient() -> bool:
    """Return whether autograd runs a parameter's accumulation node, or is at the end of backward."""
    node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
    return node is None or node.name() == "torch::autograd::AccumulateGrad"

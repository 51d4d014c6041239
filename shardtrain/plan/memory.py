"""The memory of one step: which storages exist when, by what they hold.

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardtrain import introspect, torch_private
from shardtrain.config.format import MIB
from shardtrain.job.step import Step
from shardtrain.optim import Ema

# What a tensor can hold.
MEMORY_KINDS = ("parameters", "optimizer", "gradients", "gathered", "activations", "other")
_LAYS_OUT = torch.ops.aten._foreach_copy_.default  # in backward, what the engine does with gradients


class MemoryPoint(NamedTuple):
    """The memory of one rank after one operation of the step. ``bytes``: one number per kind of memory."""

    phase: str  # forward | backward | update
    unit: str
    bytes: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.bytes)


class MemoryTimeline(NamedTuple):
    """The memory of one rank over one step, operation by operation."""

    points: tuple[MemoryPoint, ...]

    @property
    def peak(self) -> MemoryPoint:
        return max(self.points, key=lambda point: point.total)

    def most(self, kind: str) -> int:
        """Return the most bytes of ``kind`` at any point."""
        index = MEMORY_KINDS.index(kind)
        return max(point.bytes[index] for point in self.points)

    def words(self) -> str:
        """Return a text such as ``The peak of 93.1 MiB, in backward of layer4.1, consists of …``."""
        peak = self.peak
        parts = sorted(zip(peak.bytes, MEMORY_KINDS, strict=True), reverse=True)
        shown = [part for part in parts if part[0] >= MIB / 20] or parts[:1]
        texts = [f"{size / MIB:.1f} MiB {kind}" for size, kind in shown]
        listed = f"{', '.join(texts[:-1])} and {texts[-1]}" if len(texts) > 1 else texts[0]
        where = peak.phase if peak.phase == "update" else f"{peak.phase} of {peak.unit}"
        return f"The peak of {peak.total / MIB:.1f} MiB, in {where}, consists of {listed}."


@dataclass(eq=False)
class Life:
    """The memory in one storage: its size, what it holds, and the instants at which it came and went."""

    size: int
    kind: str
    born: int
    storage: weakref.ref[Any]
    died: int = sys.maxsize

    @property
    def was_resized(self) -> bool:
        """Whether the storage still exists, and has another size now."""
        storage = self.storage()
        return storage is not None and storage.nbytes() != self.size


class LiveTensors(torch_private.TorchDispatchMode):  # type: ignore[misc]
    """Every operation of a ``step`` over ``batches``, and the life of every storage, while entered."""

    def __init__(self, step: Step, batches: Sequence[Sequence[Tensor]]) -> None:
        super().__init__()
        self._instants: list[tuple[str, str, int]] = []  # phase, unit, bytes that the engine had gathered
        self._lives: list[Life] = []
        self._model = introspect(step.model)
        self._known: dict[int, Life] = {}  # existing storages, by address
        self._phase = ""  # the last one that the engine named
        self._fixed = {
            "parameters": self._model.shard_bytes,
            "gradients": self._model.transport.transport.reserved,
        }
        self._ours = {_address(tensor) for tensor in self._model.tensors}
        averages = step.ema.held() if step.ema is not None else []
        present = {
            "gradients": [p.grad for p in step.model.parameters() if p.grad is not None],
            "optimizer": optimizer_tensors(step.optimizer),
            "other": [*step.model.buffers(), *chain(*batches), *averages],
        }
        for kind, tensors in present.items():
            for tensor in tensors:
                self._see(tensor, kind)

    def timeline(self) -> MemoryTimeline:
        """Return what was recorded."""
        count = len(self._instants)
        changes = {kind: [self._fixed.get(kind, 0)] + [0] * count for kind in MEMORY_KINDS}
        for life in self._lives:
            changes[life.kind][min(life.born, count)] += life.size
            changes[life.kind][min(life.died, count)] -= life.size
        sizes = {kind: list(accumulate(row[:count])) for kind, row in changes.items()}
        phases, units, sizes["gathered"] = (list(column) for column in zip(*self._instants, strict=True))
        by_instant = zip(*sizes.values(), strict=True)
        return MemoryTimeline(tuple(map(MemoryPoint, phases, units, by_instant)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)  # a query of a tensor's properties, which only fake tensors get here
        used = _addresses((args, kwargs))
        result = func(*args, **kwargs)
        self._note(func, used, _addresses(result))
        return result

    def _note(self, func: Any, used: dict[int, Tensor], made: dict[int, Tensor]) -> None:
        """Record an operation, with the tensors that it has ``used`` and ``made``, by storage."""
        phase, unit = self._model.computing
        if phase != "rest":
            self._phase = phase
        else:  # the batch comes before a forward, the loss after it, and the update after a backward
            phase = "update" if self._phase == "backward" else "forward"
        kind = "activations" if phase != "update" and self._phase else "other"
        if phase == "backward" and (func is _LAYS_OUT or _in_gradient()):
            kind = "gradients"
            for address in used.keys() & self._known.keys():
                life = self._known[address]
                life.kind = kind if life.kind == "activations" else life.kind
        self._end_resized()
        for address in made.keys() - used.keys():  # views of an argument are no new memory
            self._see(made[address], kind)
        if func is _LAYS_OUT:  # in memory that the engine may have allocated again, in the same storage
            for tensor in used.values():
                self._see(tensor, kind)
        gathered = 0 if self._model.transport.in_place else self._model.gathered.bytes
        self._instants.append((phase, unit, gathered))

    def _see(self, tensor: Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._known or address in self._ours or not storage.nbytes():
            return

        def end(_: object) -> None:
            self._end(address, life)

        life = Life(storage.nbytes(), kind, len(self._instants), weakref.ref(storage, end))
        self._lives.append(life)
        self._known[address] = life

    def _end(self, address: int, life: Life) -> None:
        if self._known.get(address) is life:
            life.died = len(self._instants)
            del self._known[address]

    def _end_resized(self) -> None:
        """End the lives of memory that was freed or allocated again in a storage that goes on."""
        for address, life in [*self._known.items()]:
            if life.was_resized:
                self._end(address, life)


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
        "optimizer": optimizer_tensors(optimizer),
        "buffers": model.buffers(),
        "moving average": ema.held() if ema is not None else [],
        "gradients": [param for param in model.parameters() if param.requires_grad],
    }
    return {kind: _bytes(tensors) for kind, tensors in state.items()}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all tensors of ``optimizer``'s state."""
    leaves = torch_private.tree_leaves([*optimizer.state.values()])
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _addresses(tree: object) -> dict[int, Tensor]:
    """Return the tensors in ``tree`` by storage, one per storage."""
    return {_address(leaf): leaf for leaf in torch_private.tree_leaves(tree) if isinstance(leaf, Tensor)}


def _in_gradient() -> bool:
    """Return whether what is allocated in this backward is a gradient.

    It is where autograd runs a parameter's accumulation node, or where it runs no node: at backward's end.
    """
    node = torch_private.current_autograd_node()
    return node is None or node.name() == "torch::autograd::AccumulateGrad"

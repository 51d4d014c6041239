"""Which memory lives when: a count of tensors' storages during a step, by what they hold.

Every operation passes through a dispatch mode, so every tensor that it makes is seen, and a storage that
dies says so. That works alike on tensors with data and without (torch's ``FakeTensorMode``), which is why
a plan and a measurement can be laid side by side. Memory that a kernel takes for itself and gives back, and
what an allocator keeps for later, is not a tensor's and is not counted.

What is known from the engine is taken from there: shards, full vectors, memory set aside for gradients. The
rest is told apart by when it was made::

    forward                                  activations
    backward, in a parameter's own node      gradients: what arrives, is laid end to end, and is reduced
    backward, elsewhere                      activations, their gradients among them
    before forward, update                   other, beside the batch and buffers
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardtrain import introspect

KINDS = ("parameters", "optimizer", "gradients", "gathered", "activations", "other")


class Instant(NamedTuple):
    """After one operation: where in the step it was, and the bytes that the engine accounts for."""

    phase: str  # forward | backward | update
    unit: str
    gathered: int


@dataclass(eq=False)
class Life:
    """One storage: its size, what it holds, and the instants between which it lived."""

    size: int
    kind: str
    born: int
    died: int | None = None


class LiveTensors(TorchDispatchMode):
    """While it is entered: every instant of a step of ``model``, and the life of every storage."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, present: Iterable[Tensor]) -> None:
        """``present``: tensors that are there before, the batch for instance."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.instants: list[Instant] = []
        self.lives: list[Life] = []
        self._model = inside = introspect(model)
        self._known: dict[int, Life] = {}  # by the address of a storage that lives
        self._watches: list[weakref.ref[Any]] = []
        self._phase = ""  # the last one that the engine named
        self.fixed = {"parameters": inside.shard_bytes, "gradients": inside.transport.reserved}
        ours = {_address(tensor) for tensor in inside.tensors}
        for kind, tensors in (
            ("gradients", [p.grad for p in inside.elements_by_rank if p.grad is not None]),
            ("optimizer", optimizer_tensors(optimizer)),
            ("other", [*model.buffers(), *present]),
        ):
            for tensor in tensors:
                if _address(tensor) not in ours:
                    self._see(tensor, kind)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func.namespace == "prim"
        ):  # a question about a tensor, which only those without data are asked here
            return func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._note(given, made)
        return result

    def _note(self, given: list[Tensor], made: list[Tensor]) -> None:
        phase, unit = self._where()
        in_gradient = phase == "backward" and _in_gradient()
        there = {_address(tensor) for tensor in given}
        if in_gradient:
            for address in there & self._known.keys():
                life = self._known[address]
                life.kind = "gradients" if life.kind == "activations" else life.kind
        kind = "gradients" if in_gradient else "activations" if self._computes(phase) else "other"
        for tensor in made:
            if _address(tensor) not in there:  # a view of memory that was not seen is not new memory
                self._see(tensor, kind)
        gathered = 0 if self._model.transport.in_place else self._model.gathered.bytes
        self.instants.append(Instant(phase, unit, gathered))

    def _where(self) -> tuple[str, str]:
        phase, unit = self._model.under_way
        if phase != "rest":
            self._phase = phase
        elif self._phase == "backward":
            phase = "update"
        else:
            phase = "forward"  # before it, or the loss after it
        return phase, unit

    def _computes(self, phase: str) -> bool:
        """Whether the model or the loss is under way, rather than an update or the next batch."""
        return phase != "update" and bool(self._phase)

    def _see(self, tensor: Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._known or not storage.nbytes():
            return
        life = Life(storage.nbytes(), kind, len(self.instants))
        self.lives.append(life)
        self._known[address] = life

        def ended(_: object) -> None:
            life.died = len(self.instants)
            if self._known.get(address) is life:
                del self._known[address]

        self._watches.append(weakref.ref(storage, ended))


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Every tensor that ``optimizer`` keeps."""
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in kept if isinstance(value, Tensor)]


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _in_gradient() -> bool:
    """Whether autograd runs a parameter's own node, whose hooks lay gradients out, or has run all nodes."""
    node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
    return node is None or node.name() == "torch::autograd::AccumulateGrad"

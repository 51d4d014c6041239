"""What a recorded step has fixed, compared before each replay.

Compared is what is cheap, and what would have a replay use memory that is no longer the model's: modules,
their modes, parameters and buffers; ``requires_grad``, and where parameters lie; options of units; groups of
the optimizer, and its state. Objects are compared by ``is``: the notes hold them, so that nothing else can be
in their place. Hooks, attributes of modules, globals and switches of torch are not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardtrain import torch_private
from shardtrain.engine.hooks import Engine

_PLAIN = (bool, int, float, complex, str, tuple, type(None))
_UNCOMPARED = ("initial_lr of ", "params of ")  # a schedule's own; a list, whose entries are compared
_REQUIRES_GRAD: Any = Tensor.requires_grad  # attributes would ask the class of parameters that show shards


class Fixed:
    """What a step of ``engine``'s model and of ``optimizer`` depends on, as it is when this is made."""

    def __init__(self, engine: Engine, optimizer: Optimizer) -> None:
        self._driver = engine.driver
        self._optimizer = optimizer
        self._modules = {name or "the model": module for name, module in engine.module.named_modules()}
        self._parts = [*chain.from_iterable(map(_parts_of, self._modules.values()))]
        self._params = dict(engine.module.named_parameters())
        self._values = self._list()
        self._named = dict(zip(self._names(), self._values, strict=True))
        self._addresses = self._list_addresses()

    def change(self) -> str:
        """Return in words what has changed first since this was made; "" if nothing has."""
        now = self._list()
        if len(now) != len(self._values) or not all(map(is_, now, self._values)):
            if change := self._difference(dict(zip(self._names(), now, strict=True))):
                return change
            self._values = now  # other objects, equal numbers
        for name, address, before in zip(self._params, self._list_addresses(), self._addresses, strict=True):
            if address != before:
                return f"the memory of {name} changed"
        return ""

    def lines(self) -> list[str]:
        """Return what must be alike on all ranks, whose tensors lie elsewhere."""
        return [f"{name}={value}" for name, value in self._named.items() if isinstance(value, _PLAIN)]

    def _list(self) -> list[Any]:
        """Return all that is compared by ``is``, in the order of `_names`."""
        schedule = self._driver.schedule
        values = [*chain.from_iterable(map(dict.values, self._parts))]
        values += [module.training for module in self._modules.values()]
        with torch_private.DisableTorchFunctionSubclass():
            values += map(_REQUIRES_GRAD.__get__, self._params.values())
        for unit in self._driver.units:
            values.append(self._driver.reductions[unit].divide_by)
            values.append(unit in schedule.keeps)
            values.append(unit in schedule.accumulates)
        for group in self._optimizer.param_groups:
            values += group.values()
            values += group["params"]
        values += chain.from_iterable(map(dict.values, self._optimizer.state.values()))
        return values

    def _names(self) -> Iterator[str]:
        for name, module in self._modules.items():
            yield from (f"{part} of {name}" for part in chain.from_iterable(_parts_of(module)))
        yield from (f"training of {name}" for name in self._modules)
        yield from (f"requires_grad of {name}" for name in self._params)
        for unit in self._driver.units:
            yield f"divide_by of {unit.title}"
            yield f"whether {unit.title} stays whole after forward"
            yield f"whether gradients of {unit.title} wait"
        optimizer = type(self._optimizer).__name__
        for number, group in enumerate(self._optimizer.param_groups):
            title = f"group {number} of {optimizer}"
            yield from (f"{option} of {title}" for option in group)
            yield from (f"parameter {index} of {title}" for index in range(len(group["params"])))
        for number, state in enumerate(self._optimizer.state.values()):
            yield from (f"{key} of state {number} of {optimizer}" for key in state)

    def _difference(self, now: dict[str, Any]) -> str:
        """Return in words what differs first from what was noted."""
        for name in {**self._named, **now}:
            if name.startswith(_UNCOMPARED):
                continue
            if name not in now or name not in self._named:
                return f"{name} was {'removed' if name in self._named else 'added'}"
            before = self._named[name]
            plain = isinstance(before, _PLAIN) and isinstance(now[name], _PLAIN)
            if before is not now[name] and not (plain and before == now[name]):
                return f"{name} was {before} and is {now[name]}" if plain else f"{name} was replaced"
        return ""

    def _list_addresses(self) -> list[int]:
        """Return where parameters lie. A recorded step holds that memory: nothing else can lie there."""
        with torch_private.DisableTorchFunctionSubclass():
            return [*map(Tensor.data_ptr, self._params.values())]


def _parts_of(module: nn.Module) -> list[dict[str, Any]]:
    return [part for part in (module._modules, module._parameters, module._buffers) if part]


class Rates:
    """Learning rates of ``optimizer`` in ``tensors`` of fp32 on ``device``, one for each group.

    A graph would repeat a number for ever. A schedule of torch writes into a rate that is a tensor. What
    users set instead is copied into it.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._device = device
        self.tensors = list[Tensor]()

    def hold(self) -> None:
        """Copy rates that are not in their tensors into these. The host does not wait."""
        for number, group in enumerate(self._optimizer.param_groups):
            rate = group["lr"]
            if number == len(self.tensors):
                self.tensors.append(torch.empty((), dtype=torch.float32, device=self._device))
            own = self.tensors[number]
            if rate is own:
                continue
            own.copy_(rate.detach().squeeze()) if isinstance(rate, Tensor) else own.fill_(rate)
            group["lr"] = own

    def versions(self) -> list[int]:
        """Return autograd's versions of the tensors: whether they are written."""
        return [tensor._version for tensor in self.tensors]

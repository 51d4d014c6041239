"""What a recorded step has fixed, compared before each replay.

Compared is what is cheap, and what would have a replay use memory that is no longer the model's: modules,
their modes, parameters and buffers; ``requires_grad``, and where parameters lie; options of units; groups of
the optimizer, and its state. Objects are compared by ``is``: `Fixed` holds them, so that nothing else can be
in their place.
"""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardtrain import torch_private
from shardtrain.engine.hooks import Engine

_PLAIN = (bool, int, float, complex, str, tuple, type(None))
_UNCOMPARED = ("initial_lr", "params")  # a schedule's own; a list, whose entries are compared
_REQUIRES_GRAD: Any = Tensor.requires_grad  # attributes would ask the class of parameters that show shards


class Fixed:
    """What a step of ``engine``'s model and of ``optimizer`` depends on, as it is when this is made."""

    def __init__(self, engine: Engine, optimizer: Optimizer) -> None:
        self._driver = engine.driver
        self._optimizer = optimizer
        self._modules = [*engine.module.modules()]
        self._parts = [*chain.from_iterable(map(_parts_of, self._modules))]
        self._params = [*engine.module.parameters()]
        self._values = self._list()
        self._addresses = self._list_addresses()

    def change(self) -> str:
        """Return in words what has changed first since this was made; "" if nothing has."""
        for title, now in self._list().items():
            before = self._values[title]
            if len(now) != len(before):
                return f"{title} changed in number"
            if not (all(map(is_, now, before)) or all(map(_is_same, now, before))):
                return f"{title} changed"
        return "the memory of parameters changed" if self._list_addresses() != self._addresses else ""

    def lines(self) -> list[str]:
        """Return what must be alike on all ranks, whose tensors lie elsewhere."""
        lines = []
        for title, values in self._values.items():
            plain = enumerate(values)
            lines += [f"{title}, {number}: {value}" for number, value in plain if isinstance(value, _PLAIN)]
        return lines

    def _list(self) -> dict[str, list[Any]]:
        """Return all that is compared by ``is``, by its title."""
        schedule = self._driver.schedule
        options = []
        for unit in self._driver.units:
            options.append(self._driver.reductions[unit].divide_by)
            options.append(unit in schedule.keeps)
            options.append(unit in schedule.accumulates)
        groups = []
        for group in self._optimizer.param_groups:
            groups += [value for key, value in group.items() if key not in _UNCOMPARED]
            groups += group["params"]
        with torch_private.DisableTorchFunctionSubclass():
            requires_grad = [*map(_REQUIRES_GRAD.__get__, self._params)]
        return {
            "modules or their tensors": [*chain.from_iterable(map(dict.values, self._parts))],
            "training of modules": [module.training for module in self._modules],
            "requires_grad of parameters": requires_grad,
            "options of units": options,
            "groups of the optimizer": groups,
            "state of the optimizer": [
                *chain.from_iterable(map(dict.values, self._optimizer.state.values()))
            ],
        }

    def _list_addresses(self) -> list[int]:
        """Return where parameters lie. A recorded step holds that memory: nothing else can lie there."""
        with torch_private.DisableTorchFunctionSubclass():
            return [*map(Tensor.data_ptr, self._params)]


def _is_same(now: Any, before: Any) -> bool:
    return now is before or (isinstance(now, _PLAIN) and isinstance(before, _PLAIN) and now == before)


def _parts_of(module: nn.Module) -> list[dict[str, Any]]:
    return [part for part in (module._modules, module._parameters, module._buffers) if part]


class Rates:
    """Learning rates of ``optimizer`` in ``tensors`` of fp32 on ``device``, one for each group.

    A graph would repeat a number for ever. A schedule of torch writes into a rate that is a tensor.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._device = device
        self.tensors = list[Tensor]()

    def hold(self) -> None:
        """Copy each rate that is a number, or another tensor, into its own. The host does not wait."""
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

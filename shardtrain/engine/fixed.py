"""Note what a captured step has fixed, so that a change is seen before the step is replayed.

A graph repeats launches: on the same memory, with the same numbers, whatever the host has decided since. So
all that decides what a step launches, and where, is noted as it is captured, and compared at each call::

    the model       modules, hooks, modes, memory of buffers; attributes that are plain values such as a
                    dropout's ``p``, tensors, or lists and tuples of both
    parameters      memory, ``requires_grad``, hooks
    units           what users change of their options between steps
    the optimizer   groups with their options, hooks, and state: memory of tensors, values of numbers
    torch           autocast, grad mode, switches that choose kernels, hooks of all modules and optimizers

Nothing here reads a tensor's value, so the host does not wait for the device. What the step's own code holds
is not seen: its closure, globals, attributes of other objects, and those of modules that are dicts or other
objects. An attribute that the step computes with a gradient, such as a loss to add, is not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from shardtrain import torch_private
from shardtrain.engine.hooks import Engine

_PLAIN = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOLDERS = frozenset((torch.Tensor, nn.Parameter, list, tuple))  # of memory, in attributes
_NO_OPTIONS = ("params", "param_names", "initial_lr")  # of groups; the last is a schedule's own

# The parts of what is noted of one parameter, of one unit, and of torch.
_OF_PARAMETER = ("requires_grad", "the memory", "the hooks", "the post-accumulate hooks")
_OF_UNIT = ("divide_by", "reshard_after_forward", "whether gradients wait")
_OF_HOOKS = (
    "the hooks of all modules",
    "the hooks of all optimizers",
    "the hooks of the optimizer before a step",
    "the hooks of the optimizer after a step",
)
_OF_TORCH = (
    "grad mode",
    "inference mode",
    "autocast",
    "the dtype of autocast",
    "deterministic algorithms",
    "the precision of matrix products",
)

Entry = tuple[Any, ...]


class Fixed(NamedTuple):
    """Hold what one capture fixes. Each field but the last two has an entry per thing."""

    modules: tuple[Entry, ...]
    params: tuple[Entry, ...]
    units: tuple[Entry, ...]
    groups: tuple[Entry, ...]
    state: tuple[Entry, ...]
    hooks: Entry
    torch: Entry


class Memory(NamedTuple):
    """Say where a tensor lies, and what it is."""

    address: int
    dtype: torch.dtype
    shape: torch.Size


class Watch:
    """Note what a step of ``engine``'s model and of ``optimizer`` depends on."""

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._modules = dict[nn.Module, str]()
        self._params = dict[nn.Parameter, str]()
        self._noted: tuple[Entry, ...] = ()  # of the modules, when these were listed last

    def note(self) -> Fixed:
        """Return what is fixed now."""
        modules = tuple([_of_module(module) for module in self._modules])
        if not modules or modules != self._noted:  # perhaps others are attached
            root = self._engine.module
            self._modules = {module: name for name, module in root.named_modules()}
            self._params = {param: name for name, param in root.named_parameters()}
            modules = tuple([_of_module(module) for module in self._modules])
            self._noted = modules
        state = list[Entry]()
        for group in self._optimizer.param_groups:
            state += [_of_state(self._optimizer.state.get(param, {})) for param in group["params"]]
        return Fixed(
            modules,
            tuple([_of_parameter(param) for param in self._params]),
            tuple(self._of_units()),
            tuple([_of_group(group) for group in self._optimizer.param_groups]),
            tuple(state),
            _of_hooks(self._optimizer),
            _of_torch(self._engine.driver.device),
        )

    def _of_units(self) -> Iterator[Entry]:
        driver = self._engine.driver
        schedule = driver.schedule
        for unit in driver.units:
            divide_by = driver.reductions[unit].divide_by
            yield divide_by, unit in schedule.keeps, unit in schedule.accumulates

    def name_of(self, param: nn.Parameter) -> str:
        return self._params[param]

    def lines(self, fixed: Fixed) -> list[str]:
        """Return what must be alike on all ranks, whose memory lies elsewhere."""
        lines = [f"{len(fixed.modules)} modules and {len(fixed.params)} parameters", f"torch: {fixed.torch}"]
        for unit, entry in zip(self._engine.driver.units, fixed.units, strict=True):
            lines.append(f"options {entry} of {unit.title}")
        for name, (_, plain, *_) in zip(self._modules.values(), fixed.modules, strict=True):
            lines.append(f"training={dict(plain)['training']} of {name or 'the model'}")
        return lines

    def difference(self, before: Fixed, after: Fixed) -> str:
        """Return in words what differs first. ``after``: the latest that was noted."""
        for what, was, now in self._pairs(before, after):
            if was != now and type(was) in _PLAIN and type(now) in _PLAIN:
                return f"{what} was {was} and is {now}"
            if was != now:
                return f"{what} changed"
        return "modules, parameters or groups were added or removed"

    def _pairs(self, before: Fixed, after: Fixed) -> Iterator[tuple[str, Any, Any]]:
        """Yield what is compared: its name, and both values."""
        for name, was, now in zip(self._modules.values(), before.modules, after.modules, strict=False):
            yield from _pairs_of_module(name or "the model", was, now)
        for name, was, now in zip(self._params.values(), before.params, after.params, strict=False):
            yield from _parts(_OF_PARAMETER, name, was, now)
        for unit, was, now in zip(self._engine.driver.units, before.units, after.units, strict=True):
            yield from _parts(_OF_UNIT, unit.title, was, now)
        optimizer = type(self._optimizer).__name__
        for number, (was, now) in enumerate(zip(before.groups, after.groups, strict=False)):
            yield from _options(f"group {number} of {optimizer}", was, now)
        for was, now in zip(before.state, after.state, strict=False):
            yield from _options(f"the state of {optimizer}", was, now)
        yield from zip(_OF_HOOKS, before.hooks, after.hooks, strict=True)
        yield from zip(_OF_TORCH, before.torch, after.torch, strict=True)


def _pairs_of_module(title: str, before: Entry, after: Entry) -> Iterator[tuple[str, Any, Any]]:
    yield f"the modules in {title}", before[0], after[0]
    yield from _options(title, before[1], after[1])
    yield f"the hooks of {title}", before[2], after[2]
    yield f"the memory of buffers of {title}", before[3], after[3]
    yield from _options(title, before[4], after[4])


def _parts(parts: Sequence[str], title: str, before: Entry, after: Entry) -> Iterator[tuple[str, Any, Any]]:
    for part, was, now in zip(parts, before, after, strict=True):
        yield f"{part} of {title}", was, now


def _options(title: str, before: Entry, after: Entry) -> Iterator[tuple[str, Any, Any]]:
    old = dict(before)
    new = dict(after)
    for key in {**old, **new}:
        yield f"{key} of {title}", old.get(key), new.get(key)


def _of_module(module: nn.Module) -> Entry:
    """Return children and parameters, plain attributes, keys of hooks, memory of buffers and attributes."""
    attributes = module.__dict__
    children = tuple(attributes["_modules"].values()), tuple(map(id, attributes["_parameters"].values()))
    plain = tuple([item for item in attributes.items() if type(item[1]) in _PLAIN])
    hooks = tuple([tuple(attributes[name]) for name in _HOOKS])
    memory = tuple([(name, _noted(value)) for name, value in attributes.items() if type(value) in _HOLDERS])
    return children, plain, hooks, tuple(map(_noted, attributes["_buffers"].values())), memory


def _of_parameter(param: nn.Parameter) -> Entry:
    hooks = tuple(param._backward_hooks or ())
    postponed = tuple(param._post_accumulate_grad_hooks or ())
    return param.requires_grad, _noted(param), hooks, postponed


def _of_hooks(optimizer: torch.optim.Optimizer) -> Entry:
    """Return the keys of hooks that no module has. `Optimizers` reorders those of an optimizer."""
    of_modules = (
        torch_private.global_forward_pre_hooks,
        torch_private.global_forward_hooks,
        torch_private.global_backward_pre_hooks,
        torch_private.global_backward_hooks,
    )
    of_optimizers = torch_private.global_optimizer_pre_hooks, torch_private.global_optimizer_post_hooks
    return (
        tuple(map(tuple, of_modules)),
        tuple(map(tuple, of_optimizers)),
        frozenset(optimizer._optimizer_step_pre_hooks),
        frozenset(optimizer._optimizer_step_post_hooks),
    )


def _of_group(group: dict[str, Any]) -> Entry:
    """Return a group's options, and the ids of its parameters."""
    options = [(key, _noted(value)) for key, value in group.items() if key not in _NO_OPTIONS]
    return ("the parameters", tuple(map(id, group["params"]))), *options


def _of_state(state: dict[str, Any]) -> Entry:
    return tuple([(key, _noted(value)) for key, value in state.items()])


def _of_torch(device: torch.device) -> Entry:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(device.type),
        torch.get_autocast_dtype(device.type),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )


def _noted(value: Any) -> Any:
    """Return the memory of a tensor, a plain value itself, and of another object its class."""
    if isinstance(value, torch.Tensor):
        if value.grad_fn is not None:
            return "computed"
        return Memory(value.data_ptr(), value.dtype, value.shape)
    if isinstance(value, list | tuple):
        return tuple(map(_noted, value))
    return value if type(value) in _PLAIN else type(value).__name__

"""State dicts whose values know which part of the whole tensor they are.

A rank holds an interval of a parameter's elements, in memory order. ``torch.distributed.checkpoint`` (DCP)
knows boxes: offsets and sizes in each dimension. A 3×4 parameter of which rank 0 holds elements 0:6::

    a a a a          rank 0   offsets (0, 0) sizes (1, 4), offsets (1, 0) sizes (1, 2)
    a a b b          rank 1   offsets (1, 2) sizes (1, 2), offsets (2, 0) sizes (1, 4)
    b b b b

An interval of an n-dimensional tensor is at most 2n - 1 boxes, each a view of it. So DCP reads and writes
pieces in place, and checkpoints of FSDP2 and of plain models load at any world size. Anything else that
stores tensors would store this rank's part under the parameter's name, and is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardtrain.engine.attachment import Attachment
from shardtrain.engine.hooks import Engine
from shardtrain.engine.segment import ShardedParam
from shardtrain.engine.unit import Shown, Unit
from shardtrain.pieces.part import Part
from shardtrain.pieces.piece import Piece, plain

_PART = "shardtrain_part"  # the key in a pickled state that says of which part it is


class StateDicts(Attachment):
    """The state dicts of one model and of its optimizers, whose values are pieces."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._described: WeakSet[torch.optim.Optimizer] = WeakSet()

    def attach(self) -> None:
        engine = self._engine
        for unit in engine.units:
            for member in unit.members:
                for module, attribute in member.info.holders:
                    for handle in _attach(module, attribute, unit, member):
                        engine.keep(handle)
        engine.keep(engine.module.register_state_dict_pre_hook(self._before))
        after = partial(StateDicts._after, self)  # on which torch sets an attribute
        engine.keep(engine.module.register_state_dict_post_hook(after))

    def _before(self, *_: Any) -> None:
        """Have a state dict show parameters as they are."""
        driver = self._engine.driver
        driver.before_hide(driver.schedule.unannounced)
        driver.work("state dict")

    def _after(self, *_: Any) -> None:
        self._engine.driver.rest("state dict")

    def describe(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the state dict of ``optimizer`` give local shards to torch.distributed.checkpoint."""
        if optimizer not in self._described:
            self._described.add(optimizer)
            _describe_state(optimizer, self._engine.members)


def _attach(module: nn.Module, attribute: str, unit: Unit, member: ShardedParam) -> list[RemovableHandle]:
    """Have ``module`` return a piece of its parameter ``attribute`` in ``state_dict()``, and load it."""
    own_part = member.part

    def give(called: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        value = state.get(prefix + attribute)
        if unit.shown is Shown.PRIVATE or value is None or isinstance(value, nn.Parameter):
            return  # full inside `unsharded`; the parameter itself with keep_vars=True
        if unit.shown is not Shown.SHARD and called is module:
            value = member.local_view
        value = plain(value)  # in a user's hook of a step, of a part of the model
        if value.shape == own_part.local_shape:
            state[prefix + attribute] = _piece(value, member)

    def take(_: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        value = state.get(prefix + attribute)
        cut = own_part.shape != own_part.local_shape and unit.shown is not Shown.PRIVATE
        if cut and value is not None and value.shape == own_part.shape:
            raise ValueError(
                f"load_state_dict() was given the whole {own_part.name}, of which a rank has a piece; "
                "use shardtrain.load_full_state_dict(model, state)"
            )
        if isinstance(value, Piece):
            part = value.owners.part or own_part  # one of other elements has another shape
            if part.numel and (part.start, part.stop) != (own_part.start, own_part.stop):
                raise ValueError(
                    f"load_state_dict() was given elements {part.start}:{part.stop} of {own_part.name}, "
                    f"of which this rank has {own_part.start}:{own_part.stop}; "
                    "torch.distributed.checkpoint.save and load carry state between models that are "
                    "sharded in other ways"
                )
            state[prefix + attribute] = value.plain

    return [module.register_state_dict_post_hook(give), module.register_load_state_dict_pre_hook(take)]


class LocalState(dict[Any, Any]):
    """An optimizer's state by parameter, whose tensors are pieces. Pickled, it is plain tensors.

    So what ``optimizer.state_dict()`` returns can be saved per rank, as always. What torch's
    ``get_optimizer_state_dict`` makes of it, by parameter names, cannot. ``parts``: of parameters. Pickled, a
    state says which part it is of, since pieces of two ranks may have one shape.
    """

    def __init__(self, state: Mapping[Any, Any]) -> None:
        super().__init__(state)
        self.parts: dict[Any, Part] = {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: OrderedDict[Any, Any] = OrderedDict()  # which `torch.load` reads with weights_only
        for key, items in self.items():
            plain[key] = {name: getattr(value, "plain", value) for name, value in items.items()}
            if key in self.parts:
                part = self.parts[key]
                # Numbers alone: torch's load_state_dict would convert a text.
                plain[key][_PART] = part.start, part.stop, *part.shape
        return plain.__reduce_ex__(protocol)


def _describe_state(optimizer: torch.optim.Optimizer, members: Iterable[ShardedParam]) -> None:
    """Have torch's ``get_optimizer_state_dict`` return pieces of the optimizer's state, and load them."""
    members = WeakSet(members)  # so that the optimizer does not keep the model alive

    def give(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        state = LocalState(saved["state"])
        for key, member in _members_of(members, optimizer, saved):
            state[key] = _changed(_as_piece, member, state[key])
            state.parts[key] = member.part
        return {**saved, "state": state}

    def take(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        state = dict(saved["state"])
        for key, member in _members_of(members, optimizer, saved):
            own = dict(state[key])  # what the user has keeps its entry
            require_own(member.part, own)
            state[key] = _changed(_as_tensor, member, own)
        return {**saved, "state": state}

    optimizer.register_state_dict_post_hook(give)
    optimizer.register_load_state_dict_pre_hook(take)


def refuse_pickled(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if ``optimizer``, of no sharded model, was given the pickled state of one's."""
    state: dict[str, Any] = next(iter(optimizer.state.values()), {})
    if _PART in state:
        start, stop, *shape = state[_PART]
        raise ValueError(
            f"this {type(optimizer).__name__} was given the state of a sharded model's, which is one rank's: "
            f"of elements {start}:{stop} of a parameter of shape {tuple(shape)}. Whole state is in files of "
            "torch.distributed.checkpoint that hold shardtrain.optimizer_state_dict(model, optimizer)"
        )


def require_own(part: Part, state: dict[str, Any]) -> None:
    """Raise ValueError if ``state``, an optimizer's of a parameter, was saved of another part than ``part``.

    Remove what says so: no optimizer's step may see it.
    """
    own = part.start, part.stop, *part.shape
    start, stop, *shape = state.pop(_PART, own)
    if (start, stop, *shape) != own:
        raise ValueError(
            f"load_state_dict() was given optimizer state of elements {start}:{stop} of {part.name} "
            f"{tuple(shape)}, where this rank has {part.start}:{part.stop} of {part.shape}: "
            "optimizer.state_dict() is a rank's own, so save and load one file per rank; "
            "torch.distributed.checkpoint carries shardtrain.optimizer_state_dict(model, optimizer) to other "
            "ranks"
        )


def _members_of(
    members: Iterable[ShardedParam], optimizer: torch.optim.Optimizer, saved: dict[str, Any]
) -> list[tuple[Any, ShardedParam]]:
    """Return the key in the state dict ``saved`` of each sharded parameter that has state."""
    known = {member.param: member for member in members}
    keys = [*chain.from_iterable(group["params"] for group in saved["param_groups"])]
    params = [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]
    pairs = zip(keys, params, strict=False)  # torch compares the groups itself
    return [(key, known[param]) for key, param in pairs if key in saved["state"] and param in known]


def _changed(
    change: Callable[[Tensor, ShardedParam], Tensor], member: ShardedParam, state: dict[str, Any]
) -> dict[str, Any]:
    """Return the optimizer's ``state`` of ``member`` with ``change`` applied to each tensor."""
    return {k: change(v, member) if isinstance(v, Tensor) else v for k, v in state.items()}


def _piece(value: Tensor, member: ShardedParam) -> Piece:
    """Return ``value``, the part of ``member`` in its shape at rest, as a piece.

    On a single rank, and where a rank has all of it, too: what stores tensors must ask its class.
    """
    return Piece.on(value, member.owners._replace(whole=False, subject=member.name))


def _as_piece(value: Tensor, member: ShardedParam) -> Tensor:
    """Return ``value`` as a piece if it is a number or has the parameter's shape."""
    value = plain(value)  # an optimizer may have made it of gradients
    part = member.part
    if value.ndim == 0:  # a step count, which may differ on a rank that has no elements
        count = Part(part.name, (), (), 0, int(part.numel > 0 or 0 in part.shape))
        return Piece.on(value, _piece(value, member).owners._replace(part=count))
    return _piece(value, member) if value.shape == part.local_shape else value


def _as_tensor(value: Tensor, member: ShardedParam) -> Tensor:
    """Return a piece as a plain tensor. Raises ValueError for another shape: torch does not compare."""
    value = plain(value)
    if value.ndim and value.shape != member.part.local_shape:
        raise ValueError(
            f"load_state_dict() was given state of shape {tuple(value.shape)} for {member.name}, of "
            f"which a rank has a piece of {member.part.local_shape}; read it with "
            "torch.distributed.checkpoint into shardtrain.optimizer_state_dict(model, optimizer)"
        )
    return value

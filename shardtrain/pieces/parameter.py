"""Parameters that show a shard have a class that says so, unless the engine or an optimizer works on shards.

What a parameter shows decides its class. Whole, it has its own. While it shows this rank's shard it is a
`PieceParameter`: a function asked of it is asked of a piece that is its shard, by the list of
``functions.py``. What treats each element by itself is right, a norm is that of all ranks, and all else is
refused by name. So is a loss, since its gradient would be one of this rank's shard alone.

While the root's forward runs other ranks may compute with a shard, and its values and sizes are not those
that forward means. Then all is refused but what tells neither (`PASSING`)::

    def forward(self, x):
        return self.head(x) * self.blocks[1].weight.abs().mean()     refused

``engine/unit.py`` alone gives and takes the class. It takes it away where the engine or an optimizer works on
shards (in backward, in an optimizer's step), so that no hot loop asks Python.
"""

from __future__ import annotations

import math
import types
import weakref
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from shardtrain import torch_private
from shardtrain.pieces.functions import COUNTS, MEMORY, PASSING, changes_in_place, name_of
from shardtrain.pieces.part import Part
from shardtrain.pieces.piece import Owners, Piece, uncompiled

_SIZES = ("shape", "size", "stride", "__len__", "nbytes")  # plain numbers, of the shard

_unasked: Any = torch_private.disabled_torch_function_impl
_GRAD: Any = Tensor.grad
_REQUIRES_GRAD: Any = Tensor.requires_grad


class Shard(NamedTuple):
    """The shard that a parameter shows."""

    owners: Owners | None  # of its pieces; None on a rank that has all
    name: str  # the parameter's
    unit: str  # the title of the unit that gathers it
    part: Part  # which elements of the parameter it has

    def piece(self, param: nn.Parameter) -> Tensor:
        """Return the shard that ``param`` shows as a piece, from which no gradient comes back."""
        learns = torch.is_grad_enabled() and _unasked(_REQUIRES_GRAD.__get__, (), (param,), {})
        shown: Tensor = _unasked(Tensor.detach, (), (param,), {})
        if learns:
            shown = _Unlearned.apply(torch.empty(0, requires_grad=True), shown, self)
        return shown if self.owners is None else Piece.on(shown, self.owners)

    def refuse_in_forward(self, use: str) -> NoReturn:
        raise ValueError(
            f"{self.name} was used ({use}) in forward outside of a call of {self.unit}, where it shows this "
            "rank's shard, with which other ranks may compute: call the module, or choose units= so that "
            "both are in one; compute with it, or change it, between steps (a momentum encoder after "
            "optimizer.step()), whole inside shardtrain.unsharded(model)"
        )


def refuse_gradient(name: str, unit: str) -> NoReturn:
    """Raise ValueError for a gradient of the shard that the parameter ``name`` shows."""
    raise ValueError(
        f"the gradient of {name} comes from its piece, which code outside of the forward of {unit} has used: "
        f"compute that there, or add its gradient to {name}.grad after backward; for a penalty on weights "
        "use the optimizer's weight_decay"
    )


class _Unlearned(torch.autograd.Function):
    """A function that returns what a parameter shows, and refuses its gradient, which would be one rank's.

    ``anchor``: requires a gradient in the parameter's place. A node of autograd for the parameter would keep
    the shape of the shard, and the next forward would use it.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, shown: Tensor, shard: Shard) -> Tensor:
        ctx.shard = shard
        return shown.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        refuse_gradient(ctx.shard.name, ctx.shard.unit)


class Shards:
    """What the parameters of one model show at rest, and the classes that say so."""

    def __init__(self) -> None:
        self.in_forward = False  # whether the root's forward runs
        # What works on shards now, such as a backward. Parameters have their own classes meanwhile.
        self.work = set[object]()
        self._by_id: dict[int, Shard] = {}
        self._classes: dict[type, type[nn.Parameter]] = {}

    def of(self, param: nn.Parameter) -> Shard:
        return self._by_id[id(param)]

    def add(self, param: nn.Parameter, shard: Shard) -> type[nn.Parameter]:
        """Return the class of ``param`` while it shows ``shard``: like its own, a user's perhaps."""
        own = type(param)
        self._by_id[id(param)] = shard
        if own not in self._classes:
            described = {
                "__module__": own.__module__,
                "__qualname__": own.__qualname__,
                "own": own,
                "shards": weakref.ref(self),
            }
            bases = (PieceParameter,) if own is nn.Parameter else (PieceParameter, own)
            made = types.new_class(own.__name__, bases, exec_body=lambda names: names.update(described))
            self._classes[own] = made
        return self._classes[own]


class PieceParameter(nn.Parameter):
    """A parameter that shows this rank's shard. ``own``: its class while it is whole."""

    own: type[nn.Parameter]
    shards: weakref.ReferenceType[Shards]

    # Each step reads and sets it, so it asks nothing.
    grad = property(
        lambda self: _unasked(_GRAD.__get__, (), (self,), {}),
        lambda self, value: _unasked(_GRAD.__set__, (), (self, value), {}),
        lambda self: _unasked(_GRAD.__delete__, (), (self,), {}),
    )

    @classmethod
    @uncompiled
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        use = _name_of_use(func)
        if use in PASSING and not (use in MEMORY and _is_stepped(args[0])):
            return _unasked(func, (), args, kwargs)
        leaves = torch_private.tree_leaves((args, kwargs))
        shown = [leaf for leaf in leaves if isinstance(leaf, PieceParameter)]
        for param in shown:
            shards = param.shards()
            if shards is not None and shards.in_forward:
                shards.of(param).refuse_in_forward(use)
        if not _is_stepped(shown[0]):  # by an optimizer whose plain steps see other sizes
            if use in COUNTS and (shards := shown[0].shards()) is not None:
                return math.prod(shards.of(shown[0]).part.shape)
            if use in _SIZES:
                return _unasked(func, (), args, kwargs)
        if func.__name__ in ("__set__", "__delete__") or _changes_leaf(func, args):
            return _unasked(func, (), args, kwargs)
        pieces, named = torch_private.tree_map(_piece, (tuple(args), kwargs))
        return func(*pieces, **named)

    def full_tensor(self) -> Tensor:
        """Return the whole parameter on every rank, as a tensor without a gradient. Collective."""
        shards = self.shards()
        assert shards is not None, "the model is gone"
        piece = self.detach()
        return piece.full_tensor() if isinstance(piece, Piece) else shards.of(self).part.padded(piece, 0)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = self.detach().clone()
        if not isinstance(copied, Piece):
            copied = self.own(copied, self.requires_grad)
        return memo.setdefault(id(self), copied)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ValueError(
            "a parameter of a sharded model shows this rank's shard, and cannot be pickled: save "
            "shardtrain.full_state_dict(model)"
        )


def _piece(value: Any) -> Any:
    """Return a parameter that shows a shard as a piece; any other ``value``, or one of no model, as it is."""
    if not isinstance(value, PieceParameter):
        return value
    shards = value.shards()
    return value.as_subclass(Tensor) if shards is None else shards.of(value).piece(value)


def _is_stepped(param: Any) -> bool:
    """Return whether an optimizer makes a step on pieces of the model of ``param`` now."""
    shards = param.shards()
    owners = None if shards is None else shards.of(param).owners
    return owners is not None and owners.step is not None


def _changes_leaf(func: Any, args: Any) -> bool:
    """Return whether ``func`` changes a leaf that requires a gradient, which torch refuses."""
    if not (args and changes_in_place(func) and torch.is_grad_enabled()):
        return False
    return isinstance(args[0], PieceParameter) and args[0].requires_grad


def _name_of_use(func: Any) -> str:
    """Return the name of a function of torch, or of the attribute that it gets or sets."""
    name = str(func.__name__)
    if name in ("__set__", "__delete__"):
        return str(getattr(func.__self__, "__name__", name))
    return name_of(func)

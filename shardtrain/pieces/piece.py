"""Pieces of tensors: what treats each element by itself is right on them, and all else refused by name.

``functions.py`` lists what is right. A piece is what this rank holds of a gradient, of a parameter between
steps, of an optimizer's state, or of a value of a state dict, which ``torch.distributed.checkpoint`` stores
as a part of the whole. It is a tensor on the memory of a plain one, which does the work. Python's calls ask
for the class first (``__torch_function__``). Code in C++, such as vmap, TorchScript, ``torch.tensor`` and
process groups, asks when it calls an operator (``__torch_dispatch__``). Both ask the same list. A plain
tensor that takes a piece, as ``buffer.add_(grad)``, gets the class of a piece. So Python asks it from then
on, but C++ does not.

``torch.nn.utils.clip_grad_norm_``, which most training loops and trainers call, takes a norm of norms::

    norms = [vector_norm(grad) for grad in grads]    of this rank's pieces (`PieceNorm`)
    total = vector_norm(stack(norms))                over all ranks: one all-reduce (`TotalNorm`)

Any other use of a piece's norm is refused, unless each gradient has one owner (``layout="whole"``). Then any
function of it is right. Results are pieces, too: they must not be mixed with those of other gradients, nor
leave as a number of Python, since ranks without the gradient do not have it. In an optimizer's step one may
decide something (``if norm > 0``), as long as that can concern its own parameter alone (`OptimizerStep`).
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar
from weakref import ReferenceType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import get_total_norm

from shardtrain import torch_private
from shardtrain.comm.channel import Channel
from shardtrain.comm.norms import Intervals, interval_norms, local_norms, over_all_ranks
from shardtrain.pieces.functions import (
    COUNTS,
    DRAWING,
    MEMORY,
    NORMS,
    SAME_NORMS,
    UNMARKED,
    changes_in_place,
    changes_no_shape,
    counts_elements,
    describes,
    is_collective,
    is_element_wise,
    name_of,
    overwrites,
    reshapes,
    tells_sizes,
)
from shardtrain.pieces.part import Index, Part, in_memory_order

if TYPE_CHECKING:  # an import of 0.3 s, which only programs that use DCP need
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

P = TypeVar("P", bound="Piece")
R = TypeVar("R")

GRADIENT = "a gradient"
# By these DCP asks for the boxes that a piece consists of (torch.distributed.checkpoint.protocol).
_NAMES_OF_BOXES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


class Owners(NamedTuple):
    """Which part of what a piece is, and the ranks that have the rest."""

    channel: ReferenceType[Channel]  # weak, so that a gradient does not keep a model's threads alive
    device: torch.device  # of norms
    whole: bool = False  # whether each tensor has one owner
    virtual: int = 0  # the number of virtual ranks
    parts: Intervals = ()  # virtual ranks whose intervals the piece meets, each with its slice of the piece
    elements: object = None  # which a piece has: pieces with equal ones correspond, element by element
    selected: bool = False  # whether a mask has selected them, so that their number is a result, too
    part: Part | None = None  # of the whole tensor, where a piece is one
    subject: str = GRADIENT  # what the piece is of, in messages
    waits: bool = False  # whether `no_sync` holds it back: other ranks' gradients are not in it

    @property
    def step(self) -> OptimizerStep | None:
        """The step of the model that an optimizer makes on pieces now."""
        channel = self.channel()
        return None if channel is None else channel.step


class OptimizerStep:
    """A step that an optimizer makes on pieces: of parameters, gradients and its state.

    ``optimizer``: its class. ``since``: the number of its latest step that was on pieces before this one, or
    0. ``number``: of this step. ``end``: makes its state plain. ``sums``: whether it has asked for a sum over
    ranks.
    """

    def __init__(self, optimizer: str, number: int, since: int, end: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._number = number
        self._since = since
        self._end = end
        self.sums = False
        self._latest: object = None  # of whole parameters: the one that was changed, or has decided, last
        self._decided = set[object]()  # those of which a number has decided something
        self._is_pending = False  # whether the latest one has decided, and was not changed since

    def touch(self, parameter: object, decides: bool) -> None:
        """Note that the step changes the whole ``parameter``, or that a number of it ``decides`` something.

        Raises ValueError unless what it decides may concern this parameter alone: the step must change it
        next, and no other may come in between.
        """
        if parameter != self._latest:
            self.require_changed()
            if parameter in self._decided:
                self._refuse_decision()
            self._latest = parameter
        self._is_pending = decides
        if decides:
            self._decided.add(parameter)

    def require_changed(self) -> None:
        """Raise ValueError if a number of a parameter has decided something, perhaps of others."""
        if self._is_pending:
            self._refuse_decision()

    def _refuse_decision(self) -> NoReturn:
        self.refuse("an if or while of numbers of one parameter, which may decide about others,")

    def refuse(self, what: str) -> NoReturn:
        """End the step, and raise ValueError for ``what`` it has asked for."""
        self._end()
        missed = ""
        if self._number > self._since + 1:
            missed = (
                f" In step {self._number} this was seen for the first time; its steps {self._since + 1} to "
                f"{self._number - 1} were not looked at, and checkpoints of these may be wrong."
            )
        raise ValueError(
            f"{self._optimizer} cannot step on a sharded model: {what} would see what this rank holds "
            "alone. For an optimizer that looks at one whole parameter at a time use "
            "shard(..., layout='whole'). One that looks at all parameters together cannot be used: take SGD "
            "or AdamW, or leave the parameters whole with shard(..., ignored=...). If what it asks is right "
            "on a rank's part all the same, as a kernel of another package may be, say so: "
            f"shardtrain.trusted(optimizer).{missed}"
        )


def uncompiled(function: Callable[..., R]) -> Callable[..., R]:
    """Return ``function`` so that ``torch.compile`` breaks the graph there and runs it as it is.

    A compiled ``__torch_function__`` would call itself without end, or keep the first function asked about,
    and call that for all others. Uses Dynamo only while it compiles or runs compiled code: importing it takes
    seconds.
    """
    broken = torch_private.disable_dynamo(function)

    @functools.wraps(function)
    def either(*args: Any) -> R:
        if torch.compiler.is_compiling() or torch_private.get_eval_frame_callback():
            result: R = broken(*args)
            return result
        return function(*args)

    return either


def plain(value: Any) -> Any:
    """Return ``value`` with the plain tensor of each piece in it, lists included."""
    if isinstance(value, Piece):
        return value.plain
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


class Piece(Tensor):
    """This rank's piece of a tensor, possibly empty: the memory of the tensor ``plain``, which computes."""

    number = "a number"  # in messages
    plain: Tensor
    owners: Owners

    @classmethod
    def on(cls: type[P], plain: Tensor, owners: Owners) -> P:
        piece: P = plain.as_subclass(cls)
        piece.plain = plain
        piece.owners = owners
        return piece

    @classmethod
    def become(cls, tensor: Tensor, owners: Owners) -> None:
        """Make the plain ``tensor`` a piece: the same object, of this class from now on."""
        memory = tensor.as_subclass(Tensor)
        piece: Any = tensor
        piece.__class__ = cls
        piece.plain = memory
        piece.owners = owners

    def as_subclass(self, cls: type[Any]) -> Any:
        return self.plain.as_subclass(cls)  # torch's does not ask

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.plain!r})"

    def __format__(self, spec: str) -> str:
        if self.plain.ndim == 0:  # it would be shown as a number, like that of the whole
            _refuse_text(f"an f-string or format() of {self.number} of {self.owners.subject}", self.owners)
        return format(self.plain, spec)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if sys._getframe(1).f_globals["__name__"] == dist.distributed_c10d.__name__:
            refuse_collective("a collective")  # which copies a list of pieces in C++
        asked: Any = cls.__torch_function__
        return asked(getattr(func, "overloadpacket", func), types, args, kwargs)

    @classmethod
    @uncompiled
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = [*args, *kwargs.values()]
        owners = _first(cls, arguments).owners
        if func in NORMS and args and (order := _order(func, *args, **kwargs)) is not None:
            return _norms(func, args[0] if func is torch._foreach_norm else args[:1], order)
        if is_collective(func):
            refuse_collective(func.__name__, owners.subject)
        if func is Tensor.requires_grad_ and args[1:] != (False,):  # nn.Parameter() of a piece does so, too
            _refuse(func, owners)
        if func.__name__ in DRAWING:
            _refuse(func, owners)
        if not owners.whole:
            if tells_sizes(func):
                return _told(func, func(*plain(args), **kwargs), owners)
            if func is not Tensor.requires_grad_ and not is_element_wise(func, args, cls):
                _refuse(func, owners)
        _require_same_elements(func, arguments)
        result = func(*plain(args), **{name: plain(value) for name, value in kwargs.items()})
        if func.__name__ == "__set__":  # `Module.to` sets a gradient's data
            with torch_private.DisableTorchFunctionSubclass():
                func(args[0], plain(args[1]))
        answer = _of_an_owner if owners.whole else _element_by_element
        result = answer(func, result, arguments)
        _mark_changed(func, args, kwargs)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(
            f"pickle of {self.owners.subject} (torch.save) would see this rank's piece alone: save "
            "shardtrain.full_state_dict(model), or use torch.distributed.checkpoint.save"
        )

    def __getattr__(self, name: str) -> Any:
        """Tell ``torch.distributed.checkpoint`` (DCP) by its names of which whole tensor this is a part."""
        if name in _NAMES_OF_BOXES:
            boxes = self._boxes()
            sizes = tuple([tuple(box.shape) for box in boxes.values()])
            values = self._part().shape, tuple(boxes), ((),) * len(boxes), sizes
            return dict(zip(_NAMES_OF_BOXES, values, strict=True))[name]
        raise AttributeError(
            f"a rank's piece is no DTensor and has no {name}; use shardtrain.full_state_dict(model) and "
            "load_full_state_dict, and with accelerate cpu_ram_efficient_loading=False"
        )

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint import planner
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

        properties = TensorProperties.create_from_tensor(self.plain)
        shape = torch.Size(self._part().shape)
        return [
            planner.WriteItem(
                index=MetadataIndex(name, chunk.offsets, number),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(chunk=chunk, properties=properties, size=shape),
            )
            for number, chunk in enumerate(self.__create_chunk_list__())
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        boxes = self._boxes().items()
        return [ChunkStorageMetadata(torch.Size(offsets), box.shape) for offsets, box in boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self._boxes()[tuple(index.offset or ())]

    def _boxes(self) -> dict[Index, Tensor]:
        return self._part().boxes(self.plain)

    def _part(self) -> Part:
        """Return which elements these are. Raises ValueError if a computation has made others of them."""
        part = self.owners.part
        if part is None or self.plain.shape not in (part.local_shape, part.shape):
            _refuse_text(f"a save of {self.owners.subject}, computed to another shape,", self.owners)
        return part

    def full_tensor(self) -> Tensor:
        """Return the whole tensor on every rank, on the model's device. Collective."""
        part = self.owners.part
        channel = self.owners.channel()
        if part is None or channel is None or self.plain.shape != part.local_shape:
            _refuse_text(f"full_tensor() of {self.owners.subject}, computed to another shape,", self.owners)
        self.require_reduced()
        whole = part.padded(self.plain.detach().to(self.owners.device), 0)
        if whole.numel():  # as bytes, so that no bit changes: other ranks have zeros
            channel.all_reduce(in_memory_order(whole, part.stride).view(torch.uint8))
        return whole

    def require_reduced(self) -> None:
        """Raise ValueError if other ranks' gradients are not in this yet."""
        if self.owners.waits:
            raise ValueError(
                "the norm or the whole of gradients that wait under no_sync would see this rank's alone: run "
                "the last backward outside of no_sync first, then measure or clip"
            )

    def __copy__(self) -> Piece:
        return self.on(self.plain, self.owners)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), self.clone())


class PieceNorm(Piece):
    """The norms of order ``order`` of this rank's pieces of gradients.

    ``intervals``: with V virtual ranks, the norms of each one's interval: V more than the norms' dimensions.
    """

    number = "a norm"
    order: float
    intervals: Tensor | None

    @classmethod
    def of(cls, norm: Tensor, order: float, owners: Owners, intervals: Tensor | None) -> PieceNorm:
        result = cls.on(norm, owners)
        result.order = order
        result.intervals = intervals
        return result

    @classmethod
    @uncompiled
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        one = _first(cls, [*args, *kwargs.values()])
        owners = one.owners
        channel = owners.channel()
        if channel and func in NORMS and _order(func, *args, **kwargs) == one.order:
            local = one.plain if one.intervals is None else one.intervals
            return _total(local, one.order, channel, owners)
        if channel and func in SAME_NORMS:
            return _same_norms(one, channel, func, args, kwargs)
        if describes(func) or tells_sizes(func):
            result = func(*plain(args), **kwargs)
            if not isinstance(result, Tensor):
                return result
        if not owners.whole:
            _refuse(func, owners)
        # A norm of a gradient that one rank owns is a number of that gradient.
        pieces = [_as_pieces(arg) for arg in args]
        return func(*pieces, **{name: _as_pieces(arg) for name, arg in kwargs.items()})

    def full_tensor(self) -> Tensor:
        """Return the norm over all ranks. Collective."""
        if self.plain.ndim:
            _refuse_text("full_tensor() of several norms", self.owners)
        total: Tensor = torch.linalg.vector_norm(self, self.order).as_subclass(Tensor)
        return total


class TotalNorm(Tensor):
    """A norm of the whole, the same on all ranks: a plain tensor that has a DTensor's ``full_tensor``."""

    __torch_function__ = nn.Parameter.__torch_function__  # results are plain

    def full_tensor(self) -> Tensor:
        return self.as_subclass(Tensor)

    def __format__(self, spec: str) -> str:
        return format(self.full_tensor(), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full_tensor().__reduce_ex__(protocol)


def _as_pieces(value: Any) -> Any:
    """Return ``value``, lists included, with each norm in it as a `Piece`: a number of one gradient."""
    if isinstance(value, PieceNorm):
        return Piece.on(value.plain, value.owners)
    return type(value)(map(_as_pieces, value)) if type(value) in (list, tuple) else value


def _same_norms(one: PieceNorm, channel: Channel, func: Any, args: Any, kwargs: Any) -> PieceNorm:
    """Return the norms that ``func`` copies, converts or joins."""
    first = args[0]
    owners = one.owners
    intervals = one.intervals
    if isinstance(first, list | tuple):
        if owners.whole and owners.step is not None:  # other ranks may have no gradient, and not ask
            _refuse(func, owners, "norms of several gradients")
        # Replicated gradients count once: on rank 0, which owns the first interval.
        counts = channel.all_ranks.rank == 0
        first = [n if counts or isinstance(n, PieceNorm) else torch.zeros_like(n) for n in first]
        if intervals is not None:
            zeros = 0, max(0, owners.virtual - 1)
            tables = [n.intervals if isinstance(n, PieceNorm) else F.pad(n[..., None], zeros) for n in first]
            intervals = func(tables, *args[1:], **kwargs)
        owners = owners._replace(whole=False)  # norms of several gradients, which are of no use by themselves
    elif intervals is not None:
        intervals = func(intervals, *args[1:], **kwargs)
    return PieceNorm.of(func(plain(first), *args[1:], **kwargs), one.order, owners, intervals)


def total_norm(tensors: Sequence[Tensor], order: float, owners: Owners, dtype: torch.dtype) -> Tensor:
    """Return the norm of all gradients ``tensors``: 0-dim, ``dtype``, equal on all ranks. Collective.

    Those that are no pieces are the same on all ranks. Classes are looked at once.
    """
    channel = owners.channel()
    assert channel is not None
    if channel.silent and not any(type(tensor) is Piece for tensor in tensors):  # perhaps torch's fake ones
        owners = owners._replace(virtual=0)
        return _total(get_total_norm([t for t in tensors if t.numel()], order), order, channel, owners)
    device = tensors[0].device if tensors else owners.device
    none = torch.empty(0, dtype=dtype, device=device)  # so that every rank has one
    counts = channel.all_ranks.rank == 0  # replicated gradients count once, in the first interval
    counted = [none]
    intervals = list[Intervals]([()])
    for tensor in tensors:
        held = tensor.plain if isinstance(tensor, Piece) else tensor
        if held.numel():
            counted.append(held if counts or held is not tensor else none)
            intervals.append(tensor.owners.parts if isinstance(tensor, Piece) else ())
    if owners.virtual:
        return _total(interval_norms(counted, intervals, order, owners.virtual), order, channel, owners)
    norms = list[Tensor]()
    for group in by_kind(counted):
        norms += [norm.to(device) for norm in local_norms(group, order)]
    return _total(torch.stack(norms), order, channel, owners)


def by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return plain ``tensors`` by device and dtype, for functions of lists."""
    groups: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return [*groups.values()]


def _total(norms: Tensor, order: float, channel: Channel, owners: Owners) -> Tensor:
    """Return the norm of all ranks' ``norms``. Collective."""
    if owners.step is not None:
        owners.step.sums = True
    total = over_all_ranks(norms, order, channel, owners.device, owners.virtual)
    # A plan's fake tensor keeps its class.
    return total.as_subclass(TotalNorm) if type(total) is Tensor else total


def _first(kind: type[Any], args: Sequence[Any]) -> Any:
    """Return the first tensor of ``kind`` in ``args``, lists included."""
    for leaf in _leaves(args):
        if isinstance(leaf, kind):
            return leaf
    raise AssertionError(f"no {kind.__name__}")


def _leaves(args: Sequence[Any]) -> list[Any]:
    """Return ``args`` with each list replaced by its items."""
    leaves = list[Any]()
    for arg in args:
        if isinstance(arg, list | tuple):
            leaves += arg
        else:
            leaves.append(arg)
    return leaves


def _norms(func: Any, grads: Sequence[Tensor], order: float) -> Any:
    """Return the norm of each of ``grads``, as ``func`` does: one, or a list. ``order``: above 0."""
    if not order > 0:  # the norm of an empty piece would count
        raise ValueError(
            f"a norm of order {order} of a gradient cannot be added up over ranks: call clip_grad_norm_ with "
            "a positive norm_type"
        )
    piece = _first(Piece, grads)
    for each in _pieces(grads):
        each.require_reduced()
    table: Sequence[Tensor | None] = [None] * len(grads)
    if piece.owners.virtual:
        parts = [grad.owners.parts if isinstance(grad, Piece) else () for grad in grads]
        intervals = interval_norms(plain(grads), parts, order, piece.owners.virtual)
        table = intervals.unbind()
        # A gradient that is whole lies in one interval, and sums of one number and zeros are exact.
        local = [*intervals.sum(1).unbind()]
    else:
        local = local_norms(plain(grads), order)
    norms = [
        PieceNorm.of(norm, order, grad.owners, parts) if isinstance(grad, Piece) else norm
        for grad, norm, parts in zip(grads, local, table, strict=True)
    ]
    return norms if func is torch._foreach_norm else norms[0]


def _pieces(args: Sequence[Any]) -> list[Piece]:
    """Return the pieces in ``args``, lists included."""
    return [leaf for leaf in _leaves(args) if isinstance(leaf, Piece)]


def _require_same_elements(func: Any, args: Sequence[Any]) -> None:
    """Raise ValueError if ``func`` would combine pieces of different elements, but for lists of them."""
    combined = args[1:] if overwrites(func) else args
    known = {piece.owners.elements for piece in combined if isinstance(piece, Piece)}
    if len(known) > 1:
        _refuse(func, _pieces(combined)[0].owners, "several gradients")


def _mark_changed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Mark the plain tensors that ``func`` has changed in place: what they hold is of pieces now."""
    changed = kwargs.get("out")
    if changed is None and args and changes_in_place(func):
        changed = args[0]
    targets = changed if isinstance(changed, list | tuple) else [changed]
    for position, target in enumerate(targets):
        source = _first_at(position, [*args, *kwargs.values()], target)
        if source is None:
            continue
        if isinstance(target, Piece) and overwrites(func):  # what it held may have been another piece
            target.owners = source.owners
        if type(target) is Tensor and not target.requires_grad:
            base = target._base
            Piece.become(target, source.owners)
            if type(base) is Tensor:  # other parts of it are of other elements
                Piece.become(base, source.owners._replace(elements=id(base), parts=(), part=None))


def _first_at(position: int, args: Sequence[Any], target: Any) -> Piece | None:
    """Return the first piece in ``args`` but ``target``. Of lists ``position`` counts."""
    for arg in args:
        value = arg
        if isinstance(arg, list | tuple):
            value = arg[position] if position < len(arg) else None
        if isinstance(value, Piece) and value is not target:
            return value
    return None


def _element_by_element(func: Any, result: Any, args: Sequence[Any]) -> Any:
    """Return the ``result`` of the element-wise ``func`` of ``args``, with new tensors marked as pieces.

    Raises ValueError if a tensor of another shape has taken part: it was made for the whole gradient.
    """
    name = func.__name__
    if not isinstance(result, Tensor | list | tuple) or (name in UNMARKED and not _pieces(args[1:])):
        return result
    pieces = _pieces(args)
    if name.startswith("_foreach_"):
        return _marked_by_position(result, args[0], pieces[0])
    owners = pieces[0].owners
    if isinstance(args[0], list | tuple):  # joined
        elements = tuple([piece.owners.elements for piece in pieces])
        owners = owners._replace(elements=elements, parts=(), part=None)
    elif changes_no_shape(func) and isinstance(result, Tensor) and _sizes(result) != _sizes(pieces[0].plain):
        _refuse(func, owners, f"{owners.subject} and a tensor of another shape")
    elif reshapes(func) and isinstance(result, Tensor) and not _is_reshaped(result, pieces[0].plain):
        _refuse(func, owners, f"{owners.subject} into rows")
    elif counts_elements(func, args):
        owners = owners._replace(parts=(), part=None, selected=True)
    return _marked(result, owners, args)


def _of_an_owner(func: Any, result: Any, args: Sequence[Any]) -> Any:
    """Return the ``result`` of ``func`` of one gradient, which one rank owns, with new tensors marked.

    Raises ValueError if a number would leave that only the owner has.
    """
    step = _first(Piece, args).owners.step
    if step is not None:
        _touch(step, func, result, args)
    tells = describes(func) or tells_sizes(func) or func.__name__ in MEMORY
    if func.__name__ in UNMARKED or (tells and not isinstance(result, Tensor)):
        return result
    pieces = _pieces(args)
    if func.__name__.startswith("_foreach_"):
        return _marked_by_position(result, args[0], pieces[0])
    if len({piece.owners.elements for piece in pieces}) > 1:
        _refuse(func, pieces[0].owners, "several gradients")
    owners = pieces[0].owners
    if isinstance(result, bool) and step is not None:
        return result
    if result is not None and not isinstance(result, Tensor | list | tuple):
        _refuse(func, owners)
    return _marked(result, owners, args)


def _touch(step: OptimizerStep, func: Any, result: Any, args: Sequence[Any]) -> None:
    """Note in ``step`` which whole parameters ``func`` has changed, or the one that it tells a number of."""
    decides = isinstance(result, bool) and not describes(func)
    if decides or changes_in_place(func):
        for piece in _pieces(args if decides else args[:1]):
            step.touch(piece.owners.elements, decides)


def _marked(result: Any, owners: Owners, args: Any) -> Any:
    """Return ``result`` with new tensors in it marked as pieces: not those of ``args``, changed in place."""
    if isinstance(result, list | tuple) and not isinstance(result, torch.Size):
        return type(result)([_marked(item, owners, args) for item in result])
    if type(result) is not Tensor:
        return result
    for leaf in _leaves(args if isinstance(args, list | tuple) else [args]):
        if result is leaf or (isinstance(leaf, Piece) and result is leaf.plain):
            return leaf
    return Piece.on(result, owners)


def _is_reshaped(result: Tensor, piece: Tensor) -> bool:
    """Return whether ``result`` is flat, or has the dimensions of ``piece``. Rows would be of this rank's."""
    sizes = _sizes(result)
    return len(sizes) < 2 or sorted(sizes) == sorted(_sizes(piece))


def _told(func: Any, result: Any, owners: Owners) -> Any:
    """Return the sizes that ``func`` returns. An optimizer's step would compute with this rank's."""
    if owners.selected:
        _refuse(func, owners, f"elements of {owners.subject} that a mask selects")
    if owners.step is not None:
        _refuse(func, owners)
    if func.__name__ not in COUNTS:
        return result
    if owners.part is None:
        _refuse(func, owners, f"several pieces of {owners.subject}")
    return math.prod(owners.part.shape)


def _marked_by_position(result: Any, first: Sequence[Tensor], piece: Piece) -> Any:
    """Return the ``result`` of a ``_foreach`` function, whose positions are those of the list ``first``."""
    if result is None:
        return None
    owners = [tensor.owners if isinstance(tensor, Piece) else piece.owners for tensor in first]
    return type(result)([_marked(*row) for row in zip(result, owners, first, strict=True)])


def _sizes(tensor: Tensor) -> list[int]:
    """Return the sizes that count when tensors are combined element by element."""
    return [size for size in plain(tensor).shape if size != 1]


def _order(norm: Any, _: Any, order: Any = None, dim: Any = None, *__: Any, **named: Any) -> float | None:
    """Return the order of a call of ``norm`` over all elements; None for a norm of another kind."""
    order = named.get("p", named.get("ord", order))
    dim = named.get("dim", dim)
    if named.get("out") is not None:
        return None
    if order in (None, "fro") and dim is None:
        return 2.0
    return None if dim is not None or norm is torch.linalg.norm or isinstance(order, str) else float(order)


def refuse_collective(name: str, subject: str = GRADIENT) -> NoReturn:
    raise ValueError(
        f"{name}() of {subject} would combine pieces of different elements: a sharded model's gradients are "
        "means over all ranks already, so leave it out; for the sum over ranks multiply by their number"
    )


def refuse_pieces(name: str, tensors: Iterable[Any]) -> None:
    """Raise ValueError if a piece of a gradient is among the ``tensors`` of the collective ``name``."""
    if any(isinstance(tensor, Piece) for tensor in tensors):
        refuse_collective(name)


def _refuse(func: Any, owners: Owners, subject: str = "") -> NoReturn:
    name = name_of(func).strip("_").replace("getitem", "an index").replace("setitem", "an index")
    _refuse_text(f"{name} of {subject or owners.subject}", owners)


def _refuse_text(what: str, owners: Owners) -> NoReturn:
    if owners.step is not None:
        owners.step.refuse(what)
    raise ValueError(
        f"{what} would see this rank's piece alone: call torch's or shardtrain's "
        "clip_grad_norm_ for the norm of all gradients (max_norm=inf only measures), or, on all ranks, "
        ".full_tensor() for the whole tensor, or of a norm; .as_subclass(torch.Tensor) is the piece"
    )

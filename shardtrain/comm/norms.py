"""Compute norms of whole gradients from their pieces: tensor subclasses for pieces and for norms of pieces.

``torch.nn.utils.clip_grad_norm_``, which most training loops and trainers call, takes a norm of norms::

    norms = [vector_norm(grad) for grad in grads]    of this rank's pieces (`PieceNorm`)
    total = vector_norm(stack(norms))                over all ranks: one all-reduce

Any other use of a piece's norm is refused, unless each gradient has one owner (``layout="whole"``).

With V virtual ranks a norm does not depend on where cuts between ranks fall. Each piece has V norms, one per
virtual rank's interval. The rank that owns an interval joins its norms. The V sums are then exchanged beside
zeros, which change none of them, and added in one order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import repeat
from typing import Any, NamedTuple, NoReturn
from weakref import ReferenceType

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import get_total_norm

from shardtrain import torch_private
from shardtrain.comm.channel import Channel
from shardtrain.comm.trace import ALL_REDUCE, waiting

_NORMS = {Tensor.norm, torch.norm, torch.linalg.norm, torch.linalg.vector_norm, torch._foreach_norm}
_SAME_NORMS = {Tensor.detach, Tensor.data.__get__, Tensor.float, Tensor.double, Tensor.to, Tensor.cpu}  # type: ignore[attr-defined]
_SAME_NORMS |= {torch.cat, torch.stack}
_ROWS = 1 << 12  # norms of one interval are padded to a multiple of this
_SELECT = {"__getitem__", "index_select", "masked_select", "gather", "take", "nonzero"}


class Owners(NamedTuple):
    """Name the ranks that share gradients (``whole``: each has one owner), and the norms' device.

    ``virtual``: the number of virtual ranks, or 0. ``parts``: the virtual ranks whose intervals the piece
    meets, each with its slice of the piece.
    """

    transport: ReferenceType[Channel]  # weak, so that a gradient does not keep a model's threads alive
    device: torch.device
    whole: bool = False
    virtual: int = 0
    parts: Sequence[tuple[int, slice]] = ()


class GradientPiece(Tensor):
    """Mark this rank's piece of a gradient, possibly empty. Results of arithmetic are pieces, too.

    Results that combine elements (sums, means, dot products) are refused, since others have the rest.
    """

    owners: Owners

    @classmethod
    def of(cls, grad: Tensor, owners: Owners) -> GradientPiece:
        piece = grad.as_subclass(cls)
        piece.owners = owners
        return piece

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if PieceNorm in types:
            return NotImplemented  # so that `PieceNorm` refuses
        with torch_private.DisableTorchFunctionSubclass():
            if func not in _NORMS:
                return _marked(func.__name__, func(*args, **kwargs), [*args, *kwargs.values()])
            order = _order(func, *args, **kwargs)
            if order is None:
                return func(*args, **kwargs) if _first(cls, args).owners.whole else _refuse()
            grads = args[0] if func is torch._foreach_norm else args[:1]
            virtual = _first(cls, args).owners.virtual
            local = _interval_norms(grads, order, virtual) if virtual else _local_norms(grads, order)
            rows = zip(grads, local, strict=True)
            norms = [PieceNorm.of(n, order, g.owners) if isinstance(g, cls) else n for g, n in rows]
            return norms if func is torch._foreach_norm else norms[0]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), self.clone())

    def __format__(self, spec: str) -> str:
        return format(self.as_subclass(Tensor), spec)


class PieceNorm(Tensor):
    """Mark norms of order ``order`` of this rank's pieces of gradients."""

    order: float
    owners: Owners

    @classmethod
    def of(cls, norm: Tensor, order: float, owners: Owners) -> PieceNorm:
        result = norm.as_subclass(cls)
        result.order = order
        result.owners = owners
        return result

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        one = _first(cls, args)
        transport = one.owners.transport()
        with torch_private.DisableTorchFunctionSubclass():
            if transport and func in _NORMS and _order(func, *args, **kwargs) == one.order:
                return _over_all_ranks(one.as_subclass(Tensor), one.order, transport, one.owners)
            if transport and func in _SAME_NORMS:
                if func is torch.stack:
                    # Replicated gradients count once: on rank 0, which owns the first interval.
                    counts = transport.all_ranks.rank == 0
                    zeros = max(0, one.owners.virtual - 1)
                    norms = [n if counts or isinstance(n, cls) else torch.zeros_like(n) for n in args[0]]
                    args = (
                        [F.pad(n[None], (0, zeros)) if zeros and not n.ndim else n for n in norms],
                        *args[1:],
                    )
                return cls.of(func(*args, **kwargs), one.order, one.owners)
            if func.__name__ != "__get__" and not one.owners.whole:
                _refuse()
            return func(*args, **kwargs)


def total_norm(grads: Sequence[Tensor], order: float, owners: Owners, dtype: torch.dtype) -> Tensor:
    """Return the norm of all gradients, pieces or whole: 0-dim, ``dtype``, equal on all ranks. Collective."""
    transport = owners.transport()
    marked = any(isinstance(grad, GradientPiece) for grad in grads)
    if transport is not None and transport.silent and not marked:  # plain tensors, or torch's fake ones
        return _over_all_ranks(get_total_norm(grads, order), order, transport, owners._replace(virtual=0))
    device = grads[0].device if grads else owners.device
    none = torch.empty(0, dtype=dtype, device=device)  # so that every rank has a piece
    return get_total_norm([GradientPiece.of(none, owners), *grads], order, foreach=True)


def _first(kind: type[Any], args: Sequence[Any]) -> Any:
    """Return the first tensor of ``kind`` in ``args``, lists included."""
    rows = (arg if isinstance(arg, list | tuple) else [arg] for arg in args)
    return next(arg for row in rows for arg in row if isinstance(arg, kind))


def _marked(name: str, result: Any, args: Sequence[Any]) -> Any:
    """Return the ``result`` of the function ``name`` of ``args``, with new tensors marked as pieces.

    Raises ValueError for a tensor that combines elements of a piece, unless gradients have one owner.
    """
    if not isinstance(result, Tensor | list | tuple) or (name.endswith("_") and not name.endswith("__")):
        return result  # no tensor, or one that was changed in place
    piece = _first(GradientPiece, args)

    def marked(tensor: Any, like: Tensor) -> Any:
        if type(tensor) is not Tensor or name.startswith(("as_subclass", "isclose", "new_")):
            return tensor
        if tensor.shape != like.shape and (tensor.ndim == 0 or tensor.numel() < like.numel()):
            is_view = tensor.untyped_storage()._cdata == like.untyped_storage()._cdata
            if not is_view and name not in _SELECT:
                return tensor if piece.owners.whole else _refuse()
        return GradientPiece.of(tensor, piece.owners)

    if isinstance(result, Tensor):
        return marked(result, piece)
    if hasattr(result, "indices"):  # elements and their places in this piece
        return result
    return type(result)(map(marked, result, args[0] if name.startswith("_foreach") else repeat(piece)))


def _order(norm: Any, _: Any, order: Any = None, dim: Any = None, *__: Any, **named: Any) -> float | None:
    """Return the order of a call of ``norm`` over all elements; None for a norm of another kind."""
    order = named.get("p", named.get("ord", order))
    dim = named.get("dim", dim)
    if order in (None, "fro") and dim is None:
        return 2.0
    return None if dim is not None or norm is torch.linalg.norm or isinstance(order, str) else float(order)


def _local_norms(grads: Sequence[Tensor], order: float) -> list[Tensor]:
    """Return the norm of each of ``grads``; 0 for an empty one."""
    plain = [grad.as_subclass(Tensor) for grad in grads]
    present = [grad for grad in plain if grad.numel()]
    norms = iter(torch._foreach_norm(present, order) if present else ())
    return [next(norms) if g.numel() else g.new_zeros((), dtype=g.real.dtype) for g in plain]


def _interval_norms(grads: Sequence[Tensor], order: float, virtual: int) -> list[Tensor]:
    """Return the norms of each of ``grads`` by virtual rank, [virtual]; 0-dim for a gradient that is whole.

    An edited piece of another length counts as its first virtual rank's.
    """
    present = list[Tensor]()
    runs = list[tuple[int, int]]()  # zeros before a run, and its length
    at = 0
    for index, grad in enumerate(grads):
        flat = grad.as_subclass(Tensor).flatten()
        parts = [(0, slice(None))]
        if isinstance(grad, GradientPiece) and grad.owners.parts:
            parts = [*grad.owners.parts]
            if parts[-1][1].stop != len(flat):
                parts = [(parts[0][0], slice(None))]
        if len(flat):
            first = index * virtual + parts[0][0]
            runs.append((first - at, len(parts)))
            at = first + len(parts)
            present += [flat[part] for _, part in parts]
    like = grads[0].as_subclass(Tensor).real
    zeros = like.new_zeros(len(grads) * virtual, dtype=torch.promote_types(like.dtype, torch.float32))
    found = torch.stack(torch._foreach_norm(present, order)).to(zeros.dtype) if present else zeros
    rows = list[Tensor]()
    taken = 0
    for gap, length in runs:
        rows += [zeros[:gap], found[taken : taken + length]]
        taken += length
    table = torch.cat([*rows, zeros[at:]]).view(len(grads), virtual)
    norms = zip(grads, table.unbind(), strict=True)
    return [row if isinstance(grad, GradientPiece) else row[0] for grad, row in norms]


def _by_interval(norms: Tensor, order: float, virtual: int) -> Tensor:
    """Join ``norms`` [..., virtual] of each interval, the largest first, and padded with zeros.

    Ranks may have different numbers of zeros, for empty pieces, but must sum equally many numbers.
    """
    columns = norms.reshape(-1, virtual).T.sort(dim=1, descending=True).values
    padded = F.pad(columns, (0, -columns.shape[1] % _ROWS))
    joined: Tensor = torch.linalg.vector_norm(padded, order, dim=1)
    return joined


def _over_all_ranks(norms: Tensor, order: float, transport: Channel, owners: Owners) -> Tensor:
    """Return the norm of all ranks' ``norms``: 0-dim, fp32 or fp64, the same on all ranks. Collective."""
    device = owners.device
    dtype = torch.promote_types(norms.dtype, torch.float32)
    by_interval = owners.virtual and order != math.inf
    local = (
        _by_interval(norms, order, owners.virtual) if by_interval else torch.linalg.vector_norm(norms, order)
    )
    local = local.to(device, dtype, non_blocking=True)
    all_ranks = transport.all_ranks
    if all_ranks.rank not in transport.primary_ranks:
        local.zero_()  # the gradients of replicas are equal and count once
    with waiting(ALL_REDUCE, "the gradient's norm", device):
        if order == math.inf:  # gloo's maximum of a nan and a number is the number
            both = torch.stack([local.nan_to_num(torch.inf, torch.inf), local.isnan().float()])
            all_ranks.all_reduce(both, "max")
            return torch.where(both[1] > 0, torch.nan, both[0])
        all_ranks.all_reduce(local.pow_(order))
        return local.sum().pow_(1.0 / order)


def _refuse() -> NoReturn:
    raise ValueError(
        "this is a norm, sum or test of one rank's piece of a gradient: call torch's or "
        "shardtrain's clip_grad_norm_ for the norm of all gradients (max_norm=inf only measures), read whole "
        "ones inside shardtrain.unsharded(model, grads=True), or the piece as grad.as_subclass(torch.Tensor)"
    )

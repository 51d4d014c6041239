"""State that knows what it is part of: the values of a sharded model's and its optimizer's state dict.

A rank holds an interval of a parameter's elements, in memory order. ``torch.distributed.checkpoint`` (DCP)
knows boxes: offsets and sizes in each dimension. A 3×4 parameter of which rank 0 holds elements 0:6::

    a a a a          rank 0   offsets (0, 0) sizes (1, 4), offsets (1, 0) sizes (1, 2)
    a a b b          rank 1   offsets (1, 2) sizes (1, 2), offsets (2, 0) sizes (1, 4)
    b b b b

An interval of an n-dimensional tensor is at most 2n - 1 boxes, and each box a view of the interval. So DCP
writes and fills the pieces in place, and a checkpoint of FSDP2 or of a plain model fits at any world size.

Everything else that stores tensors would store this rank's part and call it the parameter. It is refused.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardtrain.engine.shard import Segment
from shardtrain.engine.unit import Unit

if TYPE_CHECKING:  # an import of 0.3 s, which only programs that use DCP need
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

_WAY_OUT = "save shardtrain.full_state_dict(model), or use torch.distributed.checkpoint.save"
_DCP_STATE_DICT = "torch.distributed.checkpoint.state_dict"
_MEMORY = {
    torch.Tensor.data_ptr,
    torch.Tensor.storage,
    torch.Tensor._typed_storage,
    torch.Tensor.untyped_storage,
}


class Box(NamedTuple):
    """A box of a tensor: where it begins and how long it is, in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cut elements ``start:stop`` of a row-major tensor into boxes, in the order of the elements."""
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    inner = tuple(shape[1:])
    row = math.prod(inner)

    def part_of_row(index: int, low: int, high: int) -> list[Box]:
        return [Box((index, *box.offsets), (1, *box.sizes)) for box in boxes(inner, low, high)]

    (first, low), (last, high) = divmod(start, row), divmod(stop, row)
    if first == last:
        return part_of_row(first, low, high)
    head = part_of_row(first, low, row) if low else []
    first += bool(low)
    rows = [Box((first, *(0 for _ in inner)), (last - first, *inner))] if first < last else []
    return [*head, *rows, *part_of_row(last, 0, high)]


@dataclass(frozen=True)
class Part:
    """Elements ``start:stop`` of ``name``, in the order of ``stride``. ``written``: this rank saves them."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    stop: int
    written: bool = True

    @cached_property
    def order(self) -> list[int]:
        """The dimensions, from the one with the largest stride to the contiguous one."""
        return sorted(range(len(self.shape)), key=lambda dim: -self.stride[dim])

    @cached_property
    def boxes(self) -> list[Box]:
        """The boxes, in the order of memory."""
        if 0 in self.shape:  # nothing to hold, but DCP must find the name
            return [Box((0,) * len(self.shape), self.shape)]
        ordered = boxes([self.shape[dim] for dim in self.order], self.start, self.stop)
        return [Box(self._by_dimension(box.offsets), self._by_dimension(box.sizes)) for box in ordered]

    def _by_dimension(self, ordered: Sequence[int]) -> tuple[int, ...]:
        return tuple(ordered[self.order.index(dim)] for dim in range(len(ordered)))

    def views(self, piece: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield each box with its view of ``piece``, which lies as a rank shows it at rest."""
        if piece.shape == self.shape:
            yield from zip(self.boxes, [piece], strict=True)
            return
        flat, at = piece.reshape(-1), 0
        back = [self.order.index(dim) for dim in range(len(self.order))]
        for box in self.boxes:
            numel = math.prod(box.sizes)
            yield box, flat[at : at + numel].view([box.sizes[dim] for dim in self.order]).permute(back)
            at += numel


class LocalPiece(torch.Tensor):
    """A rank's piece of a tensor, in its shape at rest, sharing memory; ``part`` says of what.

    Copies and results of arithmetic in the same shape are pieces, too. Others are plain tensors.
    """

    part: Part

    @classmethod
    def of(cls, tensor: torch.Tensor, part: Part) -> LocalPiece:
        piece = tensor.as_subclass(cls)
        piece.part = part
        # By these DCP knows that it is no whole tensor (torch.distributed.checkpoint.protocol).
        vars(piece).update(
            global_shape=part.shape,
            global_offsets=tuple(box.offsets for box in part.boxes),
            local_offsets=((),) * len(part.boxes),
            local_sizes=tuple(box.sizes for box in part.boxes),
        )
        return piece

    def plain(self) -> torch.Tensor:
        """Return the same memory as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        piece = next((arg for arg in args if isinstance(arg, cls)), None)
        if piece is not None and func in _MEMORY:  # what safetensors and DCP's async_save begin with
            piece._refuse("copied from memory, by safetensors, save_pretrained or async_save")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if piece is None or type(result) is not torch.Tensor or result.shape != piece.shape:
                return result
            return cls.of(result, piece.part)

    def _refuse(self, what: str) -> None:
        raise ValueError(f"a rank's piece of {self.part.name} must not be {what}: {_WAY_OUT}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._refuse("pickled, by torch.save or otherwise")

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalPiece:
        memo[id(self)] = copied = self.of(self.plain().clone(), self.part)
        return copied

    # what DCP asks for

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint import planner
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

        properties, shape = TensorProperties.create_from_tensor(self.plain()), torch.Size(self.part.shape)
        return [
            planner.WriteItem(
                index=MetadataIndex(name, chunk.offsets, number),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(chunk=chunk, properties=properties, size=shape),
            )
            for number, chunk in enumerate(self.__create_chunk_list__() if self.part.written else ())
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in self.part.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        views = {box.offsets: view for box, view in self.part.views(self.plain())}
        return views[tuple(index.offset or ())]


# Where state dicts are made and loaded


def attach(units: Iterable[Unit]) -> list[RemovableHandle]:
    """Let every module with sharded parameters give pieces in its ``state_dict()``, and take them back."""
    held: dict[nn.Module, dict[str, tuple[Unit, Segment, int]]] = {}
    for unit in units:
        for segment in unit.segments:
            for index, info in enumerate(segment.infos):
                for module, attribute in info.holders:
                    held.setdefault(module, {})[attribute] = unit, segment, index
    return [handle for module, entries in held.items() for handle in _attach(module, entries)]


def _attach(module: nn.Module, held: Mapping[str, tuple[Unit, Segment, int]]) -> list[RemovableHandle]:
    def give(called: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for attribute, (unit, segment, index) in held.items():
            value = state.get(prefix + attribute)
            if unit.pinned or value is None or isinstance(value, nn.Parameter):
                continue  # whole inside `unsharded`; the parameter itself with keep_vars=True
            if segment.shows_full and called is module:
                value = segment.local_views[index]
            if value.shape == torch.Size(segment.rest_shapes[index]):
                _refuse_full("_get_model_state_dict")
                state[prefix + attribute] = LocalPiece.of(value, _part_of(segment, index))

    def take(_: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for attribute, (unit, segment, index) in held.items():
            value, shape = state.get(prefix + attribute), segment.shapes[index]
            cut = shape != torch.Size(segment.rest_shapes[index]) and not unit.pinned
            if cut and value is not None and value.shape == shape:
                raise ValueError(
                    f"load_state_dict() was given the whole {segment.infos[index].name}, of which a rank has "
                    "a piece; use shardtrain.load_full_state_dict(model, state)"
                )
            if isinstance(value, LocalPiece):
                given, own = value.part, _part_of(segment, index)
                if value.numel() and (given.start, given.stop) != (own.start, own.stop):
                    raise ValueError(
                        f"load_state_dict() was given elements {given.start}:{given.stop} of {own.name}, of "
                        f"which this rank has {own.start}:{own.stop}; torch.distributed.checkpoint.save and "
                        "load carry state between models that are sharded in other ways"
                    )
                state[prefix + attribute] = value.plain()

    return [module.register_state_dict_post_hook(give), module.register_load_state_dict_pre_hook(take)]


def _part_of(segment: Segment, index: int) -> Part:
    name, shape, piece = segment.infos[index].name, tuple(segment.shapes[index]), segment.pieces[index]
    return Part(name, shape, tuple(segment.strides[index]), piece.start, piece.stop)


def _refuse_full(function: str) -> bool:
    """Return whether torch.distributed.checkpoint.state_dict's ``function`` runs; refuse to give it all.

    It asks modules and optimizers for nothing but ``state_dict()``, so its options are found on the stack.
    """
    frame = sys._getframe(1)
    while frame.f_code.co_name != function or frame.f_globals["__name__"] != _DCP_STATE_DICT:
        if frame.f_back is None:
            return False
        frame = frame.f_back
    if frame.f_locals["info"].full_state_dict:
        raise ValueError(
            "StateDictOptions(full_state_dict=True) cannot gather a sharded model: use "
            "shardtrain.full_state_dict(model), or leave the option out for torch.distributed.checkpoint.save"
        )
    return True


# The segments whose parameters an optimizer updates. Nothing here keeps a model alive.
_watched: WeakKeyDictionary[torch.optim.Optimizer, WeakSet[Segment]] = WeakKeyDictionary()


def watch(optimizer: torch.optim.Optimizer, segments: Iterable[Segment]) -> None:
    """Let torch's ``get_optimizer_state_dict`` find pieces in the optimizer's state, and take them back."""
    if optimizer not in _watched:
        _watched[optimizer] = WeakSet()
        optimizer.register_state_dict_post_hook(_give_state)
        optimizer.register_load_state_dict_pre_hook(_take_state)
    _watched[optimizer].update(segments)


def _rows(optimizer: torch.optim.Optimizer, groups: Iterable[Any]) -> dict[Any, tuple[nn.Parameter, Part]]:
    """Return the sharded parameters of ``optimizer`` by the number or name that ``groups`` give them."""
    parts = {
        param: _part_of(segment, index)
        for segment in _watched[optimizer]
        for index, param in enumerate(segment.params)
    }
    keys = [key for group in groups for key in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {k: (p, parts[p]) for k, p in zip(keys, params, strict=False) if p in parts}


def _give_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Turn what lies as the parameters do into pieces, for torch.distributed.checkpoint alone."""
    if not _refuse_full("_get_optim_state_dict"):
        return saved
    rows = _rows(optimizer, saved["param_groups"])
    return saved | {
        "state": {
            key: {k: _piece_of_state(v, *rows[key]) for k, v in values.items()} if key in rows else values
            for key, values in saved["state"].items()
        }
    }


def _piece_of_state(value: Any, param: nn.Parameter, part: Part) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.ndim == 0:  # a rank without elements reads it, but its own count may be another
        written = param.numel() > 0 or 0 in part.shape
        return LocalPiece.of(value, Part(part.name, (), (), 0, 1, written))
    return LocalPiece.of(value, part) if value.shape == param.shape else value


def _take_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Turn pieces into plain tensors; refuse whole ones, which ``load_state_dict`` would not compare."""
    for key, (param, part) in _rows(optimizer, saved["param_groups"]).items():
        for value in saved["state"].get(key, {}).values():
            if isinstance(value, torch.Tensor) and value.ndim and value.shape != param.shape:
                raise ValueError(
                    f"load_state_dict() was given state of shape {tuple(value.shape)} for {part.name}, of "
                    f"which a rank has a piece of {tuple(param.shape)}; read it with "
                    "torch.distributed.checkpoint into shardtrain.optimizer_state_dict(model, optimizer)"
                )
    state = {
        key: {k: v.plain() if isinstance(v, LocalPiece) else v for k, v in values.items()}
        for key, values in saved["state"].items()
    }
    return saved | {"state": state}

"""What a rank puts into its file, and the part of the manifest that all ranks agree on.

Two ranks, a parameter ``w`` of 10 elements cut at 8, AdamW::

    rank-00000   parameters/w [8]   optimizer/exp_avg/w [8] …   optimizer/step/w []   averaged/mean [7]
    rank-00001   parameters/w [2]   optimizer/exp_avg/w [2] …
    both         buffers/mean [7] (their own)   extra/0 … (their own)

Moving averages of the weights, if there are any, are `ema/w`, cut as `parameters/w` is.

What all ranks hold alike is in one file alone: rank 0's, or if it belongs to a parameter, that of the first
rank with a piece of it. Empty pieces are not written, and a rank with an empty piece is not asked: it cannot
know whether there was a gradient, so its count of steps may be another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from shardtrain.checkpoint.files import DTYPES
from shardtrain.checkpoint.manifest import (
    Group,
    Manifest,
    Optimizer,
    Parameter,
    Slice,
    State,
    file_name,
)
from shardtrain.engine import Engine
from shardtrain.shard import flattened, shown_as
from shardtrain.state import Spec, equal_buffers, persistent_buffers

Averages: TypeAlias = Mapping[nn.Parameter, torch.Tensor]  # of each parameter of a module, cut as it is

_TENSOR = "__tensor__"  # {"__tensor__": "extra/0"} stands for a tensor


class Held(NamedTuple):
    """One parameter as this rank holds it at rest.

    ``start:stop``: this rank's elements, in the order of ``stride``. ``cuts``: the elements that each
    rank writes. An ignored parameter is whole on every rank, and rank 0 writes it.
    """

    name: str
    unit: str
    param: nn.Parameter
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    stop: int
    cuts: tuple[tuple[int, int], ...]

    def laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, which lies as the parameter does at rest: 1-D, in the order of ``stride``."""
        return flattened(tensor.detach(), self.shape, self.stride)

    def as_held(self, piece: torch.Tensor) -> torch.Tensor:
        """The reverse, of this rank's elements."""
        return shown_as(piece, self.param.shape, self.stride)


class Content(NamedTuple):
    """``tensors`` and ``notes`` of this rank's file; ``manifest`` without files, the same on all ranks."""

    tensors: dict[str, torch.Tensor]
    notes: dict[str, str]
    manifest: Manifest


def held(engine: Engine) -> list[Held]:
    """Every parameter of the module, sharded ones first."""
    rank, world = engine.transport.rank, engine.transport.world
    found = []
    for unit in engine.units:
        for segment in unit.segments:
            by_rank = [segment.layout.pieces(each) for each in range(world)]
            for index, place in enumerate(segment.places):
                cuts = tuple((pieces[index].start, pieces[index].stop) for pieces in by_rank)
                shape, stride = tuple(segment.shapes[index]), tuple(segment.strides[index])
                found.append(
                    Held(place.name, unit.name, segment.params[index], shape, stride, *cuts[rank], cuts)
                )
    sharded = {entry.param for entry in found}
    for name, param in engine.module.named_parameters():
        if param not in sharded:
            stride = torch.empty(param.shape, device="meta").stride()
            cuts = ((0, param.numel()), *[(0, 0)] * (world - 1))
            found.append(Held(name, "", param, tuple(param.shape), stride, 0, param.numel(), cuts))
    return found


def collect(
    engine: Engine,
    optimizer: torch.optim.Optimizer | None,
    extra: Any,
    facts: Mapping[str, Any],
    averages: Averages | None = None,
) -> tuple[Content | None, str]:
    """This rank's content, or why there is none. Collective: buffers are averaged."""
    equal = dict(equal_buffers(engine.module, engine.transport))
    stepped = _stepped(engine, held(engine), optimizer)
    try:
        return _collect(engine, optimizer, extra, facts, averages, equal, stepped), ""
    except ValueError as error:
        return None, str(error)


def _collect(
    engine: Engine,
    optimizer: torch.optim.Optimizer | None,
    extra: Any,
    facts: Mapping[str, Any],
    averages: Averages | None,
    equal: Mapping[torch.Tensor, torch.Tensor],
    stepped: set[str],
) -> Content:
    rank = engine.transport.rank
    entries = held(engine)
    buffers = persistent_buffers(engine.module)
    tensors = {
        f"parameters/{e.name}": piece for e in entries if (piece := _written(e, e.param, rank)).numel()
    }
    tensors |= {f"buffers/{name}": buffer for name, buffer in buffers}
    if rank == 0:
        tensors |= {f"averaged/{name}": equal[buffer] for name, buffer in buffers}
    if averages is not None:
        cut = {f"ema/{e.name}": _written(e, averages[e.param], rank) for e in entries}
        tensors |= {key: piece for key, piece in cut.items() if piece.numel()}
    described = None
    if optimizer is not None:
        described = _describe_optimizer(entries, optimizer, stepped)
        tensors |= _state_tensors(entries, optimizer, described, rank)
    notes = {"extra": json.dumps(encode_extra(extra, tensors))}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}, which a safetensors file does not hold")
    manifest = Manifest(
        world_size=engine.transport.world,
        files={},
        parameters={entry.name: _describe(entry) for entry in entries},
        buffers={name: Spec.of(buffer) for name, buffer in buffers},
        optimizer=described,
        facts=dict(facts),
        ema=averages is not None,
    )
    return Content(tensors, notes, manifest)


def _describe(entry: Held) -> Parameter:
    slices = [
        Slice(file_name(rank), start, stop) for rank, (start, stop) in enumerate(entry.cuts) if stop > start
    ]
    return Parameter(Spec(entry.param.dtype, entry.shape), entry.stride, entry.unit, tuple(slices))


def _written(entry: Held, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """The part of ``tensor``, which lies as the parameter does, that rank ``rank`` writes; 1-D."""
    start, stop = entry.cuts[rank]
    return entry.laid_out(tensor)[start - entry.start : stop - entry.start]


def _stepped(engine: Engine, entries: list[Held], optimizer: torch.optim.Optimizer | None) -> set[str]:
    """Names of parameters that the optimizer has a state of, as ranks with a piece say. Collective."""
    state = {} if optimizer is None else optimizer.state
    flags = [e.param in state and (e.param.numel() > 0 or 0 in e.shape) for e in entries]
    found = torch.tensor(flags, dtype=torch.int32, device=engine.device)
    engine.transport.all_reduce(found, "max")
    return {entry.name for entry, has in zip(entries, found.tolist(), strict=True) if has}


def _describe_optimizer(
    entries: list[Held], optimizer: torch.optim.Optimizer, stepped: set[str]
) -> Optimizer:
    names = {entry.param: entry.name for entry in entries}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        strangers = sum(param not in names for param in group["params"])
        if strangers:
            raise ValueError(
                f"optimizer group {index} holds {strangers} parameters that are not the module's; "
                "pass the optimizer of the module that is saved"
            )
        options = {
            key: _option(value, key) for key, value in group.items() if key not in ("params", "param_names")
        }
        groups.append(Group([names[param] for param in group["params"]], options))
    state = {
        entry.name: {
            key: _describe_state(entry, key, value) for key, value in optimizer.state[entry.param].items()
        }
        for entry in entries
        if entry.name in stepped and entry.param in optimizer.state
    }
    return Optimizer(type(optimizer).__name__, groups, state)


def _option(value: Any, key: str) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if not _is_plain(value):
        raise ValueError(
            f"the optimizer's option {key} is a {type(value).__name__}, which JSON does not hold"
        )
    return list(value) if isinstance(value, tuple) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _describe_state(entry: Held, key: str, value: Any) -> State:
    if not isinstance(value, torch.Tensor):
        if not _is_plain(value):
            raise ValueError(
                f"the optimizer's {key} of {entry.name} is a {type(value).__name__}, expected a tensor"
            )
        return State(None, value=value)
    if value.shape == entry.param.shape:
        return State(value.dtype)
    if value.dim() == 0:
        return State(value.dtype, whole=True)
    raise ValueError(
        f"the optimizer's {key} of {entry.name} has shape {tuple(value.shape)}, which cannot be cut like the "
        f"parameter's local piece of {tuple(entry.param.shape)}; only element-wise optimizers can be saved"
    )


def _state_tensors(
    entries: list[Held], optimizer: torch.optim.Optimizer, described: Optimizer, rank: int
) -> dict[str, torch.Tensor]:
    tensors = {}
    for entry, key, state in _states(entries, described):
        value = optimizer.state[entry.param][key]
        first = next((rank for rank, (start, stop) in enumerate(entry.cuts) if stop > start), 0)
        if state.whole and rank == first:
            tensors[f"optimizer/{key}/{entry.name}"] = value
        elif not state.whole and state.dtype is not None and (piece := _written(entry, value, rank)).numel():
            tensors[f"optimizer/{key}/{entry.name}"] = piece
    return tensors


def _states(entries: list[Held], described: Optimizer) -> Iterator[tuple[Held, str, State]]:
    for entry in entries:
        for key, state in described.state.get(entry.name, {}).items():
            yield entry, key, state


def encode_extra(value: Any, tensors: dict[str, torch.Tensor], where: str = "extra") -> Any:
    """``value`` for JSON; its tensors are put into ``tensors`` and referred to.

    Raises:
        ValueError: naming the part of ``value`` that is neither plain nor a tensor.
    """
    if isinstance(value, torch.Tensor):
        name = f"extra/{sum(key.startswith('extra/') for key in tensors)}"
        tensors[name] = value
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key == _TENSOR:
                raise ValueError(f"{where} has the key {key!r}, expected texts other than {_TENSOR!r}")
        return {key: encode_extra(item, tensors, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode_extra(item, tensors, f"{where}[{index}]") for index, item in enumerate(value)]
    if not _is_plain(value):
        raise ValueError(
            f"{where} is a {type(value).__name__}, expected tensors, numbers, texts, None, lists and dicts"
        )
    return value


def decode_extra(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The reverse of `encode_extra`; tuples have become lists."""
    if isinstance(value, dict):
        if set(value) == {_TENSOR}:
            return tensors[value[_TENSOR]]
        return {key: decode_extra(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [decode_extra(item, tensors) for item in value]
    return value

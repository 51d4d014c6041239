"""What a rank puts into its file, and the part of the manifest that all ranks agree on.

Two ranks, a parameter ``w`` of 10 elements cut at 8, AdamW::

    rank-00000   parameters/w [8]   optimizer/exp_avg/w [8] …   optimizer/step/w []   averaged/mean [7]
    rank-00001   parameters/w [2]   optimizer/exp_avg/w [2] …
    both         buffers/mean [7] (their own)   extra/0 … (their own)

Where there are replicas, the first one writes what is cut; the other ranks' files hold the last line only.

Moving averages of the weights, if there are any, are `ema/w`, cut as `parameters/w` is.

What all ranks hold alike is in one file alone: rank 0's, or if it belongs to a parameter, that of the first
rank with a piece of it. Empty pieces are not written, and a rank with an empty piece is not asked: it cannot
know whether there was a gradient, so its count of steps may be another, or it may have no state at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from shardtrain import comm
from shardtrain.checkpoint.files import DTYPES
from shardtrain.checkpoint.manifest import (
    Group,
    Manifest,
    Optimizer,
    Parameter,
    Slice,
    StateEntry,
    dump_state,
    file_name,
    parse_state,
)
from shardtrain.engine.hooks import Engine
from shardtrain.engine.shard import flattened, shown
from shardtrain.engine.state_dict import Spec, equal_buffers, persistent_buffers
from shardtrain.layout import Piece

Averages: TypeAlias = Mapping[nn.Parameter, torch.Tensor]  # of each parameter of a module, cut as it is

_TENSOR = "__tensor__"  # {"__tensor__": "extra/0"} stands for a tensor


class Held(NamedTuple):
    """One parameter as this rank holds it at rest.

    ``start:stop``: this rank's elements, in the order of ``stride``. ``cuts``: the elements that each
    of all_ranks writes. An ignored parameter is whole on every rank, and rank 0 writes it.
    """

    name: str
    unit: str
    param: nn.Parameter
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    stop: int
    cuts: tuple[tuple[int, int], ...]

    @property
    def first(self) -> int:
        """The first rank that writes some of it; 0 if there is nothing to write."""
        return next((rank for rank, (start, stop) in enumerate(self.cuts) if stop > start), 0)

    def flattened(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, which lies as the parameter does at rest: 1-D, in the order of ``stride``."""
        return flattened(tensor.detach(), self.shape, self.stride)

    def shown(self, piece: torch.Tensor) -> torch.Tensor:
        """The reverse, of this rank's elements."""
        return shown(piece, self.param.shape, self.stride)


class Content(NamedTuple):
    """``tensors`` and ``notes`` of this rank's file; ``manifest`` without files, the same on all ranks."""

    tensors: dict[str, torch.Tensor]
    notes: dict[str, str]
    manifest: Manifest


def held(engine: Engine) -> list[Held]:
    """Every parameter of the module, sharded ones first."""
    world, primary_ranks = engine.transport.all_ranks.world, engine.transport.primary_ranks
    found = []
    for unit in engine.units:
        for segment in unit.segments:
            by_rank = [(Piece(0, 0, 0),) * len(segment.places)] * world
            for number, rank in enumerate(primary_ranks):
                by_rank[rank] = segment.layout.pieces(number)
            for index, place in enumerate(segment.places):
                cuts = tuple((pieces[index].start, pieces[index].stop) for pieces in by_rank)
                shape, stride = tuple(segment.shapes[index]), tuple(segment.strides[index])
                start, stop, _ = segment.pieces[index]
                found.append(
                    Held(place.name, unit.name, segment.params[index], shape, stride, start, stop, cuts)
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
) -> Content:
    """This rank's content. Collective: buffers are averaged, the optimizer's states compared.

    Raises:
        ValueError: on this rank alone, when nothing is communicated any more: something cannot be saved.
    """
    equal = dict(equal_buffers(engine.module, engine.transport.all_ranks))
    states = _agreed_states(engine, optimizer)
    entries, rank = held(engine), engine.transport.all_ranks.rank
    buffers = persistent_buffers(engine.module)
    tensors = _cut_tensors("parameters", entries, {e.param: e.param for e in entries}, rank)
    tensors |= {f"buffers/{name}": buffer for name, buffer in buffers}
    if rank == 0:
        tensors |= {f"averaged/{name}": equal[buffer] for name, buffer in buffers}
    if averages is not None:
        tensors |= _cut_tensors("ema", entries, averages, rank)
    described = None
    if optimizer is not None:
        described = _describe_optimizer(entries, optimizer, states)
        tensors |= _state_tensors(entries, optimizer, described, rank)
    notes = {"extra": json.dumps(encode_extra(extra, tensors))}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}, which a safetensors file does not hold")
    manifest = Manifest(
        world_size=engine.transport.all_ranks.world,
        files={},
        parameters={entry.name: _describe(entry) for entry in entries},
        buffers={name: Spec.of(buffer) for name, buffer in buffers},
        optimizer=described,
        facts=dict(facts),
        ema=averages is not None,
    )
    return Content(tensors, notes, manifest)


def _cut_tensors(
    kind: str, entries: list[Held], values: Mapping[nn.Parameter, torch.Tensor], rank: int
) -> dict[str, torch.Tensor]:
    """Of each parameter what rank ``rank`` writes of its value in ``values``, if that is anything."""
    pieces = {f"{kind}/{entry.name}": _written(entry, values[entry.param], rank) for entry in entries}
    return {key: piece for key, piece in pieces.items() if piece.numel()}


def _describe(entry: Held) -> Parameter:
    slices = [
        Slice(file_name(rank), start, stop) for rank, (start, stop) in enumerate(entry.cuts) if stop > start
    ]
    return Parameter(Spec(entry.param.dtype, entry.shape), entry.stride, entry.unit, tuple(slices))


def _written(entry: Held, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """The part of ``tensor``, which lies as the parameter does, that rank ``rank`` writes; 1-D."""
    start, stop = entry.cuts[rank]
    return entry.flattened(tensor)[start - entry.start : stop - entry.start]


def _agreed_states(
    engine: Engine, optimizer: torch.optim.Optimizer | None
) -> dict[str, dict[str, StateEntry]]:
    """What the optimizer keeps of each parameter, as the first rank with a piece of it says. Collective.

    Raises:
        ValueError: in the end, on this rank alone: its own cannot be saved, or is not what others say.
    """
    entries = held(engine) if optimizer is not None else []
    all_ranks, ours, problem = engine.transport.all_ranks, {}, ""
    try:
        for entry in entries:
            assert optimizer is not None
            if entry.param in optimizer.state and (entry.param.numel() or entry.first == all_ranks.rank):
                state = optimizer.state[entry.param]
                ours[entry.name] = {k: dump_state(_describe_state(entry, k, v)) for k, v in state.items()}
    except ValueError as error:
        problem = str(error)
    ours = json.loads(json.dumps(ours))  # as others will read it: tuples are lists
    said = json.dumps({e.name: ours[e.name] for e in entries if e.name in ours and e.first == all_ranks.rank})
    agreed: dict[str, Any] = {}
    for text in comm.gather_texts(said, all_ranks, engine.device):
        agreed |= json.loads(text) if text else {}  # a simulated world delivers nothing
    odd = [name for name, state in ours.items() if agreed.get(name, state) != state]
    if odd and not problem:
        problem = f"the optimizer's state of {odd[0]} is {ours[odd[0]]}, expected {agreed[odd[0]]}"
    if problem:
        raise ValueError(problem)
    return {name: {k: parse_state(v) for k, v in state.items()} for name, state in agreed.items()}


def _describe_optimizer(
    entries: list[Held], optimizer: torch.optim.Optimizer, states: Mapping[str, dict[str, StateEntry]]
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
    state = {entry.name: states[entry.name] for entry in entries if entry.name in states}
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


def _describe_state(entry: Held, key: str, value: Any) -> StateEntry:
    if not isinstance(value, torch.Tensor):
        if not _is_plain(value):
            raise ValueError(
                f"the optimizer's {key} of {entry.name} is a {type(value).__name__}, expected a tensor"
            )
        return StateEntry(None, value=value)
    if value.shape == entry.param.shape:
        return StateEntry(value.dtype)
    if value.dim() == 0:
        return StateEntry(value.dtype, whole=True)
    raise ValueError(
        f"the optimizer's {key} of {entry.name} has shape {tuple(value.shape)}, which cannot be cut like the "
        f"parameter's local piece of {tuple(entry.param.shape)}; only element-wise optimizers can be saved"
    )


def _state_tensors(
    entries: list[Held], optimizer: torch.optim.Optimizer, described: Optimizer, rank: int
) -> dict[str, torch.Tensor]:
    tensors = {}
    for entry, key, state in _states(entries, described):
        start, stop = entry.cuts[rank]
        if state.whole and rank == entry.first:
            tensors[f"optimizer/{key}/{entry.name}"] = optimizer.state[entry.param][key]
        elif not state.whole and state.dtype is not None and stop > start:
            value = optimizer.state[entry.param][key]
            tensors[f"optimizer/{key}/{entry.name}"] = _written(entry, value, rank)
    return tensors


def _states(entries: list[Held], described: Optimizer) -> Iterator[tuple[Held, str, StateEntry]]:
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

"""The content of a rank's file: a flat mapping from names to tensors, and JSON.

Each tensor has a part, or none::

    part   elements start:stop of a tensor that all ranks hold together; the manifest lists the slices
    None   this rank's own

Two ranks, a parameter ``w`` of 40 elements cut at 32, AdamW::

    rank-00000   parameters/w 0:32   optimizer/exp_avg/w 0:32 …   averaged/mean 0:7
    rank-00001   parameters/w 32:40  optimizer/exp_avg/w 32:40 …
    both         buffers/mean (their own)   extra/0 … (their own)

Moving averages of the weights, if any, are `ema/w`, cut like `parameters/w`. Numbers in the optimizer's
state, 0-dim tensors among them, are JSON. With replicas, the first replica writes what has a part.

Empty parts are not written. Optimizer state of a rank with an empty part is not compared: that rank cannot
know whether a gradient existed, so its step count may lag, or its state be missing.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from shardtrain import comm
from shardtrain.checkpoint.files import DTYPES
from shardtrain.checkpoint.manifest import Entry, Manifest, dtype_name, file_name, parse_entry
from shardtrain.comm.channel import Ranks
from shardtrain.engine.hooks import Engine, engine_of
from shardtrain.engine.segment import plain_name
from shardtrain.errors import SaveFailed
from shardtrain.pieces.part import Part, dense_stride
from shardtrain.pieces.piece import Piece
from shardtrain.whole.state_dict import equal_buffers, persistent_buffers

Averages: TypeAlias = Mapping[nn.Parameter, torch.Tensor]  # for each parameter of a module, sharded like it
Named: TypeAlias = dict[str, tuple[Part | None, torch.Tensor]]

_TENSOR = "__tensor__"  # {"__tensor__": "extra/0"} stands for a tensor
_PAIRS = "__pairs__"  # {"__pairs__": [[1, "one"]]} stands for a dict with keys that JSON does not keep
_COUNTER = "__counter__"  # the same for a Counter, in which a MultiStepLR has its milestones
_MARKS = (_TENSOR, _PAIRS, _COUNTER)


class LocalShard(NamedTuple):
    """This rank's local shard of one parameter. ``writes``: this rank writes it."""

    param: nn.Parameter
    part: Part
    writes: bool

    @property
    def name(self) -> str:
        return self.part.name


def local_shards(engine: Engine) -> list[LocalShard]:
    """Describe every parameter of the module: sharded ones, then ignored ones, which rank 0 writes."""
    rank = engine.channel.all_ranks.rank
    is_primary = rank in engine.channel.primary_ranks
    shards = []
    for member in engine.members:
        writes = is_primary and member.part.numel > 0
        shards.append(LocalShard(member.param, member.part, writes))
    sharded = {shard.param for shard in shards}
    for name, param in engine.module.named_parameters():
        if param not in sharded:
            shards.append(LocalShard(param, whole_part(plain_name(name), param), rank == 0))
    # Of a parameter without elements rank 0 writes that it exists.
    empty = {shard.param for shard in shards if 0 in shard.part.shape}
    return [shard._replace(writes=rank == 0) if shard.param in empty else shard for shard in shards]


def misfits(shards: Sequence[LocalShard], averages: Averages) -> list[str]:
    """Return a line per parameter whose average is missing, or not sharded like it."""
    problems = []
    for param, part, _ in shards:
        average = averages.get(param)
        if average is None:
            problems.append(f"averages lacks {part.name}")
        elif average.shape != param.shape:
            wanted = f"{tuple(param.shape)}, as the parameter's local shard"
            problems.append(f"averages has {part.name} of shape {tuple(average.shape)}, expected {wanted}")
    return problems


def whole_part(name: str, tensor: torch.Tensor) -> Part:
    """Describe all elements of a tensor that is never cut."""
    return Part(name, tuple(tensor.shape), dense_stride(tensor), 0, tensor.numel(), whole=True)


class Content(NamedTuple):
    """What this rank writes, on which all ranks have agreed."""

    tensors: dict[str, torch.Tensor]
    notes: dict[str, str]
    manifest: Manifest  # without files
    token: str  # random, the same on all ranks


def collect(
    path: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    extra: Any,
    facts: Mapping[str, Any],
    averages: Averages | None = None,
    problem: str = "",
) -> Content:
    """Collect what this rank writes into the checkpoint ``path``. Collective.

    ``problem``: why ``path`` cannot be saved. Raises SaveFailed on every rank, naming ranks and reasons.
    """
    engine = engine_of(module)
    engine.require_rest("checkpoint.save() cannot be called")
    all_ranks = engine.channel.all_ranks
    named: Named = {}
    values: dict[str, Any] = {}
    described: dict[str, Any] = {}
    notes: dict[str, str] = {}
    equal = dict(equal_buffers(engine.module, all_ranks))  # collective, so before anything that may fail
    try:
        shards = local_shards(engine)
        if averages is not None and (misfit := misfits(shards, averages)):
            raise ValueError("; ".join(misfit))
        for shard in shards:
            if shard.writes:
                named[f"parameters/{shard.name}"] = (shard.part, shard.param.data)
                if averages is not None:
                    named[f"ema/{shard.name}"] = (shard.part, averages[shard.param])
                state, values[shard.name] = _state_of(shard, optimizer)
                named |= state
        named |= _buffers(engine, equal)
        described = {"optimizer": _describe_optimizer(shards, optimizer), "facts": dict(facts)}
        own: dict[str, torch.Tensor] = {}
        notes = {"extra": json.dumps(encode_extra(extra, own))}
        named |= {name: (None, tensor) for name, tensor in own.items()}
    except (ValueError, RecursionError) as error:
        problem = problem or str(error)
    return agree(path, all_ranks, named, described, values=values, notes=notes, problem=problem)


def agree(
    path: Path,
    all_ranks: Ranks,
    named: Named,
    described: Mapping[str, Any],
    *,
    values: Mapping[str, Any] | None = None,
    notes: Mapping[str, str] | None = None,
    problem: str = "",
) -> Content:
    """Compare what all ranks hold, and list their parts in a manifest. Collective.

    This rank writes ``named`` and ``notes``. All ranks have ``described`` alike: the manifest's ``optimizer``
    and ``facts``. ``values``: JSON of each parameter of which this rank has elements.
    """

    def failed(problems: str) -> SaveFailed:
        return SaveFailed(f"{path} was not saved: {problems}")

    parts = {}
    for name, (part, tensor) in named.items():
        if tensor.dtype not in DTYPES:
            problem = f"{name} is {tensor.dtype}, which a safetensors file does not hold"
        elif part is not None:
            spec = [dtype_name(tensor.dtype), part.shape, part.stride]
            parts[name] = [*spec, part.start, part.stop]
    digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()
    own_facts = {"token": secrets.token_hex(4), "parts": parts, "digest": digest, "values": values or {}}
    by_rank = exchange(failed, all_ranks, problem, **own_facts)
    if odd := [str(rank) for rank, each in enumerate(by_rank) if each["digest"] != by_rank[0]["digest"]]:
        raise failed(f"rank {', '.join(odd)} holds another model, optimizer or facts than rank 0")
    try:
        manifest = Manifest(
            world_size=all_ranks.world,
            files={},
            tensors=_assemble([each["parts"] for each in by_rank]),
            optimizer=described["optimizer"],
            facts=described["facts"],
        )
        if manifest.optimizer is not None:
            manifest.optimizer["values"] = _equal_values([each["values"] for each in by_rank])
    except ValueError as error:
        raise failed(str(error)) from None
    flat = {}
    for name, (part, tensor) in named.items():
        if part is None:
            flat[name] = tensor
        elif part.numel:
            flat[name] = part.flattened(tensor.detach().as_subclass(torch.Tensor))
    return Content(flat, dict(notes or {}), manifest, by_rank[0]["token"])


def _assemble(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Entry]:
    """Return the entry of each tensor, from the parts that each rank has of it."""
    nodes: dict[str, dict[str, Any]] = {}
    for rank, parts in enumerate(by_rank):
        for name, (dtype, shape, stride, start, stop) in parts.items():
            spec = {"dtype": dtype, "shape": shape, "stride": stride}
            node = nodes.setdefault(name, {**spec, "slices": []})
            if spec != {key: node[key] for key in spec}:
                raise ValueError(
                    f"rank {rank} has {name} as {dtype} {shape}, expected {node['dtype']} {node['shape']}"
                )
            if start < stop:
                node["slices"].append([file_name(rank), start, stop])
    for node in nodes.values():
        node["slices"].sort(key=lambda part: part[1])
    return {name: parse_entry(node, name) for name, node in nodes.items()}


def _equal_values(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the numbers in the optimizer's state of each parameter, which all ranks must have alike."""
    values: dict[str, Any] = {}
    for rank, each in enumerate(by_rank):
        for name, numbers in each.items():
            expected = values.setdefault(name, numbers)
            if json.dumps(numbers) != json.dumps(expected):  # as texts, since NaN does not equal NaN
                raise ValueError(
                    f"rank {rank}: the optimizer's state of {name} is {numbers}, expected {expected}"
                )
    return {name: numbers for name, numbers in values.items() if numbers}


def _state_of(shard: LocalShard, optimizer: torch.optim.Optimizer | None) -> tuple[Named, dict[str, Any]]:
    """Return what the optimizer holds of a parameter: tensors that are cut like it, and numbers for JSON."""
    named: Named = {}
    values: dict[str, Any] = {}
    state = optimizer.state.get(shard.param, {}) if optimizer is not None else {}
    for key, value in state.items():  # which may be pieces
        if not isinstance(value, torch.Tensor):
            values[key] = {"value": _plain(value, f"the optimizer's {key} of {shard.name}")}
        elif value.shape == shard.param.shape and "/" not in key:
            named[f"optimizer/{key}/{shard.name}"] = (shard.part, value)
        elif value.dim() == 0:
            values[key] = {"dtype": dtype_name(value.dtype), "value": value.item()}
        else:
            raise ValueError(
                f"the optimizer's {key} of {shard.name} has shape {tuple(value.shape)}, which cannot be cut "
                f"like the parameter's local shard of {tuple(shard.param.shape)}; only element-wise "
                "optimizers can be saved"
            )
    return named, values


def _buffers(engine: Engine, equal: Mapping[torch.Tensor, torch.Tensor]) -> Named:
    """Return each buffer twice: this rank's own, and on rank 0 the mean over the ranks."""
    if further := [key for key in engine.module.state_dict(keep_vars=True) if key.endswith("_extra_state")]:
        raise ValueError(f"{further[0]} has no place in a checkpoint: pass what it is to save() as extra=")
    named: Named = {}
    for name, buffer in persistent_buffers(engine.module):
        named[f"buffers/{name}"] = (None, buffer)
        if engine.channel.all_ranks.rank == 0:
            named[f"averaged/{name}"] = (whole_part(name, equal[buffer]), equal[buffer])
    return named


def _describe_optimizer(
    shards: Sequence[LocalShard], optimizer: torch.optim.Optimizer | None
) -> dict[str, Any] | None:
    """Return the manifest's description of the optimizer, without state."""
    if optimizer is None:
        return None
    names = {shard.param: shard.name for shard in shards}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        strangers = sum(param not in names for param in group["params"])
        if strangers:
            raise ValueError(
                f"optimizer group {index} holds {strangers} parameters that are not the module's; "
                "pass the optimizer of the module that is saved"
            )
        kept = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        options = {key: _plain(value, f"the optimizer's option {key}") for key, value in kept.items()}
        groups.append({"names": [names[param] for param in group["params"]], "options": options})
    return {"type": type(optimizer).__name__, "groups": groups, "values": {}}


def _plain(value: Any, what: str) -> Any:
    """Return ``value`` for JSON: tuples as lists, a tensor of one element as number. Raises ValueError."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:  # such as a learning rate
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(item, what) for item in value]
    if value is not None and not isinstance(value, bool | int | float | str):
        raise ValueError(
            f"{what} is a {type(value).__name__}, expected tensors, numbers, texts, None, lists and dicts"
        )
    return value


def encode_extra(value: Any, tensors: dict[str, torch.Tensor], where: str = "extra") -> Any:
    """Return ``value`` for JSON, with references to its tensors, which are added to ``tensors``.

    Raises ValueError, naming the part of ``value`` that is neither plain nor a tensor.
    """
    if isinstance(value, torch.Tensor):
        if isinstance(value, Piece):
            raise ValueError(
                f"{where} is a rank's piece of {value.owners.subject}, which only its model can load"
            )
        tensors[name := f"extra/{len(tensors)}"] = value
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return _encode_mapping(value, tensors, where)
    if isinstance(value, list | tuple):
        return [encode_extra(item, tensors, f"{where}[{index}]") for index, item in enumerate(value)]
    return _plain(value, where)


def _encode_mapping(value: Mapping[Any, Any], tensors: dict[str, torch.Tensor], where: str) -> Any:
    pairs = []
    for key, item in value.items():
        if type(key) not in (str, int):
            raise ValueError(
                f"{where} has the key {key!r}, expected texts and integers: store pairs, [*values.items()], "
                "and make a dict of them after load"
            )
        pairs.append((key, encode_extra(item, tensors, f"{where}[{key!r}]")))
    mark = _COUNTER if isinstance(value, Counter) else _PAIRS
    readable = mark is _PAIRS and all(type(key) is str and key not in _MARKS for key in value)
    return dict(pairs) if readable else {mark: pairs}


def decode_extra(text: str, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Undo `encode_extra`, except that tuples are lists."""

    def decode(node: dict[str, Any]) -> Any:
        if _TENSOR in node:
            return tensors[node[_TENSOR]]
        if _COUNTER in node:
            return Counter(dict(node[_COUNTER]))
        return dict(node[_PAIRS]) if _PAIRS in node else node

    return json.loads(text, object_hook=decode)


def exchange(
    failed: Callable[[str], Exception], all_ranks: Ranks, problem: str, **facts: Any
) -> list[dict[str, Any]]:
    """Exchange this rank's ``problem`` (empty for none) and its ``facts`` (JSON values). Collective.

    Returns all ranks' facts. If any rank has a problem, every rank raises ``failed(all problems)``.
    """
    texts = comm.gather_texts(json.dumps({"problem": problem, **facts}), all_ranks)
    by_rank = [json.loads(text) for text in texts]
    problems = [f"rank {rank}: {each['problem']}" for rank, each in enumerate(by_rank) if each["problem"]]
    if problems:
        raise failed("; ".join(problems))
    return by_rank

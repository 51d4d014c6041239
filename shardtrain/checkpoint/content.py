"""Collect what a rank writes into its file, and the part of the manifest that all ranks agree on.

Two ranks, a parameter ``w`` of 40 elements cut at 32, AdamW::

    rank-00000   parameters/w [32]   optimizer/exp_avg/w [32] …   optimizer/step/w []   averaged/mean [7]
    rank-00001   parameters/w [8]    optimizer/exp_avg/w [8] …
    both         buffers/mean [7] (their own)   extra/0 … (their own)

Moving averages of the weights, if any, are `ema/w`, sharded like `parameters/w`. With replicas, the first
replica writes what is sharded, and the files of other ranks hold only the last line.

What all ranks hold alike is in one file: rank 0's, or for a parameter, that of the first rank with a piece of
it. Empty pieces are not written. Optimizer state of a rank with an empty piece is not compared: that rank
cannot know whether a gradient existed, so its step count may lag, or its state be missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from shardtrain import comm
from shardtrain.checkpoint.files import DTYPES
from shardtrain.checkpoint.manifest import Manifest, ParameterEntry, Slice, dtype_name, file_name
from shardtrain.comm.channel import Ranks
from shardtrain.engine.hooks import Engine
from shardtrain.engine.part import Part
from shardtrain.engine.pieces import LocalPiece
from shardtrain.engine.shard import plain_name
from shardtrain.engine.state_dict import Spec, equal_buffers, persistent_buffers

Averages: TypeAlias = Mapping[nn.Parameter, torch.Tensor]  # for each parameter of a module, sharded like it

_TENSOR = "__tensor__"  # {"__tensor__": "extra/0"} stands for a tensor


class LocalShard(NamedTuple):
    """Describe this rank's local shard of one parameter. ``entry`` lists what each rank writes."""

    param: nn.Parameter
    entry: ParameterEntry
    part: Part

    @property
    def name(self) -> str:
        return self.part.name


def local_shards(engine: Engine) -> list[LocalShard]:
    """Describe every parameter of the module: sharded ones, then ignored ones, which rank 0 writes."""
    shards = []
    ranks = engine.transport.primary_ranks
    for unit in engine.units:
        for segment in unit.segments:
            cuts = zip(*(segment.layout.pieces(number) for number in range(len(ranks))), strict=True)
            for member, cut in zip(segment.members, cuts, strict=True):
                pieces = zip(map(file_name, ranks), cut, strict=True)
                slices = tuple(Slice(file, p.start, p.stop) for file, p in pieces if p.numel)
                spec = Spec(member.param.dtype, member.part.shape)
                entry = ParameterEntry(spec, member.part.stride, unit.name, slices)
                shards.append(LocalShard(member.param, entry, member.part))
    sharded = {shard.param for shard in shards}
    for name, param in engine.module.named_parameters():
        if param not in sharded:
            stride = torch.empty(param.shape, device="meta").stride()
            size = param.numel()
            slices = (Slice(file_name(0), 0, size),) if size else ()
            entry = ParameterEntry(Spec.of(param), stride, "", slices)
            part = Part(plain_name(name), tuple(param.shape), stride, 0, size, whole=True)
            shards.append(LocalShard(param, entry, part))
    return shards


class Content(NamedTuple):
    """Hold what this rank writes: ``tensors`` by key."""

    tensors: dict[str, torch.Tensor]
    extra: str
    manifest: Manifest  # without files and optimizer state
    state: dict[str, dict[str, Any]]  # describes the state of parameters of which this rank has elements

    def take_state(self, by_rank: Sequence[Mapping[str, Any]]) -> str:
        """Add all ranks' optimizer state to the manifest; return how it differs, or an empty text."""
        state: dict[str, Any] = {}
        for rank, each in enumerate(by_rank):
            for name, found in each.items():
                if found != state.setdefault(name, found):
                    return f"rank {rank}: the optimizer's state of {name} is {found}, expected {state[name]}"
        if self.manifest.optimizer is not None:
            ordered = {name: state[name] for name in self.manifest.parameters if state.get(name)}
            self.manifest.optimizer["state"].update(ordered)
        return ""


def collect(
    engine: Engine,
    optimizer: torch.optim.Optimizer | None,
    extra: Any,
    facts: Mapping[str, Any],
    averages: Averages | None = None,
) -> Content:
    """Collect what this rank writes. Collective, since buffers are averaged.

    Raises ValueError if something cannot be saved: on this rank alone, after the last collective.
    """
    all_ranks = engine.transport.all_ranks
    shards = local_shards(engine)
    tensors = dict[str, torch.Tensor]()
    own_file = file_name(all_ranks.rank)
    buffers = persistent_buffers(engine.module)
    equal = dict(equal_buffers(engine.module, all_ranks))
    if further := [key for key in engine.module.state_dict(keep_vars=True) if key.endswith("_extra_state")]:
        raise ValueError(f"{further[0]} has no place in a checkpoint: pass what it is to save() as extra=")
    tensors |= {f"buffers/{name}": buffer for name, buffer in buffers}
    if all_ranks.rank == 0:
        tensors |= {f"averaged/{name}": equal[buffer] for name, buffer in buffers}
    state: dict[str, dict[str, Any]] = {}
    for shard in shards:
        cut = {"parameters": shard.param.data}
        if averages is not None:
            cut["ema"] = averages[shard.param]
        first = shard.entry.first_file == own_file
        if optimizer is not None and (shard.param.numel() or first):
            described: dict[str, Any] = {}
            state[shard.name] = described
            for key, value in optimizer.state.get(shard.param, {}).items():
                node = _describe_state(shard, key, value)
                described[key] = node
                if "dtype" in node:
                    cut[f"optimizer/{key}"] = value
                elif "whole" in node and first:
                    tensors[f"optimizer/{key}/{shard.name}"] = value
        if any(piece.file == own_file for piece in shard.entry.slices):
            for kind, value in cut.items():
                tensors[f"{kind}/{shard.name}"] = shard.part.flattened(value.detach())
    manifest = Manifest(
        world_size=all_ranks.world,
        files={},
        parameters={shard.name: shard.entry for shard in shards},
        buffers={name: Spec.of(buffer) for name, buffer in buffers},
        optimizer=None if optimizer is None else _describe_optimizer(shards, optimizer),
        facts=dict(facts),
        ema=averages is not None,
    )
    encoded = json.dumps(encode_extra(extra, tensors))
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}, which a safetensors file does not hold")
    return Content(tensors, encoded, manifest, state)


def _describe_state(shard: LocalShard, key: str, value: Any) -> dict[str, Any]:
    """Return the manifest's description of one entry of a parameter's optimizer state."""
    if not isinstance(value, torch.Tensor):
        return {"value": _plain(value, f"the optimizer's {key} of {shard.name}")}
    if value.shape == shard.param.shape:
        return {"dtype": dtype_name(value.dtype)}
    if value.dim() == 0:
        return {"whole": dtype_name(value.dtype)}
    raise ValueError(
        f"the optimizer's {key} of {shard.name} has shape {tuple(value.shape)}, which cannot be cut like the "
        f"parameter's local piece of {tuple(shard.param.shape)}; only element-wise optimizers can be saved"
    )


def _describe_optimizer(shards: Sequence[LocalShard], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the manifest's description of the optimizer, without state."""
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
    return {"type": type(optimizer).__name__, "groups": groups, "state": {}}


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
        if isinstance(value, LocalPiece):
            raise ValueError(f"{where} is a rank's piece of {value.part.name}, which only its model can load")
        tensors[name := f"extra/{len(tensors)}"] = value
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key == _TENSOR:
                raise ValueError(
                    f"{where} has the key {key!r}, expected texts other than {_TENSOR!r}: store pairs, "
                    "[*values.items()], and make a dict of them after load"
                )
        return {key: encode_extra(item, tensors, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode_extra(item, tensors, f"{where}[{index}]") for index, item in enumerate(value)]
    return _plain(value, where)


def decode_extra(text: str, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Undo `encode_extra`, except that tuples are lists."""
    return json.loads(text, object_hook=lambda node: tensors[node[_TENSOR]] if _TENSOR in node else node)


def exchange(
    failed: Callable[[str], Exception], all_ranks: Ranks, problem: str, **facts: Any
) -> list[dict[str, Any]]:
    """Exchange this rank's ``problem`` (empty for none) and its ``facts`` (JSON values). Collective.

    Returns all ranks' facts. If any rank has a problem, every rank raises ``failed(all problems)``.
    """
    texts = comm.gather_texts(json.dumps({"problem": problem, **facts}), all_ranks)
    told = [json.loads(text) for text in texts]
    if problems := [f"rank {rank}: {each['problem']}" for rank, each in enumerate(told) if each["problem"]]:
        raise failed("; ".join(problems))
    return told

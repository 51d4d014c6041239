"""The load of a checkpoint: verify everything, compare everything, then fill the shards.

    open      each file is read once, by one rank, and compared with its size, its digest and the manifest
    compare   every rank compares names, shapes, dtypes and optimizer groups
    fill      every rank maps the files and copies the elements that it owns, whichever rank wrote them

Ranks agree after each phase, so all continue or all raise, and nothing changes before the last phase.

A load at another world size or with other units intersects intervals of a parameter's memory. docs/engine.md
follows one parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from shardtrain import comm
from shardtrain.checkpoint.content import (
    Averages,
    LocalShard,
    decode_extra,
    exchange,
    local_shards,
    misfits,
    whole_part,
)
from shardtrain.checkpoint.files import DTYPES, verify
from shardtrain.checkpoint.manifest import DTYPE_NAMED, Manifest, file_name, parse, read_manifest
from shardtrain.comm.channel import Ranks
from shardtrain.engine.hooks import engine_of
from shardtrain.errors import Damaged
from shardtrain.pieces.part import Part
from shardtrain.whole.state_dict import Spec as Spec
from shardtrain.whole.state_dict import differences as differences
from shardtrain.whole.state_dict import persistent_buffers


class Opened(NamedTuple):
    """A checkpoint whose files have been verified."""

    path: Path
    manifest: Manifest


def open_checkpoint(path: Path, all_ranks: Ranks) -> Opened:
    """Verify every file of the checkpoint ``path``, each on one rank. Collective.

    Raises Damaged on every rank, naming ranks and files.
    """

    def damaged(problems: str) -> Damaged:
        return Damaged(f"{path} is damaged: {problems}")

    text = ""
    problems = list[str]()
    if all_ranks.rank == 0:
        try:
            text = read_manifest(path)
            parse(text)
        except (ValueError, OSError) as error:
            problems.append(str(error))
    manifest = parse(exchange(damaged, all_ranks, "; ".join(problems), text=text)[0]["text"])
    names = sorted(manifest.files)[all_ranks.rank :: all_ranks.world]
    for name, tensors in _expected_tensors(manifest, names).items():
        try:
            verify(path / name, manifest.files[name])
            _verify_header(path / name, tensors)
        except ValueError as error:
            problems.append(str(error))
        except (OSError, SafetensorError) as error:
            problems.append(f"{name}: {error}")
    exchange(damaged, all_ranks, "; ".join(problems))
    return Opened(path, manifest)


def _expected_tensors(manifest: Manifest, files: Iterable[str]) -> dict[str, dict[str, Spec]]:
    """Return the tensors that the manifest expects in each of ``files``, by name, all 1-D."""
    own = {}
    for name, spec in manifest.specs("averaged").items():
        own[f"buffers/{name}"] = Spec(spec.dtype, (math.prod(spec.shape),))
    expected = {file: dict(own) for file in files}
    for name, entry in manifest.tensors.items():
        for part in entry.slices:
            if part.file in expected:
                expected[part.file][name] = Spec(entry.spec.dtype, (part.stop - part.start,))
    return expected


def _verify_header(path: Path, expected: Mapping[str, Spec]) -> None:
    """Raise ValueError, SafetensorError or OSError unless a data file has the ``expected`` tensors.

    Of shapes only the number of elements is compared.
    """
    with safe_open(path, framework="pt", device="cpu") as file:
        for name, spec in expected.items():
            tensor = file.get_slice(name)
            dtype = tensor.get_dtype()
            shape = tuple(tensor.get_shape())
            if dtype != DTYPES[spec.dtype] or (math.prod(shape),) != spec.shape:
                wanted = f"{DTYPES[spec.dtype]} {spec.shape}"
                raise ValueError(f"{path.name} has {name} as {dtype} {shape}, expected {wanted}")


def load_into(
    opened: Opened,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    averages: Averages | None = None,
) -> Any:
    """Fill the sharded model, the optimizer and the averages; return this rank's extra. Collective.

    Raises:
        ValueError: on every rank, naming everything that does not fit. Then nothing has been loaded.
        RuntimeError: on every rank, if a file became unreadable; the model is then partly loaded.
    """
    engine = engine_of(model)
    all_ranks = engine.channel.all_ranks
    shards = local_shards(engine)
    buffers = persistent_buffers(model)
    extra = None
    reader = _Reader(opened, all_ranks)
    saved = opened.manifest
    ours = {shard.name: Spec(shard.param.dtype, shard.part.shape) for shard in shards}
    problems = differences(ours, saved.specs("parameters"))
    problems += differences({name: Spec.of(buffer) for name, buffer in buffers}, saved.specs("averaged"))
    if optimizer is not None and not problems:
        problems = _compare_optimizer(saved, shards, optimizer)
    if averages is not None:
        problems += misfits(shards, averages)
        if not saved.specs("ema"):
            problems.append("it was saved without moving averages of the parameters")
    try:
        extra = reader.extra()
    except (KeyError, TypeError, ValueError, RecursionError, SafetensorError, OSError) as error:
        problems.append(f"{reader.own_file} has no readable extra: {type(error).__name__} {error}")
    texts = comm.gather_texts("; ".join(problems), all_ranks)
    if differing := [text for text in dict.fromkeys(texts) if text]:
        raise ValueError(f"{opened.path} does not fit, nothing was loaded: {'; '.join(differing)}")
    problem = ""
    try:
        for shard in shards:
            shard.param.data.copy_(reader.read(f"parameters/{shard.name}", shard.part, shard.param))
        if optimizer is not None:
            _fill_optimizer(reader, shards, optimizer)
        for name, buffer in buffers:
            buffer.copy_(reader.buffer(name, buffer))
        if averages is not None:
            for shard in shards:
                averages[shard.param].copy_(reader.read(f"ema/{shard.name}", shard.part, shard.param))
    except (OSError, SafetensorError) as error:
        problem = str(error)
    partly_loaded = f"{opened.path} became unreadable; the model is partly loaded, and must not be used"
    exchange(lambda problems: RuntimeError(f"{partly_loaded}: {problems}"), all_ranks, problem)
    return extra


def _compare_optimizer(
    manifest: Manifest, shards: Sequence[LocalShard], optimizer: torch.optim.Optimizer
) -> list[str]:
    saved = manifest.optimizer
    kind = type(optimizer).__name__
    if saved is None:
        return [f"it was saved without an optimizer, but {kind} is to be loaded"]
    if saved["type"] != kind:
        return [f"its optimizer is {saved['type']}, expected {kind}"]
    if len(saved["groups"]) != len(optimizer.param_groups):
        return [f"its optimizer has {len(saved['groups'])} groups, expected {len(optimizer.param_groups)}"]
    names = {shard.param: shard.name for shard in shards}
    problems = []
    for index, (group, theirs) in enumerate(zip(optimizer.param_groups, saved["groups"], strict=True)):
        ours = [names.get(param, "a parameter that is not the module's") for param in group["params"]]
        odd = sorted(set(ours) ^ set(theirs["names"]))
        if odd:
            where = "is missing from" if odd[0] in ours else "is unexpected in"
            problems.append(f"{odd[0]} {where} its optimizer's group {index}")
        for key in sorted(theirs["options"].keys() & group.keys()):
            option = theirs["options"][key]
            if group[key] is not None and _kind(option) != _kind(group[key]):
                found = f"{key}={str(option)[:80]!r} in its optimizer's group {index}"
                problems.append(f"{found}, expected the kind of {group[key]}")
    return problems


def _kind(option: Any) -> Any:
    """Return a name of an option's kind. JSON has lists for tuples and numbers for tensors."""
    if isinstance(option, bool | None):  # many a flag may be unset
        return "flag"
    if isinstance(option, int | float | torch.Tensor):
        return "number"
    if isinstance(option, list | tuple):
        return [*map(_kind, option)]
    return type(option).__name__


def _fill_optimizer(reader: _Reader, shards: Sequence[LocalShard], optimizer: torch.optim.Optimizer) -> None:
    """Fill the optimizer by its own `load_state_dict`, which knows the device of its step counts."""
    assert reader.manifest.optimizer is not None, "compared"
    by_param = {shard.param: shard for shard in shards}
    state: dict[int, dict[str, Any]] = {}
    own = optimizer.state_dict()  # with numbers for parameters
    saved = reader.manifest.optimizer["groups"]
    for ours, group, theirs in zip(optimizer.param_groups, own["param_groups"], saved, strict=True):
        group |= _options(theirs, group)
        for number, param in zip(group["params"], ours["params"], strict=True):
            if values := dict(reader.state(by_param[param])):
                state[number] = values
    optimizer.load_state_dict({**own, "state": state})


def _options(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved group's options, with tuples and 0-dim tensors (JSON has none) where ours has them."""
    options = dict(saved["options"])
    for key in options.keys() & ours.keys():
        if isinstance(ours[key], torch.Tensor):
            options[key] = torch.full_like(ours[key], options[key])
        elif isinstance(ours[key], tuple):
            options[key] = tuple(options[key])
    return options


class _Reader:
    """A verified checkpoint, read on one rank of ``all_ranks``. Files are mapped when first needed."""

    def __init__(self, opened: Opened, all_ranks: Ranks) -> None:
        self.path, self.manifest = opened
        self._same_ranks = self.manifest.world_size == all_ranks.world
        self.own_file = file_name(all_ranks.rank if self._same_ranks else 0)
        self._handles: dict[str, Any] = {}
        self._state_keys: dict[str, list[str]] = {}  # of each parameter: what of its state is cut like it
        for name in self.manifest.specs("optimizer"):
            key, _, param = name.partition("/")
            self._state_keys.setdefault(param, []).append(key)

    def state(self, shard: LocalShard) -> Iterator[tuple[str, Any]]:
        for key in self._state_keys.get(shard.name, []):
            yield key, self.read(f"optimizer/{key}/{shard.name}", shard.part, shard.param)
        assert self.manifest.optimizer is not None, "compared"
        for key, node in self.manifest.optimizer["values"].get(shard.name, {}).items():
            if "dtype" in node:
                yield key, torch.tensor(node["value"], dtype=DTYPE_NAMED[node["dtype"]])
            else:
                yield key, node["value"]

    def buffer(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Read a buffer: this rank's own, or the mean if another number of ranks saved."""
        if self._same_ranks:
            tensor: torch.Tensor = self._handle(self.own_file).get_tensor(f"buffers/{name}")
            return tensor
        return self.read(f"averaged/{name}", whole_part(name, like), like)

    def extra(self) -> Any:
        """Read this rank's extra, or rank 0's if another number of ranks saved."""
        file = self._handle(self.own_file)
        tensors = {key: file.get_tensor(key) for key in file.keys() if key.startswith("extra/")}  # noqa: SIM118
        return decode_extra(file.metadata()["extra"], tensors)

    def _handle(self, file: str) -> Any:
        if file not in self._handles:
            self._handles[file] = safe_open(self.path / file, framework="pt", device="cpu")
        return self._handles[file]

    def read(self, name: str, part: Part, like: torch.Tensor) -> torch.Tensor:
        """Read this rank's ``part`` of a tensor, in the shape of ``like``."""
        spec, stride, slices = self.manifest.tensors[name]
        is_alike = stride == part.stride
        start = part.start if is_alike else 0
        stop = part.stop if is_alike else math.prod(spec.shape)
        elements = torch.empty(stop - start, dtype=spec.dtype)
        for each in slices:
            low = max(start, each.start)
            high = min(stop, each.stop)
            if low < high:
                source = self._handle(each.file).get_tensor(name).reshape(-1)  # mapped, not copied
                elements[low - start : high - start] = source[low - each.start : high - each.start]
        if not is_alike:
            # A copy, since a view would keep the whole alive.
            elements = part.of(elements.as_strided(spec.shape, stride)).clone()
        return part.at_rest(elements).reshape(like.shape)  # a 0-dim tensor has one dimension at rest

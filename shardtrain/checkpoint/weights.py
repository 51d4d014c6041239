"""Read whole weights from files into shards: each rank reads the bytes that it owns, straight into place.

A parameter in another order of memory than the file's (channels_last) is read whole, one at a time.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shardtrain import comm
from shardtrain.checkpoint.files import DTYPES
from shardtrain.engine.hooks import Engine, engine_of
from shardtrain.engine.state_dict import Spec, differences, uncut

_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class _Entry(NamedTuple):
    """Say where a tensor lies: its first byte ``at`` in the file ``path``."""

    path: Path
    at: int
    spec: Spec


def load_weights(module: nn.Module, file: str | os.PathLike[str], *, strict: bool = True) -> None:
    """Load whole parameters and buffers from ``.safetensors`` into a sharded ``module``. Collective.

    Beside its shards a rank holds nothing of them: it reads the bytes that it owns. So a model on the meta
    device needs no more memory than its shards: `shard`, ``to_empty``, and this.

    Args:
        module: what `shard` returned.
        file: one file, or Hugging Face's index of several (``model.safetensors.index.json``), that all ranks
            see. Of parameters that are tied one name suffices.
        strict: False leaves what the file lacks as it is, and ignores what the model lacks.

    Raises ValueError on every rank, naming the file that cannot be read, or each key that is missing,
    unexpected, or of another shape or dtype. Unless a disk fails meanwhile, nothing has been loaded then.
    """
    engine = engine_of(module)
    engine.require_rest("load_weights() cannot be called")
    entries: dict[str, _Entry] = {}
    problems: list[str] = []
    try:
        entries = dict(_entries(Path(file)))
    except (OSError, ValueError, LookupError, SafetensorError) as error:
        problems = [f"{file} cannot be read as .safetensors: {error}"]
    else:
        problems = _fit(engine, entries, strict)
    _agree(engine, problems, "nothing was loaded")
    try:
        for unit in engine.units:
            unit.release()
            for segment in unit.segments:
                for member in segment.members:
                    if (entry := entries.get(member.name)) is not None:
                        part, piece = member.part, member.piece_of(segment.local)
                        if part.stride == torch.empty(part.shape, device="meta").stride():
                            piece.copy_(_read(entry, part.start, part.stop, piece))
                        else:
                            piece.copy_(part.of(_whole(entry)))
        for name, tensor in uncut(engine):
            if name in entries:
                tensor.copy_(_whole(entries[name]))
    except (OSError, ValueError) as error:
        problems = [f"{file}: {error}"]
    _agree(engine, problems, "weights were loaded in part")


def _entries(file: Path) -> Iterator[tuple[str, _Entry]]:
    """Yield the tensors of ``file``, or of the files that it lists, by name."""
    listed = json.loads(file.read_text())["weight_map"].values() if file.suffix == ".json" else [file.name]
    for path in sorted({file.parent / name for name in listed}):
        with safe_open(path, framework="pt"):  # raises unless each tensor lies inside
            pass
        with path.open("rb") as raw:
            (size,) = struct.unpack("<Q", raw.read(8))
            head = json.loads(raw.read(size))
        for name in head.keys() - {"__metadata__"}:
            dtype, shape = _DTYPES[head[name]["dtype"]], tuple(head[name]["shape"])
            yield name, _Entry(path, 8 + size + head[name]["data_offsets"][0], Spec(dtype, shape))


def _fit(engine: Engine, entries: dict[str, _Entry], strict: bool) -> list[str]:
    """Return what is wrong with ``entries``, and give them the names of the engine's parameters."""
    first = {member.param: member.name for member in engine.members}
    for key, value in engine.module.state_dict(keep_vars=True).items():
        if key in entries and key != (name := first.get(value, key)):
            entries.setdefault(name, entries.pop(key))
    expected = {member.name: Spec(member.local_view.dtype, member.part.shape) for member in engine.members}
    expected |= {name: Spec.of(tensor) for name, tensor in uncut(engine)}
    return differences(expected, {name: entry.spec for name, entry in entries.items()}, strict)


def _agree(engine: Engine, problems: list[str], outcome: str) -> None:
    """Raise ValueError on every rank with the ``problems`` of the first rank that has some."""
    told = comm.gather_texts("; ".join(problems), engine.transport.all_ranks)
    if first := next((text for text in told if text), None):
        raise ValueError(f"{outcome}: {first}")


def _whole(entry: _Entry) -> Tensor:
    whole = torch.empty(entry.spec.shape, dtype=entry.spec.dtype, device="cpu")
    return _read(entry, 0, whole.numel(), whole.view(-1)).view(whole.shape)


def _read(entry: _Entry, start: int, stop: int, into: Tensor) -> Tensor:
    """Read elements ``start:stop``, into ``into`` (1-D) if that is in host memory; return them."""
    if into.device.type != "cpu":
        into = torch.empty(stop - start, dtype=entry.spec.dtype, device="cpu")
    data: Any = into.view(torch.uint8).numpy()
    rest = memoryview(data)
    with open(entry.path, "rb", buffering=0) as raw:
        raw.seek(entry.at + start * into.itemsize)
        while rest:
            count = raw.readinto(rest)
            if not count:
                raise ValueError(f"{entry.path} became shorter while it was read")
            rest = rest[count:]
    return into

"""``manifest.json``, which lists what a checkpoint holds. Its content is not trusted.

    {"format": "shardtrain checkpoint", "version": 2, "world_size": 2,
     "files": {"rank-00000.safetensors": {"bytes": 4240, "sha256": "9f…"}, …},
     "tensors": {"parameters/fc.weight": {"dtype": "float32", "shape": [5, 7], "stride": [7, 1],
                                          "slices": [["rank-00000.safetensors", 0, 24],
                                                     ["rank-00001.safetensors", 24, 35]]}, …},
     "optimizer": {"type": "AdamW", "groups": [{"names": […], "options": {"lr": 0.001, …}}],
                   "values": {"fc.weight": {"step": {"dtype": "float32", "value": 3.0}}, …}},
     "facts": {…}, "versions": {…}}

A slice says which file holds which elements of the tensor's memory, counted in the order of its strides.
``manifest.sha256`` beside it holds the manifest's own digest, in the format of ``sha256sum -c``.

Nothing in a manifest names a path: there is a ``rank-NNNNN.safetensors`` of each rank.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardtrain.checkpoint.files import DTYPES, Record, read_text, write_text
from shardtrain.errors import Damaged
from shardtrain.pieces.part import dense_stride
from shardtrain.whole.state_dict import Spec

FORMAT = "shardtrain checkpoint"
VERSION = 2
NAME = "manifest.json"
DIGEST_NAME = "manifest.sha256"
MOST_BYTES = 256 << 20  # the largest manifest that is read: a million slices take about 50 MiB

DTYPE_NAMED = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


class Slice(NamedTuple):
    """The elements ``start:stop`` of a tensor's memory, which are in ``file``."""

    file: str
    start: int
    stop: int


class Entry(NamedTuple):
    """A tensor that all ranks hold together."""

    spec: Spec
    stride: tuple[int, ...]
    slices: tuple[Slice, ...]


class Manifest(NamedTuple):
    world_size: int
    files: dict[str, Record]
    tensors: dict[str, Entry]
    optimizer: dict[str, Any] | None  # as in the JSON above
    facts: dict[str, Any]  # the caller's JSON: step, configuration

    def specs(self, kind: str) -> dict[str, Spec]:
        """Return the specs of all tensors of a ``kind`` such as ``parameters``, by their names in it."""
        start = f"{kind}/"
        return {name[len(start) :]: e.spec for name, e in self.tensors.items() if name.startswith(start)}


def file_name(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


def digest_line(text: str) -> str:
    """Return the content of ``manifest.sha256`` for the manifest ``text``."""
    return f"{hashlib.sha256(text.encode()).hexdigest()}  {NAME}\n"


def dump(manifest: Manifest) -> str:
    node = {"format": FORMAT, "version": VERSION, **manifest._asdict()}
    node["files"] = {name: record._asdict() for name, record in manifest.files.items()}
    tensors = {}
    for name, (spec, stride, slices) in manifest.tensors.items():
        dtype = dtype_name(spec.dtype)
        tensors[name] = {"dtype": dtype, "shape": spec.shape, "stride": stride, "slices": slices}
    node["tensors"] = tensors
    packages = {name: version(name) for name in ("torch", "numpy", "safetensors")}
    node["versions"] = {"python": platform.python_version(), **packages}
    return json.dumps(node, separators=(",", ":")) + "\n"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write_manifest(directory: Path, text: str) -> None:
    """Write the manifest's text and its digest, and wait until both are on disk."""
    write_text(directory / NAME, text)
    write_text(directory / DIGEST_NAME, digest_line(text))


def read_manifest(directory: Path) -> str:
    """Read the manifest's text, and check it against its digest. Raises ValueError, naming the file."""
    text = read_text(directory / NAME, MOST_BYTES)
    if read_text(directory / DIGEST_NAME, 1000) != digest_line(text):
        raise Damaged(f"{NAME} does not match {DIGEST_NAME}")
    return text


def parse(text: str) -> Manifest:
    """Parse the text of a manifest. Raises Damaged for another version, or for impossible values."""
    try:
        return _manifest(json.loads(text))
    except Damaged:
        raise
    except (json.JSONDecodeError, RecursionError):
        raise Damaged(f"{NAME} is not valid JSON") from None
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise Damaged(f"{NAME} is invalid: {type(error).__name__} {error}") from None


def _manifest(node: Mapping[str, Any]) -> Manifest:
    if node["format"] != FORMAT or node["version"] != VERSION:
        raise Damaged(
            f"{NAME} is of format {str(node['format'])[:40]!r} version {str(node['version'])[:40]}, "
            f"expected {FORMAT!r} version {VERSION}; load it with the release that wrote it"
        )
    files = {}
    for name, record in node["files"].items():
        files[name] = Record(int(record["bytes"]), str(record["sha256"]))
    world = int(node["world_size"])
    if world != len(files) or not files:
        raise Damaged(f"{NAME} has {len(files)} files of {world} ranks, expected one per rank")
    if odd := files.keys() - {file_name(rank) for rank in range(world)}:
        raise Damaged(f"{NAME} names the file {min(odd)[:80]!r}, expected only {file_name(0)} and on")
    tensors = {name: parse_entry(entry, name) for name, entry in node["tensors"].items()}
    for name, entry in tensors.items():
        if unknown := {part.file for part in entry.slices} - files.keys():
            raise Damaged(f"{NAME} has a slice of {name} in {min(unknown)[:80]!r}, which is no file of it")
    optimizer = node["optimizer"]
    if optimizer is not None:
        optimizer = _optimizer(optimizer)
    return Manifest(world, files, tensors, optimizer, dict(node["facts"]))


def parse_entry(node: Mapping[str, Any], name: str) -> Entry:
    """Return the entry of tensor ``name``. Raises Damaged unless its slices are all of it, in order."""
    shape = tuple(map(int, node["shape"]))
    stride = tuple(map(int, node["stride"]))
    slices = tuple(Slice(str(file), int(start), int(stop)) for file, start, stop in node["slices"])
    laid_out = torch.empty_strided(shape, stride, device="meta").squeeze()
    if laid_out.stride() != dense_stride(laid_out):
        raise Damaged(f"{NAME} gives {name} the stride {stride}, which does not fill the shape {shape}")
    reached = 0
    for part in slices:
        if part.start != reached or part.stop <= part.start:
            raise Damaged(f"{NAME} has the slice {tuple(part)} of {name}, expected one from {reached} on")
        reached = part.stop
    numel = math.prod(shape)
    if reached != numel:
        raise Damaged(f"{NAME} has slices of {name} up to {reached}, expected up to {numel}")
    return Entry(Spec(DTYPE_NAMED[node["dtype"]], shape), stride, slices)


def _optimizer(node: Mapping[str, Any]) -> dict[str, Any]:
    groups = [
        {"names": [*map(str, group["names"])], "options": dict(group["options"])} for group in node["groups"]
    ]
    for values in node["values"].values():
        for each in values.values():
            is_plain = each.keys() == {"value"}
            is_tensor = each.get("dtype") in DTYPE_NAMED and isinstance(each.get("value"), int | float)
            if not (is_plain or is_tensor):
                raise Damaged(f"{NAME} has an unknown kind of optimizer state: {str(each)[:80]}")
    return {"type": str(node["type"]), "groups": groups, "values": dict(node["values"])}

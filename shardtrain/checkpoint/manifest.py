"""Write and read ``manifest.json``, which lists what a checkpoint holds. Its content is not trusted.

    {"format": "shardtrain checkpoint", "version": 1, "world_size": 2,
     "files": {"rank-00000.safetensors": {"bytes": 4240, "sha256": "9f…"}, …},
     "parameters": {"fc.weight": {"dtype": "float32", "shape": [5, 7], "stride": [7, 1], "unit": "",
                                  "slices": [["rank-00000.safetensors", 0, 24],
                                             ["rank-00001.safetensors", 24, 35]]}, …},
     "buffers": {"norm.running_mean": {"dtype": "float32", "shape": [7]}, …},
     "optimizer": {"type": "AdamW", "groups": [{"names": […], "options": {"lr": 0.001, …}}],
                   "state": {"fc.weight": {"exp_avg": {"dtype": "float32"}, "step": {"whole": "float32"}}}},
     "facts": {…}, "ema": false, "versions": {…}}

A slice says which file holds which elements of the parameter's memory, counted in the order of its
strides. State like ``exp_avg`` is cut at the same elements. ``manifest.sha256`` beside it holds the
manifest's own digest, in the format of ``sha256sum -c``.

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
from shardtrain.engine.part import dense_stride
from shardtrain.engine.state_dict import Spec
from shardtrain.errors import Damaged as Damaged

FORMAT = "shardtrain checkpoint"
VERSION = 1
NAME = "manifest.json"
DIGEST_NAME = "manifest.sha256"
MOST_BYTES = 256 << 20  # the largest manifest that is read: a million slices take about 50 MiB

DTYPE_NAMED = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


class Slice(NamedTuple):
    """Locate elements ``start:stop`` of a parameter's memory: they are in ``file``."""

    file: str
    start: int
    stop: int


class ParameterEntry(NamedTuple):
    spec: Spec
    stride: tuple[int, ...]
    unit: str
    slices: tuple[Slice, ...]

    @property
    def first_file(self) -> str:
        """The file that holds what is stored once per parameter."""
        return self.slices[0].file if self.slices else file_name(0)


class Manifest(NamedTuple):
    world_size: int
    files: dict[str, Record]
    parameters: dict[str, ParameterEntry]
    buffers: dict[str, Spec]
    optimizer: dict[str, Any] | None  # as in the JSON above
    facts: dict[str, Any]  # the caller's JSON: step, configuration
    ema: bool = False  # whether there is a moving average of each parameter, sharded like it

    def state_of(self, name: str) -> dict[str, dict[str, Any]]:
        """Return the optimizer state of parameter ``name``, as in the JSON above: cut like it, a ``whole``
        0-dim tensor, or a plain ``value``."""
        return self.optimizer["state"].get(name, {}) if self.optimizer is not None else {}


def file_name(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


def digest_line(text: str) -> str:
    """Return the content of ``manifest.sha256`` for the manifest ``text``."""
    return f"{hashlib.sha256(text.encode()).hexdigest()}  {NAME}\n"


def dump(manifest: Manifest) -> str:
    """Return the manifest as the text of its file."""
    node = {"format": FORMAT, "version": VERSION, **manifest._asdict()}
    node["files"] = {name: record._asdict() for name, record in manifest.files.items()}
    node["parameters"] = {
        name: {**_dump_spec(entry.spec), "stride": entry.stride, "unit": entry.unit, "slices": entry.slices}
        for name, entry in manifest.parameters.items()
    }
    node["buffers"] = {name: _dump_spec(spec) for name, spec in manifest.buffers.items()}
    packages = {name: version(name) for name in ("torch", "numpy", "safetensors")}
    node["versions"] = {"python": platform.python_version(), **packages}
    return json.dumps(node, separators=(",", ":")) + "\n"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dump_spec(spec: Spec) -> dict[str, Any]:
    return {"dtype": dtype_name(spec.dtype), "shape": spec.shape}


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
    files = {
        name: Record(_count(entry["bytes"], f"size of {name}"), str(entry["sha256"]))
        for name, entry in node["files"].items()
    }
    world = _count(node["world_size"], "world_size")
    if world != len(files) or not files:
        raise Damaged(f"{NAME} has {len(files)} files of {world} ranks, expected one per rank")
    if odd := files.keys() - {file_name(rank) for rank in range(world)}:
        raise Damaged(f"{NAME} names the file {min(odd)[:80]!r}, expected only {file_name(0)} and on")
    parameters = {name: _parameter(entry, name, files) for name, entry in node["parameters"].items()}
    return Manifest(
        world_size=world,
        files=files,
        parameters=parameters,
        buffers={name: _spec(entry, name) for name, entry in node["buffers"].items()},
        optimizer=None if node["optimizer"] is None else _optimizer(node["optimizer"], parameters),
        facts=dict(node["facts"]),
        ema=bool(node.get("ema", False)),
    )


def _spec(node: Mapping[str, Any], name: str) -> Spec:
    return Spec(DTYPE_NAMED[node["dtype"]], tuple(_count(size, f"shape of {name}") for size in node["shape"]))


def _parameter(node: Mapping[str, Any], name: str, files: Mapping[str, Record]) -> ParameterEntry:
    spec = _spec(node, name)
    stride = tuple(_count(step, f"stride of {name}") for step in node["stride"])
    slices = tuple(Slice(str(file), int(start), int(stop)) for file, start, stop in node["slices"])
    laid_out = torch.empty_strided(spec.shape, stride, device="meta").squeeze()
    if laid_out.stride() != dense_stride(laid_out):
        raise Damaged(f"{NAME} gives {name} the stride {stride}, which does not fill the shape {spec.shape}")
    reached = 0
    for part in slices:
        if part.file not in files or part.start != reached or part.stop <= part.start:
            raise Damaged(f"{NAME} has the slice {tuple(part)} of {name}, expected one from {reached} on")
        reached = part.stop
    numel = math.prod(spec.shape)
    if reached != numel:
        raise Damaged(f"{NAME} has slices of {name} up to {reached}, expected up to {numel}")
    return ParameterEntry(spec, stride, str(node["unit"]), slices)


def _optimizer(node: Mapping[str, Any], parameters: Mapping[str, ParameterEntry]) -> dict[str, Any]:
    groups = [{"names": list(g["names"]), "options": dict(g["options"])} for g in node["groups"]]
    for name in [*node["state"], *(name for group in groups for name in group["names"])]:
        if name not in parameters:
            raise Damaged(f"{NAME} has optimizer state of {name}, which is no parameter")
    for entries in node["state"].values():
        for entry in entries.values():
            if "value" not in entry and entry.get("whole", entry.get("dtype")) not in DTYPE_NAMED:
                raise Damaged(f"{NAME} has optimizer state of an unknown dtype: {str(entry)[:80]}")
    return {"type": str(node["type"]), "groups": groups, "state": node["state"]}


def _count(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise Damaged(f"{NAME} has {str(value)[:40]} for the {what}, expected a number of at least 0")
    return value

"""What the files of a checkpoint hold for one rank, whoever wrote them.

A parameter's elements are intervals of its memory, so other world sizes and other units need no more than
intersecting intervals. A parameter of 10 elements saved by two ranks as 0:8 and 8:10, loaded by three as
0:4, 4:8 and 8:10: ranks 0 and 1 read halves of the first file, rank 2 the second.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shardtrain.checkpoint.content import Held, decode_extra
from shardtrain.checkpoint.files import DTYPES
from shardtrain.checkpoint.manifest import Manifest, Optimizer, Parameter, Slice, file_name
from shardtrain.comm.transport import Ranks
from shardtrain.state import Spec
from shardtrain.strides import in_memory_order


class Source:
    """A checkpoint as one rank of ``everyone`` reads it. Files are mapped when first needed.

    With as many ranks as saved, each gets its own buffers and extra again; else the buffers are the mean
    over the ranks that saved, and the extra is rank 0's.
    """

    def __init__(self, path: Path, manifest: Manifest, everyone: Ranks) -> None:
        self.manifest = manifest
        self._path = path
        self._handles: dict[str, Any] = {}
        same = manifest.world_size == everyone.world
        self._own_file = file_name(everyone.rank if same else 0)
        self._buffers = "buffers" if same else "averaged"

    # looking

    def problems(self, entries: Sequence[Held], kinds: Sequence[str]) -> list[str]:
        """Everything that this rank needs and that the files do not hold as the manifest says.

        ``kinds``: what there is of each parameter, beside the optimizer's state.
        """
        needs = [need for entry in entries for need in self._needs(entry, kinds)]
        needs += [(self._own_file, f"{self._buffers}/{n}", spec) for n, spec in self.manifest.buffers.items()]
        return [problem for need in needs if (problem := self._problem(*need))]

    def _needs(self, entry: Held, kinds: Sequence[str]) -> Iterator[tuple[str, str, Spec]]:
        """What belongs to one parameter: files, keys, and how they must be."""
        saved = self.manifest.parameters[entry.name]
        states = self._optimizer.state.get(entry.name, {}) if self.manifest.optimizer else {}
        cut = {f"{kind}/{entry.name}": saved.spec.dtype for kind in kinds}
        cut |= {f"optimizer/{k}/{entry.name}": s.dtype for k, s in states.items() if s.dtype and not s.whole}
        whole = saved.stride != entry.stride
        parts = saved.slices if whole else _needed(saved.slices, entry.start, entry.stop)
        for key, dtype in cut.items():
            yield from ((part.file, key, Spec(dtype, (part.stop - part.start,))) for part in parts)
        for key, state in states.items():
            if state.whole and state.dtype:
                yield _first_file(saved), f"optimizer/{key}/{entry.name}", Spec(state.dtype, ())

    def _problem(self, file: str, key: str, spec: Spec) -> str:
        """Whether ``file`` holds ``key`` as ``spec`` says."""
        try:
            found = self._handle(file).get_slice(key)
        except (SafetensorError, OSError) as error:
            return f"{file}: {error}"
        dtype, shape = found.get_dtype(), tuple(found.get_shape())
        expected = DTYPES[spec.dtype], spec.shape
        if (dtype, shape) != expected:
            return f"{file} has {key} as {dtype} {shape}, expected {expected[0]} {expected[1]}"
        return ""

    # reading

    def piece(self, kind: str, entry: Held) -> torch.Tensor:
        """What this rank holds of a parameter, or of its moving average, as shown at rest."""
        dtype = self.manifest.parameters[entry.name].spec.dtype
        return self._piece(f"{kind}/{entry.name}", dtype, entry)

    def state(self, key: str, entry: Held) -> Any:
        """The optimizer's ``key`` of a parameter."""
        state, name = self._optimizer.state[entry.name][key], f"optimizer/{key}/{entry.name}"
        if state.dtype is None:
            return state.value
        if state.whole:
            return self._tensor(_first_file(self.manifest.parameters[entry.name]), name).clone()
        return self._piece(name, state.dtype, entry)

    def buffer(self, name: str) -> torch.Tensor:
        return self._tensor(self._own_file, f"{self._buffers}/{name}")

    def extra(self) -> tuple[Any, str]:
        """The rank's extra, and what is wrong with it."""
        try:
            file = self._handle(self._own_file)
            tensors = {key: file.get_tensor(key) for key in file.keys() if key.startswith("extra/")}  # noqa: SIM118
            return decode_extra(json.loads(file.metadata()["extra"]), tensors), ""
        except (KeyError, TypeError, ValueError, RecursionError, SafetensorError) as error:
            return None, f"{self._own_file} has no readable extra: {type(error).__name__} {error}"

    @property
    def _optimizer(self) -> Optimizer:
        assert self.manifest.optimizer is not None, "compared"
        return self.manifest.optimizer

    def _handle(self, file: str) -> Any:
        if file not in self._handles:
            self._handles[file] = safe_open(self._path / file, framework="pt", device="cpu")
        return self._handles[file]

    def _tensor(self, file: str, key: str) -> torch.Tensor:
        tensor: torch.Tensor = self._handle(file).get_tensor(key)
        return tensor

    def _piece(self, key: str, dtype: torch.dtype, entry: Held) -> torch.Tensor:
        saved = self.manifest.parameters[entry.name]
        if saved.stride == entry.stride:
            return entry.shown(self._span(key, saved.slices, dtype, entry.start, entry.stop))
        whole = self._span(key, saved.slices, dtype, 0, saved.slices[-1].stop if saved.slices else 0)
        ordered = in_memory_order(whole.as_strided(entry.shape, saved.stride), entry.stride)
        return entry.shown(ordered[entry.start : entry.stop].clone())  # a view would keep the whole alive

    def _span(
        self, key: str, slices: Sequence[Slice], dtype: torch.dtype, start: int, stop: int
    ) -> torch.Tensor:
        """Elements ``start:stop`` of what is cut into ``slices``, from whichever files hold them; 1-D."""
        span = torch.empty(stop - start, dtype=dtype)
        for part in _needed(slices, start, stop):
            low, high = max(start, part.start), min(stop, part.stop)
            source = self._handle(part.file).get_slice(key)
            span[low - start : high - start] = source[low - part.start : high - part.start]
        return span


def _needed(slices: Sequence[Slice], start: int, stop: int) -> list[Slice]:
    """The slices that have elements of ``start:stop``."""
    return [part for part in slices if max(start, part.start) < min(stop, part.stop)]


def _first_file(saved: Parameter) -> str:
    """Where what belongs to all of a parameter is."""
    return saved.slices[0].file if saved.slices else file_name(0)

"""A load: verify everything, compare everything, then fill the shards.

    open      each file is read once, by one rank, and compared with its size and digest
    compare   every rank: names, shapes, dtypes, groups, and that the files hold what the manifest says
    fill      every rank maps the files and copies the elements that it owns, whoever wrote them

The ranks agree after each phase, so all go on or all raise, and until the last nothing has been touched.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from shardtrain import comm
from shardtrain.checkpoint.content import Averages, Held, decode_extra, held
from shardtrain.checkpoint.files import DTYPES, problem_with
from shardtrain.checkpoint.manifest import (
    Damaged,
    Manifest,
    Optimizer,
    Parameter,
    Slice,
    file_name,
    parse,
    read,
)
from shardtrain.comm.transport import Ranks
from shardtrain.engine.hooks import Engine
from shardtrain.engine.shard import in_memory_order
from shardtrain.engine.state_dict import Spec as Spec
from shardtrain.engine.state_dict import differences as differences
from shardtrain.engine.state_dict import persistent_buffers


class Opened(NamedTuple):
    """A checkpoint whose files have been verified."""

    path: Path
    manifest: Manifest


def open_checkpoint(path: Path, all_ranks: Ranks, device: torch.device) -> Opened:
    """Verify every file of the checkpoint ``path``, each on one rank. Collective.

    Raises:
        Damaged: on every rank, naming ranks and files.
    """
    text, problem = "", ""
    if all_ranks.rank == 0:
        try:
            text = read(path)
            parse(text)
        except Damaged as error:
            problem = str(error)
    _agree_whole(path, problem, all_ranks, device)
    manifest = parse(comm.broadcast_text(text, all_ranks, device))
    mine = range(all_ranks.rank, manifest.world_size, all_ranks.world)
    names = [file_name(index) for index in mine]
    found = [problem_with(path / name, manifest.files[name]) for name in names]
    _agree_whole(path, "; ".join(filter(None, found)), all_ranks, device)
    return Opened(path, manifest)


def _agree_whole(path: Path, problem: str, all_ranks: Ranks, device: torch.device) -> None:
    problems = _gathered(problem, all_ranks, device)
    if problems:
        raise Damaged(f"{path} is damaged: {'; '.join(problems)}")


def _gathered(problem: str, all_ranks: Ranks, device: torch.device) -> list[str]:
    """Every rank's problem after its rank's number, the same list on all."""
    heard = comm.gather_texts(problem, all_ranks, device)
    return [f"rank {rank}: {text}" for rank, text in enumerate(heard) if text]


def load_into(
    opened: Opened,
    engine: Engine,
    optimizer: torch.optim.Optimizer | None,
    averages: Averages | None = None,
) -> Any:
    """Fill the module, the optimizer and the averages, and return this rank's extra. Collective.

    Raises:
        ValueError: on every rank, naming everything that does not fit; nothing has been loaded then.
    """
    all_ranks, device = engine.transport.all_ranks, engine.device
    entries = held(engine)
    source = Source(opened.path, opened.manifest, all_ranks)
    problems = _compare(opened.manifest, engine, entries, optimizer)
    if averages is not None and not opened.manifest.ema:
        problems.append("it was saved without moving averages of the parameters")
    kinds = ["parameters", *(["ema"] if averages is not None else [])]
    problems = problems or source.problems(entries, kinds)
    extra, more = ([], "") if problems else source.extra()
    found = comm.gather_texts("; ".join([*problems, more] if more else problems), all_ranks, device)
    if any(found):
        differing = "; ".join(dict.fromkeys(filter(None, found)))
        raise ValueError(f"{opened.path} does not fit, nothing was loaded: {differing}")
    problem = ""
    try:
        _fill(source, engine, entries, optimizer, averages)
    except (OSError, SafetensorError) as error:
        problem = str(error)
    problems = _gathered(problem, all_ranks, device)
    if problems:
        raise RuntimeError(
            f"{opened.path} became unreadable, the model is half loaded: {'; '.join(problems)}"
        )
    return extra


def _compare(
    manifest: Manifest, engine: Engine, entries: Sequence[Held], optimizer: torch.optim.Optimizer | None
) -> list[str]:
    """Everything about the model and the optimizer that is not as in the manifest."""
    expected = {entry.name: Spec(entry.param.dtype, entry.shape) for entry in entries}
    problems = differences(expected, {name: entry.spec for name, entry in manifest.parameters.items()})
    expected = {name: Spec.of(b) for name, b in persistent_buffers(engine.module)}
    problems += differences(expected, manifest.buffers)
    return problems or ([] if optimizer is None else _compare_optimizer(manifest, entries, optimizer))


def _compare_optimizer(
    manifest: Manifest, entries: Sequence[Held], optimizer: torch.optim.Optimizer
) -> list[str]:
    saved, kind = manifest.optimizer, type(optimizer).__name__
    if saved is None:
        return [f"it was saved without an optimizer, but {kind} is to be loaded"]
    if saved.type != kind:
        return [f"its optimizer is {saved.type}, expected {kind}"]
    if len(saved.groups) != len(optimizer.param_groups):
        return [f"its optimizer has {len(saved.groups)} groups, expected {len(optimizer.param_groups)}"]
    names = {entry.param: entry.name for entry in entries}
    problems = []
    for index, (group, theirs) in enumerate(zip(optimizer.param_groups, saved.groups, strict=True)):
        ours = [names.get(param, "a parameter that is not the module's") for param in group["params"]]
        odd = sorted(set(ours) ^ set(theirs.names))
        if odd:
            where = "is missing from" if odd[0] in ours else "is unexpected in"
            problems.append(f"{odd[0]} {where} its optimizer's group {index}")
    return problems


def _fill(
    source: Source,
    engine: Engine,
    entries: Sequence[Held],
    optimizer: torch.optim.Optimizer | None,
    averages: Averages | None,
) -> None:
    for entry in entries:
        entry.param.data.copy_(source.piece("parameters", entry))
    if optimizer is not None:
        _fill_optimizer(source, entries, optimizer)
    for name, buffer in persistent_buffers(engine.module):
        buffer.copy_(source.buffer(name))
    if averages is not None:
        for entry in entries:
            averages[entry.param].copy_(source.piece("ema", entry))


def _fill_optimizer(source: Source, entries: Sequence[Held], optimizer: torch.optim.Optimizer) -> None:
    """By the optimizer's own `load_state_dict`, which knows where its counters belong."""
    saved = source.manifest.optimizer
    assert saved is not None, "compared"
    by_param = {entry.param: entry for entry in entries}
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    first = 0
    for group, theirs in zip(optimizer.param_groups, saved.groups, strict=True):
        indices = range(first, first := first + len(group["params"]))
        groups.append({**_options(group, theirs.options), "params": list(indices)})
        for index, param in zip(indices, group["params"], strict=True):
            entry = by_param[param]
            values = saved.state.get(entry.name)
            if values is not None:
                state[index] = {key: source.state(key, entry) for key in values}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _options(group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The saved options, those that JSON has no type for as the group has them: tuples, 0-dim tensors."""
    options = {key: value for key, value in group.items() if key != "params"}
    for key, value in saved.items():
        ours = group.get(key)
        if isinstance(ours, tuple):
            value = tuple(value)
        elif isinstance(ours, torch.Tensor):
            value = torch.full_like(ours, value)
        options[key] = value
    return options


# What the files of a checkpoint hold for one rank, whoever wrote them.
#
# A parameter's elements are intervals of its memory, so other world sizes and other units need no more than
# intersecting intervals. A parameter of 10 elements saved by two ranks as 0:8 and 8:10, loaded by three as
# 0:4, 4:8 and 8:10: ranks 0 and 1 read halves of the first file, rank 2 the second.


class Source:
    """A checkpoint as one rank of ``all_ranks`` reads it. Files are mapped when first needed.

    With as many ranks as saved, each gets its own buffers and extra again; else the buffers are the mean
    over the ranks that saved, and the extra is rank 0's.
    """

    def __init__(self, path: Path, manifest: Manifest, all_ranks: Ranks) -> None:
        self.manifest = manifest
        self._path = path
        self._handles: dict[str, Any] = {}
        same = manifest.world_size == all_ranks.world
        self._own_file = file_name(all_ranks.rank if same else 0)
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

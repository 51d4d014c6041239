"""A load: verify everything, compare everything, then fill the shards.

    open      each file is read once, by one rank, and compared with its size and digest
    compare   every rank: names, shapes, dtypes, groups, and that the files hold what the manifest says
    fill      every rank maps the files and copies the elements that it owns, whoever wrote them

The ranks agree after each phase, so all go on or all raise, and until the last nothing has been touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError

from shardtrain import comm
from shardtrain.checkpoint.content import Averages, Held, held
from shardtrain.checkpoint.files import problem_with
from shardtrain.checkpoint.manifest import (
    Damaged,
    Manifest,
    file_name,
    parse,
    read,
)
from shardtrain.checkpoint.reading import Source
from shardtrain.comm.transport import Ranks
from shardtrain.engine import Engine
from shardtrain.state import Spec, differences, persistent_buffers


class Opened(NamedTuple):
    """A checkpoint whose files have been verified."""

    path: Path
    manifest: Manifest


def open_checkpoint(path: Path, everyone: Ranks, device: torch.device) -> Opened:
    """Verify every file of the checkpoint ``path``, each on one rank. Collective.

    Raises:
        Damaged: on every rank, naming ranks and files.
    """
    text, problem = "", ""
    if everyone.rank == 0:
        try:
            text = read(path)
            parse(text)
        except Damaged as error:
            problem = str(error)
    _agree_whole(path, problem, everyone, device)
    manifest = parse(comm.broadcast_text(text, everyone, device))
    mine = range(everyone.rank, manifest.world_size, everyone.world)
    names = [file_name(index) for index in mine]
    found = [problem_with(path / name, manifest.files[name]) for name in names]
    _agree_whole(path, "; ".join(filter(None, found)), everyone, device)
    return Opened(path, manifest)


def _agree_whole(path: Path, problem: str, everyone: Ranks, device: torch.device) -> None:
    problems = _gathered(problem, everyone, device)
    if problems:
        raise Damaged(f"{path} is damaged: {'; '.join(problems)}")


def _gathered(problem: str, everyone: Ranks, device: torch.device) -> list[str]:
    """Every rank's problem after its rank's number, the same list on all."""
    heard = comm.gather_texts(problem, everyone, device)
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
    everyone, device = engine.transport.everyone, engine.device
    entries = held(engine)
    source = Source(opened.path, opened.manifest, everyone)
    problems = _compare(opened.manifest, engine, entries, optimizer)
    if averages is not None and not opened.manifest.ema:
        problems.append("it was saved without moving averages of the parameters")
    kinds = ["parameters", *(["ema"] if averages is not None else [])]
    problems = problems or source.problems(entries, kinds)
    extra, more = ([], "") if problems else source.extra()
    found = comm.gather_texts("; ".join([*problems, more] if more else problems), everyone, device)
    if any(found):
        differing = "; ".join(dict.fromkeys(filter(None, found)))
        raise ValueError(f"{opened.path} does not fit, nothing was loaded: {differing}")
    problem = ""
    try:
        _fill(source, engine, entries, optimizer, averages)
    except (OSError, SafetensorError) as error:
        problem = str(error)
    problems = _gathered(problem, everyone, device)
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

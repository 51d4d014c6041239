"""Save checkpoints atomically, and keep those of a run: a directory with one `step-NNNNNNNN` each.

In a save every rank writes its file, rank 0 the manifest, and one rename commits:

    begin    all     content is collected and compared; rank 0 makes `.tmp-step-00000120-3f2a90c1/`
    write    each    rank-NNNNN.safetensors, hashed while it is written, fsynced
    commit   rank 0  manifest.json and manifest.sha256, fsynced; the directory fsynced; renamed to
                     `step-00000120`; the directory above fsynced
    retain   rank 0  old checkpoints are deleted

Where hosts do not see one another's directories (`hosts.py`), the first rank of each does what rank 0 does
here, and files are copied between hosts before the commit. So all hosts hold the new checkpoint before one
deletes the old.

A kill at any moment leaves either the state before and a `.tmp-` directory that nobody reads, or the new
checkpoint, complete. `write` and `commit` communicate nothing, so a thread may run them while ranks train.
Between the stages ranks exchange their results. A save that fails on one rank raises the same `SaveFailed`
on all ranks, in the next call that exchanges results. Earlier checkpoints stay.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

import torch
from torch import nn

from shardtrain import comm
from shardtrain.checkpoint.content import Averages, collect, exchange
from shardtrain.checkpoint.files import Record, read_text, sync_directory, write_tensors, write_text
from shardtrain.checkpoint.hosts import Hosts
from shardtrain.checkpoint.loading import Opened, open_checkpoint
from shardtrain.checkpoint.manifest import Damaged, digest_line, dump, file_name, write_manifest
from shardtrain.comm.channel import Ranks
from shardtrain.device import current_stream, on_accelerator
from shardtrain.engine.hooks import engine_of
from shardtrain.engine.state_dict import Spec
from shardtrain.errors import SaveFailed as SaveFailed

TEMPORARY = ".tmp-"
ASIDE = "damaged-"
_STEP = re.compile(r"step-(\d{8,})")
_CUT = ("parameters/", "optimizer/", "ema/")  # tensors that only an update changes


class Snapshot:
    """Reuse host memory from save to save: copying into it takes half as long."""

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies of all ``tensors``, valid until the next call."""
        before = self._copies
        self._copies = {}
        for name, tensor in tensors.items():
            kept = before.get(name)
            if kept is None or Spec.of(kept) != Spec.of(tensor):
                kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_accelerator(tensor))
            self._copies[name] = kept.copy_(tensor.detach(), non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if on_accelerator(tensor)}:
            current_stream(device).synchronize()  # named, since the thread's current device is the first
        return self._copies


class Work(Thread):
    """Run this rank's part of one stage of a save: in its thread, or by `run` in the caller's.

    It communicates nothing and raises nothing. ``copied`` is set once live tensors are no longer needed.
    """

    def __init__(self, action: Callable[[], dict[str, Record] | None], file: str, copied: Event) -> None:
        super().__init__(name="shardtrain-save", daemon=True)
        self._action = action
        self._file = file
        self.copied = copied
        self.problem = ""
        self.records: dict[str, Record] | None = None

    def run(self) -> None:
        try:
            self.records = self._action()
        except OSError as error:
            self.problem = f"{Path(error.filename or self._file).name}: {error.strerror}"
        except Exception as error:  # stored, since in a thread nobody would notice it
            self.problem = f"{self._file}: {type(error).__name__} {error}"
        finally:
            del self._action  # which holds tensors
            self.copied.set()


def save_in_stages(
    path: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: Any,
    facts: Mapping[str, Any],
    averages: Averages | None = None,
    snapshot: Snapshot | None = None,
    retain: Callable[[], None] | None = None,
    hosts: Hosts | None = None,
) -> Iterator[Work]:
    """Begin a save, and yield this rank's work of each stage. After the last one the checkpoint is complete.

    The caller runs each `Work`, in a thread or not, before it asks for the next, which is collective. With a
    ``snapshot``, the first work begins by copying all tensors into it. Parameters and optimizer state change
    only in the next update, which must wait for `Work.copied`. Buffers, which a forward changes, are copied
    at once. ``retain`` is called after the commit, as the last work, on rank 0. ``hosts``: by default all
    ranks see ``path``.

    Raises:
        SaveFailed: on every rank, naming ranks, files and reasons: ``path`` exists, something cannot be saved
            or written, or the ranks hold different models or optimizers.
    """
    engine = engine_of(module)
    engine.require_rest("checkpoint.save() cannot be called")
    all_ranks = engine.transport.all_ranks
    rank = all_ranks.rank
    hosts = hosts or Hosts([range(all_ranks.world)], rank)
    leads = hosts.leads
    temporary = path.parent / f"{TEMPORARY}{path.name}-{secrets.token_hex(4)}"  # that of the rank that leads

    def failed(problems: str) -> SaveFailed:
        if leads:
            shutil.rmtree(temporary, ignore_errors=True)
        return SaveFailed(f"{path} was not saved: {problems}")

    agree = partial(exchange, failed, all_ranks)
    problem = ""
    mine: dict[str, Any] = {}
    try:
        content = collect(engine, optimizer, extra, facts, averages)
        mine = {"manifest": digest_line(dump(content.manifest)), "state": content.state}
        if leads:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                raise ValueError(f"{path}: exists already, and a checkpoint is never overwritten")
            temporary.mkdir()
    except (ValueError, RecursionError) as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}"
    told = agree(problem, temporary=temporary.name, **mine)
    temporary = path.parent / told[hosts.own[0]]["temporary"]
    if odd := [str(number) for number, each in enumerate(told) if each["manifest"] != told[0]["manifest"]]:
        raise failed(f"rank {', '.join(odd)} holds another model, optimizer or facts than rank 0")
    if difference := content.take_state([each["state"] for each in told]):
        raise failed(difference)
    if snapshot is not None:
        for key, tensor in content.tensors.items():
            if not key.startswith(_CUT):
                content.tensors[key] = tensor.detach().clone()
    file = file_name(rank)
    copied = Event()

    def write() -> dict[str, Record]:
        tensors: Mapping[str, torch.Tensor] = content.tensors
        if snapshot is not None:
            tensors = snapshot.copy(tensors)
            copied.set()
        return {file: write_tensors(temporary / file, tensors, {"extra": content.extra})}

    yield (writing := Work(write, file, copied))
    told = agree(writing.problem, records=writing.records)
    files = {name: Record(*record) for each in told for name, record in each["records"].items()}
    if len(hosts.ranks) > 1:
        agree(hosts.send(temporary, hosts.copies(files)))
    commit = partial(_commit, temporary, path, dump(content.manifest._replace(files=files)))
    yield (committing := Work(commit if leads else _nothing, file, copied))
    agree(committing.problem)
    yield Work(retain if leads and retain else _nothing, file, copied)


def _commit(temporary: Path, path: Path, manifest: str) -> None:
    """Complete the directory ``temporary`` with the manifest, and rename it to ``path``."""
    write_manifest(temporary, manifest)
    sync_directory(temporary)
    os.rename(temporary, path)
    sync_directory(path.parent)


def _nothing() -> None:
    """Stand for the work of ranks that have none in a stage."""


class Newest(NamedTuple):
    """Hold the newest complete checkpoint, if there is one, and the newer ones that are damaged."""

    opened: Opened | None
    step: int
    damaged: list[tuple[Path, str]]


def step_name(step: int) -> str:
    return f"step-{step:08}"


def steps_in(directory: Path, links: bool = False) -> list[int]:
    """Return the steps of all checkpoints in ``directory``, damaged ones included, oldest first.

    With ``links`` those of symbolic links instead, which are not followed.
    """
    if not directory.is_dir():
        return []
    matches = [_STEP.fullmatch(path.name) for path in directory.iterdir() if path.is_symlink() == links]
    return sorted(int(match[1]) for match in matches if match and step_name(int(match[1])) == match[0])


def newest(directory: Path, all_ranks: Ranks, memory: Store | None = None) -> Newest:
    """Find the newest complete checkpoint in ``directory`` or ``memory``, and verify its files. Collective.

    Of two of one step it is the one in ``directory``. Raises Damaged if there are checkpoints, but none is
    complete.
    """
    places = (
        [(directory, None)] if memory is None else [(directory, None), (memory.directory, memory.hosts.own)]
    )
    steps = list[list[int]]()
    for index, (place, _) in enumerate(places):
        for links in (False, True):
            steps += [[step, -index, links] for step in steps_in(place, links)]
    listed = json.dumps(sorted(steps, reverse=True)) if all_ranks.rank == 0 else ""
    damaged: list[tuple[Path, str]] = []
    for step, number, is_link in json.loads(comm.gather_texts(listed, all_ranks)[0]):
        place, readers = places[-number]
        path = place / step_name(step)
        try:
            if is_link:
                raise Damaged(
                    f"{path} is a symbolic link: resume=PATH takes what it leads to, or copy it there"
                )
            opened = open_checkpoint(path, all_ranks, readers)
            if opened.manifest.facts.get("step") != step:
                raise Damaged(f"{path} is damaged: it holds step {opened.manifest.facts.get('step')}")
            return Newest(opened, step, damaged)
        except Damaged as error:
            damaged.append((path, str(error)))
    if damaged:
        raise Damaged("no checkpoint is complete: " + "; ".join(text for _, text in damaged))
    return Newest(None, 0, [])


class Store:
    """Save and keep the checkpoints of the current run. ``keep``: how many remain beside the best one.

    ``hosts``: by default all ranks see ``directory``. At most one save is under way. All methods but `clear`,
    `busy` and `settle` are collective.
    """

    def __init__(
        self,
        directory: Path,
        all_ranks: Ranks,
        *,
        keep: int,
        asynchronous: bool,
        hosts: Hosts | None = None,
    ) -> None:
        self.directory = directory
        self.hosts = hosts or Hosts([range(all_ranks.world)], all_ranks.rank)
        self.latest = 0  # the step of the newest checkpoint, loaded or saved; 0: none
        self.writer: Work | None = None  # runs the current stage, or ran the last one
        self._all_ranks = all_ranks
        self._keep = keep
        self._snapshot = Snapshot() if asynchronous else None
        self._step = 0  # the step of the last save that began
        self._stages: Iterator[Work] | None = None  # the stages of the save under way

    @property
    def busy(self) -> bool:
        """Whether this rank is writing."""
        return self.writer is not None and self.writer.is_alive()

    @property
    def under_way(self) -> bool:
        """Whether a save has begun and is not committed."""
        return self._stages is not None

    def newest(self, memory: Store | None = None) -> Newest:
        """Find the checkpoint to resume from. Changes nothing, since another job may be writing here."""
        start = newest(self.directory, self._all_ranks, memory)
        self.latest = start.step
        return start

    def clear(self, damaged: Iterable[tuple[Path, str]]) -> None:
        """Remove what killed saves left, and rename ``damaged`` checkpoints. Called on one rank."""
        for path in self.directory.glob(f"{TEMPORARY}*"):
            shutil.rmtree(path, ignore_errors=True)
        for path, _ in damaged:
            with contextlib.suppress(OSError):
                if path.parent == self.directory:
                    path.rename(path.with_name(f"{ASIDE}{path.name}-{time.time_ns()}"))

    def rehearse(self) -> bool:
        """Write, commit, read and delete a file as a save does. Return whether directories can be synced.

        Raises OSError or ValueError if that fails. Called on one rank.
        """
        path = self.directory / f"{TEMPORARY}rehearsal-{secrets.token_hex(4)}"
        renamed = path.with_name(f"{path.name}-renamed")
        try:
            path.mkdir(parents=True)
            write_text(path / "file", path.name)
            synced = sync_directory(path)
            path.rename(renamed)
            synced &= sync_directory(self.directory)
            if read_text(renamed / "file", 1000) != path.name:
                raise OSError(errno.EIO, "reads something else than was written", str(renamed))
        finally:
            for each in (path, renamed):
                shutil.rmtree(each, ignore_errors=True)
        return synced

    def save(
        self,
        step: int,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        extra: Any,
        facts: Mapping[str, Any],
        best: int | None,
        averages: Averages | None = None,
    ) -> None:
        """Save ``step``. If asynchronous, forward and backward may continue, but updates after `settle`.

        ``step`` is greater than that of any checkpoint there. ``facts``: JSON for the manifest, beside the
        step. ``best``: the step whose checkpoint is kept whatever its age.
        """
        self.finish()
        path = self.directory / step_name(step)
        facts = {"step": step, **facts}
        self._step = step
        retain = partial(self._retain, best)
        self._stages = save_in_stages(
            path, module, optimizer, extra, facts, averages, self._snapshot, retain, self.hosts
        )
        self.advance()
        if self._snapshot is None:
            self.finish()

    def settle(self) -> None:
        """Wait until parameters and optimizer state may change."""
        if self.writer is not None:
            self.writer.copied.wait()

    def advance(self) -> None:
        """Begin the next stage of the save under way, or end it after the last. No rank may be busy."""
        stages = self._stages
        self._stages = None
        assert stages is not None, "nothing is under way"
        work = next(stages, None)
        if work is None:
            self.latest = self._step
        else:
            self._stages = stages
            self.writer = work
            work.start()

    def finish(self) -> None:
        """Complete the save under way, if there is one."""
        while self._stages is not None:
            if self.writer is not None:
                self.writer.join()
            self.advance()

    def _retain(self, best: int | None) -> None:
        """Delete all but the newest ``keep`` checkpoints and the ``best`` one.

        Each is renamed first, so that a kill leaves no incomplete directory with a checkpoint's name.
        """
        for step in steps_in(self.directory)[: -self._keep]:
            if step != best:
                path = self.directory / step_name(step)
                deleted = path.with_name(f"{TEMPORARY}deleted-{path.name}")
                with contextlib.suppress(OSError):  # a checkpoint that cannot be deleted is harmless
                    os.rename(path, deleted)
                    shutil.rmtree(deleted)

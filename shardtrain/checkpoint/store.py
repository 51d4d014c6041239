"""Atomic saves, and the checkpoints of a run: a directory with one `step-NNNNNNNN` each.

In a save every rank writes its file, rank 0 the manifest, and one rename commits:

    agree    all     content is collected and compared
    copy     each    into memory of the process
    write    each    `.tmp-step-00000120-3f2a90c1/rank-NNNNN.safetensors`, hashed while written, fsynced
    commit   rank 0  manifest.json and manifest.sha256, fsynced; the directory fsynced; renamed to
                     `step-00000120`; the directory above fsynced; old checkpoints are deleted

Training waits for the copy alone. `write` and `commit` communicate nothing, so one thread runs them while
ranks train; between them, in the main thread, ranks exchange their results. With a place in memory
(`memory.py`) a step is also saved there, by the same steps at once.

A kill at any moment leaves either the state before and a `.tmp-` directory that nobody reads, or the new
checkpoint, complete. A save that fails on one rank raises the same `SaveFailed` on all ranks, in the next
call that exchanges results. Earlier checkpoints stay.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import torch
from torch import nn

from shardtrain.checkpoint.content import Averages, Content, Named, agree, collect, exchange
from shardtrain.checkpoint.files import Record, sync_directory, write_tensors
from shardtrain.checkpoint.loading import Opened, open_checkpoint
from shardtrain.checkpoint.manifest import dump, file_name, write_manifest
from shardtrain.comm.channel import Ranks
from shardtrain.device import current_stream, on_accelerator
from shardtrain.errors import Damaged, SaveFailed
from shardtrain.pieces.part import Part

TEMPORARY = ".tmp-"
ASIDE = "damaged-"
_STEP = re.compile(r"step-(\d{8,})")

FileWriter = Callable[[Path], Record]  # writes this rank's file as a new one


def copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of all ``tensors`` in host memory."""
    copies = {}
    for name, tensor in tensors.items():
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_accelerator(tensor))
        copies[name] = copy.copy_(tensor.detach(), non_blocking=True)
    for device in {tensor.device for tensor in tensors.values() if on_accelerator(tensor)}:
        current_stream(device).synchronize()
    return copies


class Draft:
    """A checkpoint that is written beside its place, and renamed once it is complete."""

    def __init__(self, path: Path, content: Content, all_ranks: Ranks) -> None:
        self.path = path
        self.has_all_files = False
        self._temporary = path.with_name(f"{TEMPORARY}{path.name}-{content.token}")
        self.file = file_name(all_ranks.rank)
        self._manifest = content.manifest
        self.record: Record | None = None  # of this rank's file
        self._all_ranks = all_ranks

    def write(self, write_file: FileWriter) -> None:
        self._temporary.mkdir(parents=True, exist_ok=True)
        self.record = write_file(self._temporary / self.file)

    def exchange_records(self, problem: str) -> None:
        """Let rank 0 know what all ranks wrote. ``problem``: why this rank has not. Collective."""
        by_rank = self.agree(problem, record=self.record)
        files = {file_name(rank): Record(*each["record"]) for rank, each in enumerate(by_rank)}
        self._manifest = self._manifest._replace(files=files)
        self.has_all_files = True

    def commit(self) -> None:
        """Complete the directory with the manifest, and rename it: on rank 0."""
        if self._all_ranks.rank == 0:
            write_manifest(self._temporary, dump(self._manifest))
            sync_directory(self._temporary)
            os.rename(self._temporary, self.path)
            sync_directory(self.path.parent)

    def agree(self, problem: str, **facts: Any) -> list[dict[str, Any]]:
        """Return all ranks' facts. If any has a ``problem``, discard the draft: SaveFailed. Collective."""
        return exchange(self._failed, self._all_ranks, problem, **facts)

    def _failed(self, problems: str) -> SaveFailed:
        if self._all_ranks.rank == 0:
            shutil.rmtree(self._temporary, ignore_errors=True)
        return SaveFailed(f"{self.path} was not saved: {problems}")

    def save(self, write_file: FileWriter) -> None:
        self.exchange_records(self.problem_of(partial(self.write, write_file)))
        self.agree(self.problem_of(self.commit))

    def problem_of(self, action: Callable[[], object]) -> str:
        """Call ``action``; return why it failed, or an empty text."""
        try:
            action()
        except OSError as error:
            return f"{Path(error.filename or self.file).name}: {error.strerror}"
        except Exception as error:  # told to all ranks; in a thread nobody would notice it
            return f"{self.file}: {type(error).__name__} {error}"
        return ""


def file_writer(content: Content) -> FileWriter:
    return lambda path: write_tensors(path, content.tensors, content.notes)


def _copier(content: Content) -> FileWriter:
    """Return what writes a copy of ``content``, which is made now."""
    try:
        return file_writer(content._replace(tensors=copied(content.tensors)))
    except (MemoryError, RuntimeError) as error:
        return partial(_fail, error)  # in the thread, so that all ranks learn of it


def _fail(error: Exception, path: Path) -> Record:
    raise error


class Newest(NamedTuple):
    """The newest complete checkpoint, if there is one, and the newer ones that are damaged."""

    opened: Opened | None
    step: int
    damaged: list[tuple[Path, str]]


def step_name(step: int) -> str:
    return f"step-{step:08}"


def steps_in(directory: Path) -> list[int]:
    """Return the steps of all checkpoints in ``directory``, damaged ones included, oldest first."""
    if not directory.is_dir():
        return []
    matches = [_STEP.fullmatch(path.name) for path in directory.iterdir()]
    return sorted(int(match[1]) for match in matches if match and step_name(int(match[1])) == match[0])


def newest(directory: Path, all_ranks: Ranks, memory: Path | None = None) -> Newest:
    """Find the newest complete checkpoint in ``directory`` or ``memory``, and verify its files. Collective.

    If both have that step, it is the one in ``directory``. Raises Damaged if there are checkpoints, but none
    is complete.
    """
    candidates: list[tuple[int, bool]] = []  # step, whether on disk
    places = [directory] if memory is None else [memory, directory]
    problem = ""
    if all_ranks.rank == 0:
        try:
            for place in places:
                candidates += [(step, place == directory) for step in steps_in(place)]
        except OSError as error:
            problem = str(error)
    listed = exchange(Damaged, all_ranks, problem, candidates=sorted(candidates, reverse=True))
    damaged: list[tuple[Path, str]] = []
    for step, is_on_disk in listed[0]["candidates"]:
        path = (directory if is_on_disk else places[0]) / step_name(step)
        try:
            opened = open_checkpoint(path, all_ranks)
            if opened.manifest.facts.get("step") != step:
                raise Damaged(f"{path} is damaged: it holds step {opened.manifest.facts.get('step')}")
            return Newest(opened, step, damaged)
        except Damaged as error:
            damaged.append((path, str(error)))
    if damaged:
        raise Damaged("no checkpoint is complete: " + "; ".join(text for _, text in damaged))
    return Newest(None, 0, [])


def retain(directory: Path, keep: int, best: int | None = None) -> None:
    """Delete all but the newest ``keep`` checkpoints and the ``best`` one."""
    for step in steps_in(directory)[:-keep]:
        if step != best:
            path = directory / step_name(step)
            deleted = path.with_name(f"{TEMPORARY}deleted-{path.name}")
            with contextlib.suppress(OSError):  # a checkpoint that cannot be deleted is harmless
                # So that a kill leaves no incomplete directory with a checkpoint's name.
                os.rename(path, deleted)
                shutil.rmtree(deleted)


def rehearse(directory: Path, all_ranks: Ranks) -> None:
    """Try in ``directory`` what a checkpoint needs: save a small one, read, verify and delete it. Collective.

    Raises SaveFailed or Damaged on every rank if that fails.
    """
    rank = all_ranks.rank
    part = Part("rehearsal", shape=(all_ranks.world,), stride=(1,), start=rank, stop=rank + 1)
    named: Named = {"rehearsal": (part, torch.tensor([rank]))}
    content = agree(directory, all_ranks, named, {"optimizer": None, "facts": {}})
    path = directory / f"{TEMPORARY}rehearsal-{content.token}"
    try:
        Draft(path, content, all_ranks).save(file_writer(content))
        open_checkpoint(path, all_ranks)
    finally:
        if rank == 0:
            shutil.rmtree(path, ignore_errors=True)


class Store:
    """The checkpoints of the current run. ``keep``: how many remain beside the best one.

    ``memory``: a directory where the newest step is kept, too. At most one save to disk is under way. All
    methods but `clear` are collective.
    """

    def __init__(self, directory: Path, all_ranks: Ranks, *, keep: int, memory: Path | None = None) -> None:
        self.directory = directory
        self.memory = memory
        self.latest = 0  # the step of the newest checkpoint, loaded or saved; 0: none
        self.latest_in_memory = 0
        self.writer: Thread | None = None  # writes to the disk, or did so last
        self._problem = ""  # why it failed
        self._all_ranks = all_ranks
        self._keep = keep
        self._draft: Draft | None = None  # of the save under way, of the step `_step`
        self._step = 0
        self._retain: Callable[[], None] = lambda: None

    @property
    def busy(self) -> bool:
        """Whether this rank is writing to the disk."""
        return self.writer is not None and self.writer.is_alive()

    @property
    def under_way(self) -> bool:
        """Whether a save to the disk has begun and is not committed."""
        return self._draft is not None

    def newest(self) -> Newest:
        """Find the checkpoint to resume from. Changes nothing, since another job may be writing here."""
        start = newest(self.directory, self._all_ranks, self.memory)
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

    def save(
        self,
        step: int,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        extra: Any,
        facts: Mapping[str, Any],
        best: int | None = None,
        averages: Averages | None = None,
        to_disk: bool = True,
    ) -> str:
        """Save ``step`` in memory, if there is a place, and begin to save it to the disk.

        ``step`` is greater than that of any checkpoint there. ``facts``: JSON for the manifest, beside the
        step. ``best``: the step whose checkpoint is kept whatever its age. Returns why it is not in memory.
        """
        if to_disk:
            self.finish()
        path = self.directory / step_name(step)
        facts = {"step": step, **facts}
        content = collect(path, module, optimizer, extra=extra, facts=facts, averages=averages)
        problem = ""
        if self.memory is not None:
            try:
                self._save_in_memory(self.memory, step, content)
            except SaveFailed as error:
                problem = str(error)
        if to_disk:
            self._step = step
            self._retain = partial(retain, self.directory, self._keep, best)
            draft = Draft(path, content, self._all_ranks)
            self._start(draft, partial(draft.write, _copier(content)))
        return problem

    def _save_in_memory(self, memory: Path, step: int, content: Content) -> None:
        Draft(memory / step_name(step), content, self._all_ranks).save(file_writer(content))
        if self._all_ranks.rank == 0:
            retain(memory, keep=1)
        self.latest_in_memory = step

    def advance(self) -> None:
        """Begin to commit the save under way once all files are written, or end it. No rank may be busy."""
        draft = self._draft
        assert draft is not None, "nothing is under way"
        self._draft = None
        if draft.has_all_files:
            draft.agree(self._problem)
            self.latest = self._step
            return
        draft.exchange_records(self._problem)
        self._start(draft, partial(self._commit, draft))

    def _commit(self, draft: Draft) -> None:
        draft.commit()
        if self._all_ranks.rank == 0:
            self._retain()

    def _start(self, draft: Draft, action: Callable[[], object]) -> None:
        """Run ``action``, the next stage of ``draft``, in a thread."""

        def run() -> None:
            self._problem = draft.problem_of(action)

        self._draft = draft
        self.writer = Thread(target=run, name="shardtrain-save", daemon=True)
        self.writer.start()

    def finish(self) -> None:
        """Complete the save under way, if there is one."""
        while self._draft is not None:
            if self.writer is not None:
                self.writer.join()
            self.advance()

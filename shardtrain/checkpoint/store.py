"""The checkpoints of one run: a directory with one `step-NNNNNNNN` each.

    store = Store(run_dir / "checkpoints", all_ranks, device, keep=2, asynchronous=True)
    start = store.newest()             the newest complete one, and the damaged ones after it
    store.clear(start.damaged)         set these aside, and remove what killed saves left
    store.save(step, model, …)         at most one save is under way; a thread copies, then writes
    store.settle()                     before the next update: wait for the copy, not for the disk
    store.busy, store.advance()        once no rank is busy, all advance; the second time it is committed
    store.finish()                     wait for what is under way

Everything but ``clear``, ``busy`` and ``settle`` is collective. A save that fails raises `SaveFailed` on all
ranks together, from whichever of these calls learns of it. The checkpoints before it stay.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import torch
from torch import nn

from shardtrain import comm
from shardtrain.checkpoint.content import Averages
from shardtrain.checkpoint.loading import Opened, open_checkpoint
from shardtrain.checkpoint.manifest import Damaged
from shardtrain.checkpoint.saving import TEMPORARY, Saving, Snapshot, Stage, begin
from shardtrain.comm.transport import Ranks

_STEP = re.compile(r"step-(\d{8,})")
ASIDE = "damaged-"


class Newest(NamedTuple):
    """The newest complete checkpoint, if there is one, and the newer ones that are damaged."""

    opened: Opened | None
    step: int
    damaged: list[tuple[Path, str]]


def step_name(step: int) -> str:
    return f"step-{step:08}"


def steps_in(directory: Path) -> list[int]:
    """Return the steps that have a checkpoint in ``directory``, damaged or not, oldest first."""
    if not directory.is_dir():
        return []
    matches = [_STEP.fullmatch(path.name) for path in directory.iterdir() if not path.is_symlink()]
    return sorted(int(match[1]) for match in matches if match and step_name(int(match[1])) == match[0])


def newest(directory: Path, all_ranks: Ranks, device: torch.device) -> Newest:
    """Find the newest complete checkpoint in ``directory``, and verify every file of it. Collective.

    Raises:
        Damaged: there are checkpoints, and none of them is complete.
    """
    listed = json.dumps(steps_in(directory)) if all_ranks.rank == 0 else ""
    damaged: list[tuple[Path, str]] = []
    for step in reversed(json.loads(comm.broadcast_text(listed, all_ranks, device))):
        path = directory / step_name(step)
        try:
            opened = open_checkpoint(path, all_ranks, device)
            if opened.manifest.facts.get("step") != step:
                raise Damaged(f"{path} is damaged: it holds step {opened.manifest.facts.get('step')}")
            return Newest(opened, step, damaged)
        except Damaged as error:
            damaged.append((path, str(error)))
    if damaged:
        raise Damaged("no checkpoint is complete: " + "; ".join(text for _, text in damaged))
    return Newest(None, 0, [])


class Store:
    """The checkpoints of the run that is under way. ``keep``: how many beside the best one remain."""

    def __init__(
        self, directory: Path, all_ranks: Ranks, device: torch.device, *, keep: int, asynchronous: bool
    ) -> None:
        self.directory = directory
        self.latest = 0  # the step of the newest checkpoint, loaded or saved; 0: none
        self.exposed_s = 0.0  # seconds that training has waited for saves
        self.writer: Thread | None = None  # works on the present stage; another one for each stage
        self._all_ranks, self._device = all_ranks, device
        self._keep, self._snapshot = keep, Snapshot() if asynchronous else None
        self._step = 0  # of the save that began last
        self._best: int | None = None
        self._saving: Saving | None = None

    @property
    def busy(self) -> bool:
        """Whether this rank is writing."""
        return self.writer is not None and self.writer.is_alive()

    @property
    def under_way(self) -> bool:
        """Whether a save has begun that is not committed."""
        return self._saving is not None

    def newest(self) -> Newest:
        """Find where to resume. Changes nothing: another job may be writing here.

        Raises:
            Damaged: there are checkpoints, and none of them is complete.
        """
        start = newest(self.directory, self._all_ranks, self._device)
        self.latest = start.step
        return start

    def clear(self, damaged: Iterable[tuple[Path, str]]) -> None:
        """Remove what killed saves left, and set ``damaged`` checkpoints aside. One rank calls it."""
        for path in self.directory.glob(f"{TEMPORARY}*"):
            shutil.rmtree(path, ignore_errors=True)
        for path, _ in damaged:
            with contextlib.suppress(OSError):
                path.rename(path.with_name(f"{ASIDE}{path.name}-{time.time_ns()}"))

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
        """Save ``step``. If asynchronous, forward and backward may continue, updates after `settle`.

        Args:
            step: more than that of any checkpoint there.
            module, optimizer, extra, averages: as for `checkpoint.save`.
            facts: JSON for the manifest, beside the step.
            best: the step whose checkpoint, if there is one, is kept whatever its age.

        Raises:
            SaveFailed: this save has failed, or the one before.
        """
        with self._exposed():
            self.finish()
            path, facts = self.directory / step_name(step), {"step": step, **facts}
            self._saving = begin(path, module, optimizer, extra, facts, averages, self._snapshot)
            self._step, self._best = step, best
            self._start(self._saving)
            if self._snapshot is None:
                self.finish()

    def settle(self) -> None:
        """Return when parameters and optimizer state may change."""
        if self._saving is not None:
            with self._exposed():
                self._saving.copied.wait()

    def advance(self) -> bool:
        """Enter the next stage of the save under way; return whether it is committed. No rank may be busy.

        Raises:
            SaveFailed: on every rank. No save is under way any more.
        """
        assert self._saving is not None, "nothing is under way"
        with self._exposed():
            saving, self._saving = self._saving, None
            if saving.advance():
                self.latest = self._step
                return True
            self._saving = saving
            self._start(saving)
            return False

    def finish(self) -> None:
        """Return when nothing is under way.

        Raises:
            SaveFailed: the save that was under way has failed.
        """
        with self._exposed():
            while self._saving is not None:
                if self.writer is not None:
                    self.writer.join()
                self.advance()

    def _start(self, saving: Saving) -> None:
        self.writer = Thread(target=self._work, args=[saving], name="shardtrain-save", daemon=True)
        self.writer.start()

    def _work(self, saving: Saving) -> None:
        saving.work()
        if saving.stage is Stage.COMMIT and not saving.problem and self._all_ranks.rank == 0:
            self._retain()

    def _retain(self) -> None:
        """Delete all but the newest ``keep`` checkpoints and the best one.

        Each is renamed first, so that a kill leaves nothing that looks like a checkpoint and is none.
        """
        for step in steps_in(self.directory)[: -self._keep]:
            if step != self._best:
                path = self.directory / step_name(step)
                deleted = path.with_name(f"{TEMPORARY}deleted-{path.name}")
                with contextlib.suppress(OSError):  # what cannot be deleted does no harm
                    os.rename(path, deleted)
                    shutil.rmtree(deleted)

    @contextlib.contextmanager
    def _exposed(self) -> Iterator[None]:
        before, start = self.exposed_s, time.perf_counter()
        try:
            yield
        finally:
            self.exposed_s = before + time.perf_counter() - start  # nested calls count once

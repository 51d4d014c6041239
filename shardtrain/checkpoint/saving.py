"""A save: every rank writes its file, rank 0 the manifest, and one rename commits.

    begin    all     what to save is collected and compared; rank 0 makes `.tmp-step-00000120-3f2a90c1/`
    write    each    rank-NNNNN.safetensors, hashed while it is written, fsynced
    commit   rank 0  manifest.json and manifest.sha256, fsynced; the directory fsynced; renamed to
                     `step-00000120`; the directory above fsynced

A kill at any moment leaves either the state before and a `.tmp-` directory that no one reads, or the new
checkpoint, complete. `write` and `commit` communicate nothing, so a thread may do them while the ranks
train. Between them, `advance` brings the ranks together: they exchange what each has done, and a problem
of one rank is the same `SaveFailed` on all.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from enum import Enum
from itertools import accumulate
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import nn

from shardtrain.checkpoint.content import Averages, Content, collect, exchange
from shardtrain.checkpoint.files import Record, sync_directory, write_tensors, write_text
from shardtrain.checkpoint.manifest import DIGEST_NAME, NAME, digest_line, dump, file_name
from shardtrain.device import current_stream, on_accelerator
from shardtrain.engine.hooks import Engine, engine_of
from shardtrain.engine.state_dict import require_rest

TEMPORARY = ".tmp-"
_ALIGN = 64  # bytes; a cache line
_CUT = ("parameters/", "optimizer/", "ema/")  # what an update changes, and nothing else does


class SaveFailed(RuntimeError):
    """A checkpoint was not saved; raised on every rank. What was there before is untouched."""


class Stage(Enum):
    WRITE = "every rank writes its file"  # --advance--> COMMIT
    COMMIT = "rank 0 writes the manifest and renames"  # --advance--> DONE
    DONE = "the checkpoint is there"


class Snapshot:
    """Host memory that a save copies into; the next one finds it allocated, which halves its time."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies of all ``tensors``, valid until the next call."""
        starts = list(accumulate((-(-t.nbytes // _ALIGN) * _ALIGN for t in tensors.values()), initial=0))
        devices = {tensor.device for tensor in tensors.values() if on_accelerator(tensor)}
        if self._bytes.numel() < starts[-1]:
            self._bytes = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=bool(devices))
        copies = {}
        for start, (name, tensor) in zip(starts, tensors.items(), strict=False):
            target = self._bytes[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies[name] = target.copy_(tensor.detach(), non_blocking=True)
        for device in devices:
            current_stream(device).synchronize()  # a thread's own device is the first one
        return copies


class Saving:
    """One save under way on all ranks; each does its `work` between two calls of `advance`.

    With a ``snapshot``, `work` first copies everything into it. Parameters and optimizer state do not change
    before the next update, which must wait for `copied`. What a forward changes is copied at once.
    """

    def __init__(
        self, path: Path, temporary: Path, content: Content, engine: Engine, snapshot: Snapshot | None
    ) -> None:
        self.path, self.stage, self.problem = path, Stage.WRITE, ""
        self.copied = Event()  # set once the live tensors are not needed any more
        self._temporary, self._content, self._snapshot = temporary, content, snapshot
        self._all_ranks, self._device = engine.transport.all_ranks, engine.device
        self._file = file_name(self._all_ranks.rank)
        self._record: Record | None = None
        self._records: dict[str, Record] = {}
        if snapshot is not None:
            changing = {k: t.detach().clone() for k, t in content.tensors.items() if not k.startswith(_CUT)}
            content.tensors.update(changing)

    def work(self) -> None:
        """Do this rank's part of the stage, unless it has a problem. Communicates nothing, raises nothing."""
        try:
            if self.stage is Stage.WRITE and not self.problem:
                self._write()
            elif self.stage is Stage.COMMIT and self._all_ranks.rank == 0:
                self._commit()
        except OSError as error:
            self.problem = f"{Path(error.filename or self._file).name}: {error.strerror}"
        except Exception as error:  # in a thread nobody else would hear of it
            self.problem = f"{self._file}: {type(error).__name__} {error}"
        finally:
            self.copied.set()

    def _write(self) -> None:
        tensors = self._content.tensors
        if self._snapshot is not None:
            tensors = self._snapshot.copy(tensors)
            self.copied.set()
        self._record = write_tensors(self._temporary / self._file, tensors, {"extra": self._content.extra})

    def _commit(self) -> None:
        """Write the manifest, and make the temporary directory the checkpoint."""
        text = dump(self._content.manifest._replace(files=self._records))
        write_text(self._temporary / NAME, text)
        write_text(self._temporary / DIGEST_NAME, digest_line(text))
        sync_directory(self._temporary)
        os.rename(self._temporary, self.path)
        sync_directory(self.path.parent)

    def advance(self) -> bool:
        """Enter the next stage, and return whether the checkpoint is there. Collective, after `work`.

        Raises:
            SaveFailed: on every rank, naming ranks, files and reasons.
        """
        told, problems = exchange(self.problem, self._all_ranks, self._device, record=self._record)
        if problems:
            if self._all_ranks.rank == 0:
                shutil.rmtree(self._temporary, ignore_errors=True)
            raise SaveFailed(f"{self.path} was not saved: {'; '.join(problems)}")
        if self.stage is Stage.WRITE:
            self._records = {file_name(rank): Record(*each["record"]) for rank, each in enumerate(told)}
            self.stage = Stage.COMMIT
        else:
            self.stage = Stage.DONE
        return self.stage is Stage.DONE


def begin(
    path: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: Any,
    facts: Mapping[str, Any],
    averages: Averages | None = None,
    snapshot: Snapshot | None = None,
) -> Saving:
    """Collect what to save and make the temporary directory. Collective.

    Raises:
        SaveFailed: on every rank: ``path`` exists, the directory cannot be made, something cannot be
            saved, or the ranks hold different models or optimizers.
    """
    engine = engine_of(module)
    require_rest(engine, "checkpoint.save")
    content, problem, temporary = None, "", ""
    try:
        content = collect(engine, optimizer, extra, facts, averages)
        if engine.transport.all_ranks.rank == 0:
            temporary = make_temporary(path).name
    except ValueError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}"
    compared = {} if content is None else {"digest": content.digest(), "state": content.first_state}
    told, problems = exchange(
        problem, engine.transport.all_ranks, engine.device, temporary=temporary, **compared
    )
    if not problems:
        odd = [rank for rank, each in enumerate(told) if each["digest"] != told[0]["digest"]]
        problems = [f"rank {rank} holds another model, optimizer or facts than rank 0" for rank in odd]
    if problems:
        if temporary:
            (path.parent / temporary).rmdir()
        raise SaveFailed(f"{path} was not saved: {'; '.join(problems)}")
    assert content is not None, "a rank without content has a problem"
    saving = Saving(path, path.parent / told[0]["temporary"], content, engine, snapshot)
    saving.problem = content.take_state({k: v for each in told for k, v in each["state"].items()})
    return saving


def make_temporary(path: Path) -> Path:
    """Make a directory beside ``path``, under a name that says it is not finished."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        raise FileExistsError(17, "exists already, and a checkpoint is never overwritten", str(path))
    temporary = path.parent / f"{TEMPORARY}{path.name}-{secrets.token_hex(4)}"
    temporary.mkdir()
    return temporary

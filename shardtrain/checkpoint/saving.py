"""A save: every rank writes its file, rank 0 the manifest, and one rename commits.

    begin    all     what to save is collected and compared; rank 0 makes `.tmp-step-00000120-3f2a90c1/`
    write    each    rank-NNNNN.safetensors, hashed while it is written, fsynced
    commit   rank 0  manifest.json and manifest.sha256, fsynced; the directory fsynced; renamed to
                     `step-00000120`; the directory above fsynced

Killed at any moment, this leaves either the old state of affairs and a `.tmp-` that no one reads, or the
new checkpoint, whole. `write` and `commit` communicate nothing, so a thread may do them while the ranks
train; between them, `advance` brings the ranks together: they exchange what each has done, and a problem
of one is the same `SaveFailed` on all.
"""

from __future__ import annotations

import hashlib
import json
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

from shardtrain import comm
from shardtrain.checkpoint.content import Averages, Content, collect
from shardtrain.checkpoint.files import Record, sync_directory, write_tensors, write_text
from shardtrain.checkpoint.manifest import DIGEST_NAME, NAME, digest_line, dump, file_name
from shardtrain.engine.hooks import Engine

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
        """Copies of all ``tensors``, valid until the next call."""
        starts = list(accumulate((-(-t.nbytes // _ALIGN) * _ALIGN for t in tensors.values()), initial=0))
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        if self._bytes.numel() < starts[-1]:
            self._bytes = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=on_gpu)
        copies = {}
        for start, (name, tensor) in zip(starts, tensors.items(), strict=False):
            place = self._bytes[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies[name] = place.copy_(tensor.detach(), non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # a thread's own device is the first one
        return copies


class Saving:
    """One save under way on all ranks, each doing its `work` between two `advance`."""

    def __init__(self, path: Path, temporary: Path, content: Content, engine: Engine) -> None:
        self.path = path
        self.stage = Stage.WRITE
        self._temporary = temporary
        self._content = content
        self._memory: Snapshot | None = None
        self.copied = Event()  # the live tensors are not needed any more
        self._all_ranks, self._device = engine.transport.all_ranks, engine.device
        self._record: Record | None = None
        self._records: dict[str, Record] = {}
        self.problem = ""

    def copy_first(self, memory: Snapshot) -> None:
        """Let `work` copy everything into ``memory`` before it writes.

        Parameters and optimizer state do not change before the next update, so that is time enough (see
        `copied`). What a forward changes is copied at once.
        """
        tensors = self._content.tensors
        copies = {name: t.detach().clone() for name, t in tensors.items() if not name.startswith(_CUT)}
        self._content = self._content._replace(tensors=tensors | copies)
        self._memory = memory

    def work(self) -> None:
        """This rank's part of the stage. Communicates nothing and raises nothing."""
        name = file_name(self._all_ranks.rank)
        try:
            if self.stage is Stage.WRITE:
                self._write(self._temporary / name)
            elif self.stage is Stage.COMMIT and self._all_ranks.rank == 0:
                commit(self._temporary, self.path, dump(self._content.manifest._replace(files=self._records)))
        except OSError as error:
            self.problem = f"{Path(error.filename or name).name}: {error.strerror}"
        except Exception as error:  # in a thread nobody else would hear of it
            self.problem = f"{name}: {type(error).__name__} {error}"
        finally:
            self.copied.set()

    def _write(self, file: Path) -> None:
        if self._memory is not None:
            self._content = self._content._replace(tensors=self._memory.copy(self._content.tensors))
            self.copied.set()
        self._record = write_tensors(file, self._content.tensors, self._content.notes)

    def advance(self) -> bool:
        """Enter the next stage when every rank has done its work; whether that was the last. Collective.

        Raises:
            SaveFailed: on every rank, naming ranks, files and reasons.
        """
        said = json.dumps({"problem": self.problem, "record": self._record})
        heard = [json.loads(text) for text in comm.gather_texts(said, self._all_ranks, self._device)]
        problems = [f"rank {rank}: {each['problem']}" for rank, each in enumerate(heard) if each["problem"]]
        if problems:
            if self._all_ranks.rank == 0:
                shutil.rmtree(self._temporary, ignore_errors=True)
            raise SaveFailed(f"{self.path} was not saved: {'; '.join(problems)}")
        if self.stage is Stage.WRITE:
            self._records = {file_name(rank): Record(*each["record"]) for rank, each in enumerate(heard)}
            self.stage = Stage.COMMIT
        else:
            self.stage = Stage.DONE
        return self.stage is Stage.DONE


def begin(
    path: Path,
    engine: Engine,
    optimizer: torch.optim.Optimizer | None,
    extra: Any,
    facts: Mapping[str, Any],
    averages: Averages | None = None,
) -> Saving:
    """Collect what to save and make the temporary directory. Collective.

    Raises:
        SaveFailed: on every rank: ``path`` exists, the directory cannot be made, something cannot be
            saved, or the ranks hold different models or optimizers.
    """
    content, problem, temporary = None, "", ""
    try:
        content = collect(engine, optimizer, extra, facts, averages)
    except ValueError as error:
        problem = str(error)
    if engine.transport.all_ranks.rank == 0 and not problem:
        try:
            temporary = make_temporary(path).name
        except OSError as error:
            problem = f"{error.filename}: {error.strerror}"
    said = {"problem": problem, "temporary": temporary, "digest": _digest(content)}
    texts = comm.gather_texts(json.dumps(said), engine.transport.all_ranks, engine.device)
    heard = [json.loads(text) for text in texts]
    problems = [f"rank {rank}: {each['problem']}" for rank, each in enumerate(heard) if each["problem"]]
    if not problems:
        odd = [rank for rank, each in enumerate(heard) if each["digest"] != heard[0]["digest"]]
        problems = [f"rank {rank} holds another model, optimizer or facts than rank 0" for rank in odd]
    if problems:
        if temporary:
            (path.parent / temporary).rmdir()
        raise SaveFailed(f"{path} was not saved: {'; '.join(problems)}")
    assert content is not None, "a rank without content has a problem"
    return Saving(path, path.parent / heard[0]["temporary"], content, engine)


def _digest(content: Content | None) -> str:
    return "" if content is None else hashlib.sha256(dump(content.manifest).encode()).hexdigest()


def make_temporary(path: Path) -> Path:
    """A new directory beside ``path``, under a name that says it is not finished."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        raise FileExistsError(17, "exists already, and a checkpoint is never overwritten", str(path))
    temporary = path.parent / f"{TEMPORARY}{path.name}-{secrets.token_hex(4)}"
    temporary.mkdir()
    return temporary


def commit(temporary: Path, path: Path, text: str) -> None:
    """Write the manifest and make ``temporary``, where all data files are, the checkpoint ``path``."""
    write_text(temporary / NAME, text)
    write_text(temporary / DIGEST_NAME, digest_line(text))
    sync_directory(temporary)
    os.rename(temporary, path)
    sync_directory(path.parent)

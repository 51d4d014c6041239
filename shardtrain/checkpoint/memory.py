"""The newest checkpoint of a run on one host, in memory that outlives the ranks.

It lies in `/dev/shm/shardtrain-UID-HASH/IDENTITY/`: files as on disk, which only their owner may read. Each
rank holds a shared lock in the directory above, and the last one to let go removes that, unless a restart may
need it. docs/failures.md says who removes it then (`cleanup.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

from shardtrain.checkpoint import cleanup
from shardtrain.checkpoint.store import step_name, steps_in

MEMORY = Path("/dev/shm")
KEPT_S = 600.0  # seconds for which memory that no rank holds waits for the run to be started again


def directory_of(run_dir: Path) -> Path:
    """Return where the run in ``run_dir`` keeps its checkpoints in memory, if it does."""
    run = hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:16]
    return MEMORY / f"shardtrain-{os.getuid()}-{run}"


def claim(run_dir: Path) -> tuple[Path, int]:
    """Make the directory of the run in ``run_dir``, and lock it for as long as the returned file is open.

    Raises OSError if there is no such memory, or if the directory is somebody else's.
    """
    if not MEMORY.is_dir():
        raise OSError(f"there is no {MEMORY}")
    directory = directory_of(run_dir)
    while True:  # once more if it is removed meanwhile
        directory.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if not _is_private(directory):
                raise OSError(f"{directory} is not a directory of this user alone; its owner can remove it")
            lock = _open_lock(directory)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if cleanup.is_in(str(directory), lock):
                return directory, lock
            os.close(lock)


def _is_private(directory: Path) -> bool:
    """Return whether it is a directory of this user, which nobody else may enter."""
    # `MEMORY` is sticky, so nobody else can put another in its place afterwards.
    status = directory.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _open_lock(directory: Path) -> int:
    return os.open(directory / cleanup.LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def watch(directory: Path) -> None:
    """Start the process that removes ``directory`` if ranks cannot, and remove what earlier runs left.

    Called on one rank, which holds the lock.
    """
    program = [sys.executable, "-I", "-S", cleanup.__file__, str(directory), str(KEPT_S)]
    nothing = subprocess.DEVNULL
    subprocess.run(program, stdin=nothing, stdout=nothing, stderr=nothing, check=True)
    for other in MEMORY.glob(f"shardtrain-{os.getuid()}-*"):
        with contextlib.suppress(OSError):  # it may be gone by now
            if _is_private(other) and other.stat().st_mtime < time.time() - KEPT_S:
                lock = _open_lock(other)
                cleanup.remove(str(other), lock)
                os.close(lock)


def release(directory: Path, lock: int, *, keep: bool) -> None:
    """Let go of the lock; remove the directory if this process is the last and it is not to be kept."""
    if not keep:
        cleanup.remove(str(directory), lock)
    fcntl.flock(lock, fcntl.LOCK_UN)  # also for loader workers, which have inherited it
    os.close(lock)


def is_on_disk(directory: Path, disk: Path) -> bool:
    """Return whether ``disk`` has the newest step in ``directory``, whichever run's, or a newer one."""
    newest = max((max(steps_in(run), default=0) for run in directory.iterdir()), default=0)
    return newest <= max(steps_in(disk), default=0)


def keep_only(directory: Path, step: int) -> None:
    """Remove other runs' memory, and all in ``directory`` but ``step``. Called on one rank."""
    for run in directory.parent.iterdir():
        if run.is_dir() and run != directory:
            shutil.rmtree(run, ignore_errors=True)
    for path in directory.glob("*"):  # what killed saves left, too
        if path.name != step_name(step):
            shutil.rmtree(path, ignore_errors=True)

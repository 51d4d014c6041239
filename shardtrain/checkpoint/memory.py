"""Keep a run's newest checkpoint in memory of each host that outlives the ranks.

It lies in `/dev/shm/shardtrain-UID-HASH/IDENTITY/`, where HASH stands for the run's directory and IDENTITY is
the run's own, made at its start: a directory like that on disk, with the same files, which only its owner may
enter. Each rank of the run holds a shared lock in the directory above. The last one to let go removes it if
the run has ended, or if its newest step is on disk. What is left then, or is left by ranks that were killed,
is removed after ten minutes by a process of its own (`cleanup.py`). If that process was killed, too, the
user's next run on this host removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from shardtrain import comm
from shardtrain.checkpoint import cleanup
from shardtrain.checkpoint.manifest import parse, read_manifest, write_manifest
from shardtrain.checkpoint.store import Place, step_name, steps_in
from shardtrain.comm.channel import Ranks

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
    """Return whether it is a directory of this user, which nobody else may enter.

    `MEMORY` is sticky, so nobody else can put another in its place afterwards.
    """
    status = directory.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _open_lock(directory: Path) -> int:
    return os.open(directory / cleanup.LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def watch(directory: Path) -> None:
    """Start the process that removes ``directory`` if ranks cannot, and remove what earlier runs left.

    Called on one rank of each host, which holds the lock.
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


def keep_only(place: Place, step: int) -> None:
    """Remove other runs' memory, and all in ``place`` but ``step``. Called on each host's leading rank."""
    for run in place.directory.parent.iterdir():
        if run.is_dir() and run != place.directory:
            shutil.rmtree(run, ignore_errors=True)
    for path in place.directory.glob("*"):  # what killed saves left, too
        if path.name != step_name(step):
            shutil.rmtree(path, ignore_errors=True)


def complete(place: Place, all_ranks: Ranks) -> None:
    """Give each host what it lacks of the newest step of which all hosts together have all files. Collective.

    If a copy fails, verifying the checkpoint will tell what is missing.
    """
    hosts = place.hosts
    if len(hosts.ranks) == 1:
        return
    own_steps = [*_files_by_step(place.directory)] if hosts.leads else []
    texts = comm.gather_texts(json.dumps(own_steps), all_ranks)
    by_host = []
    for ranks in hosts.ranks:
        listed = json.loads(texts[ranks[0]])
        by_host.append({(step, text): set(files) for step, text, files in listed})
    for step, text in sorted(set().union(*by_host), reverse=True):
        present = [steps.get((step, text), set()) for steps in by_host]
        files = parse(text).files
        if set().union(*present) == files.keys():
            break
    else:
        return
    path = place.directory / step_name(step)
    if hosts.leads and (step, text) not in by_host[hosts.ranks.index(hosts.own)]:
        shutil.rmtree(path, ignore_errors=True)  # the same step with another manifest
        with contextlib.suppress(OSError):
            path.mkdir(parents=True)
            write_manifest(path, text)
    comm.gather_texts("", all_ranks)  # now the directory is there
    hosts.send(path, hosts.missing(present, files))


def _files_by_step(directory: Path) -> Iterator[tuple[int, str, list[str]]]:
    """Yield the steps in ``directory`` with their manifests and the files that have the size given there."""
    for step in steps_in(directory):
        path = directory / step_name(step)
        with contextlib.suppress(ValueError, OSError):  # a damaged manifest
            text = read_manifest(path)
            records = parse(text).files.items()
            sizes = {file.name: file.stat().st_size for file in path.iterdir()}
            yield step, text, [name for name, record in records if sizes.get(name) == record.bytes]

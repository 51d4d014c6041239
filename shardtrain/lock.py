"""Two jobs that would write into one run directory are kept apart."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from shardtrain.errors import UserError, writing

NAME = ".lock"


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Inside, ``directory`` exists, and no other process comes in with it, on whichever host.

    The kernel holds the lock for this process alone (`lockf`, not `flock`): it ends with the process, even
    where a data loader's workers outlive it for seconds.

    Raises:
        UserError: another process is inside, or nobody can write there.
    """
    path = directory / NAME
    with writing("run.dir", directory):
        directory.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            raise UserError(
                f"another job is writing into {directory}: {file.read()}; choose another run.name, or wait "
                f"for it; if there is no such process any more, remove {path}"
            ) from None
        except OSError:
            pass  # a file system without locks: there nobody is kept apart
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield

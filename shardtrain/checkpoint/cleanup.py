"""Remove a directory once no process has held the lock in it for some time.

    python -I -S cleanup.py DIRECTORY SECONDS

continues in a session of its own, and ends when the directory is gone. It removes what ranks leave in memory
if all are killed. It imports no torch, so it takes little memory itself.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import time

LOCK = ".lock"


def is_in(directory: str, lock: int) -> bool:
    """Return whether the open file ``lock`` is the one in ``directory``, which may have been made anew."""
    try:
        return os.path.samestat(os.fstat(lock), os.stat(os.path.join(directory, LOCK)))
    except OSError:
        return False


def take(lock: int) -> bool:
    """Lock the open file ``lock`` for this process alone; return whether nobody else held it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def remove(directory: str, lock: int) -> None:
    """Remove ``directory`` if nobody else holds its ``lock``, and keep the lock until it is closed."""
    # A process that waits for the lock then finds that the directory is gone.
    if is_in(directory, lock) and take(lock):
        shutil.rmtree(directory, ignore_errors=True)


def watch(directory: str, seconds: float) -> None:
    """Remove ``directory`` once nobody has held its lock for ``seconds``. One process at a time does that."""
    try:
        lock = os.open(os.path.join(directory, LOCK), os.O_RDWR)
        own = os.open(os.path.join(directory, ".cleanup"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return
    held_at = time.monotonic()
    while take(own) and is_in(directory, lock):
        time.sleep(min(1.0, seconds / 10))
        if not take(lock):
            held_at = time.monotonic()
            continue
        if time.monotonic() - held_at > seconds:
            remove(directory, lock)
        fcntl.flock(lock, fcntl.LOCK_UN)


if __name__ == "__main__" and os.fork() == 0:
    os.setsid()
    os.chdir("/")
    watch(sys.argv[1], float(sys.argv[2]))

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from pool import Pool


class NeverStopped(Pool):
    """A pool whose ranks live on after an exception, with the answers that they still owe."""

    def stop(self) -> None:
        pass


class TimeOut(BaseException):
    """What pytest-timeout raises in the main thread is no Exception either."""


@pytest.fixture(params=[Pool, NeverStopped])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    pool = request.param()
    yield pool
    Pool.stop(pool)


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """The path of a pipe, and this process's descriptor of it."""
    path = str(tmp_path / "fifo")
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR)
    yield path, descriptor
    os.close(descriptor)


def interrupt(process: int, fifo: str) -> str:
    """Have the test's process raise while it waits, and answer after that."""
    os.kill(process, signal.SIGUSR1)
    with open(fifo, "rb") as file:
        file.read(1)
    return "an answer to the first call"


def answer() -> str:
    return "an answer to the second call"


def test_an_interrupted_call_does_not_answer_the_next_one(pool: Pool, fifo: tuple[str, int]) -> None:
    def time_out(*_: Any) -> NoReturn:
        raise TimeOut

    before = signal.signal(signal.SIGUSR1, time_out)
    path, descriptor = fifo
    try:
        with pytest.raises(TimeOut):
            pool.run("auto", 1, interrupt, os.getpid(), path)
    finally:
        signal.signal(signal.SIGUSR1, before)
    os.write(descriptor, b" ")
    assert pool.run("auto", 1, answer) == ["an answer to the second call"]

"""Programs as a shell starts them, but forked from a process that has imported torch already.

Importing torch and torchvision costs every process four seconds, torchrun's own included; forked, a program
starts in hundredths of a second. It is ``__main__`` of processes of its own all the same, with its arguments,
environment, folder and outputs, and its ranks meet at a store as under torchrun. What torchrun itself does,
reports of errors, signals, restarts, is tested with torchrun: `test_cli.py`, `test_hosts.py`.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pool import forkserver


class Program:
    """The ranks of a program that runs: one, or as many as torchrun would start."""

    def __init__(self, processes: list[Any], said: Path) -> None:
        self._processes = processes
        self._said = said

    @property
    def output(self) -> str:
        return (self._said / "output").read_text()

    @property
    def errors(self) -> str:
        return (self._said / "errors").read_text()

    def wait_for(self, line: str, timeout: float = 100.0) -> None:
        """Until a line of the output starts with ``line``."""
        deadline = time.monotonic() + timeout
        while f"\n{line}" not in f"\n{self.output}":
            assert time.monotonic() < deadline, f"no {line!r} in {timeout} s: {self.output}{self.errors}"
            assert any(process.is_alive() for process in self._processes), self.output + self.errors
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        """To every rank, as from a terminal."""
        for process in self._processes:
            os.kill(process.pid, number)

    def end(self, timeout: float = 100.0) -> Ended:
        """What it was when all of its ranks had ended."""
        deadline = time.monotonic() + timeout
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            assert not process.is_alive(), f"not over in {timeout} s: {self.output}{self.errors}"
        return Ended([process.exitcode for process in self._processes], self.output, self.errors)


class Ended(NamedTuple):
    codes: list[int]
    output: str
    errors: str


@contextlib.contextmanager
def started(world: int, *command: str, folder: Path, **environment: str) -> Iterator[Program]:
    """``command`` (-m and a module, or a file; arguments) on ``world`` ranks, which end with the block."""
    from torch.distributed import TCPStore

    own = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"} | environment
    with tempfile.TemporaryDirectory() as said:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if world > 1 else None
        processes = []
        for name in ("output", "errors"):
            (Path(said) / name).touch()
        for rank in range(world):
            launched = own | (_torchrun_s(rank, world, store.port) if store is not None else {})
            arguments = (list(command), str(folder), said, launched)
            processes.append(forkserver().Process(target=_program, args=arguments))
            processes[-1].start()
        try:
            yield Program(processes, Path(said))
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            del store


def ended(world: int, *command: str, folder: Path, timeout: float = 100.0, **environment: str) -> Ended:
    with started(world, *command, folder=folder, **environment) as program:
        return program.end(timeout)


def signalled(line: str, number: int, *command: str, folder: Path, **environment: str) -> Ended:
    """Send a single rank the signal ``number`` once it has said ``line``."""
    with started(1, *command, folder=folder, **environment) as program:
        program.wait_for(line)
        program.signal(number)
        return program.end()


def _torchrun_s(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun adds to the environment; its store listens already, so that no port is lost to others."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    added = {**place, **store, "TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": 1}
    return {name: str(value) for name, value in added.items()}


def _program(command: list[str], folder: str, said: str, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, name in ((1, "output"), (2, "errors")):
        os.dup2(os.open(f"{said}/{name}", os.O_WRONLY | os.O_APPEND), number)
    sys.stdout = open(1, "w", closefd=False, encoding="utf-8")  # noqa: SIM115  # both live as long as the process
    sys.stderr = open(2, "w", closefd=False, encoding="utf-8", buffering=1)  # noqa: SIM115
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path.insert(0, folder)
        for name in (command[1], f"{command[1]}.__main__"):
            sys.modules.pop(name, None)  # forked with it; now it runs under another name
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).absolute().parent))
        runpy.run_path(command[0], run_name="__main__")

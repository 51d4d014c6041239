"""Processes of one host, looked at from outside: their memory, counted once, and their answers.

The proportional set size (PSS) of a page is its size over the number of processes that map it, so that the
sum over ranks counts shared memory once. It is read from ``/proc/PID/smaps_rollup``.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardtrain.errors import UserError

INTERVAL_S = 0.01


class Seen(NamedTuple):
    """Bytes above what imports take, at the moment when all ranks together held most; each rank's answer."""

    peak: int
    answers: list[dict[str, Any]]


class RankEnded(RuntimeError):
    """A process ended without an answer."""


def require_pss() -> None:
    if not Path("/proc/self/smaps_rollup").exists():
        raise UserError(
            "memory=true reads /proc/PID/smaps_rollup, which this system does not have (Linux does)"
        )


def pss(pid: int) -> int:
    """Bytes; 0 for a process that has just ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def run(module: str, argument: str, environments: Sequence[Mapping[str, str]]) -> Seen:
    """Run ``python -m module argument`` once per environment, all at the same time, to the end.

    Raises:
        RankEnded: one of them ended early; the others are ended too.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(index) for index in range(len(environments))]
        ranks = [_start(module, argument, env, log) for env, log in zip(environments, logs, strict=True)]
        try:
            for rank, log in zip(ranks, logs, strict=True):
                _line(rank, log)
            before = sum(pss(rank.pid) for rank in ranks)
            _tell(ranks)
            peak, answers = _sample(ranks, logs)
            _tell(ranks)
            for rank in ranks:
                rank.wait()
        finally:
            _end(ranks)
    return Seen(peak - before, answers)


def _start(module: str, argument: str, environment: Mapping[str, str], log: Path) -> subprocess.Popen[str]:
    with log.open("w") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", module, argument],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )


def _line(rank: subprocess.Popen[str], log: Path) -> str:
    assert rank.stdout is not None
    line = rank.stdout.readline()
    if not line:
        said = log.read_text().strip().splitlines()
        raise RankEnded(f"a rank ended with code {rank.wait()}: {said[-1] if said else 'it said nothing'}")
    return line


def _tell(ranks: Sequence[subprocess.Popen[str]]) -> None:
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("go\n")
        rank.stdin.flush()


def _sample(ranks: Sequence[subprocess.Popen[str]], logs: Sequence[Path]) -> tuple[int, list[dict[str, Any]]]:
    """The largest sum of all ranks' memory until each has answered, and the answers."""
    peak = 0
    answers: dict[int, dict[str, Any]] = {}
    with selectors.DefaultSelector() as selector:
        for index, rank in enumerate(ranks):
            assert rank.stdout is not None
            selector.register(rank.stdout, selectors.EVENT_READ, index)
        while len(answers) < len(ranks):
            peak = max(peak, sum(pss(rank.pid) for rank in ranks))
            for key, _ in selector.select(INTERVAL_S):
                answers[key.data] = json.loads(_line(ranks[key.data], logs[key.data]))
                selector.unregister(key.fileobj)
                if "failure" in answers[key.data]:
                    raise RankEnded(answers[key.data]["failure"])
    return peak, [answers[index] for index in range(len(ranks))]


def _end(ranks: Sequence[subprocess.Popen[str]]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
        rank.wait()
        for pipe in (rank.stdin, rank.stdout):
            if pipe is not None:
                pipe.close()

"""Processes of the program for a card: findings are lines of their output that begin with ``FOUND``."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

CHECKOUT = Path(__file__).parents[2]


class Ended(NamedTuple):
    """What processes said. ``failure``: how they ended, "" if well."""

    findings: list[dict[str, Any]]
    text: str
    failure: str


def run(command: Sequence[str], log: Path, limit_s: float, environ: Mapping[str, str]) -> Ended:
    """Run ``command`` until it ends or ``limit_s`` have passed; ``log`` gets what it prints."""
    begin = log.stat().st_size if log.exists() else 0
    with log.open("a") as file:
        process = subprocess.Popen(
            command, env=environ, cwd=CHECKOUT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
            failure = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            failure = f"stopped after {limit_s:.0f} s"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)  # torchrun and its ranks
        process.wait()
    text = log.read_bytes()[begin:].decode(errors="replace")
    lines = [line for line in text.splitlines() if line.startswith("FOUND ")]
    return Ended([json.loads(line[6:]) for line in lines], text, failure)

"""Run a row in fresh processes, since some rows hang and some end the process.

Its own file, since those processes cannot import `__main__`.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from shardtrain.job.errors import UserError
from shardtrain.judge.rows import FAULTS, HONEST, ROWS, Outcome, outcome
from shardtrain.judge.wrappers import SHORT, Wrapper, with_verbs, wrapper


def find(name: str) -> Wrapper:
    """Return the wrapper that a column is of: one with a fault, or what `wrapper` finds."""
    if name in FAULTS:
        return with_verbs(FAULTS[name]())
    try:
        return wrapper(name)
    except (ImportError, AttributeError, ValueError) as error:
        names = ", ".join(SHORT)
        raise UserError(f"wrapper={name}: {error}; expected {names} or PACKAGE.FUNCTION") from None


def load(modules: Sequence[str]) -> None:
    """Import the modules that register rows and faults."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UserError(f"rows={name}: {error}; expected modules that register rows") from None


@dataclass(frozen=True)
class Trial:
    """Try wrappers on ``world`` ranks."""

    rows: Sequence[str]  # modules that register rows
    world: int
    limit_s: float

    def __call__(self, wrapper: str, *rows: str) -> dict[str, Outcome]:
        """Return the outcomes on rank 0, on another rank if that tells more."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.fsdp", __name__, *self.rows])
        with tempfile.TemporaryDirectory() as place:
            ranks = [
                context.Process(target=self._rank, args=(wrapper, rows, rank, place), daemon=True)
                for rank in range(self.world)
            ]
            for process in ranks:
                process.start()
            deadline = time.monotonic() + self.limit_s * len(rows)
            for process in ranks:
                process.join(max(0.0, deadline - time.monotonic()))
            codes = [process.exitcode for process in ranks]
            for process in ranks:
                process.kill()
            files = [path.read_text() for path in sorted(Path(place).glob("*.txt"))]
        last = Outcome("hangs", f"still after {self.limit_s:.0f} s")
        if any(codes):
            last = Outcome("ends", f"exit code {next(filter(None, codes))}")
        by_rank = [[Outcome(*json.loads(line)) for line in text.splitlines()] for text in files]
        told = [next((o for o in each if o.verdict != "equal"), each[0]) for each in zip(*by_rank)]  # noqa: B905
        return dict(zip(rows, [*told, last] if any(codes) or None in codes else told, strict=False))

    def _rank(self, wrapper: str, rows: Sequence[str], rank: int, place: str) -> None:
        torch.set_num_threads(1)
        load(self.rows)
        store = dist.FileStore(f"{place}/store", self.world)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=self.world)
        with Path(place, f"{rank}.txt").open("w", buffering=1) as file:
            for row in rows:
                verdict, text = outcome(find(wrapper), ROWS[row])
                text = re.sub(rf"{tempfile.gettempdir()}/\w+", "…", text)
                file.write(json.dumps([verdict, text]) + "\n")
                if len(rows) > 1:
                    verdicts = [verdict] * self.world
                    dist.all_gather_object(verdicts, verdict)
                    if wrapper != HONEST and set(verdicts) != {"equal"}:
                        break  # caught
        os._exit(0)  # no farewell to a group that may be broken

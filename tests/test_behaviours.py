"""The rows of `tests/behaviours` notice planted faults, judge any wrapper, and are those of the document."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from behaviours.faults import FAULTS, Honest
from behaviours.refused import REFUSED
from behaviours.rows import ROWS, Outcome, outcome
from behaviours.verdicts import VERDICTS, outcome_here, outcomes, summary
from behaviours.wrappers import with_verbs
from pool import TIMEOUT_S, Pool, Ranks, each_rank

ROOT = Path(__file__).parents[1]
DOCUMENT = (ROOT / "docs/behaviours.md").read_text()


@pytest.mark.long
@pytest.mark.faults
@pytest.mark.parametrize("name", FAULTS)
@each_rank(2, transport="auto")
def test_rows_notice_a_planted_fault(name: str) -> None:
    """The row that the fault names, of two ranks; without the fault it is equal."""
    row, methods = FAULTS[name]
    assert outcome(with_verbs(Honest()), ROWS[row]).verdict == "equal"
    faulty = type("Faulty", (Honest,), methods)()
    of_ranks = [Outcome("equal")] * dist.get_world_size()
    dist.all_gather_object(of_ranks, outcome(with_verbs(faulty), ROWS[row]))
    assert summary(of_ranks).verdict == "wrong", of_ranks


ABSENT = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="not installed")


@pytest.mark.long
@pytest.mark.parametrize("wrapper", ["fsdp2", "fsdp1", "ddp", pytest.param("accelerate", marks=ABSENT)])
def test_peers_train_as_a_replica_does(wrapper: str, on_ranks: Ranks) -> None:
    for name in ("Training equals a replica's", "Two micro-batches, the first in `no_sync`"):
        assert on_ranks(2, outcome_here, wrapper, name) == [Outcome("equal")] * 2


def shard_and_hang(model: nn.Module) -> nn.Module:
    if dist.get_rank() == 1:
        time.sleep(600)
    return model


def shard_and_die(model: nn.Module) -> nn.Module:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return model


@pytest.mark.long
@pytest.mark.parametrize(
    ("wrapper", "limit_s", "expected"),
    [
        (shard_and_hang, 5.0, Outcome("hangs", "still after 5 s")),
        (shard_and_die, TIMEOUT_S, Outcome("ends", "exit code -9")),
    ],
)
def test_a_rank_that_hangs_or_ends_costs_one_row(wrapper: Any, limit_s: float, expected: Outcome) -> None:
    pool = Pool(limit_s, fresh=True)
    assert outcomes(pool, "auto", f"{__name__}.{wrapper.__name__}", "BatchNorm") == [expected]
    pool.limit_s = TIMEOUT_S
    assert outcomes(pool, "auto", "ddp", "BatchNorm") == [Outcome("equal")] * 2


def judged(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", str(ROOT / "tests/behaviours"), "-n", "0", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.long
def test_the_command_judges_a_wrapper_of_ones_own(tmp_path: Path) -> None:
    """The one that the document shows."""
    (example,) = re.findall(r"```python\n(# mine.py\n.*?)```", DOCUMENT, re.DOTALL)
    (tmp_path / "mine.py").write_text(example)
    done = judged(tmp_path, "--wrapper", "mine.shard", "-k", "AdamW or Clipping or autograd")
    assert done.returncode == 0, done.stdout
    assert "| mine.shard | 4 | 0 | 0 | 1 | 0 | 0 | 0 |" in done.stdout
    assert "| `autograd.grad` over parameters | **wrong**: scale differs from the replica's |" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--wrapper nowhere.shard",
            "--wrapper nowhere.shard: No module named 'nowhere'; expected .*, ddp, acce",
        ),
        ("--wrapper ddp --transport shared_memory", "--transport is of .*; ddp chooses by itself"),
    ],
)
def test_a_name_that_is_none_is_refused(arguments: str, message: str, tmp_path: Path) -> None:
    done = judged(tmp_path, *arguments.split())
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert re.search(message, done.stderr), done.stderr


def printed() -> dict[str, list[str]]:
    """Return the document's cells of each behaviour, by column."""
    lines = re.findall(r"^\| (.+) \|$", DOCUMENT.partition("\n## Rows\n")[2], re.MULTILINE)
    cells = [re.split(r" (?<!\\)\| ", line) for line in lines]
    return {name: others for name, *others in cells if name not in ("behaviour", "---") and name[:2] != "**"}


def test_the_document_has_every_row_and_counts_them() -> None:
    rows = printed()
    assert list(rows) == list(ROWS)
    assert {name for name, cells in rows.items() if cells[0].startswith("refused")} == {*REFUSED}
    lines = re.findall(r"^\| (\w+) \| (\d+ \| .*\d+) \|$", DOCUMENT, re.MULTILINE)
    assert len(lines) == 6
    for column, (wrapper, counts) in enumerate(lines):
        verdicts = [
            re.sub(r"^\*\*(\w+).*", r"\1", cells[column].partition(":")[0]) for cells in rows.values()
        ]
        assert [Counter(verdicts)[verdict] for verdict in VERDICTS] == [*map(int, counts.split(" | "))], (
            wrapper
        )

"""What a rank leaves running when its process group is closed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os
from pathlib import Path

import torch
from torch import nn

import shardtrain
from shardtrain.launch import Place, process_group


def threads():
    return sorted(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))


def job():
    model = shardtrain.shard(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)), units=[nn.Linear])
    model(torch.ones(2, 9)).sum().backward()
    assert any("gloo" in name for name in threads())


with process_group(Place.from_environment(os.environ), torch.device("cpu")):
    job()
assert not any("gloo" in name for name in threads()), threads()
"""


def test_gloo_s_threads_end_with_the_process_group(tmp_path: Path) -> None:
    """One that lived on into the interpreter's end aborted the process, once in some thirty runs."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, str(program)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr

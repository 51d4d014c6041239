"""What a rank leaves running when its process group is closed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from programs import ended

PROGRAM = """
import os
from pathlib import Path

import torch
from torch import nn

import shardtrain
from shardtrain.job.launch import process_group
from shardtrain.job.dist_env import RankInfo


def threads():
    return sorted(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))


def job():
    model = shardtrain.shard(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)), units=[nn.Linear])
    model(torch.ones(2, 9)).sum().backward()
    assert any("gloo" in name for name in threads())


with process_group(RankInfo.from_environment(os.environ), torch.device("cpu")):
    job()
assert not any("gloo" in name for name in threads()), threads()
"""


ALIVE = """
import sys
import time
from pathlib import Path

import torch
from torch import nn

import shardtrain


def threads():
    return sorted(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))


torch.distributed.init_process_group("gloo")
model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))
shardtrain.shard(model, units=[nn.Linear], transport=sys.argv[1])
model(torch.ones(2, 9)).sum().backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
assert any("gloo" in name for name in threads())
torch.distributed.destroy_process_group()
assert not any("gloo" in name for name in threads()), threads()
if sys.argv[1] == "process_group":
    try:
        model(torch.ones(2, 9))
    except ValueError as error:
        assert str(error).startswith("the process group over which this model was sharded has been destroyed")
    else:
        raise AssertionError("a model without its group ran")
"""


@pytest.mark.parametrize("transport", ["process_group", "shared_memory"])
def test_a_model_that_lives_on_does_not_keep_the_group(tmp_path: Path, transport: str) -> None:
    (tmp_path / "program.py").write_text(ALIVE)
    done = ended(2, "program.py", transport, folder=tmp_path)
    assert done.codes == [0, 0], done.errors


def test_gloo_s_threads_end_with_the_process_group(tmp_path: Path) -> None:
    """One that lived on into the interpreter's end aborted the process, once in some thirty runs."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, str(program)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr

"""What ranks leave behind: no thread once the process group is closed, and no memory however they end."""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest

from pool import forkserver
from programs import ended

WORLD = 3
PROGRAM = """
import os
import sys
from pathlib import Path

import torch
from torch import nn

import shardtrain
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.launch import process_group


def threads():
    return sorted(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))


with process_group(RankInfo.from_environment(os.environ), torch.device("cpu")):
    model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))
    shardtrain.shard(model, units=[nn.Linear], transport=sys.argv[1])
    model(torch.ones(2, 9)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert any("gloo" in name for name in threads())
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
def test_gloo_s_threads_end_with_the_process_group(tmp_path: Path, transport: str) -> None:
    """Also where a model lives on. A thread at the interpreter's end aborted the process now and then."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = ended(2, "program.py", transport, folder=tmp_path)
    assert done.codes == [0, 0], done.errors


def _steps(path: list[str], rank: int, store: str, ready: Connection, ending: str) -> None:
    """A rank of its own process that trains for ever, unless ``ending`` is something it does by itself."""
    sys.path[:] = path
    import torch
    import torch.distributed as dist

    import shardtrain

    from small import Block, OddNet, sgd, train

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD)
    model = shardtrain.shard(OddNet(), units=[Block], transport="shared_memory")
    optimizer = sgd(model)
    train(model, optimizer, 2)
    ready.send("training")
    if ending == "normally":
        del model, optimizer
        dist.destroy_process_group()
        return
    for step in range(100_000):
        train(model, optimizer, 1, start=step)
        if ending == "by an exception" and rank == 1 and step == 3:
            raise RuntimeError("a mistake in step 3")


def _left_by(pids: list[int | None]) -> list[str]:
    """Files in /dev/shm that bear our name or the number of one of the processes; others' jobs may run."""
    marks = ["shardtrain", *map(str, pids)]
    folder = Path("/dev/shm")
    names = os.listdir(folder) if folder.is_dir() else []
    return [name for name in names if any(mark in name for mark in marks)]


@pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")
@pytest.mark.parametrize(
    "ending",
    [
        *("normally", "by an exception", "SIGKILL to one"),
        *(pytest.param(f"SIG{to}", marks=pytest.mark.long) for to in ("TERM to one", "KILL to all")),
    ],
)
def test_nothing_is_left_behind(tmp_path: Path, ending: str) -> None:
    processes, pipes = [], []
    for rank in range(WORLD):
        ours, theirs = forkserver().Pipe()
        arguments = (sys.path, rank, str(tmp_path / "store"), theirs, ending)
        processes.append(forkserver().Process(target=_steps, args=arguments))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        for pipe in pipes:
            assert pipe.poll(60), "the ranks do not start"
            assert pipe.recv() == "training"
        number = getattr(signal, ending.split()[0], None)
        for process in processes if ending.endswith("all") else processes[1:2]:
            if number is not None:
                os.kill(process.pid, number)
        deadline = time.monotonic() + 10
        for process in processes:
            wait([process.sentinel], timeout=max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert None not in codes, f"still alive after 10 s: {codes}"
    assert all((code == 0) == (ending == "normally") for code in codes)
    assert _left_by([process.pid for process in processes]) == []

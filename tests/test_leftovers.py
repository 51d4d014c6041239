"""Ranks that share memory leave nothing behind, however they end, and no rank outlives another for long."""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest

from pool import forkserver

WORLD = 3


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
    return (
        [name for name in os.listdir(folder) if any(mark in name for mark in marks)]
        if folder.is_dir()
        else []
    )


@pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")
@pytest.mark.parametrize(
    "ending", ["normally", "by an exception", "SIGTERM to one", "SIGKILL to one", "SIGKILL to all"]
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
                assert process.pid is not None
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
    assert all(code == 0 for code in codes) == (ending == "normally")
    assert all(code != 0 for code in codes) == (ending != "normally")
    assert _left_by([process.pid for process in processes]) == []

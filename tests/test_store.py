"""A run's checkpoints: the newest whole one, how many are kept, and saves that training does not wait for."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardtrain import checkpoint, comm
from shardtrain.checkpoint import store as checkpoint_store
from shardtrain.checkpoint.store import Store, step_name, steps_in

from pool import each_rank
from small import Block, OddNet, raised_soon, shard, train

CPU = torch.device("cpu")


def opened(path: Path, keep: int = 2, asynchronous: bool = False) -> Store:
    return Store(path, comm.open_transport(), CPU, keep=keep, asynchronous=asynchronous)


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = shard(OddNet(), units=[Block])
    return model, torch.optim.AdamW(model.parameters())


def fill(store: Store, steps: list[int], best: int | None = None) -> None:
    model, optimizer = fresh()
    for step in steps:
        store.settle()
        train(model, optimizer, 1, start=step)
        store.save(step, model, optimizer, extra={}, facts={}, best=best)
    store.finish()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("keep", "best", "left"), [(1, 2, [2, 101]), (3, 77, [30, 100, 101])])
@each_rank(2, transport="auto")
def test_the_newest_and_the_best_are_kept(
    tmp_path: Path, keep: int, best: int, left: list[int], asynchronous: bool
) -> None:
    store = opened(tmp_path, keep, asynchronous)
    fill(store, [1, 2, 30, 100, 101], best)
    assert store.latest == 101
    comm.barrier()
    assert steps_in(tmp_path) == left
    assert store.newest().step == 101
    assert {path.name for path in tmp_path.iterdir()} == {step_name(step) for step in left}


@each_rank(2, transport="auto")
def test_the_newest_whole_one_is_found_and_damaged_ones_are_set_aside(tmp_path: Path) -> None:
    store, folder = opened(tmp_path, keep=3), tmp_path
    fill(store, [10, 20, 30])
    if dist.get_rank() == 0:
        (folder / ".tmp-step-00000040-abcd").mkdir()
        (folder / ".tmp-step-00000040-abcd/rank-00000.safetensors").write_text("half")
        (folder / "step-00000099").symlink_to(folder / "step-00000010")
        (folder / "step-note").write_text("")
        os.truncate(folder / "step-00000030/rank-00001.safetensors", 100)
        (folder / "step-00000020").rename(folder / "step-00000025")
    comm.barrier()
    found = store.newest()
    assert found.step == 10
    texts = [text.removeprefix(f"{folder}/") for _, text in found.damaged]
    assert texts[0].startswith(
        "step-00000030 is damaged: rank 1: rank-00001.safetensors has 100 bytes, expected"
    )
    assert texts[1] == "step-00000025 is damaged: it holds step 20"
    if dist.get_rank() == 0:
        store.clear(found.damaged)
    comm.barrier()
    fill(store, [30])  # its place is free again
    comm.barrier()
    left = ["damaged-step-00000025", "damaged-step-00000030", "step-00000010", "step-00000030"]
    names = sorted(path.name[:21] for path in folder.iterdir())
    assert names == [*left, "step-00000099", "step-note"]


def assert_holds(checkpoint_dir: Path, wanted: list[torch.Tensor]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """What ``checkpoint_dir`` loads has the parameters and buffers ``wanted``."""
    model, optimizer = fresh()
    checkpoint.load(checkpoint_dir, model, optimizer)
    for now, then in zip(values(model), wanted, strict=True):
        assert torch.equal(now, then)
    return model, optimizer


def values(model: nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for value in (*model.parameters(), *model.buffers())]


@each_rank(1, 2)
def test_training_goes_on_during_a_save_of_a_consistent_snapshot(tmp_path: Path) -> None:
    """It goes on while nothing can be written yet; the next save waits for the first."""
    write, there_is_room = checkpoint_store.write_tensors, threading.Event()

    def slowly(*args: Any) -> Any:
        assert there_is_room.wait(60)
        return write(*args)

    model, optimizer = fresh()
    train(model, optimizer, 2)
    store = opened(tmp_path, asynchronous=True)
    before = values(model)
    with patch.object(checkpoint_store, "write_tensors", slowly):
        store.save(2, model, optimizer, extra={}, facts={}, best=None)
        assert store.busy
        assert store.under_way
        store.settle()
        assert store.busy
        train(model, optimizer, 2, start=2)
        assert steps_in(tmp_path) == []
        threading.Timer(0.3, there_is_room.set).start()
        store.save(4, model, optimizer, extra={}, facts={}, best=None)
        assert steps_in(tmp_path) == [2]
        store.finish()
    assert not store.under_way
    assert steps_in(tmp_path) == [2, 4]
    other, its_optimizer = assert_holds(tmp_path / step_name(2), before)
    train(other, its_optimizer, 2, start=2)
    assert all(torch.equal(a, b) for a, b in zip(values(model), values(other), strict=True))


@each_rank(2, transport="auto")
def test_only_an_update_waits_for_the_copy(tmp_path: Path) -> None:
    """A forward does not; the copy is of the state before both."""
    copy, forward_is_over = checkpoint_store.Snapshot.copy, threading.Event()

    def slowly(memory: checkpoint_store.Snapshot, tensors: Any) -> Any:
        assert forward_is_over.wait(60)
        return copy(memory, tensors)

    model, optimizer = fresh()
    train(model, optimizer, 1)
    store = opened(tmp_path, asynchronous=True)
    with patch.object(checkpoint_store.Snapshot, "copy", slowly):
        before = values(model)
        store.save(1, model, optimizer, extra={}, facts={}, best=None)
        model(torch.randn(4, 3, 5, 5))  # moves the running statistics
        threading.Timer(0.2, forward_is_over.set).start()
        store.settle()
        assert forward_is_over.is_set()
        train(model, optimizer, 1)
        store.finish()
    assert_holds(tmp_path / step_name(1), before)


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "rank-00001.safetensors")


@pytest.mark.parametrize(
    ("asynchronous", "call", "error", "reason"),
    [
        (False, "finish", FULL, "No space left on device"),
        (True, "advance", FULL, "No space left on device"),
        (True, "finish", MemoryError("no room for a copy"), "MemoryError no room for a copy"),
        (True, "save", FULL, "No space left on device"),
    ],
)
@each_rank(2, transport="auto")
def test_a_failed_save_is_heard_everywhere_and_the_old_one_stays(
    tmp_path: Path, asynchronous: bool, call: str, error: Exception, reason: str
) -> None:
    model, optimizer = fresh()
    train(model, optimizer, 1)
    store = opened(tmp_path, asynchronous=asynchronous)
    fill(store, [1])
    write = checkpoint_store.write_tensors

    def fails(place: Path, *args: Any) -> Any:
        if dist.get_rank() == 1:
            raise error
        return write(place, *args)

    def save_and_call() -> None:
        store.save(2, model, optimizer, extra={}, facts={}, best=None)
        while store.busy:
            time.sleep(0.01)
        {"advance": store.advance, "finish": store.finish, "save": lambda: fill(store, [3])}[call]()

    with patch.object(checkpoint_store, "write_tensors", fails):
        text = raised_soon(checkpoint.SaveFailed, save_and_call)
    assert text == f"{tmp_path}/step-00000002 was not saved: rank 1: rank-00001.safetensors: {reason}"
    assert not store.under_way
    assert store.newest().step == 1
    fill(store, [4])
    comm.barrier()
    assert steps_in(tmp_path) == [1, 4]

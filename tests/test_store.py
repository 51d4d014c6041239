"""A run's checkpoints: the newest whole one, how many are kept, and saves that training does not wait for."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardtrain import checkpoint, comm
from shardtrain.checkpoint import store as checkpoint_store
from shardtrain.checkpoint.loading import load_into
from shardtrain.checkpoint.manifest import Damaged
from shardtrain.checkpoint.store import Store, newest, step_name, steps_in

from small import Block, OddNet, shard, train

Ranks = Callable[..., list[Any]]
CPU = torch.device("cpu")


def opened(path: str, keep: int = 2, asynchronous: bool = False) -> Store:
    return Store(Path(path), comm.open_transport(), CPU, keep=keep, asynchronous=asynchronous)


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


def keeps(path: str, keep: int, best: int | None, asynchronous: bool) -> tuple[list[int], int]:
    store = opened(path, keep, asynchronous)
    fill(store, [1, 2, 30, 100, 101], best)
    assert store.latest == 101
    comm.barrier()
    return steps_in(Path(path)), store.newest().step


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("keep", "best", "left"), [(2, None, [100, 101]), (1, 2, [2, 101]), (3, 77, [30, 100, 101])]
)
def test_the_newest_and_the_best_are_kept(
    on_ranks: Ranks, tmp_path: Path, keep: int, best: int | None, left: list[int], asynchronous: bool
) -> None:
    assert on_ranks(2, keeps, str(tmp_path / "c"), keep, best, asynchronous) == [(left, 101)] * 2
    assert {path.name for path in (tmp_path / "c").iterdir()} == {step_name(step) for step in left}


def falls_back(path: str) -> Any:
    store, folder = opened(path, keep=3), Path(path)
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
    if dist.get_rank() == 0:
        store.clear(found.damaged)
    comm.barrier()
    fill(store, [30])  # its place is free again
    return found.step, [text.partition("c/")[2] for _, text in found.damaged]


def test_the_newest_whole_one_is_found_and_damaged_ones_are_set_aside(
    on_ranks: Ranks, tmp_path: Path
) -> None:
    step, texts = on_ranks(2, falls_back, str(tmp_path / "c"))[1]
    assert step == 10
    assert texts[0].startswith(
        "step-00000030 is damaged: rank 1: rank-00001.safetensors has 100 bytes, expected"
    )
    assert texts[1] == "step-00000025 is damaged: it holds step 20"
    names = sorted(path.name[:21] for path in (tmp_path / "c").iterdir())
    assert names == [
        "damaged-step-00000025",
        "damaged-step-00000030",
        "step-00000010",
        "step-00000030",
        "step-00000099",
        "step-note",
    ]


def test_no_whole_one_is_an_error_and_none_at_all_is_not(tmp_path: Path) -> None:
    alone = comm.Alone()
    assert newest(tmp_path / "absent", alone, CPU).opened is None
    (tmp_path / "step-00000001").mkdir()
    with pytest.raises(
        Damaged, match=r"no checkpoint is complete: .*step-00000001 .*manifest.json is missing"
    ):
        newest(tmp_path, alone, CPU)


def slow_disk(path: str) -> Any:
    """Trains on while nothing can be written yet, then loads what was saved."""
    write, there_is_room = checkpoint_store.write_tensors, threading.Event()

    def slowly(*args: Any) -> Any:
        assert there_is_room.wait(60)
        return write(*args)

    model, optimizer = fresh()
    train(model, optimizer, 2)
    store = opened(path, asynchronous=True)
    before = [p.detach().clone() for p in model.parameters()]
    checkpoint_store.write_tensors = slowly  # type: ignore[assignment]
    try:
        store.save(2, model, optimizer, extra={}, facts={}, best=None)
        assert store.busy
        assert store.under_way
        store.settle()
        assert store.busy
        train(model, optimizer, 2, start=2)
        assert steps_in(Path(path)) == []
        threading.Timer(0.5, there_is_room.set).start()
        store.save(4, model, optimizer, extra={}, facts={}, best=None)  # waits for the first
        assert steps_in(Path(path)) == [2]
        assert store.exposed_s > 0.2
        store.finish()
    finally:
        checkpoint_store.write_tensors = write
    assert not store.under_way
    assert steps_in(Path(path)) == [2, 4]
    other, its_optimizer = fresh()
    checkpoint.load(Path(path) / step_name(2), other, its_optimizer)
    for now, then in zip(other.parameters(), before, strict=True):
        assert torch.equal(now, then)
    train(other, its_optimizer, 2, start=2)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("world", [1, 2])
def test_training_goes_on_during_a_save_of_a_consistent_snapshot(
    ranks: Ranks, tmp_path: Path, world: int
) -> None:
    ranks(world, slow_disk, str(tmp_path))


def slow_copy(path: str) -> None:
    """An update waits for the copy and a forward does not; the copy is of the state before both."""
    copy, forward_is_over = checkpoint_store.Snapshot.copy, threading.Event()

    def slowly(memory: checkpoint_store.Snapshot, tensors: Any) -> Any:
        assert forward_is_over.wait(60)
        return copy(memory, tensors)

    model, optimizer = fresh()
    train(model, optimizer, 1)
    store = opened(path, asynchronous=True)
    with patch.object(checkpoint_store.Snapshot, "copy", slowly):
        before = [value.detach().clone() for value in [*model.parameters(), *model.buffers()]]
        store.save(1, model, optimizer, extra={}, facts={}, best=None)
        model(torch.randn(4, 3, 5, 5))  # moves the running statistics
        threading.Timer(0.4, forward_is_over.set).start()
        store.settle()
        assert forward_is_over.is_set()
        train(model, optimizer, 1)
        store.finish()
    other, its_optimizer = fresh()
    checkpoint.load(Path(path) / step_name(1), other, its_optimizer)
    for now, then in zip([*other.parameters(), *other.buffers()], before, strict=True):
        assert torch.equal(now, then)


def test_only_an_update_waits_for_the_copy(on_ranks: Ranks, tmp_path: Path) -> None:
    on_ranks(2, slow_copy, str(tmp_path))


def thread_fails(path: str) -> str:
    def fails(memory: checkpoint_store.Snapshot, tensors: Any) -> Any:
        raise MemoryError("no room for a copy")

    model, optimizer = fresh()
    store = opened(path, asynchronous=True)
    with patch.object(checkpoint_store.Snapshot, "copy", fails):
        store.save(1, model, optimizer, extra={}, facts={}, best=None)
        store.settle()
        with pytest.raises(checkpoint.SaveFailed) as caught:
            store.finish()
    return str(caught.value)


def test_no_error_of_the_thread_is_lost(on_ranks: Ranks, tmp_path: Path) -> None:
    text = "rank 1: rank-00001.safetensors: MemoryError no room for a copy"
    assert all(text in message for message in on_ranks(2, thread_fails, str(tmp_path)))


def full_disk(path: str, asynchronous: bool, call: str) -> str:
    model, optimizer = fresh()
    train(model, optimizer, 1)
    store = opened(path, asynchronous=asynchronous)
    fill(store, [1])
    store.finish()
    before = checkpoint_store.write_tensors

    def fails(place: Path, *args: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place))

    if dist.get_rank() == 1:
        checkpoint_store.write_tensors = fails  # type: ignore[assignment]
    try:
        with pytest.raises(checkpoint.SaveFailed) as caught:  # noqa: PT012
            store.save(2, model, optimizer, extra={}, facts={}, best=None)
            while store.busy:
                time.sleep(0.01)
            {"advance": store.advance, "finish": store.finish, "save": lambda: fill(store, [3])}[call]()
    finally:
        checkpoint_store.write_tensors = before
    assert not store.under_way
    assert store.newest().step == 1
    fill(store, [4])
    comm.barrier()
    assert steps_in(Path(path)) == [1, 4]
    return str(caught.value)


@pytest.mark.parametrize(
    ("asynchronous", "call"), [(False, "finish"), (True, "advance"), (True, "finish"), (True, "save")]
)
def test_a_failed_save_is_heard_everywhere_and_the_old_one_stays(
    on_ranks: Ranks, tmp_path: Path, asynchronous: bool, call: str
) -> None:
    text = f"{tmp_path}/step-00000002 was not saved: rank 1: rank-00001.safetensors: No space left on device"
    assert on_ranks(2, full_disk, str(tmp_path), asynchronous, call) == [text] * 2


def test_what_newest_found_is_loaded_without_reading_it_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDTRAIN_TEST_TRANSPORT", "auto")
    store = opened(str(tmp_path))
    model, optimizer = fresh()
    store.save(7, model, optimizer, extra=[7], facts={"why": "test"}, best=None)
    found = store.newest()
    assert found.opened is not None
    assert found.opened.manifest.facts == {"step": 7, "why": "test"}
    other, its_optimizer = fresh()
    assert load_into(found.opened, other, its_optimizer) == [7]

"""Checkpoints: what is saved comes back, at any world size; damage is refused; a run's checkpoints."""

import errno
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import shardtrain
from shardtrain import checkpoint, comm
from shardtrain.checkpoint import store as checkpoint_store
from shardtrain.checkpoint.loading import load_into, open_checkpoint
from shardtrain.checkpoint.manifest import digest_line
from shardtrain.checkpoint.store import Store, newest, step_name, steps_in
from shardtrain.errors import Damaged

from pool import Ranks, each_rank, once
from small import Block, OddNet, Parts, raised_soon, sgd, shard, train, whole_state
from tiny import files_of

MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "adamw": lambda model: torch.optim.AdamW(
        [{"params": [p], "lr": 0.01 * (1 + i % 3)} for i, p in enumerate(model.parameters())]
    ),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.02, fused=True),
    "asgd": lambda model: torch.optim.ASGD(model.parameters()),  # has numbers like a 0-dim parameter's state
}


def fresh(
    kind: str = "adamw", seed: int = 0, make: Callable[[], nn.Module] = OddNet
) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = shard(make(), units=[Block])
    return model, MAKERS[kind](model)


def late_layer() -> nn.Module:
    """No rank uses the last layer before the save; rank 0 does after it."""
    parts = {"net": OddNet(), "late": nn.Linear(5, 5), "uses": False}
    return Parts(lambda self, x: self.late(self.net(x)) if self.uses else self.net(x), **parts)


def saves(path: str) -> dict[str, torch.Tensor]:
    model, optimizer = fresh()
    train(model, optimizer, 2)
    checkpoint.save(path, model, optimizer, extra={"rank": dist.get_rank()})
    return whole_state(model, optimizer)


@pytest.mark.smoke
@pytest.mark.parametrize("kind", list(MAKERS))
@each_rank(3)
def test_a_load_continues_bit_for_bit(tmp_path: Path, kind: str) -> None:
    """Saved after two steps and loaded into another model: further losses and state are the same bits."""
    path = tmp_path / "deep/er/one"
    model, optimizer = fresh(kind, make=late_layer)
    train(model, optimizer, 2)
    steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5, 5])  # a Counter of integers
    extra = {
        "rank": dist.get_rank(),
        "at": (2, torch.arange(3)),
        "steps": steps.state_dict(),
        "of": {1: [{2: 3}]},
    }
    checkpoint.save(path, model, optimizer, extra=extra)
    other, its_optimizer = fresh(kind, seed=1, make=late_layer)
    train(other, its_optimizer, 0 if kind == "asgd" else 1)  # its first step may come after the load
    extra = checkpoint.load(path, other, its_optimizer)
    assert extra["rank"] == dist.get_rank()
    assert (extra["at"][0], extra["at"][1].tolist()) == (2, [0, 1, 2])
    assert extra["of"] == {1: [{2: 3}]}
    steps = torch.optim.lr_scheduler.MultiStepLR(its_optimizer, [1])
    steps.load_state_dict(extra["steps"])
    assert steps.milestones == Counter({3: 1, 5: 2})
    assert sorted(steps.milestones.elements()) == [3, 5, 5]
    model.uses = dist.get_rank() == 0
    other.uses = model.uses
    assert train(other, its_optimizer, 3, start=2) == train(model, optimizer, 3, start=2)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(*[param.as_subclass(torch.Tensor) for param in (ours, theirs)])
        for key, value in optimizer.state[ours].items() if len(ours) else ():
            torch.testing.assert_close(its_optimizer.state[theirs][key], value, rtol=0, atol=0)
    for ours, theirs in zip(model.buffers(), other.buffers(), strict=True):
        assert torch.equal(ours, theirs)  # each rank's own running statistics


def test_stock_tools_read_a_checkpoint(on_ranks: Ranks, tmp_path: Path) -> None:
    model = on_ranks(2, saves, str(tmp_path / "one"))[0]
    files = [load_file(tmp_path / f"one/rank-0000{rank}.safetensors") for rank in (0, 1)]
    pieces = [file.get("parameters/blocks.1.conv.weight", torch.empty(0)) for file in files]
    assert torch.equal(torch.cat(pieces), model["blocks.1.conv.weight"].flatten())
    assert torch.equal(files[0]["averaged/blocks.0.norm.running_mean"], model["blocks.0.norm.running_mean"])
    subprocess.run(["sha256sum", "--check", "--quiet", "manifest.sha256"], cwd=tmp_path / "one", check=True)
    manifest = json.loads((tmp_path / "one/manifest.json").read_text())
    for name, record in manifest["files"].items():
        line = f"{record['sha256']}  {tmp_path}/one/{name}"
        subprocess.run(["sha256sum", "--check", "--quiet"], input=line, text=True, check=True)
    assert manifest["tensors"]["parameters/fc.weight"]["shape"] == [5, 7]
    assert manifest["versions"]["torch"]


def test_files_honour_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        checkpoint.save(tmp_path / "one", shardtrain.shard(nn.Linear(3, 2)))
    finally:
        os.umask(before)
    assert (tmp_path / "one").stat().st_mode & 0o777 == 0o750
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "one").iterdir()} == {0o640}


def _another_grouping() -> Any:
    model, _ = fresh()
    groups = [{"params": [param]} for param in model.parameters()]
    groups[0], groups[1] = groups[1], groups[0]
    return model, torch.optim.AdamW(groups)


MISFITS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    # `test_state.py` has what else may not fit a model
    "wider": (
        lambda: (shard(OddNet(9), units=[Block]), None),
        ["stem.weight has shape (7, 3, 3, 3), expected (9, 3, 3, 3)", "running_mean has shape (7,)"],
    ),
    "another optimizer": (lambda: fresh("sgd"), ["its optimizer is AdamW, expected SGD"]),
    "one group": (lambda: fresh("fused"), ["its optimizer has 14 groups, expected 1"]),
    "another grouping": (
        _another_grouping,
        ["is unexpected in its optimizer's group 0", "optimizer's group 1"],
    ),
    "no optimizer": (fresh, ["it was saved without an optimizer, but AdamW is to be loaded"]),
}


saved = once(saves, "one")


def refused(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> str:
    """Return why ``path`` does not load into the model and the optimizer, which stay as they were."""
    tensors = [tensor.as_subclass(torch.Tensor) for tensor in (*model.parameters(), *model.buffers())]
    copies = [tensor.detach().clone() for tensor in tensors]
    with pytest.raises(ValueError, match=r"does not fit, nothing was loaded: |is damaged: ") as caught:
        checkpoint.load(path, model, optimizer)
    assert all(map(torch.equal, tensors, copies))
    assert optimizer is None or not optimizer.state
    return str(caught.value)


@pytest.mark.parametrize("misfit", list(MISFITS))
@each_rank(3, transport="auto")
def test_what_does_not_fit_is_named_on_every_rank(tmp_path: Path, saved: Path, misfit: str) -> None:
    if misfit == "no optimizer":
        saved = tmp_path / "alone"
        checkpoint.save(saved, fresh()[0])
    make, texts = MISFITS[misfit]
    message = refused(saved, *make())
    for text in ("does not fit, nothing was loaded: ", *texts):
        assert text in message


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Forge the manifest, digest and all."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    write_manifest(folder, json.dumps(manifest))


def write_manifest(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text)
    (folder / "manifest.sha256").write_text(digest_line(text))


class Plant:
    """A pickle that makes a directory when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def _plant(folder: Path, name: str) -> None:
    """Put a pickle in place of a file, with the digest that the manifest should have for it."""
    path = folder / name
    torch.save(Plant(folder.parent / "planted"), path)
    record = {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    if name == DATA:
        rewrite(folder, lambda manifest: manifest["files"].update({name: record}))


DATA = "rank-00001.safetensors"
OTHER = "rank-00000.safetensors"


def forged_file(**facts: Any) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest["files"][DATA].update(facts)


def forged(name: str, **facts: Any) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest["tensors"][f"parameters/{name}"].update(facts)


# Why a manifest whose digest is right is refused, and what was changed in it.
FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "names the file '../x.safetensors', expected only": lambda m: m["files"].update(
        {"../x.safetensors": m["files"].pop(DATA)}
    ),
    "version 3, expected 'shardtrain checkpoint' version 2; load it with the release that wrote it": (
        lambda m: m.update(version=3)
    ),
    f"bytes, expected {1 << 80}": forged_file(bytes=1 << 80),
    f"has 2 files of {1 << 40} ranks, expected one per rank": lambda m: m.update(world_size=1 << 40),
    "has 3 files of 2 ranks, expected one per rank": lambda m: m["files"].update(
        {"rank-00002.safetensors": m["files"][DATA]}
    ),
    f"has the slice ('{OTHER}', 1, 5) of parameters/fc.bias, expected one from 0 on": (
        forged("fc.bias", slices=[[OTHER, 1, 5]])
    ),
    "has slices of parameters/fc.bias up to 0, expected up to 5": forged("fc.bias", slices=[]),
    "gives parameters/fc.weight the stride (70, 10), which does not fill the shape (5, 7)": (
        forged("fc.weight", stride=[70, 10])
    ),
    "has an unknown kind of optimizer state: {'file': 'rank-00000.safetensors'}": (
        lambda m: m["optimizer"]["values"].update({"fc.bias": {"step": {"file": OTHER}}})
    ),
    "manifest.json is invalid: KeyError 'shape'": lambda m: m["tensors"]["parameters/fc.weight"].pop("shape"),
}
# Why a checkpoint is damaged, and how. What is done to every file of one, below, is not repeated here.
DAMAGES: dict[str, Callable[[Path], object]] = {
    f"rank 0: {OTHER} does not match its digest; rank 1: {DATA} does not match its digest": (
        lambda f: (_flip(f / DATA), _flip(f / OTHER))
    ),
    f"{DATA} is not a regular file": lambda f: ((f / DATA).unlink(), os.mkfifo(f / DATA)),
    "manifest.json has 1099511627776 bytes, expected at most 268435456": (
        lambda f: os.truncate(f / "manifest.json", 1 << 40)
    ),
    # Sizes and digests that fit do not make a tensor that is not there.
    "rank-00001.safetensors has parameters/stem.weight as F32 (128,), expected F32 (61,)": lambda f: (
        shutil.copy(f / OTHER, f / DATA),
        rewrite(f, lambda m: m["files"].update({DATA: m["files"][OTHER]})),
    ),
    f"{DATA}: Error while deserializing header": lambda f: _plant(f, DATA),
    "manifest.json is not UTF-8": lambda f: _plant(f, "manifest.json"),
    "manifest.json is not valid JSON": lambda f: write_manifest(f, "[" * 100_000),
}


@each_rank(2, transport="auto")
def test_a_path_with_a_nul_is_named(tmp_path: Path) -> None:
    with pytest.raises(checkpoint.Damaged, match="is damaged: rank 0: embedded null byte"):
        checkpoint.load(tmp_path / "a\0b", *fresh())


# Options of the optimizer that are of another kind than its own.
OPTIONS = [("betas", [0.9]), ("betas", [0.9, "0.99"]), ("lr", True), ("eps", None), ("maximize", 0)]


@pytest.mark.parametrize(("key", "value"), OPTIONS)
@each_rank(2, transport="auto")
def test_an_option_of_another_kind_is_refused(tmp_path: Path, saved: Path, key: str, value: Any) -> None:
    if dist.get_rank() == 0:
        folder = shutil.copytree(saved, tmp_path / "one")
        rewrite(folder, lambda m: m["optimizer"]["groups"][3]["options"].update({key: value}))
    dist.barrier()
    text = f"nothing was loaded: {key}={str(value)!r} in its optimizer's group 3, expected the kind of "
    assert text in refused(tmp_path / "one", *fresh("adamw"))


@pytest.mark.parametrize("reason", [*DAMAGES, *FORGERIES])
@each_rank(2, transport="auto")
def test_damage_is_named_on_every_rank(tmp_path: Path, saved: Path, reason: str) -> None:
    if dist.get_rank() == 0:
        folder = shutil.copytree(saved, tmp_path / "one")
        if reason in DAMAGES:
            DAMAGES[reason](folder)
        else:
            rewrite(folder, FORGERIES[reason])
    dist.barrier()
    message = refused(tmp_path / "one", *fresh())
    assert "is damaged: " in message
    assert reason in message
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize(
    ("how", "path", "text"),
    [
        ("extra", "one", "rank 1: extra['a'][1] is a set, expected tensors, numbers, texts, None, lists and"),
        (
            "key",
            "one",
            "rank 1: extra has the key 1.5, expected texts and integers: store pairs",
        ),
        ("piece", "one", "rank 1: extra[0] is a rank's piece of fc.bias, which only its model can load"),
        pytest.param(
            *("long", "one", "rank 1: rank-00001.safetensors: ValueError names and texts take 1000"),
            marks=pytest.mark.long,
        ),
        ("deep", "one", "rank 1: maximum recursion depth exceeded"),
        ("group", "one", "rank 1 holds another model, optimizer or facts than rank 0"),
        ("stranger", "one", "optimizer group 14 holds 1 parameters that are not the module's; pass the opt"),
        ("shape", "one", "the optimizer's row of stem.weight has shape (3,), which cannot be cut like"),
        ("state", "one", "rank 1: the optimizer's state of stem.weight is {'step': {'value': 1}}, expected"),
        ("path", "old", "old: exists already, and a checkpoint is never overwritten"),
        ("path", "file/one", "File exists: "),
        ("path", "a\0b/one", "embedded null byte"),
        ("path", "a\0b", "embedded null byte"),
    ],
)
@each_rank(2, transport="auto")
def test_a_save_fails_everywhere_with_its_reason(tmp_path: Path, how: str, path: str, text: str) -> None:
    (tmp_path / "old").mkdir(exist_ok=True)
    (tmp_path / "file").write_text("")
    model, optimizer = fresh()
    train(model, optimizer, 1)
    odd = dist.get_rank() == 1
    extras = {"extra": {"a": [1, {2, 3}]}, "key": {1.5: 2}, "long": ["x" * 100_000_000], "deep": []}
    extras |= {"piece": [model.state_dict()["fc.bias"]]}
    extras["deep"].append(extras["deep"])
    extra = extras.get(how) if odd else None
    if how == "group" and odd:
        optimizer.param_groups[0]["lr"] = 7.0
    if how == "stranger":
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    if how == "shape":
        optimizer.state[model.stem.weight]["row"] = torch.zeros(3)
    if how == "state" and odd:
        optimizer.state[model.stem.weight]["step"] = 1
    with pytest.raises(checkpoint.SaveFailed) as caught:
        checkpoint.save(tmp_path / path, model, optimizer, extra=extra)
    assert text in str(caught.value).partition(" was not saved: ")[2]
    optimizer.state.pop(model.stem.weight)
    train(model, optimizer, 1)  # training may go on
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "old"]


@each_rank(2, transport="auto")
def test_averages_that_are_left_out_are_told(tmp_path: Path) -> None:
    model, _ = fresh()
    ema = shardtrain.optim.Ema(model, 0.5)
    checkpoint.save(tmp_path / "one", model, averages=ema.averages)
    with pytest.warns(UserWarning, match=r"one has moving averages .* pass averages=ema\.averages"):
        checkpoint.load(tmp_path / "one", model)
    checkpoint.load(tmp_path / "one", model, averages=ema.averages)
    averages = {**ema.averages}
    whole = averages.pop(model.fc.weight).new_zeros(5, 7)
    for spoiled, text in (
        (averages, "averages lacks fc.weight"),
        ({**averages, model.fc.weight: whole}, "averages has fc.weight of shape (5, 7), expected "),
    ):
        with pytest.raises(checkpoint.SaveFailed, match=re.escape(text)):
            checkpoint.save(tmp_path / "two", model, averages=spoiled)
        with pytest.raises(ValueError, match=r"nothing was loaded: .*" + re.escape(text)):
            checkpoint.load(tmp_path / "one", model, averages=spoiled)


# a run's checkpoints: the newest whole one, how many are kept, and saves that training does not wait for


def opened(path: Path, keep: int = 2) -> Store:
    return Store(path, comm.plain_transport(), keep=keep)


def fill(
    store: Store, steps: Iterable[int], best: int | None = None, trained: Any = None, wait: bool = True
) -> None:
    """Train and save; ``wait``: for the end of each save."""
    model, optimizer = trained or fresh()
    for step in steps:
        train(model, optimizer, 1, start=step)
        store.save(step, model, optimizer, extra={}, facts={}, best=best)
        if wait:
            store.finish()
    store.finish()


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(("keep", "best", "left"), [(1, 2, [2, 101]), (3, 77, [30, 100, 101])])
@each_rank(2, transport="auto")
def test_the_newest_and_the_best_are_kept(
    tmp_path: Path, keep: int, best: int, left: list[int], wait: bool
) -> None:
    store = opened(tmp_path, keep)
    fill(store, [1, 2, 30, 100, 101], best, wait=wait)
    assert store.latest == 101
    comm.barrier()
    assert store.newest().step == 101
    assert {path.name for path in tmp_path.iterdir()} == {step_name(step) for step in left}


@each_rank(2, transport="auto")
def test_the_newest_whole_one_is_found_and_damaged_ones_are_set_aside(tmp_path: Path) -> None:
    store = opened(tmp_path, keep=3)
    folder = tmp_path
    fill(store, [10, 20, 30])
    if dist.get_rank() == 0:
        (folder / ".tmp-step-00000040-abcd").mkdir()
        (folder / ".tmp-step-00000040-abcd/rank-00000.safetensors").write_text("half")
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
    left = [*(f"damaged-step-000000{step}" for step in (25, 30)), "step-00000010", "step-00000030"]
    names = sorted(path.name[:21] for path in folder.iterdir())
    assert names == [*left, "step-note"]


@each_rank(2, transport="auto")
def test_a_directory_out_of_reach_of_rank_0_is_told_by_all(tmp_path: Path) -> None:
    def closed(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    with patch.object(Path, "is_dir", closed), pytest.raises(Damaged, match=r"rank 0: .*Permission denied"):
        newest(tmp_path, comm.plain_transport())


def assert_holds(checkpoint_dir: Path, wanted: list[torch.Tensor]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """What ``checkpoint_dir`` loads has the parameters and buffers ``wanted``."""
    model, optimizer = fresh()
    checkpoint.load(checkpoint_dir, model, optimizer)
    for now, then in zip(values(model), wanted, strict=True):
        assert torch.equal(now, then)
    return model, optimizer


def values(model: nn.Module) -> list[torch.Tensor]:
    tensors = [*model.parameters(), *model.buffers()]
    return [value.as_subclass(torch.Tensor).detach().clone() for value in tensors]


@pytest.mark.long
@each_rank(1, 2)
def test_training_goes_on_during_a_save_of_a_consistent_snapshot(tmp_path: Path) -> None:
    """It goes on while nothing can be written yet; the next save waits for the first."""
    write = checkpoint_store.write_tensors
    there_is_room = threading.Event()

    def slowly(*args: Any) -> Any:
        assert there_is_room.wait(60)
        return write(*args)

    model, optimizer = fresh()
    train(model, optimizer, 2)
    store = opened(tmp_path)
    before = values(model)
    with patch.object(checkpoint_store, "write_tensors", slowly):
        store.save(2, model, optimizer, extra={}, facts={}, best=None)
        assert store.busy
        assert store.under_way
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


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "rank-00001.safetensors")


@pytest.mark.long
@pytest.mark.parametrize(
    ("call", "error", "reason"),
    [
        ("advance", FULL, "No space left on device"),
        ("finish", MemoryError("no room for a copy"), "MemoryError no room for a copy"),
        ("save", FULL, "No space left on device"),
    ],
)
@each_rank(2, transport="auto")
def test_a_failed_save_is_heard_everywhere_and_the_old_one_stays(
    tmp_path: Path, call: str, error: Exception, reason: str
) -> None:
    model, optimizer = fresh()
    train(model, optimizer, 1)
    store = opened(tmp_path)
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


# ranks that are killed in the middle of a save; damage to any file


class Kill(NamedTuple):
    """A SIGKILL of ``rank`` ``when`` ("before", "after") its ``count``-th call of ``os.<function>``."""

    rank: int
    when: str
    function: str
    count: int


def works(folder: str, steps: int, keep: int, wait: bool, kill: Kill | None = None) -> None:
    """Continue from the newest checkpoint, train on, save every step."""
    if kill is not None and kill.rank == comm.rank():
        _arm(kill)
    model, optimizer = fresh()
    store = opened(Path(folder), keep)
    start = store.newest()
    if comm.rank() == 0:
        store.clear(start.damaged)
    if start.opened is not None:
        load_into(start.opened, model, optimizer)
    fill(store, range(start.step + 1, steps + 1), trained=(model, optimizer), wait=wait)


POINTS = {
    "before the temporary directory is made": Kill(0, "before", "mkdir", 1),
    "before a data file": Kill(1, "before", "write", 1),
    "in the middle of a data file": Kill(1, "before", "write", 9),
    "before a data file is on the disk": Kill(1, "before", "fsync", 1),
    "after a data file is on the disk": Kill(1, "after", "fsync", 1),
    "in the manifest": Kill(0, "before", "fsync", 2),
    "between the manifest and its digest": Kill(0, "after", "fsync", 2),
    "before the rename": Kill(0, "before", "rename", 1),
    "after the rename": Kill(0, "after", "rename", 1),
    "after the commit": Kill(0, "after", "fsync", 5),
    "in the deletion of an old checkpoint": Kill(0, "after", "rename", 2),
}


def _arm(kill: Kill) -> None:
    """Make this process die there."""
    original = getattr(os, kill.function)
    calls = [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if (calls[0], kill.when) == (kill.count, "before"):
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if calls[0] == kill.count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(os, kill.function, counted)


def survivor(folder: Path, undisturbed: Path) -> int:
    """Return the step that the next start finds: complete, bit for bit."""
    start = newest(folder, comm.plain_transport())
    assert not start.damaged, start.damaged
    assert files_of(folder / step_name(start.step)) == files_of(undisturbed / step_name(start.step))
    return start.step


four_steps = once(works, "", 4, 4, True)  # checkpoints of ranks that nobody disturbs


@pytest.fixture
def two_steps(four_steps: Path, tmp_path: Path) -> Path:
    for step in (1, 2):
        shutil.copytree(four_steps / step_name(step), tmp_path / step_name(step))
    return tmp_path


BRIEFLY = ("in the middle of a data file", "after the rename")
OFTEN = [(name, wait) for name in BRIEFLY for wait in (True, False)]
SELDOM = [(name, bool(i % 2)) for i, name in enumerate(POINTS) if name not in BRIEFLY]


@pytest.mark.parametrize(
    ("name", "wait"), [*OFTEN, *(pytest.param(*each, marks=pytest.mark.release) for each in SELDOM)]
)
def test_a_kill_in_a_save_leaves_a_complete_checkpoint(
    on_ranks: Ranks, four_steps: Path, two_steps: Path, name: str, wait: bool
) -> None:
    """And the ranks that are started again leave nothing of it behind."""
    with pytest.raises(AssertionError, match=rf"ranks \[{POINTS[name].rank}\] died"):  # and the other left
        on_ranks(2, works, str(two_steps), 3, 2, wait, POINTS[name])
    assert survivor(two_steps, four_steps) >= 2
    on_ranks(2, works, str(two_steps), 4, 2, wait)
    assert survivor(two_steps, four_steps) == 4
    assert sorted(path.name for path in two_steps.iterdir()) == [step_name(3), step_name(4)]


DAMAGED_FILES: dict[str, Callable[[Path], object]] = {
    "cut short by a byte": lambda file: os.truncate(file, file.stat().st_size - 1),
    "emptied": lambda file: os.truncate(file, 0),
    "with a bit flipped": _flip,
    "deleted": lambda file: file.unlink(),
    "from another step": lambda file: shutil.copy(file.parents[1] / step_name(1) / file.name, file),
    "another rank's": lambda file: shutil.copy(file.parent / min({DATA, OTHER} - {file.name}), file),
    "a link to itself elsewhere": lambda file: file.symlink_to(file.rename(file.parents[1] / "elsewhere")),
    "a directory": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("name", DAMAGED_FILES)
def test_damaged_files_are_noticed(two_steps: Path, name: str) -> None:
    """Loading step 2 fails and names the file, and the next start falls back to step 1."""
    path = two_steps / step_name(2)
    for file in sorted(path.iterdir()):
        shutil.copytree(path, two_steps / "keep")
        DAMAGED_FILES[name](file)
        named = "manifest" if file.name.startswith("manifest") else file.name
        with pytest.raises(Damaged, match=re.escape(named)):
            open_checkpoint(path, comm.plain_transport())
        assert newest(two_steps, comm.plain_transport()).step == 1, "no fall-back"
        shutil.rmtree(path)
        (two_steps / "keep").rename(path)

"""Checkpoints under torture: ranks killed in the middle of a save, bit flips, damaged files."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import shardtrain
from shardtrain import comm
from shardtrain.checkpoint.loading import load_into, open_checkpoint
from shardtrain.checkpoint.manifest import Damaged
from shardtrain.checkpoint.store import Store, newest, step_name

import programs
from pool import Pool, Ranks
from small import Block, OddNet, train
from test_cli import PROGRAM, torchrun

WORLD = 2


# what is saved and how it is compared


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = shardtrain.shard(OddNet(), units=[Block])
    return model, torch.optim.AdamW(model.parameters())


def works(folder: str, steps: int, keep: int, asynchronous: bool, kill: Kill | None = None) -> None:
    """Continue from the newest checkpoint, train on, save every step."""
    if kill is not None and kill.rank == comm.rank():
        _arm(kill)
    model, optimizer = fresh()
    store = Store(Path(folder), comm.open_transport(), keep=keep, asynchronous=asynchronous)
    start = store.newest()
    if comm.rank() == 0:
        store.clear(start.damaged)
    if start.opened is not None:
        load_into(start.opened, model, optimizer)
    for step in range(start.step + 1, steps + 1):
        store.settle()
        train(model, optimizer, 1, start=step)
        store.save(step, model, optimizer, extra={"step": step}, facts={}, best=None)
    store.finish()


def files_of(path: Path) -> Any:
    """The digests of a checkpoint's files, which hold the same for the same state."""
    return json.loads((path / "manifest.json").read_text())["files"]


# ranks that can be killed


class Kill(NamedTuple):
    """End ``rank`` with SIGKILL ``when`` ("before", "after") the ``count``-th call of ``os.<function>``."""

    rank: int
    when: str
    function: str
    count: int


POINTS = {
    "before the temporary directory is made": Kill(0, "before", "mkdir", 1),
    "after the temporary directory is made": Kill(0, "after", "mkdir", 2),
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
    original, calls = getattr(os, kill.function), [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        try:
            if calls[0] == kill.count and kill.when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)
        finally:
            if calls[0] == kill.count:
                os.kill(os.getpid(), signal.SIGKILL)

    setattr(os, kill.function, counted)


def survivor(folder: Path, undisturbed: Path) -> int:
    """Return the step that the next start finds: complete, bit for bit."""
    start = newest(folder, comm.Alone())
    assert not start.damaged, start.damaged
    assert files_of(folder / step_name(start.step)) == files_of(undisturbed / step_name(start.step))
    return start.step


@pytest.fixture(scope="module")
def four_steps(_pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of four steps, of ranks that nobody disturbs."""
    folder = tmp_path_factory.mktemp("four")
    _pool.run("auto", WORLD, works, str(folder), 4, 4, False)
    return folder


@pytest.fixture
def two_steps(four_steps: Path, tmp_path: Path) -> Path:
    for step in (1, 2):
        shutil.copytree(four_steps / step_name(step), tmp_path / step_name(step))
    return tmp_path


BRIEFLY = ("in the middle of a data file", "after the rename")


OFTEN = [(name, asynchronous) for name in BRIEFLY for asynchronous in (False, True)]
SELDOM = [(name, bool(i % 2)) for i, name in enumerate(POINTS) if name not in BRIEFLY]


@pytest.mark.parametrize(
    ("name", "asynchronous"), [*OFTEN, *(pytest.param(*each, marks=pytest.mark.long) for each in SELDOM)]
)
def test_a_kill_in_a_save_leaves_a_complete_checkpoint(
    on_ranks: Ranks, four_steps: Path, two_steps: Path, name: str, asynchronous: bool
) -> None:
    """And the ranks that are started again leave nothing of it behind."""
    with pytest.raises(AssertionError, match=rf"ranks \[{POINTS[name].rank}\] died"):  # and the other left
        on_ranks(WORLD, works, str(two_steps), 3, 2, asynchronous, POINTS[name])
    assert survivor(two_steps, four_steps) >= 2
    on_ranks(WORLD, works, str(two_steps), 4, 2, asynchronous)
    assert survivor(two_steps, four_steps) == 4
    assert sorted(path.name for path in two_steps.iterdir()) == [step_name(3), step_name(4)]


# damage


def assert_noticed(place: Path, file: Path) -> None:
    """Loading step 2 fails and names the file, and the next start falls back to step 1."""
    name = "manifest" if file.name.startswith("manifest") else file.name
    with pytest.raises(Damaged, match=re.escape(name)):
        open_checkpoint(place / step_name(2), comm.Alone())
    assert newest(place, comm.Alone()).step == 1, "no fall-back"


def test_bit_flips_are_noticed(two_steps: Path) -> None:
    """Single bits, spread evenly over every file."""
    chance = random.Random(0)
    files = sorted((two_steps / step_name(2)).iterdir())
    for number in range(40):
        file = files[number % len(files)]
        intact = file.read_bytes()
        at = chance.randrange(len(intact))
        file.write_bytes(intact[:at] + bytes([intact[at] ^ (1 << chance.randrange(8))]) + intact[at + 1 :])
        assert_noticed(two_steps, file)
        file.write_bytes(intact)
    open_checkpoint(two_steps / step_name(2), comm.Alone())


def zero_tail(file: Path) -> None:
    data = file.read_bytes()
    kept = len(data) * 2 // 3
    file.write_bytes(data[:kept] + bytes(len(data) - kept))


def another_step_s(file: Path) -> None:
    shutil.copy(file.parents[1] / step_name(1) / file.name, file)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut short by a byte": lambda file: os.truncate(file, file.stat().st_size - 1),
    "emptied": lambda file: os.truncate(file, 0),
    "with a zeroed tail": zero_tail,
    "deleted": lambda file: file.unlink(),
    "from another step": another_step_s,
    "a link to itself elsewhere": lambda file: file.symlink_to(file.rename(file.parents[1] / "elsewhere")),
    "a directory": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_files_are_noticed(two_steps: Path, name: str) -> None:
    path = two_steps / step_name(2)
    for file in sorted(path.iterdir()):
        shutil.copytree(path, two_steps / "keep")
        DAMAGES[name](file)
        assert_noticed(two_steps, file)
        shutil.rmtree(path)
        (two_steps / "keep").rename(path)


def test_files_in_each_other_s_place_are_noticed(two_steps: Path) -> None:
    path = two_steps / step_name(2)
    first, second = (path / f"rank-0000{rank}.safetensors" for rank in (0, 1))
    swapped = first.rename(path / "x"), second.rename(first), (path / "x").rename(second)
    assert_noticed(two_steps, swapped[1])


# whole runs


RUN = """
    +recipe=resnet model=mobilenet_v3_small data=fake data.train_images=120
    data.val_images=12 train.batch_size=12 train.epochs=1 train.log_every=3 checkpoint.every_steps=5
    monitor.progress=lines
"""


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own
def test_a_worker_killed_under_torchrun_is_started_again(tmp_path: Path) -> None:
    """With ``--max-restarts``; what it saves last is, bit for bit, what an undisturbed run saves."""
    whole, restarted = tmp_path / "whole", tmp_path / "restarted"
    undisturbed = programs.ended(WORLD, *PROGRAM, *RUN.split(), f"run.dir={whole}", folder=tmp_path)
    assert undisturbed.codes == [0, 0]
    command = torchrun(WORLD, *RUN.split(), f"run.dir={restarted}", restarts=1)
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    told, killed = [], False
    with running, running.stdout as lines:  # type: ignore[union-attr]
        for line in lines:
            told.append(line)
            if not killed and re.match(r"step +\d", line):
                workers = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
                os.kill(int(random.Random(1).choice(workers)), signal.SIGKILL)
                killed = True
    assert running.returncode == 0, "".join(told[-60:])
    assert killed
    expected, found = (files_of(run / "checkpoints" / step_name(10)) for run in (whole, restarted))
    assert found == expected

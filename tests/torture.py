"""Checkpoints under torture: kills, bit flips, and whole runs killed again and again.

    python tests/torture.py              everything, at length (about a quarter of an hour on two cores)
    python tests/torture.py flips        one of: points kills flips files runs restarts

Every part is a generator that yields a line per case and raises at the first wrong result. The test-suite
runs a short form of each (`test_torture.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import shardtrain
from shardtrain import comm
from shardtrain.checkpoint.loading import load_into, open_checkpoint
from shardtrain.checkpoint.manifest import Damaged
from shardtrain.checkpoint.store import Store, newest, step_name, steps_in

import programs
from pool import forkserver
from small import Block, OddNet, train
from tiny import events_of

CPU = torch.device("cpu")
WORLD = 2


# --- what is saved and how it is compared


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = shardtrain.shard(OddNet(), units=[Block])
    return model, torch.optim.AdamW(model.parameters())


def open_store(folder: str, keep: int, asynchronous: bool) -> Store:
    return Store(Path(folder), comm.open_transport(), CPU, keep=keep, asynchronous=asynchronous)


def works(folder: str, steps: int, keep: int, asynchronous: bool) -> None:
    """Continue from the newest checkpoint, train on, save every step."""
    model, optimizer = fresh()
    store = open_store(folder, keep, asynchronous)
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


def content(path: Path) -> str:
    """Return a digest of everything that the checkpoint ``path`` loads into a single rank."""
    model, optimizer = fresh()
    extra = load_into(open_checkpoint(path, comm.Alone(), CPU), model, optimizer)
    digest = hashlib.sha256(json.dumps(extra).encode())
    states = [optimizer.state[param] for param in model.parameters()]
    for tensors in (shardtrain.full_state_dict(model), *states):
        for name, value in tensors.items():
            digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


# --- ranks that can be killed


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


def _rank(rank: int, meeting: str, kill: Kill | None, work: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what survivors say of the dead is not wanted here
    dist.init_process_group("gloo", store=dist.FileStore(meeting, WORLD), rank=rank, world_size=WORLD)
    if kill is not None and kill.rank == rank:
        _arm(kill)
    works(*work)
    dist.destroy_process_group()


@contextlib.contextmanager
def ranks(
    folder: Path, steps: int, keep: int = 2, asynchronous: bool = False, kill: Kill | None = None
) -> Iterator[list[Any]]:
    """Start two ranks that work on ``folder`` up to step ``steps``; they are gone when the block is left."""
    with tempfile.TemporaryDirectory() as meeting:
        arguments = (f"{meeting}/store", kill, (str(folder), steps, keep, asynchronous))
        started = [forkserver().Process(target=_rank, args=(rank, *arguments)) for rank in range(WORLD)]
        for process in started:
            process.start()
        try:
            yield started
        finally:
            for process in started:
                process.kill()
                process.join()


def undisturbed(folder: Path, steps: int, keep: int = 2) -> None:
    with ranks(folder, steps, keep) as started:
        for process in started:
            process.join(60)
        assert [process.exitcode for process in started] == [0] * WORLD, "the undisturbed ranks failed"


def expected(folder: Path, steps: int) -> dict[int, str]:
    """Return the content of every step's checkpoint, from ranks that nobody disturbs."""
    undisturbed(folder, steps, keep=steps)
    return {step: content(folder / step_name(step)) for step in steps_in(folder)}


def survivor(folder: Path, known: dict[int, str], at_least: int) -> int:
    """Return the step that the next start finds: complete, bit for bit, and not before ``at_least``."""
    start = newest(folder, comm.Alone(), CPU)
    assert not start.damaged, start.damaged
    assert start.step >= at_least, f"step {start.step} is found, but {at_least} was committed"
    assert not start.step or content(folder / step_name(start.step)) == known[start.step], start.step
    return start.step


def points(folder: Path, names: Sequence[str] = tuple(POINTS)) -> Iterator[str]:
    """SIGKILL of one rank at each of the named points of a save."""
    known = expected(folder / "expected", 4)
    for name in names:
        place = folder / "points"
        for step in (1, 2):
            shutil.copytree(folder / "expected" / step_name(step), place / step_name(step))
        with ranks(place, 3, kill=POINTS[name]) as started:
            for process in started:
                process.join(30)
            codes = [process.exitcode for process in started]
            assert codes[POINTS[name].rank] == -signal.SIGKILL, codes
            assert None not in codes, f"{name}: the other rank did not leave within 30 s"
        step = survivor(place, known, 2)
        undisturbed(place, 4)
        assert survivor(place, known, 4) == 4
        left = sorted(path.name for path in place.iterdir())
        assert left == [step_name(3), step_name(4)], left
        shutil.rmtree(place)
        yield f"killed {name}: step {step} is there, complete; then to step 4, nothing left behind"


def kills(folder: Path, count: int = 100, steps: int = 2000) -> Iterator[str]:
    """SIGKILL of all ranks at random times, each start going on where the one before was killed."""
    chance, known, reached = random.Random(0), expected(folder / "expected", 40), 0
    place = folder / "kills"
    for number in range(count):
        if reached > 30:  # the known steps are used up: start anew
            shutil.rmtree(place)
            reached = 0
        with ranks(place, steps, asynchronous=number % 2 == 0) as started:
            deadline = time.monotonic() + 60
            while not (steps_in(place) and steps_in(place)[-1] > reached):
                assert time.monotonic() < deadline, "the ranks make no progress"
                time.sleep(0.002)
            time.sleep(chance.random() * 0.05)
            for process in started:
                os.kill(process.pid, signal.SIGKILL)
        before = steps_in(place)[-1]
        reached = survivor(place, known, before)
        yield f"kill {number + 1}: step {reached} is there, complete"


# --- damage


def saved(folder: Path) -> Path:
    undisturbed(folder / "saved", 2)
    return folder / "saved"


def _named(place: Path, file: Path) -> None:
    """Loading step 2 must fail and name the file, and the next start must fall back to step 1."""
    refusal = ""
    try:
        open_checkpoint(place / step_name(2), comm.Alone(), CPU)
    except Damaged as error:
        refusal = str(error)
    name = "manifest" if file.name.startswith("manifest") else file.name
    assert name in refusal, f"damage to {name}: {refusal or 'not noticed'}"
    assert newest(place, comm.Alone(), CPU).step == 1, "no fall-back"


def flips(folder: Path, count: int = 1000) -> Iterator[str]:
    """Single bits, spread evenly over every file."""
    chance, place = random.Random(0), saved(folder)
    files = sorted((place / step_name(2)).iterdir())
    for number in range(count):
        file = files[number % len(files)]
        whole = file.read_bytes()
        at = chance.randrange(len(whole))
        file.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << chance.randrange(8))]) + whole[at + 1 :])
        _named(place, file)
        file.write_bytes(whole)
    content(place / step_name(2))
    yield f"{count} bit flips in {len(files)} files: all noticed and named"


def files(folder: Path) -> Iterator[str]:
    """Files cut short, zeroed at the end, emptied, deleted, swapped, taken from another step, links."""
    place = saved(folder)
    path, other = place / step_name(2), place / step_name(1)
    damages: dict[str, Callable[[Path], object]] = {
        "cut short by a byte": lambda file: os.truncate(file, file.stat().st_size - 1),
        "cut in half": lambda file: os.truncate(file, file.stat().st_size // 2),
        "emptied": lambda file: os.truncate(file, 0),
        "longer by a byte": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
        "with a zeroed tail": _zero_tail,
        "deleted": lambda file: file.unlink(),
        "from another step": lambda file: shutil.copy(other / file.name, file),
        "a link to itself elsewhere": lambda file: file.symlink_to(file.rename(place / f"at-{file.name}")),
        "a directory": lambda file: (file.unlink(), file.mkdir()),
    }
    for name, damage in damages.items():
        for file in sorted(path.iterdir()):
            shutil.copytree(path, place / "keep")
            damage(file)
            _named(place, file)
            shutil.rmtree(path)
            (place / "keep").rename(path)
        yield f"every file {name}: noticed, named, fallen back from"
    first, second = (path / f"rank-0000{rank}.safetensors" for rank in (0, 1))
    swapped = first.rename(path / "x"), second.rename(first), (path / "x").rename(second)
    _named(place, swapped[1])
    yield "data files swapped: noticed, named"
    shutil.rmtree(path)
    shutil.copytree(other, path)
    assert newest(place, comm.Alone(), CPU).step == 1
    yield "a complete checkpoint under another step's name: fallen back from"


def _zero_tail(file: Path) -> None:
    data = file.read_bytes()
    kept = len(data) * 2 // 3
    file.write_bytes(data[:kept] + bytes(len(data) - kept))


# --- whole runs

RUN = (
    *("+recipe=resnet", "model=mobilenet_v3_small", "data=fake", "data.train_images=240"),
    *("data.val_images=12", "train.batch_size=12", "train.epochs=3", "train.log_every=3"),
    *("train.eval_every=1", "checkpoint.every_steps=5", "monitor.progress=lines"),
)


def program(folder: Path, extra: Sequence[str]) -> list[str]:
    return ["-m", "shardtrain.train", *RUN, f"run.dir={folder}", *extra]


def finished(folder: Path) -> tuple[Any, Any]:
    """Return what must not depend on kills: the last checkpoint's tensors, and TensorBoard's points."""
    events = events_of(folder)
    timed = ("perf", "time", "memory")
    tags = [tag for tag in events.Tags()["scalars"] if tag.split("/")[0] not in timed]
    points = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}
    path = folder / "checkpoints" / step_name(steps_in(folder / "checkpoints")[-1])
    tensors = {
        f"{file.name} {name}": hashlib.sha256(value.numpy().tobytes()).hexdigest()
        for file in path.glob("*.safetensors")
        for name, value in load_file(file).items()
    }
    return tensors, points


def _to_the_end(command: Sequence[str], folder: Path) -> None:
    done = programs.ended(WORLD, *command, folder=folder, timeout=300)
    assert done.codes == [0] * WORLD, done.output + done.errors


def _undisturbed_run(folder: Path, extra: Sequence[str]) -> None:
    if not (folder / "whole").exists():
        _to_the_end(program(folder / "whole", extra), folder)


def runs(folder: Path, count: int = 20, extra: Sequence[str] = ()) -> Iterator[str]:
    """A run killed at random times and started again by the same command."""
    chance = random.Random(0)
    disturbed = program(folder / "killed", extra)
    _undisturbed_run(folder, extra)
    killed = 0
    while killed < count:
        reports = chance.randrange(1, 4)
        with programs.started(WORLD, *disturbed, folder=folder) as job:
            while not (over := job.over(0.2 * chance.random())) and job.output.count("\nstep ") < reports:
                pass
        if not over:  # what still runs where the block is left is killed
            killed += 1
        elif killed < count:  # it has finished before it was killed often enough: another one
            assert finished(folder / "killed") == finished(folder / "whole")
            shutil.rmtree(folder / "killed")
    _to_the_end(disturbed, folder)
    assert finished(folder / "killed") == finished(folder / "whole")
    yield f"{count} kills of the whole job, continued by the same command: the same bits, the same curves"


def restarts(folder: Path, count: int = 3, extra: Sequence[str] = ()) -> Iterator[str]:
    """One worker killed at random, again and again, under ``torchrun --max-restarts``."""
    chance = random.Random(1)
    _undisturbed_run(folder, extra)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", "127.0.0.1:0", "--nproc-per-node", str(WORLD)]  # a port of its own
    launcher += ["--max-restarts", str(count), *program(folder / "restarted", extra)]
    running = subprocess.Popen(launcher, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    killed, waiting, told = 0, True, []
    with running, running.stdout as lines:  # type: ignore[union-attr]
        for line in lines:
            told.append(line)
            waiting |= line.startswith("world")  # a new attempt
            if waiting and killed < count and re.match(r"step +\d", line) and chance.random() < 0.4:
                workers = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
                os.kill(int(chance.choice(workers)), signal.SIGKILL)
                killed, waiting = killed + 1, False
    assert running.returncode == 0, "".join(told[-60:])
    assert killed == count, f"killed {killed} times, not {count}"
    assert finished(folder / "restarted") == finished(folder / "whole")
    yield f"{count} kills of one worker under torchrun --max-restarts {count}: the same bits, the same curves"


PARTS = {part.__name__: part for part in (points, kills, flips, files, runs, restarts)}


def main(names: Sequence[str]) -> None:
    for name in names or PARTS:
        with tempfile.TemporaryDirectory() as folder:
            for line in PARTS[name](Path(folder)):
                print(f"{name}: {line}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

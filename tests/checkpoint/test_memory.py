"""Checkpoints in memory: a restart continues from the last finished step, and nothing stays in memory."""

import contextlib
import fcntl
import functools
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from shardtrain import comm
from shardtrain.checkpoint import cleanup, memory
from shardtrain.checkpoint import store as store_module
from shardtrain.checkpoint.store import step_name
from shardtrain.config.errors import UserError
from shardtrain.train import resume

from pool import Ranks, each_rank, once
from small import until
from tiny import QUIET, at_once, crash, curves, final, run_to_end

undisturbed = once(run_to_end)
EVERY_STEP = "checkpoint.memory_every_steps=1"


# runs, with some directory for /dev/shm


def run_in(folder: str, *arguments: str, at: dict[int, Any] | None = None) -> str:
    place = patch.multiple(memory, MEMORY=Path(folder).parent, KEPT_S=300.0)
    with place:
        return run_to_end(folder, EVERY_STEP, "checkpoint.every_steps=100", *arguments, at=at)


def left_of(folder: Path) -> list[Path]:
    """The directories in what stands for /dev/shm."""
    return [*folder.parent.glob(f"shardtrain-{os.getuid()}-*")]


def steps_left(folder: Path) -> list[str]:
    """The steps in memory of any run."""
    return sorted(path.name for place in left_of(folder) for path in place.glob("*/step-*"))


def crashes(folder: str, steps: list[int], *arguments: str) -> list[str]:
    return [run_in(folder, *arguments, at=event) for event in [*({step: crash} for step in steps), {}]]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own
def test_crashes_lose_the_step_under_way_only(on_ranks: Ranks, tmp_path: Path, undisturbed: Path) -> None:
    """The end has the same bits, and TensorBoard's curves, too."""
    folder = tmp_path / "run"
    assert on_ranks(2, crashes, str(folder), [3, 7, 10])[0] == ["RuntimeError crash"] * 3 + ["finished"]
    log = (folder / "log.txt").read_text()
    assert re.findall(r"continuing after step (\d+) of 10 \((.*)/shardtrain-", log) == [
        (step, str(tmp_path)) for step in "269"
    ]
    assert final(folder) == final(undisturbed)
    assert curves(folder) == curves(undisturbed)
    assert left_of(folder) == []


def fails(error: type[Exception]) -> None:
    raise error("an image that cannot be read")


def stop_last_rank() -> None:
    if comm.rank() == comm.world_size() - 1:
        os.kill(os.getpid(), signal.SIGTERM)


ENDS = {
    "finished": ("finished", {}),
    "SIGTERM": ("Stopped stopped by SIGTERM", {4: stop_last_rank}),
    "mistake": ("UserError ", {4: functools.partial(fails, UserError)}),
    "failure": ("RuntimeError ", {4: functools.partial(fails, RuntimeError)}),
}


def ended(folder: str, how: str, keep: int) -> tuple[str, bool]:
    """How a run ends on this rank, and whether the rank held private files in memory before."""
    seen: list[bool] = []

    def look() -> None:
        (place,) = left_of(Path(folder))
        seen.append(place.stat().st_mode & 0o777 == 0o700 and place.stat().st_uid == os.getuid())
        (run,) = place.glob("*/")
        seen.append((run / step_name(2) / "manifest.sha256").exists())

    ending = run_in(folder, QUIET, f"checkpoint.keep={keep}", at={3: look, **ENDS[how][1]})
    return ending, seen == [True, True]


ENDINGS = [("finished", 2), ("SIGTERM", 2), ("finished", 0), ("mistake", 2), ("failure", 2), ("SIGTERM", 0)]


@pytest.mark.long
@pytest.mark.parametrize(("how", "keep"), ENDINGS)
def test_memory_is_freed_once_the_run_has_ended_or_is_on_disk(
    on_ranks: Ranks, tmp_path: Path, how: str, keep: int
) -> None:
    folder = tmp_path / "run"
    told = on_ranks(2, ended, str(folder), how, keep)
    assert told[1][0].startswith(ENDS[how][0])
    assert [seen for _, seen in told] == [True, True]
    is_needed = (how, keep) in ENDINGS[3:]
    assert bool(steps_left(folder)) == is_needed
    assert bool(left_of(folder)) == is_needed
    log = (folder / "log.txt").read_text()
    if (how, keep) == ("SIGTERM", 0):
        assert "after step 5; step 5 is in memory, from which the same run.dir resumes within ten m" in log


def interrupted(*arguments: Any, **options: Any) -> None:
    raise KeyboardInterrupt


def mistakes(folder: str) -> list[str]:
    """What does not free the memory of a run that was killed after step 3, and how that run then ends."""
    endings = [run_in(folder, QUIET, at={4: crash})]
    endings.append(run_in(folder, QUIET, "optim.lr=0.5"))
    endings.append(run_in(folder, QUIET, "resume=none", "data=imagefolder", "data.root=/nowhere"))
    with patch.object(resume, "restore", interrupted):
        try:
            run_in(folder, QUIET)
        except KeyboardInterrupt:
            endings.append("interrupted")
    endings.append(run_in(folder, QUIET, at={4: functools.partial(fails, UserError)}))
    endings.append(run_in(folder, QUIET, at={5: crash}))
    return [*endings, run_in(folder, QUIET)]


@pytest.mark.long
def test_no_mistake_frees_the_memory_of_a_run(on_ranks: Ranks, tmp_path: Path) -> None:
    """A wrong setting, a folder that is away, Ctrl-C while it starts, an image that is damaged."""
    folder = tmp_path / "run"
    crashed, setting, away, stopped, image, again, end = on_ranks(2, mistakes, str(folder))[0]
    assert (crashed, stopped, again, end) == (
        "RuntimeError crash",
        "interrupted",
        "RuntimeError crash",
        "finished",
    )
    assert re.match(r"UserError .*optim.lr=0.002, this one has 0.5; .*; resume=.*/step-00000003 con", setting)
    assert (away[:15], image) == ("UserError data.", "UserError an image that cannot be read")
    log = (folder / "log.txt").read_text()
    continued = re.findall(rf"continuing after step (\d+) of 10 \({tmp_path}/shardtrain-", log)
    assert continued == ["3", "3", "4"]
    assert left_of(folder) == []


@at_once
def anew_to_four(folder: str) -> None:
    assert run_to_end(folder, QUIET, "resume=none", at={5: crash}) == "RuntimeError crash"


@pytest.mark.long
def test_an_abandoned_run_is_not_continued(on_ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    crashed = functools.partial(run_in, at={8: crash})
    on_ranks(2, crashed, str(folder), QUIET)
    assert steps_left(folder) == [step_name(7)]
    on_ranks(2, anew_to_four, str(folder))
    assert on_ranks(2, run_in, str(folder), QUIET) == ["finished"] * 2
    log = (folder / "log.txt").read_text()
    assert re.findall(r"continuing after step (\d+) of 10 ", log) == ["4"]
    assert left_of(folder) == []


ONE_HOST = r"UserError ch.*every_steps=1: .* ranks of one host, and these are on 2; use ch.*every_steps=N on"


@pytest.mark.parametrize(
    ("place", "hosts", "text"),
    [
        ("nowhere", 1, r"UserError checkpoint.memory_every_steps=1: there is no .*/nowhere; ch.*=0 does"),
        pytest.param(".", 2, ONE_HOST, marks=pytest.mark.long),
    ],
)
@each_rank(2, transport="auto")
def test_ranks_of_several_hosts_or_without_such_memory_are_refused(
    tmp_path: Path, place: str, hosts: int, text: str
) -> None:
    with (
        patch.dict(os.environ, SHARDTRAIN_HOST_KEY=f"host {comm.rank() % hosts}"),
        patch.object(memory, "MEMORY", tmp_path / place),
    ):
        ending = run_to_end(str(tmp_path / "run"), EVERY_STEP)
    assert re.match(text, ending), ending
    assert left_of(tmp_path / "run") == []


@each_rank(2, transport="auto")
def test_a_copy_that_fails_is_a_warning(tmp_path: Path) -> None:
    """One for several in a row."""
    folder = str(tmp_path / "run")
    write = store_module.write_tensors
    full = [1, 3, 4, 5, 7]

    def fails_in(place: Path, *args: Any) -> Any:
        if comm.rank() == 1 and any(f"step-{step:08}" in str(place) for step in full):
            raise OSError(28, "No space left on device")
        return write(place, *args)

    with patch.object(store_module, "write_tensors", fails_in):
        assert run_in(folder, QUIET) == "finished"
    warned = re.findall(
        r"warning: checkpoint .*/(step-\d+) was not saved: (.*)", Path(f"{folder}/log.txt").read_text()
    )
    text = "rank 1: rank-00001.safetensors: No space left on device; training continues"
    assert warned == [(step_name(step), text) for step in (1, 3, 7)]


# who removes what


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    with patch.multiple(memory, MEMORY=tmp_path, KEPT_S=0.4):
        yield tmp_path


def test_only_a_directory_of_this_user_is_taken(place: Path) -> None:
    made, lock = memory.claim(place / "run")
    assert (made.stat().st_mode & 0o777, made.parent) == (0o700, place)
    memory.release(made, lock, keep=False)
    assert not made.exists()
    elsewhere = place / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    changes: list[Callable[[], object]] = [
        lambda: made.symlink_to(elsewhere),
        lambda: made.mkdir(mode=0o755),
        lambda: made.write_text(""),
        lambda: (made.mkdir(mode=0o700), os.chown(made, 1, 1) if os.getuid() == 0 else made.chmod(0o770)),
    ]
    for change in changes:
        change()
        with pytest.raises(OSError, match=r"is not a directory of this user alone|File exists"):
            memory.claim(place / "run")
        assert not [*elsewhere.iterdir()]
        made.unlink() if made.is_symlink() or made.is_file() else shutil.rmtree(made)


@pytest.mark.parametrize(
    ("at", "after"), [("_is_private", False), ("_open_lock", False), ("_open_lock", True)]
)
def test_memory_that_is_removed_while_it_is_taken_is_made_again(place: Path, at: str, after: bool) -> None:
    usual = getattr(memory, at)
    calls = list[Path]()

    def removed_first(directory: Path) -> Any:
        calls.append(directory)
        result = usual(directory) if after else None
        if len(calls) == 1:
            shutil.rmtree(directory)
        return result if after else usual(directory)

    with patch.object(memory, at, removed_first):
        made, lock = memory.claim(place / "run")
    assert len(calls) == 2
    assert cleanup.is_in(str(made), lock)
    memory.release(made, lock, keep=False)


def watchers(directory: Path) -> list[int]:
    """The processes that watch a directory."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if {b"-S", os.fsencode(directory)} <= set(each.read_bytes().split(b"\0")):
                found.append(int(each.parent.name))
    return found


def test_what_no_rank_holds_is_removed_after_a_while(place: Path) -> None:
    """By one process, which leaves with the directory."""
    made, lock = memory.claim(place / "run")
    memory.watch(made)
    memory.watch(made)
    until(lambda: len(watchers(made)) == 1)
    assert made.exists(), "a rank holds it"
    memory.release(made, lock, keep=True)
    until(lambda: not made.exists())
    until(lambda: not watchers(made))


def watched(made: Path, at: dict[int, Callable[[], object]]) -> int:
    """Return after how many seconds what removes ``made`` ends, by a clock of its own: kept for 400 s.

    ``at``: by seconds, what ranks do meanwhile. Until then the directory stays.
    """
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        assert now < 10_000
        if act := at.pop(round(now), None):
            assert made.exists()
            act()

    with patch.object(cleanup, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep)):
        cleanup.watch(str(made), 400.0)
    assert not at
    return round(now)


def test_what_is_removed_belongs_to_no_run_that_was_started_again(place: Path) -> None:
    """A rank holds it for longer than it is kept; then none, but not for long enough; then none."""
    made, first = memory.claim(place / "run")
    again: list[int] = []
    ranks = {
        1000: lambda: memory.release(made, first, keep=True),
        1399: lambda: again.append(memory.claim(place / "run")[1]),
        3000: lambda: memory.release(made, again[0], keep=True),
    }
    assert 3400 <= watched(made, ranks) <= 3402
    assert not made.exists()


def test_a_directory_that_was_made_again_is_another_run_s(place: Path) -> None:
    made, first = memory.claim(place / "run")
    again: list[int] = []

    def start_again() -> None:
        memory.release(made, first, keep=False)
        again.append(memory.claim(place / "run")[1])

    assert watched(made, {10: start_again}) == 10
    assert made.exists()
    memory.release(made, again[0], keep=False)


def test_what_the_cleanup_left_the_next_run_removes(place: Path) -> None:
    """Neither what is in use, nor what is new, nor what is not a run's."""
    old, new, used, other = (place / f"shardtrain-{os.getuid()}-{name}" for name in ("a", "b", "c", "d"))
    for each in (old, new, used, other):
        each.mkdir(mode=0o700)
        (each / "step-00000001").mkdir()
        if each != new:
            os.utime(each, (0, 0))
    other.chmod(0o755)
    lock = os.open(used / cleanup.LOCK, os.O_RDWR | os.O_CREAT)
    os.utime(used, (0, 0))
    fcntl.flock(lock, fcntl.LOCK_SH)
    with patch.object(memory, "KEPT_S", 100.0):
        made, own = memory.claim(place / "run")
        memory.watch(made)
    assert [path.exists() for path in (old, new, used, other, made)] == [False, True, True, True, True]
    memory.release(made, own, keep=False)
    os.close(lock)
    until(lambda: not made.exists())

"""Two hosts, a torchrun on each (`two_hosts.py`): equal losses, cut links, hosts that are lost and join."""

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from two_hosts import MEET, TwoHosts, two_hosts

from shardtrain.checkpoint.manifest import file_name

import pool
from tiny import TINY, files_of

pytestmark = pytest.mark.timeout(480)  # several waits of two minutes, so that each says what it waits for

PROGRAM = ("-m", "shardtrain.train")
EVERY_STEP = "checkpoint.memory_every_steps=1"
OPTIONS = ("train.log_every=1", "optim.lr=0.003", "run.dir=run")
JOB = ("+recipe=resnet", *TINY, *OPTIONS)
ENDLESS = (*JOB, "sched=constant", "train.epochs=5000", "checkpoint.every_steps=10")
# The program, at most 20 steps per second, so that one undisturbed host soon is where the two were.
STEADY = """
import runpy, time
from shardtrain.monitor import Monitor

def step(monitor, number, report=Monitor.step):
    time.sleep(0.05)
    report(monitor, number)

Monitor.step = step
if __name__ == "__main__":
    runpy.run_module("shardtrain.train", run_name="__main__")
"""
# The same, with a short time-out after the first step.
IMPATIENT = """
import datetime, runpy, steady
import shardtrain.train.loop
shardtrain.train.loop.AFTERWARDS = datetime.timedelta(seconds=12)
runpy.run_module("shardtrain.train", run_name="__main__")
"""


class Run:
    def __init__(self, two: TwoHosts, folder: Path) -> None:
        self.two = two
        self.folder = folder
        self.running: dict[int, subprocess.Popen[str]] = {}

    def start(self, side: int, ranks: int, *command: str) -> None:
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONFAULTHANDLER": "1"}
        own: dict[str, Any] = {"env": env, "cwd": self.folder}
        with (self.folder / f"said-{side}").open("a") as said:
            own |= {"stdout": said, "stderr": subprocess.STDOUT}
            self.running[side] = self.two.torchrun(side, ranks, *command, **own)

    def start_both(self, ranks: int, *command: str) -> None:
        for side in (0, 1):
            self.start(side, ranks, *command)

    def said(self, side: int = 0) -> str:
        return (self.folder / f"said-{side}").read_text()

    def wait_for(self, pattern: str, after: int = 0) -> int:
        """Wait until host 0 has said this after a position; return the position of its end."""
        deadline = time.monotonic() + 120
        while (match := re.compile(pattern, re.MULTILINE).search(self.said(), after)) is None:
            if time.monotonic() > deadline:
                for host in self.two.hosts:  # every thread says where it is
                    host.start("pkill", "-ABRT", "-f", "run.dir=run").wait()
                time.sleep(2)
                pytest.fail(f"no {pattern!r}: {self.said()}\n\nThe other host:\n{self.said(1)}")
            time.sleep(0.05)
        return match.end()

    def start_together(self, *command: str) -> int:
        """Start a rank on each host, and wait until the two train as one, some steps far.

        The first host trains alone, and then anew, if the second comes later than `MEET` allows.
        """
        self.start_both(1, *command)
        return self.wait_for(r"^world +2 ranks.*\n(.*\n)+?(step.*\n){20}")

    def codes(self) -> list[int]:
        return [self.running[side].wait(300) for side in (0, 1)]

    def assert_learnt_as_one_host(self, *arguments: str, steps: int = 0, tolerance: float = 0.0) -> None:
        """Compare losses with those of two ranks of one host that nobody disturbs."""
        found = losses(self.said())
        command = (*PROGRAM, *arguments, f"train.max_steps={steps or max(found)}", "run.dir=undisturbed")
        done = pool.ended(2, *command, folder=self.folder)
        assert done.codes == [0, 0], done.errors
        assert found == pytest.approx(losses(done.output), rel=0, abs=tolerance)


def losses(said: str) -> dict[int, float]:
    found = re.findall(r"^step +(\d+)/.* loss ([\d.]+)  acc1 .* left$", said, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    try:
        (tmp_path / "steady.py").write_text(STEADY)
        (tmp_path / "impatient.py").write_text(IMPATIENT)
        with two_hosts() as two:
            yield Run(two, tmp_path)
    except OSError as error:
        pytest.skip(str(error))


@pytest.mark.release
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_hosts_train_as_one(run: Run, ranks: int) -> None:
    """With the same losses as two ranks of one host, and with one rank on each with the same files."""
    job = (*JOB, "parallel.virtual_ranks=4")
    run.start_both(ranks, *PROGRAM, *job)
    assert run.codes() == [0, 0], run.said()
    run.assert_learnt_as_one_host(*job, steps=10)
    saved = [files_of(run.folder / name / "checkpoints/step-00000010") for name in ("undisturbed", "run")]
    assert (saved[0] == saved[1]) == (ranks == 1)


@pytest.mark.release
def test_a_cut_link_is_survived_for_seconds_and_named_at_the_time_out(run: Run) -> None:
    run.start_both(2, "impatient.py", *ENDLESS)
    run.wait_for("^step +5/")
    for flaps in ([(5.0, 0.0)], [(0.5, 0.2), (2.0, 0.1), (1.0, 1.5), (0.1, 0.1)]):
        for down, up in flaps:
            run.two.link("down")
            time.sleep(down)
            so_far = len(run.said())
            run.two.link("up")
            time.sleep(up)
        run.wait_for("^step +.*\n(.*\n)+step", so_far)
    run.two.link("down")
    assert run.codes() == [1, 1]
    for side, lost in enumerate(("(2|3|2 and 3)", "(0|1|0 and 1)")):
        told = rf"PeerLost: ranks? {lost} do(es)? not answer: rank \d has waited \d\d s"
        assert re.search(told, run.said(side))
    run.assert_learnt_as_one_host(*ENDLESS, tolerance=2e-3)


@pytest.mark.release
def test_the_first_host_is_named_when_it_vanishes_with_the_launcher_s_store(run: Run) -> None:
    run.start_both(1, "impatient.py", *ENDLESS)
    run.wait_for("^step +5/")
    run.two.hosts[0].kill()
    assert run.running[1].wait(300) == 1
    assert re.search("PeerLost: rank 0 (has ended|does not answer): rank 1 ", run.said(1))


@pytest.mark.release
def test_a_host_that_is_lost_is_done_without_and_joins_again(run: Run) -> None:
    """From 2 hosts to 1 and back, from checkpoints in a directory that both see, with the same losses."""
    endless = (*ENDLESS, "parallel.virtual_ranks=2")
    command = (*MEET.split(), "steady.py", *endless)
    position = run.start_together(*command)
    run.two.hosts[1].end_all()
    position = run.wait_for("PeerLost: rank 1 has ended: rank 0 was at ", position)
    position = run.wait_for(r"^world +1 rank.*\n.*\ncontinuing after step \d+ .*\nstep", position)
    run.start(1, 1, *command)
    position = run.wait_for(r"^world +2 ranks.*\n.*\ncontinuing after step \d+ ", position)
    run.wait_for("^step", position)
    run.two.hosts[0].kill()
    run.assert_learnt_as_one_host(*endless)


# checkpoints in memory: each host has a /dev/shm of its own


def lose(run: Run, side: int, memory_too: bool) -> None:
    """Kill all processes of a host, the one that would free its memory, too."""
    run.two.hosts[side].end_all()
    if memory_too:
        run.two.hosts[side].start("sh", "-c", "rm -r /dev/shm/shardtrain-*").wait()


def in_memory(run: Run, side: int) -> list[str]:
    """The names of all that is in a host's memory."""
    listing = run.two.hosts[side].start("ls", "-AR", "/dev/shm", stdout=subprocess.PIPE)
    return str(listing.communicate()[0]).split()


@pytest.mark.release
def test_a_lost_host_costs_the_step_under_way(run: Run) -> None:
    """The other host continues alone. Then both are killed, and one has its memory back from the other."""
    never = ("sched=constant", "train.epochs=4000", "checkpoint.every_steps=1000000")
    endless = (*JOB, "parallel.virtual_ranks=2", *never)
    command = (*MEET.split(), "steady.py", *endless, EVERY_STEP)
    position = run.start_together(*command)
    lose(run, 1, memory_too=True)
    position = run.wait_for("PeerLost: rank 1 has ended: rank 0 was at ", position)
    position = run.wait_for(r"^world +1 rank.*\n.*\ncontinuing after step \d+ .*\n(step.*\n)+", position)
    run.start(1, 1, *command)  # torchrun lets the other's ranks save on the disk
    joined = r"^world +2 ranks.*\n.*\ncontinuing after step \d+ of \d+ \({}.*\n(step.*\n){{3}}"
    run.wait_for(joined.format("run/checkpoints/"), position)
    for side in (0, 1):
        lose(run, side, memory_too=side == 1)
    position = len(run.said())
    run.start_both(1, *command)
    run.wait_for(joined.format("/dev/shm/shardtrain-"), position)
    for side in (0, 1):
        assert {file_name(0), file_name(1), "manifest.sha256"} <= {*in_memory(run, side)}
    run.two.hosts[0].kill()
    said = run.said()
    for restart in re.finditer(r"continuing after step (\d+) of \d+ \(/dev/shm/", said):
        before = [int(step) for step in re.findall(r"^step +(\d+)/", said[: restart.start()], re.MULTILINE)]
        assert before[-1] - 1 <= int(restart[1]) <= before[-1], "reported, and then copied"
    run.assert_learnt_as_one_host(*endless)


@pytest.mark.release
def test_hosts_free_their_memory_at_the_end(run: Run) -> None:
    run.start_both(1, *PROGRAM, "+recipe=resnet", *TINY, "run.dir=run", EVERY_STEP)
    assert run.codes() == [0, 0], run.said()
    assert [in_memory(run, side) for side in (0, 1)] == [["/dev/shm:", "hosts"]] * 2

"""Kill ranks at random moments, and measure how a run with checkpoints in memory goes on.

    python tests/tools/restarts.py COUNT [SEED]

It kills a rank of two, and prints the finished steps that were lost, and the seconds from the kill to the
next finished step: until the other rank has noticed, until the new ranks look for a checkpoint, until they
have loaded it, and until a step is finished. The end must be the bits of an undisturbed run: weights,
optimizer and TensorBoard's curves. Nothing may stay in memory.
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from shardtrain.checkpoint import memory
from shardtrain.checkpoint.store import steps_in

sys.path.append(str(Path(__file__).parents[1]))
from tiny import TINY, curves, files_of

LIMIT_S = 90.0
MOST = 1_000_000
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TIMED = """
import json, os, runpy, time
from shardtrain import comm
from shardtrain.monitor import StepMetrics
from shardtrain.train import loop, resume
from shardtrain.train.saving import Saver

FILE = os.open(os.environ["TIMES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def tell(event, step=0):
    line = {"event": event, "step": step, "world": comm.world_size(), "time": time.time()}
    os.write(FILE, (json.dumps(line) + "\\n").encode())

def telling(owner, name, before="", after="", step=lambda *_: 0):
    function = getattr(owner, name)
    def told(*args, **options):
        if before:
            tell(before if before != "phase" else args[1])
        try:
            result = function(*args, **options)
        except Exception:
            tell("noticed")
            raise
        if after:
            tell(after, step(*args))
        return result
    setattr(owner, name, told)

telling(loop, "_train", before="looks")
telling(resume, "restore", after="loaded")
telling(StepMetrics, "phase", before="phase")
telling(StepMetrics, "paused", before="paused")
telling(Saver, "_copy", before="copy")
telling(Saver, "after_step", after="step", step=lambda saver, trainer, step, *_: step)
if __name__ == "__main__":
    runpy.run_module("shardtrain.train", run_name="__main__")
"""
SETTINGS = (
    *("+recipe=resnet", *TINY, "train.log_every=5", "optim=adamw", "sched=constant", "optim.lr=0.001"),
    *("train.epochs=100000", "train.eval_every=20", "parallel.virtual_ranks=2", "train.max_steps={steps}"),
)
MEMORY = ("checkpoint.memory_every_steps=1", "checkpoint.every_steps=1000000")


class Restart(NamedTuple):
    phase: str  # in which the first rank that is left was when the other was killed
    lost: int  # finished steps
    seconds: tuple[float, float, float, float]  # noticing, restarting, loading, the step


class Times:
    """The events of all ranks, which they append to one file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "times"
        self.path.touch()

    def all(self, since: float = 0.0) -> list[dict[str, Any]]:
        events = map(json.loads, self.path.read_text().splitlines())
        return [event for event in events if event["time"] > since]

    def wait_for(self, alive: Callable[[], bool], since: float, count: int = 1, world: int = 0) -> float:
        """Wait for steps after ``since`` of ``world`` ranks (0: any number); return when that was."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            steps = [e for e in self.all(since) if e["event"] == "step" and world in (0, e["world"])]
            if len(steps) >= count:
                return float(steps[count - 1]["time"])
            assert alive(), "the launcher has ended"
            assert time.monotonic() < deadline, f"no step for {LIMIT_S} s"
            time.sleep(0.02)

    def restart(self, killed: float) -> Restart:
        """Describe what followed a kill, after which a step was finished."""
        before = [e for e in self.all() if e["time"] <= killed]
        after = self.all(killed)
        finished = max(e["step"] for e in before if e["event"] == "step")
        noticed = min((e["time"] for e in after if e["event"] == "noticed"), default=killed)
        looks = next(e for e in after if e["event"] == "looks")
        loaded = next(e for e in after if e["event"] == "loaded" and e["time"] > looks["time"])
        step = next(e for e in after if e["event"] == "step" and e["time"] > loaded["time"])
        noticed = min(noticed, looks["time"])
        moments = [killed, noticed, looks["time"], loaded["time"], step["time"]]
        seconds = tuple(b - a for a, b in pairwise(moments))
        return Restart(before[-1]["event"], max(0, finished + 1 - step["step"]), seconds)  # type: ignore[arg-type]


def table(restarts: list[Restart]) -> str:
    rows = [f"{'seconds':12}{'median':>8}{'95 %':>8}{'worst':>8}"]
    columns = [*zip(*(each.seconds for each in restarts), strict=True)]
    columns.append(tuple(sum(each.seconds) for each in restarts))
    for name, column in zip(("noticing", "restarting", "loading", "the step", "all"), columns, strict=True):
        ordered = sorted(column)
        high = ordered[min(len(ordered) - 1, round(0.95 * len(ordered)))]
        rows.append(f"{name:12}{statistics.median(ordered):8.2f}{high:8.2f}{ordered[-1]:8.2f}")
    lost = Counter(each.lost for each in restarts)
    phases = Counter(each.phase for each in restarts)
    return "\n".join([*rows, f"finished steps lost: {dict(lost)}", f"killed in: {dict(phases)}"])


def command(folder: Path, steps: int, name: str) -> list[str]:
    return [each.format(steps=steps) for each in (*SETTINGS, f"run.dir={folder}/{name}")]


def undisturbed(folder: Path, steps: int) -> None:
    done = [*LAUNCHER, "-m", "shardtrain.train", *command(folder, steps, "undisturbed")]
    subprocess.run(done, check=True, capture_output=True, timeout=300)


def compare(folder: Path) -> str:
    """Compare the ends of the disturbed and the undisturbed run; return the step."""
    names = [max((folder / name / "checkpoints").glob("step-*")) for name in ("run", "undisturbed")]
    assert names[0].name == names[1].name, names
    assert files_of(names[0]) == files_of(names[1]), "weights, optimizer or sums differ"
    assert curves(folder / "run") == curves(folder / "undisturbed"), "curves differ"
    return f"the end, {names[0].name}, and all curves are the undisturbed run's"


def end_of(folder: Path) -> int:
    """Return the step at which a run shall end that a signal has stopped and that is started once more."""
    return max(steps_in(folder / "run/checkpoints"), default=0) + 20


def ranks_of(torchrun: subprocess.Popen[bytes]) -> list[int]:
    return [*map(int, Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split())]


def ranks(folder: Path, count: int, choice: random.Random) -> list[Restart]:
    times = Times(folder)
    own = os.environ | {"TIMES": str(times.path)}
    with (folder / "said").open("w") as said:
        program = [*LAUNCHER, "--max-restarts", "1000", f"{folder}/timed.py", *MEMORY]
        torchrun = subprocess.Popen(program + command(folder, MOST, "run"), stdout=said, stderr=said, env=own)
    restarts = []
    since = 0.0
    for _ in range(count):
        times.wait_for(lambda: torchrun.poll() is None, since)
        time.sleep(choice.uniform(0, 1.5))
        since = time.time()
        os.kill(choice.choice(ranks_of(torchrun)), signal.SIGKILL)
        times.wait_for(lambda: torchrun.poll() is None, since + 0.5)
        restarts.append(times.restart(since))
        print(len(restarts), restarts[-1], flush=True)
    torchrun.terminate()
    torchrun.wait(60)
    last = end_of(folder)
    subprocess.run(
        program + command(folder, last, "run"), check=True, capture_output=True, env=own, timeout=300
    )
    undisturbed(folder, last)
    return restarts


def main(count: int, seed: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "timed.py").write_text(TIMED)
        try:
            restarts = ranks(folder, count, random.Random(seed))
        except BaseException:
            for said in folder.glob("said*"):
                print(said.name, said.read_text()[-2500:])
            raise
        # Others may train meanwhile: only this run's memory is looked for.
        assert not memory.directory_of(folder / "run").exists()
        print(table(restarts))
        print(compare(folder))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)

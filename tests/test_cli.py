"""The real program, as typed in a shell, alone and under torchrun.

A start through torchrun costs three imports of torch, so where it is not torchrun that matters the program is
forked (`programs.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from programs import ended, started

PROGRAM = ["-m", "shardtrain.train"]
TINY = [
    *("+recipe=resnet", "data=fake", "data.train_images=24", "data.val_images=7", "data.channels=1"),
    *("data.image_size=8", "train.batch_size=12", "train.log_every=1", "checkpoint.keep=0"),
]


def torchrun(ranks: int, *arguments: str) -> list[str]:
    """On a port of its own, so that runs do not meet."""
    launcher = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    return [sys.executable, *launcher, "--nproc-per-node", str(ranks), *PROGRAM, *arguments]


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_run_from_another_directory(tmp_path: Path, ranks: int) -> None:
    done = ended(ranks, *PROGRAM, *TINY, "train.max_steps=2", "train.accumulate=2", folder=tmp_path)
    assert (done.codes, done.errors) == ([0] * ranks, "")
    assert (done.output.count("GFLOP per image"), done.output.count("finished")) == (1, 1)
    (run,) = (tmp_path / "outputs").iterdir()
    kinds = sorted(path.name.split(".")[0] for path in run.iterdir() if path.name != ".lock")
    assert kinds == ["at_a_glance", "config", "events", "log", "result"]
    result = json.loads((run / "result.json").read_text())
    assert (result["status"], result["world_size"], result["step"]) == ("finished", ranks, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"outputs"}


def test_mistakes_survive_torchrun(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    command = torchrun(2, "+recipe=resnet", "train.batch_size=99")
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    message = (
        "error: train.batch_size=99 is not divisible by 2 ranks × train.accumulate=1; 98 or 100 would fit"
    )
    assert done.returncode == 1
    assert re.findall(rf"^{re.escape(message)}", done.stderr, re.MULTILINE) == [message]
    root_cause = done.stderr.partition("Root Cause")[2]
    assert f"traceback : {message}" in root_cause
    assert "exitcode  : 2" in root_cause
    assert "shardtrain/" not in done.stderr  # no traceback of ours
    assert not (tmp_path / "outputs").exists()


def test_the_configuration_is_printed_once(tmp_path: Path) -> None:
    done = ended(2, *PROGRAM, "+recipe=resnet", "--cfg", "job", folder=tmp_path)
    assert done.codes == [0, 0]
    assert done.output.count("batch_size: 48") == 1
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_cleanly(tmp_path: Path) -> None:
    with started(1, *PROGRAM, *TINY, "train.epochs=10000", "run.dir=run", folder=tmp_path) as running:
        running.wait_for("step")
        running.signal(signal.SIGINT)
        done = running.end()
    assert done.codes == [130]
    assert "interrupted  step" in done.output
    assert done.errors == "interrupted\n"
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "interrupted"


def signalled_under_torchrun(
    folder: Path, number: int, *arguments: str, group: bool = False
) -> subprocess.CompletedProcess[str]:
    """Signal torchrun, or its whole process ``group`` as a terminal does, after two ranks' first step."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = torchrun(2, *arguments)
    with subprocess.Popen(command, cwd=folder, start_new_session=True, **pipes) as running:
        assert running.stdout is not None
        try:
            next(line for line in running.stdout if line.startswith("step"))
            time.sleep(0.3)
            (os.killpg if group else os.kill)(running.pid, number)
            output, errors = running.communicate(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, running.returncode, output, errors)


@pytest.mark.long
def test_ctrl_c_to_torchrun_leaves_cleanly(tmp_path: Path) -> None:
    given = [*TINY, "train.epochs=10000", "run.dir=run"]
    done = signalled_under_torchrun(tmp_path, signal.SIGINT, *given, group=True)
    assert done.returncode == 1
    assert "interrupted  step" in done.stdout
    assert done.stderr.count("interrupted\n") == 1
    assert "shardtrain/train/" not in done.stderr  # torchrun tells where it was itself; we do not
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "interrupted"


SAVING = [*TINY, "model=squeezenet1_1", "data.image_size=32", "checkpoint.keep=1", "run.name=here"]


def test_sigterm_saves_and_the_same_command_continues(tmp_path: Path) -> None:
    command = [*PROGRAM, *SAVING, "train.epochs=4000"]
    with started(1, *command, folder=tmp_path) as running:
        running.wait_for("step")
        running.signal(signal.SIGTERM)
        done = running.end()
    assert done.codes == [143]
    continues(1, command, tmp_path, done.output)


@pytest.mark.long
def test_sigterm_to_torchrun_saves_and_the_same_command_continues(tmp_path: Path) -> None:
    """torchrun passes it on."""
    command = [*SAVING, "train.epochs=4000"]
    done = signalled_under_torchrun(tmp_path, signal.SIGTERM, *command)
    assert done.returncode == 1
    continues(2, [*PROGRAM, *command], tmp_path, done.stdout)


def continues(ranks: int, command: list[str], folder: Path, output: str) -> None:
    """A run that SIGTERM has stopped says so, and goes on from there."""
    (step,) = re.findall(r"stopped by SIGTERM after step (\d+); step \1 is saved", output)
    (saved,) = (folder / "outputs/here/checkpoints").iterdir()
    assert int(saved.name.removeprefix("step-")) == int(step)
    done = ended(ranks, *command, "train.epochs=1", "train.max_steps=1", folder=folder)
    assert done.codes == [0] * ranks, done.errors
    assert f"continuing after step {step} of 1: nothing is left to do" in done.output

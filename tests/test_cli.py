"""The real program, as typed in a shell, alone and under torchrun."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PYTHON = [sys.executable, "-m", "shardtrain.train"]
TINY = [
    "+recipe=resnet",
    "data=fake",
    "data.train_images=24",
    "data.val_images=7",
    "data.channels=1",
    "data.image_size=8",
    "train.batch_size=12",
    "train.log_every=1",
    "checkpoint.keep=0",
    "monitor.plan=false",
]


def torchrun(ranks: int) -> list[str]:
    """On a port of its own, so that runs do not meet."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d"]
    return [
        *launcher,
        "--rdzv-endpoint",
        "127.0.0.1:0",
        "--nproc-per-node",
        str(ranks),
        "-m",
        "shardtrain.train",
    ]


def shell(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)


def test_alone_from_another_directory(tmp_path: Path) -> None:
    done = shell([*PYTHON, *TINY, "train.max_steps=2", "train.accumulate=2"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    (run,) = (tmp_path / "outputs").iterdir()
    kinds = sorted(path.name.split(".")[0] for path in run.iterdir())
    assert kinds == ["at_a_glance", "config", "events", "log", "result"]
    assert json.loads((run / "result.json").read_text())["status"] == "finished"
    assert {path.name for path in tmp_path.iterdir()} == {"outputs"}


def test_two_ranks_make_one_run(tmp_path: Path) -> None:
    done = shell([*torchrun(2), *TINY, "train.max_steps=2"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("GFLOP an image") == 1
    assert done.stdout.count("finished") == 1
    (run,) = (tmp_path / "outputs").iterdir()
    result = json.loads((run / "result.json").read_text())
    assert (result["world_size"], result["step"]) == (2, 2)
    assert result["time/step_s"] > 0
    assert result["comm/all_gather_mib_per_step"] > 0


def test_mistakes_survive_torchrun(tmp_path: Path) -> None:
    done = shell([*torchrun(2), "+recipe=resnet", "train.batch_size=99"], tmp_path)
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


def test_mistakes_end_with_code_2(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = shell([*PYTHON, *TINY, f"run.dir={tmp_path}/file/run"], tmp_path)
    assert done.returncode == 2
    assert re.fullmatch(r"error: run.dir=.*: cannot write there \(Not a directory\).*\n", done.stderr)


def test_the_configuration_is_printed_once(tmp_path: Path) -> None:
    done = shell([*torchrun(2), "+recipe=resnet", "--cfg", "job"], tmp_path)
    assert done.returncode == 0
    assert done.stdout.count("batch_size: 48") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_leaves_cleanly(tmp_path: Path, ranks: int) -> None:
    """As in a terminal, where every process of the group gets the signal."""
    command = [*(torchrun(ranks) if ranks > 1 else PYTHON), *TINY, "train.epochs=10000", "run.dir=run"]
    running = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert running.stdout is not None
    try:
        for line in running.stdout:
            if line.startswith("step"):
                break
        time.sleep(0.3)
        os.killpg(running.pid, signal.SIGINT)
        output, errors = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == (130 if ranks == 1 else 1)
    assert "interrupted  step" in output
    assert errors.count("interrupted\n") == 1
    assert 'shardtrain/train.py"' not in errors  # torchrun tells where it was itself; we do not
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "interrupted"


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_saves_and_the_same_command_continues(tmp_path: Path, ranks: int) -> None:
    """To the program itself, or to torchrun, which passes it on."""
    launcher = torchrun(ranks) if ranks > 1 else PYTHON
    small = ["model=squeezenet1_1", "data.image_size=32", "checkpoint.keep=1", "run.name=here"]
    command = [*launcher, *TINY, *small, "train.epochs=4000"]
    running = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with running, running.stdout as lines:  # type: ignore[union-attr]
        next(line for line in lines if line.startswith("step"))
        running.send_signal(signal.SIGTERM)
        output = lines.read()
    assert running.returncode == (143 if ranks == 1 else 1)
    (step,) = re.findall(r"stopped by SIGTERM after step (\d+); step \1 is saved", output)
    (saved,) = (tmp_path / "outputs/here/checkpoints").iterdir()
    assert int(saved.name.removeprefix("step-")) == int(step)
    done = shell([*command, "train.epochs=1", "train.max_steps=1"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"continuing after step {step} of 1: nothing is left to do" in done.stdout

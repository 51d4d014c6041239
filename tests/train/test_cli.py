"""The real program, as typed in a shell, alone, under torchrun and under Slurm."""

import contextlib
import importlib
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import shardtrain

from pool import ended
from tiny import TINY, result_of

ROOT = Path(__file__).parents[2]
PROGRAM = ["-m", "shardtrain.train"]
JOB = ["+recipe=resnet", *TINY, "train.log_every=1"]
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
SAVING = [*JOB, "train.epochs=4000", "checkpoint.keep=1", "run.name=here"]


def torchrun(*arguments: str) -> list[str]:
    """Two ranks, on a port of their own, so that runs do not meet."""
    launcher = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    return [sys.executable, *launcher, "--nproc-per-node", "2", *PROGRAM, *arguments]


def in_a_shell(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"} | environment
    return subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, timeout=300)


def test_help_needs_no_torch(tmp_path: Path) -> None:
    program = "import runpy, sys; runpy.run_module('shardtrain.train', run_name='__main__')"
    program += "; sys.exit('torch' in sys.modules)"
    done = in_a_shell([sys.executable, "-c", program, "--help", "train"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_short_command_is_the_program(monkeypatch: Any, capsys: Any) -> None:
    scripts = re.findall(
        r'^shardtrain-(\w+) = "(.+):(\w+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert {"train", "plan", "evaluate", "export", "predict"} == {name for name, *_ in scripts}
    for name, module, function in scripts:
        assert module == f"shardtrain.{name}.__main__"
        assert callable(getattr(importlib.import_module(module), function))
    monkeypatch.setattr("faulthandler.enable", lambda **_: None)  # pytest's stderr is no file
    for name, module, _ in scripts:
        monkeypatch.setattr(sys, "argv", [f"shardtrain-{name}", "--version"])
        importlib.import_module(module).main()
        assert capsys.readouterr().out == f"shardtrain {shardtrain.__version__}\n", name
    monkeypatch.setattr(sys, "argv", ["shardtrain-plan", "--cfg", "job"])
    assert importlib.import_module("shardtrain.plan.__main__").main() is None
    assert "zero_init_residual:" in capsys.readouterr().out


@pytest.mark.long
def test_a_short_command_finds_modules_in_the_working_directory(tmp_path: Path) -> None:
    """As a console script does, `-I` leaves the working directory out of `sys.path`."""
    (tmp_path / "mymodel.py").write_text("import torch\n\n\nclass Net(torch.nn.Flatten):\n    pass\n")
    program = "from shardtrain.train.__main__ import main; main()"
    own = ("model._target_=mymodel.Nett", "allow=[mymodel]")
    done = in_a_shell([sys.executable, "-I", "-c", program, *own], tmp_path)
    assert "mymodel has no builder Nett; did you mean Net?" in done.stderr, done.stderr


@pytest.mark.long
def test_mistakes_survive_torchrun(tmp_path: Path) -> None:
    done = in_a_shell(torchrun("+recipe=resnet", "train.batch_size=9"), tmp_path)
    message = "error: train.batch_size=9 is not divisible by 2 ranks × train.accumulate=1; 8 or 10 would fit"
    assert done.returncode == 1
    assert re.findall(rf"^{re.escape(message)}", done.stderr, re.MULTILINE) == [message]
    root_cause = done.stderr.partition("Root Cause")[2]
    assert f"traceback : {message}" in root_cause
    assert "exitcode  : 2" in root_cause
    assert f'File "{Path(shardtrain.__file__).parent}' not in done.stderr  # no traceback of ours
    assert not (tmp_path / "outputs").exists()


def test_ctrl_c_leaves_cleanly(tmp_path: Path) -> None:
    command = [sys.executable, *PROGRAM, *SAVING]
    with subprocess.Popen(command, cwd=tmp_path, **PIPES) as running:
        try:
            next(line for line in running.stdout if line.startswith("step"))
            running.send_signal(signal.SIGINT)
            output, errors = running.communicate(timeout=300)
        finally:
            running.kill()
    assert running.returncode == 130
    assert "interrupted  step" in output
    assert re.fullmatch(
        r"stopped by SIGINT after step (\d+); step \1 is saved, and the same command resumes from it",
        output.splitlines()[-1],
    )
    assert errors == ""  # so that the line above is the last one
    assert result_of(tmp_path / "outputs/here")["status"] == "interrupted"
    assert "status interrupted" in (tmp_path / "outputs/here/log.txt").read_text()


def test_ctrl_c_while_torch_is_imported_shows_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shardtrain.train", "+recipe=resnet"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE) as running:
        while running.poll() is None and "libtorch" not in Path(f"/proc/{running.pid}/maps").read_text():
            time.sleep(0.01)
        running.send_signal(signal.SIGINT)
        assert running.communicate(timeout=300) == (None, b"")
    assert running.returncode == -signal.SIGINT


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_leave_with_torchrun(tmp_path: Path, number: signal.Signals) -> None:
    """As from a terminal, to the whole process group; torchrun, if killed, passes nothing on to its ranks.

    `test_resume.py` has what it passes on.
    """
    command = torchrun(*SAVING, "run.dir=run")
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True, **PIPES) as running:
        try:
            next(line for line in running.stdout if line.startswith("step"))
            os.killpg(running.pid, number)
            output, errors = running.communicate(timeout=300)  # until the ranks have ended, too
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
    killed = number == signal.SIGKILL
    assert running.returncode == (-number if killed else 1)
    name = "SIGTERM" if killed else "SIGINT"
    (step,) = re.findall(rf"stopped by {name} after step (\d+); step \1 is saved", output.splitlines()[-1])
    assert f"interrupted  step {step}" in output
    assert "shardtrain/train/" not in errors  # torchrun tells where it was itself; we do not
    assert result_of(tmp_path / "run")["status"] == "interrupted"


# A model and an optimizer of the user's own, in the working directory.
MINE = """
import numpy as np
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width: int, num_classes: int):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, width, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(width, num_classes)

    def forward(self, images):
        return self.head(self.body(images))

class Slow(torch.optim.SGD):
    pass

class Twice(nn.CrossEntropyLoss):
    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, logits, labels):
        return self.factor * super().forward(logits, labels)

def seven(logits, labels, value=1.0):
    return value

def spread(logits, labels, classes):
    return {"spread": logits.std(), "shown": np.zeros((len(classes), 3, 3), np.uint8)}

"""
OWN = (
    *("model._target_=mine.Net", "model.width=7", "optim._target_=mine.Slow", "optim.momentum=0.5"),
    *("train.loss._target_=mine.Twice", "train.loss.factor=2", "train.label_smoothing=0"),
    "monitor.writers=[]",
    *("monitor.scores=[{_target_:mine.seven,value:7.0},mine.spread,per_class]", "train.best=spread/val"),
)


def test_a_model_of_ones_own_runs_where_the_command_allows_it(tmp_path: Path) -> None:
    """To train, to resume and to export: neither a file nor a checkpoint allows anything."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe/sly.yaml").write_text("# @package _global_\nallow: [mine]\n")
    sizes = [each for each in JOB if not each.startswith("model")]
    train = [*PROGRAM, *sizes, *OWN, "data.workers=0", "checkpoint.keep=1", "run.name=own"]
    train += ["model.freeze=[body]"]
    done = ended(2, *train, "allow=[mine]", "train.max_steps=2", folder=tmp_path)
    assert (done.codes, done.errors) == ([0, 0], "")
    assert done.output.count("finished") == 1
    result = result_of(tmp_path / "outputs/own")
    assert result["parameters"] == 7 * 9 + 7 + 7 * 10 + 10
    assert result["seven/val"] == 7
    assert result["loss/val"] == pytest.approx(2 * math.log(10), rel=0.2)  # of the loss that is trained
    assert result["best/spread"] == result["spread/val"] > 0
    for refused, arguments in (
        ("error: model._target_=mine.Net: only builders in shardtrain.recipes and torchv", train),
        ("error: allow=['mine']: the command line alone says", [*PROGRAM, "--config-dir=.", "+recipe=sly"]),
    ):
        done = ended(1, *arguments, folder=tmp_path)
        assert (done.codes, refused in done.errors) == ([2], True), done.errors
    done = ended(1, *train, "allow=[mine]", "train.max_steps=3", folder=tmp_path)
    assert done.codes == [0], done.errors
    assert "continuing after step 2 of 3" in done.output
    export = ["-m", "shardtrain.export", "run=outputs/own", "out=own.pth"]
    assert ended(1, *export, folder=tmp_path).codes == [2]
    done = ended(1, *export, "allow=[mine]", folder=tmp_path)
    assert (done.codes, "checked: shardtrain.load_exported answers" in done.output) == ([0], True), (
        done.errors
    )


SBATCH = ROOT / "shardtrain/train/train.sbatch"
# Commands that stand for Slurm's, for the sbatch file.
# srun starts its command once a node and passes signals on; a node's torchrun notes what it is given, and
# ends when it is told to, or at once if there is a file `end`.
STAND_INS = {
    "scontrol": '[ $1 = show ] && printf "node7\nnode8\n" || echo "$@" >> requeued',
    "srun": """
        shift  # --kill-on-bad-exit=1
        trap 'kill -TERM $(jobs -p)' TERM  # before any node can say that it runs
        for node in 0 1; do SLURM_NODEID=$node "$@" & nodes="$nodes $!"; done
        status=0
        for node in $nodes; do
          while kill -0 $node 2>/dev/null; do wait $node; code=$?; done
          [ $code = 0 ] || status=$code
        done
        exit $status""",
    "torchrun": """
        trap 'echo saved > saved.$SLURM_NODEID; exit 1' TERM
        echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" > patience
        echo "$@" > given.tmp.$SLURM_NODEID; mv given.tmp.$SLURM_NODEID given.$SLURM_NODEID
        while [ ! -f end ]; do sleep 0.02; done
        exit $(cat end)""",
}


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    """The command of a job of two nodes, in `tmp_path`."""
    for name, body in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    facts = "JOB_NAME=digits JOB_ID=54321 JOB_NODELIST=node[7-8] JOB_NUM_NODES=2 GPUS_ON_NODE=a100:4"
    slurm = [f"SLURM_{fact}" for fact in (*facts.split(), "CPUS_PER_TASK=64")]
    return ["env", f"PATH={tmp_path}:{os.environ['PATH']}", *slurm, "bash", str(SBATCH), "+recipe=resnet"]


def test_a_failure_of_a_node_is_the_job_s(job: list[str], tmp_path: Path) -> None:
    (tmp_path / "end").write_text("3")
    assert in_a_shell(job, tmp_path).returncode == 3
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGUSR1, "time"), (signal.SIGTERM, "pre-emption")])
def test_a_job_that_has_to_leave_saves_and_is_queued_again(
    job: list[str], tmp_path: Path, number: signal.Signals, reason: str
) -> None:
    with subprocess.Popen(job, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as running:
        while not all((tmp_path / f"given.{node}").exists() for node in (0, 1)):
            assert running.poll() is None
        running.send_signal(number)
        output, _ = running.communicate(timeout=200)
    assert running.returncode == 1
    given = {(tmp_path / f"given.{node}").read_text() for node in (0, 1)}  # one meeting point
    assert given == {
        "--nnodes 2 --nproc-per-node 4 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint node7:34321 "
        "--rdzv-id 54321-0 -m shardtrain.train run.name=digits-54321 +recipe=resnet\n"
    }
    assert 30 < int((tmp_path / "patience").read_text()) < 300  # USR1 comes 300 s before the end
    assert f"asked to leave ({reason}): queued again, to resume from outputs/digits-54321" in output
    assert [(tmp_path / f"saved.{node}").exists() for node in (0, 1)] == [True, True]
    assert (tmp_path / "requeued").read_text() == "requeue 54321\n"

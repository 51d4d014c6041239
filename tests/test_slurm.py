"""The sbatch file, run by bash with commands that stand for Slurm's."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

SBATCH = Path(__file__).parents[1] / "configs/slurm/train.sbatch"

# srun starts its command once a node and passes signals on; a node's torchrun notes what it is given, and
# ends when it is told to, or at once if there is a file `end`.
STAND_INS = {
    "scontrol": '[ $1 = show ] && printf "node7\nnode8\n" || echo "$@" >> requeued',
    "srun": """
        shift  # --kill-on-bad-exit=1
        for node in 0 1; do SLURM_NODEID=$node "$@" & nodes="$nodes $!"; done
        trap 'kill -TERM $nodes' TERM
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
    facts = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NAME": "digits",
        "SLURM_JOB_ID": "54321",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_CPUS_PER_TASK": "64",
    }
    return ["env", *(f"{key}={value}" for key, value in facts.items()), "bash", str(SBATCH), "+recipe=resnet"]


def start(job: list[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(job, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("code", [0, 3])
def test_every_node_starts_a_torchrun_at_one_meeting_point(job: list[str], tmp_path: Path, code: int) -> None:
    (tmp_path / "end").write_text(str(code))
    with start(job, tmp_path) as running:
        assert running.wait(timeout=20) == code  # a failure is the job's failure
    given = {(tmp_path / f"given.{node}").read_text() for node in (0, 1)}
    assert given == {
        "--nnodes 2 --nproc-per-node 4 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint node7:34321 "
        "--rdzv-id 54321-0 -m shardtrain.train run.name=digits-54321 +recipe=resnet\n"
    }
    assert not (tmp_path / "requeued").exists()
    assert 30 < int((tmp_path / "patience").read_text()) < 300  # USR1 comes 300 s before the end


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGUSR1, "time"), (signal.SIGTERM, "pre-emption")])
def test_a_job_that_has_to_leave_saves_and_is_queued_again(
    job: list[str], tmp_path: Path, number: signal.Signals, reason: str
) -> None:
    with start(job, tmp_path) as running:
        while not all((tmp_path / f"given.{node}").exists() for node in (0, 1)):
            assert running.poll() is None
        running.send_signal(number)
        output, _ = running.communicate(timeout=20)
    assert running.returncode == 1
    assert f"asked to leave ({reason}): queued again, to go on from outputs/digits-54321" in output
    assert [(tmp_path / f"saved.{node}").exists() for node in (0, 1)] == [True, True]
    assert (tmp_path / "requeued").read_text() == "requeue 54321\n"

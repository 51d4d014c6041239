"""Sweeps: what Hydra's sweepers start, how jobs end, and the table."""

import functools
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from shardtrain.config.errors import UserError
from shardtrain.train import sweep
from shardtrain.train.sweep import Outcome

from tiny import TINY, composed, result_of

TWO_STEPS = ("+recipe=resnet", *TINY, "train.max_steps=2", "checkpoint.keep=0", "monitor.writers=[]")


def started(folder: Path, *arguments: str, scores: Any = lambda words: 1.0) -> list[str]:
    """The words in which jobs differ, of all that a sweep starts; ``scores``: what each one reaches."""
    given = [*arguments, f"run.dir={folder}/sweep"]
    found = []

    def instead(command: list[str]) -> str:
        directory = Path(command[-1].removeprefix("run.dir=").strip("'"))
        directory.mkdir(parents=True, exist_ok=True)
        words = [word for word in command[command.index("shardtrain.train") + 1 : -1] if word not in given]
        found.append(" ".join(words))
        score = scores(found[-1])
        result = {"best_by": "acc1/val", "best/acc1": score, "best_is_lowest": False}
        (directory / "result.json").write_text(json.dumps(result))
        return "" if score is not None else "why"

    with patch.object(sweep, "problem_of", instead):
        sweep.run(["-m", *given])
    return found


@pytest.mark.long
def test_every_combination_in_hydras_words(tmp_path: Path) -> None:
    jobs = functools.partial(started, tmp_path)
    every = [f"optim.lr={lr} seed={seed}" for lr in (0.1, 0.2) for seed in (0, 1)]
    assert jobs("+recipe=resnet", "optim.lr=0.1,0.2", "seed=range(2)") == every
    of_groups = jobs("data=glob(cifar*)", "optim=sgd,adamw", "optim.lr=1", "data.root=.")
    assert of_groups == [
        f"data={data} optim={optim}" for data in ("cifar10", "cifar100") for optim in ("sgd", "adamw")
    ]
    assert jobs("seed=shuffle(range(9))") == jobs("seed=shuffle(range(9))") != jobs("seed=range(9)")
    assert jobs("seed=4") == [""]


def test_flags_and_single_values_are_every_jobs(tmp_path: Path, capsys: Any) -> None:
    words = ["train.epochs=3", "--config-dir", str(tmp_path)]
    found = sweep.read(["-m", "seed=1,2", "ranks=3", *words], False)
    assert found is not None
    assert (found.fixed, found.swept, found.ranks) == (words, ["seed=1,2"], 3)
    assert (found.first.train.epochs, found.first.seed) == (3, 1)
    for flags, text in (("--cfg job", "seed: 1"), ("--help optim", "optim:\n")):
        assert sweep.read(["-m", "seed=1,2", *flags.split()], True) is None
        assert text in capsys.readouterr().out


def test_all_that_a_sweep_writes_is_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        started(tmp_path, "seed=1,2", "hydra.sweep.dir=elsewhere", scores={"seed=1": 5.0}.get)
    assert left.value.code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["sweep"]
    folders = sorted(path.name for path in (tmp_path / "sweep").iterdir())
    assert folders == ["0-seed-1", "1-seed-2", "multirun.yaml"]
    # the same again, of fewer: the other's end is not told again
    assert started(tmp_path, "seed=1,1") == ["seed=1", "seed=1"]


def test_a_sweep_ends_with_the_table_and_2_if_a_job_failed(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as left:
        started(tmp_path, "seed=1,2,3", scores={"seed=1": 5.0, "seed=3": 7.0}.get)
    assert left.value.code == 2
    said = capsys.readouterr()
    assert re.findall(r"^ +([\d.]+ %|failed) +(\d)  (.*)$", said.out, re.M) == [
        ("7.00 %", "2", "seed=3"),
        ("5.00 %", "0", "seed=1"),
        ("failed", "1", "seed=2"),
    ]
    assert said.err == "error: 1 of 3 jobs have failed, the first, job 1, with: why\n"


@pytest.mark.filterwarnings("ignore")  # optuna's own
def test_optuna_chooses_the_highest_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the lowest where that is best; a job that fails is the worst."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    own = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=12", "hydra.sweeper.sampler.seed=1")

    def score(words: str) -> float | None:
        rate = float(words.rpartition("=")[2])
        return None if rate > 0.8 else 50.0 - abs(rate - 0.3)

    own = (*own, "hydra.sweeper.direction=maximize")
    with pytest.raises(SystemExit):
        started(tmp_path, "optim.lr=interval(0.1,0.9)", *own, scores=score)
    best = (tmp_path / "sweep/optimization_results.yaml").read_text()
    rate, value = (float(text) for text in re.findall(r"^ *(?:optim.lr|best_value): (\S+)$", best, re.M))
    assert value == pytest.approx(abs(rate - 0.3) - 50)
    done = [json.loads(file.read_text()) for file in (tmp_path / "sweep").glob("*/outcome.json")]
    assert len(done) == 12
    assert min(each["rank"] for each in done) == value


MISTAKES = """
optim.lr=interval(0.1,0.2) | BasicSweeper does not support sweep type : INTERVAL
run.name=a,b | run.name=a,b: all jobs of a sweep have one run.name
data=glob(x*) | data=glob(x*): a sweep without a job: a glob(…) matches no name
optim.lr=0.1,0.2 train.epoch=1 | unknown key train.epoch; did you mean train.epochs?
seed=1,2 ranks=0 | ranks=0: expected at least 1
seed=1,2 hydra/sweeper=none | unknown hydra/sweeper 'none' (valid: basic
"""


@pytest.mark.parametrize("line", MISTAKES.strip().splitlines())
def test_mistakes_are_named_before_the_first_job(tmp_path: Path, capsys: Any, line: str) -> None:
    words, _, told = line.partition(" | ")
    no_job = patch.object(sweep, "problem_of", lambda command: pytest.fail("a job"))
    with no_job, pytest.raises(SystemExit) as left:
        sweep.run(["-m", *words.split(), f"run.dir={tmp_path}/sweep"])
    (message,) = capsys.readouterr().err.splitlines()
    assert (left.value.code, message.startswith("error: "), told in message) == (2, True, True), message


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_sweep_of_four_on_two_ranks(tmp_path: Path) -> None:
    """Two jobs are refused, one gives a loss that is no number; the first trains as it would alone."""
    swept = ("optim.lr=0.001,1e30", "train.batch_size=12,13")
    command = [sys.executable, "-m", "shardtrain.train", "-m", *TWO_STEPS, *swept, "ranks=2", "run.dir=sweep"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "error: 3 of 4 jobs have failed, the first, job 1, with: exit code 1" in done.stderr
    assert "error: train.batch_size=13 is not divisible by 2 ranks" in done.stderr
    assert "job 1 has failed: exit code 1" in done.stdout
    assert done.stdout.count("\nworld ") == 2  # the first lines are those of each job that begins
    first = tmp_path / "sweep/0-lr-0.001-batch_size-12"
    best = result_of(first)["best/acc1"]
    outcome = json.loads((first / "outcome.json").read_text())
    overrides = ["optim.lr=0.001", "train.batch_size=12"]
    assert outcome == Outcome(0, overrides, score=best, rank=-best)._asdict()
    assert f"{best:>11.2f} %     0  optim.lr=0.001 train.batch_size=12" in done.stdout
    assert result_of(tmp_path / "sweep/2-lr-1e+30-batch_size-12")["status"] == "failed"


def problem_of(program: str) -> str:
    return sweep.problem_of([sys.executable, "-c", f"import os, sys\n{program}"])


def test_a_job_that_dies_ends_itself_alone() -> None:
    assert problem_of("pass") == ""
    assert problem_of("os.kill(os.getpid(), 9)") == "ended by SIGKILL"
    assert problem_of("sys.exit(3)") == "exit code 3"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_job_and_then_the_sweep(number: int, code: int) -> None:
    """The job gets it once, whoever sent it; here the job itself."""
    program = f"""
import signal
signal.signal({int(number)}, lambda *_: sys.exit(7))
os.kill(os.getppid(), {int(number)})
while True:
    signal.pause()
"""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        problem_of(program)
    assert left.value.code == code
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_starts_no_other_job(tmp_path: Path) -> None:
    with (
        patch.object(sweep, "exit_code_of", side_effect=SystemExit(130)) as jobs,
        pytest.raises(SystemExit) as left,
    ):
        sweep.run(["-m", "seed=1,2", f"run.dir={tmp_path}/sweep"])
    assert (left.value.code, jobs.call_count) == (130, 1)


def test_a_sweep_inside_of_ranks_names_the_command() -> None:
    command = "python -m shardtrain.train -m ranks=N with the same words$"
    with pytest.raises(UserError, match=rf"^-m: a sweep starts torchrun itself, once per job; use {command}"):
        sweep.refuse_ranks(["-m", "+recipe=resnet", "seed=range(2)"], True)


@pytest.mark.parametrize("path", ["a b/it's", "a\\'b", "x,y", "\\${b}", "[c]", "1", "a\\b\\\\"])
def test_a_folder_of_any_name_reaches_the_job(path: str) -> None:
    assert composed(f"run.dir={sweep.quoted(Path(path))}").run.dir == path


def test_the_ranking() -> None:
    """Of a score whose lowest value is best; failures are last, with their reason."""
    done = [Outcome(0, ["seed=0"], "", 0.5, 0.5), Outcome(1, ["seed=1"], "why"), Outcome(3, ["seed=3"])]
    assert sweep.table([*done, Outcome(2, ["seed=2"], "", 0.25, 0.25)], "loss/val").splitlines() == [
        "best loss/val   job  overrides",
        "       0.2500     2  seed=2",
        "       0.5000     0  seed=0",
        "            –     3  seed=3",
        "       failed     1  seed=1",
        "                     why",
    ]


def test_the_program_of_earlier_versions_says_what_to_use() -> None:
    command = [sys.executable, "-m", "shardtrain.train.sweep", "--nproc-per-node", "2", "--", "seed=1,2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: use python -m shardtrain.train -m ranks=N WORD …\n")

"""A run that was interrupted and continued is the run that was not."""

import contextlib
import errno
import os
import re
import shutil
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import shardtrain
from shardtrain import checkpoint, comm
from shardtrain.checkpoint import store
from shardtrain.checkpoint.store import steps_in
from shardtrain.config.format import first_of
from shardtrain.data import feed
from shardtrain.job import evaluation
from shardtrain.launch.signals import SIGNALS, Stopped, StopSignals
from shardtrain.train import saving
from shardtrain.train.resume import open_named

from pool import each_rank, once
from tiny import QUIET, crash, curves, final, handlers_restored, result_of, run_to_end, write_folders


def on_rank_1(number: int) -> None:
    if comm.rank() == comm.world_size() - 1:
        os.kill(os.getpid(), number)


def interrupted(folder: str, events: list[dict[int, Any]], *arguments: str) -> list[str]:
    return [run_to_end(folder, *arguments, at=event) for event in [*events, {}]]


undisturbed = once(run_to_end)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own
def test_crashes_leave_no_trace(on_ranks: Any, tmp_path: Path, undisturbed: Path) -> None:
    endings = on_ranks(2, interrupted, str(tmp_path), [{step: crash} for step in (2, 7, 10)])
    assert endings[0] == ["RuntimeError crash"] * 3 + ["finished"]
    assert final(tmp_path) == final(undisturbed)
    assert curves(tmp_path) == curves(undisturbed)
    ours = result_of(tmp_path)
    theirs = result_of(undisturbed)
    for key in ("status", "step", "loss/train", "acc1/val", "best/acc1", "grad_norm"):
        assert ours[key] == theirs[key], key
    assert "continuing after step " in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize("workers", [(0, 0), pytest.param((2, 1), marks=pytest.mark.long)])
def test_random_crops_micro_batches_and_workers_too(tmp_path: Path, workers: tuple[int, int]) -> None:
    """In one process, since a rank of the pool may not start workers."""
    write_folders(tmp_path / "images", 60)
    images = ("data=imagefolder", f"data.root={tmp_path}/images", "data.image_size=16", "data.resize=18")
    arguments = (*images, "train.accumulate=2", QUIET, "augment=imagefolder")
    assert run_to_end(str(tmp_path / "a"), *arguments, f"data.workers={workers[0]}") == "finished"
    endings = interrupted(str(tmp_path / "b"), [{6: crash}], *arguments, f"data.workers={workers[1]}")
    assert endings == ["RuntimeError crash", "finished"]
    assert final(tmp_path / "a") == final(tmp_path / "b")


def test_damage_falls_back_with_a_message(on_ranks: Any, tmp_path: Path, undisturbed: Path) -> None:
    folder = shutil.copytree(undisturbed, tmp_path / "damaged")
    (folder / "checkpoints/step-00000010/rank-00001.safetensors").unlink()
    assert on_ranks(2, run_to_end, str(folder)) == ["finished"] * 2
    log = (folder / "log.txt").read_text()
    assert "step-00000010 is damaged: rank 1: rank-00001.safetensors is missing; it is set aside" in log
    assert "continuing after step 8" in log
    assert final(folder) == final(undisturbed)


@contextlib.contextmanager
def signal_in_an_evaluation() -> Iterator[None]:
    """The last rank is told to leave while it answers the second batch of the first evaluation."""
    sums = evaluation._sums
    calls = []

    def signalled_sums(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            on_rank_1(signal.SIGTERM)
        return sums(*arguments)

    one_at_a_time = patch.object(feed, "EVAL_BATCH", 1)
    with patch.object(evaluation, "_sums", signalled_sums), one_at_a_time:
        yield


@pytest.mark.long
@each_rank(2, transport="auto")
def test_a_signal_ends_an_evaluation_which_is_made_up_for(tmp_path: Path) -> None:
    """One in the middle of a run."""
    given = (QUIET, "train.eval_every=1")
    with signal_in_an_evaluation():
        assert run_to_end(str(tmp_path / "left"), *given) == "Stopped stopped by SIGTERM"
    assert run_to_end(str(tmp_path / "left"), *given) == "finished"
    assert "stopped by SIGTERM after step 5; step 5 is saved" in (tmp_path / "left/log.txt").read_text()
    run_to_end(str(tmp_path / "whole"), *given)
    assert final(tmp_path / "left") == final(tmp_path / "whole")
    for key in ("status", "step", "loss/train", "loss/val", "loss/val_ema", "best/acc1"):
        assert result_of(tmp_path / "left")[key] == result_of(tmp_path / "whole")[key], key


def test_signals_are_noted_and_a_second_ctrl_c_leaves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with handlers_restored():  # under nohup
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert not signals.noted
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.noted == signal.SIGUSR1
    assert [signal.getsignal(number) for number in SIGNALS] == before
    with handlers_restored(), pytest.raises(KeyboardInterrupt) as caught:  # noqa: PT012
        signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)  # the same one, passed on by torchrun
            assert signals.noted == signal.SIGINT
            monkeypatch.setattr("shardtrain.launch.signals.SAME_S", -1.0)
            signal.raise_signal(signal.SIGINT)
    assert type(caught.value) is KeyboardInterrupt
    assert (Stopped(signal.SIGINT).exit_code, Stopped(signal.SIGUSR1).exit_code) == (130, 143)


@pytest.mark.long
def test_a_start_from_elsewhere_is_only_for_a_run_without_checkpoints(
    on_ranks: Any, tmp_path: Path, undisturbed: Path
) -> None:
    elsewhere = shutil.copytree(undisturbed, tmp_path / "elsewhere")
    (elsewhere / "checkpoints/step-00000010").rename(tmp_path / "ten")
    run = tmp_path / "run"
    assert on_ranks(2, run_to_end, str(run), f"resume={elsewhere}") == ["finished"] * 2
    assert final(run) == final(undisturbed)
    assert on_ranks(2, run_to_end, str(run), f"resume={undisturbed}") == ["finished"] * 2
    ignored = f"; resume={undisturbed} is only for a run without checkpoints of its own"
    assert ignored in (run / "log.txt").read_text()


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("train.batch_size=6", "the checkpoint was saved by a run with train.batch_size=12, this one has 6"),
        ("seed=3", "was saved by a run with seed=0, this one has 3, so its place among the images"),
        ("optim.lr=0.5", "optim.lr=0.002, this one has 0.5, and it has no step left to train; choose anothe"),
        ("augment.zoom=0.5 ema.decay=0.5 optim=sgd", "ema.decay=0.9, this one has 0.5; augment.zoom=0.08, t"),
        ("train.max_steps=9", "the checkpoint is of step 10, and this run would end at step 9; raise train."),
        ("model=squeezenet1_1", "by a run with model=mobilenet_v3_small, this one has squeezenet1_1"),
        ("resume=/nowhere", "resume=/nowhere: neither a checkpoint nor a run with checkpoints; resume=none"),
        ("resume={0}/saved", "resume: no run has saved this: 'position'; resume=none starts anew"),
    ],
)
def test_what_cannot_be_continued_is_named(
    tmp_path: Path, undisturbed: Path, argument: str, text: str
) -> None:
    folder = tmp_path / "new" if "/" in argument else shutil.copytree(undisturbed, tmp_path / "run")
    checkpoint.save(tmp_path / "saved", shardtrain.shard(torch.nn.Linear(3, 2)))  # by no run
    ending = run_to_end(str(folder), QUIET, *argument.format(tmp_path, undisturbed).split())
    assert ending.startswith("UserError ")
    assert text in ending


def test_the_command_s_settings_count_where_it_names_the_checkpoint(
    tmp_path: Path, undisturbed: Path
) -> None:
    folder = shutil.copytree(undisturbed, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints/step-00000010")
    seen: list[Any] = []
    fit = saving.Saver.after_step

    def look(self: saving.Saver, *args: Any, **options: Any) -> None:
        groups = self._job.optimizer.param_groups
        seen.append([(group["weight_decay"], group["lr"]) for group in groups])
        fit(self, *args, **options)

    with patch.object(saving.Saver, "after_step", look):
        given = ("optim.weight_decay=0.25", "sched=constant", "optim.lr=0.5")
        assert f"; resume={folder}/checkpoints/step-00000008 continues it w" in run_to_end(
            str(folder), *given
        )
        assert run_to_end(str(folder), *given, f"resume={folder}") == "finished"
    assert seen == [[(0.25, 0.5), (0.0, 0.5)]] * 2


@pytest.mark.long
@each_rank(2, transport="auto")
def test_a_step_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    """Rank 1's images are no numbers in step 3."""
    calls = []
    prepare = feed.Prepare.__call__

    def spoil(self: feed.Prepare, images: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        spoiled = comm.rank() == 1 and len(calls) in (3, 4)  # and when the step is computed again
        return prepare(self, images) * (float("nan") if spoiled else 1.0)

    with patch.object(feed.Prepare, "__call__", spoil):
        ending = run_to_end(str(tmp_path), QUIET, "train.log_every=1")
    text = "step 3: loss nan on rank 1, gradient norm nan; the first not finite is on rank 1 the output of "
    assert ending.startswith(f"RuntimeError {text}the root, then the gradient of 5."), ending
    assert ending.endswith(" in the root; a lower optim.lr may help")
    assert result_of(tmp_path)["status"] == "failed"
    assert "status failed" in (tmp_path / "log.txt").read_text()


@pytest.mark.long
def test_a_file_system_that_cannot_sync_directories_has_checkpoints(tmp_path: Path) -> None:
    fsync = os.fsync

    def refuse(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(handle)

    with patch.object(os, "fsync", refuse):
        assert run_to_end(str(tmp_path), QUIET) == "finished"
    assert steps_in(tmp_path / "checkpoints")[-1] == 10


@each_rank(2, transport="auto")
def test_a_checkpoint_that_only_one_rank_sees_is_damaged_on_all(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "one", shardtrain.shard(torch.nn.Linear(3, 2)))
    path = tmp_path / ("elsewhere" if comm.rank() else "one")
    with pytest.raises(checkpoint.Damaged, match=r"rank 1: rank-00001\.safetensors is missing"):
        open_named(path)


@pytest.mark.long
@each_rank(2, transport="auto")
def test_a_save_is_rehearsed_before_the_first_step(tmp_path: Path) -> None:
    """A host that does not see the others' directory, and a disk on which names are lost."""
    write = store.write_tensors
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(exist_ok=True)

    def write_elsewhere(path: Path, *args: Any) -> Any:
        return write(elsewhere / path.name if comm.rank() else path, *args)

    with patch.object(store, "write_tensors", write_elsewhere):
        ending = run_to_end(str(tmp_path / "a"), QUIET)
    assert re.fullmatch(
        r"UserError run.dir=.*/a: .*rehearsal-\w+ is damaged: rank 1: rank-00001.safetensors is missing; "
        "a save was rehearsed there; make room, or choose another run.dir",
        ending,
    ), ending
    with patch.object(os, "rename", side_effect=OSError(errno.EPERM, "Operation not permitted", "x")):
        ending = run_to_end(str(tmp_path / "b"), QUIET)
    assert "was not saved: rank 0: x: Operation not permitted; a save was rehearsed there" in ending
    assert not [*tmp_path.glob("*/checkpoints/.tmp*")]


def test_of_hundreds_of_parameters_that_do_not_fit_a_few_are_named() -> None:
    assert first_of(["a", "b", "c", "d", "e"]) == "a; b; c; d; e"
    assert first_of(["a", "b", "c", "d", "e", "f", "g"]) == "a; b; c; d; e; and 2 more"

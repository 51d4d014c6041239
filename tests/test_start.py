"""Before the first step: where a run starts, whose its directory is, what one rank finds, time-outs."""

from __future__ import annotations

import os
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.error import URLError

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torchvision.datasets import CIFAR10

from shardtrain import comm
from shardtrain.bench.report import Report
from shardtrain.bench.settings import read
from shardtrain.job import data
from shardtrain.job.config import WebDataset
from shardtrain.job.data import tars
from shardtrain.job.dist_env import RankInfo, together
from shardtrain.job.launch import Context
from shardtrain.job.schema import UserError
from shardtrain.monitor import open_monitor
from shardtrain.train.resume import find_start, locked, run_directory

from pool import each_rank
from test_data import cifar, encoded, shards, write_tar
from tiny import CPU, configure, context

Ranks = Callable[..., list[Any]]


def taken(folder: Path, *arguments: str) -> list[str]:
    """What a job says of its run directory once it has it."""
    config, place = configure(*arguments), context(folder)
    with run_directory(find_start(config, place), config, place) as news:
        comm.barrier()
        return news


def half_saved(folder: Path) -> Path:
    path = folder / "checkpoints/.tmp-step-00000004-abcd/rank-00000.safetensors"
    path.parent.mkdir(parents=True)
    path.write_text("half")
    return path


def test_a_scoring_leaves_a_live_runs_save_alone(tmp_path: Path) -> None:
    half = half_saved(tmp_path)
    taken(tmp_path, "eval_only=true")
    taken(tmp_path, "dry_run=true")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [half]
    taken(tmp_path)
    assert not half.exists()


def refused(body: Callable[..., Any], *arguments: Any) -> str:
    """What this rank is told."""
    try:
        body(*arguments)
    except UserError as error:
        return str(error)
    return ""


def in_spite_of_the_lock(folder: Path) -> tuple[str, list[str]]:
    return refused(taken, folder), taken(folder, "eval_only=true")


def test_two_jobs_do_not_write_into_one_directory(on_ranks: Ranks, tmp_path: Path) -> None:
    with locked(tmp_path):
        (told, _), others = on_ranks(2, in_spite_of_the_lock, tmp_path)
    assert others == (told, [])
    assert told.startswith(f"another job is writing into {tmp_path}: process {os.getpid()} on ")
    assert told.endswith(f"remove {tmp_path}/.lock")
    assert on_ranks(2, taken, tmp_path) == [[], []]


def test_a_file_system_without_locks_is_done_without(tmp_path: Path) -> None:
    with patch("fcntl.lockf", side_effect=OSError(38, "Function not implemented")), locked(tmp_path):
        assert (tmp_path / ".lock").is_file()


def test_every_job_of_a_sweep_starts_anew_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    rank_info = RankInfo(0, 1, 0, 1)
    rank_info.__dict__["store"] = HashStore()
    config = configure("resume=none")
    for job in "01":
        place = Context(rank_info, CPU, tmp_path / job)
        old = tmp_path / job / "checkpoints/step-00000004"
        old.mkdir(parents=True)
        start = find_start(config, place)
        assert old.is_dir()  # a mistake that is found now has changed nothing
        with run_directory(start, config, place) as news:
            assert news == [
                f"resume=none: the checkpoints of an earlier run are in {tmp_path}/{job}/checkpoints.1 now"
            ]
        assert not old.exists()
        old.mkdir(parents=True)  # from here on the run's own, which a restart goes on from
        text = (
            "no checkpoint is complete: .*/checkpoints/step-00000004 is damaged: .*; resume=none starts anew"
        )
        with pytest.raises(UserError, match=text):
            find_start(config, place)


def one_rank_s_mistakes(folder: Path) -> list[str]:
    """What this rank is told of what rank 0, rank 1, or both find."""

    def complain(ranks: tuple[int, ...]) -> None:
        if comm.rank() in ranks:
            raise UserError(f"no disk on rank {comm.rank()}")

    def unreachable(root: str, download: bool) -> None:
        raise URLError("no route to host")

    def monitored() -> None:
        with open_monitor(configure(), context(folder / "file"), None, None):  # type: ignore[arg-type]
            raise AssertionError("there is no directory to write to")

    found = [refused(together, lambda ranks=ranks: complain(ranks)) for ranks in ((0,), (1,), (0, 1))]
    found += [refused(taken, folder / "file"), refused(monitored)]
    with patch.object(CIFAR10, "__init__", lambda self, root, download: unreachable(root, download)):
        found.append(refused(data.load, replace(cifar("cifar10", folder), download=True)))
    settings = read([f"out={folder}/file"], False)
    assert settings is not None
    return [*found, refused(Report, settings, "steps", context(folder).rank_info, CPU)]


def test_a_mistake_that_one_rank_finds_is_told_by_all(on_ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, second = on_ranks(2, one_rank_s_mistakes, tmp_path)
    assert first == second
    assert first[:3] == ["no disk on rank 0", "no disk on rank 1", "no disk on rank 0"]
    beginnings = [
        f"run.dir={tmp_path}/file: cannot write there",
        f"run.dir={tmp_path}/file: cannot write there",
        f"data.download=true: cannot fetch cifar10 to {tmp_path}: <urlopen error no route to host>",
        f"out={tmp_path}/file: cannot write there",
    ]
    for told, beginning in zip(first[3:], beginnings, strict=True):
        assert told.startswith(beginning)


def indexed(config: WebDataset, bad: WebDataset) -> tuple[list[str], str]:
    """Which tar files this rank has scanned."""
    scan, scanned = tars._scan, []

    def noted(shard: Path) -> Any:
        scanned.append(shard.name)
        return scan(shard)

    with patch.object(tars, "_scan", noted):
        assert len(data.load(config).train) == 3
    return scanned, refused(data.load, bad)


def test_ranks_share_the_work_of_indexing(on_ranks: Ranks, tmp_path: Path) -> None:
    for name in ("train-0", "train-1", "train-2", "val"):
        write_tar(tmp_path / f"{name}.tar", {"0.jpg": encoded(1, "jpeg"), "0.cls": b"4"})
    (tmp_path / "bad-1.tar").write_bytes(b"this is not a tar file" * 100)
    (tmp_path / "bad-0.tar").write_bytes((tmp_path / "val.tar").read_bytes())
    config, bad = shards(tmp_path), shards(tmp_path, train="bad-*.tar")
    (first, told), (second, too) = on_ranks(2, indexed, config, bad)
    assert (first, second) == (["train-0.tar", "train-2.tar", "val.tar"], ["train-1.tar"])
    assert told == too
    assert "bad-1.tar" in told
    assert tarfile.is_tarfile(tmp_path / "bad-0.tar")


@each_rank(2, transport="auto")
def test_a_time_out_is_shortened_in_every_group() -> None:
    """A rank whose peer does not come gives up, in groups that were given more at first."""
    groups = [dist.group.WORLD, dist.new_group()]
    for group in groups:
        dist.broadcast(torch.zeros(1), 0, group)
    comm.set_time_out(timedelta(seconds=0.5))
    if comm.rank() == 0:
        time.sleep(2)
        return
    for group in groups:
        start = time.perf_counter()
        with pytest.raises(RuntimeError, match=r"(?i)timed out|timeout"):
            dist.broadcast(torch.zeros(1), 0, group)
        assert 0.4 < time.perf_counter() - start < 1.8


@each_rank(2, transport="auto")
def test_texts_between_ranks_arrive_as_they_were() -> None:
    ranks = comm.plain_transport()
    for texts in (["", "näher\n"], ["a" * 1000, ""], ["", ""]):
        mine = texts[comm.rank()]
        assert [comm.broadcast_text(mine, ranks, CPU, src) for src in (0, 1)] == texts
        assert comm.gather_texts(mine, ranks, CPU) == texts
    assert comm.broadcast_text("ä", comm.Alone(), CPU) == "ä"
    assert comm.gather_texts("ä", comm.Alone(), CPU) == ["ä"]

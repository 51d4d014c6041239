"""From a shell to the first step: places, devices, exit codes, who speaks; directories, time-outs."""

import faulthandler
import io
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.error import URLError

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, Store
from torchvision.datasets import CIFAR10

from shardtrain import comm, data
from shardtrain import device as devices
from shardtrain.config.command import require_run
from shardtrain.config.config import Config
from shardtrain.config.errors import UserError
from shardtrain.config.format import write_any_text
from shardtrain.launch import launcher, ranks
from shardtrain.launch.launcher import Context
from shardtrain.launch.ranks import RankInfo, choose_device, cpu_threads, together
from shardtrain.train.resume import find_start, identify, locked, run_directory

from pool import each_rank, ended
from tiny import ALONE, CPU, closed, composed, configure, context, refused


@pytest.fixture(autouse=True)
def _process_restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Torch's `record` points it at stderr, which is no file where pytest captures it.
    monkeypatch.setattr(faulthandler, "enable", lambda **_: None)
    handler = signal.getsignal(signal.SIGINT)
    threads = torch.get_num_threads()
    yield
    signal.signal(signal.SIGINT, handler)
    torch.set_num_threads(threads)


def _two_ranks(monkeypatch: pytest.MonkeyPatch, rank: int, store: Store) -> None:
    """Makes this process rank `rank` of two, with `store` for the launcher's."""
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(ranks, "rendezvous", lambda *args, **kwargs: iter([(store, rank, 2)]))
    monkeypatch.setattr(launcher, "PATIENCE", 0.0)


def _arguments(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])


def _no_job(config: Config, context: Context) -> None:
    raise AssertionError("the job must not start")


def test_places() -> None:
    assert RankInfo.from_environment({}) == ALONE
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    environ |= {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert RankInfo.from_environment(environ) == RankInfo(5, 8, 1, 4)
    assert RankInfo.from_environment({"RANK": "0", "WORLD_SIZE": "1"}) == ALONE
    by_srun = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8", "RANK": "0"}
    assert RankInfo.from_environment(by_srun) == ALONE
    for name in ("RANK", "LOCAL_WORLD_SIZE"):
        told = refused(RankInfo.from_environment, {key: environ[key] for key in environ if key != name})
        assert f"WORLD_SIZE=8, missing or no number: '{name}'; the launcher sets RANK" in told


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ("SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1", "srun has started 2 processes .* one torchrun per host"),
        ("OMPI_COMM_WORLD_SIZE=4", "mpirun has started 4 processes"),
        ("RANK=3", "RANK=3, but WORLD_SIZE is not set"),
        ("RANK=0 WORLD_SIZE=two", "WORLD_SIZE=two, missing or no number: invalid literal"),
        ("RANK=3 WORLD_SIZE=1", "RANK=3, WORLD_SIZE=1, .*: expected ranks from 0 to the number of ranks min"),
    ],
)
def test_processes_that_no_launcher_made_ranks_are_refused(environ: str, told: str) -> None:
    with pytest.raises(UserError, match=f"^{told}"):
        RankInfo.from_environment(dict(text.split("=") for text in environ.split()))


def test_a_store_that_rank_0_serves_outlives_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a rank could not learn that another one has told a user's mistake."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    waits = threading.Event()
    monkeypatch.setattr(ranks.time, "sleep", lambda _: waits.set())
    store = HashStore()
    infos = [RankInfo(rank, 2, rank, 2) for rank in range(2)]
    for each in infos:
        each.__dict__["store"] = store
    leaving = threading.Thread(target=infos[0].leave)
    leaving.start()
    assert waits.wait(10)
    infos[1].leave()
    leaving.join(10)
    assert not leaving.is_alive()


def test_what_an_encoding_lacks_is_written_as_an_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    write_any_text()
    print("8×8", flush=True)
    assert written.getvalue() == b"8\\xd78\n"


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    assert choose_device("auto", ALONE) == choose_device("cpu", ALONE) == torch.device("cpu")
    assert "device=cuda, but torch finds none here; device=cpu" in refused(choose_device, "cuda", ALONE)
    told = refused(choose_device, "cuda:0", ALONE)
    assert told == "device=cuda:0; did you mean cuda? (valid: auto, cpu, cuda)"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert choose_device("auto", RankInfo(1, 2, 1, 2)) == torch.device("cuda", 1)
    for shared in ("", "0"):
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", shared)
        told = refused(choose_device, "cuda", RankInfo(2, 4, 2, 4))
        assert told.startswith("4 ranks on this host, but torch finds 2 GPUs; start 2 ranks ")
        assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in told
    # What torch was built with may be older than what is loaded: NCCL itself refuses what it cannot do.
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert choose_device("cuda", RankInfo(3, 4, 3, 4)) == torch.device("cuda", 1)
    assert chosen == [1, 1]
    monkeypatch.setattr(devices, "ACCELERATOR", "mps")
    assert choose_device("mps", ALONE) == torch.device("mps", 0)
    with pytest.raises(UserError, match="torch has no collectives for mps: start a single rank"):
        choose_device("auto", RankInfo(0, 2, 0, 1))


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    by_torchrun = {"TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}
    assert cpu_threads(ALONE, {}) == 8
    assert cpu_threads(RankInfo(0, 3, 0, 3), by_torchrun) == 2
    assert cpu_threads(RankInfo(0, 16, 0, 16), by_torchrun) == 1
    assert cpu_threads(RankInfo(0, 2, 0, 2), {"OMP_NUM_THREADS": "1"}) == 1
    assert cpu_threads(RankInfo(0, 2, 0, 2), by_torchrun | {"OMP_NUM_THREADS": "3"}) == 3
    assert cpu_threads(ALONE, by_torchrun) == 1


def test_the_job_gets_config_device_and_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Context] = []
    for threads, where in ((2, "run.name=here"), (3, "run.dir=/some/where"), (1, "seed=1")):
        _arguments(monkeypatch, "+recipe=resnet", "device=cpu", f"threads={threads}", where)
        launcher.run(lambda config, context: seen.append(context))
        assert torch.get_num_threads() == threads
    named, placed, by_default = seen
    assert (named.rank_info, named.device, named.run_dir) == (ALONE, CPU, Path("outputs/here"))
    assert named.words["run.name"] == "run.name=here"
    assert placed.run_dir == Path("/some/where")
    assert by_default.run_dir.match("outputs/digits-resnet18-[0-9]*-[0-9]*-[0-9]*")
    # `run.dir=$UNSET`
    assert "run.dir=: it is empty; expected a path" in refused(launcher.run_dir, configure("run.dir="), ALONE)


def test_ranks_and_restarts_agree_on_what_the_first_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = HashStore()
    shared.set_timeout(timedelta(seconds=5))
    answers = []
    for attempt, proposal in [(0, "first"), (0, "second"), (1, "after a restart")]:
        rank_info = RankInfo(0, 2, 0, 2)
        rank_info.__dict__["store"] = PrefixStore(f"attempt_{attempt}", shared)
        answers.append(rank_info.agree("run_name", proposal))
    assert answers == ["first"] * 3
    # A single rank agrees too: torchrun --nnodes 1:2 has lost a node, or starts its only rank again.
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    single = RankInfo(0, 1, 0, 1)
    single.__dict__["store"] = shared
    assert single.agree("run_name", "of one") == "first"


def test_an_attempt_never_reads_what_an_earlier_one_left() -> None:
    """torchrun's store outlives its workers: what dead ranks left must not be taken for what others say."""
    shared = HashStore()
    with ThreadPoolExecutor(3) as threads:
        for attempt in range(3):
            met = threads.map(lambda rank: ranks.meet(shared, rank, 3, timedelta(seconds=20)), (2, 1, 0))
            first, *others = met
            assert not first.check(["address"])
            first.set("address", f"of attempt {attempt}")
            assert [other.get("address").decode() for other in others] == [f"of attempt {attempt}"] * 2
            # Ranks that die before they meet leave a token, or a token with its answer.
            shared.set("shardtrain/meeting/1", "dead")
            shared.set("shardtrain/meeting/2", "dead answered")


def test_a_configuration_is_printed_once(monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _arguments(monkeypatch, "+recipe=resnet", "--cfg", "job")
    for rank in (0, 1):
        _two_ranks(monkeypatch, rank, HashStore())
        launcher.run(_no_job)
        assert ("batch_size: 48" in capsys.readouterr().out) == (rank == 0)


def test_other_failures_keep_their_traceback_and_reach_torchrun(monkeypatch: Any, tmp_path: Path) -> None:
    def job(config: Config, context: Context) -> None:
        raise RuntimeError("as it was")

    _arguments(monkeypatch, "+recipe=resnet", "device=cpu")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(RuntimeError, match="as it was"):
        launcher.run(job)
    report = json.loads((tmp_path / "error.json").read_text())["message"]
    assert report["message"] == "RuntimeError: as it was"


GROUP = """
import os
from pathlib import Path

import torch

from shardtrain import comm
from shardtrain.launch.launcher import process_group
from shardtrain.launch.ranks import RankInfo


def listens():
    own = {str(each.stat().st_ino) for each in Path("/proc/self/fd").iterdir() if each.exists()}
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [row.split() for table in tables for row in table]
    return sorted({row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in own})


with process_group(RankInfo.from_environment(os.environ), torch.device("cpu")):
    comm.barrier()
    print("listens at", listens(), os.environ.get("GLOO_SOCKET_IFNAME"))
"""


@pytest.mark.long
def test_ranks_of_one_host_listen_on_loopback_only(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(GROUP)
    done = ended(2, "program.py", folder=tmp_path)
    assert done.codes == [0, 0], done.errors
    assert re.findall(r"listens at (.*)", done.output) == ["['0100007F'] lo"] * 2, done.output


@pytest.mark.long
def test_ranks_that_never_start_are_named() -> None:
    for rank, missing in ((0, "1, 2"), (1, "0")):
        told = refused(ranks.meet, HashStore(), rank, 3, timedelta(seconds=0))
        assert told.endswith(f"rank {rank} has waited 0 s at start-up for rank {missing}")


def taken(folder: Path, *arguments: str) -> list[str]:
    """What a job says of its run directory once it has it."""
    config = configure(*arguments)
    place = context(folder)
    identity = identify(config, place)
    with run_directory(*find_start(config, place, identity), config, place, identity) as news:
        comm.barrier()
        return news


@pytest.mark.long
@each_rank(2, transport="auto")
def test_two_jobs_do_not_write_into_one_directory(tmp_path: Path) -> None:
    """Rank 1 stands for the other job; rank 0 alone asks for the lock."""
    with locked(tmp_path) if comm.rank() == 1 else nullcontext():
        process = comm.broadcast(torch.tensor(os.getpid()), src=1)
        told = refused(taken, tmp_path)
    assert told.startswith(f"another job is writing into {tmp_path}: process {process} on ")
    assert told.endswith(f"remove {tmp_path}/.lock")
    comm.barrier()
    assert taken(tmp_path) == []


def test_every_job_of_a_sweep_starts_anew_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    rank_info = RankInfo(0, 1, 0, 1)
    rank_info.__dict__["store"] = HashStore()
    config = configure("resume=none")
    for job in "01":
        place = Context(rank_info, CPU, tmp_path / job)
        old = tmp_path / job / "checkpoints/step-00000004"
        old.mkdir(parents=True)
        identity = identify(config, place)
        store, start = find_start(config, place, identity)
        assert old.is_dir()  # a mistake that is found now has changed nothing
        with run_directory(store, start, config, place, identity) as news:
            assert news == [f"resume=none: the checkpoints of an earlier run are in {old.parent}.1 now"]
        assert not old.exists()
        old.mkdir(parents=True)  # from here on the run's own, which a restart goes on from
        told = refused(find_start, config, place, identify(config, place))
        assert told.startswith(f"resume=none: no checkpoint is complete: {old} is damaged: ")
        assert told.endswith("; resume=none starts anew")


def test_a_run_is_set_aside_beside_others_of_which_some_are_gone(tmp_path: Path) -> None:
    for folder in ("checkpoints/step-00000004", "checkpoints.2/step-00000002"):
        (tmp_path / folder).mkdir(parents=True)
    assert taken(tmp_path, "resume=none")[0].endswith("/checkpoints.3 now")
    assert (tmp_path / "checkpoints.3/step-00000004").is_dir()


def test_a_run_that_cannot_be_read_is_a_mistake(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    with closed(tmp_path):
        told = refused(require_run, run)
    assert told.startswith(f"run={run}: [Errno 13] Permission denied: "), told


@pytest.mark.long
@each_rank(2, transport="auto")
def test_a_mistake_that_one_rank_finds_is_told_by_all(tmp_path: Path) -> None:
    def complain(ranks: tuple[int, ...]) -> None:
        if comm.rank() in ranks:
            raise UserError(f"no disk on rank {comm.rank()} of näh\udce9")  # the name of a file, not UTF-8

    for chosen in ((0,), (1,), (0, 1)):
        assert refused(together, partial(complain, chosen)) == f"no disk on rank {chosen[0]} of näh\\udce9"
    (tmp_path / "file").write_text("")
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run/checkpoints").write_text("")
    comm.barrier()
    found = [refused(taken, tmp_path / "file"), refused(taken, tmp_path / "run", "resume=auto")]
    cifar10 = composed("data=cifar10", "data.root=.").data
    with patch.object(CIFAR10, "download", side_effect=URLError("no route to host")):
        found.append(refused(data.load, replace(cifar10, root=str(tmp_path))))
    beginnings = [
        f"run.dir={tmp_path}/file: [Errno 17] File exists: '{tmp_path}/file'; cannot write there; choose",
        f"run.dir={tmp_path}/run: [Errno 17] File exists: '{tmp_path}/run/checkpoints'; cannot write",
        f"data.root={tmp_path}: <urlopen error no route to host>; no cifar10 in {tmp_path}, and it ",
    ]
    assert [told.startswith(start) for told, start in zip(found, beginnings, strict=True)] == [True] * 3, (
        found
    )


@each_rank(2, transport="auto")
def test_hosts_that_are_started_with_different_settings_are_named() -> None:
    launcher.require_same_command(configure(f"data.workers={comm.rank()}", f"run.dir=/host{comm.rank()}"))
    for key in ("data.repeats", "data.limit", "train.max_steps", "model.own"):
        told = refused(launcher.require_same_command, configure(f"{key}={1 + comm.rank()}"))
        assert told == f"the command differs between ranks: rank 1 has {key}=2 where rank 0 has {key}=1"
    told = refused(launcher.require_same_command, configure(*["train.capture=true"] * comm.rank()))
    assert told.endswith("rank 1 has train.capture=True where rank 0 has train.capture=False")


@pytest.mark.parametrize("port", [None, "29500a", "in use"])
def test_a_port_that_is_none_or_is_used_is_named(monkeypatch: pytest.MonkeyPatch, port: str | None) -> None:
    """By the rank that listens there."""
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1]) if port == "in use" else port
        for name, value in {"MASTER_ADDR": "127.0.0.1", "RANK": 0, "WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        monkeypatch.delenv("MASTER_PORT", raising=False)
        if port is not None:
            monkeypatch.setenv("MASTER_PORT", port)
        rank_info = RankInfo(0, 2, 0, 2)
        told = rf"^MASTER_ADDR=127.0.0.1 MASTER_PORT={port}: .*; expected the host of rank 0 and a free port"
        with pytest.raises(UserError, match=told):
            rank_info.store  # noqa: B018
        assert rank_info.add("speaker", 1) == 1  # so it prints the message

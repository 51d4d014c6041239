"""This process's rank, device and cores, and how ranks meet at start-up.

All of it comes from the launcher: its environment variables, and its key-value store.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, TypeVar

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from shardtrain import comm
from shardtrain import device as devices
from shardtrain.config.errors import UserError, not_valid, reading

# How long a rank waits for others. Start-up lists images and compiles models; later steps take equally long.
START_UP = datetime.timedelta(minutes=10)
AFTERWARDS = datetime.timedelta(seconds=120)
ANSWER = datetime.timedelta(seconds=5)  # for the launcher's store, once something has failed
LONGEST_PAUSE = 0.5  # seconds between two reads of the store, which all ranks share

# Variables in which launchers of processes, but not of ranks, say how many there are.
LAUNCHERS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec"}

Result = TypeVar("Result")


@dataclass(frozen=True)
class RankInfo:
    """This process's rank and the world size, globally and on its host, as its launcher set them."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> RankInfo:
        """Read the launcher's variables; without ``WORLD_SIZE`` this process is a single rank."""
        if "WORLD_SIZE" not in environ:
            _require_alone(environ)
            return cls(0, 1, 0, 1)
        if environ["WORLD_SIZE"] == "1":
            environ = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **environ}
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        what = f"WORLD_SIZE={environ['WORLD_SIZE']}, missing or no number"
        wanted = "the launcher sets RANK, LOCAL_RANK and LOCAL_WORLD_SIZE (this host's ranks), too"
        with reading(what, wanted, (KeyError, ValueError)):
            places = [int(environ[name]) for name in names]
        info = cls(*places)
        if not (0 <= info.rank < info.world_size and 0 <= info.local_rank < info.local_world_size):
            set_to = ", ".join(f"{name}={place}" for name, place in zip(names, places, strict=True))
            raise UserError(f"{set_to}: expected ranks from 0 to the number of ranks minus 1")
        return info

    @functools.cached_property
    def store(self) -> Store:
        """The launcher's key-value store, which torchrun has for a single rank, too."""
        # torchrun's is there before its ranks. If it does not answer, torchrun was killed while they started.
        is_there = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        where = [f"{name}={os.environ.get(name)}" for name in ("MASTER_ADDR", "MASTER_PORT")]
        expected = "expected the host of rank 0 and a free port there, as torchrun sets them"
        kinds = () if is_there else (ValueError, OverflowError, torch.distributed.DistError)
        with reading(" ".join(where), expected, kinds):
            store: Store = next(rendezvous("env://", timeout=2 * ANSWER if is_there else START_UP))[0]
        store.set_timeout(START_UP)
        return store

    def add(self, key: str, number: int) -> int:
        """Add ``number`` to this attempt's counter ``key``, and return its value; 0 if the store is gone."""
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        values = [0]

        def ask() -> None:
            try:
                values.append(self.store.add(f"shardtrain/{key}/{attempt}", number))
            except UserError:  # this rank cannot open the store, so it is the only one that knows why
                values.append(number)
            except (RuntimeError, ValueError):
                pass

        if self.world_size == 1:
            return number
        asking = threading.Thread(target=ask, daemon=True)  # with a cut link torch would wait for ever
        asking.start()
        asking.join(ANSWER.total_seconds())
        return values[-1]

    def leave(self) -> None:
        """Let a store that rank 0 serves outlive the last questions of the other ranks."""
        if self.world_size == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return
        gone = self.add("left", 1)
        deadline = time.monotonic() + ANSWER.total_seconds()
        while self.rank == 0 and 0 < gone < self.world_size and time.monotonic() < deadline:
            time.sleep(0.01)
            gone = self.add("left", 0)

    def agree(self, key: str, proposal: str) -> str:
        """Return the proposal of the rank that came first, the same on every rank and across restarts."""
        # Under torchrun a single rank agrees with earlier attempts.
        if self.world_size == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
            return proposal
        store = self.store
        while isinstance(store, PrefixStore):  # torchrun gives each attempt its own prefix
            store = store.underlying_store
        return store.compare_set(f"shardtrain/{key}", "", proposal).decode()


def _require_alone(environ: Mapping[str, str]) -> None:
    """Raise UserError if a launcher has started several processes and did not make them ranks."""
    for name, launcher in LAUNCHERS.items():
        count = environ.get(name, "1")
        if count.isdigit() and int(count) > 1:
            raise UserError(
                f"{launcher} has started {count} processes ({name}={count}) that do not know one another: "
                "start one torchrun per host, as shardtrain/train/train.sbatch does, or set RANK, "
                "WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
            )
    if environ.get("RANK", "0") != "0":
        raise UserError(f"RANK={environ['RANK']}, but WORLD_SIZE is not set: torchrun sets both")


def require_device(wanted: str) -> None:
    """Raise UserError unless ``wanted`` is auto, cpu or the type of an accelerator of this torch."""
    valid = ("auto", "cpu", devices.ACCELERATOR)
    if wanted not in valid:
        raise not_valid(f"device={wanted}", wanted, valid)


def choose_device(wanted: str, rank_info: RankInfo) -> torch.device:
    """Return this rank's device, of the type ``wanted``, as of `require_device`."""
    require_device(wanted)
    count = devices.count()
    ranks = rank_info.local_world_size
    if wanted == "cpu" or (wanted == "auto" and not count):
        return torch.device("cpu")
    if not count:
        raise UserError(f"device={wanted}, but torch finds none here; device=cpu or device=auto would run")
    if rank_info.local_rank >= count and not devices.shareable():
        raise UserError(
            f"{ranks} ranks on this host, but torch finds {count} GPUs; start {count} ranks per host, or use "
            "device=cpu (NCCL 2.30 and newer let ranks share a GPU, with NCCL_MULTI_RANK_GPU_ENABLE=1)"
        )
    device = devices.use(rank_info.local_rank % count)
    if rank_info.world_size > 1 and devices.BACKENDS[device.type] == "gloo":
        raise UserError(f"torch has no collectives for {device.type}: start a single rank, or use device=cpu")
    return device


def cpu_threads(rank_info: RankInfo, environ: Mapping[str, str], virtual: int = 0) -> int:
    """Return the threads of this rank: what OMP_NUM_THREADS says, else this host's cores over its ranks.

    torchrun sets OMP_NUM_THREADS to 1 when it starts several ranks and the user did not set it, so that
    value says nothing there. Ranks that compute ``virtual`` ranks must have as many threads alone as under
    torchrun, so it says nothing for them either; ``threads=1`` does.
    """
    asked = environ.get("OMP_NUM_THREADS", "")
    ranks = virtual or rank_info.local_world_size
    chosen_by_torchrun = asked == "1" and (virtual or ("TORCHELASTIC_RUN_ID" in environ and ranks > 1))
    if asked.isdigit() and not chosen_by_torchrun:
        return max(1, int(asked))
    return max(1, cores() // ranks)


def meet(store: Store, rank: int, world_size: int, patience: datetime.timedelta = START_UP) -> Store:
    """Wait for all ranks, and return a part of the launcher's ``store`` that only they use.

    torchrun keeps one store over its restarts (pytorch issue 135712), and its count of restarts may differ
    between hosts. So keys of an earlier attempt, addresses included, look like this attempt's. Therefore each
    rank sets a new token, rank 0 answers it with the name of a session, and waits until every rank has set
    that name. Raises UserError after ``patience``, naming the missing ranks.
    """
    key = "shardtrain/meeting/{}".format
    token = uuid.uuid4().hex
    session = token  # rank 0's; the other ranks read it
    seconds = patience.total_seconds()
    start = time.monotonic()
    pause = 0.01
    missing = list(range(1, world_size)) if rank == 0 else [0]
    if rank:
        store.set(key(rank), token)
    while True:
        if rank == 0:
            missing = [other for other in missing if not _has_joined(store, key(other), session)]
        else:
            answered, _, session = store.get(key(rank)).decode().partition(" ")
            missing = [] if answered == token and session else [0]
        if not missing:
            break
        if time.monotonic() - start > seconds:
            names = ", ".join(map(str, missing))
            raise UserError(f"rank {rank} has waited {seconds:.0f} s at start-up for rank {names}")
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    if rank:
        store.set(key(rank), session)
    return PrefixStore(f"shardtrain/{session}", store)


def _has_joined(store: Store, key: str, session: str) -> bool:
    """Return whether the rank of ``key`` has set the session's name; answer it if it has set a token."""
    value = store.get(key).decode() if store.check([key]) else ""
    if value and value != session and " " not in value:
        store.compare_set(key, value, f"{value} {session}")
    return value == session


def together(action: Callable[[], Result]) -> Result:
    """Return ``action()`` on this rank; raise any rank's UserError on all ranks. Collective."""
    problem = ""  # not raised at once, since the others would take this rank for dead
    try:
        result = action()
    except UserError as error:
        problem = str(error).encode(errors="backslashreplace").decode()  # names of files may not be UTF-8
    for text in filter(None, comm.gather_texts(problem, comm.plain_transport())):
        raise UserError(text)
    return result


def on_rank_0(action: Callable[[], Any]) -> Any:
    """Call ``action`` on rank 0; return its JSON, or raise its UserError, on all ranks. Collective."""
    text = together(lambda: json.dumps(action()) if comm.rank() == 0 else "")
    return json.loads(comm.gather_texts(text, comm.plain_transport())[0])


def cores() -> int:
    """Return how many cores of this host the process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python, torch, torchvision, CUDA (or ``None``) and further ``packages``."""
    installed = {name: version(name) for name in ("torch", "torchvision", *packages)}
    runtime = {devices.ACCELERATOR: str(getattr(torch.version, devices.ACCELERATOR, None))}
    return {"python": platform.python_version(), **installed, **runtime}

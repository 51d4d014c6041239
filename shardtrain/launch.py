"""From a shell to a running job on every rank, and back with the right exit code.

The same program runs alone (`python -m`), under `torchrun`, or under any launcher that sets `RANK`,
`WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT`. A mistake of the user's is told by one rank,
whichever finds it first; the others stay silent. Exit codes: 0 done, 2 a mistake of the user's, 143 asked to
leave and saved, 130 Ctrl-C; anything else is a failure.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import json
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.rendezvous import rendezvous

from shardtrain.compose import compose
from shardtrain.config import Config, from_hydra
from shardtrain.errors import UserError
from shardtrain.machine import cores
from shardtrain.stop import INTERRUPTED, Stopped

USER_ERROR = 2
START_UP = datetime.timedelta(minutes=10)
AFTERWARDS = datetime.timedelta(seconds=120)
PATIENCE = 10.0  # seconds that a silent rank leaves the speaking one, before it ends by itself


@dataclass(frozen=True)
class Place:
    """Which of how many ranks this process is, as its launcher said."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Place:
        if "WORLD_SIZE" not in environ:
            return cls(0, 1, 0, 1)
        try:
            rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
            local_rank = int(environ.get("LOCAL_RANK", "0"))
            return cls(rank, world_size, local_rank, int(environ.get("LOCAL_WORLD_SIZE", "1")))
        except (KeyError, ValueError) as error:
            raise UserError(f"WORLD_SIZE is set, but RANK is missing or no number: {error}") from None

    @functools.cached_property
    def store(self) -> Store:
        """The launcher's key-value store; exists when there is more than one rank."""
        store: Store = next(rendezvous("env://", timeout=START_UP))[0]
        return store

    def first(self, key: str) -> bool:
        """Whether this rank is the first of its attempt to ask for `key`; waits for nobody."""
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return self.world_size == 1 or self.store.add(f"shardtrain/{key}/{attempt}", 1) == 1

    def agree(self, key: str, proposal: str) -> str:
        """The value that the first rank proposed for `key`, on every rank and across restarts."""
        if self.world_size == 1:
            return proposal
        store = self.store
        while isinstance(store, PrefixStore):  # torchrun puts each attempt behind a prefix of its own
            store = store.underlying_store
        return store.compare_set(f"shardtrain/{key}", "", proposal).decode()


class Launch(Protocol):
    """What a program's settings hold for its launch."""

    @property
    def device(self) -> str: ...

    @property
    def threads(self) -> int | None: ...


Settings = TypeVar("Settings", bound=Launch)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Context:
    """What a job is told beside its configuration."""

    place: Place
    device: torch.device
    run_dir: Path


def run(job: Callable[[Config, Context], Result]) -> Result | None:
    """Runs a training `job` with what the command line asks for, and returns what it gives; see `start`."""

    def read(arguments: Sequence[str], speak: bool) -> Config | None:
        raw = compose(arguments, speak=speak)
        return None if raw is None else from_hydra(raw)

    return start(
        read, lambda config, place, device: job(config, Context(place, device, run_dir(config, place)))
    )


@record
def start(
    read: Callable[[Sequence[str], bool], Settings | None],
    job: Callable[[Settings, Place, torch.device], Result],
) -> Result | None:
    """Runs a program with what `read(arguments, speak)` makes of the command line, if that is anything.

    Leaves by SystemExit unless all went well; torchrun shows what failed, in whichever program.
    """
    signal.signal(signal.SIGINT, _interrupt)
    try:
        place = Place.from_environment(os.environ)
    except UserError as error:
        _say(error)
        sys.exit(USER_ERROR)
    try:
        config = read(sys.argv[1:], place.rank == 0)
        if config is None:
            return None
        device = choose_device(config.device, place)
        if device.type == "cpu":
            torch.set_num_threads(config.threads or cpu_threads(place, os.environ))
        with process_group(place, device):
            return job(config, place, device)
    except UserError as error:
        _leave_with(error, place)
    except KeyboardInterrupt as interrupt:
        if place.rank == 0:
            print("interrupted", file=sys.stderr)
        sys.exit(interrupt.exit_code if isinstance(interrupt, Stopped) else INTERRUPTED)


def choose_device(wanted: str, place: Place) -> torch.device:
    """`wanted` is auto, cpu or cuda; every rank of a host gets a GPU of its own."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(
            "device=cuda, but torch finds no CUDA device here; device=cpu or device=auto would run"
        )
    if place.local_rank >= torch.cuda.device_count():
        raise UserError(
            f"{place.local_world_size} ranks on this host, but torch finds {torch.cuda.device_count()} GPUs; "
            f"start {torch.cuda.device_count()} ranks a host, or use device=cpu"
        )
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def cpu_threads(place: Place, environ: Mapping[str, str]) -> int:
    """Threads of this rank: what OMP_NUM_THREADS says, else this host's cores over its ranks.

    torchrun sets OMP_NUM_THREADS to 1 when it starts several ranks and the user did not set it, so that
    value says nothing there.
    """
    asked = environ.get("OMP_NUM_THREADS", "")
    chosen_by_torchrun = asked == "1" and "TORCHELASTIC_RUN_ID" in environ and place.local_world_size > 1
    if asked.isdigit() and not chosen_by_torchrun:
        return max(1, int(asked))
    return max(1, cores() // place.local_world_size)


@contextlib.contextmanager
def process_group(place: Place, device: torch.device) -> Iterator[None]:
    """The default process group while the block runs; none for a single rank."""
    if place.world_size == 1:
        yield
        return
    if place.local_world_size == place.world_size:
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
        if loopback is not None:  # one host: nothing of ours listens beyond it
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=meet(place.store, place.rank, place.world_size),
        rank=place.rank,
        world_size=place.world_size,
        timeout=AFTERWARDS,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield
    finally:
        close_process_group()


def meet(store: Store, rank: int, world_size: int, patience: datetime.timedelta = START_UP) -> Store:
    """The part of the launcher's `store` that belongs to these ranks alone, once all of them are there.

    torchrun keeps one store over its restarts (pytorch issue 135712), and its count of restarts may differ
    between hosts: what the ranks of an earlier attempt have left, their addresses too, looks like this
    attempt's. So each rank shows a token that nobody has seen before; rank 0 answers it with the name of a
    session, and is content when every rank has shown that name.

    Raises UserError when `patience` is over, naming the ranks that did not come.
    """
    key = "shardtrain/meeting/{}".format
    session, deadline = uuid.uuid4().hex, time.monotonic() + patience.total_seconds()
    missing = list(range(1, world_size)) if rank == 0 else [0]
    if rank:
        token = session
        store.set(key(rank), token)
    while missing:
        if time.monotonic() > deadline:
            names = ", ".join(map(str, missing))
            raise UserError(
                f"rank {rank} has waited {patience.total_seconds():.0f} s at start-up for rank {names}"
            )
        if rank == 0:
            missing = [other for other in missing if not _welcomed(store, key(other), session)]
        else:
            shown, _, answer = store.get(key(rank)).decode().partition(" ")
            if shown == token and answer:
                session, missing = answer, []
                store.set(key(rank), session)
        if missing:
            time.sleep(0.01)
    return PrefixStore(f"shardtrain/{session}", store)


def _welcomed(store: Store, key: str, session: str) -> bool:
    """Rank 0's look at what another rank shows: whether it is the session; a token is answered."""
    shown = store.get(key).decode() if store.check([key]) else ""
    if shown and shown != session and " " not in shown:
        store.compare_set(key, shown, f"{shown} {session}")
    return shown == session


def close_process_group() -> None:
    """Destroy the default process group once nothing of this program holds it any more.

    A sharded model is a reference cycle that holds the group. Left to the interpreter's end, gloo's threads
    may then ask for an interpreter that is no longer there, and the process aborts.
    """
    gc.collect()
    dist.destroy_process_group()


def run_dir(config: Config, place: Place) -> Path:
    """One directory for all ranks, whatever their clocks say."""
    if config.run.dir is not None:
        return Path(config.run.dir).expanduser()
    started = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    default = f"{config.data.name}-{config.model.get('name', 'model')}-{started}"
    return Path("outputs") / place.agree("run_name", config.run.name or default)


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    """Ctrl-C, once: a terminal and torchrun both pass it on, and the second must not disturb the clean-up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _leave_with(error: UserError, place: Place) -> NoReturn:
    """Ends this rank; the first that comes here speaks for all.

    The others wait for their launcher to end them, because the rank that ends first is taken for the cause.
    """
    try:
        speaks = place.first("speaker")
    except (RuntimeError, ValueError):  # the store went with rank 0, which therefore has spoken
        speaks = False
    if speaks:
        _say(error)
    else:
        time.sleep(PATIENCE)
    sys.exit(USER_ERROR)


def _say(error: UserError) -> None:
    """To the terminal, and into the file that torchrun shows as the root cause."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        report = {"message": f"error: {error}", "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(error_file).write_text(json.dumps({"message": report}))

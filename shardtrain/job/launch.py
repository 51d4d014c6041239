"""From a shell to a running job on every rank, and back with the right exit code.

The same program runs alone (`python -m`), under `torchrun`, or under any launcher that sets `RANK`,
`WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`. A mistake of the user's is
told by one rank, whichever finds it first; the others stay silent. Exit codes: 0 done, 2 a mistake of the
user's, 143 asked to leave and saved, 130 Ctrl-C; anything else is a failure.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.multiprocessing.errors import record

from shardtrain.job.config import Config, from_hydra
from shardtrain.job.dist_env import START_UP, RankInfo, choose_device, cpu_threads, meet
from shardtrain.job.hydra_app import compose
from shardtrain.job.schema import UserError
from shardtrain.job.signals import INTERRUPTED, Stopped

USER_ERROR = 2
PATIENCE = 10.0  # seconds that a silent rank leaves the speaking one, before it ends by itself


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

    place: RankInfo
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
    job: Callable[[Settings, RankInfo, torch.device], Result],
) -> Result | None:
    """Runs a program with what `read(arguments, speak)` makes of the command line, if that is anything.

    Leaves by SystemExit unless all went well; torchrun shows what failed, in whichever program.
    """
    signal.signal(signal.SIGINT, _interrupt)
    try:
        place = RankInfo.from_environment(os.environ)
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


@contextlib.contextmanager
def process_group(place: RankInfo, device: torch.device) -> Iterator[None]:
    """The default process group while the block runs, with a start-up's time; none for a single rank."""
    if place.world_size == 1:
        yield
        return
    open_process_group(place, device, meet(place.store, place.rank, place.world_size))
    try:
        yield
    finally:
        close_process_group()


def open_process_group(place: RankInfo, device: torch.device, store: Store) -> None:
    """Make the default process group of ranks that meet in ``store``, with a start-up's time."""
    if place.local_world_size == place.world_size:
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
        if loopback is not None:  # one host: nothing of ours listens beyond it
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=START_UP,
        device_id=device if device.type == "cuda" else None,
    )


def close_process_group() -> None:
    """Destroy the default process group once nothing of this program holds it any more.

    A sharded model is a reference cycle that holds the group. Left to the interpreter's end, gloo's threads
    may then ask for an interpreter that is no longer there, and the process aborts.
    """
    gc.collect()
    dist.destroy_process_group()


def run_dir(config: Config, place: RankInfo) -> Path:
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


def _leave_with(error: UserError, place: RankInfo) -> NoReturn:
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

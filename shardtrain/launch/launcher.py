"""The launch of a job on every rank, and its exit with the right code.

The same program runs alone (`python -m`), under `torchrun`, or under any launcher that sets `RANK`,
`WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`. The first rank that finds a
user's mistake prints it; the others stay silent. Exit codes: 0 done, 2 a user's mistake, 143 stopped by a
signal and saved, 130 Ctrl-C. Any other code is a failure.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.multiprocessing.errors import record

from shardtrain import comm
from shardtrain import device as devices
from shardtrain.config.command import Command, read_command
from shardtrain.config.config import Config
from shardtrain.config.errors import UserError, path_of
from shardtrain.config.format import write_any_text
from shardtrain.config.marks import marked_values
from shardtrain.config.schema import Mark
from shardtrain.launch.ranks import START_UP, RankInfo, Result, choose_device, cpu_threads, meet
from shardtrain.launch.signals import Stopped, leave_with_launcher

USER_ERROR = 2
PATIENCE = 10.0  # seconds for which a silent rank waits for the rank that prints, before it exits itself

Settings = TypeVar("Settings")  # has the keys `device` and `threads`


@dataclass(frozen=True)
class Context:
    """What a job gets beside its configuration."""

    rank_info: RankInfo
    device: torch.device
    run_dir: Path
    words: Mapping[str, str] = field(default_factory=dict)  # the command's, by the key or group each names


def run(
    job: Callable[[Config, Context], Result],
    read: Callable[[Sequence[str], bool], Command | None] = read_command,
) -> Result | None:
    """Run a training ``job`` with the command's configuration; return its result. See `start`."""

    def run_job(command: Command, rank_info: RankInfo, device: torch.device) -> Result:
        config = command.config
        require_same_command(config)
        return job(config, Context(rank_info, device, run_dir(config, rank_info), command.words))

    return start(read, run_job)


def require_same_command(config: Config) -> None:
    """Raise UserError on all ranks if settings differ that may not differ between hosts. Collective."""
    values = marked_values(asdict(config)).items()
    lines = [f"{key}={value}" for key, (value, mark) in values if Mark.PER_HOST not in mark]
    try:
        comm.require_same(lines, "the command", comm.plain_transport())
    except ValueError as error:
        raise UserError(str(error)) from None


@record
def start(
    read: Callable[[Sequence[str], bool], Settings | None],
    job: Callable[[Settings, RankInfo, torch.device], Result],
) -> Result | None:
    """Run ``job`` with the settings that ``read(arguments, speak)`` returns; do nothing if these are None.

    Raises SystemExit with the exit code unless all went well. torchrun then shows the cause.
    """
    signal.signal(signal.SIGINT, _interrupt)
    leave_with_launcher()
    write_any_text()
    # The working directory, for users' modules: a console script (`shardtrain-train`) would not find them.
    if "" not in sys.path:
        sys.path.append("")
    devices.keep_freed_memory()
    rank_info = RankInfo(0, 1, 0, 1)  # until the environment has been read
    try:
        rank_info = RankInfo.from_environment(os.environ)
        config: Any = read(sys.argv[1:], rank_info.rank == 0)
        if config is None:
            return None
        device = choose_device(config.device, rank_info)
        if not devices.is_accelerator(device):
            torch.set_num_threads(config.threads or cpu_threads(rank_info, os.environ))
        with process_group(rank_info, device):
            try:
                return job(config, rank_info, device)
            except Exception as error:  # inside the group, since others take a rank that leaves it for dead
                if isinstance(error, UserError) or rank_info.add("speaker", 0):
                    _exit_with(error, rank_info)
                raise
    except UserError as error:
        _exit_with(error, rank_info)
    except KeyboardInterrupt as interrupt:
        stopped = interrupt if isinstance(interrupt, Stopped) else Stopped(signal.SIGINT)
        if rank_info.rank == 0 and not stopped.ending:
            with contextlib.suppress(OSError):  # the terminal may be gone
                print("interrupted", file=sys.stderr)
        sys.exit(stopped.exit_code)


@contextlib.contextmanager
def process_group(rank_info: RankInfo, device: torch.device) -> Iterator[None]:
    """Open the default process group inside, with the start-up time-out; none for a single rank."""
    if rank_info.world_size == 1:
        yield
        return
    open_process_group(rank_info, device, meet(rank_info.store, rank_info.rank, rank_info.world_size))
    try:
        yield
    finally:
        close_process_group()
        rank_info.leave()


def open_process_group(rank_info: RankInfo, device: torch.device, store: Store) -> None:
    """Open the default process group of the ranks in ``store``, with the start-up time-out."""
    if rank_info.local_world_size == rank_info.world_size:
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
        if loopback is not None:  # on one host, listen on the loopback interface only
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    dist.init_process_group(
        backend=devices.BACKENDS[device.type],
        store=store,
        rank=rank_info.rank,
        world_size=rank_info.world_size,
        timeout=START_UP,
        device_id=device if devices.is_accelerator(device) else None,
    )
    comm.guard_world()


def close_process_group() -> None:
    """Destroy the default process group, after collecting what refers to it.

    A sharded model is a reference cycle that holds the group. If it lived until the interpreter ends, gloo's
    threads could call an interpreter that no longer exists, which aborts the process.
    """
    gc.collect()
    dist.destroy_process_group()


def run_dir(config: Config, rank_info: RankInfo) -> Path:
    """Return the run's directory, the same on all ranks whatever their clocks."""
    if config.run.dir is not None:
        return path_of("run.dir", config.run.dir)
    started = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    default = f"{config.data.name}-{config.model_name.rpartition('.')[2]}-{started}"
    return path_of("run.name", f"outputs/{rank_info.agree('run_name', config.run.name or default)}")


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    """Raise KeyboardInterrupt at the first Ctrl-C only: terminal and torchrun both send it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _exit_with(error: Exception, rank_info: RankInfo) -> NoReturn:
    """Exit with code 2. The first rank that gets here, with a UserError, prints the message."""
    if rank_info.add("speaker", 1) == 1:  # 0 if the store ended with rank 0, which then has printed a message
        message = f"error: {error}"
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        print(message, file=sys.stderr, flush=True)
        if path:  # torchrun shows this as the root cause; torch's own writer would add a traceback
            report = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
            with contextlib.suppress(OSError):
                Path(path).write_text(json.dumps({"message": report}))
    else:
        time.sleep(PATIENCE)  # a launcher takes the rank that ends first for the cause, and ends the others
    sys.exit(USER_ERROR)

"""The one file that names devices: where tensors can lie beside the CPU, and how to wait for them.

`torch.accelerator` tells which type of accelerator this torch is built for, and has its streams and memory.
What it does not tell is in `BACKENDS`, one entry per type. Nobody has run XPU and MPS (docs/gpu.md). All of
this works on the CPU too, where nothing has to be waited for.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

# Types of device, and the backend of their process groups. Gloo moves no tensors of MPS: a single rank there.
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl", "mps": "gloo"}

# The type of device that `auto` prefers to the CPU. Where torch is built for none, GPUs can still be planned.
_built_for = torch.accelerator.current_accelerator()
ACCELERATOR = _built_for.type if _built_for is not None and _built_for.type in BACKENDS else "cuda"


def is_accelerator(device: torch.device) -> bool:
    """Return whether ``device`` computes beside the host, in streams."""
    return device.type == ACCELERATOR


def on_accelerator(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` lies on an accelerator. Five times as fast as asking its device's type."""
    return not (tensor.is_cpu or tensor.is_meta)


def backend_for(device: torch.device) -> str:
    """Return the name of the process group's backend that moves tensors of ``device``."""
    return BACKENDS[device.type]


def count() -> int:
    """Return how many accelerators this process sees; 0 without any."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def shareable() -> bool:
    """Return whether ranks may share an accelerator: NCCL 2.30 and newer let them if this variable is set."""
    asked = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return asked and ACCELERATOR == "cuda" and torch.cuda.nccl.version() >= (2, 30)


def use(index: int) -> torch.device:
    """Make accelerator ``index`` this process's own, and return it."""
    torch.accelerator.set_device_index(index)
    return torch.device(ACCELERATOR, index)


def name(device: torch.device) -> str:
    """Return the product name of ``device``, an accelerator; of MPS there is none."""
    return str(getattr(torch.get_device_module(device), "get_device_name", str)(device))


def runtime_version() -> str:
    """Return the version of the accelerator's runtime that torch was built with, or ``None`` as text."""
    return str(getattr(torch.version, ACCELERATOR, None))


# Streams and events. A stream is a queue of work on a device; an event marks a place in one.


def new_stream(device: torch.device, priority: int = 0) -> Any:
    """Return a new stream, ``None`` on the CPU; one of ``priority`` -1 overtakes others."""
    return torch.Stream(device, priority=priority) if is_accelerator(device) else None


def current_stream(device: torch.device) -> Any:
    """Return the stream in which this thread works on ``device``; the CPU's records and waits for nothing."""
    return torch.accelerator.current_stream(device) if is_accelerator(device) else torch.cpu.current_stream()


@contextlib.contextmanager
def inside(stream: Any) -> Iterator[None]:
    """Inside, this thread works in ``stream``; ``None`` changes nothing."""
    if stream is None:
        yield
        return
    # Not ``with stream``: in torch 2.11 a stream that is entered inside itself raises (pytorch issue 176560).
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def synchronize(device: torch.device) -> None:
    """Return once ``device`` has done all that it was given."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def moment(device: torch.device) -> Any:
    """Mark this moment as it passes on ``device``: seconds on the CPU, an event on an accelerator."""
    if not is_accelerator(device):
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record(current_stream(device))
    return event


def seconds(start: Any, end: Any) -> float:
    """Return the seconds between two moments of one device. On an accelerator the host waits for ``end``."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


class HostCopy:
    """A copy of a tensor on its way to the host. Reading it waits for nothing that was launched later."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._values = tensor.detach().to("cpu", non_blocking=True)
        self._event = current_stream(tensor.device).record_event()

    def read(self) -> torch.Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._values


# Memory, and random numbers.


def total_memory(device: torch.device) -> int:
    """Return the bytes of memory of ``device``, or of this host for the CPU."""
    if is_accelerator(device):
        return torch.accelerator.get_memory_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def reset_peak_memory(device: torch.device) -> None:
    """Let `peak_memory` count from now on: the jobs of a sweep share a process.

    On the CPU only Linux can, and not in every container; elsewhere it stays the whole process's.
    """
    if is_accelerator(device):
        torch.accelerator.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that tensors took on ``device``; for the CPU, that this process took."""
    if is_accelerator(device):
        return torch.accelerator.max_memory_allocated(device)
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
    if found:  # unlike getrusage's figure, it is reset by `reset_peak_memory`
        return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the state of the accelerator's random numbers by its type; ``{}`` for the CPU."""
    module = torch.get_device_module(device)
    return {device.type: module.get_rng_state(device)} if is_accelerator(device) else {}


def restore_random_state(device: torch.device, state: dict[str, Any]) -> None:
    """Take over what `random_state` returned, where there is some for this type of device."""
    if is_accelerator(device) and device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], device)

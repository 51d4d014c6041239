"""The one file that names devices: where tensors can lie beside the CPU, and how to wait for them.

An accelerator is what `torch.get_device_module` knows, with streams and events: CUDA today. A port to another
one changes this file alone. Everything here works on the CPU too, where nothing has to be waited for.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

ACCELERATOR = "cuda"  # the type of device that `auto` prefers to the CPU


def is_accelerator(device: torch.device) -> bool:
    """Return whether ``device`` computes beside the host, in streams."""
    return device.type == ACCELERATOR


def on_accelerator(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` lies on an accelerator. Five times as fast as asking its device's type."""
    return tensor.is_cuda


def backend_for(device: torch.device) -> str:
    """Return the name of the process group's backend that moves tensors of ``device``."""
    return "nccl" if is_accelerator(device) else "gloo"


def count() -> int:
    """Return how many accelerators this process sees; 0 without any."""
    return int(_module(ACCELERATOR).device_count()) if _module(ACCELERATOR).is_available() else 0


def use(local_rank: int) -> torch.device:
    """Make accelerator ``local_rank`` this process's own, and return it."""
    device = torch.device(ACCELERATOR, local_rank)
    _module(device).set_device(device)
    return device


def name(device: torch.device) -> str:
    """Return the product name of ``device``, an accelerator."""
    return str(_module(device).get_device_name(device))


def runtime_version() -> str:
    """Return the version of the accelerator's runtime that torch was built with, or ``None`` as text."""
    return str(torch.version.cuda)


# Streams and events. A stream is a queue of work on a device; an event marks a place in one.


def new_stream(device: torch.device, priority: int = 0) -> Any:
    """Return a new stream, ``None`` on the CPU; one of ``priority`` -1 overtakes others."""
    return _module(device).Stream(device, priority=priority) if is_accelerator(device) else None


def current_stream(device: torch.device) -> Any:
    """Return the stream in which this thread works on ``device``; the CPU's records and waits for nothing."""
    return _module(device).current_stream(device)


def inside(stream: Any) -> AbstractContextManager[Any]:
    """Inside, this thread works in ``stream``; ``None`` changes nothing."""
    return contextlib.nullcontext() if stream is None else _module(stream.device).stream(stream)


def synchronize(device: torch.device) -> None:
    """Return once ``device`` has done all that it was given."""
    if is_accelerator(device):
        _module(device).synchronize(device)


def moment(device: torch.device) -> Any:
    """Mark this moment as it passes on ``device``: seconds on the CPU, an event on an accelerator."""
    if not is_accelerator(device):
        return time.perf_counter()
    event = _module(device).Event(enable_timing=True)
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
        return int(_module(device).get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def reset_peak_memory(device: torch.device) -> None:
    """Let `peak_memory` count from now on: the jobs of a sweep share a process.

    On the CPU only Linux can, and not in every container; elsewhere it stays the whole process's.
    """
    if is_accelerator(device):
        _module(device).reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that tensors took on ``device``; for the CPU, that this process took."""
    if is_accelerator(device):
        return int(_module(device).max_memory_allocated(device))
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
    if found:  # unlike getrusage's figure, it is reset by `reset_peak_memory`
        return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the state of the accelerator's random numbers by its type; ``{}`` for the CPU."""
    return {device.type: _module(device).get_rng_state(device)} if is_accelerator(device) else {}


def restore_random_state(device: torch.device, state: dict[str, Any]) -> None:
    """Take over what `random_state` returned, where there is some for this type of device."""
    if is_accelerator(device) and device.type in state:
        _module(device).set_rng_state(state[device.type], device)


def _module(device: torch.device | str) -> Any:
    """``torch.cuda``, or what stands for another type of accelerator."""
    return torch.get_device_module(device)

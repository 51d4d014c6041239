"""Devices, streams and backends. No other file names them.

`torch.accelerator` tells which type of accelerator this torch is built for, and has its streams and memory.
`BACKENDS` has the rest, one entry per type. XPU and MPS have never been run (docs/gpu.md). All functions work
on the CPU, too, where there is nothing to wait for.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import random
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from shardtrain import torch_private

T = TypeVar("T")

# The backend of the process group by type of device. Gloo moves no MPS tensors, so MPS has a single rank.
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl", "mps": "gloo"}

# The type of device that `auto` prefers to the CPU. "cuda" where torch has none, since plans need a type.
_built_for = torch.accelerator.current_accelerator()
ACCELERATOR = _built_for.type if _built_for is not None and _built_for.type in BACKENDS else "cuda"

# The most bytes of parameters that neighbouring blocks have as one unit. At this size moving a unit takes
# about as long as the host's work for a unit of any size. On the CPU that work takes 0.4 ms per step over
# shared memory and 0.8 ms over messages, and moving 1 MiB takes 0.3 ms and 1.3 to 2.2 ms.
_UNIT_BYTES = 1 << 20
_UNIT_BYTES_ON_ACCELERATORS = 32 << 20


def unit_bytes_on(device: torch.device) -> int:
    """Return the most bytes of parameters that `shard` gives a unit made of neighbouring blocks."""
    return _UNIT_BYTES_ON_ACCELERATORS if is_accelerator(device) else _UNIT_BYTES


def is_accelerator(device: torch.device) -> bool:
    """Return whether ``device`` is an accelerator, which computes in streams."""
    return device.type == ACCELERATOR


def on_accelerator(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is on an accelerator. Five times as fast as comparing its device's type."""
    return not (tensor.is_cpu or tensor.is_meta)


def count() -> int:
    """Return the number of accelerators that this process sees."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def fastest_precision() -> str:
    """Return ``bf16`` if the accelerators, or the CPU without any, multiply it in hardware, else ``fp32``."""
    if count():
        fast = ACCELERATOR != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = torch_private.is_avx512_bf16_supported() or torch_private.is_amx_tile_supported()
    return "bf16" if fast else "fp32"


def shareable() -> bool:
    """Return whether ranks may share an accelerator: if NCCL's variable asks for it.

    NCCL can do so from 2.30 on. Older versions refuse with a clear error. The version is not checked here:
    torch reports the one that it was built with, and another one may be loaded.
    """
    return ACCELERATOR == "cuda" and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def use(index: int) -> torch.device:
    """Make accelerator ``index`` this process's current one, and return it."""
    torch.accelerator.set_device_index(index)
    return torch.device(ACCELERATOR, index)


def name(device: torch.device) -> str:
    """Return the product name of the accelerator ``device``; for MPS, which has none, its text."""
    return str(getattr(torch.get_device_module(device), "get_device_name", str)(device))


def seed(where: torch.device, number: int) -> None:
    """Seed what draws random numbers: torch, on the CPU and on the device ``where``, and Python."""
    torch.default_generator.manual_seed(number)  # `torch.manual_seed` takes ten times as long
    if is_accelerator(where):
        torch.get_device_module(where).manual_seed(number)
    random.seed(number)


def random_state(where: torch.device) -> list[Any]:
    """Return the states of what `seed` seeds, and NumPy's."""
    states = [torch.default_generator.get_state(), random.getstate(), np.random.get_state()]
    if is_accelerator(where):
        states.append(torch.get_device_module(where).get_rng_state())
    return states


def set_random_state(where: torch.device, states: list[Any]) -> None:
    """Restore the ``states`` that `random_state` returned."""
    torch.default_generator.set_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    if is_accelerator(where):
        torch.get_device_module(where).set_rng_state(states[3])


def processor() -> str:
    """Return the product name of the CPU, or its architecture."""
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return model[1] if model else platform.machine()


def choose_deterministic_kernels() -> None:
    """Have torch use kernels that compute the same bits in every run, and raise where it has none.

    Call it before the first computation on an accelerator: cuBLAS reads its variable once.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Otherwise torch fills all new memory, which costs a pass over it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def is_deterministic(device: torch.device) -> bool:
    """Return whether kernels on ``device`` compute the same bits in every run. Those of the CPU do."""
    return not is_accelerator(device) or torch.are_deterministic_algorithms_enabled()


# Streams and events. A stream is a queue of work on a device; an event marks a position in it.


def new_stream(device: torch.device, priority: int = 0) -> Any:
    """Return a new stream, ``None`` on the CPU. Streams of ``priority`` -1 run before others."""
    return torch.Stream(device, priority=priority) if is_accelerator(device) else None


def current_stream(device: torch.device) -> Any:
    """Return this thread's current stream on ``device``. The CPU's records and waits for nothing."""
    return torch.accelerator.current_stream(device) if is_accelerator(device) else torch.cpu.current_stream()


@contextlib.contextmanager
def inside(stream: Any) -> Iterator[None]:
    """Launch this thread's work on ``stream`` within the context. ``None`` leaves the current stream."""
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
    """Wait until ``device`` has done all work launched on it."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def moment(device: torch.device) -> Any:
    """Record a moment on ``device``: seconds on the CPU, an event in the stream of an accelerator."""
    if not is_accelerator(device):
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record(current_stream(device))
    return event


def seconds(start: Any, end: Any) -> float:
    """Return the seconds between two results of `moment`. On an accelerator the host waits for ``end``."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


class HostCopy:
    """An asynchronous copy of a tensor on the host. `read` waits for the copy, not for later work."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._values = tensor.detach().to("cpu", non_blocking=True)
        self._event = current_stream(tensor.device).record_event()

    def read(self) -> torch.Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._values


# Memory.


def keep_freed_memory() -> None:
    """Have glibc keep freed host memory for reuse. Otherwise it may return some in every step."""
    if tune := getattr(ctypes.CDLL(None), "mallopt", None):
        tune(-3, 32 << 20)  # M_MMAP_THRESHOLD: smaller tensors lie in the heap; it takes no more
        tune(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: of the heap's free end


def return_freed_memory() -> None:
    """Give freed host memory back to the system; glibc may keep that of all tensors below 32 MiB."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def reset_peak_memory(device: torch.device) -> None:
    """Restart `peak_memory` for another job of this process. Not every system can do so for the CPU."""
    if is_accelerator(device):
        torch.accelerator.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int:
    """Return the peak bytes of tensors on ``device``; for the CPU, of this process."""
    if is_accelerator(device):
        return torch.accelerator.max_memory_allocated(device)
    status = Path("/proc/self/status")
    peak = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
    if peak:  # unlike getrusage's figure, it is reset by `reset_peak_memory`
        return int(peak[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# Graphs: work that was launched once, and is launched again without the host's code.


class Recorder:
    """A recorder of what is launched on ``device``: a CUDA graph, in memory of its own.

    ``only_capturable``: whether only collectives that an accelerator makes by itself can be recorded.
    """

    only_capturable = True

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device)  # graphs cannot be recorded on the default stream
        self._graph: torch.cuda.CUDAGraph | None = None
        # NVIDIA's profiling library crashes in a second profile beside graphs if it was taken down after the
        # first. Torch's profiler sets the same for the graphs of torch's compiler.
        os.environ.setdefault("TEARDOWN_CUPTI", "0")

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether what is launched on ``tensor`` is recorded."""
        return on_accelerator(tensor)

    def warm_up(self, run: Callable[[], T]) -> T:
        """Run ``run`` on the stream that records, so that what a first launch prepares is there."""
        current = torch.cuda.current_stream(self._side.device)
        self._side.wait_stream(current)
        try:
            with torch.cuda.stream(self._side):
                return run()
        finally:  # also of a step that fails
            current.wait_stream(self._side)

    def record(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Record what ``run`` launches, without running it. Return its result, and what launches it."""
        graph = torch.cuda.CUDAGraph()
        # If a recording fails, torch does not return to the stream before. Other threads, such as the one
        # that pins a loader's batches, may call CUDA meanwhile.
        before = inside(current_stream(self._side.device))
        with before, torch.cuda.graph(graph, stream=self._side, capture_error_mode="thread_local"):
            result = run()
        self._graph = graph
        return result, graph.replay

    def release(self) -> None:
        """Delete the graph that was recorded last, even if a traceback, for example, still refers to it.

        When a process group ends, NCCL waits for each graph that has one of its collectives.
        """
        if self._graph is not None:
            self._graph.reset()
            self._graph = None


def recorder(device: torch.device) -> Recorder | None:
    """Return what records work on ``device``; None if nothing can."""
    return Recorder(device) if device.type == "cuda" else None

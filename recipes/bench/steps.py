"""Time whole training steps: every contender on one case, or on each case of the suite.

On an accelerator each contender first trains alone (`footprint`). Then all take turns to be timed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import torch
from torch._C._autograd import DeviceType

from shardtrain import comm
from shardtrain.device import is_accelerator, peak_memory, reset_peak_memory, synchronize

from . import contenders
from .compared import Bench
from .contenders import POOL, Batch, Case, Contender
from .interleave import Runner, attempt

PLAIN, BOUND = "no_communication", "bound"
SETTLED = 3  # steps after which optimizers have their state and allocators their memory


def footprint(
    build: Callable[[], Contender], data: list[list[Batch]], device: torch.device
) -> dict[str, int]:
    """Train the contender ``build()`` for a few steps; return what it takes on an accelerator.

    Memory is that of tensors and that of torch's allocator; launches are kernels, copies and collectives.
    """
    gc.collect()
    torch.accelerator.empty_cache()
    reset_peak_memory(device)
    held = torch.accelerator.memory_allocated(device), torch.accelerator.memory_reserved(device)
    contender = build()
    for number in range(SETTLED):
        contender.step(data[number % POOL])
    synchronize(device)
    peak, reserved = peak_memory(device), torch.accelerator.max_memory_reserved(device)
    with torch.profiler.profile() as seen:
        contender.step(data[0])
        synchronize(device)
    launches = sum(e.device_type != DeviceType.CPU and not e.is_user_annotation for e in seen.events() or ())
    return {"peak bytes": peak - held[0], "reserved bytes": reserved - held[1], "launches": launches}


def measure(bench: Bench) -> None:
    """Time all contenders on one case after the other."""
    for case in map(bench.settings.case, bench.settings.models):
        gc.collect()  # wrappers are reference cycles, so this frees the previous case
        _measure(bench, case)


def _measure(bench: Bench, case: Case) -> None:
    settings, device = bench.settings, bench.device
    title = case.shape if settings.precision == "fp32" else f"{case.shape} in {settings.precision}"
    names, references = contenders.to_run(settings.contenders), (settings.reference, "ddp", PLAIN, BOUND)
    comparison = bench.begin(names, title, "ms per step", 1e3, references, settings.precision)
    data = case.build_data(settings.accumulate, settings.seed, comm.rank(), device)
    runners: dict[str, Runner] = {}

    def build(name: str) -> Contender:
        return contenders.build(name, case.build_model(settings.seed, device), settings.precision, device)

    if is_accelerator(device):  # so that libraries allocate their workspaces before the measurement
        build(PLAIN).step(data[0])
    for name, own in comparison.samples.items():
        make = partial(build, name)
        if is_accelerator(device):
            own.footprint = attempt(partial(footprint, make, data, device), own, device) or {}
        contender = None if own.failure else attempt(make, own, device)
        if contender is not None:
            runners[name] = lambda number, own=contender: own.step(data[number % POOL])  # type: ignore[misc]
    gc.collect()
    bench.time(comparison, runners)

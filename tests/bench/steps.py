"""Time whole training steps: all contenders take turns in one run, and their losses are compared.

    torchrun --nproc-per-node 2 tests/bench/steps.py model=resnet18 rounds=30

model          resnet18, resnet50, resnet50_64, vit, resnet152, resnet50_224, tiny, or suite: the first four;
               by default resnet18 on the CPU and resnet50_224 on a GPU
contenders     a list, as [shardtrain,ddp], of shardtrain, shardtrain_process_group, fsdp2, fsdp1, ddp,
               no_communication, bound (a step's arithmetic, copies and sums, without waiting);
               by default all that differ on these ranks
reference      the first column of ratios is to this contender (fsdp2)
rounds         timed; each steps every contender once (30)
warmup         rounds before, not timed (3)
precision      fp32, bf16: autocast where a contender has no setting of its own; by default bf16 on a GPU
channels_last  true, false: filters and images; FSDP2 refuses such filters; by default true on a GPU
accumulate     micro-batches of one optimizer step (1)
image_size     pixels; by default the model's own case
batch_size     images per rank and micro-batch; by default the model's own case
device         auto, cpu, or an accelerator's type, such as cuda (auto)
out            the JSON file; by default outputs/bench/TIME.json

On an accelerator each contender first trains alone, for the memory of its tensors, what torch reserves, and
launches.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType

from shardtrain import comm
from shardtrain.device import is_accelerator, peak_memory, reset_peak_memory, synchronize
from shardtrain.launch import launcher
from shardtrain.launch.ranks import RankInfo

import contenders
from compared import Facts, compared, table, write
from contenders import POOL, Batch, Case, Contender
from rounds import Runner, Samples, attempt, interleave
from settings import Settings, read

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
    allocated = torch.accelerator.memory_allocated(device)
    reserved = torch.accelerator.memory_reserved(device)
    contender = build()
    for number in range(SETTLED):
        contender.step(data[number % POOL])
    synchronize(device)
    peak_bytes = peak_memory(device) - allocated
    reserved_bytes = torch.accelerator.max_memory_reserved(device) - reserved
    with torch.profiler.profile() as seen:
        contender.step(data[0])
        synchronize(device)
    launches = sum(e.device_type != DeviceType.CPU and not e.is_user_annotation for e in seen.events() or ())
    return {"peak bytes": peak_bytes, "reserved bytes": reserved_bytes, "launches": launches}


def measure(case: Case, samples: dict[str, Samples], settings: Settings, device: torch.device) -> None:
    """Time all contenders on one case; add what is measured to their ``samples``."""
    data = case.build_data(settings.accumulate, comm.rank(), device)
    runners: dict[str, Runner] = {}

    def build(name: str) -> Contender:
        return contenders.build(name, case.build_model(device), settings.precision, device)

    def step(contender: Contender, number: int) -> torch.Tensor:
        return contender.step(data[number % POOL])

    if is_accelerator(device):  # so that libraries allocate their workspaces before the measurement
        build("no_communication").step(data[0])
    for name, own in samples.items():
        make = partial(build, name)
        if is_accelerator(device):
            own.footprint = attempt(partial(footprint, make, data, device), own) or {}
        contender = None if own.failure else attempt(make, own)
        if contender is not None:
            runners[name] = partial(step, contender)
    gc.collect()
    interleave(runners, samples, device, settings.warmup, settings.rounds, case.shape)


def run(settings: Settings, rank_info: RankInfo, device: torch.device) -> None:
    """Time one case after the other; print and write the results, after Ctrl-C those until then."""
    warnings.simplefilter("ignore")  # peers warn of their own deprecations
    references = (settings.reference, "ddp", "no_communication", "bound")
    cases: dict[str, Facts] = {}
    with contextlib.ExitStack() as stack:
        if rank_info.world_size == 1:  # peers need a process group even for a single rank
            launcher.open_process_group(rank_info, device, dist.HashStore())  # type: ignore[attr-defined]
            stack.callback(launcher.close_process_group)
        names = settings.contenders or contenders.usual()
        for case in settings.cases:
            samples = {name: Samples() for name in names}
            try:
                measure(case, samples, settings, device)
            finally:
                facts = compared(samples, references, settings.precision)
                title = f"{case.shape} in {settings.precision}, accumulate {settings.accumulate}"
                cases[title] = facts
                if rank_info.rank == 0:
                    print(table(title, facts, "ms per step", 1e3))
                    write(settings, device, cases)
            gc.collect()  # wrappers are reference cycles, so this frees them


if __name__ == "__main__":
    launcher.start(partial(read, __doc__, ()), run)

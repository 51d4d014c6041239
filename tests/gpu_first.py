"""The first minutes on a GPU: what is most likely to fail comes first, one JSON line per finding.

    python tests/gpu_first.py --out first.jsonl              every section, in a checkout
    python tests/gpu_first.py minus_zeros small_steps        some of them
    python tests/gpu_first.py --dry                          tiny sizes on the CPU: does it run at all

Each section runs in ranks of its own with a time limit, so a hang or an abort ends that section alone. On one
GPU its two ranks share it (NCCL 2.30 and newer). It is run by hand; `test_device.py` runs it dry.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import profile

import shardtrain
from shardtrain import Precision, comm
from shardtrain import device as devices
from shardtrain.comm.arithmetic import merge

DRY = "--dry" in sys.argv
DEVICE = torch.device("cpu" if DRY else "cuda")
MIB = 2**20
LIMIT_S = 90
# The environment in which a section runs again.
AGAIN = {"minus_zeros": [{}, {"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "NVLS"}]}


def say(**found: Any) -> None:
    if dist.get_rank() == 0:
        print("FOUND " + json.dumps(found, default=str), flush=True)


@contextlib.contextmanager
def noted(what: str):
    """Say what an exception inside was, and go on."""
    try:
        yield
    except Exception as error:
        say(what=what, error=f"{type(error).__name__}: {error}"[:500])


def seconds(action: Callable[[], object], times: int = 3 if DRY else 20) -> float:
    """Return the time of one ``action``, after three to warm up."""
    for _ in range(3):
        action()
    devices.synchronize(DEVICE)
    start = time.perf_counter()
    for _ in range(times):
        action()
    devices.synchronize(DEVICE)
    return (time.perf_counter() - start) / times


def net(units: int = 6, width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU()) for _ in range(units))
    ).to(DEVICE)


def trained(model: nn.Module, steps: int = 4) -> list[float]:
    """Train on other data on each rank; return this rank's losses."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), []
    for step in range(steps):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = model(x.to(DEVICE)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# sections, the most doubtful first


def minus_zeros() -> None:
    """-0.0 from every rank stays -0.0, which says that no rank has a gradient; with one 0.0 it is 0.0."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for dtype in (torch.float32, torch.bfloat16):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            what = f"{dtype} {op} {os.environ.get('NCCL_ALGO', 'default')}"
            with noted(what):
                full = torch.full((world * 1024,), -0.0, dtype=dtype, device=DEVICE)
                full[::2] = 0.0 if rank == 0 else -0.0
                out = torch.empty(1024, dtype=dtype, device=DEVICE)
                dist.reduce_scatter_tensor(out, full, op)
                negative = out.signbit()
                say(what=what, right=bool(negative[1::2].all() and not negative[::2].any()))


def losses() -> None:
    """Each way to shard beside DDP; replicas with a shard group of one copy each parameter."""
    expected = trained(nn.parallel.DistributedDataParallel(net()))
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    ways: dict[str, dict[str, Any]] = {
        "replicas, a shard group of one": {"mesh": mesh},
        "replicas, bf16": {"mesh": mesh, "precision": Precision(torch.bfloat16)},
        "even": {},
        "whole": {"layout": "whole"},
        "kept after forward": {"reshard_after_forward": False},
        "offload": {"offload": True},
        "bf16": {"precision": Precision(torch.bfloat16)},
        "bf16 gradients": {"precision": Precision(reduce=torch.bfloat16)},
    }
    for name, options in ways.items():
        with noted(name):
            before = 0 if DRY else torch.cuda.memory_allocated()
            model = net()
            size = sum(param.nbytes for param in model.parameters())
            shardtrain.shard(model, units=[nn.Sequential], **options)
            found = trained(model)
            held = 0 if DRY else torch.cuda.memory_allocated() - before
            say(
                what=name,
                off=max(abs(a - b) for a, b in zip(found, expected, strict=True)),
                copies=held / size,
            )


def after_an_error() -> None:
    """A coalesced collective whose context ends by an error leaves the group usable."""
    values = [torch.ones(4, device=DEVICE) for _ in range(2)]
    with noted("inside"), dist._coalescing_manager(device=DEVICE, async_ops=False):
        dist.all_reduce(values[0])
        raise ValueError("planted")
    with noted("afterwards"):
        dist.all_reduce(values[1])
        say(what="afterwards", right=values[1].tolist() == [dist.get_world_size()] * 4)
        say(what="a model afterwards", losses=trained(shardtrain.shard(net())))


def offload() -> None:
    """The host's cast, and the way up and down: a gather of an offloaded bf16 shard waits for all three."""
    count = 1 << (16 if DRY else 28)
    host = torch.empty(count, pin_memory=not DRY)
    narrow = torch.empty(count, dtype=torch.bfloat16, pin_memory=not DRY)
    there = torch.empty_like(narrow, device=DEVICE)
    moves = {
        "cast on the host": lambda: narrow.copy_(host),
        "up": lambda: there.copy_(narrow, non_blocking=True),
        "down": lambda: narrow.copy_(there, non_blocking=True),
    }
    for name, move in moves.items():
        say(what=name, gb_per_s=narrow.nbytes / seconds(move, 3) / 1e9)


def unaligned_norms() -> None:
    """A bf16 LayerNorm and a norm of gradients whose memory begins 2 bytes late: speed and bits."""
    width = 64 if DRY else 4096
    x = torch.randn(width, width, device=DEVICE).bfloat16()
    for late in (0, 1):
        memory = torch.ones(width + 32, device=DEVICE).bfloat16()[late : late + width]
        moved = torch.empty(x.numel() + 32, device=DEVICE, dtype=x.dtype)[late : late + x.numel()].view_as(x)
        moved.copy_(x)
        normal = seconds(lambda: nn.functional.layer_norm(moved, (width,), memory, memory))  # noqa: B023
        norms = seconds(lambda: torch._foreach_norm([moved, memory]))  # noqa: B023
        value = torch._foreach_norm([moved])[0].item()
        say(
            what=f"{2 * late} bytes late", layer_norm_ms=1e3 * normal, foreach_norm_ms=1e3 * norms, norm=value
        )


def compiled() -> None:
    """Whether inductor clones parameters: peak bytes and time of compiled units beside plain ones."""
    for compiles in (False,) if DRY else (False, True):
        with noted(f"compiled {compiles}"):
            model = net(12, 64 if DRY else 2048)
            for block in shardtrain.blocks(model).values() if compiles else ():
                block.compile()
            shardtrain.shard(model, units=[nn.Sequential])
            x = torch.randn(64, model[0][0].in_features, device=DEVICE)
            taken = seconds(lambda: model(x).square().mean().backward())  # noqa: B023
            peak = 0 if DRY else torch.cuda.max_memory_allocated() / MIB
            say(what=f"compiled {compiles}", step_ms=1e3 * taken, peak_mib=peak)


def small_steps() -> None:
    """Steps that the host bounds: 48 tiny units, plain and sharded, and a trace of three steps."""
    x = torch.randn(8, 64, device=DEVICE)
    plain = net(48)
    sharded = shardtrain.shard(copy.deepcopy(plain), units=[nn.Sequential])
    for name, model in (("plain", plain), ("sharded", sharded)):
        say(what=name, step_ms=1e3 * seconds(lambda: model(x).square().mean().backward()))  # noqa: B023
    with profile() as trace:
        seconds(lambda: sharded(x).square().mean().backward(), 3)
    if dist.get_rank() == 0:
        trace.export_chrome_trace("gpu_first_trace.json")
        say(what="trace for Perfetto", file=str(Path("gpu_first_trace.json").absolute()))


def tree_of_sums() -> None:
    """Sums in one binary tree by an all-to-all beside the backend's own reduce-scatter."""
    world = dist.get_world_size()
    for kib in (16,) if DRY else (64, 1024, 65536):
        full = torch.randn(world * 256 * kib, device=DEVICE)
        rows, out = torch.empty_like(full), torch.empty(256 * kib, device=DEVICE)

        def tree() -> None:
            dist.all_to_all_single(rows, full)  # noqa: B023
            merge([*rows.view(world, -1)], out, dist.ReduceOp.AVG)  # noqa: B023

        with noted(f"{kib} KiB"):
            own = seconds(lambda: dist.reduce_scatter_tensor(out, full))  # noqa: B023
            say(what=f"{kib} KiB", tree_ms=1e3 * seconds(tree), reduce_scatter_ms=1e3 * own)


SECTIONS = [
    *(minus_zeros, losses, after_an_error, offload, unaligned_norms, compiled, small_steps, tree_of_sums)
]


def rank(section: str) -> None:
    if not DRY:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("gloo" if DRY else "nccl")
    say(torch=torch.__version__, device=DEVICE.type if DRY else torch.cuda.get_device_name())
    globals()[section]()
    comm.barrier()
    dist.destroy_process_group()


def main() -> None:
    names = [each.__name__ for each in SECTIONS]
    chosen = [name for name in names if name in sys.argv] or names
    out = Path(sys.argv[sys.argv.index("--out") + 1]) if "--out" in sys.argv else Path("first.jsonl")
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    runs = [(each, own) for each in chosen for own in AGAIN.get(each, [{}])]
    for name, own in runs:
        environ = os.environ | {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "OMP_NUM_THREADS": "1"} | own
        command = [sys.executable, *ranks, __file__, *(["--dry"] if DRY else []), "--section", name]
        try:
            done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
            text, code = done.stdout + done.stderr, done.returncode
        except subprocess.TimeoutExpired as error:
            text, code = (error.stdout or b"").decode() + (error.stderr or b"").decode(), -1
        found = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("FOUND ")]
        found += [{"failed": code, "tail": text[-3000:]}] if code else []
        with out.open("a") as file:
            for each in found:
                line = json.dumps({"section": name, **own, **each})
                print(line, file=file)
                print(line, flush=True)


if __name__ == "__main__":
    if "--section" in sys.argv:
        rank(sys.argv[sys.argv.index("--section") + 1])
    else:
        main()

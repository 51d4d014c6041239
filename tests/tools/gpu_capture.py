"""Steps captured by `shardtrain.capture` on one GPU beside eager ones: bits, milliseconds, launches, memory.

    python tests/tools/gpu_capture.py --out FOLDER            all scenes, at most nine minutes
    python tests/tools/gpu_capture.py --out FOLDER clip       one of them
    python tests/tools/gpu_capture.py --out FOLDER --dry      tiny models on the CPU: do the scenes run at all

A scene takes some steps on changing inputs as they are, and the same steps captured: losses and parameters
must be equal in every bit. Where they are not, it takes the eager steps again: kernels that add in no fixed
order differ from themselves. Then it measures more steps of both kinds. Two ranks need two GPUs, or NCCL 2.30
and ``NCCL_MULTI_RANK_GPU_ENABLE=1``. Each scene has processes of its own and a time-out: nobody knows what an
error in a capture leaves behind. ``FOLDER/captured.jsonl`` gets findings, ``FOLDER/captured.md`` the table.
Peers are those of `tests/bench/steps.py`. Dry, scenes run on the simulated device.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.models.vision_transformer import EncoderBlock, VisionTransformer

import shardtrain
from shardtrain import Precision, comm
from shardtrain import device as devices

sys.path.append(str(Path(__file__).parents[1]))  # a folder of scripts
import simulated_graph
from processes import run
from simulated_device import SimulatedDevice

GPU = torch.device("cuda", 0)
LOW = torch.bfloat16
TOTAL_S = 540
DRY_SHARE = 30  # limits are so many times as long: cores of a CPU may be busy
SCENE_S = 90  # a scene that takes longer is stopped
REPLAYS = 6  # of the steps that are compared
RATE = 1e-4
BLOCKS = (EncoderBlock, BasicBlock, Bottleneck)
# Calls of the host that launch something: a replay is one of them.
LAUNCH = re.compile(r"cu(da)?(Launch(Cooperative)?Kernel|GraphLaunch|Memcpy\w*Async|Memset\w*Async)")
# The first two are what torch's profiler sets for graphs of its compiler: NVIDIA's library crashes if it is
# taken down beside graphs. The third: the same bits on every stream.
ENVIRON = {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
Step = Callable[..., list[Tensor]]


class Model(NamedTuple):
    """A model and its images, [batch, 3, size, size]; ``make``: from the chance of a dropout."""

    make: Callable[[float], nn.Module]
    batch: int
    size: int  # pixels


def vit(dropout: float, size: int, patch: int, layers: int, heads: int, width: int) -> nn.Module:
    return VisionTransformer(size, patch, layers, heads, width, 4 * width, dropout=dropout, num_classes=100)


def resnet(dropout: float, block: type[nn.Module], *layers: int) -> nn.Module:
    return ResNet(block, layers, num_classes=100).to(memory_format=torch.channels_last)


SMALL = "ViT-S, 12 × 384, batch 64"
LARGE = "24 blocks × 1024, 8 × 1025 tokens"
MANY = "48 blocks × 64"
CONVOLUTIONS = "ResNet-50, 224 px × 256"
MODELS = {
    SMALL: Model(partial(vit, size=224, patch=16, layers=12, heads=6, width=384), 64, 224),
    LARGE: Model(partial(vit, size=512, patch=16, layers=24, heads=16, width=1024), 8, 512),
    MANY: Model(partial(vit, size=16, patch=4, layers=48, heads=4, width=64), 8, 16),
    CONVOLUTIONS: Model(lambda dropout: resnet(dropout, Bottleneck, 3, 4, 6, 3), 256, 224),
}
DRY_MODELS = {
    SMALL: Model(partial(vit, size=8, patch=4, layers=1, heads=2, width=16), 2, 8),
    LARGE: Model(partial(vit, size=8, patch=4, layers=1, heads=2, width=32), 2, 8),
    MANY: Model(partial(vit, size=8, patch=4, layers=2, heads=2, width=8), 2, 8),
    CONVOLUTIONS: Model(lambda dropout: resnet(dropout, BasicBlock, 1, 1, 1, 1), 2, 8),
}

SHARDED, SILENT = "shardtrain", "silent rank"
WARM_UP = 3  # steps before one is recorded


class Scene(NamedTuple):
    """What is trained over what, and what a step does besides forward, backward and update."""

    model: str = SMALL
    wrapper: str = SHARDED
    micro_batches: int = 1
    clip: float = 0.0
    dropout: float = 0.0
    schedules: bool = False
    saves: bool = False


RANKS = "two ranks"
UNSHARED = "they need two GPUs, or one that they share: NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1"
SCENES = {
    **{name: Scene(name) for name in MODELS},
    SILENT: Scene(wrapper=SILENT),
    "clip": Scene(clip=1.0),
    "accumulate 4": Scene(micro_batches=4),
    "dropout": Scene(dropout=0.1),
    "another rate in each step": Scene(schedules=True),
    "saved and loaded between": Scene(saves=True),
}


# One scene, in the process of scenes.


def wrapped(scene: Scene, model: nn.Module, device: torch.device) -> nn.Module:
    """Return ``model``, on ``device``, sharded."""
    model.to(device)
    transport: Any = "auto" if scene.wrapper == SILENT else comm.ProcessGroupTransport(dist.group.WORLD)
    kinds = {type(module) for module in model.modules() if isinstance(module, BLOCKS)}
    return shardtrain.shard(model, units=kinds, precision=Precision(LOW), transport=transport)


def step_of(scene: Scene, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(*batches: tuple[Tensor, Tensor]) -> list[Tensor]:
        losses = []
        for number, (x, y) in enumerate(batches, 1):
            with contextlib.nullcontext() if number == len(batches) else shardtrain.no_sync(model):
                loss = F.cross_entropy(model(x).float(), y)
                (loss / len(batches)).backward()
            losses.append(loss.detach())
        if scene.clip:
            shardtrain.clip_grad_norm_(model, scene.clip)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return step


class Figures(NamedTuple):
    """What steps computed, and what they took."""

    losses: list[float]
    digest: str  # of parameters
    ms: float
    reserved_mb: int
    summary: str

    def off(self, other: Figures) -> float:
        """Return how far losses are apart at most."""
        return max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True))

    def equals(self, other: Figures) -> bool:
        return self.losses == other.losses and self.digest == other.digest


def digest_of(model: nn.Module) -> str:
    sha = hashlib.sha256()
    for param in model.parameters():
        value = param.detach().as_subclass(Tensor)
        sha.update(value.float().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()[:16]


def least(number: int, device: torch.device) -> int:
    """Return the least number of all ranks, which must take the same steps. Collective."""
    if dist.get_world_size() == 1:
        return number
    value = torch.tensor(number, device=device)
    dist.all_reduce(value, dist.ReduceOp.MIN)
    return int(value.item())


def milliseconds(action: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Return the time of one ``action``, the mean of ``rounds``."""
    action()
    devices.synchronize(device)
    start = time.perf_counter()
    for _ in range(rounds):
        action()
    devices.synchronize(device)
    return round((time.perf_counter() - start) / rounds * 1e3, 2)


def launches(action: Callable[[], object], device: torch.device) -> int:
    """Return how often the host launches something in ``action``. The simulated profiler gives no names."""
    with torch.profiler.profile() as seen:
        action()
        devices.synchronize(device)
    names = [getattr(event, "name", "cudaLaunchKernel") for event in seen.events() or ()]
    return sum(bool(LAUNCH.match(name)) for name in names)


def drawn(model: Model, count: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return ``count`` batches of this rank, the same at every call."""
    batches = []
    for number in range(count):
        random = torch.Generator().manual_seed(1000 * dist.get_rank() + number)
        x = torch.randn(model.batch, 3, model.size, model.size, generator=random)
        y = torch.randint(100, (model.batch,), generator=random)
        batches.append((x.to(device), y.to(device)))
    return batches


def play(
    scene: Scene, captures: bool, model: Model, device: torch.device, is_dry: bool
) -> tuple[Figures, Callable[[], object]]:
    """Take the scene's steps, and measure more of them. Return one more step, too."""
    torch.manual_seed(0)
    with contextlib.nullcontext() if is_dry else device:  # on a host it takes seconds
        own = model.make(scene.dropout)
    net = wrapped(scene, own, device)
    rate = torch.tensor(RATE, device=device)
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=rate, fused=True, capturable=devices.is_accelerator(device)
    )
    step = step_of(scene, net, optimizer)
    if captures:
        step = shardtrain.capture(step, net, optimizer, warmup=WARM_UP)
    schedule = LambdaLR(optimizer, lambda number: 1 / (number + 1))

    sets = [drawn(model, 4 * scene.micro_batches, device)[at::4] for at in range(4)]
    losses = list[float]()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(WARM_UP + 1 + REPLAYS):
            devices.seed(device, number)
            losses += [loss.item() for loss in step(*sets[number % 4])]
            if scene.schedules:
                schedule.step()
            if scene.saves and number == 5:
                shardtrain.checkpoint.save(Path(folder) / "saved", net, optimizer)
            if scene.saves and number == 7:
                shardtrain.checkpoint.load(Path(folder) / "saved", net, optimizer)
                optimizer.param_groups[0]["lr"] = rate
    again = partial(step, *sets[0])
    figures = Figures(
        losses=losses,
        digest=digest_of(net),
        ms=milliseconds(again, device, rounds=2 if is_dry else 20),
        reserved_mb=torch.accelerator.memory_reserved() >> 20 if devices.is_accelerator(device) else 0,
        summary=getattr(step, "summary", ""),
    )
    return figures, again


def say(what: str, **finding: Any) -> None:
    if dist.get_rank() == 0:
        print("FOUND " + json.dumps({"what": what, **finding}), flush=True)


def played(name: str, scene: Scene, is_dry: bool, device: torch.device) -> None:
    """Report figures of both kinds of step, and whether bits are equal."""
    model = (DRY_MODELS if is_dry else MODELS)[scene.model]

    def figures(captures: bool) -> tuple[Figures, Callable[[], object]]:
        gc.collect()
        if devices.is_accelerator(device):
            torch.accelerator.empty_cache()
        return play(scene, captures, model, device, is_dry)

    eager, step = figures(False)
    say(name, eager_ms=eager.ms, eager_mb=eager.reserved_mb, eager_launches=launches(step, device))
    del step
    captured, step = figures(True)
    off = eager.off(captured)
    right = bool(least(eager.equals(captured), device))
    finding: dict[str, Any] = {"captured_ms": captured.ms, "captured_mb": captured.reserved_mb}
    if not right:
        again, _ = figures(False)
        finding["eager_off"] = eager.off(again)
        if not least(eager.equals(again), device):  # kernels that add in no fixed order: bits tell nothing
            right = off <= max(10 * finding["eager_off"], 5e-3)
    say(name, **finding, off=off, right=right, summary=captured.summary)
    # Last: a profiler beside a graph may end the process.
    say(name, captured_launches=launches(step, device))


@contextlib.contextmanager
def place(scene: Scene, is_dry: bool) -> Iterator[torch.device]:
    """Yield the device that a scene runs on, in a process group: of torchrun's ranks, or of one."""
    ranks = "RANK" in os.environ
    if not is_dry:
        device = devices.use(int(os.environ.get("RANK", 0)) % torch.cuda.device_count())
        store = None if ranks else dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
        alone = {} if ranks else {"store": store, "rank": 0, "world_size": 1}
        dist.init_process_group("nccl", device_id=device, **alone)
        yield device
    else:
        with SimulatedDevice()(pytest.MonkeyPatch()) as simulated, simulated_graph.recorder(simulated):
            fake: Any = {"backend": "cpu:fake,cuda:fake", "store": FakeStore(), "rank": 0, "world_size": 1}
            dist.init_process_group(**({"backend": "gloo"} if ranks else fake))
            yield GPU
    gc.collect()  # a graph that lives would let the end of its group wait for ever
    dist.destroy_process_group()


# All scenes, from a process that computes nothing.


def finding_of(name: str, out: Path, is_dry: bool, limit_s: float) -> dict[str, Any]:
    """Run a scene in processes of its own, and return what it found."""
    if name == RANKS and not is_dry and torch.cuda.device_count() < 2 and not devices.shareable():
        return {"what": name, "left_out": UNSHARED}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *(launcher if name == RANKS else []), __file__, "--out", str(out)]
    command += ["--scene", name, *(["--dry"] if is_dry else [])]
    ended = run(command, out / "captured.txt", limit_s, {"GLOO_SOCKET_IFNAME": "lo"} | os.environ | ENVIRON)
    finding: dict[str, Any] = {"what": name}
    for found in ended.findings:
        finding |= found
    if ended.failure and "summary" in finding:
        return finding | {"captured_launches": -1, "note": f"after its figures: {ended.failure}"}
    if ended.failure:
        finding["error"] = f"{ended.failure}: {ended.text[-900:]}"
    return finding


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return findings as a table, eager → captured."""
    lines = ["| scene | ms per step | launches by the host | MB reserved | bits |", "| --- " * 5 + "|"]
    for finding in found:
        pairs = [
            f"{finding.get(f'eager_{key}', '–')} → {finding.get(f'captured_{key}', '–')}"
            for key in ("ms", "launches", "mb")
        ]
        bits = {True: "equal", False: "DIFFER"}.get(finding.get("right"), "–")
        lines.append(f"| {finding['what']} | {' | '.join(pairs)} | {bits} |")
    return "\n".join(lines)


def is_wrong(finding: dict[str, Any]) -> bool:
    return bool(finding.get("error")) or finding.get("right") is False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*SCENES, RANKS]
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help="; ".join(names))
    parser.add_argument("--out", type=Path, required=True, help="a folder for what is found")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--total", type=int, default=TOTAL_S, help="seconds for all scenes together")
    parser.add_argument("--scene", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    if arguments.dry:
        torch.set_num_threads(1)
    if arguments.scene:
        scene = SCENES.get(arguments.scene, Scene())
        with place(scene, arguments.dry) as device:
            played(arguments.scene, scene, arguments.dry, device)
        return
    if unknown := [name for name in arguments.scenes if name not in names]:
        parser.error(f"no scene is called {unknown[0]}; there are {'; '.join(names)}")
    out.mkdir(parents=True, exist_ok=True)
    share = DRY_SHARE if arguments.dry else 1
    deadline = time.monotonic() + share * arguments.total
    found = list[dict[str, Any]]()
    with (out / "captured.jsonl").open("w") as file:
        for name in arguments.scenes or names:
            limit_s = min(deadline - time.monotonic(), share * SCENE_S)
            cut = {"what": name, "cut": "no time was left"}
            finding = cut if limit_s < 15 else finding_of(name, out, arguments.dry, limit_s)
            found.append(finding)
            print(json.dumps(finding), file=file, flush=True)
            print(json.dumps(finding), flush=True)
    (out / "captured.md").write_text(table(found) + "\n", encoding="utf-8")
    print(table(found))
    for title, keys in (
        ("left out", ("cut", "left_out")),
        ("went wrong", ("error",)),
    ):
        reasons = [f"{each['what']}: {each[key]}" for each in found for key in keys if key in each]
        print(f"{title}: {len(reasons) or 'nothing'}", *reasons, sep="\n", flush=True)
    sys.exit(1 if any(map(is_wrong, found)) else 0)


if __name__ == "__main__":
    main()

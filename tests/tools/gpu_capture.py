"""Steps captured by `shardtrain.capture` on one GPU beside eager ones: bits, milliseconds, launches, memory.

    python tests/tools/gpu_capture.py --out FOLDER            all scenes, at most nine minutes
    python tests/tools/gpu_capture.py --out FOLDER clip       one of them
    python tests/tools/gpu_capture.py --out FOLDER --dry      tiny models on the CPU: do the scenes run at all

A scene takes some steps on changing inputs as they are, and the same steps captured: losses and parameters
must be equal in every bit. Where they are not, it takes the eager steps again: kernels that add in no fixed
order differ from themselves. Then it measures more steps of both kinds. Peers (the plain model, DDP, FSDP2)
are captured by hand. Two ranks need two GPUs, or NCCL 2.30 and ``NCCL_MULTI_RANK_GPU_ENABLE=1``. The last
scene is the training program. Each has processes of its own and a time-out: nobody knows what an error in a
capture leaves behind. ``FOLDER/captured.jsonl`` gets findings, ``FOLDER/captured.md`` the table.

Dry, scenes run on the simulated device. DDP and FSDP2 cannot: they take their steps on the CPU, eagerly.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import os
import re
import subprocess
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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.models.vision_transformer import EncoderBlock, VisionTransformer

import shardtrain
from shardtrain import Precision, comm
from shardtrain import device as devices

sys.path.append(str(Path(__file__).parents[1]))  # a folder of scripts
import simulated_graph
from processes import CHECKOUT, run
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

PLAIN, DDP, FSDP2 = "plain", "DDP", "FSDP2"  # under autocast; under autocast; all in bf16
SHARDED, SILENT, ALL_LOW = "shardtrain", "silent rank", "shardtrain, all bf16"  # the first two: norms in fp32
PEERS = (PLAIN, DDP, FSDP2)
CARD_ONLY = (DDP, FSDP2)


class Scene(NamedTuple):
    """What is trained by what, and what a step does besides forward, backward and update."""

    model: str = SMALL
    wrapper: str = SHARDED
    micro_batches: int = 1
    clip: float = 0.0
    dropout: float = 0.0
    schedules: bool = False
    saves: bool = False


WRAPPERS = {
    SMALL: (SHARDED, PLAIN, FSDP2, DDP, ALL_LOW, SILENT),
    LARGE: (SHARDED, PLAIN, FSDP2, DDP),
    MANY: (SHARDED, PLAIN, FSDP2, DDP),
    CONVOLUTIONS: (SHARDED, PLAIN, FSDP2, DDP),
}
RANKS = "two ranks"
UNSHARED = "they need two GPUs, or one that they share: NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1"
PROGRAM = "program"
SCENES = dict[str, Scene]()
for _model, _wrappers in WRAPPERS.items():
    SCENES |= {f"{_model}: {wrapper}": Scene(_model, wrapper) for wrapper in _wrappers}
SCENES |= {
    "clip": Scene(clip=1.0),
    "accumulate 4": Scene(micro_batches=4),
    "dropout": Scene(dropout=0.1),
    "another rate in each step": Scene(schedules=True),
    "saved and loaded between": Scene(saves=True),
}


# One scene, in the process of scenes.


def warm_up_of(scene: Scene) -> int:
    """Return the steps before one is recorded. DDP times its first ten by events, which no graph can hold."""
    return 11 if scene.wrapper == DDP else 3


def wrapped(scene: Scene, model: nn.Module, device: torch.device) -> nn.Module:
    """Return ``model``, on ``device``, in the scene's wrapper."""
    if scene.wrapper == FSDP2:
        model.to(memory_format=torch.contiguous_format)  # it refuses others
    model.to(device)
    if scene.wrapper == PLAIN:
        return model
    if scene.wrapper == DDP:
        ids = [device.index] if devices.is_accelerator(device) else None
        # As in the benchmark: no other contender broadcasts statistics in every step.
        return DistributedDataParallel(
            model, device_ids=ids, broadcast_buffers=False, gradient_as_bucket_view=True
        )
    if scene.wrapper == FSDP2:
        # It does not compute BatchNorm in bf16 on a CPU.
        policy = MixedPrecisionPolicy(param_dtype=LOW if devices.is_accelerator(device) else None)
        for module in model.modules():
            if isinstance(module, BLOCKS):
                fully_shard(module, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)
    precision = Precision(LOW, keep=()) if scene.wrapper == ALL_LOW else Precision(LOW)
    transport: Any = "auto" if scene.wrapper == SILENT else comm.ProcessGroupTransport(dist.group.WORLD)
    kinds = {type(module) for module in model.modules() if isinstance(module, BLOCKS)}
    return shardtrain.shard(model, units=kinds, precision=precision, transport=transport)


def step_of(scene: Scene, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    casts = scene.wrapper in (PLAIN, DDP)

    def step(*batches: tuple[Tensor, Tensor]) -> list[Tensor]:
        losses = []
        for number, (x, y) in enumerate(batches, 1):
            with contextlib.nullcontext() if number == len(batches) else shardtrain.no_sync(model):
                with torch.autocast(x.device.type, LOW, enabled=casts):
                    loss = F.cross_entropy(model(x).float(), y)
                (loss / len(batches)).backward()
            losses.append(loss.detach())
        if scene.clip:
            shardtrain.clip_grad_norm_(model, scene.clip)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return step


def by_hand(step: Step, recorder: devices.Recorder, warmup: int) -> Step:
    """Return ``step`` captured as the package does it, for models that it does not know."""
    calls = 0
    inputs: Any = None
    results: list[Tensor] = []
    launch: Callable[[], None] | None = None

    def call(*batches: tuple[Tensor, Tensor]) -> list[Tensor]:
        nonlocal calls, inputs, results, launch
        calls += 1
        if calls <= warmup:
            return recorder.warm_up(partial(step, *batches))
        if launch is None:
            inputs = [(x.clone(), y.clone()) for x, y in batches]
            results, launch = recorder.record(partial(step, *inputs))
        for own, new in zip(inputs, batches, strict=True):
            for to, source in zip(own, new, strict=True):
                to.copy_(source)
        launch()
        return [result.clone() for result in results]

    return call


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
        value = param.detach()
        value = value.to_local() if hasattr(value, "to_local") else value.as_subclass(Tensor)  # FSDP2's
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
    is_peer = scene.wrapper in PEERS
    # Torch: DDP is built on a side stream. Peers are, on the one that warms up and records.
    recorder = devices.recorder(device) if captures and is_peer else None
    build = partial(wrapped, scene, own, device)
    net = build() if recorder is None else recorder.warm_up(build)
    rate = torch.tensor(RATE, device=device)
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=rate, fused=True, capturable=devices.is_accelerator(device)
    )
    step = step_of(scene, net, optimizer)
    if recorder is not None:
        step = by_hand(step, recorder, warm_up_of(scene))
    elif captures:
        step = shardtrain.capture(step, net, optimizer, warmup=warm_up_of(scene))
    schedule = LambdaLR(optimizer, lambda number: 1 / (number + 1))

    sets = [drawn(model, 4 * scene.micro_batches, device)[at::4] for at in range(4)]
    losses = list[float]()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(warm_up_of(scene) + 1 + REPLAYS):
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
    if is_dry and scene.wrapper in CARD_ONLY:
        say(name, card_only="makes tensors where parameters really lie, in C++: it cannot be simulated")
        return
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
    elif scene.wrapper in CARD_ONLY:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield torch.device("cpu")
    else:
        with SimulatedDevice()(pytest.MonkeyPatch()) as simulated, simulated_graph.recorder(simulated):
            fake: Any = {"backend": "cpu:fake,cuda:fake", "store": FakeStore(), "rank": 0, "world_size": 1}
            dist.init_process_group(**({"backend": "gloo"} if ranks else fake))
            yield GPU
    gc.collect()  # a graph that lives would let the end of its group wait for ever
    dist.destroy_process_group()


def program(out: Path, is_dry: bool) -> None:
    """Train `+recipe=resnet` as it is and with `train.capture=true`; compare scores and images per second."""
    finding: dict[str, Any] = {"what": PROGRAM}
    for kind in ("eager", "captured"):
        folder = out / f"program_{kind}"
        command = [sys.executable, "-m", "shardtrain.train", "+recipe=resnet", "seed=0", "resume=none"]
        command += [f"train.max_steps={4 if is_dry else 150}", f"device={'cpu' if is_dry else 'cuda'}"]
        command += [f"run.dir={folder}", "monitor.writers=[]"]
        command += [f"train.capture={str(kind == 'captured').lower()}", *(["threads=1"] if is_dry else [])]
        done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
        text = done.stdout + done.stderr
        print(text, flush=True)
        if is_dry and kind == "captured" and "train.capture=true needs a GPU" in text:
            finding["card_only"] = (
                "the program refuses a CPU; test_capture.py runs it on the simulated device"
            )
        elif done.returncode:
            finding["error"] = f"{kind}: exit code {done.returncode}: {text[-900:]}"
            break
        else:
            facts = json.loads((folder / "result.json").read_text())
            for key in ("acc1/val", "loss/val", "loss/train", "run_img_per_s", "captured_steps"):
                finding[f"{kind}_{key}"] = facts.get(key)
    if "captured_acc1/val" in finding:  # rates are rounded to fp32 where steps are captured
        finding["right"] = abs(finding["eager_acc1/val"] - finding["captured_acc1/val"]) <= 1.0
    print("FOUND " + json.dumps(finding), flush=True)


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
        is_peer = name in SCENES and SCENES[name].wrapper in PEERS
        finding["peer_error" if is_peer else "error"] = f"{ended.failure}: {ended.text[-900:]}"
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
    names = [*SCENES, RANKS, PROGRAM]
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help="; ".join(names))
    parser.add_argument("--out", type=Path, required=True, help="a folder for what is found")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--total", type=int, default=TOTAL_S, help="seconds for all scenes together")
    parser.add_argument("--scene", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    if arguments.dry:
        torch.set_num_threads(1)
    if arguments.scene == PROGRAM:
        program(out, arguments.dry)
        return
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
        ("left out", ("cut", "left_out", "card_only")),
        ("peers that failed", ("peer_error",)),
        ("went wrong", ("error",)),
    ):
        reasons = [f"{each['what']}: {each[key]}" for each in found for key in keys if key in each]
        print(f"{title}: {len(reasons) or 'nothing'}", *reasons, sep="\n", flush=True)
    sys.exit(1 if any(map(is_wrong, found)) else 0)


if __name__ == "__main__":
    main()

"""Steps captured by `shardtrain.capture` on one GPU beside eager ones: bits, milliseconds, launches, memory.

    python tests/gpu_capture.py --out FOLDER            all scenes, at most seven minutes
    python tests/gpu_capture.py --out FOLDER --dry      tiny models on the CPU: do the scenes run at all

A scene takes some steps on changing inputs as they are, and the same steps captured: losses and parameters
must be equal in every bit. Where they are not, it takes the eager steps again: kernels that add in no fixed
order differ from themselves. Then it measures more steps of both kinds. Peers (the plain model, DDP, FSDP2)
are captured by hand, as torch documents it. Then two ranks over NCCL do the same, on two GPUs, or on one
where NCCL 2.30 or newer is loaded and ``NCCL_MULTI_RANK_GPU_ENABLE=1`` is set. The last scene is the training
program.

Scenes run one after the other in one process. If one fails, hangs or ends it, another process goes on with
the next scene: nobody knows what an error in a capture leaves behind. A finding is printed, and written to
``FOLDER/captured.jsonl``, as soon as it is there; at the end the table follows, as ``FOLDER/captured.md``,
then what was left out, and what went wrong.

Dry, scenes run on the simulated device. DDP and FSDP2 cannot: they take their steps on the CPU, eagerly. Two
ranks have gloo in place of NCCL.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
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

import simulated_graph
from simulated_device import SimulatedDevice

CHECKOUT = Path(__file__).parents[1]
GPU = torch.device("cuda", 0)
LOW = torch.bfloat16
TOTAL_S = 420
DRY_SHARE = 30  # limits are so many times as long: cores of a CPU may be busy
SCENE_S = 60  # a scene that takes longer is stopped
RANKS_S = 60  # for two ranks
PROGRAM_S = 90  # for the last scene
REPLAYS = 6  # of the steps that are compared
RATE = 1e-4
BLOCKS = (EncoderBlock, BasicBlock, Bottleneck)
# Calls of the host that launch something: a replay is one of them.
LAUNCH = re.compile(r"cu(da)?(Launch(Cooperative)?Kernel|GraphLaunch|Memcpy\w*Async|Memset\w*Async)")
# The first two are what torch's profiler sets for graphs of its compiler: NVIDIA's library crashes if it is
# taken down beside graphs. The third: the same bits on every stream.
ENVIRON = {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
ENVIRON |= {"PYTHONIOENCODING": "utf-8"}
Step = Callable[..., list[Tensor]]


class Model(NamedTuple):
    """A model and its images, [batch, 3, size, size]; ``make``: from the chance of a dropout."""

    make: Callable[[float], nn.Module]
    batch: int
    size: int  # pixels


def vit(dropout: float, size: int, patch: int, layers: int, heads: int, width: int) -> nn.Module:
    return VisionTransformer(size, patch, layers, heads, width, 4 * width, dropout=dropout, num_classes=100)


def resnet50(dropout: float) -> nn.Module:
    return ResNet(Bottleneck, [3, 4, 6, 3], num_classes=100).to(memory_format=torch.channels_last)


def blocks(dropout: float) -> nn.Module:
    """Return what stands for a ResNet."""
    layers = [nn.Conv2d(3, 8, 3), BasicBlock(8, 8), BasicBlock(8, 8), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 100)).to(memory_format=torch.channels_last)


SMALL = "ViT-S, 12 × 384, batch 64"
LARGE = "24 blocks × 1024, 8 × 1025 tokens"
MANY = "48 blocks × 64"
CONVOLUTIONS = "ResNet-50, 224 px × 256"
MODELS = {
    SMALL: Model(partial(vit, size=224, patch=16, layers=12, heads=6, width=384), 64, 224),
    LARGE: Model(partial(vit, size=512, patch=16, layers=24, heads=16, width=1024), 8, 512),
    MANY: Model(partial(vit, size=16, patch=4, layers=48, heads=4, width=64), 8, 16),
    CONVOLUTIONS: Model(resnet50, 256, 224),
}
DRY_MODELS = {
    SMALL: Model(partial(vit, size=8, patch=4, layers=1, heads=2, width=16), 2, 8),
    LARGE: Model(partial(vit, size=8, patch=4, layers=1, heads=2, width=32), 2, 8),
    MANY: Model(partial(vit, size=8, patch=4, layers=2, heads=2, width=8), 2, 8),
    CONVOLUTIONS: Model(blocks, 2, 8),
}

PLAIN, DDP, FSDP2 = "plain", "DDP", "FSDP2"  # under autocast; under autocast; all in bf16
SHARDED, SILENT, ALL_LOW = "shardtrain", "silent rank", "shardtrain, all bf16"  # the first two: norms in fp32
PEERS = (PLAIN, DDP, FSDP2)
CARD_ONLY = {
    DDP: "its reducer, in C++, makes tensors where parameters really lie, which is host memory",
    FSDP2: "its operators, in C++, make tensors where parameters really lie, which is host memory",
}


class Scene(NamedTuple):
    """What is trained by what, and what a step does besides forward, backward and update."""

    model: str = SMALL
    wrapper: str = SHARDED
    micro_batches: int = 1
    clip: float = 0.0
    dropout: float = 0.0
    schedules: bool = False
    saves: bool = False


EXTRAS = {
    "clip": Scene(clip=1.0),
    "accumulate 4": Scene(micro_batches=4),
    "dropout": Scene(dropout=0.1),
    "another rate in each step": Scene(schedules=True),
    "saved and loaded between": Scene(saves=True),
}
TABLE = {
    SMALL: (SHARDED, PLAIN, FSDP2, DDP, ALL_LOW, SILENT),
    LARGE: (SHARDED, PLAIN, FSDP2, DDP),
    MANY: (SHARDED, PLAIN, FSDP2, DDP),
    CONVOLUTIONS: (SHARDED, PLAIN, FSDP2, DDP),
}
RANKS = "two ranks"
UNSHARED = (
    "two ranks over NCCL need two GPUs, or one that they share: with NCCL 2.30 or newer, and "
    "NCCL_MULTI_RANK_GPU_ENABLE=1"
)
PROGRAM = "+recipe=resnet"
SCENES = {f"{SMALL}: {wrapper}": Scene(wrapper=wrapper) for wrapper in TABLE[SMALL]} | EXTRAS
for _model in (LARGE, MANY, CONVOLUTIONS):
    SCENES |= {f"{_model}: {wrapper}": Scene(_model, wrapper) for wrapper in TABLE[_model]}


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
    digest: str
    ms: float
    launches: int
    reserved_mb: int
    summary: str


def digest_of(model: nn.Module) -> str:
    sha = hashlib.sha256()
    for param in model.parameters():
        value = param.detach()
        value = value.to_local() if hasattr(value, "to_local") else value  # FSDP2's
        sha.update(value.float().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()[:16]


def least(number: int, device: torch.device) -> int:
    """Return the least number of all ranks, which must take the same steps. Collective."""
    if dist.get_world_size() == 1:
        return number
    value = torch.tensor(number, device=device)
    dist.all_reduce(value, dist.ReduceOp.MIN)
    return int(value.item())


def milliseconds(action: Callable[[], object], device: torch.device, most: int) -> float:
    """Return the time of one ``action``, the mean of some 1.5 seconds, at least of two and of ``most``."""
    devices.synchronize(device)
    start = time.perf_counter()
    action()
    devices.synchronize(device)
    rounds = least(min(max(int(1.5 / (time.perf_counter() - start)), 2), most), device)
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
    return sum(
        bool(LAUNCH.match(getattr(event, "name", "cudaLaunchKernel"))) for event in seen.events() or ()
    )


def drawn(model: Model, count: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return ``count`` batches of this rank, the same at every call."""
    batches = []
    for number in range(count):
        random = torch.Generator().manual_seed(1000 * dist.get_rank() + number)
        x = torch.randn(model.batch, 3, model.size, model.size, generator=random)
        y = torch.randint(100, (model.batch,), generator=random)
        batches.append((x.to(device), y.to(device)))
    return batches


class Way(NamedTuple):
    """How scenes run. ``counts``: the launches, under a profiler, which may end the process."""

    is_dry: bool
    counts: bool


def play(scene: Scene, captures: bool, model: Model, device: torch.device, way: Way) -> Figures:
    """Take the scene's steps, and measure more of them."""
    torch.manual_seed(0)
    with contextlib.nullcontext() if way.is_dry else device:  # on a host it takes seconds
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
    return Figures(
        losses=losses,
        digest=digest_of(net),
        ms=milliseconds(again, device, most=2 if way.is_dry else 20),
        launches=launches(again, device) if way.counts else -1,
        reserved_mb=torch.accelerator.memory_reserved() >> 20 if devices.is_accelerator(device) else 0,
        summary=getattr(step, "summary", ""),
    )


def apart(one: Figures, other: Figures) -> float:
    """Return how far losses are apart at most; 0.0 if they are equal in every bit."""
    return max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))


def equal(one: Figures, other: Figures) -> bool:
    return one.losses == other.losses and one.digest == other.digest


def played(scene: Scene, way: Way, device: torch.device) -> dict[str, Any]:
    """Return figures of both kinds of step, and whether bits are equal."""
    model = (DRY_MODELS if way.is_dry else MODELS)[scene.model]

    def figures(captures: bool) -> Figures:
        gc.collect()
        if devices.is_accelerator(device):
            torch.accelerator.empty_cache()
        return play(scene, captures, model, device, way)

    eager = figures(False)
    finding: dict[str, Any] = {"eager_ms": eager.ms, "eager_launches": eager.launches}
    finding["eager_reserved_mb"] = eager.reserved_mb
    if way.is_dry and scene.wrapper in CARD_ONLY:
        return finding | {"card_only": f"cannot be simulated: {CARD_ONLY[scene.wrapper]}"}
    captured = figures(True)
    finding |= {"captured_ms": captured.ms, "captured_launches": captured.launches}
    finding |= {"captured_reserved_mb": captured.reserved_mb, "summary": captured.summary}
    finding |= {"off": apart(eager, captured)}
    finding["right"] = bool(least(equal(eager, captured), device))
    if not finding["right"]:
        again = figures(False)
        finding["eager_off"] = apart(eager, again)
        if not least(equal(eager, again), device):  # kernels that add in no fixed order: bits tell nothing
            finding["right"] = finding["off"] <= max(10 * finding["eager_off"], 5e-3)
    return finding


@contextlib.contextmanager
def place(scene: Scene, is_dry: bool) -> Iterator[torch.device]:
    """Yield the device that a scene runs on, in a process group of one rank."""
    if not is_dry:
        yield GPU
    elif scene.wrapper in CARD_ONLY:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield torch.device("cpu")
        dist.destroy_process_group()
    else:
        with SimulatedDevice()(pytest.MonkeyPatch()) as simulated, simulated_graph.recorder(simulated):
            if "RANK" in os.environ:
                dist.init_process_group("gloo")
            else:
                dist.init_process_group("cpu:fake,cuda:fake", store=FakeStore(), rank=0, world_size=1)
            yield GPU
            dist.destroy_process_group()


def run_scenes(names: Sequence[str], way: Way) -> None:
    """Run scenes, and print the finding of each; end this process after an error."""
    if not way.is_dry:
        torch.cuda.set_device(GPU)
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=GPU)
    for name in names:
        print(f"BEGIN {name}", flush=True)
        started = time.monotonic()
        scene = SCENES[name]
        finding: dict[str, Any] = {"what": name}
        try:
            with place(scene, way.is_dry) as device:
                finding |= played(scene, way, device)
        except Exception as error:
            kind = "peer_error" if scene.wrapper in PEERS else "error"
            finding[kind] = f"{type(error).__name__}: {error}"[:900]
        finding["seconds"] = round(time.monotonic() - started, 1)
        print(f"FOUND {json.dumps(finding)}", flush=True)
        if "error" in finding or "peer_error" in finding:
            sys.stdout.flush()
            os._exit(1)
    gc.collect()  # a graph that lives would let the end of its group wait for ever
    if not way.is_dry:
        dist.destroy_process_group()
    print("END", flush=True)


def run_rank(is_dry: bool) -> None:
    """Run the first scene as one of two ranks, which torchrun has started; print the finding of both."""
    device = GPU
    if not is_dry:
        device = devices.use(int(os.environ["RANK"]) % torch.cuda.device_count())
        dist.init_process_group("nccl", device_id=device)
    with place(Scene(), is_dry) as simulated:
        finding = played(Scene(), Way(is_dry, counts=False), simulated if is_dry else device)
        if dist.get_rank() == 0:
            print(f"FOUND {json.dumps(finding)}", flush=True)
    gc.collect()
    if not is_dry:
        dist.destroy_process_group()


# All scenes, from a process that computes nothing.


class Worker:
    """A process of its own that runs scenes; ``log``: gets what it prints."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.process = subprocess.Popen(
            command,
            cwd=CHECKOUT,
            env=os.environ | ENVIRON,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._log = log
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines, self._log.open("a", encoding="utf-8") as file:
            for line in lines:
                print(line, end="", file=file, flush=True)
                if line.startswith(("BEGIN ", "FOUND ", "END")):
                    self._lines.put(line.strip())
        self._lines.put(None)

    def next_line(self, limit_s: float) -> str | None:
        """Return the next line for the parent; None at the process's end. Raises `queue.Empty` in time."""
        return self._lines.get(timeout=max(limit_s, 0.1))

    def end(self) -> int:
        self.process.kill()
        return self.process.wait()


def command_of(names: Sequence[str], way: Way) -> list[str]:
    options = [*(["--dry"] if way.is_dry else []), *([] if way.counts else ["--no-launches"])]
    return [sys.executable, __file__, *options, "--scenes", *names]


Command = Callable[[Sequence[str], Way], list[str]]


def findings(
    out: Path, is_dry: bool, seconds_left: Callable[[], float], command: Command = command_of
) -> Iterator[dict[str, Any]]:
    """Yield the finding of each scene as soon as it is there; a scene that is no longer run is ``cut``."""
    share = DRY_SHARE if is_dry else 1
    waiting = [*SCENES]
    way = Way(is_dry, counts=True)

    def scenes_left() -> float:
        return min(seconds_left() - share * (PROGRAM_S + RANKS_S), share * SCENE_S)

    while waiting and scenes_left() > 15:
        for finding in until_it_ends(command(waiting, way), waiting, out / "captured.txt", scenes_left):
            if finding.pop("died", False) and way.counts:  # perhaps of the profiler: once more, without
                way = way._replace(counts=False)
                yield {"what": "launches", "note": f"not counted from here on: {finding}"}
                continue
            if finding["what"] in waiting:
                waiting = waiting[waiting.index(finding["what"]) + 1 :]
            yield finding
    for name in waiting:
        yield {"what": name, "cut": "no time was left"}
    yield two_ranks(out, is_dry, min(seconds_left() - share * PROGRAM_S, share * RANKS_S))
    yield program(out, is_dry, seconds_left())


def until_it_ends(
    command: Sequence[str], names: Sequence[str], log: Path, seconds_left: Callable[[], float]
) -> Iterator[dict[str, Any]]:
    """Yield findings of one process, which runs the scenes ``names``, until it ends or is ended.

    The finding of a scene in which it ended without a word has ``died``.
    """
    worker = Worker(command, log)
    done = 0
    failed = False
    while True:
        limit_s = seconds_left()
        current = names[done] if done < len(names) else "the end of the process group"
        try:
            line = worker.next_line(limit_s)
        except queue.Empty:
            worker.end()
            yield {"what": current, "error": f"stopped after {limit_s:.0f} s"}
            return
        if line is None:
            code = worker.process.wait()
            if not failed and done < len(names):
                text = log.read_text(encoding="utf-8", errors="replace")[-900:]
                yield {"what": current, "error": f"the process ended with {code}: {text}", "died": True}
            return
        if line == "END":
            worker.process.wait()
            return
        if line.startswith("FOUND "):
            done += 1
            finding = json.loads(line[6:])
            failed = "error" in finding or "peer_error" in finding
            yield finding


def two_ranks(out: Path, is_dry: bool, seconds: float) -> dict[str, Any]:
    """Run the first scene on two ranks over NCCL, which share a GPU if there is only one."""
    finding: dict[str, Any] = {"what": RANKS}
    if not is_dry and torch.cuda.device_count() < 2 and not devices.shareable():
        return finding | {"left_out": UNSHARED}
    if seconds < 15:
        return finding | {"cut": "no time was left"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, __file__, "--rank", *(["--dry"] if is_dry else [])]
    environ = {"GLOO_SOCKET_IFNAME": "lo"} | os.environ | ENVIRON
    process = subprocess.Popen(
        command,
        cwd=CHECKOUT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=seconds)
        ending = f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # torchrun and its ranks
        text, _ = process.communicate()
        ending = f"stopped after {seconds:.0f} s"
    with (out / "captured.txt").open("a", encoding="utf-8") as file:
        print(text, file=file, flush=True)
    for line in text.splitlines():
        if line.startswith("FOUND "):
            finding |= json.loads(line[6:])
            return finding if process.returncode == 0 else finding | {"error": f"then {ending}"}
    if "Duplicate GPU" in text:
        return finding | {"left_out": f"{UNSHARED}; the NCCL that is loaded is older"}
    return finding | {"error": f"{ending}: {text[-900:]}"}


def program(out: Path, is_dry: bool, seconds: float) -> dict[str, Any]:
    """Train `+recipe=resnet` as it is and with `train.capture=true`; compare scores and images per second."""
    steps = 4 if is_dry else 150
    finding: dict[str, Any] = {"what": PROGRAM}
    if seconds < 20:
        return finding | {"cut": "no time was left"}
    for kind in ("eager", "captured"):
        folder = out / f"program_{kind}"
        command = [sys.executable, "-m", "shardtrain.train", PROGRAM, f"train.max_steps={steps}", "seed=0"]
        command += [f"device={'cpu' if is_dry else 'cuda'}", f"run.dir={folder}", "monitor.writers=[]"]
        command += [f"train.capture={str(kind == 'captured').lower()}", "resume=none"]
        command += ["threads=1"] * is_dry
        try:
            done = subprocess.run(
                command, cwd=CHECKOUT, capture_output=True, text=True, timeout=seconds / 2, check=False
            )
        except subprocess.TimeoutExpired:
            return finding | {"error": f"{kind}: stopped after {seconds / 2:.0f} s"}
        text = done.stdout + done.stderr
        with (out / "captured.txt").open("a", encoding="utf-8") as file:
            print(text, file=file, flush=True)
        if is_dry and kind == "captured" and "train.capture=true needs a GPU" in text:
            finding["card_only"] = (
                "the program refuses a CPU; on the simulated device test_capture.py runs it"
            )
        elif done.returncode:
            return finding | {"error": f"{kind}: exit code {done.returncode}: {text[-900:]}"}
        else:
            facts = json.loads((folder / "result.json").read_text())
            for key in ("acc1/val", "loss/val", "loss/train", "run_img_per_s", "captured_steps"):
                finding[f"{kind}_{key}"] = facts.get(key)
    if "captured_acc1/val" in finding:  # rates are rounded to fp32 where steps are captured
        finding["right"] = abs(finding["eager_acc1/val"] - finding["captured_acc1/val"]) <= 1.0
    return finding


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return findings as tables: of models by wrappers, and of what else a step may do."""
    by_name = {finding["what"]: finding for finding in found}
    wrappers = [*dict.fromkeys(wrapper for row in TABLE.values() for wrapper in row)]
    titles = {
        "ms per step": lambda kind, finding: f"{finding[f'{kind}_ms']:.1f}",
        "launches by the host": lambda kind, finding: f"{finding[f'{kind}_launches']}",
        "MB reserved": lambda kind, finding: f"{finding[f'{kind}_reserved_mb']}",
    }
    lines = list[str]()
    for title, text in titles.items():
        lines += ["", f"| {title}, eager → captured | {' | '.join(wrappers)} |"]
        lines.append("| --- " * (len(wrappers) + 1) + "|")
        for model in TABLE:
            cells = [cell(by_name.get(f"{model}: {wrapper}"), text) for wrapper in wrappers]
            lines.append(f"| {model} | {' | '.join(cells)} |")
    lines += ["", "| ViT-S, shardtrain, and | ms | launches | MB | bits |", "| --- | --- | --- | --- | --- |"]
    for name in EXTRAS:
        finding = by_name.get(name)
        bits = "" if finding is None or "right" not in finding else "equal" if finding["right"] else "DIFFER"
        cells = [cell(finding, text) for text in titles.values()]
        lines.append(f"| {name} | {' | '.join(cells)} | {bits} |")
    lines += ["", *(f"{name}: {json.dumps(by_name.get(name))}" for name in (RANKS, PROGRAM))]
    return "\n".join(lines)


def cell(finding: dict[str, Any] | None, text: Callable[[str, dict[str, Any]], str]) -> str:
    """Return both kinds of one figure; a mark where bits differ, or what came in place of figures."""
    if finding is None:
        return "–"
    if "captured_ms" in finding:
        mark = "" if finding["right"] else " (bits differ)"
        return f"{text('eager', finding)} → {text('captured', finding)}{mark}"
    if "card_only" in finding:
        return f"{text('eager', finding)} → on a card only"
    return "cut" if "cut" in finding else "failed"


def report(out: Path, is_dry: bool, seconds_left: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """Yield findings as soon as they are there, and write them and the table to ``out``."""
    found = list[dict[str, Any]]()
    with (out / "captured.jsonl").open("w") as file:
        for finding in findings(out, is_dry, seconds_left):
            print(json.dumps(finding), file=file, flush=True)
            found.append(finding)
            yield finding
    (out / "captured.md").write_text(table(found) + "\n", encoding="utf-8")


def is_wrong(finding: dict[str, Any]) -> bool:
    return bool(finding.get("error")) or finding.get("right") is False


def last_lines(found: Sequence[dict[str, Any]]) -> list[str]:
    """List what was left out and why, what peers could not do, and what went wrong."""
    lines = list[str]()
    for title, keys in (
        ("left out", ("cut", "left_out", "card_only")),
        ("peers that failed", ("peer_error",)),
    ):
        reasons = [f"{each['what']}: {each[key]}" for each in found for key in keys if key in each]
        lines += [f"{title}: {len(reasons) or 'nothing'}", *reasons]
    wrong = [json.dumps(finding) for finding in found if is_wrong(finding)]
    return [*lines, f"went wrong: {len(wrong) or 'nothing'}", *wrong]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--total", type=int, default=TOTAL_S, help="seconds for all scenes together")
    parser.add_argument("--no-launches", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--scenes", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.dry:
        torch.set_num_threads(1)
    if arguments.rank:
        run_rank(arguments.dry)
        return
    if arguments.scenes:
        run_scenes(arguments.scenes, Way(arguments.dry, counts=not arguments.no_launches))
        return
    if arguments.out is None:
        parser.error("--out is missing: a folder for what is found")
    out = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + arguments.total * (DRY_SHARE if arguments.dry else 1)
    found = list[dict[str, Any]]()
    for finding in report(out, arguments.dry, lambda: deadline - time.monotonic()):
        print(json.dumps(finding), flush=True)
        found.append(finding)
    print((out / "captured.md").read_text(encoding="utf-8"), flush=True)
    print("\n".join(last_lines(found)), flush=True)
    sys.exit(1 if any(is_wrong(finding) for finding in found) else 0)


if __name__ == "__main__":
    main()

"""A quarter of an hour on one GPU: the parts that are most likely to fail first, one JSON line per finding.

    python tests/tools/gpu_first.py --out FOLDER                all parts, at most nine minutes
    python tests/tools/gpu_first.py --out FOLDER same_bits      one of them
    python tests/tools/gpu_first.py --out FOLDER --dry          tiny sizes on the CPU: does it run at all

Each part runs in processes of its own with a time-out of its own, so a hang or an abort ends that part alone.
Parts come in order of importance. Where the host is slow, figures have fewer rounds, or are left out, before
the time-out; a finding says what was cut. What went wrong is listed last, and the program then ends with 1.
``FOLDER/findings.jsonl`` gets the findings, and ``FOLDER/log.txt`` what the parts printed. One GPU is enough:
one rank runs over NCCL, and torch's fake process group makes one rank of eight. All ways against the plain
model, on up to four ranks, are `tests/engine/test_cuda.py`, and captured steps are `gpu_capture.py`: commands
of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchvision.models.vision_transformer import VisionTransformer

import shardtrain
from shardtrain import Precision
from shardtrain import device as devices
from shardtrain.comm import ProcessGroupTransport

sys.path.append(str(Path(__file__).parents[1] / "bench"))  # a folder of scripts
from contenders import Contender, adamw, build
from processes import run
from steps import footprint

DRY = "--dry" in sys.argv
DEVICE = torch.device("cpu") if DRY else torch.device("cuda", 0)
TOTAL_S = 540
OVER = "gloo" if DRY else "nccl"  # the backend of one rank
STARTED = time.monotonic()
Batch = tuple[torch.Tensor, torch.Tensor]


def say(**finding: Any) -> None:
    """Report a finding."""
    print("FOUND " + json.dumps(finding, default=str), flush=True)


@contextlib.contextmanager
def noted(what: str, kind: str = "error") -> Iterator[None]:
    """Report an exception inside as ``kind``, and go on."""
    try:
        yield
    except Exception as error:
        say(what=what, **{kind: f"{type(error).__name__}: {error}"[:600]})


def seconds_left() -> float:
    """Return the seconds until this part should end by itself, some before it is stopped."""
    limit_s = float(os.environ.get("GPU_FIRST_LIMIT_S", "inf"))
    return 0.9 * limit_s - (time.monotonic() - STARTED)


# Figures: contenders take turns in one process.


class Case(NamedTuple):
    """A model and its images, [batch, 3, size, size]; ``title``: what ran, in findings."""

    title: str
    make: Callable[[], nn.Module]
    batch: int
    size: int  # pixels
    rounds: int


def vit(layers: int, heads: int, width: int, size: int, patch: int) -> nn.Module:
    return VisionTransformer(size, patch, layers, heads, width, 4 * width, num_classes=10)


def resnet50() -> nn.Module:
    return torchvision.models.resnet50(num_classes=10)


CASES = [
    Case("resnet50@224×256", resnet50, 256, 224, 12),
    Case("vit_s/16@224×64", partial(vit, 12, 6, 384, 224, 16), 64, 224, 12),
    Case("48 blocks of width 64@8×8", partial(vit, 48, 2, 64, 8, 4), 8, 8, 8),
]
DRY_CASES = [
    Case("resnet18@32×2", partial(torchvision.models.resnet18, num_classes=10), 2, 32, 2),
    Case("2 blocks of width 32@8×2", partial(vit, 2, 2, 32, 8, 4), 2, 8, 2),
]


def sharded(model: nn.Module, dtype: torch.dtype | None, **options: Any) -> Contender:
    shardtrain.shard(model, precision=Precision(dtype), units="blocks", **options)
    return Contender(model, adamw(model), contextlib.nullcontext)


def contenders(dtype: torch.dtype | None, over: str) -> dict[str, Callable[[nn.Module], Contender]]:
    """Return the ways to train a model on one rank by name; ``over``: the backend, `OVER` or ``fake``."""
    precision = "fp32" if dtype is None else "bf16"
    peers = ["fsdp2"] if over == "fake" else ["no_communication", "ddp", "fsdp2"]
    ways = {name: partial(build, name, precision=precision, device=DEVICE) for name in peers}
    transport = "process_group" if over == "fake" else ProcessGroupTransport(dist.group.WORLD)
    ways[f"shardtrain, {over}"] = partial(sharded, dtype=dtype, transport=transport)
    if over == OVER:
        ways["shardtrain, silent"] = partial(sharded, dtype=dtype)
    return ways


def compare(
    title: str, case: Case, ways: dict[str, Callable[[nn.Module], Contender]], share_s: float
) -> None:
    """Report milliseconds per step and of the host, peak bytes and launches of each of ``ways``.

    After about ``share_s`` seconds no further way and no third round begins.
    """
    deadline = time.monotonic() + share_s
    torch.manual_seed(0)
    channels_last = torch.channels_last
    images = torch.randn(case.batch, 3, case.size, case.size, device=DEVICE).to(memory_format=channels_last)
    data: list[list[Batch]] = [[(images, torch.randint(10, (case.batch,), device=DEVICE))]] * 4

    def make(way: Callable[[nn.Module], Contender]) -> Contender:
        torch.manual_seed(0)
        return way(case.make().to(DEVICE).to(memory_format=channels_last))

    runners: dict[str, Contender] = {}
    facts: dict[str, dict[str, Any]] = {}
    for name, way in ways.items():
        if time.monotonic() > deadline:
            say(what=title, cut=f"{name} was left out")
            continue
        with noted(f"{title}, {name}", kind="error" if name.startswith("shardtrain") else "peer_error"):
            facts[name] = {} if DRY else footprint(partial(make, way), data, DEVICE)
            gc.collect()
            contender = make(way)
            facts[name]["losses"] = [contender.step(data[0]).item() for _ in range(3)]
            runners[name] = contender
    step_s: dict[str, list[float]] = {name: [] for name in runners}
    host_s: dict[str, list[float]] = {name: [] for name in runners}
    for done in range(case.rounds):
        if done >= 2 and time.monotonic() > deadline:
            say(what=title, cut=f"{done} of {case.rounds} rounds")
            break
        for name, contender in runners.items():
            devices.synchronize(DEVICE)
            start = time.perf_counter()
            contender.step(data[0])
            host_s[name].append(time.perf_counter() - start)
            devices.synchronize(DEVICE)
            step_s[name].append(time.perf_counter() - start)
    for name in runners:
        step_ms = 1e3 * statistics.median(step_s[name])
        host_ms = 1e3 * statistics.median(host_s[name])
        low, _, high = statistics.quantiles(step_s[name], n=4)
        quartiles = [1e3 * low, 1e3 * high]
        say(what=title, way=name, step_ms=step_ms, quartiles=quartiles, host_ms=host_ms, **facts[name])


def figures(over: str) -> None:
    cases = DRY_CASES if DRY else CASES
    for index, case in enumerate(cases):
        share_s = seconds_left() / (len(cases) - index)
        with noted(case.title):
            compare(f"{case.title} in bf16", case, contenders(torch.bfloat16, over), share_s)


def steps() -> None:
    """Models in bf16 on one rank over NCCL: plain, DDP, FSDP2, shardtrain."""
    figures(OVER)


def one_of_eight() -> None:
    """Rank 2 of 8 over torch's fake process group: memory, launches and time of the host beside FSDP2's."""
    figures("fake")


def compiled_program() -> None:
    """The main recipe with compiled blocks, whose last images are a single pixel, in bf16 and in fp32."""
    for precision in ("bf16", "fp32"):
        with tempfile.TemporaryDirectory() as out:
            command = [sys.executable, "-m", "shardtrain.train", "+recipe=resnet", f"run.dir={out}"]
            command += [f"parallel.precision={precision}", f"parallel.compile={not DRY}".lower()]
            command += ["train.max_steps=4", f"device={DEVICE.type}"]
            done = subprocess.run(command, capture_output=True, text=True)
        text = done.stdout + done.stderr
        tail = text[-600:] if done.returncode else ""
        say(what=f"program, compiled blocks, {precision}", code=done.returncode, tail=tail)


# Parts that are programs.


def versions() -> None:
    """Report what this machine is."""
    say(
        what="versions",
        python=sys.version.split()[0],
        torch=torch.__version__,
        torchvision=torchvision.__version__,
        device="cpu" if DRY else torch.cuda.get_device_name(),
        nccl=None if DRY else torch.cuda.nccl.version(),
        cudnn=torch.backends.cudnn.version(),
        cpu=devices.processor(),
    )


def digest_of(folder: Path) -> str:
    """Return a digest of the weights, statistics and optimizer state of a run's checkpoints."""
    sha = hashlib.sha256()
    for file in sorted(folder.glob("checkpoints/*/*.safetensors")):
        sha.update(file.read_bytes())
    return sha.hexdigest()[:16]


def same_bits() -> None:
    """Train the main recipe as four virtual ranks: twice, killed and resumed, with replays, and in bf16."""
    out = Path(tempfile.mkdtemp())
    count = 4 if DRY else 60
    program = [sys.executable, "-m", "shardtrain.train", "+recipe=resnet", "parallel.virtual_ranks=4"]
    program += [f"train.max_steps={count}", "checkpoint.keep=1", f"device={DEVICE.type}"]
    program += [f"checkpoint.every_steps={count // 2}"]
    runs = {
        "1": [],
        "2": [],
        "killed": [],
        "replayed": [f"train.replay_every={count // 4}"],
        "bf16, 1": ["parallel.precision=bf16"],
        "bf16, 2": ["parallel.precision=bf16"],
    }

    def start(name: str) -> subprocess.Popen[str]:
        command = [*program, *runs[name], f"run.dir={out / name.replace(', ', '_')}"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    running = {name: start(name) for name in runs}
    while running["killed"].poll() is None and not [*(out / "killed").glob("checkpoints/step-*/manifest*")]:
        time.sleep(0.01)
    running["killed"].kill()
    say(what="same bits, killed", code=running["killed"].wait())
    running["killed"] = start("killed")
    for name, process in running.items():
        text, _ = process.communicate()
        print(name, text, flush=True)
        folder = out / name.replace(", ", "_")
        result = folder / "result.json"
        facts = json.loads(result.read_text()) if result.exists() else {}
        say(
            what=f"same bits, {name}",
            code=process.returncode,
            digest=digest_of(folder),
            result={key: facts.get(key) for key in ("step", "loss/train", "loss/val", "run_img_per_s")},
            tail=text[-600:] if process.returncode else "",
        )


class Part(NamedTuple):
    """A part: what runs it, its limit in seconds, and the process group that it opens."""

    run: Callable[[], None]
    limit_s: int
    backend: str = ""  # of a process group; empty: there is none


PARTS = {  # the most important ones first
    "versions": Part(versions, 20),
    "same_bits": Part(same_bits, 100),
    "compiled_program": Part(compiled_program, 120),
    "one_of_eight": Part(one_of_eight, 80, "fake"),
    "steps": Part(steps, 120, "nccl"),
}


def is_problem(finding: dict[str, Any]) -> bool:
    """Return whether a finding says that something went wrong that was not expected."""
    wrong = finding.get("right") is False or bool(finding.get("error")) or bool(finding.get("failed"))
    return wrong or (finding.get("code", 0) != 0 and finding.get("what") != "same bits, killed")


def run_part(name: str) -> None:
    """Run the part ``name`` in this process."""
    part = PARTS[name]
    if not DRY:
        torch.cuda.set_device(0)
    if part.backend == "fake":
        dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=8)
    elif part.backend:
        device_id = None if DRY else DEVICE
        dist.init_process_group(OVER, store=dist.HashStore(), rank=0, world_size=1, device_id=device_id)
    with noted(name):
        part.run()
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def start_part(name: str, out: Path, limit_s: float) -> list[dict[str, Any]]:
    """Run the part ``name`` in its own process; return its findings, of a failure the end of its output."""
    command = [sys.executable, __file__, "--out", str(out), "--part", name, *(["--dry"] if DRY else [])]
    environ = {**os.environ, "OMP_NUM_THREADS": "1" if DRY else "4", "GPU_FIRST_LIMIT_S": str(limit_s)}
    environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # of cuBLAS, for the same bits in every run
    started = time.monotonic()
    ended = run(command, out / "log.txt", limit_s, environ)
    failed = [{"failed": ended.failure, "tail": ended.text[-2000:]}] if ended.failure else []
    return [*ended.findings, *failed, {"took_s": round(time.monotonic() - started, 1)}]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--total", type=int, default=TOTAL_S, help="seconds for all parts together")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        run_part(arguments.part)
        return
    if unknown := [name for name in arguments.parts if name not in PARTS]:
        parser.error(f"no part is called {unknown[0]}; there are {', '.join(PARTS)}")
    out = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + (10 * arguments.total if DRY else arguments.total)
    problems: list[str] = []
    cut: list[str] = []
    with (out / "findings.jsonl").open("a") as file:
        for name in arguments.parts or PARTS:
            left = deadline - time.monotonic()
            limit_s = PARTS[name].limit_s * (10 if DRY else 1)
            skipped = [{"skipped": "no time was left"}]
            for finding in skipped if left < 5 else start_part(name, out, min(limit_s, left)):
                line = json.dumps({"part": name, **finding})
                print(line, file=file, flush=True)
                print(line[:1500], flush=True)
                if is_problem(finding):
                    problems.append(line)
                elif "cut" in finding or "skipped" in finding:
                    cut.append(line)
    for title, lines in (("left out for want of time", cut), ("went wrong", problems)):
        print(f"{title}: {len(lines) or 'nothing'}", *[line[:600] for line in lines], sep="\n", flush=True)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()

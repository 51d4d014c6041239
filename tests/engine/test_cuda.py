"""The CUDA paths, and the table of ways on real devices. Tests skip where there is no card.

    python -m pytest -n 1 -rs tests/engine/test_cuda.py

Ranks may share one card where NCCL is 2.30 or newer and ``NCCL_MULTI_RANK_GPU_ENABLE=1`` is set.

A row of the table that raises, aborts or hangs ends its processes, since nobody knows what it leaves on a
card; others go on with the next row. A test that hangs in a driver hears no signal: a thread ends its
process, and pytest, with ``-n 1``, goes on in another one. With ``-n 0`` it would end there.
"""

import contextlib
import datetime
import gc
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

import shardtrain
from shardtrain import comm
from shardtrain import device as devices
from shardtrain.comm import ProcessGroupTransport, backends
from shardtrain.comm.trace import GATHER, waiting
from shardtrain.launch import launcher
from shardtrain.launch.ranks import RankInfo

import ways
from small import MakeOptimizer, assert_at_rest, images, sgd, until
from ways import CAPTURABLE, FP16, OFFLOAD, WAYS, Way, recurrent, recurrent_steps

CARDS = torch.cuda.device_count()
LIMIT_S = 400  # of all rows in one world
ROW_S = 90  # a row that takes longer is given up; the first one has the start-up of its processes, too
pytestmark = pytest.mark.timeout(120, method="thread")
one_gpu = pytest.mark.skipif(not CARDS, reason="needs a CUDA device")


def nccl_ranks(count: int) -> pytest.MarkDecorator:
    """Skip where ``count`` ranks over NCCL have neither a device each nor the right to share one."""
    enough = count <= CARDS or (CARDS > 0 and devices.shareable())
    return pytest.mark.skipif(
        not enough, reason=f"needs {count} CUDA devices, or NCCL 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1"
    )


def adamw(**options: Any) -> MakeOptimizer:
    return lambda model: torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4, **options)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW in a loop": adamw(foreach=False),
    "AdamW, foreach": adamw(foreach=True),
    "AdamW, fused": adamw(fused=True),
    "AdamW, capturable": adamw(capturable=True),
}


class Place(NamedTuple):
    """The place of a row. ``folder``: empty, of all ranks."""

    backend: str
    rank: int
    world: int
    device: torch.device
    folder: Path

    def options(self, way: Way) -> dict[str, Any]:
        """Return options of `shard`."""
        if self.world == 1:
            return {"transport": ProcessGroupTransport(dist.group.WORLD)}
        options: dict[str, Any] = {"transport": "process_group"}
        if way.replicas:
            options["mesh"] = init_device_mesh(self.device.type, (2, self.world // 2))
        return options

    def model(self, way: Way) -> torch.nn.Module:
        return ways.sharded(way, self.device, "inductor", **self.options(way))

    def expects(self, way: Way) -> contextlib.AbstractContextManager[Any]:
        """Expect that gloo refuses a way by name: with tensors of a device it moves equal intervals only."""
        if self.backend == "gloo" and (way.virtual or "layout" in way.options):
            return pytest.raises(ValueError, match="gloo")
        return contextlib.nullcontext()


Row = Callable[[Place], str]  # returns what is wrong, or an empty text


def compared(way: Way, optimizer: MakeOptimizer, at: Place) -> str:
    """Train in one way, beside the plain model."""
    torch.use_deterministic_algorithms(way.virtual)
    with at.expects(way):
        model = at.model(way)
        result = ways.train(model, way, at.device, at.rank, at.world, at.folder, optimizer)
        assert_at_rest(model)
        apart = ways.deviation(result, ways.train_plain(way, at.device, at.rank, at.world, optimizer))
        if not apart <= way.tolerance:
            return f"{apart:.1e} from the plain model, expected {way.tolerance}"
    return ""


def overflowing(way: Way, at: Place) -> str:
    """Take a step whose gradients are infinite: it changes the scale only."""
    model = at.model(way)
    before = shardtrain.full_state_dict(model)
    optimizer = sgd(model)
    scaler = shardtrain.GradScaler(at.device.type, init_scale=way.scale)
    ways.compute(model, way, scaler, range(at.rank, at.rank + 1), 0, at.device)
    scaler.step(optimizer)
    scaler.update()
    after = shardtrain.full_state_dict(model)
    changed = [name for name, _ in model.named_parameters() if not torch.equal(before[name], after[name])]
    return f"scale {scaler.get_scale():g}, changed: {changed}" * bool(
        changed or scaler.get_scale() >= way.scale
    )


def recurring(kind: type[torch.nn.RNNBase], units: list[type[torch.nn.Module]], at: Place) -> str:
    """Train a model with recurrent weights, which cuDNN moves, beside the plain model."""
    model = shardtrain.shard(recurrent(at.device, kind), units=units, **at.options(Way()))
    losses = recurrent_steps(model, at.device, at.rank, 1)
    expected = recurrent_steps(recurrent(at.device, kind), at.device, at.rank, at.world)
    apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    return f"{apart:.1e} from the plain model" * (not apart <= 1e-4)


def minus_zero(dtype: torch.dtype, at: Place) -> str:
    """Reduce -0.0 of every rank, which stays, and -0.0 where one rank has 0.0, which becomes 0.0."""
    full = torch.full((at.world * 1024,), -0.0, dtype=dtype, device=at.device)
    full[::2] = 0.0 if at.rank == 0 else -0.0
    out = torch.empty(1024, dtype=dtype, device=at.device)
    dist.reduce_scatter_tensor(out, full)
    negative = out.signbit()
    return "other signs" * bool(negative[::2].any() or not negative[1::2].all())


def captured(way: Way, at: Place) -> str:
    """Take steps as they are, and as one graph: the same bits."""
    if at.backend != "nccl":
        return ""  # refused by name
    torch.use_deterministic_algorithms(True)
    results = []
    for captures in (False, True):
        model = at.model(way)
        rate = torch.tensor(0.05, device=at.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, fused=True)
        step = ways.step_of(way, model, optimizer)
        if captures:
            step = shardtrain.capture(step, model, optimizer)
        losses = []
        for number in range(6):
            batches = [images(10 * number + micro, at.rank) for micro in range(way.micro_batches)]
            on_device = [[tensor.to(at.device) for tensor in batch] for batch in batches]
            losses += [value.item() for value in step(*on_device)]
        results.append((losses, shardtrain.full_state_dict(model)))
    eager, replayed = results
    differ = [name for name, value in eager[1].items() if not torch.equal(value, replayed[1][name])]
    if eager[0] != replayed[0] or differ or step.summary != "3 replayed, 3 not: 3 to warm up":
        return f"{step.summary}; losses {eager[0]} and {replayed[0]}; other bits in {differ}"
    step.release()  # NCCL would wait for its graph
    return ""


def rows_of() -> dict[str, Row]:
    """Return the rows by name."""
    rows: dict[str, Row] = {name: partial(compared, way, sgd) for name, way in WAYS.items()}
    for name, optimizer in OPTIMIZERS.items():
        rows[name] = partial(compared, Way(tolerance=1e-3), optimizer)
        if name != "AdamW, capturable":
            rows[f"offload, {name}"] = partial(compared, Way(OFFLOAD, tolerance=1e-3), optimizer)
    rows |= {f"captured, {name}": partial(captured, WAYS[name]) for name in CAPTURABLE}
    rows["-0.0"] = partial(minus_zero, torch.float32)
    rows["-0.0, bf16"] = partial(minus_zero, torch.bfloat16)
    for network in (torch.nn.LSTM, torch.nn.GRU):
        rows[f"{network.__name__} in the root"] = partial(recurring, network, [])
        rows[f"{network.__name__} as a unit"] = partial(recurring, network, [network])
    rows["overflow"] = partial(overflowing, Way(precision=FP16, scale=2.0**40))
    rows["offload, overflow"] = partial(overflowing, Way(OFFLOAD, FP16, scale=2.0**40))
    return rows


def run_rows(rank: int, world: int, backend: str, folder: Path, first: int) -> None:
    """Run rows from the ``first`` on as one of ``world`` ranks; write a line per row into the folder.

    Ends after a row that raises.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # of cuBLAS, for virtual ranks
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    device = devices.use(rank % CARDS)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    store = dist.FileStore(str(folder / "store"), world)
    patience = datetime.timedelta(seconds=60)
    both = f"cpu:gloo,cuda:{backend}"  # what is moved after it was sharded is on the CPU at first
    dist.init_process_group(both, store=store, rank=rank, world_size=world, timeout=patience)
    with (folder / f"{rank}.jsonl").open("w") as file:
        for index, (name, row) in enumerate([*rows_of().items()][first:]):
            raised = False
            try:
                problem = row(Place(backend, rank, world, device, folder / str(index)))
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"[:600]
                raised = True
            print(json.dumps([name, problem, raised]), file=file, flush=True)
            if raised:
                os._exit(1)  # others may wait for this rank, and it for the end of their group
            gc.collect()
            store.set(f"{index} {rank}", "")
            # Ranks that are in different rows would hide which of them one hangs in.
            store.wait([f"{index} {other}" for other in range(world)], datetime.timedelta(seconds=LIMIT_S))
    dist.destroy_process_group()


def spawned(
    body: Callable[..., None], arguments: tuple[Any, ...], world: int, folder: Path, limit_s: float
) -> str:
    """Run ``body(rank, *arguments)`` as ``world`` processes; return why they ended early, or an empty text.

    They end at the latest where for `ROW_S` no file in ``folder`` has grown, or after ``limit_s``.
    """
    ranks = mp.spawn(body, arguments, nprocs=world, join=False)
    deadline = time.monotonic() + limit_s
    size = 0
    heard = time.monotonic()
    try:
        while not ranks.join(timeout=1.0):
            if (now := sum(file.stat().st_size for file in folder.glob("*.jsonl"))) > size:
                size = now
                heard = time.monotonic()
            if time.monotonic() > heard + ROW_S:
                return f"hung: nothing ended in {ROW_S} s"
            if time.monotonic() > deadline:
                return f"stopped after {limit_s:.0f} s"
    except Exception as error:
        return str(error).strip()[-600:]
    finally:
        for process in ranks.processes:
            process.kill()
    return ""


def problems_of(backend: str, world: int, folder: Path) -> list[str]:
    """Run all rows, in new processes after each that raises, aborts or hangs; return what went wrong."""
    names = [*rows_of()]
    problems = list[str]()
    deadline = time.monotonic() + LIMIT_S
    first = 0
    while first < len(names):
        place = folder / str(first)
        place.mkdir()
        arguments = (world, backend, place, first)
        ending = spawned(run_rows, arguments, world, place, deadline - time.monotonic())
        files = [place / f"{rank}.jsonl" for rank in range(world)]
        reports = [
            [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
            for file in files
        ]
        for rank, report in enumerate(reports):
            problems += [f"rank {rank}, {name}: {problem}" for name, problem, _ in report if problem]
        if time.monotonic() > deadline:
            done = first + min(len(report) for report in reports)
            return [*problems, f"not reached in {LIMIT_S} s: {', '.join(names[done:])}"]
        if any(raised for report in reports for *_, raised in report):
            first += max(len(report) for report in reports)
        elif ending:
            first += min(len(report) for report in reports)
            problems.append(f"{names[first] if first < len(names) else 'the end'}: {ending}")
            first += 1
        else:
            break
    return problems


@pytest.mark.timeout(LIMIT_S + 60, method="thread")
@pytest.mark.parametrize(
    ("backend", "world"),
    [
        pytest.param("nccl", 1, marks=one_gpu),
        pytest.param("gloo", 2, marks=one_gpu),
        pytest.param("nccl", 2, marks=nccl_ranks(2)),
        pytest.param("nccl", 4, marks=nccl_ranks(4)),
    ],
)
def test_every_way_equals_the_plain_model(backend: str, world: int, tmp_path: Path) -> None:
    problems = problems_of(backend, world, tmp_path)
    assert not problems, "\n".join(problems)


@one_gpu
@pytest.mark.parametrize("name", ["even", "bf16", "offload", "kept"])
def test_memory_of_a_dropped_model_returns(nccl_of_one: ProcessGroupTransport, name: str) -> None:
    device = torch.device("cuda", 0)
    way = WAYS[name]
    held = []
    for _ in range(3):  # libraries keep their workspaces from the first one on
        ways.train(ways.sharded(way, device, transport=nccl_of_one), way, device, 0, 1)
        gc.collect()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[2] == held[1]


@pytest.fixture
def nccl_of_one() -> Iterator[ProcessGroupTransport]:
    """A group of one rank: what is tested is the order of streams, not the exchange."""
    launcher.open_process_group(RankInfo(0, 1, 0, 1), devices.use(0), dist.HashStore())
    assert dist.group.WORLD is not None
    yield ProcessGroupTransport(dist.group.WORLD)
    dist.destroy_process_group()


def slow_down(monkeypatch: pytest.MonkeyPatch, cycles: int = 5_000_000) -> None:
    """From now on a collective begins late on the device and ends late, while the host goes on."""

    def late(original: Callable[..., Any], *args: Any, **keywords: Any) -> None:
        torch.cuda._sleep(cycles)
        original(*args, **keywords)
        torch.cuda._sleep(cycles)

    for place, name in ((backends, "all_gather"), (backends, "reduce_scatter"), (dist, "all_to_all_single")):
        monkeypatch.setattr(place, name, partial(late, getattr(place, name)))


def linear_layers(width: int = 256, count: int = 6) -> torch.nn.Module:
    """Equal units; their kernels give the same bits every time."""
    layers = [torch.nn.Linear(width, width) for _ in range(count)]
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(75, width), *layers)


@one_gpu
@pytest.mark.parametrize("name", ["even", "reduce bf16", "bf16"])
def test_slow_collectives_change_nothing(
    nccl_of_one: ProcessGroupTransport, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Memory that a collective still uses is not given to the compute stream, which is far ahead of it."""
    device = torch.device("cuda", 0)
    losses = []
    for slow in (False, True):
        if slow:
            slow_down(monkeypatch)
        torch.manual_seed(0)
        model = linear_layers().to(device)
        options = {"transport": nccl_of_one, "precision": WAYS[name].precision}
        shardtrain.shard(model, units=[torch.nn.Linear], **options)
        losses.append(recurrent_steps(model, device, 0, 1))
        assert_at_rest(model)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@one_gpu
def test_two_units_fit_however_far_the_host_is_ahead(
    nccl_of_one: ProcessGroupTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator's peak in forward and backward, while every collective is late."""
    device = torch.device("cuda", 0)
    width = 2048
    size = 4 * width * width
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(8)]
    model = torch.nn.Sequential(*layers).to(device)
    shardtrain.shard(model, units=[torch.nn.Linear], transport=nccl_of_one)
    x = torch.randn(4, width, device=device)
    for _ in range(3):  # the order of units is known, and libraries have their workspaces
        model(x).sum().backward()
    slow_down(monkeypatch)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()  # shards and their gradients among it
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        model(x)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - held <= 2.1 * size
    torch.cuda.reset_peak_memory_stats()
    model(x).sum().backward()
    torch.cuda.synchronize()
    # All local gradients, each as large as its unit on a single rank: earlier ones are added when backward
    # ends. Two units, the gradient that autograd makes, and a whole gradient on its way.
    assert torch.cuda.max_memory_allocated() - held <= (len(layers) + 4.1) * size


def started(folder: Path, *keys: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "shardtrain.train", "+recipe=resnet", "device=cuda", f"run.dir={folder}"]
    return subprocess.Popen([*command, *keys], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finished(process: subprocess.Popen[str]) -> None:
    text, _ = process.communicate(timeout=110)
    assert process.returncode == 0, text[-2000:]


def digest_of(folder: Path) -> str:
    """Return a digest of the weights, statistics and optimizer state of a run's checkpoints."""
    files = sorted(folder.glob("checkpoints/*/*.safetensors"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@one_gpu
@pytest.mark.timeout(240, method="thread")
def test_runs_of_virtual_ranks_have_the_same_bits(tmp_path: Path) -> None:
    """Twice, killed and resumed, and with replays."""
    keys = "parallel.virtual_ranks=4", "train.max_steps=60", "checkpoint.keep=1", "checkpoint.every_steps=30"
    runs = {name: started(tmp_path / name, *keys) for name in ("one", "two", "killed")}
    runs["replayed"] = started(tmp_path / "replayed", *keys, "train.replay_every=15")
    killed = runs["killed"]
    until(lambda: killed.poll() is not None or [*(tmp_path / "killed").glob("checkpoints/step-*/manifest*")])
    killed.kill()
    killed.communicate()
    runs["killed"] = started(tmp_path / "killed", *keys)
    for process in runs.values():
        finished(process)
    assert len({digest_of(tmp_path / name) for name in runs}) == 1


@one_gpu
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_compiled_blocks_of_the_program_take_images_of_a_single_pixel(precision: str, tmp_path: Path) -> None:
    finished(
        started(tmp_path, f"parallel.precision={precision}", "parallel.compile=true", "train.max_steps=4")
    )


@one_gpu
def test_the_meter_times_what_the_stream_waits_for() -> None:
    device = torch.device("cuda")
    with comm.meter() as meter, waiting(GATHER, "unit", device):
        torch.cuda._sleep(20_000_000)  # cycles; at least 5 ms
    assert meter.exposed()[comm.WaitKey("all_gather", "unit")] > 0.005
    assert sum(meter.exposed().values()) < 1

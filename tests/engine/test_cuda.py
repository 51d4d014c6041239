"""The CUDA paths, and the table of ways on real devices. Tests skip where they lack one device, or two.

    python -m pytest -n 0 -rs tests/engine/test_cuda.py           on a machine with a card
    python -m pytest -n 0 tests/engine/test_cuda.py --long        without: the table on the CPU

Ranks may share one card where NCCL is 2.30 or newer and ``NCCL_MULTI_RANK_GPU_ENABLE=1`` is set.
"""

import contextlib
import copy
import datetime
import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import shardtrain
from shardtrain import Precision, comm
from shardtrain import device as devices
from shardtrain.checkpoint.store import Snapshot
from shardtrain.comm import ProcessGroupTransport, native
from shardtrain.comm.trace import GATHER, waiting
from shardtrain.job import launch
from shardtrain.job.dist_env import RankInfo
from shardtrain.layout import Policy

from small import Block, MakeOptimizer, OddNet, assert_at_rest, images, sgd
from ways import WAYS, Way, deviation, sharded, train, train_plain

CARDS = torch.cuda.device_count()
LIMIT_S = 400  # of all ways in one process group
one_gpu = pytest.mark.skipif(not CARDS, reason="needs a CUDA device")
two_gpus = pytest.mark.skipif(CARDS < 2, reason="needs two CUDA devices")


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


def is_refused(way: Way, backend: str, world: int, device: torch.device) -> bool:
    """Return whether gloo refuses a way by name: with tensors of a device it moves equal intervals only."""
    cannot = backend == "gloo" and device.type != "cpu" and world > 1
    return cannot and (way.virtual or "layout" in way.options)


def outcome(
    way: Way,
    backend: str,
    rank: int,
    world: int,
    device: torch.device,
    folder: Path,
    optimizer: MakeOptimizer,
) -> str:
    """Train in one way, beside the plain model; return what is wrong, or an empty text."""
    usual: dict[str, Any] = {"transport": "process_group"}
    if world == 1:
        usual["transport"] = ProcessGroupTransport(dist.group.WORLD)
    elif way.replicas:
        usual["mesh"] = init_device_mesh(device.type, (2, world // 2))
    torch.use_deterministic_algorithms(way.virtual)
    refused = is_refused(way, backend, world, device)
    expects = pytest.raises(ValueError, match="gloo") if refused else contextlib.nullcontext()
    with expects:
        model = sharded(way, device, **usual)
        result = train(model, way, device, rank, world, folder, optimizer)
        assert_at_rest(model)
        apart = deviation(result, train_plain(way, device, rank, world, optimizer))
        if not apart <= way.tolerance:
            return f"{apart:.1e} from the plain model, expected {way.tolerance}"
    return ""


def run_table(rank: int, world: int, backend: str, kind: str, folder: Path) -> None:
    """Run all ways and optimizers as one of ``world`` ranks; write a line per row into the folder."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # of cuBLAS, for virtual ranks
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    device = torch.device("cpu") if kind == "cpu" else devices.use(rank % CARDS)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    store = dist.FileStore(str(folder / "store"), world)
    patience = datetime.timedelta(seconds=60)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=patience)
    rows: list[tuple[str, Way, MakeOptimizer]] = [(name, way, sgd) for name, way in WAYS.items()]
    for name, optimizer in OPTIMIZERS.items():
        if kind != "cpu" or name != "AdamW, capturable":
            rows.append((name, Way(tolerance=1e-3), optimizer))
    with (folder / f"{rank}.jsonl").open("w") as file:
        for index, (name, way, optimizer) in enumerate(rows):
            place = folder / str(index)
            try:
                problem = outcome(way, backend, rank, world, device, place, optimizer)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"[:600]
            print(json.dumps([name, problem]), file=file, flush=True)
            gc.collect()
    dist.destroy_process_group()


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize(
    ("backend", "world", "kind"),
    [
        pytest.param("gloo", 1, "cpu", marks=pytest.mark.long),
        pytest.param("gloo", 2, "cpu", marks=pytest.mark.long),
        pytest.param("gloo", 4, "cpu", marks=pytest.mark.long),
        pytest.param("nccl", 1, "cuda", marks=one_gpu),
        pytest.param("gloo", 2, "cuda", marks=one_gpu),
        pytest.param("nccl", 2, "cuda", marks=nccl_ranks(2)),
        pytest.param("nccl", 4, "cuda", marks=nccl_ranks(4)),
    ],
)
def test_every_way_equals_the_plain_model(backend: str, world: int, kind: str, tmp_path: Path) -> None:
    """Rows that ended before the time-out are reported, whatever became of the others."""
    ranks = mp.spawn(run_table, (world, backend, kind, tmp_path), nprocs=world, join=False)
    deadline = time.monotonic() + LIMIT_S
    problems = []
    try:
        while not ranks.join(timeout=max(0.0, deadline - time.monotonic())):
            assert time.monotonic() < deadline
    except (Exception, AssertionError) as error:
        problems.append(f"ranks did not end: {error}"[:2000])
    finally:
        for process in ranks.processes:
            process.kill()
    names = [*WAYS, *(name for name in OPTIMIZERS if kind != "cpu" or name != "AdamW, capturable")]
    for file in sorted(tmp_path.glob("*.jsonl")):
        rows = dict(json.loads(line) for line in file.read_text().splitlines())
        missing = {name: "not reached" for name in names if name not in rows}
        for name, problem in (rows | missing).items():
            if problem:
                problems.append(f"rank {file.stem}, {name}: {problem}")
    assert not problems, "\n".join(problems)
    assert len(list(tmp_path.glob("*.jsonl"))) == world


@one_gpu
def test_a_step_on_a_stream_of_the_users() -> None:
    device = torch.device("cuda", 0)
    way = WAYS["even"]
    expected = train_plain(way, device, 0, 1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = train(sharded(way, device), way, device, 0, 1)
    torch.cuda.current_stream().wait_stream(stream)
    assert deviation(result, expected) <= way.tolerance


@one_gpu
@pytest.mark.parametrize("name", ["even", "bf16", "offload", "kept"])
def test_memory_of_a_dropped_model_returns(nccl_of_one: ProcessGroupTransport, name: str) -> None:
    device = torch.device("cuda", 0)
    way = WAYS[name]
    held = []
    for _ in range(3):  # libraries keep their workspaces from the first one on
        train(sharded(way, device, transport=nccl_of_one), way, device, 0, 1)
        gc.collect()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[2] == held[1]


def steps(model: torch.nn.Module, rank: int, device: torch.device, count: int = 4) -> list[float]:
    """Train, and return this rank's losses."""
    optimizer = sgd(model)
    losses = []
    for step in range(count):
        x, y = images(step, rank)
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@one_gpu
@pytest.mark.parametrize(("precision", "rel"), [(None, 1e-5), (Precision(torch.bfloat16), 0.05)])
def test_one_rank_on_a_gpu_equals_the_plain_model(precision: Precision | None, rel: float) -> None:
    device = torch.device("cuda")
    torch.manual_seed(0)
    plain = OddNet().to(device)
    model = shardtrain.shard(copy.deepcopy(plain), units=[Block], precision=precision)
    assert steps(model, 0, device) == pytest.approx(steps(plain, 0, device), rel=rel)
    assert_at_rest(model)


@pytest.fixture
def nccl_of_one() -> Iterator[ProcessGroupTransport]:
    """A group of one rank: what is tested is the order of streams, not the exchange."""
    launch.open_process_group(RankInfo(0, 1, 0, 1), devices.use(0), dist.HashStore())
    assert dist.group.WORLD is not None
    yield ProcessGroupTransport(dist.group.WORLD)
    dist.destroy_process_group()


def slow_down(monkeypatch: pytest.MonkeyPatch, cycles: int = 5_000_000) -> None:
    """From now on a collective begins late on the device and ends late, while the host goes on."""

    def late(original: Callable[..., Any], *args: Any, **keywords: Any) -> None:
        torch.cuda._sleep(cycles)
        original(*args, **keywords)
        torch.cuda._sleep(cycles)

    for place, name in ((native, "all_gather"), (native, "reduce_scatter"), (dist, "all_to_all_single")):
        monkeypatch.setattr(place, name, partial(late, getattr(place, name)))


def linear_layers(width: int = 256, count: int = 6) -> torch.nn.Module:
    """Equal units; their kernels give the same bits every time."""
    layers = [torch.nn.Linear(width, width) for _ in range(count)]
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(75, width), *layers)


PRECISIONS = {
    "fp32": Precision(),
    "bf16 gradients": Precision(reduce=torch.bfloat16),
    "bf16": Precision(torch.bfloat16),
}


@one_gpu
@pytest.mark.parametrize("name", PRECISIONS)
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
        shardtrain.shard(model, units=[torch.nn.Linear], transport=nccl_of_one, precision=PRECISIONS[name])
        losses.append(steps(model, 0, device))
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


@one_gpu
def test_the_meter_times_what_the_stream_waits_for() -> None:
    device = torch.device("cuda")
    with comm.meter() as meter, waiting(GATHER, "unit", device):
        torch.cuda._sleep(20_000_000)  # cycles; at least 5 ms
    assert meter.exposed()[comm.WaitKey("all_gather", "unit")] > 0.005
    assert sum(meter.exposed().values()) < 1


@two_gpus
def test_a_thread_waits_for_the_copies_of_another_device() -> None:
    device = torch.device("cuda", 1)
    values = torch.zeros(1 << 20, device=device)
    memory = Snapshot()
    memory.copy({"values": values})
    with torch.cuda.device(device):
        torch.cuda._sleep(500_000_000)
    values.fill_(1.0)
    heard: list[bool] = []
    thread = Thread(target=lambda: heard.append(bool(memory.copy({"values": values})["values"].all())))
    thread.start()
    thread.join()
    assert heard == [True]


def nccl_rank(rank: int, world: int, store: str, layout: Policy) -> None:
    device = devices.use(rank % CARDS)
    launch.open_process_group(RankInfo(rank, world, rank, world), device, dist.FileStore(store, world))
    for options, rel in (({"layout": layout}, 1e-4), ({"precision": PRECISIONS["bf16 gradients"]}, 0.02)):
        plain = OddNet().to(device)
        model = shardtrain.shard(copy.deepcopy(plain), units=[Block], **options)
        replica = DistributedDataParallel(plain, device_ids=[device.index])
        assert steps(model, rank, device) == pytest.approx(steps(replica, rank, device), rel=rel)
        assert_at_rest(model)
    dist.destroy_process_group()


@nccl_ranks(2)
@pytest.mark.parametrize("layout", ["even", "whole"])
def test_two_nccl_ranks_equal_ddp(tmp_path: Path, layout: Policy) -> None:
    """Whole parameters have uneven intervals, which NCCL moves as groups of broadcasts and reductions."""
    mp.spawn(nccl_rank, (2, str(tmp_path / "store"), layout), nprocs=2)

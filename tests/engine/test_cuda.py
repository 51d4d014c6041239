"""The CUDA paths. Skipped without a device; those between ranks, without two."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
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

from small import Block, OddNet, assert_at_rest, images, sgd

one_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


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
    assert meter.exposed()[comm.Wait("all_gather", "unit")] > 0.005
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
    device = devices.use(rank)
    launch.open_process_group(RankInfo(rank, world, rank, world), device, dist.FileStore(store, world))
    for options, rel in (({"layout": layout}, 1e-4), ({"precision": PRECISIONS["bf16 gradients"]}, 0.02)):
        plain = OddNet().to(device)
        model = shardtrain.shard(copy.deepcopy(plain), units=[Block], **options)
        replica = DistributedDataParallel(plain, device_ids=[rank])
        assert steps(model, rank, device) == pytest.approx(steps(replica, rank, device), rel=rel)
        assert_at_rest(model)
    dist.destroy_process_group()


@two_gpus
@pytest.mark.parametrize("layout", ["even", "whole"])
def test_two_nccl_ranks_equal_ddp(tmp_path: Path, layout: Policy) -> None:
    """Whole parameters have uneven intervals, which NCCL moves as groups of broadcasts and reductions."""
    mp.spawn(nccl_rank, (2, str(tmp_path / "store"), layout), nprocs=2)

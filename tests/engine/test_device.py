"""The device paths on a simulated device: order of streams, memory, launches and waits of the host."""

import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardtrain
from shardtrain import Precision, comm
from shardtrain.checkpoint.store import copied
from shardtrain.comm.transport import Transport
from shardtrain.launch.launcher import Context
from shardtrain.train.loop import train
from shardtrain.train.saving import Saver

import ways
from pool import each_rank
from simulated_device import DEVICE, SimulatedDevice
from small import Block, OddNet, images, mesh, sgd
from tiny import ALONE, TINY, commanded, composed, configure
from ways import WAYS, Result, Way, recurrent, recurrent_steps

RANK = 2  # of eight
EXACT = 0.0
CPU = torch.device("cpu")
OF_TESTS = re.compile("upload .* at test_|over gloo")  # waits for batches, and those that gloo has by nature


class World(NamedTuple):
    """A rank over NCCL, for which a fake process group stands; without a ``group``, a silent one."""

    rank: int
    size: int
    group: bool = True


SILENT = World(0, 1, group=False)
ONE = World(0, 1)
EIGHT = World(RANK, 8)


@contextmanager
def simulated(world: World = EIGHT) -> Iterator[SimulatedDevice]:
    """Let this process be one rank of ``world``, with a simulated device."""
    with SimulatedDevice()(pytest.MonkeyPatch()) as device:
        if world.group:
            backends = "cpu:fake,cuda:fake"
            dist.init_process_group(backends, store=FakeStore(), rank=world.rank, world_size=world.size)
        try:
            yield device
        finally:
            if world.group:
                dist.destroy_process_group()
            torch.use_deterministic_algorithms(False)


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    """A simulated device, which rank 2 of 8 has."""
    with simulated() as device:
        yield device


def replicas_of_eight() -> Transport:
    inside = dist.new_group(list(range(4)))
    across = dist.new_group([RANK, RANK + 4])
    return comm.open_transport("process_group", None, [range(4), range(4, 8)], inside, across)


def options(way: Way, world: World) -> dict[str, Any]:
    """Return the options of `shard` for ``way`` on ranks over NCCL; a group of one is communicated with."""
    if way.replicas:
        return {"transport": replicas_of_eight()} if world == EIGHT else {"mesh": mesh(1, 1)}
    return {"transport": comm.ProcessGroupTransport(dist.group.WORLD)} if world == ONE else {}


def adamw_in_lists(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)


def play(
    device: SimulatedDevice, way: Way, model: nn.Module, world: World, **more: Any
) -> tuple[Result, list[str]]:
    """Train, evaluate, change parameters on the host, save; return the results, and the third step's waits.

    Those for batches, which the test moves, do not count, nor those for gloo.
    """
    waits: list[list[str]] = []

    def next_step(step: int) -> None:
        waits.append([wait for wait in device.waits if not OF_TESTS.search(wait)])
        device.next_step()

    result = ways.train(model, way, DEVICE, world.rank, world.size, each_step=next_step, **more)
    batches = [images(step, 0, 4)[0].to(DEVICE) for step in range(2)]
    with torch.no_grad():
        model(batches[0])
    shards = {name: param.as_subclass(torch.Tensor) for name, param in model.named_parameters()}
    for tensor in copied(shards).values():
        tensor.numpy()
    model(batches[1])
    for param in model.blocks.parameters():  # no backward need follow a forward
        param.data.zero_()
    return result, waits[3]


def expected_waits(way: Way, world: World) -> int:
    """Return how often the host waits in a step.

    With offload it does for the gradients of each backward, also under no_sync, for their norm, and to know
    that they are finite. With a scaled loss it must know whether to step.
    """
    offloads = "offload" in way.options
    scaled = way.scale > 0
    return offloads * (way.count(world.size) + (way.clip > 0) + scaled) + scaled


@functools.cache
def plain(name: str, rank: int, size: int) -> Result:
    return ways.train_plain(WAYS[name], CPU, rank, size)


# What shows something of its own by default, and everything with --long.
SHORT = {
    SILENT: {"offload, fp16 scaled"},
    ONE: {"bf16", "offload, checkpoint", "stream"},
    EIGHT: {"kept, no_sync", "virtual ranks", "offload, replicas, bf16", "joined, bf16"},
}
# Ranks that do not exist cannot agree on what is in a checkpoint; `play` copies it.
ROWS = [
    pytest.param(name, world, id=f"{name}, {at}", marks=() if name in SHORT[world] else pytest.mark.release)
    for at, world in {"silent": SILENT, "one": ONE, "eight": EIGHT}.items()
    for name, way in WAYS.items()
    if not (way.replicas and world == SILENT) and not (way.saves and world == EIGHT)
]


@pytest.mark.parametrize(("name", "world"), ROWS)
def test_every_way_over_nccl(name: str, world: World, tmp_path: Path) -> None:
    """Streams are in order, the host never waits without need, and a single rank equals the plain model.

    In fp32 it does bit for bit, unless virtual ranks or a norm add in another order.
    """
    way = WAYS[name]
    with simulated(world) as device:
        torch.use_deterministic_algorithms(way.virtual)
        model = ways.sharded(way, DEVICE, **options(way, world))
        optimizer = adamw_in_lists if world == EIGHT else sgd
        result, waits = play(device, way, model, world, folder=tmp_path, optimizer=optimizer)
        assert list(device.findings) == []
    assert len(waits) == expected_waits(way, world), waits
    if world.size == 1:
        exact = way.precision == Precision() and not (way.virtual or way.clip)
        off = ways.deviation(result, plain(name, world.rank, world.size))
        assert off <= (EXACT if exact else way.tolerance)


# Gloo moves tensors of a device in equal intervals.
REFUSED = [name for name, way in WAYS.items() if way.virtual or "layout" in way.options]
SHORT_OVER_GLOO = "even", "whole"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SHORT_OVER_GLOO else pytest.mark.release) for name in WAYS],
)
@each_rank(2, transport="auto")
def test_every_way_over_gloo(name: str, tmp_path: Path) -> None:
    """Two real ranks, each with a simulated device, whose values gloo moves through host memory."""
    way = WAYS[name]
    world = World(dist.get_rank(), 2)
    usual: dict[str, Any] = {"transport": "process_group"}
    if way.replicas:
        usual["mesh"] = mesh(2, 1)
    with SimulatedDevice()(pytest.MonkeyPatch()) as device:
        torch.use_deterministic_algorithms(way.virtual)
        try:
            model = ways.sharded(way, DEVICE, **usual)
            if name in REFUSED:
                with pytest.raises(ValueError, match="moves tensors on cuda in equal intervals only"):
                    ways.train(model, way, DEVICE, *world[:2])
                return
            result, waits = play(device, way, model, world, folder=tmp_path)
        finally:
            torch.use_deterministic_algorithms(False)
        assert list(device.findings) == []
    assert len(waits) == expected_waits(way, world), waits
    assert ways.deviation(result, plain(name, *world[:2])) <= way.tolerance


UNITS = {"in the root": [], "a unit": [nn.LSTM]}


def recurrent_losses(device: SimulatedDevice, rank: int, units: str, **options: Any) -> list[float]:
    """Train a recurrent model, whose steps wait for nothing but the tests' batches, and gloo."""
    model = shardtrain.shard(recurrent(DEVICE), units=UNITS[units], **options)
    losses = recurrent_steps(model, DEVICE, rank, 1, device.next_step)
    waits = [wait for wait in device.waits if " at test_" not in wait and "over gloo" not in wait]
    assert waits == []
    assert list(device.findings) == []
    return losses


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("world", [SILENT, ONE, EIGHT], ids=["silent", "one", "eight"])
def test_weights_that_cudnn_moves_in_forward(world: World, units: str) -> None:
    with simulated(world) as device:
        losses = recurrent_losses(device, world.rank, units, **options(Way(), world))
    if world.size == 1:
        assert losses == recurrent_steps(recurrent(CPU), CPU, 0, 1)


@pytest.mark.parametrize("units", UNITS)
@each_rank(2, transport="auto")
def test_weights_that_cudnn_moves_in_forward_on_two_ranks(units: str) -> None:
    """Of the unit's shards one rank has enough for cuDNN to try."""
    rank = dist.get_rank()
    with SimulatedDevice()(pytest.MonkeyPatch()) as device:
        losses = recurrent_losses(device, rank, units, transport="process_group")
    assert losses == pytest.approx(recurrent_steps(recurrent(CPU), CPU, rank, 2), rel=1e-6)


def backward_from(tensor: torch.Tensor, grad: torch.Tensor) -> None:
    (tensor.clone().requires_grad_() * 2).backward(grad)


def fused_step(tensor: torch.Tensor, count: torch.Tensor) -> None:
    """Step with a ``count`` of steps, which is a checkpoint's."""
    param = nn.Parameter(tensor)
    optimizer = torch.optim.AdamW([param], fused=True)
    param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.state[param]["step"] = count
    optimizer.step()


def step_with_state(tensor: torch.Tensor, state: torch.Tensor) -> None:
    param = nn.Parameter(tensor)
    optimizer = torch.optim.SGD([param], lr=1.0, momentum=0.9, foreach=True)
    param.grad = torch.ones_like(param)
    optimizer.state[param]["momentum_buffer"] = state
    optimizer.step()


ONE_DEVICE = "Expected all tensors to be on the same device"
GENERATOR = torch.Generator()
# By the operation on a tensor (4,) of the host and one of the device: what torch says on a card.
REFUSALS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], object], str]] = {
    "sum": (lambda here, there: here + there, ONE_DEVICE),
    "into the host": (lambda here, there: torch.add(there, 1, out=here), ONE_DEVICE),
    "indexed": (lambda here, there: there.index_add_(0, torch.tensor([1]), there[:1]), ONE_DEVICE),
    "host indexed by the device": (lambda here, there: here[there > 2], "indices should be either on cpu"),
    "joined": (lambda here, there: torch.cat([here, there]), ONE_DEVICE),
    "memory": (lambda here, there: here.set_(there), 'storage on different device "cuda:0"'),
    "gradient": (lambda here, there: setattr(here, "grad", there), "a gradient with device type 'cuda'"),
    "backward": (lambda here, there: backward_from(there, here), "expected device cuda:0 but got cpu"),
    "step count of a fused optimizer": (lambda here, there: fused_step(there, here[0]), ONE_DEVICE),
    "lists": (lambda here, there: torch._foreach_add_([there, here], [there, there]), ONE_DEVICE),
    "state on the device": (lambda here, there: step_with_state(here, there), "same index"),
    "pinned": (lambda here, there: there.pin_memory(), "only dense CPU tensors can be pinned"),
    "generator": (lambda here, there: there.normal_(generator=GENERATOR), "'cuda' device type for generator"),
    "numpy": (lambda here, there: there.numpy(), "can't convert cuda:0 device type tensor to numpy"),
}


@pytest.mark.parametrize("how", REFUSALS)
def test_what_a_card_refuses_is_refused(how: str) -> None:
    operation, text = REFUSALS[how]
    with simulated(SILENT):
        here = torch.ones(4)
        there = torch.ones(4).to(DEVICE)
        with pytest.raises((RuntimeError, TypeError), match=text):
            operation(here, there)


def test_what_a_card_allows_is_allowed() -> None:
    with simulated(SILENT) as device:
        here = torch.ones(4)
        there = torch.ones(4).to(DEVICE)
        results = [there * here[0], torch.where(there > 0, there, here[0]), there.fill_(here[0])]
        results += [there[torch.tensor([1])], there[here > 0], there.masked_fill(there > 0, here[0])]
        there[torch.tensor([1, 2])] = here[0]
        torch._foreach_mul_([there], here[0])
        backward_from(there[0], here[0])
        torch._foreach_copy_([there, here], [here.clone(), there.clone()])
        torch._foreach_add_([there, here], [there, here])
        waits = len(device.waits)
        assert len(there[there > 0]) < 5
        assert len(device.waits) == waits + 1  # for how many there are
        params = [nn.Parameter(here), nn.Parameter(there)]
        for param in params:
            param.grad = torch.ones_like(param)
        nn.utils.clip_grad_norm_(params, 1.0)
        torch.optim.SGD(params, lr=1.0, foreach=True).step()
        assert all(result.device == DEVICE for result in results)
        assert device.findings == {}


@pytest.mark.parametrize(("layers", "both", "projected"), [(1, False, 0), (2, True, 3)])
def test_cudnn_moves_weights_and_changes_none(layers: int, both: bool, projected: int) -> None:
    with simulated(SILENT):
        lstm = nn.LSTM(5, 7, layers, bidirectional=both, proj_size=projected).to(DEVICE)
        before = [(param.detach().cpu().clone(), param._version) for param in lstm.parameters()]
        copies = [param.data.clone() for param in lstm.parameters()]
        for param, copy in zip(lstm.parameters(), copies, strict=True):
            param.data = copy
        assert len({param.untyped_storage().data_ptr() for param in lstm.parameters()}) == len(copies)
        lstm.flatten_parameters()
        assert len({param.untyped_storage().data_ptr() for param in lstm.parameters()}) == 1
        for (value, version), param in zip(before, lstm.parameters(), strict=True):
            assert torch.equal(param.as_subclass(torch.Tensor).cpu(), value)
            assert param._version == version


def test_gradients_of_a_root_without_parameters_wait_on_the_host(device: SimulatedDevice) -> None:
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30)).to(DEVICE)
    shardtrain.shard(model, units=[nn.Linear], offload=True)
    with shardtrain.no_sync(model):
        model(torch.ones(2, 30).to(DEVICE)).sum().backward()
    for param in model.parameters():
        assert param.grad is not None
        param.grad.as_subclass(torch.Tensor).numpy()
    assert list(device.findings) == []


@pytest.mark.parametrize("writeback", [True, False])
def test_whole_gradients_of_an_offloaded_model(writeback: bool) -> None:
    """Whole, they are on the device; this rank's parts return to the host."""
    with simulated(SILENT):
        model = shardtrain.shard(OddNet().to(DEVICE), units=[Block], offload=True)
        ways.loss_of(model, 0, 0, DEVICE).backward()
        before = {name: param.grad.clone() for name, param in model.named_parameters()}
        with shardtrain.unsharded(model, writeback=writeback, grads=True), torch.no_grad():
            for param in model.parameters():
                assert param.device == DEVICE
                param.grad.mul_(2)
        for name, param in model.named_parameters():
            assert param.grad.device == CPU
            assert torch.equal(param.grad, before[name] * (2 if writeback else 1))


def test_virtual_ranks_need_deterministic_kernels(device: SimulatedDevice) -> None:
    model = OddNet().to(DEVICE)
    with pytest.raises(
        ValueError, match=r"virtual_ranks on cuda needs kernels .*use_deterministic_algorithms"
    ):
        shardtrain.shard(model, units=[Block], virtual_ranks=8)


@pytest.mark.long
@pytest.mark.parametrize("virtual", [0, 1])
def test_the_program_never_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, virtual: int) -> None:
    """One rank's loop with its data, metrics, signals and the check of the norm, between two reports.

    With virtual ranks the program has asked for deterministic kernels: `shard` would refuse otherwise.
    """
    waits: list[list[str]] = []
    lengths = ("train.max_steps=8", "train.log_every=100", "train.eval_every=100", "checkpoint.keep=0")
    keys = "train.mixup=0", "train.cutmix=0", "monitor.writers=[]", f"parallel.virtual_ranks={virtual}"
    config = configure(*TINY, *lengths, *keys)
    with SimulatedDevice()(monkeypatch) as device:

        def after_step(saver: Saver, *arguments: Any, after: Any = Saver.after_step) -> None:
            waits.append(device.waits)
            device.next_step()
            after(saver, *arguments)

        monkeypatch.setattr(Saver, "after_step", after_step)
        train(config, Context(ALONE, DEVICE, tmp_path))
    assert torch.are_deterministic_algorithms_enabled() == bool(virtual)
    torch.use_deterministic_algorithms(False)
    assert waits[2:7] == [[]] * 5  # after the last step comes a report, which waits
    assert list(device.findings) == []


@pytest.mark.long
@pytest.mark.parametrize("key", ["optim=muon", "parallel.offload=true"])
def test_the_program_resumes(tmp_path: Path, key: str) -> None:
    """On a device, with evaluations and checkpoints; the step counts of a checkpoint lie on the host."""
    with simulated(SILENT) as device:
        for length in ("train.max_steps=2", "train.max_steps=4"):
            words = ("+recipe=resnet", *TINY, key, length, "train.epochs=1")
            train(composed(*words), Context(ALONE, DEVICE, tmp_path, commanded(*words).words))
        assert list(device.findings) == []
    assert json.loads((tmp_path / "result.json").read_text())["step"] == 4


@pytest.mark.long
def test_what_a_step_frees_is_kept_for_the_next_one() -> None:
    code = """
import ctypes, resource
from shardtrain import device
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
for keep in (lambda: None, device.keep_freed_memory):
    keep()
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for block in [ctypes.c_void_p(libc.malloc(1 << 20)) for _ in range(100)][::-1]:
            ctypes.memset(block, 1, 1 << 20)
            libc.free(block)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)"""
    returned, kept = map(int, subprocess.check_output([sys.executable, "-c", code]).split())
    assert kept < 100 < 10_000 < returned  # pages that one round touches anew

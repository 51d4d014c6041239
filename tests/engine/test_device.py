"""The device paths on a simulated device: order of streams, memory, launches and waits of the host."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint
from torchvision.models import VisionTransformer

import shardtrain
from shardtrain import Precision, comm
from shardtrain.checkpoint.store import Snapshot
from shardtrain.comm.transport import Transport
from shardtrain.job.launch import Context
from shardtrain.optim import Ema
from shardtrain.train.loop import train
from shardtrain.train.saving import Saver

import gpu_first
from contenders import POOL, Contender, adamw
from simulated_device import DEVICE, SimulatedDevice
from small import Block, OddNet, images
from steps import footprint
from tiny import ALONE, TINY, configure

WORLD = 8
RANK = 2
LOW = Precision(torch.bfloat16)
PRECISIONS = {
    "fp32": Precision(),
    "fp32, reduce bf16": Precision(reduce=torch.bfloat16),
    "bf16": LOW,
    "bf16, reduce fp32": Precision(torch.bfloat16, reduce=torch.float32),
    "fp16": Precision(torch.float16),
}


def replicas() -> Transport:
    inside = dist.new_group(list(range(4)))
    across = dist.new_group([RANK, RANK + 4])
    return comm.open_transport("process_group", None, [range(4), range(4, 8)], inside, across)


SCENES: dict[str, Callable[[], dict[str, Any]]] = {
    "even": dict,
    "whole": lambda: {"layout": "whole"},
    "kept": lambda: {"reshard_after_forward": False},
    "replicas": lambda: {"transport": replicas()},
    "offload": lambda: {"offload": True},
    "offload, replicas": lambda: {"offload": True, "transport": replicas()},
    "virtual ranks": lambda: {"virtual_ranks": 16},
    "virtual ranks, offload, replicas": lambda: {
        **{"virtual_ranks": 16, "offload": True, "transport": replicas()}
    },
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    """A simulated device, which rank 2 of 8 has."""
    with SimulatedDevice()(monkeypatch) as simulated:
        dist.init_process_group("cpu:fake,cuda:fake", store=FakeStore(), rank=RANK, world_size=WORLD)
        try:
            yield simulated
        finally:
            dist.destroy_process_group()
            torch.use_deterministic_algorithms(False)


def play(device: SimulatedDevice, scene: str, precision: Precision, net: nn.Module) -> list[str]:
    """Train, evaluate, change parameters on the host, save; return the waits of the last step."""
    options = SCENES[scene]()
    torch.manual_seed(0)
    model = shardtrain.shard(net.to(DEVICE), units=[Block], precision=precision, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    ema = Ema(model, 0.9)
    batches = [[each.to(DEVICE) for each in images(step, 0, 4)] for step in range(8)]
    scaler = shardtrain.GradScaler("cuda", init_scale=8.0, enabled=precision.param is torch.float16)
    for step in range(3):
        device.next_step()
        ranks = shardtrain.introspect(model).virtual_ranks
        for index, (x, y) in enumerate((batches[step], batches[step + 3])):
            inside = nullcontext() if index else shardtrain.no_sync(model)
            with shardtrain.virtual_rank(model, ranks[index], seed=1, step=step) if ranks else inside:
                scaler.scale(F.cross_entropy(model(x).float(), y)).backward()
        scaler.unscale_(optimizer)
        shardtrain.clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()
        ema.update(step + 1)
        optimizer.zero_grad()
    waits = list(device.waits)
    with torch.no_grad(), ema.swapped():
        model(batches[6][0])
    shardtrain.full_state_dict(model)["fc.bias"].numpy()
    for tensor in Snapshot().copy(dict(model.named_parameters())).values():
        tensor.numpy()
    model(batches[7][0])
    for param in model.blocks.parameters():  # no backward need follow a forward
        param.data.zero_()
    return waits


@pytest.mark.parametrize(
    ("scene", "precision"),
    [*product(SCENES, ["bf16"]), *product(["even", "offload"], [n for n in PRECISIONS if n != "bf16"])],
)
def test_streams_are_in_order_and_the_host_never_waits(
    device: SimulatedDevice, scene: str, precision: str
) -> None:
    """With offload it does for gradients, also under no_sync, and their norm; with a scaled loss to step."""
    torch.use_deterministic_algorithms("virtual ranks" in scene)
    waits = play(device, scene, PRECISIONS[precision], OddNet())
    assert list(device.findings) == []
    away = "offload" in scene
    scaled = precision == "fp16"
    assert len(waits) <= 3 * away + scaled * (1 + away), waits


def test_gradients_of_a_root_without_parameters_wait_on_the_host(device: SimulatedDevice) -> None:
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30)).to(DEVICE)
    shardtrain.shard(model, units=[nn.Linear], offload=True)
    with shardtrain.no_sync(model):
        model(torch.ones(2, 30).to(DEVICE)).sum().backward()
    for param in model.parameters():
        assert param.grad is not None
        param.grad.as_subclass(torch.Tensor).numpy()
    assert list(device.findings) == []


def test_virtual_ranks_need_deterministic_kernels(device: SimulatedDevice) -> None:
    model = OddNet().to(DEVICE)
    with pytest.raises(
        ValueError, match=r"virtual_ranks on cuda needs kernels .*use_deterministic_algorithms"
    ):
        shardtrain.shard(model, units=[Block], virtual_ranks=8)


@pytest.mark.parametrize(("how", "waits"), [("checkpointed", 0), ("compiled", 0), ("unused", 1)])
def test_units_that_compute_otherwise(device: SimulatedDevice, how: str, waits: int) -> None:
    """Other ranks may have gradients of unused parameters, and the host must know which to show."""
    net = OddNet()
    for block in net.blocks:
        if how == "checkpointed":
            options = {"preserve_rng_state": False, "determinism_check": "none"}
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
        elif how == "compiled":
            block.compile(backend="eager")
        else:
            block.unused = nn.Linear(30, 30)
    assert len(play(device, "even", LOW, net)) == waits
    assert list(device.findings) == []


@pytest.mark.parametrize("virtual", [0, 1])
def test_the_program_never_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, virtual: int) -> None:
    """One rank's loop with its data, metrics, signals and the check of the norm, between two reports.

    With virtual ranks the program has asked for deterministic kernels: `shard` would refuse otherwise.
    """
    waits: list[list[str]] = []
    lengths = ("train.max_steps=8", "train.log_every=100", "train.eval_every=100", "checkpoint.keep=0")
    keys = "train.mixup=0", "train.cutmix=0", "monitor.tensorboard=false", f"parallel.virtual_ranks={virtual}"
    config = configure(*TINY, *lengths, *keys)
    with SimulatedDevice()(monkeypatch) as device:

        def step_done(saver: Saver, step: int, evaluate: bool, done: Any = Saver.step_done) -> None:
            waits.append(device.waits)
            device.next_step()
            done(saver, step, evaluate)

        monkeypatch.setattr(Saver, "step_done", step_done)
        train(config, Context(ALONE, DEVICE, tmp_path))
    assert torch.are_deterministic_algorithms_enabled() == bool(virtual)
    torch.use_deterministic_algorithms(False)
    assert waits[2:7] == [[]] * 5  # after the last step comes a report, which waits
    assert list(device.findings) == []


def in_bf16(model: nn.Module) -> nn.Module:
    """Compute in bf16 and normalise in fp32, as the sharded model does."""
    for module in model.bfloat16().modules():
        if isinstance(module, nn.LayerNorm):
            module.float()
            module.register_forward_pre_hook(lambda _, args: (args[0].float(),))
            module.register_forward_hook(lambda *args: args[2].bfloat16())
    return model


def launches(model: nn.Module, dtype: torch.dtype) -> int:
    x, y = [each.to(DEVICE) for each in images(0, 0, 2, 8)]
    contender = Contender(model, adamw(model), nullcontext)
    return footprint(lambda: contender, [[(x.to(dtype), y)]] * POOL, DEVICE)["launches"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "precision", "budget"),
    [
        (lambda: torchvision.models.resnet50(num_classes=5), None, 89),
        pytest.param(
            lambda: VisionTransformer(8, 4, 24, 2, 16, 32, num_classes=5), LOW, 231, marks=pytest.mark.long
        ),
    ],
    ids=["resnet50 fp32", "vit24 bf16"],
)
def test_launches_beyond_the_plain_model_keep_their_budget(
    device: SimulatedDevice, make: Callable[[], nn.Module], precision: Precision | None, budget: int
) -> None:
    """Kernels, copies and collectives of one rank of eight; FSDP2's figures are 133 and 249."""
    plain = make().to(DEVICE)
    alone = launches(in_bf16(plain), torch.bfloat16) if precision else launches(plain, torch.float32)
    sharded = launches(shardtrain.shard(make().to(DEVICE), precision=precision), torch.float32)
    assert sharded - alone <= budget


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
    returned, kept = map(int, subprocess.check_output([sys.executable, "-c", code], timeout=60).split())
    assert kept < 100 < 10_000 < returned  # pages that one round touches anew


@pytest.mark.long
@pytest.mark.timeout(800)
def test_the_first_minutes_on_a_gpu_run_dry(tmp_path: Path) -> None:
    command = [sys.executable, gpu_first.__file__, "--dry", "--out", str(tmp_path)]
    environ = os.environ | {"PYTHONPATH": str(Path(shardtrain.__file__).parents[1])}
    subprocess.run(command, check=True, timeout=780, env=environ)
    found = [json.loads(line) for line in (tmp_path / "findings.jsonl").read_text().splitlines()]
    assert [*dict.fromkeys(each["part"] for each in found)] == [*gpu_first.PARTS]
    missed = [each for each in found if each.get("failed") or "error" in each or "skipped" in each]
    # Gloo coalesces nothing, and FSDP2 does not compute BatchNorm in bf16 on a CPU.
    assert {each["part"] for each in missed} == {"nccl", "steps", "one_of_eight"}, missed
    assert not [each for each in missed if each.get("what", "").startswith("shardtrain")], missed
    assert all(each["right"] for each in found if "right" in each)
    assert max(each["off"] for each in found if "off" in each) < 1e-3
    digests = {each["what"]: each["digest"] for each in found if "digest" in each}
    assert len({digests[f"same bits, {run}"] for run in ("1", "2", "killed", "replayed")}) == 1

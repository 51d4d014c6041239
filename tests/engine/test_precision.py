"""Computing and moving in another dtype than the shards': what a replicated twin does by hand; fp16."""

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import shardtrain
from shardtrain import GradScaler, Precision, comm
from shardtrain.data import Batch
from shardtrain.engine.precision import cast

from pool import each_rank
from small import Block, OddNet, assert_same_parameters, images, sgd, shard, tree_sum
from tiny import result_of, run

BF16 = Precision(param=torch.bfloat16)


class NormNet(nn.Module):
    """LayerNorm, RMSNorm and GroupNorm between odd linear layers; a mask of integers goes in as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(75, 9)
        self.second = nn.Linear(9, 5)
        self.layer = nn.LayerNorm(9)
        self.rms = nn.RMSNorm(9)
        self.group = nn.GroupNorm(3, 9)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        first = self.first(x.flatten(1))
        self.seen = [x.dtype, first.dtype, self.layer.weight.dtype]
        x = self.group(self.rms(self.layer(first)))
        self.seen.append(x.dtype)
        return self.second(x if mask is None else x * mask)


def from_all(tensor: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts


class Twin:
    """The replicated model: fp32 parameters, computing in bf16 but for its norms; means in rank order."""

    def __init__(self, model: nn.Module, norms: tuple[type[nn.Module], ...]) -> None:
        self.model = model
        self.optimizer = sgd(model)
        self.exact: set[nn.Parameter] = set()
        for module in model.modules():
            if isinstance(module, norms):
                self.exact.update(module.parameters())
                if not isinstance(module, nn.BatchNorm2d):
                    module.register_forward_pre_hook(lambda _, args: cast(args, torch.float32))
                    module.register_forward_hook(lambda _, args, out: cast(out, torch.bfloat16))

    def step(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
        losses = []
        for x, y in batches:
            params = self.model.named_parameters()
            low = {name: p if p in self.exact else p.bfloat16() for name, p in params}
            loss = F.cross_entropy(functional_call(self.model, low, x.bfloat16()).float(), y)
            loss.backward()
            losses.append(loss.item())
        for param in self.model.parameters():
            parts = from_all(param.grad)
            param.grad = sum(parts) / len(parts)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses


@pytest.mark.parametrize(
    ("make", "unit", "norms", "micro", "reduce"),
    [
        (OddNet, Block, (nn.BatchNorm2d,), 1, None),
        (NormNet, nn.Linear, (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm), 1, None),
        (OddNet, Block, (nn.BatchNorm2d,), 3, torch.float32),
    ],
)
@each_rank(1, 3)
def test_bf16_equals_a_replicated_twin(make: Any, unit: Any, norms: Any, micro: int, reduce: Any) -> None:
    """bf16 gradients of micro-batches are added up in the dtype of the reduction."""
    plain = make()
    twin = Twin(copy.deepcopy(plain), norms)
    precision = Precision(torch.bfloat16, reduce=reduce, output=torch.float32)
    model = shard(plain, units=[unit], precision=precision)
    optimizer = sgd(model)
    for step in range(3):
        batches = [images(micro * step + index) for index in range(micro)]
        losses = []
        for index, (x, y) in enumerate(batches):
            with shardtrain.no_sync(model) if index < micro - 1 else contextlib.nullcontext():
                loss = F.cross_entropy(model(x), y)
                loss.backward()
            losses.append(loss.item())
        assert losses == twin.step(batches)
        optimizer.step()
        optimizer.zero_grad()
    assert_same_parameters(model, twin.model, tolerance=0)


def moved(precision: Precision | None, **options: Any) -> tuple[int, int]:
    """Return the bytes gathered and reduced in a step."""
    layers = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model = shard(layers, precision=precision, **options)
    model(torch.ones(2, 64)).sum().backward()
    with comm.meter() as meter:
        model(torch.ones(2, 64)).sum().backward()
    return meter.bytes["all_gather"], meter.bytes["reduce_scatter"]


@each_rank(2)
def test_bf16_moves_half_the_bytes() -> None:
    gathered, reduced = moved(None)
    assert moved(BF16) == (gathered // 2, reduced // 2)
    assert moved(Precision(torch.bfloat16, reduce=torch.float32)) == (gathered // 2, reduced)
    assert moved(Precision(reduce=torch.bfloat16)) == (gathered, reduced // 2)


@each_rank(3)
def test_gradients_of_fp32_travel_in_bf16() -> None:
    """The mean of what all ranks have rounded, exactly."""
    torch.manual_seed(0)
    plain = nn.Linear(75, 7)
    model = shard(copy.deepcopy(plain), precision=Precision(reduce=torch.bfloat16))
    x = images(0)[0].flatten(1)
    plain(x).square().sum().backward()
    model(x).square().sum().backward()
    rank = dist.get_rank()
    for name, param in model.named_parameters():
        gradients = from_all(plain.get_parameter(name).grad)
        parts = [grad.bfloat16().float() for grad in gradients]
        mean = tree_sum(parts) / len(parts)
        start = sum(int(size) for size in from_all(torch.tensor(len(param)))[:rank])
        piece = param.grad.as_subclass(torch.Tensor).flatten()
        assert torch.equal(piece, mean.flatten()[start : start + len(piece)])


@each_rank(2)
def test_what_is_cast_and_what_is_not() -> None:
    model = shard(NormNet(), units=[nn.Linear], precision=BF16)
    out = model(torch.randn(2, 3, 5, 5), mask=torch.ones(2, 9, dtype=torch.int64))
    assert model.seen == [torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16]
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in model.parameters())
    with shardtrain.unsharded(model):
        assert model(torch.randn(2, 3, 5, 5)).dtype == torch.float32
    with torch.no_grad():
        assert model(torch.randn(2, 3, 5, 5)).dtype == torch.bfloat16
    assert all(value.dtype == torch.float32 for value in shardtrain.full_state_dict(model).values())

    plain_inputs = shard(nn.Linear(3, 3), precision=Precision(torch.bfloat16, cast_inputs=False))
    with pytest.raises(RuntimeError):
        plain_inputs(torch.ones(1, 3))
    everything = shard(NormNet(), units=[nn.Linear], precision=Precision(torch.bfloat16, keep=()))
    everything(torch.randn(2, 3, 5, 5))
    assert everything.seen[2] == torch.bfloat16


@each_rank(1, 2)
def test_every_forward_sees_the_last_update() -> None:
    """Shards are cast once per forward, also where no update came between, or by hand."""
    model = shard(nn.Linear(3, 3, bias=False), precision=BF16)
    with torch.no_grad():
        for value in (1.0, 2.0, 3.0):
            for param in model.parameters():
                param.fill_(value)
            assert model(torch.ones(1, 3)).eq(3 * value).all()


def test_a_dtype_that_cannot_compute_is_refused() -> None:
    for options, message in (
        ({"param": torch.int8}, "param must be a floating-point dtype or None, got torch.int8"),
        ({"reduce": "bf16"}, "reduce must be a floating-point dtype or None, got 'bf16'"),
    ):
        with pytest.raises(ValueError, match=f"precision.{message}"):
            Precision(**options)


def test_casting_keeps_containers() -> None:
    one = torch.ones(1)
    found = cast({"a": [one, (one, 2)], "b": Batch(one, one.long(), 3)}, torch.bfloat16)
    assert found["a"][0].dtype == found["a"][1][0].dtype == found["b"].images.dtype == torch.bfloat16
    assert isinstance(found["b"], Batch)
    assert found["b"].labels.dtype == torch.int64


# fp16, with a scaled loss


FP16 = Precision(param=torch.float16, output=torch.float32)


def sharded(fused: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model = shard(net, units=[nn.Linear], precision=FP16)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)


def backward(model: nn.Module, step: int, scaler: GradScaler) -> None:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    scaler.scale(model(torch.randn(4, 5, generator=generator)).square().mean()).backward()


def update(optimizer: torch.optim.Optimizer, scaler: GradScaler) -> None:
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@pytest.mark.parametrize("fused", [False, True])
@each_rank(3)
def test_all_ranks_skip_a_step_that_overflows_on_one(fused: bool) -> None:
    """The last parameter overflows in the second step; only the last of three ranks owns a part of it."""
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=2)
    model, optimizer = sharded(fused)
    seen = []
    for step in range(4):
        before = shardtrain.full_state_dict(model)
        backward(model, step, scaler)
        last = list(model.parameters())[-1]
        if step == 1 and last.grad is not None and len(last.grad):
            last.grad.as_subclass(torch.Tensor)[-1] = torch.inf
        update(optimizer, scaler)
        after = shardtrain.full_state_dict(model)
        moved = any(not torch.equal(before[name], after[name]) for name in before)
        seen.append((scaler.get_scale(), moved))
    assert seen == [(8.0, True), (4.0, False), (4.0, True), (8.0, True)]


TINY = """
    model=vit_cifar model.layers=1 model.heads=1 model.width=64 model.mlp_width=64 augment=none
    data=fake data.image_size=8 data.limit=40 parallel.precision=fp16
    train.batch_size=4 train.epochs=1 train.log_every=1
    optim=sgd optim.lr=0.01 sched=constant sched.warmup_epochs=0
    checkpoint.every_steps=1 checkpoint.keep=9 monitor.writers=[]
"""


def scales(folder: Path) -> list[float]:
    """Return the scales that a run's checkpoints hold."""
    files = sorted(folder.glob("checkpoints/*/rank-00000.safetensors"))
    extras = [safe_open(file, "pt").metadata()["extra"] for file in files]
    return [json.loads(extra)["scaler"]["scale"] for extra in extras]


@pytest.mark.long
@each_rank(2, transport="auto")
def test_a_run_in_fp16_scales_its_loss(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    for folder, max_steps in ((whole, 6), (parts, 3), (parts, 6)):
        run(str(folder), *TINY.split(), f"train.max_steps={max_steps}")
    found = scales(whole)
    assert found[0] < 65536, found  # the first step overflowed, which is no failure
    assert len(set(found)) < len(found) == 6, found  # others did not
    assert scales(parts) == found
    assert result_of(whole)["loss/train"] == result_of(parts)["loss/train"]

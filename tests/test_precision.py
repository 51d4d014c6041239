"""Computing and reducing in another dtype than the shards': exactly what a replicated twin does by hand."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import shardtrain
from shardtrain import Precision, comm
from shardtrain.engine.hooks import engine_of
from shardtrain.engine.precision import cast

from pool import each_rank
from small import Block, OddNet, assert_at_rest, images, sgd, shard, train

BF16 = Precision(param=torch.bfloat16)


class NormNet(nn.Module):
    """LayerNorm, RMSNorm and GroupNorm between odd linear layers; a mask of integers goes in as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(75, 9), nn.Linear(9, 5)
        self.layer, self.rms, self.group = nn.LayerNorm(9), nn.RMSNorm(9), nn.GroupNorm(3, 9)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        first = self.first(x.flatten(1))
        self.seen = [x.dtype, first.dtype, self.layer.weight.dtype]
        x = self.group(self.rms(self.layer(first)))
        self.seen.append(x.dtype)
        return self.second(x if mask is None else x * mask)


class Twin:
    """The replicated model: fp32 parameters, computing in bf16 but for its norms; means in rank order."""

    def __init__(self, model: nn.Module, norms: tuple[type[nn.Module], ...]) -> None:
        self.master = model
        self.low = copy.deepcopy(model)
        for module in self.low.modules():
            if isinstance(module, norms):
                if not isinstance(module, nn.BatchNorm2d):
                    module.register_forward_pre_hook(lambda _, args: cast(args, torch.float32))
                    module.register_forward_hook(lambda _, args, out: cast(out, torch.bfloat16))
            else:
                for name, param in module._parameters.items():
                    if param is not None:
                        module._parameters[name] = nn.Parameter(param.detach().bfloat16())
        self.optimizer = sgd(self.master)

    def step(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
        pairs = list(zip(self.master.parameters(), self.low.parameters(), strict=True))
        total = [torch.zeros_like(param) for param, _ in pairs]
        losses = []
        for low, param in ((low, param) for param, low in pairs):
            low.data.copy_(param.data)
        for x, y in batches:
            loss = F.cross_entropy(self.low(x.bfloat16()).float(), y)
            self.low.zero_grad()
            loss.backward()
            losses.append(loss.item())
            for into, (_, low) in zip(total, pairs, strict=True):
                assert low.grad is not None
                into.add_(low.grad)
        for into, (param, _) in zip(total, pairs, strict=True):
            parts = [torch.empty_like(into) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, into)
            mean = parts[0]
            for part in parts[1:]:
                mean = mean + part
            param.grad = mean / len(parts)
        self.optimizer.step()
        return losses


@pytest.mark.parametrize(
    ("make", "unit", "norms"),
    [
        (OddNet, Block, (nn.BatchNorm2d,)),
        (NormNet, nn.Linear, (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)),
    ],
)
@each_rank(1, 3)
def test_bf16_equals_a_replicated_twin(
    make: Callable[[], nn.Module], unit: type[nn.Module], norms: tuple[type[nn.Module], ...]
) -> None:
    torch.manual_seed(0)
    plain = make()
    twin = Twin(copy.deepcopy(plain), norms)
    model = shard(plain, units=[unit], precision=Precision(torch.bfloat16, output=torch.float32))
    expected = [loss for step in range(4) for loss in twin.step([images(step)])]
    assert train(model, sgd(model), 4) == expected
    whole = shardtrain.full_state_dict(model)
    for name, param in twin.master.named_parameters():
        assert whole[name].dtype == torch.float32
        assert torch.equal(whole[name], param), name
    assert_at_rest(model)


@each_rank(1, 3)
def test_accumulation_adds_up_in_the_dtype_of_the_reduction() -> None:
    """bf16 gradients of three micro-batches are added up in fp32, and move in fp32."""
    torch.manual_seed(0)
    plain = OddNet()
    twin = Twin(copy.deepcopy(plain), (nn.BatchNorm2d,))
    precision = Precision(torch.bfloat16, reduce=torch.float32, output=torch.float32)
    model = shard(plain, units=[Block], precision=precision)
    optimizer = sgd(model)
    for step in range(3):
        batches = [images(3 * step + micro) for micro in range(3)]
        expected = twin.step(batches)
        losses = []
        for index, (x, y) in enumerate(batches):
            with contextlib.nullcontext() if index == 2 else shardtrain.no_sync(model):
                loss = F.cross_entropy(model(x), y)
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        assert losses == expected
    whole = shardtrain.full_state_dict(model)
    assert all(torch.equal(whole[name], param) for name, param in twin.master.named_parameters())


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
    for segment in engine_of(model).units[0].segments:
        assert segment.wire.dtype == torch.bfloat16


@each_rank(2)
def test_autocast() -> None:
    """Without a Precision, torch.autocast works as on the plain model."""
    torch.manual_seed(0)
    plain = OddNet()
    model = shard(copy.deepcopy(plain), units=[Block])
    x, _ = images(0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), plain(x))


def test_a_dtype_that_cannot_compute_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"precision.param must be a floating-point dtype or None, got torch.int8"
    ):
        Precision(torch.int8)
    with pytest.raises(
        ValueError, match=r"precision.reduce must be a floating-point dtype, torch.int8 or None, got 'bf16'"
    ):
        Precision(reduce="bf16")  # type: ignore[arg-type]


class Pair(NamedTuple):
    left: torch.Tensor
    right: int


def test_casting_keeps_containers() -> None:
    one = torch.ones(1)
    found = cast(
        {"a": [one, (one, 2)], "b": Pair(one, 3), "c": torch.ones(1, dtype=torch.int64)}, torch.bfloat16
    )
    assert found["a"][0].dtype == found["a"][1][0].dtype == found["b"].left.dtype == torch.bfloat16
    assert isinstance(found["b"], Pair)
    assert found["c"].dtype == torch.int64

"""Virtual ranks: one, two and four ranks, and all ways to join them, compute the same bits."""

import hashlib
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import shardtrain
from shardtrain import Precision
from shardtrain.engine.hooks import engine_of

from small import Block, images, mesh, shard
from tiny import crash, curves, final, run_to_end

V = 4


class Net(nn.Module):
    """Widths that 4 does not divide, statistics, random numbers, a parameter that few micro-batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 7, 3)
        self.block = Block(7)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(7, 5)
        self.rare = nn.Linear(7, 5)
        self.never = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("rarely", torch.zeros(2))

    def forward(self, x: torch.Tensor, rarely: bool) -> torch.Tensor:
        self.calls += 1
        if rarely:
            self.rarely += x.mean()
        x = self.drop(self.block(self.first(x)).mean((2, 3)))
        return self.last(x) + (self.rare(x) if rarely else 0)


def digest(tensors: Any) -> str:
    return hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)).hexdigest()


def steps(bf16: bool = False, replicate: int = 0, on_hosts: bool = False, **options: Any) -> list[Any]:
    """What four steps compute: norms, digests of gradients, weights and buffers, by step."""
    if replicate:
        options["mesh"] = mesh(replicate, dist.get_world_size() // replicate)
    if bf16:
        options["precision"] = Precision(param=torch.bfloat16)
    if on_hosts:  # which exchange messages
        options["transport"] = "auto"
    host = {"SHARDTRAIN_HOST_KEY": f"host {dist.get_rank() // 2}"} if on_hosts else {}
    with patch.dict(os.environ, host):
        torch.manual_seed(0)
        model = shard(Net(), units=[Block], virtual_ranks=V, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    found: list[Any] = []
    for step in range(4):
        for number in shardtrain.introspect(model).virtual_ranks:
            x, y = images(step, number)
            with shardtrain.virtual_rank(model, number, seed=5, step=step):
                F.cross_entropy(model(x, rarely=number == step).float(), y).backward()
        with shardtrain.unsharded(model, grads=True, writeback=False):
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            found.append((len(grads), digest(grad.as_subclass(torch.Tensor) for grad in grads)))
        if step % 2:
            norm = shardtrain.clip_grad_norm_(model, 0.1)
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        found.append((norm.item(), digest(shardtrain.full_state_dict(model).values())))
    assert model.calls == 4
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "kept, whole": {"layout": "whole", "reshard_after_forward": False},
}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(each, id=name, marks=() if name == "fp32" else pytest.mark.release)
        for name, each in OPTIONS.items()
    ],
)
def test_any_number_of_ranks_computes_the_same_bits(ranks: Any, options: dict[str, Any]) -> None:
    [alone] = ranks(1, steps, **options)
    assert alone[0][0] == 9  # no gradient for `never`
    for world in (2, 4):
        assert ranks(world, steps, **options) == [alone] * world
    assert ranks(4, steps, replicate=2, **options) == [alone] * 4
    assert ranks(4, steps, on_hosts=True, **options) == [alone] * 4


def backward_twice(hold: bool) -> list[Any]:
    """Gradients of two losses in each virtual rank, by one backward or by two."""
    torch.manual_seed(0)
    model = shard(nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5)), units=[], virtual_ranks=V)
    for number in shardtrain.introspect(model).virtual_ranks:
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(number))
        with shardtrain.virtual_rank(model, number):
            if hold:
                with shardtrain.no_sync(model):
                    model(x).sum().backward()
                    seen = x.clone().requires_grad_()
                    torch.autograd.grad(model(seen).sum(), [seen])
                model(x).square().sum().backward()
            else:
                model(x).sum().backward()
                with pytest.raises(ValueError, match=rf"second backward\(\) in virtual_rank\({number}\)"):
                    model(x).square().sum().backward()
                raise KeyError
    with shardtrain.unsharded(model, grads=True, writeback=False):
        return [digest([param.grad.as_subclass(torch.Tensor)]) for param in model.parameters()]


def test_two_losses_of_a_virtual_rank_are_one_reduction_or_refused(on_ranks: Any) -> None:
    [alone] = on_ranks(1, backward_twice, True)
    for world in (2, 4):
        assert on_ranks(world, backward_twice, True) == [alone] * world
    for world in (1, 4):
        with pytest.raises(AssertionError, match="KeyError"):
            on_ranks(world, backward_twice, False)


def test_the_mean_is_that_of_one_large_batch() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 5))
    model = shardtrain.shard(nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 5)), virtual_ranks=8)
    shardtrain.load_full_state_dict(model, plain.state_dict())
    x = torch.randn(16, 3)
    plain(x).square().mean().backward()
    [reduction] = engine_of(model).driver.reductions.values()
    [sums] = reduction._sums.values()
    waiting = []
    drawn = set()
    for number, part in enumerate(x.split(2)):
        with shardtrain.virtual_rank(model, number, seed=5):
            drawn.add(torch.rand(1).item())
            model(part).square().mean().backward()
            waiting.append([total.first for total in sums])
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.as_subclass(torch.Tensor).view_as(theirs), theirs.grad)
    assert len(drawn) == 8
    assert waiting == [[0], [0, 1], [0, 2], [0, 2, 3], [0, 4], [0, 4, 5], [0, 4, 6], []]


def test_mistakes_are_named() -> None:
    model = shardtrain.shard(nn.Linear(3, 3), virtual_ranks=2)
    x = torch.ones(1, 3)
    with pytest.raises(ValueError, match="outside of virtual_rank"):
        model(x).sum().backward()
    with pytest.raises(
        ValueError, match=r"virtual_rank\(1\): expected 0; rank 0 computes 0, 1 in this order"
    ):
        shardtrain.virtual_rank(model, 1).__enter__()

    def fail() -> None:
        with shardtrain.virtual_rank(model, 0):
            model(x).sum().backward()
            raise RuntimeError("fails")

    with pytest.raises(RuntimeError, match="fails"):
        fail()
    with shardtrain.virtual_rank(model, 0):  # begins again, without what the failed one left
        model(x).sum().backward()
        with pytest.raises(ValueError, match="inside no_sync"):
            shardtrain.virtual_rank(model, 1).__enter__()
    with pytest.raises(ValueError, match="gradients wait"):
        shardtrain.clip_grad_norm_(model, 1.0)
    with shardtrain.virtual_rank(model, 1):
        model(3 * x).sum().backward()
    grads = [param.grad.as_subclass(torch.Tensor).flatten() for param in (model.bias, model.weight)]
    assert [grad.tolist() for grad in grads] == [[1.0] * 3, [2.0] * 9]
    with pytest.raises(ValueError, match="without virtual ranks"):
        shardtrain.virtual_rank(shardtrain.shard(nn.Linear(3, 3)), 0).__enter__()
    for options, told in (
        ({"virtual_ranks": 3}, "virtual_ranks=3 on 1 ranks: expected powers of two"),
        ({"precision": Precision(reduce=torch.bfloat16)}, "virtual_ranks sums without rounding"),
        ({"dtype": torch.bfloat16}, "too narrow for weight"),
    ):
        layer = nn.Linear(3, 3, dtype=options.pop("dtype", None))
        with pytest.raises(ValueError, match=told):
            shardtrain.shard(layer, **{"virtual_ranks": 2, **options})


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.release)])
def test_a_run_moves_between_numbers_of_ranks(on_ranks: Any, tmp_path: Path, precision: str) -> None:
    given = (
        "parallel.virtual_ranks=4",
        "train.mixup=0.2",
        "train.clip_grad_norm=1",
        "checkpoint.every_steps=1",
    )
    given = (*given, f"parallel.precision={precision}")
    assert on_ranks(1, run_to_end, str(tmp_path / "alone"), *given) == ["finished"]
    for world, at in ((2, {3: crash}), (4, {6: crash}), (1, {8: crash}), (2, {9: crash}), (1, {})):
        on_ranks(world, run_to_end, str(tmp_path / "moved"), *given, at=at)
    assert final(tmp_path / "moved") == final(tmp_path / "alone")
    assert curves(tmp_path / "moved") == curves(tmp_path / "alone")
    log = tmp_path / "moved/log.txt"
    assert "as 4 virtual ranks" in log.read_text()
    assert "results may differ in the last bits" not in log.read_text()

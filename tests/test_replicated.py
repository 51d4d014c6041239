"""Hybrid sharding on real ranks: replicas against DDP, against one another, and against theory."""

from __future__ import annotations

import contextlib
import copy
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import shardtrain
from shardtrain import comm
from shardtrain.comm import Tag
from shardtrain.engine.hooks import engine_of
from shardtrain.engine.precision import Precision

from pool import each_rank
from small import (
    Block,
    OddNet,
    TwoPaths,
    assert_same_parameters,
    average_gradients,
    images,
    mesh,
    raised_soon,
    sgd,
    shard,
    train,
)

Ranks = Callable[..., list[Any]]
HYBRID = (2, 2)


def mean_of_means(group: int):  # type: ignore[no-untyped-def]
    """DDP's averaging in the engine's order: inside shard groups in rank order, then across replicas."""

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        own = bucket.buffer()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        means = [in_order(parts[first : first + group]) for first in range(0, len(parts), group)]
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(in_order(means))
        return future

    return hook


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total.add_(part)
    return total.div_(len(parts))


def hybrid_and_replica(
    make: Callable[[], nn.Module], sizes: tuple[int, int], **options: Any
) -> tuple[nn.Module, DistributedDataParallel]:
    torch.manual_seed(0)
    plain = make()
    replica = DistributedDataParallel(copy.deepcopy(plain))
    replica.register_comm_hook(None, mean_of_means(sizes[1]))
    return shard(plain, mesh=mesh(*sizes), **options), replica


def assert_replicas_are_equal(model: nn.Module) -> None:
    """Every rank's pieces are those of the ranks at the same place in the other shard groups, to the bit."""
    pieces = torch.cat([param.detach().flatten() for param in model.parameters()])
    transport = engine_of(model).transport
    found: list[torch.Tensor] = [pieces] * dist.get_world_size()
    dist.all_gather_object(found, pieces)
    assert all(torch.equal(other, pieces) for other in found[transport.rank :: transport.world])


def small_resnet() -> nn.Module:
    return torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=5)


def small_vit() -> nn.Module:
    vit = torchvision.models.VisionTransformer(
        image_size=16, patch_size=8, num_layers=2, num_heads=3, hidden_dim=33, mlp_dim=45, num_classes=5
    )
    nn.init.normal_(vit.heads.head.weight, std=0.1)  # torchvision's zeros would give no gradients below
    return vit


def freeze() -> nn.Module:
    net = OddNet()
    net.stem.requires_grad_(False)
    net.blocks[1].conv.requires_grad_(False)
    return net


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, foreach=True)


def momentum_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def exactly_like_ddp(
    make: Callable[[], nn.Module], size: int, sizes: tuple[int, int], optimizer: Any, steps: int, options: Any
) -> None:
    model, replica = hybrid_and_replica(make, sizes, **options)

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return images(step, n=4, size=size)

    expected = train(replica, optimizer(replica), steps, batch)
    assert train(model, optimizer(model), steps, batch) == expected
    assert_same_parameters(model, replica, tolerance=0)
    assert_replicas_are_equal(model)


@pytest.mark.parametrize(
    ("make", "size", "optimizer", "steps"),
    [
        pytest.param(small_resnet, 16, momentum_sgd, 4, marks=pytest.mark.long),
        (small_vit, 16, adamw, 10),
        (OddNet, 5, sgd, 20),
        (freeze, 5, sgd, 4),
    ],
)
def test_training_equals_ddp_bit_for_bit(
    ranks: Ranks, make: Any, size: int, optimizer: Any, steps: int
) -> None:
    """Of DDP that sums in the engine's order, over both transports."""
    ranks(4, exactly_like_ddp, make, size, HYBRID, optimizer, steps, {"units": None})


@pytest.mark.parametrize("sizes", [(3, 1), (4, 1), (1, 4)], ids=str)
def test_any_shape_of_mesh_equals_ddp(ranks: Ranks, sizes: tuple[int, int]) -> None:
    """Shard groups of one rank are DDP, a single one is full sharding; odd sizes throughout."""
    ranks(sizes[0] * sizes[1], exactly_like_ddp, OddNet, 5, sizes, sgd, 4, {"units": [Block]})


class Sometimes(nn.Module):
    """One layer is used on some ranks only, or on none; the loss may leave the second output alone."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.head = nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 5)

    def forward(self, x: torch.Tensor, uses: bool) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.always(x)
        return self.sometimes(x) if uses else x, self.head(x)


def trains_where_used(users: list[int], skips: bool) -> None:
    """Weight decay would move what has a gradient of zeros; what has none must stay as it is."""
    torch.manual_seed(0)
    plain = Sometimes()
    model = shard(copy.deepcopy(plain), mesh=mesh(*HYBRID), units=[] if skips else [nn.Linear])
    optimizers = [sgd(plain), sgd(model)]
    uses = dist.get_rank() in users
    for step in range(3):
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        for net, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            first, second = net(x, uses or not skips)
            (first.square().mean() + (second.mean() if uses else 0.0)).backward()
        average_gradients(plain)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_parameters(model, plain, tolerance=1e-6)
    assert_replicas_are_equal(model)


@pytest.mark.parametrize("skips", [True, False], ids=["layers of the root", "outputs of units"])
@each_rank(4)
def test_what_is_used_on_some_ranks_only(skips: bool) -> None:
    for users in ([3], [0], [1, 2], []):
        trains_where_used(users, skips)


class Touched(nn.Module):
    """A weight whose gradient is -0.0 where it is used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.touched = nn.Linear(5, 5), nn.Parameter(torch.ones(9))

    def forward(self, x: torch.Tensor, uses: bool) -> torch.Tensor:
        return self.always(x) + (self.touched * -0.0).sum() if uses else self.always(x)


def minus_zeros(sizes: tuple[int, int], users: int) -> bool:
    """Whether this rank has a gradient of what the first ranks use, if it has a piece."""
    model = shard(Touched(), mesh=mesh(*sizes), units=[])
    model(torch.ones(1, 5), dist.get_rank() < users).sum().backward()
    return model.touched.grad is not None if model.touched.numel() else users > 0


def minus_zeros_here_or_nowhere(sizes: tuple[int, int]) -> tuple[bool, bool]:
    return minus_zeros(sizes, 1), minus_zeros(sizes, 0)


@pytest.mark.parametrize("sizes", [(2, 2), (4, 1)], ids=str)
def test_a_gradient_of_minus_zeros_is_none_that_is_absent(ranks: Ranks, sizes: tuple[int, int]) -> None:
    assert ranks(4, minus_zeros_here_or_nowhere, sizes) == [(True, False)] * 4


def one_backward(model: nn.Module, step: int) -> None:
    x, y = images(step)
    F.cross_entropy(model(x), y).backward()


def traffic(sizes: tuple[int, int], precision: Precision | None) -> None:
    """Bytes that this rank sends in a step of two micro-batches, against theory."""
    replicate, group = sizes
    model = shard(OddNet(), mesh=mesh(*sizes), units=[Block], precision=precision)
    engine = engine_of(model)
    one_backward(model, 0)
    with comm.meter() as waiting, shardtrain.no_sync(model):
        one_backward(model, 1)
    assert waiting.bytes["reduce_scatter"] == waiting.bytes["all_reduce"] == 0
    assert waiting.calls["all_reduce"] == 0
    with comm.meter() as found:
        one_backward(model, 2)
    segments = [segment for unit in engine.units for segment in unit.segments]
    intervals = [s.layout.length(engine.transport.rank) for s in segments]
    reduced = [length * s.like_gradient.itemsize for length, s in zip(intervals, segments, strict=True)]
    assert found.bytes["reduce_scatter"] == (group - 1) * sum(reduced)
    across = 2 * (replicate - 1) * sum(reduced) / replicate
    assert found.bytes["all_reduce"] == pytest.approx(across, abs=len(segments))
    assert found.calls["all_reduce"] == (len(engine.units) if replicate > 1 else 0)
    gathers = found.bytes["all_gather"] / (group - 1) if group > 1 else 0
    root = sum(s.wire.nbytes for s in engine.units[0].segments)
    others = sum(s.wire.nbytes for unit in engine.units[1:] for s in unit.segments)
    assert gathers == (root + 2 * others if group > 1 else 0)


@pytest.mark.parametrize(
    ("sizes", "precision"),
    [((2, 2), None), ((2, 2), Precision(param=torch.bfloat16)), ((3, 1), None)],
    ids=["2x2", "2x2 in bf16", "3x1"],
)
def test_traffic_is_as_theory_says(ranks: Ranks, sizes: tuple[int, int], precision: Precision | None) -> None:
    """Inside as in a shard group alone, across 2 (R-1)/R of the interval; nothing under no_sync."""
    ranks(sizes[0] * sizes[1], traffic, sizes, precision)


@each_rank(4)
def test_accumulation_and_clipping_equal_ddp() -> None:
    """Norms add up in another order: to 1e-5."""
    micro = 3
    model, replica = hybrid_and_replica(OddNet, HYBRID, units=[Block])
    optimizers = [sgd(model), sgd(replica)]
    for step in range(4):
        for index in range(micro):
            for net in (model, replica):
                no_sync = shardtrain.no_sync(net) if net is model else replica.no_sync()
                with contextlib.nullcontext() if index == micro - 1 else no_sync:
                    one_backward(net, 10 * step + index)
        with comm.meter() as meter:
            norm = shardtrain.clip_grad_norm_(model, 0.5)
        assert meter.calls == {"all_reduce": 1}
        expected = nn.utils.clip_grad_norm_(replica.parameters(), 0.5)
        torch.testing.assert_close(norm, expected)
        assert shardtrain.clip_grad_norm_(model, 1e9, norm_type=float("inf")) > 0
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, replica)
    assert_replicas_are_equal(model)


@each_rank(4)
def test_bf16_keeps_replicas_equal() -> None:
    """Every replica has the same bits, and losses near to fp32's."""
    for replicate in (2, 4):
        torch.manual_seed(0)
        plain, losses = OddNet(13), []
        for precision in (None, Precision(param=torch.bfloat16)):
            options = {"mesh": mesh(replicate, 4 // replicate), "units": [Block], "precision": precision}
            model = shard(copy.deepcopy(plain), **options)
            losses.append(train(model, sgd(model), 10))
        assert losses[1] == pytest.approx(losses[0], abs=0.1)
        assert losses[1] != losses[0]
        assert_replicas_are_equal(model)


def bad_meshes() -> list[str]:
    def refused(on: DeviceMesh, **options: Any) -> str:
        return raised_soon(ValueError, lambda: shardtrain.shard(OddNet(), mesh=on, **options))

    texts = [refused(DeviceMesh("cpu", ranks)) for ranks in ([[[0, 1], [2, 3]]], [[0, 1]], [[0, 2], [3, 1]])]
    texts.append(refused(mesh(*HYBRID), precision=Precision(reduce=torch.int8)))
    outside = DeviceMesh("cpu", [0, 1])
    return [*texts, refused(outside)] if dist.get_rank() == 3 else texts


def test_bad_meshes_are_refused(on_ranks: Ranks) -> None:
    texts = on_ranks(4, bad_meshes)
    assert texts[3] == [
        "mesh must be a 1-D DeviceMesh or a 2-D one (replicate, shard), got 3 dimensions",
        "a 2-D mesh must hold every rank: expected 4 ranks, got 1×2",
        "the ranks of a 2-D mesh must ascend along both dimensions, got [[0, 2], [3, 1]]",
        "int8 gathers and reductions are for one shard group; use a 1-D mesh with them",
        "rank 3 is not in the mesh, which holds [0, 1]",
    ]
    assert texts[:3] == [texts[3][:4]] * 3


def by_the_backend(sizes: tuple[int, int]) -> None:
    """As on NCCL: the backend's collectives on the mesh's groups; the guard is a sum of the movements."""
    model, replica = hybrid_and_replica(OddNet, sizes, units=[Block], transport="process_group")
    transport = engine_of(model).transport
    for part in (transport.inner, transport.across.part):
        part.has_gloo = False
    expected = train(replica, sgd(replica), 4)
    assert train(model, sgd(model), 4) == pytest.approx(expected, rel=1e-5)
    assert_replicas_are_equal(model)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1)], ids=str)
def test_the_backends_own_collectives_serve_as_well(on_ranks: Ranks, sizes: tuple[int, int]) -> None:
    on_ranks(sizes[0] * sizes[1], by_the_backend, sizes)


@each_rank(3, transport="auto")
def test_a_part_of_a_group_exchanges_among_its_own() -> None:
    members = [0, 2]
    group = dist.new_group(members)
    world = dist.group.WORLD
    assert world is not None
    if dist.get_rank() in members:
        part = comm.ProcessGroupTransport(world).part(members, group)
        part.has_gloo = False
        outgoing, incoming = part.rank + torch.tensor([0.1, 0.2]), torch.zeros(2)
        part.exchange(Tag(0, "packets"), outgoing, [1, 1], incoming).wait()
        assert torch.equal(incoming, torch.tensor([0.0, 1.0]) + (part.rank + 1) / 10)


def strays(sizes: tuple[int, int], odd: list[int], order: str, folder: str) -> str:
    """Some ranks take another path when rank 1 already waits for rank 0; nobody goes until all know."""
    model = shard(TwoPaths(), mesh=mesh(*sizes), units=[nn.Linear])
    rank = dist.get_rank()

    def step(own: str) -> None:
        model(torch.randn(2, 9), own).sum().backward()

    def strayed_step_and_another() -> None:
        step(order if rank in odd else "first second")
        step("first second")

    step("first second")
    late_s = [0.4, 0.0, 0.2, 0.2][rank]
    model.first.register_forward_hook(lambda *a: a[2].register_hook(lambda _: time.sleep(late_s)) and None)
    text = raised_soon(comm.Diverged, strayed_step_and_another)
    (Path(folder) / str(rank)).touch()
    deadline = time.monotonic() + 10
    while len(list(Path(folder).iterdir())) < dist.get_world_size():
        assert time.monotonic() < deadline, "another rank has not noticed"
        time.sleep(0.01)
    return text


@pytest.mark.parametrize(
    ("sizes", "odd", "order"),
    [((2, 2), [3], "second"), ((2, 2), [2, 3], "second"), ((3, 1), [2], "second first")],
    ids=str,
)
def test_a_rank_or_replica_on_another_path_is_named(
    ranks: Ranks, sizes: tuple[int, int], odd: list[int], order: str, tmp_path: Path
) -> None:
    texts = ranks(sizes[0] * sizes[1], strays, sizes, odd, order, str(tmp_path))
    for text in texts:
        assert text.startswith("step 2: "), texts
        if len(odd) == 1:
            assert re.search(f"rank {odd[0]} takes another path than ranks 0(, | and )1", text), texts
        else:
            assert "ranks 0, 1, 2 and 3 take different paths: ranks 0 and 1 are" in text, texts

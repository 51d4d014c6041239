"""Hybrid sharding on real ranks: replicas against DDP, against one another, and against theory."""

from __future__ import annotations

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
    sharded_and_replica,
    train,
)
from test_parity import adamw, mean_of_means, momentum_sgd

HYBRID = (2, 2)


def hybrid_and_replica(
    make: Callable[[], nn.Module], sizes: tuple[int, int], **options: Any
) -> tuple[nn.Module, DistributedDataParallel]:
    model, replica = sharded_and_replica(make, mesh=mesh(*sizes), **options)
    replica.register_comm_hook(None, mean_of_means(sizes[1]))
    return model, replica


def assert_replicas_are_equal(model: nn.Module) -> None:
    """Every rank's pieces are those of the ranks at the same place in the other shard groups, to the bit."""
    pieces = torch.cat([param.detach().flatten() for param in model.parameters()])
    transport = shardtrain.introspect(model).transport
    found: list[torch.Tensor] = [pieces] * dist.get_world_size()
    dist.all_gather_object(found, pieces)
    assert all(torch.equal(other, pieces) for other in found[transport.rank :: transport.world])


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


@pytest.mark.parametrize(
    ("make", "size", "sizes", "optimizer", "steps"),
    [
        (small_vit, 16, HYBRID, adamw, 6),
        (OddNet, 5, HYBRID, momentum_sgd, 12),
        (freeze, 5, HYBRID, sgd, 4),
        (OddNet, 5, (4, 1), sgd, 4),  # DDP
        (OddNet, 5, (1, 4), sgd, 4),  # full sharding
    ],
)
@each_rank(4)
def test_training_equals_ddp_bit_for_bit(
    make: Any, size: int, sizes: tuple[int, int], optimizer: Any, steps: int
) -> None:
    model, replica = hybrid_and_replica(make, sizes, units=None)

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return images(step, n=4, size=size)

    expected = train(replica, optimizer(replica), steps, batch)
    assert train(model, optimizer(model), steps, batch) == expected
    assert_same_parameters(model, replica, tolerance=0)
    assert_replicas_are_equal(model)


class Sometimes(nn.Module):
    """One layer is used on some ranks only, or on none; the loss may leave the second output alone."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(7, 7), nn.Linear(7, 7)
        self.head = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))

    def forward(self, x: torch.Tensor, uses: bool) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.always(x)
        return self.sometimes(x) if uses else x, self.head(x)


def trains_where_used(users: list[int], skips: bool) -> None:
    """Weight decay would move what has a gradient of zeros; what has none must stay as it is."""
    torch.manual_seed(0)
    plain = Sometimes()
    model = shard(copy.deepcopy(plain), mesh=mesh(*HYBRID), units=[] if skips else [nn.Linear, nn.Sequential])
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


@pytest.mark.parametrize("skips", [True, False], ids=["layers of the root", "outputs of nested units"])
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


@pytest.mark.parametrize("sizes", [(2, 2), (4, 1)], ids=str)
@each_rank(4)
def test_a_gradient_of_minus_zeros_is_none_that_is_absent(sizes: tuple[int, int]) -> None:
    for users in (1, 0):
        model = shard(Touched(), mesh=mesh(*sizes), units=[])
        model(torch.ones(1, 5), dist.get_rank() < users).sum().backward()
        if model.touched.numel():
            assert (model.touched.grad is not None) == bool(users)


@pytest.mark.parametrize("sizes", [HYBRID, (4, 1)], ids=str)
@each_rank(4)
def test_traffic_is_as_theory_says(sizes: tuple[int, int]) -> None:
    """Inside as in a shard group alone, across 2 (R-1)/R of the interval; nothing under no_sync."""
    replicate, group = sizes
    model = shard(OddNet(), mesh=mesh(*sizes), units=[Block])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train(model, optimizer, 1)
    with comm.meter() as waiting, shardtrain.no_sync(model):
        F.cross_entropy(model(images(1)[0]), images(1)[1]).backward()
    assert waiting.bytes["reduce_scatter"] == waiting.bytes["all_reduce"] == waiting.calls["all_reduce"] == 0
    with comm.meter() as found:
        train(model, optimizer, 1)
    root, *blocks = shardtrain.introspect(model).units
    reduced = root.local_bytes + sum(block.local_bytes for block in blocks)
    gathered = root.local_bytes + 2 * sum(block.local_bytes for block in blocks)
    assert found.bytes["reduce_scatter"] == (group - 1) * reduced
    assert found.bytes["all_gather"] == (group - 1) * gathered
    across = 2 * (replicate - 1) * reduced / replicate
    assert found.bytes["all_reduce"] == pytest.approx(across, abs=3)
    assert found.calls["all_reduce"] == 3
    with comm.meter() as clipping:
        assert shardtrain.clip_grad_norm_(model, 1e9, norm_type=float("inf")) > 0
    assert clipping.calls == {"all_reduce": 1}


@each_rank(4, transport="auto")
def test_bad_meshes_are_refused() -> None:
    def refused(on: DeviceMesh, **options: Any) -> str:
        return raised_soon(ValueError, lambda: shardtrain.shard(OddNet(), mesh=on, **options))

    texts = [refused(DeviceMesh("cpu", ranks)) for ranks in ([[[0, 1], [2, 3]]], [[0, 1]], [[0, 2], [3, 1]])]
    assert [*texts, refused(mesh(*HYBRID), precision=Precision(reduce=torch.int8))] == [
        "mesh must be a 1-D DeviceMesh or a 2-D one (replicate, shard), got 3 dimensions",
        "a 2-D mesh must hold every rank: expected 4 ranks, got 1×2",
        "the ranks of a 2-D mesh must ascend along both dimensions, got [[0, 2], [3, 1]]",
        "int8 gathers and reductions are for one shard group; use a 1-D mesh with them",
    ]
    outside = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() == 3:
        assert refused(outside) == "rank 3 is not in the mesh, which holds [0, 1]"


@each_rank(4, transport="auto")
def test_the_backends_own_collectives_serve_as_well() -> None:
    """As on NCCL: the backend's collectives on the mesh's groups; the guard is a sum of the movements."""
    model, replica = hybrid_and_replica(OddNet, HYBRID, units=[Block], transport="process_group")
    transport = shardtrain.introspect(model).transport
    for part in (transport.inner, transport.across.part):
        part.has_gloo = False
    expected = train(replica, sgd(replica), 4)
    assert train(model, sgd(model), 4) == pytest.approx(expected, rel=1e-5)
    assert_replicas_are_equal(model)


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


@pytest.mark.parametrize(
    ("sizes", "odd", "order"),
    [(HYBRID, [3], "second"), (HYBRID, [2, 3], "second"), ((4, 1), [3], "second first")],
    ids=str,
)
@each_rank(4)
def test_a_rank_or_replica_on_another_path_is_named(
    sizes: tuple[int, int], odd: list[int], order: str, tmp_path: Path
) -> None:
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
    (tmp_path / str(rank)).touch()
    deadline = time.monotonic() + 10
    while len(list(tmp_path.iterdir())) < dist.get_world_size():
        assert time.monotonic() < deadline, "another rank has not noticed"
        time.sleep(0.01)
    assert text.startswith("step 2: "), text
    if len(odd) == 1:
        assert re.search("rank 3 takes another path than ranks 0(, | and )1", text), text
    else:
        assert "ranks 0, 1, 2 and 3 take different paths: ranks 0 and 1 are" in text, text

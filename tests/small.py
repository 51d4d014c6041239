"""Small models with sizes that no world size divides, and the steps that tests share."""

import copy
import os
import time
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import VisionTransformer

import shardtrain
from shardtrain.comm import reports

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Block(nn.Module):
    """A residual block: conv, norm, in-place ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.norm(self.conv(x)) + x)


class OddNet(nn.Module):
    """A net of 3×5×5 images to 5 classes: a 0-dim parameter, odd widths, three blocks; the last two stay."""

    def __init__(self, width: int = 7, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.fc = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.stem(x)).mean((2, 3))
        return self.fc(x * self.scale)


def partly_frozen() -> nn.Module:
    net = OddNet()
    net.blocks.requires_grad_(False)
    net.blocks[0].norm.requires_grad_(True)
    return net


class Vit(VisionTransformer):
    """A ViT on 5×5 images. Without dropout, which aot_eager cannot differentiate behind attention."""

    def __init__(self) -> None:
        super().__init__(5, 1, 2, 3, 9, 19, num_classes=5)
        nn.init.normal_(self.heads.head.weight, std=0.1)  # with torchvision's zeros nothing would flow back


class Parts(nn.Module):
    """A module of parts by name; ``forward`` gets it and the inputs."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.does = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any) -> Any:
        return self.does(self, *args)


def images(step: int, rank: int | None = None, n: int = 6, size: int = 5) -> tuple[torch.Tensor, ...]:
    """``n`` images (n, 3, size, size) and labels below 5; another draw for each step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + (dist.get_rank() if rank is None else rank))
    return torch.randn(n, 3, size, size, generator=generator), torch.randint(5, (n,), generator=generator)


def shard(module: nn.Module, **options: Any) -> nn.Module:
    """`shardtrain.shard` over the transport that the test runs with; small models have a unit per block."""
    usual = {"transport": os.environ["SHARDTRAIN_TEST_TRANSPORT"], "units": "blocks", "unit_bytes": 0}
    return shardtrain.shard(module, **{**usual, **options})


def sharded_and_replica(
    make: Callable[[], nn.Module] = OddNet, **options: Any
) -> tuple[nn.Module, DistributedDataParallel]:
    """The same initial model twice: sharded, and as the oracle."""
    torch.manual_seed(0)
    plain = make()
    return shard(copy.deepcopy(plain), **{"units": [Block], **options}), DistributedDataParallel(plain)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def average_gradients(model: nn.Module) -> None:
    """Do what replicas do by hand: the mean over ranks, and None only where no rank has a gradient."""
    for param in model.parameters():
        has = torch.tensor(float(param.grad is not None))
        dist.all_reduce(has)
        if has:
            total = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(total)
            param.grad = total / dist.get_world_size()


def classify(net: nn.Module, step: int) -> torch.Tensor:
    """Return the loss on this rank's images of the step."""
    x, y = images(step)
    return F.cross_entropy(net(x), y)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4, start: int = 0) -> list[float]:
    """Do plain steps; return this rank's losses."""
    losses = []
    for step in range(start, start + steps):
        loss = classify(model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same_parameters(model: nn.Module, replica: nn.Module, tolerance: float = 1e-5) -> None:
    """Require the replica's parameters of the sharded ``model``, and that it is at rest."""
    plain = replica.module if isinstance(replica, DistributedDataParallel) else replica
    expected = {name: param.detach() for name, param in plain.named_parameters()}
    whole = shardtrain.full_state_dict(model)
    actual = {name: whole[name] for name in expected}
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert_at_rest(model)


def train_alike(
    model: nn.Module, replica: nn.Module, tolerance: float = 1e-5, optimizer: MakeOptimizer = sgd
) -> None:
    """Train both; require equal losses and parameters."""
    expected = train(replica, optimizer(replica))
    assert train(model, optimizer(model)) == pytest.approx(expected, rel=tolerance, abs=0)
    assert_same_parameters(model, replica, tolerance)


def like_a_replica(
    make: Callable[[], nn.Module] = OddNet,
    step: Callable[[nn.Module, int], object] = lambda net, number: classify(net, number).backward(),
    optimizer: MakeOptimizer = sgd,
    early: bool = False,
    tolerance: float = 1e-5,
    **options: Any,
) -> nn.Module:
    """Train ``make()`` sharded, and unsharded with gradients averaged by hand; require the same parameters.

    ``step(net, number)`` is a forward and a backward. ``early`` builds the optimizers before sharding.
    """
    torch.manual_seed(0)
    replica = make()
    model = copy.deepcopy(replica)
    optimizers = [optimizer(net) for net in (replica, model) if early]
    shard(model, **{"units": [Block], **options})
    optimizers = optimizers or [optimizer(net) for net in (replica, model)]
    for net, its_optimizer in zip((replica, model), optimizers, strict=True):
        for number in range(3):
            its_optimizer.zero_grad()
            step(net, number)
            if net is replica:
                average_gradients(net)
            its_optimizer.step()
    assert_same_parameters(model, replica, tolerance)
    return model


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return whole parameters, buffers and the state of SGD or AdamW by name; zeros where there is none."""
    state = shardtrain.full_state_dict(model)
    params = dict(model.named_parameters())
    values = {param: param.detach().clone() for param in params.values()}
    for key in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
        for param in values:  # state has the shape of the shard, so that the parameter can show it
            param.data.copy_(optimizer.state.get(param, {}).get(key, torch.zeros_like(param)))
        whole = shardtrain.full_state_dict(model)
        state |= {f"{name} {key}": whole[name] for name in params}
    for param, value in values.items():
        param.data.copy_(value)
    return state


def assert_at_rest(model: nn.Module) -> None:
    """Every parameter shows its piece, and nothing is gathered."""
    inside = shardtrain.introspect(model)
    assert inside.gathered == (0, 0)
    if not inside.transport.in_place:
        storages = [tensor.untyped_storage() for tensor in inside.tensors]
        assert sum({each.data_ptr(): each.nbytes() for each in storages}.values()) <= inside.shard_bytes
    sharded = [param for name, param in model.named_parameters() if name in inside.unit_of_parameter]
    assert sum(param.nbytes for param in sharded) <= sum(unit.local_bytes for unit in inside.units)
    assert all(param.grad is None or param.grad.shape == param.shape for param in sharded)


def mesh(replicate: int, group: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicate, group), mesh_dim_names=("replicate", "shard"))


def raised_soon(error: type[Exception], body: Callable[[], object]) -> str:
    """Return the text of the ``error`` that ``body`` raises, before the time of the pool's ranks is over.

    A rank that waits asks for reports after a tenth of the usual time: most tests would wait for that alone.
    """
    with patch.object(reports, "STALL_S", reports.STALL_S / 10), pytest.raises(error) as caught:
        body()
    return str(caught.value)


def until(holds: Callable[[], object]) -> None:
    """Wait until ``holds()``; fail after far more time than any machine takes."""
    deadline = time.monotonic() + 100
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def tree_sum(parts: Sequence[torch.Tensor], add: Callable[..., torch.Tensor] = torch.add) -> torch.Tensor:
    """Sum in pairs, then the sums in pairs; the last of an odd number waits: ``((0 + 1) + (2 + 3)) + 4``."""
    while len(parts) > 1:
        parts = [reduce(add, parts[at : at + 2]) for at in range(0, len(parts), 2)]
    return parts[0]


def mean_in_a_tree(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average as DDP, summed in the engine's order, so that fp32 results can be compared exactly."""
    parts = [torch.empty_like(bucket.buffer()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, bucket.buffer())
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tree_sum(parts) / len(parts))
    return future

"""Small models with sizes that no world size divides, and the steps that tests share."""

import contextlib
import copy
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models import VisionTransformer

import shardtrain
from shardtrain.recipes.behaviours import Parts as Parts
from shardtrain.recipes.behaviours import average_gradients, sgd, three_steps


class Block(nn.Module):
    """Residual: conv, norm, in-place ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.norm(self.conv(x)) + x)


class OddNet(nn.Module):
    """3×5×5 images to 5 classes; a 0-dim parameter, odd widths, three blocks: the last two stay gathered."""

    def __init__(self, width: int = 7, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.fc = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.stem(x)).mean((2, 3))
        return self.fc(x * self.scale)


class Vit(VisionTransformer):
    """On 5×5 images. Without dropout, which aot_eager cannot differentiate behind attention."""

    def __init__(self) -> None:
        super().__init__(5, 1, 2, 3, 9, 19, num_classes=5)
        nn.init.normal_(self.heads.head.weight, std=0.1)  # with torchvision's zeros nothing would flow back


class TwoPaths(nn.Module):
    """Equal layers, run in an order of the caller's, or one of them not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(9, 9), nn.Linear(9, 9)

    def forward(self, x: torch.Tensor, order: str) -> torch.Tensor:
        for name in order.split():
            x = getattr(self, name)(x)
        return x

    def take(self, *orders: str) -> None:
        """Do a forward and a backward in each order."""
        for order in orders:
            self(torch.randn(2, 9), order).sum().backward()


def images(
    step: int, rank: int | None = None, n: int = 6, size: int = 5
) -> tuple[torch.Tensor, torch.Tensor]:
    """``n`` images (n, 3, size, size) and labels below 5; another draw for each step and rank."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(n, 3, size, size, generator=generator), torch.randint(5, (n,), generator=generator)


def shard(module: nn.Module, **options: Any) -> nn.Module:
    """`shardtrain.shard` over the transport that the test runs with; small models have several units."""
    usual = {"transport": os.environ["SHARDTRAIN_TEST_TRANSPORT"], "units": "blocks"}
    return shardtrain.shard(module, **{**usual, **options})


def sharded_and_replica(
    make: Callable[[], nn.Module] = OddNet, **options: Any
) -> tuple[nn.Module, DistributedDataParallel]:
    """The same initial model twice: sharded, and as the oracle."""
    torch.manual_seed(0)
    plain = make()
    return shard(copy.deepcopy(plain), **{"units": [Block], **options}), DistributedDataParallel(plain)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 4,
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]] = images,
    start: int = 0,
) -> list[float]:
    """Plain steps; this rank's losses."""
    losses = []
    for step in range(start, start + steps):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_in_micro_batches(model: nn.Module, after: Callable[[int], None] = lambda step: None) -> list[float]:
    """Train three clipped steps of two micro-batches; return this rank's losses."""
    if isinstance(model, DistributedDataParallel):
        no_sync, clip = model.no_sync, partial(nn.utils.clip_grad_norm_, [*model.parameters()])
    else:
        no_sync, clip = (partial(f, model) for f in (shardtrain.no_sync, shardtrain.clip_grad_norm_))
    optimizer, losses = sgd(model), []
    for step in range(3):
        torch.manual_seed(step)
        for micro in range(2):
            with no_sync() if micro == 0 else contextlib.nullcontext():
                loss = classify(model, 2 * step + micro)
                (loss / 2).backward()
            losses.append(loss.item())
        clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        after(step)
    return losses


def assert_same_parameters(model: nn.Module, replica: nn.Module, tolerance: float = 1e-5) -> None:
    """Parameters of the sharded ``model`` equal the replica's, and rest is rest."""
    plain = replica.module if isinstance(replica, DistributedDataParallel) else replica
    whole = shardtrain.full_state_dict(model)
    expected = {name: param.detach() for name, param in plain.named_parameters()}
    torch.testing.assert_close(
        {name: whole[name] for name in expected}, expected, rtol=tolerance, atol=tolerance
    )
    assert_at_rest(model)


def train_alike(
    model: nn.Module,
    replica: nn.Module,
    steps: int = 4,
    tolerance: float = 1e-5,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
) -> None:
    """Train both; require equal losses and parameters."""
    expected = train(replica, optimizer(replica), steps)
    assert train(model, optimizer(model), steps) == pytest.approx(expected, rel=tolerance, abs=0)
    assert_same_parameters(model, replica, tolerance)


def classify(net: nn.Module, step: int) -> torch.Tensor:
    """Return the loss on this rank's images of the step."""
    x, y = images(step)
    return F.cross_entropy(net(x), y)


def like_a_replica(
    make: Callable[[], nn.Module] = OddNet,
    step: Callable[[nn.Module, int], object] = lambda net, number: classify(net, number).backward(),
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
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
    three_steps(replica, optimizers[0], step, average_gradients)
    three_steps(model, optimizers[1], step)
    assert_same_parameters(model, replica, tolerance)
    return model


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return whole parameters, buffers and optimizer state by name; state is shown as the parameters are."""
    found = shardtrain.full_state_dict(model)
    params = dict(model.named_parameters())
    states = {param: optimizer.state.get(param, {}) for param in params.values()}
    here = {key for state in states.values() for key, value in state.items() if value.ndim}
    by_rank = [here] * dist.get_world_size()
    dist.all_gather_object(by_rank, here)
    kept = {param: param.detach().clone() for param in params.values()}
    for key in sorted(set().union(*by_rank)):
        for param, state in states.items():
            param.data.copy_(state.get(key, torch.zeros_like(param)))
        whole = shardtrain.full_state_dict(model)
        found |= {f"{name} {key}": whole[name] for name in params}
    for param, value in kept.items():
        param.data.copy_(value)
    return found


def assert_at_rest(model: nn.Module) -> None:
    """Every parameter shows its piece, and nothing is gathered."""
    inside = shardtrain.introspect(model)
    assert inside.gathered == (0, 0)
    if not inside.transport.in_place:
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in inside.tensors
        }
        assert sum(storage.nbytes() for storage in storages.values()) <= inside.shard_bytes
    sharded = [param for name, param in model.named_parameters() if name in inside.unit_of_parameter]
    assert sum(param.nbytes for param in sharded) <= sum(unit.local_bytes for unit in inside.units)
    assert all(param.grad is None or param.grad.shape == param.shape for param in sharded)


def hosts(of_ranks: list[int]) -> Any:
    """Simulate hosts in a ``with``: ``of_ranks`` has the number of each rank's."""
    return patch.dict(os.environ, SHARDTRAIN_HOST_KEY=f"host {of_ranks[dist.get_rank()]}")


def mesh(replicate: int, group: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicate, group), mesh_dim_names=("replicate", "shard"))


def raised_soon(error: type[Exception], body: Callable[[], object]) -> str:
    """Return the text of the ``error`` that ``body`` raises, within 10 s, or 100 on a busy machine."""
    started = time.monotonic()
    with pytest.raises(error) as caught:
        body()
    assert time.monotonic() - started < 100
    return str(caught.value)


def until(holds: Callable[[], object]) -> None:
    """Wait until ``holds()``; fail after far more time than any machine takes."""
    deadline = time.monotonic() + 100
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@contextlib.contextmanager
def clock() -> Iterator[Callable[[float], None]]:
    """Yield what lets seconds pass on ``time.perf_counter``, which goes on as usual otherwise."""
    passed: list[float] = []
    usual = time.perf_counter
    with patch("time.perf_counter", lambda: usual() + sum(passed)):
        yield passed.append


def tree_sum(parts: Sequence[torch.Tensor], add: Callable[..., torch.Tensor] = torch.add) -> torch.Tensor:
    """Sum in pairs, then the sums in pairs; the last of an odd number waits: ``((0 + 1) + (2 + 3)) + 4``."""
    while len(parts) > 1:
        parts = [reduce(add, parts[at : at + 2]) for at in range(0, len(parts), 2)]
    return parts[0]


def mean_in_a_tree(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average as DDP, summed in the engine's order, so that fp32 results can be compared exactly."""
    own = bucket.buffer()
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tree_sum(parts) / len(parts))
    return future


class _EndsOfOperations(TorchDispatchMode):
    """Mark in a profile where each operation ends."""

    NAME = "an operation ends"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        with torch.autograd.profiler.record_function(self.NAME):
            return result


def allocated(step: Callable[[], object]) -> int:
    """Return the most that the CPU's allocator had given out at the end of an operation of ``step()``.

    Counted above what it had given out before. Scratch memory of kernels, which depends on the processor, is
    not counted: it is free again at the end of the operation.
    """
    with torch.autograd.profiler.profile(profile_memory=True) as profile, _EndsOfOperations():
        step()
    events = sorted(profile.kineto_results.events(), key=lambda event: event.start_ns())
    held = 0
    most = 0
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
        elif event.name() == _EndsOfOperations.NAME:
            most = max(most, held)
    return most

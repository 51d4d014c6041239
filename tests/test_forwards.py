"""What runs inside units: compiled forwards, activations computed again, and both together."""

from __future__ import annotations

import contextlib
import copy
import shutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import VisionTransformer
from torchvision.models.vision_transformer import EncoderBlock

import shardtrain
from shardtrain import comm

from small import (
    Block,
    OddNet,
    assert_at_rest,
    assert_same_parameters,
    images,
    sgd,
    shard,
    sharded_and_replica,
)

Ranks = Callable[..., list[Any]]
Inside = Callable[[nn.Module], None]
worlds = pytest.mark.parametrize("world", [1, 2, 3])
BF16 = shardtrain.Precision(param=torch.bfloat16, output=torch.float32)


class Dropping(OddNet):
    """With a random draw, and a norm whose statistics depend on how many batches it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(DroppingBlock(7), DroppingBlock(7))


class DroppingBlock(Block):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm.momentum = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.3, self.training)


class Vit(VisionTransformer):
    """On 5×5 images. Without dropout, which aot_eager cannot differentiate behind attention."""

    def __init__(self) -> None:
        super().__init__(5, 1, 2, 3, 9, 19, num_classes=5)


MODELS = {OddNet: Block, Vit: EncoderBlock, Dropping: DroppingBlock}


def compiled(model: nn.Module) -> None:
    shardtrain.compile_units(model, backend="aot_eager")


checkpointed = shardtrain.checkpoint_activations


def both(model: nn.Module) -> None:
    compiled(model)
    checkpointed(model)


@contextlib.contextmanager
def fresh_compiler() -> Iterator[dict[str, int]]:
    """Torch's counts of what it compiles in here, from zero. Nothing compiled is left behind."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        # Torch asks for it itself; by default it keeps the warning from users, too.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf Tensor")
        yield counters["stats"]
    assert not counters["graph_break"]
    torch._dynamo.reset()


def optimize(
    model: nn.Module, steps: int, no_sync: Any, clip: Any, after: Callable[[int], None]
) -> list[float]:
    """Steps of two micro-batches, clipped; this rank's losses."""
    optimizer, losses = sgd(model), []
    for step in range(steps):
        torch.manual_seed(step)
        for micro in range(2):
            x, y = images(2 * step + micro)
            with no_sync() if micro == 0 else contextlib.nullcontext():
                loss = F.cross_entropy(model(x), y)
                (loss / 2).backward()
            losses.append(loss.item())
        clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        after(step)
    return losses


def train(model: nn.Module, after: Callable[[int], None] = lambda step: None) -> list[float]:
    def clip(norm: float) -> Any:
        return shardtrain.clip_grad_norm_(model, norm)

    return optimize(model, 3, lambda: shardtrain.no_sync(model), clip, after)


def train_replica(replica: DistributedDataParallel) -> list[float]:
    return optimize(
        replica,
        3,
        replica.no_sync,
        lambda norm: nn.utils.clip_grad_norm_(replica.parameters(), norm),
        lambda step: None,
    )


def equals_plain_and_ddp(make: type[nn.Module], inside: Inside, bf16: bool, reshard: bool) -> None:
    options = {"precision": BF16 if bf16 else None, "reshard_after_forward": reshard, "units": [MODELS[make]]}
    model, replica = sharded_and_replica(make, **options)
    plain, _ = sharded_and_replica(make, **options)
    with fresh_compiler() as stats:
        inside(model)
        graphs: list[int] = []
        losses = train(model, after=lambda step: graphs.append(stats["unique_graphs"]))
    assert graphs[1] == graphs[2]  # nothing is compiled after the second step
    rounding = 5e-2 if bf16 else 1e-5
    # A compiled backward adds up what comes from attention's inputs in another order.
    exact = make is not Vit or not graphs[2]
    assert losses == pytest.approx(train(plain), rel=0 if exact else rounding, abs=0 if exact else rounding)
    ours, theirs = shardtrain.full_state_dict(model), shardtrain.full_state_dict(plain)
    for name, value in ours.items():
        torch.testing.assert_close(
            value, theirs[name], rtol=0 if exact else rounding, atol=0 if exact else rounding
        )
    assert losses == pytest.approx(train_replica(replica), rel=rounding)
    assert_same_parameters(model, replica, rounding)


@worlds
@pytest.mark.parametrize(("make", "inside"), [(OddNet, compiled), (Dropping, checkpointed)])
def test_units_compute_what_others_do(
    ranks: Ranks, world: int, make: type[nn.Module], inside: Inside
) -> None:
    """Bit for bit, with micro-batches, clipping, dropout, running statistics; and what DDP computes."""
    ranks(world, equals_plain_and_ddp, make, inside, False, True)


@pytest.mark.parametrize(
    ("make", "inside", "bf16", "reshard"),
    [
        (Vit, compiled, False, True),
        (Vit, checkpointed, False, True),
        (Vit, both, True, True),
        (OddNet, compiled, True, False),
        (OddNet, checkpointed, True, True),
        (Dropping, both, False, False),
    ],
)
def test_the_same_in_bf16_with_kept_parameters_and_with_both(
    ranks: Ranks, make: type[nn.Module], inside: Inside, bf16: bool, reshard: bool
) -> None:
    ranks(2, equals_plain_and_ddp, make, inside, bf16, reshard)

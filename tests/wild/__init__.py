"""Models and loops of well-known packages, as people write them, against a replica averaged by hand.

They need ``pip install -e ".[wild]"``. Models come from configurations: nothing is downloaded.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardtrain

from small import average_gradients, shard

PACKAGES = ["transformers", "timm", "peft", "torchmetrics"]
MISSING = [name for name in PACKAGES if find_spec(name) is None]
MARKS = [
    pytest.mark.long,
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(MISSING), reason=f'pip install -e ".[wild]": {", ".join(MISSING)} missing'),
]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def seed(step: int) -> None:
    """Seed what this rank draws in this step: its batch, its dropout masks."""
    torch.manual_seed(1000 * step + dist.get_rank())
    np.random.seed(1000 * step + dist.get_rank())  # timm's mixup


def like_a_replica(
    make: Callable[[], nn.Module],
    loss: Callable[[nn.Module], torch.Tensor],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    tolerance: float = 0.0,
    steps: int = 5,
) -> nn.Module:
    """Train ``make()`` sharded, and a replica with averaged gradients; require equal losses and parameters.

    ``tolerance`` is the largest difference allowed, relative to the largest value of the parameter.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the packages' own
        torch.manual_seed(0)
        replica = make()
        model = shard(copy.deepcopy(replica))
        losses: list[list[float]] = []
        for net in (replica, model):
            stepper = optimizer(net)
            losses.append([])
            for step in range(steps):
                seed(step)
                stepper.zero_grad()
                value = loss(net)
                value.backward()
                losses[-1].append(value.item())
                if net is replica:
                    average_gradients(net)
                stepper.step()
    assert losses[0][-1] != losses[0][0], "nothing was learnt"
    require_same(model, replica, tolerance)
    torch.testing.assert_close(losses[1], losses[0], rtol=tolerance, atol=tolerance)
    return model


def require_same(model: nn.Module, replica: nn.Module, tolerance: float = 0.0) -> None:
    whole = shardtrain.full_state_dict(model)
    wrong = {}
    for name, param in replica.named_parameters():
        difference = (whole[name] - param.detach()).abs().max()
        if not difference <= tolerance * param.detach().abs().max():
            wrong[name] = difference.item()
    assert not wrong, f"{len(wrong)} of {len(whole)} differ, by {dict(list(wrong.items())[:9])}"


def cases(names: Iterable[str], broken: Mapping[str, str]) -> list[Any]:
    """Return the names, those in ``broken`` marked as expected to fail for that reason."""
    marks = {
        name: [pytest.mark.xfail(strict="over shared memory" not in reason, reason=reason)]
        for name, reason in broken.items()
    }
    return [pytest.param(name, marks=marks.get(name, [])) for name in names]

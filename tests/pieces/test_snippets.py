"""Usual snippets on parameters between steps: right in value, or refused by the name of a function."""

import copy
import hashlib
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shardtrain

from pool import each_rank
from small import raised_soon, shard

# Of a weight. What is asked for is in the message.
REFUSED: dict[str, Callable[[Any], object]] = {
    "float": lambda p: float(p.norm()),
    "item": lambda p: p.norm().item(),
    "format": lambda p: f"{p.norm():.3f}",
    "mean": lambda p: p.mean().item(),
    "std": lambda p: p.std(),
    "var": lambda p: p.var(),
    "sum": lambda p: p.pow(2).sum(),
    "max": lambda p: p.abs().max(),
    "min": lambda p: p.min(),
    "histc": lambda p: torch.histc(p.detach(), 10),
    "numpy": lambda p: hashlib.sha256(p.detach().numpy().tobytes()),
    "array": lambda p: np.asarray(p.detach()),
    "hash_tensor": lambda p: torch.hash_tensor(p.detach()),
    "quantile": lambda p: torch.quantile(p.detach(), 0.9),
    "median": lambda p: p.median(),
    "topk": lambda p: p.flatten().topk(3),
    "matmul": lambda p: p.T @ p,
    "linalg_matrix_norm": lambda p: torch.linalg.matrix_norm(p, 2),
    "linalg_svdvals": lambda p: torch.linalg.svdvals(p),
    "norm": lambda p: p.norm(dim=1),
    "an index": lambda p: p[0],
    "tolist": lambda p: p.tolist(),
    "count_nonzero": lambda p: torch.count_nonzero(p),
    "all": lambda p: torch.isfinite(p).all(),
    "equal": lambda p: torch.equal(p, p.detach().clone()),
    "cosine_similarity": lambda p: F.cosine_similarity(p.flatten(), p.detach().flatten(), dim=0),
    "div": lambda p: p.detach() / p.norm(),
    "randn_like": lambda p: p.detach().add_(torch.randn_like(p)),
    "renorm": lambda p: torch.renorm(p, 2, 0, 0.1),
    "pickle": lambda p: pickle.dumps(p),
    "all_reduce": lambda p: dist.all_reduce(p.data),
    "broadcast": lambda p: dist.broadcast(p.data, 0),
    "kaiming_uniform_": lambda p: nn.init.kaiming_uniform_(p),
    "normal_": lambda p: nn.init.normal_(p),
}


@each_rank(2, transport="shared")
def test_snippets_that_would_answer_for_one_rank_are_refused() -> None:
    model = shard(nn.Linear(5, 9))
    before = shardtrain.full_state_dict(model)
    for name, use in REFUSED.items():
        text = raised_soon(ValueError, lambda use=use: use(model.weight))
        # Torch 2.11 asks the class of what a broadcast moves in C++, where it has no name.
        assert name.strip("_") in text or text.startswith("a collective()"), (name, text)
        assert "shard" in text, (name, text)
    after = shardtrain.full_state_dict(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def averaged(params: list[nn.Parameter]) -> list[Tensor]:
    return [copy.deepcopy(param).detach().lerp_(param.detach() * 2, 0.25) for param in params]


# Of all parameters: numbers that are those of the whole model, and changes.
NUMBERS: dict[str, Callable[[list[nn.Parameter]], float]] = {
    "numel": lambda params: sum(param.numel() for param in params),
    "bytes": lambda params: sum(param.numel() * param.element_size() for param in params),
    "norm of norms": lambda params: torch.stack([param.detach().norm() for param in params]).norm().item(),
}
CHANGES: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "decay": lambda params: [param.mul_(0.9) for param in params],
    "clamp": lambda params: [param.data.clamp_(-0.1, 0.1) for param in params],
    "lists": lambda params: torch._foreach_mul_(params, 0.5),
    "zeros": lambda params: [nn.init.zeros_(param) for param in params],
    "sign": lambda params: [param.data.copy_(param.sign()) for param in params],
    "average": lambda params: [
        param.copy_(mean) for param, mean in zip(params, averaged(params), strict=True)
    ],
}


@pytest.mark.parametrize("name", [*NUMBERS, *CHANGES])
@each_rank(1, 2, transport="auto")
def test_snippets_that_are_right(name: str) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(5, 9)
    model = shard(copy.deepcopy(plain))
    if name in NUMBERS:
        results = [NUMBERS[name]([*net.parameters()]) for net in (model, plain)]
        torch.testing.assert_close(*results)
        return
    with torch.no_grad():
        for net in (model, plain):
            CHANGES[name]([*net.parameters()])
    after = shardtrain.full_state_dict(model)
    assert all(torch.equal(after[key], value) for key, value in plain.state_dict().items())


@each_rank(1, transport="auto")
def test_one_rank_shows_parameters_in_their_own_shapes() -> None:
    """So that all is right there, rows included."""
    model = shard(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))
    assert model.weight.shape == (4, 3, 3, 3)
    assert len(eval("[*model.parameters()]", {"model": model})) == 2  # as timeit(globals=...) calls it
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    model(torch.ones(1, 3, 5, 5)).sum().backward()
    assert model.weight.grad.shape == (4, 3, 3, 3)

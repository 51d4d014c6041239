"""The class of a parameter: of a piece whenever it shows a shard, its own whenever it is whole."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardtrain
from shardtrain.pieces.parameter import PieceParameter
from shardtrain.pieces.piece import Piece

from behaviours.rows import Net, Unit, batch
from pool import each_rank
from small import raised_soon, sgd, shard, sharded_and_replica


class Watched(torch.optim.SGD):
    """SGD that notes the classes that parameters have in a step."""

    seen: set[type]

    def step(self, closure: Any = None) -> Any:
        self.seen |= {type(param) for param in self.param_groups[0]["params"]}
        return super().step(closure)


@each_rank(1, 2, transport="auto")
def test_what_a_parameter_shows_decides_its_class() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        weights = [block.inside.weight for block in self.blocks]
        assert all(isinstance(weight, PieceParameter) for weight in weights)
        y = self.head(self.blocks[0](self.stem(x)))
        assert type(self.head.weight) is nn.Parameter  # the root's is whole
        return y

    def unit(self: Any, x: torch.Tensor) -> torch.Tensor:
        assert type(self.inside.weight) is nn.Parameter
        return self.norm(self.inside(x))

    model = shard(Net(unit=unit, root=forward), units=[Unit])
    params = [*model.parameters()]

    def at_rest() -> bool:
        return all(isinstance(param, PieceParameter) and isinstance(param, nn.Parameter) for param in params)

    assert at_rest()
    kept = [param.norm() for param in params]  # whose nodes in autograd are not the parameters'
    x = batch(0).requires_grad_()
    inside = set[type]()
    x.register_hook(lambda grad: inside.update(map(type, params)))
    model(x).sum().backward()
    assert len(kept) == len(params)
    assert inside == {nn.Parameter}
    assert at_rest()
    optimizer = shardtrain.trusted(Watched(params, lr=0.1))
    optimizer.seen = set()
    optimizer.step()
    assert optimizer.seen == {nn.Parameter}
    assert at_rest()
    with shardtrain.unsharded(model):
        assert {*map(type, params)} == {nn.Parameter}
    assert at_rest()
    with pytest.raises(RuntimeError):
        model(batch(0)[:, :2])
    assert at_rest()


def average(net: nn.Module, teacher: nn.Module) -> None:
    with torch.no_grad():
        for ours, theirs in zip(net.parameters(), teacher.parameters(), strict=True):
            theirs.mul_(0.9).add_(ours, alpha=0.1)
            theirs.lerp_(ours, 0.1)


@each_rank(2, transport="auto")
def test_a_teacher_that_is_sharded_alike_is_averaged_by_hand() -> None:
    model, replica = sharded_and_replica(Net, units=[Unit])
    teacher, expected = sharded_and_replica(Net, units=[Unit])
    for net, other in ((model, teacher), (replica, expected)):
        optimizer = sgd(net)
        copies = [copy.deepcopy(param) for param in net.parameters()]
        net(batch(0)).square().mean().backward()
        optimizer.step()
        average(net, other)
        with torch.no_grad():
            for param, kept in zip(net.parameters(), copies, strict=True):
                kept.lerp_(param, 0.5)
                param.copy_(kept)
    for ours, theirs in ((model, replica), (teacher, expected)):
        wholes = dict(shardtrain.full_weights(ours))
        for name, param in theirs.module.named_parameters():
            torch.testing.assert_close(wholes[name], param.data, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", ["even", "whole"])
@each_rank(2, transport="auto")
def test_a_parameter_has_the_elements_of_the_whole_on_each_rank(layout: Any) -> None:
    model = shard(nn.Linear(5, 4), layout=layout)
    assert [param.numel() for param in model.parameters()] == [20, 4]


# `test_snippets.py` has more.
REFUSED: dict[str, Callable[[nn.Parameter], object]] = {
    "requires_grad of ": lambda p: nn.Parameter(p.detach()),
    "a parameter of a sharded model": lambda p: torch.save([p], io.BytesIO()),
    "pickle of ": lambda p: pickle.dumps(p.detach()),
}


@each_rank(2, transport="auto")
def test_what_would_answer_for_one_rank_is_refused() -> None:
    model = shard(nn.Linear(5, 4))
    for says, use in REFUSED.items():
        assert raised_soon(ValueError, lambda use=use: use(model.weight)).startswith(says)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place"):
        model.weight.mul_(2)
    assert isinstance(model.weight * 2, Piece)
    average = torch.zeros(model.weight.shape)  # plain, until it takes a piece
    average.lerp_(model.weight.detach(), 0.5)
    assert "mean of weight" in raised_soon(ValueError, average.mean)


@each_rank(2, transport="auto")
def test_a_model_that_is_materialised_has_pieces_once_it_is_looked_at() -> None:
    with torch.device("meta"):
        model = nn.Linear(5, 4)
    shard(model).to_empty(device="cpu")
    dict(shardtrain.full_weights(model))
    assert "mean of weight" in raised_soon(ValueError, model.weight.mean)

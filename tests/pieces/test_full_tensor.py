"""``full_tensor()``: of a parameter at rest, a gradient, what is computed of them by element, and norms."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardtrain
from shardtrain.layout import Policy
from shardtrain.pieces.part import strided
from shardtrain.pieces.piece import Piece

from pool import each_rank
from small import Block, OddNet, average_gradients, classify, raised_soon, shard


def pair(layout: Policy) -> tuple[nn.Module, nn.Module]:
    """Return a sharded model and an unsharded one, each after a backward; gradients are means over ranks."""
    torch.manual_seed(0)
    plain = OddNet().to(memory_format=torch.channels_last)
    plain.fc.weight.data[0, 0] = -0.0
    model = shard(copy.deepcopy(plain), units=[Block], layout=layout)
    for net in (plain, model):
        classify(net, 0).backward()
    average_gradients(plain)
    return model, plain


@pytest.mark.parametrize("layout", ["even", "whole"])
@each_rank(1, 3, transport="auto")
def test_whole_parameters_are_equal_bit_by_bit(layout: Policy) -> None:
    model, plain = pair(layout)
    for name, param in model.named_parameters():
        expected = plain.get_parameter(name).detach()
        whole = param.full_tensor()
        assert type(whole) is Tensor
        assert whole.stride() == expected.stride()
        assert torch.equal(*[each.reshape(-1).view(torch.uint8) for each in (whole, expected)])
        if isinstance(param.detach(), Piece):
            assert torch.equal((param.detach() * 2).bfloat16().full_tensor(), (expected * 2).bfloat16())


@each_rank(2, transport="auto")
def test_whole_gradients_and_norms() -> None:
    model, plain = pair("even")
    for name, param in model.named_parameters():
        expected = plain.get_parameter(name)
        torch.testing.assert_close(param.grad.full_tensor(), strided(expected.grad, expected.stride()))
        torch.testing.assert_close(param.grad.norm().full_tensor(), expected.grad.norm())
        torch.testing.assert_close(torch.linalg.vector_norm(param, 1).full_tensor(), expected.norm(1).data)
    total = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.testing.assert_close(total.full_tensor(), nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    assert type(total.full_tensor()) is Tensor
    assert f"{total:.2f}" == f"{total.item():.2f}"
    torch.testing.assert_close(model.fc.weight.grad.full_tensor(), plain.fc.weight.grad)
    for look in (
        lambda: model.fc.weight.grad.flatten().full_tensor(),
        lambda: torch.stack([model.fc.weight.norm(), model.fc.bias.norm()]).full_tensor(),
    ):
        assert raised_soon(ValueError, look).startswith("full_tensor() of ")
    with shardtrain.no_sync(model):
        classify(model, 1).backward()
    model.zero_grad()
    with shardtrain.no_sync(model):
        classify(model, 1).backward()
    assert "that wait under no_sync" in raised_soon(ValueError, model.fc.weight.grad.full_tensor)


def frames(call: Callable[[], object]) -> int:
    """Return how many functions of Python ``call`` calls, in this thread."""
    count = 0

    def profile(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


@each_rank(2)
def test_clipping_asks_the_class_of_a_piece_once() -> None:
    """14 parameters: 786 calls of Python were needed when each piece was asked."""
    model, _ = pair("even")
    with torch.no_grad():
        shardtrain.clip_grad_norm_(model, 1.0)
    assert frames(lambda: shardtrain.clip_grad_norm_(model, 0.01)) < 400

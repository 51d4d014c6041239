"""Ranks on several hosts, which are simulated on this one by a forced key: ranks of one key share memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardtrain
from shardtrain import checkpoint, comm
from shardtrain.comm.movement import ENTER, LEAVE
from shardtrain.comm.transport import Flat, Gradient, Tag
from shardtrain.engine.hooks import engine_of
from shardtrain.layout import even

from pool import each_rank
from small import Block, OddNet, assert_at_rest, raised_soon, sgd, train

BLOCKS, INTERLEAVED = [0, 0, 1, 1], [0, 1, 0, 1]  # the host of each rank


@contextmanager
def hosts(of_ranks: list[int]) -> Iterator[None]:
    os.environ["SHARDTRAIN_HOST_KEY"] = f"host {of_ranks[dist.get_rank()]}"
    try:
        yield
    finally:
        del os.environ["SHARDTRAIN_HOST_KEY"]


def sharded(of_ranks: list[int]) -> nn.Module:
    torch.manual_seed(0)
    with hosts(of_ranks):
        return shardtrain.shard(OddNet(), units=[Block])


def trained(of_ranks: list[int]) -> tuple[type, list[float], dict[str, torch.Tensor], dict[str, int]]:
    model = sharded(of_ranks)
    with comm.meter() as meter:
        losses = train(model, sgd(model), 6)
    assert_at_rest(model)
    weight = next(p for p in model.parameters() if p.numel())
    assert weight.untyped_storage().nbytes() > weight.nbytes  # memory is shared
    return type(engine_of(model).transport), losses, shardtrain.full_state_dict(model), dict(meter.bytes)


@each_rank(4, transport="auto")
def test_training_over_hosts_is_training() -> None:
    """Equal to one host's up to the order of sums, equal to itself bit for bit, the same bytes counted."""
    one, first, second, other = (trained(of) for of in ([0] * 4, BLOCKS, BLOCKS, INTERLEAVED))
    assert one[0] is comm.SharedMemoryTransport
    for transport, losses, state, sent in (first, second, other):
        assert transport is comm.HostsTransport
        assert losses == pytest.approx(one[1], rel=1e-5)
        torch.testing.assert_close(state, one[2], rtol=1e-4, atol=1e-6)
        assert sent == one[3]
    assert first[1] == second[1]
    assert all(torch.equal(first[2][name], second[2][name]) for name in first[2])


@pytest.mark.parametrize("of_ranks", [BLOCKS, INTERLEAVED])
@each_rank(4, transport="auto")
def test_movements_between_hosts_are_exact(of_ranks: list[int]) -> None:
    """Every rank's interval everywhere; the mean of the hosts' means, to the bit."""
    with hosts(of_ranks):
        transport = comm.open_transport("auto")
    layout = even([5, 9], 4, 2)
    like = torch.empty(0)
    full, local = transport.allocate(layout, like, torch.float32)
    transport.fence(ENTER)
    local.fill_(transport.rank + 0.5)
    transport.gather(Tag(1, "the unit"), [Flat(full, local, layout)]).wait()
    wanted = torch.cat([torch.full((layout.length(rank),), rank + 0.5) for rank in range(4)])
    assert torch.equal(full, wanted)

    def values(rank: int) -> torch.Tensor:
        return torch.randn(layout.padded, generator=torch.Generator().manual_seed(rank))

    pieces = layout.pieces(transport.rank)
    gradient = transport.gradient(layout, like)
    gradient.copy_(values(transport.rank))
    mine = gradient[layout.interval(transport.rank)].clone()
    own = [mine[piece.offset : piece.offset + piece.numel] for piece in pieces]
    taken = Gradient(gradient, own, layout, pieces)
    transport.reduce(Tag(2, "the unit"), [taken]).wait()
    members = [[rank for rank in range(4) if of_ranks[rank] == host] for host in (0, 1)]
    first, second = ((values(a) + values(b)) / 2 for a, b in members)
    mean = ((first + second) / 2)[layout.interval(transport.rank)]
    for piece, found in zip(pieces, taken.own, strict=True):
        assert torch.equal(found, mean[piece.offset : piece.offset + piece.numel])
    transport.fence(LEAVE)


@each_rank(4, transport="auto")
def test_state_goes_through_hosts_and_back(tmp_path: Path) -> None:
    path = tmp_path / "step"
    model = sharded(BLOCKS)
    train(model, sgd(model), 2)
    wanted = shardtrain.full_state_dict(model)
    checkpoint.save(path, model)
    with shardtrain.unsharded(model):
        for param in model.parameters():
            param.data.zero_()
    assert not any(shardtrain.full_state_dict(model)["fc.weight"].flatten())
    checkpoint.load(path, model)
    other = sharded([0] * 4)
    checkpoint.load(path, other)
    for found in (shardtrain.full_state_dict(model), shardtrain.full_state_dict(other)):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@each_rank(4, transport="auto")
def test_a_rank_on_another_path_is_named_on_every_host() -> None:
    """Rank 3 runs the two blocks in the other order."""
    model = sharded(BLOCKS)
    if dist.get_rank() == 3:
        first, second = model.blocks  # type: ignore[misc]
        model.blocks.forward = lambda x: first(second(x))
    text = raised_soon(comm.Diverged, lambda: train(model, sgd(model), 1))
    assert text.endswith(" are gathering blocks.0, rank 3 is gathering blocks.1"), text


@pytest.mark.parametrize(
    ("of_ranks", "why"),
    [
        ([0, 0, 1], "the hosts have different numbers of ranks: 2, 1"),
        ([0, 1, 2], "every rank is on a host of its own"),
    ],
)
@each_rank(3, transport="auto")
def test_hosts_that_cannot_share_fall_back_with_one_line(of_ranks: list[int], why: str) -> None:
    with patch.object(logging.getLogger("shardtrain"), "info") as told:
        transport = engine_of(sharded(of_ranks)).transport
    assert type(transport) is comm.ProcessGroupTransport
    messages = [call.args[0] % call.args[1:] for call in told.call_args_list]
    assert messages == ([f"not sharing memory between ranks: {why}"] if dist.get_rank() == 0 else [])
    with hosts(of_ranks):
        refusal = raised_soon(ValueError, lambda: shardtrain.shard(OddNet(), transport="shared_memory"))
    assert refusal == f"transport='shared_memory' is not possible: {why}"

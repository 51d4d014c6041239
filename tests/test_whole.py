"""Whole-parameter cuts: each parameter on one rank, and optimizers that need whole parameters on top."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn import functional as F

import shardtrain
from shardtrain import checkpoint, comm

from pool import each_rank
from small import (
    Block,
    OddNet,
    assert_at_rest,
    assert_same_parameters,
    images,
    shard,
    sharded_and_replica,
    train,
    whole_state,
)
from test_forwards import train as train_in_micro_batches
from test_hosts import BLOCKS, hosts
from test_muon import muon
from test_parity import adamw, momentum_sgd
from test_uses import Lars

Ranks = Callable[..., list[Any]]


# what is shown


@each_rank(2, 3)
def test_an_owner_shows_the_parameter_and_others_show_nothing_of_it() -> None:
    torch.manual_seed(0)
    plain = OddNet().to(memory_format=torch.channels_last)
    model = shard(copy.deepcopy(plain), layout="whole", units=[Block])
    assert_at_rest(model)
    for (name, param), full in zip(model.named_parameters(), plain.parameters(), strict=True):
        shape, owners = full.shape or (1,), torch.tensor(float(param.numel() > 0))
        dist.all_reduce(owners)
        assert owners == 1, name
        assert param.shape == (shape if param.numel() else (0, *(1 for _ in shape[1:]))), name
        if param.numel() and full.ndim:
            assert param.stride() == full.stride(), name
            assert torch.equal(param, full), name


@pytest.mark.parametrize(
    ("name", "world", "most"),
    [("resnet50", 8, 1.01), ("resnet50", 64, 5.91), ("vit_b_16", 8, 1.04), ("vit_b_16", 64, 1.75)],
)
def test_balance_of_known_models(name: str, world: int, most: float) -> None:
    """README's figures: the most of any rank, over total / world. At 64 that is the largest parameter."""
    with torch.device("meta"):
        model = getattr(torchvision.models, name)()
    share = sum(param.numel() for param in model.parameters()) / world
    shardtrain.shard(model, layout="whole", transport=comm.Simulated(0, world))
    held = shardtrain.introspect(model).bytes_by_rank
    assert max(held) / (4 * share) == pytest.approx(most, abs=0.005)
    infos = shardtrain.introspect(model).units
    assert sum(info.local_bytes for info in infos) == held[0]
    assert all(info.local_bytes <= info.most_bytes <= info.bytes + 16 for info in infos)


# the same results as with even cuts


def _leaves(_: str, module: nn.Module) -> bool:
    return next(module.children(), None) is None


class Uneven(nn.Module):
    """A weight tied across units, a frozen one, and a layer that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 7, 3)
        self.blocks = nn.Sequential(Block(7), Block(7))
        self.blocks[1].conv.weight = self.blocks[0].conv.weight
        self.rarely = nn.Linear(7, 7)
        self.fc = nn.Linear(7, 5)
        self.fc.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.stem(x)).mean((2, 3))
        return self.fc(x + self.rarely(x) if dist.get_rank() == 0 else x)


SCENES: dict[str, dict[str, Any]] = {
    "a step": {},
    "every leaf a unit": {"units": _leaves},
    "everything in the root, kept whole": {"units": [], "reshard_after_forward": False},
    "bf16": {"precision": shardtrain.Precision(torch.bfloat16)},
    "channels_last": {"make": lambda: OddNet().to(memory_format=torch.channels_last)},
    "tied, frozen, used on one rank": {"make": Uneven},
    "accumulated and clipped": {"steps": lambda model, _: train_in_micro_batches(model)},
}


@pytest.mark.parametrize("scene", SCENES)
@each_rank(4)
def test_what_even_cuts_do_whole_ones_do(scene: str) -> None:
    """Bit for bit. With a unit of one or two parameters some ranks have empty intervals."""
    found = []
    for layout in ("even", "whole"):
        options = {"make": OddNet, "steps": train, "units": [Block], **SCENES[scene]}
        make, steps = options.pop("make"), options.pop("steps")
        torch.manual_seed(0)
        model = shard(make(), layout=layout, **options)
        optimizer = adamw(model)
        losses = steps(model, optimizer)
        assert_at_rest(model)
        x, y = images(99)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with shardtrain.unsharded(model, grads=True):
            grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append((losses, shardtrain.full_state_dict(model), grads))
    (losses, state, grads), (ours, our_state, our_grads) = found
    exact = {"rtol": 0, "atol": 0} if scene != "accumulated and clipped" else {}  # a norm's sum has an order
    assert ours == pytest.approx(losses, rel=1e-6 if exact == {} else 0, abs=0)
    torch.testing.assert_close(our_state, state, **exact)
    torch.testing.assert_close(our_grads, grads, **exact)


@each_rank(2, 3)
def test_copies_edits_and_conversions() -> None:
    model, replica = sharded_and_replica(layout="whole")
    twin = copy.deepcopy(model)
    with shardtrain.unsharded(model), torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    assert_same_parameters(twin, replica, tolerance=0)
    with torch.no_grad():
        for param in replica.parameters():
            param.add_(1.0)
    assert_same_parameters(model, replica, tolerance=0)
    shardtrain.load_full_state_dict(model, shardtrain.full_state_dict(twin))
    model.double()
    model.float()
    expected = train(twin, momentum_sgd(twin), 2)
    assert train(model, momentum_sgd(model), 2) == expected
    mine = next(param for param in model.parameters() if param.ndim == 4)
    mine.data = torch.zeros(3, 3)
    message = r"stem.weight now has shape \(3, 3\) on this rank, but its local pie"
    with pytest.raises(ValueError, match=message):
        model(images(0)[0])


# traffic


@each_rank(2, 3)
def test_a_rank_sends_what_it_holds() -> None:
    """As many bytes as in a simulated world, and not as many as another rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sent = []
    for options in ({}, {"transport": comm.Simulated(rank, world)}):
        torch.manual_seed(0)
        model = shard(OddNet(), layout="whole", units=[Block], **options)
        with comm.meter() as meter:
            train(model, torch.optim.SGD(model.parameters(), lr=0.0), 1)
        sent.append(dict(meter.bytes))
        shares = shardtrain.introspect(model).bytes_by_rank
        assert meter.bytes["reduce_scatter"] == sum(shares) - shares[rank]
    assert sent[0] == sent[1]
    assert len(set(shares)) > 1


@each_rank(4, transport="auto")
def test_hosts_exchange_uneven_intervals() -> None:
    found = []
    for of_ranks in ([0] * 4, BLOCKS):
        torch.manual_seed(0)
        with hosts(of_ranks):
            model = shardtrain.shard(OddNet(), units=_leaves, layout="whole")
        found.append((type(shardtrain.introspect(model).transport), train(model, momentum_sgd(model))))
    assert found[1][0] is comm.HostsTransport
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-5)


# optimizers


class Clipping(torch.optim.SGD):
    """Clips by the norm of all parameters that it is given, which a rank has only some of."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


@each_rank(2, 3)
def test_optimizers_that_look_at_one_parameter_are_right_and_at_all_are_refused() -> None:
    refusals = []
    for kind in (torch.optim.Adafactor, torch.optim.Muon, Lars, torch.optim.LBFGS, Clipping):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(7, 7, bias=False), nn.Linear(7, 5, bias=False))
        twin, model = copy.deepcopy(plain), shard(plain, layout="whole", units=[nn.Linear])
        ours, theirs = kind(model.parameters(), lr=0.1), kind(twin.parameters(), lr=0.1)
        try:
            for _ in range(3):
                for net, optimizer in ((model, ours), (twin, theirs)):
                    optimizer.zero_grad()
                    loss = net(torch.ones(2, 7)).square().sum()
                    loss.backward()
                    optimizer.step(lambda loss=loss: loss)
            assert_same_parameters(model, twin, tolerance=1e-6)
        except ValueError as error:
            refusals.append(str(error))
    assert [text.split(" ", 1)[0] for text in refusals] == ["LBFGS", "Clipping"]
    assert all("this optimizer looks at all together" in text for text in refusals)


# checkpoints


MAKERS = {"adamw": adamw, "sgd": momentum_sgd, "muon": muon}


def saved(path: str, kind: str, layout: str) -> Any:
    torch.manual_seed(0)
    model = shard(OddNet().to(memory_format=torch.channels_last), units=[Block], layout=layout)
    optimizer = MAKERS[kind](model)
    train(model, optimizer, 2)
    checkpoint.save(path, model, optimizer)
    return whole_state(model, optimizer)


def loaded(path: str, kind: str, layout: str) -> Any:
    torch.manual_seed(5)
    model = shard(OddNet(), units=_leaves, layout=layout)
    optimizer = MAKERS[kind](model)
    checkpoint.load(path, model, optimizer)
    found = whole_state(model, optimizer)
    train(model, optimizer, 1)
    return found


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("muon", (2, "whole"), (3, "whole")),
        ("adamw", (2, "whole"), (3, "even")),
        ("sgd", (3, "even"), (2, "whole")),
    ],
)
def test_checkpoints_between_layouts_and_world_sizes(
    on_ranks: Ranks, tmp_path: Any, kind: str, before: tuple[int, str], after: tuple[int, str]
) -> None:
    path = str(tmp_path / "saved")
    state = on_ranks(before[0], saved, path, kind, before[1])[0]
    assert len(state) > 20
    for found in on_ranks(after[0], loaded, path, kind, after[1]):
        assert found.keys() == state.keys()
        odd = [name for name, value in state.items() if not torch.equal(found[name], value)]
        assert all("running_" in name for name in odd), "means over ranks are rounded, nothing else"

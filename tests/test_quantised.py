"""Gathers and reductions as int8: the bound on the error, the bytes, and models that train all the same."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shardtrain
from shardtrain import Precision, comm
from shardtrain.comm import Flat, Gradient, ProcessGroupTransport, Quantised, Simulated, Tag
from shardtrain.comm.quantised import BLOCK, decode, encode, packets_of
from shardtrain.layout import Layout, even

from pool import each_rank
from small import Block, OddNet, assert_at_rest, images, raised_soon
from test_precision import moved

INT8 = Precision(gather=torch.int8, reduce=torch.int8)
ZERO = 1e-37  # what fp32 may lose below its smallest normal numbers


def there_and_back(rows: torch.Tensor) -> torch.Tensor:
    """What [row, element] of fp32 become on their way."""
    packets = packets_of(even([rows.numel()], world=1, align=1))
    packet = torch.empty(1, packets.padded, dtype=torch.uint8)
    encode(rows.view(1, -1), packet)
    found = torch.empty(1, rows.numel())
    decode(packet, found)
    return found.view_as(rows)


def by_hand(interval: torch.Tensor) -> torch.Tensor:
    """The same, a block after another, in plain words."""
    scales = largest(interval) / 127
    return torch.where(scales > 0, torch.round(interval / scales) * scales, interval)


def bound(interval: torch.Tensor) -> torch.Tensor:
    """What each element may be off by: 1/254 of its block's largest, and fp32's rounding."""
    return largest(interval) / 254 * (1 + 1e-5) + ZERO


def largest(interval: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each element's block."""
    found = interval.clone()
    for block in found.split(BLOCK):
        block.copy_(block.abs().max() if len(block) else block)
    return found


numbers = st.floats(-(2.0**126), 2.0**126, width=32)


@given(st.lists(numbers, min_size=1, max_size=40), st.sampled_from([1, 7, 20]))
def test_an_element_is_off_by_half_a_scale_at_most(values: list[float], times: int) -> None:
    interval = torch.tensor(values).repeat(times)
    found = there_and_back(interval)
    assert ((found - interval).abs() <= bound(interval)).all()
    minus_zero = interval.eq(0) & interval.signbit()
    assert torch.equal(found.eq(0) & found.signbit(), minus_zero)


@given(st.lists(numbers, max_size=20), st.sampled_from([math.inf, -math.inf, math.nan]), st.integers(0, 20))
def test_what_is_not_finite_does_not_vanish(values: list[float], bad: float, where: int) -> None:
    values.insert(where, bad)
    found = there_and_back(torch.tensor([*values, -0.0]))
    assert not found[:-1][torch.tensor([v != 0 or math.copysign(1, v) > 0 for v in values])].isfinite().any()
    assert found[-1] == 0


# between ranks


def open_quantised() -> Quantised:
    link = comm.open_transport("process_group")
    assert isinstance(link, ProcessGroupTransport)
    return Quantised(link)


def from_all(tensor: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts


def uneven(world: int) -> Layout:
    """Intervals of 300, 7, 0 and 520 elements."""
    bounds = [0, 300, 307, 307, 827][: world + 1]
    return Layout((bounds[-1],), (0,), tuple(bounds))


def gathers(link: Quantised, layout: Layout, dtype: torch.dtype) -> None:
    """Every rank holds the same values, also of its own interval; what is not quantised is exact."""
    rank, world = dist.get_rank(), layout.world
    torch.manual_seed(0)
    exact = (torch.randn(layout.padded) * torch.logspace(-4, 4, layout.padded)).to(dtype)
    local = exact[layout.interval(rank)]
    flats = [Flat(torch.empty_like(exact), local.clone(), layout, low) for low in (True, False, True)]
    with comm.meter() as meter:
        link.gather(Tag(0, "unit"), flats).wait()
    rounded = torch.cat([by_hand(exact[layout.interval(r)].float()) for r in range(world)]).to(dtype)
    for flat, expected in zip(flats, (rounded, exact, rounded), strict=True):
        assert torch.equal(flat.full, expected)
    own = 2 * packets_of(layout).length(rank) + local.nbytes
    assert meter.bytes == {"all_gather": own * (world - 1)}


def reduces(link: Quantised, layout: Layout, dtype: torch.dtype) -> None:
    """The mean is, bit for bit, what it is by hand; this rank's own gradient is not rounded."""
    rank, world = dist.get_rank(), layout.world
    torch.manual_seed(rank)
    mine, interval = torch.randn(layout.padded).to(dtype), layout.interval(rank)
    mine[layout.numel :] = 0
    theirs = [full[interval] for full in from_all(mine)]
    pieces = layout.pieces(rank)
    gradients = []
    for quantised in (True, False):
        own = [mine[interval].float()[p.offset : p.offset + p.numel] for p in pieces]
        full = mine.clone()
        full[layout.numel :] = full[interval] = math.nan  # what nobody has written
        gradients.append(Gradient(full, own, layout, pieces, quantised))
    with comm.meter() as meter:
        link.reduce(Tag(128, "unit"), gradients).wait()
    for gradient in gradients:
        total = torch.zeros(layout.length(rank))
        for other, part in enumerate(theirs):
            total += part if other == rank or not gradient.quantised else by_hand(part.float())
        assert torch.equal(
            torch.cat([*gradient.own, total.new_empty(0)]), (total / world)[: sum(p.numel for p in pieces)]
        )
    parts = [packets_of(layout).length(r) + layout.length(r) * dtype.itemsize for r in range(world)]
    assert meter.bytes == {"reduce_scatter": sum(parts) - parts[rank]}


@each_rank(3, 4, transport="auto")
def test_movements_between_ranks() -> None:
    world, link = dist.get_world_size(), open_quantised()
    layouts = [even([1031], world, 4), even([5], world, 4), even([4 * BLOCK * world], world, 4)]
    for layout in [*layouts, uneven(world)]:
        for dtype in (torch.float32, torch.bfloat16):
            gathers(link, layout, dtype)
            reduces(link, layout, dtype)


@each_rank(4, transport="auto")
def test_int8_moves_a_quarter_of_the_bytes() -> None:
    """(1 + 4 / block) / 4 of fp32's bytes where whole blocks fill the intervals; either movement alone."""
    bytes_of = partial(moved, units=[], transport="process_group")
    gathered, reduced = bytes_of(Precision())
    low = [int(size * (1 + 4 / BLOCK) / 4) for size in (gathered, reduced)]
    assert bytes_of(Precision(gather=torch.int8)) == (low[0], reduced)
    assert bytes_of(Precision(reduce=torch.int8)) == (gathered, low[1])
    assert bytes_of(INT8) == (low[0], low[1])
    halved = Precision(torch.bfloat16, reduce=torch.int8)
    assert bytes_of(halved) == (gathered // 2, low[1])


# the engine


@each_rank(3, transport="auto")
def test_units_compute_with_rounded_matrices_and_all_else_stays_exact() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(75, 37), nn.BatchNorm1d(37), nn.ReLU(), nn.Linear(37, 11))
    model = shardtrain.shard(copy.deepcopy(plain), units=[nn.Linear], precision=INT8)
    seen: dict[str, torch.Tensor] = {}

    def note(module: nn.Module, _: Any, at: str) -> None:
        seen.update({f"{at}.{name}": param.clone() for name, param in module.named_parameters()})

    for name, module in model.named_children():
        module.register_forward_pre_hook(partial(note, at=name))
    model(images(0)[0].flatten(1)).square().sum().backward()
    exact = dict(plain.named_parameters())
    rounded = {name for name, param in exact.items() if not torch.equal(seen[name], param)}
    assert rounded == {"0.weight", "3.weight"}
    mine = torch.cat([seen[name].flatten() for name in seen])
    assert all(torch.equal(other, mine) for other in from_all(mine)), "all ranks compute with the same"
    whole = shardtrain.full_state_dict(model)
    assert all(torch.equal(whole[name], value) for name, value in exact.items())
    with shardtrain.unsharded(model):
        assert all(torch.equal(param, exact[name]) for name, param in model.named_parameters())
    assert_at_rest(model)


@each_rank(3, transport="auto")
def test_a_gradient_that_is_not_finite_is_seen_by_all() -> None:
    """An infinity on one rank reaches the owner, and everyone's norm."""
    model = shardtrain.shard(OddNet(), units=[Block], precision=INT8)
    model(images(0)[0] * (math.inf if dist.get_rank() == 1 else 1)).sum().backward()
    assert not shardtrain.clip_grad_norm_(model, 1.0).isfinite()


def test_a_single_rank_rounds_nothing() -> None:
    torch.manual_seed(0)
    plain = OddNet()
    model = shardtrain.shard(copy.deepcopy(plain), precision=INT8)
    x, _ = images(0, rank=0)
    assert torch.equal(model(x), plain(x))


@each_rank(2, transport="auto")
def test_int8_over_memory_that_is_shared_is_refused() -> None:
    shard = partial(shardtrain.shard, OddNet(), transport="shared_memory", precision=INT8)
    message = "int8 gathers and reductions need transport='process_group', got"
    assert raised_soon(ValueError, shard).startswith(f"{message} SharedMemoryTransport: ranks")
    with pytest.raises(ValueError, match=f"{message} Simulated"):
        Quantised(Simulated(0, 2, in_place=True))

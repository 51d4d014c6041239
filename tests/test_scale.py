"""Large worlds in one process: what a rank holds, sends and does there. Nothing here asserts on a time."""

from __future__ import annotations

import cProfile
import pstats
from typing import Any

import pytest
import torch
import torchvision
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardtrain
from shardtrain import comm
from shardtrain.bench import host
from shardtrain.bench.contenders import BLOCKS
from shardtrain.bench.host import simulated_group
from shardtrain.plan.simulate import held_by_rows

from small import Block, OddNet, TwoPaths, sgd


@pytest.mark.parametrize(
    ("name", "flat", "rows"), [("resnet50", 1.0015, 2.309), ("vit_h_14", 1.0003, 1.801)], ids=str
)
def test_what_1024_ranks_hold_beyond_an_even_share(name: str, flat: float, rows: float) -> None:
    """The flat vector within 1.01 of the ideal; cut on first dimensions it is about twice as much."""
    with torch.device("meta"):
        model = torchvision.models.get_model(name)
    whole = sum(param.nbytes for param in model.parameters())
    by_rows = held_by_rows(model.parameters(), 1024)
    with simulated_group(1024):
        infos = shardtrain.introspect(shardtrain.shard(model)).units
    held = sum(info.local_bytes for info in infos)
    assert held * 1024 / whole == pytest.approx(flat, abs=1e-3)
    assert by_rows * 1024 / whole == pytest.approx(rows, abs=1e-3)


def test_rows_are_what_fsdp2_holds() -> None:
    with torch.device("meta"):
        model = torchvision.models.resnet18()
    by_rows = held_by_rows(model.parameters(), 1024)
    with simulated_group(1024):
        for module in model.modules():
            if isinstance(module, BLOCKS):
                fully_shard(module)
        fully_shard(model)
        assert sum(param.to_local().nbytes for param in model.parameters()) == by_rows  # type: ignore[attr-defined]


def test_rows_of_odd_parameters() -> None:
    odd = [torch.zeros(4, 3), torch.tensor(1.0), torch.zeros(0, 3)]
    assert held_by_rows(odd, 3) == (2 * 3 + 1) * 4
    assert held_by_rows(odd, 1) == 13 * 4


def traffic(model: nn.Module) -> comm.Meter:
    """Of the second step, when the order of the units is known."""
    optimizer = sgd(model)
    for _ in range(2):
        with comm.meter() as meter:
            model(torch.randn(2, 3, 5, 5)).sum().backward()
        shardtrain.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return meter


@pytest.mark.parametrize("world", [8, 1024])
def test_a_step_sends_what_the_layouts_say(world: int) -> None:
    """As many movements in any world; a rank sends each of its shards to all others, and a plan says so."""
    with simulated_group(world):
        model = shardtrain.shard(OddNet(), units=[Block])
        meter = traffic(model)
        infos = shardtrain.introspect(model).units
    assert meter.calls == {"all_gather": 5, "reduce_scatter": 3}
    root, *blocks = [info.local_bytes * (world - 1) for info in infos]
    assert meter.bytes == {"all_gather": root + 2 * sum(blocks), "reduce_scatter": root + sum(blocks)}
    planned = traffic(shardtrain.shard(OddNet(), units=[Block], transport=comm.Simulated(0, world)))
    assert (planned.calls, planned.bytes) == (meter.calls, meter.bytes)


def calls_of(work: Any) -> int:
    """Python and C functions that ``work()`` calls."""
    profile = cProfile.Profile()
    profile.runcall(work)
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def test_the_host_does_as_much_for_1024_ranks_as_for_8() -> None:
    """Counted in functions called: in a step, which depends on the units alone, and in wrapping."""
    batch = torch.randn(2, host.WIDTH)
    found = {}
    for world in (8, 1024):
        with simulated_group(world):
            plain = nn.Sequential(*(host.Block() for _ in range(6)))
            wrapping = calls_of(lambda plain=plain: shardtrain.shard(plain, units=[host.Block]))
            for _ in range(3):
                step = calls_of(lambda model=plain: model(batch).sum().backward())
                plain.zero_grad()
            found[world] = step, wrapping
    assert found[1024][0] == found[8][0]
    assert found[1024][1] < 1.1 * found[8][1]


INT8 = shardtrain.Precision(gather=torch.int8, reduce=torch.int8)


@pytest.mark.parametrize(("rank", "world"), [(5, 8), (1023, 1024)])
@pytest.mark.parametrize(
    ("groups", "options"), [(1, {}), (1, {"layout": "whole"}), (1, {"precision": INT8}), (2, {})]
)
def test_a_step_runs_in_a_simulated_world(
    rank: int, world: int, groups: int, options: dict[str, Any]
) -> None:
    """Whole parameters have uneven intervals, most of them empty, and move by other collectives."""
    with simulated_group(world, rank):
        mesh = init_device_mesh("cpu", (groups, world // groups)) if groups > 1 else None
        model = shardtrain.shard(OddNet(), units=[Block], mesh=mesh, **options)
        expected = {"all_gather": 5, "reduce_scatter": 3} | ({"all_reduce": 3} if groups > 1 else {})
        assert traffic(model).calls == expected
        assert list(shardtrain.full_state_dict(model)) == list(OddNet().state_dict())
        shardtrain.load_full_state_dict(model, OddNet().state_dict())


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_transport_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch, replicas: int) -> None:
    class Mine(comm.Simulated):
        pass

    opened = lambda opening: Mine(opening.inside.rank(), opening.inside.size())  # noqa: E731
    monkeypatch.setitem(comm.TRANSPORTS, "mine", opened)
    with simulated_group(8):
        mesh = init_device_mesh("cpu", (replicas, 8 // replicas))
        model = shardtrain.shard(OddNet(), units=[], mesh=mesh, transport="mine")
        with comm.meter() as meter:
            model(torch.randn(2, 3, 5, 5)).sum().backward()
        transport = shardtrain.introspect(model).transport
    assert isinstance(transport, Mine) or isinstance(transport.inner, Mine)
    assert meter.calls["all_gather"] == 1


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_parameter_that_gets_no_gradient_can_be_planned() -> None:
    """Nobody can be asked whether another rank has one, and what is lacking here has no values to look at."""
    with FakeTensorMode():
        model = shardtrain.shard(TwoPaths(), units=(), transport=comm.Simulated(2, 3))
        model(torch.randn(2, 9), "first").sum().backward()
        got = {name for name, param in model.named_parameters() if param.grad is not None}
    assert got == {"first.weight", "first.bias"}  # an empty piece has an empty gradient

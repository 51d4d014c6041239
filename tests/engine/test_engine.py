"""What the engine promises around a step: equality with replicas, memory, traffic, hooks, recovery."""

import contextlib
import copy
import gc
import itertools
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torchvision import models

import shardtrain
from shardtrain import comm
from shardtrain.comm.reports import Reports
from shardtrain.engine.driver import Driver
from shardtrain.engine.segment import ALIGN_BYTES
from shardtrain.engine.unit import Unit

import ways
from behaviours.rows import three_steps
from naive_twin import NaiveTwin
from pool import Ranks, each_rank
from small import (
    Block,
    OddNet,
    Parts,
    assert_at_rest,
    assert_same_parameters,
    classify,
    images,
    like_a_replica,
    mean_in_a_tree,
    mesh,
    partly_frozen,
    sgd,
    shard,
    sharded_and_replica,
    train,
    train_alike,
    until,
)
from tiny import CPU
from ways import WAYS


@pytest.mark.smoke
@each_rank(2, 3, transport="each")
@pytest.mark.parametrize("reshard", [True, False])
def test_calls_and_bytes_of_a_step(reshard: bool) -> None:
    """One reduction per unit; one gather forward, and one backward, but not of the root and the last two."""
    model, _ = sharded_and_replica(reshard_after_forward=reshard)
    optimizer = sgd(model)
    train(model, optimizer, 2)
    with comm.meter() as meter:
        train(model, optimizer, 1, start=2)
    infos = shardtrain.introspect(model).units
    world = dist.get_world_size()
    everything = sum(info.local_bytes for info in infos)
    again = infos[1:-2] if reshard else []
    gathered = everything + sum(info.local_bytes for info in again)
    assert meter.calls == {"all_gather": 4 + len(again), "reduce_scatter": 4}
    assert meter.bytes == {"all_gather": gathered * (world - 1), "reduce_scatter": everything * (world - 1)}


@each_rank(2, transport="auto")
def test_reductions_under_way_hold_as_many_bytes_as_the_largest() -> None:
    """The last layer is the largest: its reduction is alone. Where units stay, all are under way at once."""

    def counting(name: str, sign: int, sizes: list[int]) -> Any:
        original = getattr(Driver, name)

        def counted(driver: Driver, unit: Unit) -> None:
            sizes.append(sizes[-1] + sign * unit.gradient_bytes // unit.segments[0].local.itemsize)
            original(driver, unit)

        return mock.patch.object(Driver, name, counted)

    sizes: dict[bool, list[int]] = {True: [0], False: [0]}  # elements that are being reduced
    for reshard, under_way in sizes.items():
        layers = [nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 45)]
        options = {"transport": "process_group", "reshard_after_forward": reshard}
        model = shard(nn.Sequential(*layers), units=[nn.Linear], **options)
        with counting("reduce", 1, under_way), counting("finish", -1, under_way):
            model(torch.randn(2, 9)).sum().backward()
            in_float32 = [*under_way]
            model.double()
            under_way[:] = [0]
            model(torch.randn(2, 9).double()).sum().backward()
        assert [each > 0 for each in under_way] == [each > 0 for each in in_float32]
        under_way[:] = in_float32
    # elements, padded
    small = 128
    large = 480
    assert sizes[True][:6] == [0, large, 0, small, 2 * small, 3 * small]
    assert max(sizes[False]) == large + 3 * small


class Slow(comm.MessagesTransport):
    """Messages that are under way until they are awaited. ``log``: begins and ends, with sizes of layouts."""

    def __init__(self, group: Any) -> None:
        super().__init__(group, comm.open_transport("process_group").guard)
        self.log: list[str] = []

    def _noted(self, what: str, layouts: Iterator[Any], pending: Any) -> Any:
        name = f"{what} {sum(layout.end for layout in layouts)}"
        self.log.append(f"begin {name}")

        def end(result: Any) -> Any:
            self.log.append(f"await {name}")
            return result

        return pending.then(end)

    def all_gather(self, flats: Any) -> Any:
        return self._noted("gather", (flat.layout for flat in flats), super().all_gather(flats))

    def reduce_scatter(self, gradients: Any) -> Any:
        return self._noted("reduce", (each.layout for each in gradients), super().reduce_scatter(gradients))


@each_rank(2, transport="auto")
def test_collectives_overlap_with_computation() -> None:
    """At each show the next gather has begun. A reduction is awaited as the next one needs its room."""
    transport = Slow(dist.group.WORLD)
    widths = (20, 30, 40, 50, 60)
    layers = [nn.Linear(inputs, outputs) for inputs, outputs in itertools.pairwise(widths)]
    model = shard(nn.Sequential(*layers), units=[nn.Linear], transport=transport)
    for _ in range(3):
        transport.log.clear()
        model(torch.ones(2, widths[0])).sum().backward()
    names = dict(zip((638, 1240, 2050, 3068), "ABCD", strict=True))
    log = [f"{verb} {what} {names[int(size)]}" for verb, what, size in map(str.split, transport.log)]
    assert log == [
        "begin gather A",
        "begin gather B",
        "await gather A",
        "begin gather C",
        "await gather B",
        "begin gather D",
        "await gather C",
        "await gather D",
        "begin reduce D",  # C and D have stayed gathered
        "begin gather B",
        "await reduce D",  # the room is as large as D
        "begin reduce C",
        "begin gather A",
        "await gather B",
        "await reduce C",
        "begin reduce B",
        "await gather A",
        "begin reduce A",
        "await reduce B",
        "await reduce A",
    ]


@each_rank(2)
def test_the_meter_says_how_long_a_rank_waited_and_for_what(tmp_path: Path) -> None:
    """Rank 1 is busy until rank 0 has waited for 0.3 s without a break."""
    model, _ = sharded_and_replica()
    train(model, sgd(model), 2)
    dist.barrier()
    waiting = Reports.waiting
    waited = tmp_path / "rank 0 has waited"

    @contextlib.contextmanager
    def wait_and_tell(of: Reports, position: int) -> Iterator[None]:
        timer = threading.Timer(0.3, waited.touch)
        timer.start()
        try:
            with waiting(of, position):
                yield
        finally:
            timer.cancel()

    began = time.perf_counter()
    with comm.meter() as outer, comm.meter() as meter:
        loss = classify(model, 2)
        if dist.get_rank() == 1:
            busy = time.perf_counter()
            until(waited.exists)
            began += time.perf_counter() - busy
            loss.backward()
        else:
            with mock.patch.object(Reports, "waiting", wait_and_tell):
                loss.backward()
    exposed = meter.exposed()
    assert outer.exposed() == exposed
    titles = set(shardtrain.introspect(model).unit_of_parameter.values())
    assert {what.unit for what in exposed} <= titles | {"the model"}
    assert {what.kind for what in exposed} <= {"all_gather", "reduce_scatter", "fence"}
    if dist.get_rank() == 0:
        assert sum(exposed.values()) > 0.3
    else:
        assert sum(exposed.values()) < time.perf_counter() - began


@each_rank(1)
def test_world_size_1_makes_no_collective_and_no_copy() -> None:
    model, _ = sharded_and_replica()
    gradients: dict[str, int] = {}
    for name, param in model.named_parameters():
        param.register_hook(lambda g, name=name: gradients.__setitem__(name, g.untyped_storage().data_ptr()))
    with comm.meter() as meter:
        classify(model, 0).backward()
    assert not meter.calls
    assert_at_rest(model)  # no second buffer
    for name, param in model.named_parameters():
        assert param.grad.untyped_storage().data_ptr() == gradients[name]


def test_no_process_group_is_world_size_1(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    plain = OddNet()
    model = shardtrain.shard(copy.deepcopy(plain), units=[Block])
    for net in (plain, model):
        optimizer = sgd(net)
        for step in range(3):
            x, y = images(step, rank=0)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    assert_same_parameters(model, plain, tolerance=0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="WORLD_SIZE is 2 but there is no process group"):
        shardtrain.shard(OddNet())


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("quiet", "set_to_none"),
    [([True, False, True, True, False], None), ([True, True, False], True), ([True, True, False], False)],
)
@each_rank(1, 3)
def test_accumulation_equals_ddp_s(quiet: list[bool], set_to_none: bool | None) -> None:
    """Micro-batches, ``quiet`` ones under no_sync; ``set_to_none`` clears what the first left to wait."""
    model, replica = sharded_and_replica()
    for net, no_sync in ((model, lambda: shardtrain.no_sync(model)), (replica, replica.no_sync)):
        optimizer = sgd(net)
        for step in range(2):
            for micro, silent in enumerate(quiet):
                with comm.meter() as meter, no_sync() if silent else contextlib.nullcontext():
                    classify(net, 10 * step + micro).backward()
                if net is model and silent:
                    assert meter.calls["reduce_scatter"] == 0
                if micro == 0 and set_to_none is not None:
                    optimizer.zero_grad(set_to_none=set_to_none)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none is not False)
    assert_same_parameters(model, replica)


@pytest.mark.parametrize("layout", ["even", "whole"])
@each_rank(1, 3)
def test_gradients_of_parameters_frozen_while_they_wait_are_reduced(layout: str) -> None:
    """A whole unit and a part of one are frozen; only the last rank's gradients of them wait."""

    def unfreezing(net: nn.Module, number: int) -> None:
        frozen = [net.blocks[0].conv.weight, *net.blocks[1].parameters()]
        with shardtrain.no_sync(net) if hasattr(net, "_shardtrain_engine") else contextlib.nullcontext():
            is_last = dist.get_rank() == dist.get_world_size() - 1
            loss = classify(net, number)
            (loss if is_last else net.scale.square()).backward()
        for param in frozen:
            param.requires_grad_(False)
        classify(net, number + 10).backward()
        for param in frozen:
            param.requires_grad_(True)

    like_a_replica(step=unfreezing, layout=layout)


def clip_as_torch(model: nn.Module, *options: float) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), *options)


def clip_by_hand(model: nn.Module, max_norm: float, order: float) -> torch.Tensor:
    """Clip as many loops do that are older than torch's own."""
    grads = [p.grad.detach() for p in model.parameters() if p.grad is not None]
    total = torch.norm(torch.stack([grad.norm(order).to("cpu") for grad in grads]), order)
    torch._foreach_mul_(grads, min(1.0, max_norm / (total.item() + 1e-6)))
    return total


@pytest.mark.smoke
@pytest.mark.parametrize("layout", ["even", "whole"])
@pytest.mark.parametrize("clip", [shardtrain.clip_grad_norm_, clip_as_torch, clip_by_hand])
@each_rank(1, 3)
def test_clipping_equals_ddp_s(clip: Callable[..., torch.Tensor], layout: str) -> None:
    model, replica = sharded_and_replica(layout=layout)
    for norm_type in (1.0, 2.0, 3.0, float("inf")):
        for net in (model, replica):
            net.zero_grad()
            classify(net, 0).backward()
        with comm.meter() as meter:
            ours = clip(model, 0.1, norm_type)
        theirs = nn.utils.clip_grad_norm_(replica.parameters(), 0.1, norm_type)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
        assert meter.calls["all_reduce"] == (dist.get_world_size() > 1)
        assert meter.bytes["all_reduce"] <= 12
        with shardtrain.unsharded(model, grads=True, writeback=False):
            for (name, ours_p), theirs_p in zip(model.named_parameters(), replica.parameters(), strict=True):
                torch.testing.assert_close(ours_p.grad, theirs_p.grad, rtol=1e-4, atol=1e-7, msg=name)


@each_rank(4)
def test_a_norm_counts_the_gradients_of_replicas_once() -> None:
    model, replica = sharded_and_replica(mesh=mesh(2, 2))
    for net in (model, replica):
        classify(net, 0).backward()
    theirs = nn.utils.clip_grad_norm_(replica.parameters(), 0.1)
    torch.testing.assert_close(shardtrain.clip_grad_norm_(model, 0.1), theirs, rtol=1e-5, atol=0)


@pytest.mark.long
@each_rank(3, 4, transport="auto")
def test_a_rank_holds_four_shards_and_little_else() -> None:
    """Counts all new live tensors, so also what messages, guard and reductions hold between steps."""

    def is_tensor(value: object) -> bool:
        return issubclass(type(value), torch.Tensor)

    def storages() -> dict[int, torch.UntypedStorage]:
        gc.collect()
        tensors = [each.as_subclass(torch.Tensor) for each in gc.get_objects() if is_tensor(each)]
        return {storage._cdata: storage for storage in (each.untyped_storage() for each in tensors)}

    before = storages()  # kept, so that no new one has the address of an old one
    layers = [nn.Linear(512, 512) for _ in range(8)]  # beside which reports of a slow rank are small
    model = shard(nn.Sequential(*layers), units=[nn.Linear], transport="process_group")
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.randn(3, 512)).square().sum().backward()
        optimizer.step()
    held = sum(storage.nbytes() for address, storage in storages().items() if address not in before)
    assert held < 4.1 * sum(unit.local_bytes for unit in shardtrain.introspect(model).units)


@each_rank(3)
def test_an_infinite_gradient_on_one_rank_is_seen_by_all() -> None:
    model, _ = sharded_and_replica()
    assert shardtrain.clip_grad_norm_(model, 1.0).item() == 0
    for bad in (torch.inf, torch.nan):
        model.zero_grad()
        classify(model, 0).backward()
        if dist.get_rank() == dist.get_world_size() - 1:
            next(param for param in model.parameters() if len(param)).grad.fill_(bad)
        for order in (2.0, torch.inf):
            with pytest.raises(
                RuntimeError, match=f"^the gradient's norm of order {order} is {bad}: nothing"
            ):
                shardtrain.clip_grad_norm_(model, 1.0, order, error_if_nonfinite=True)
    with pytest.raises(ValueError, match=r"^norm_type must be positive, got 0.0$"):
        shardtrain.clip_grad_norm_(model, 1.0, norm_type=0.0)


@pytest.mark.smoke
@each_rank(1, 3)
def test_frozen_parameters_are_neither_reduced_nor_given_gradients() -> None:
    model = like_a_replica(partly_frozen)
    with comm.meter() as meter:
        train(model, sgd(model), 1)
    world = dist.get_world_size()
    trainable = sum(param.nbytes for param in partly_frozen().parameters() if param.requires_grad)
    assert meter.calls["reduce_scatter"] == 2 * (world > 1)
    assert meter.bytes["reduce_scatter"] <= (world - 1) * (trainable / world + 3 * ALIGN_BYTES)
    assert all(p.grad is None for p in (model.blocks[0].conv.weight, *model.blocks[1].parameters()))


@pytest.mark.long
@each_rank(3)
def test_a_model_on_the_meta_device_materialises_its_pieces() -> None:
    expected = OddNet()
    with torch.device("meta"):
        model = OddNet()
    shard(model, units=[Block])
    with pytest.raises(ValueError, match=r"still on the meta device: scale, stem\.weight.*to_empty"):
        model(images(0)[0])
    model.to_empty(device="cpu")
    assert sum(p.nbytes for p in model.parameters()) < sum(p.nbytes for p in expected.parameters())
    shardtrain.load_full_state_dict(model, expected.state_dict())
    assert_same_parameters(model, expected, tolerance=0)
    train_alike(model, nn.parallel.DistributedDataParallel(expected))


@each_rank(1)
def test_a_model_may_be_collected_while_an_optimizer_steps() -> None:
    handle = register_optimizer_step_pre_hook(lambda *_: (gc.collect(), None)[1])
    gone = shard(OddNet())
    model = shard(OddNet())
    del gone
    train(model, sgd(model), 1)
    handle.remove()


# against replicas: DistributedDataParallel, and the naive twin


@pytest.mark.smoke
@each_rank(1, 3, transport="each")
def test_the_engine_does_what_the_naive_twin_does() -> None:
    model = OddNet()
    twin = NaiveTwin(copy.deepcopy(model), lr=0.05, momentum=0.9)
    sharded = shard(model, units=lambda name, module: name.startswith("blocks."))
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.05, momentum=0.9)
    losses = train(sharded, optimizer, 6)
    for step, loss in enumerate(losses):
        assert twin.step(partial(classify, step=step)) == pytest.approx(loss, rel=1e-5)
    twin.gather()
    assert_same_parameters(sharded, twin.model)


# By default, what cuts or holds a model otherwise; with --long all.
CUTS = ("one unit", "nested", "every leaf", "kept", "whole, one unit, kept", "whole, frozen", "each reduced")


def trains_like_the_plain_model(name: str, folder: Path) -> None:
    way = WAYS[name]
    rank = dist.get_rank()
    world = dist.get_world_size()
    usual: dict[str, Any] = {"transport": os.environ["SHARDTRAIN_TEST_TRANSPORT"]}
    if way.replicas:
        usual["mesh"] = mesh(2, 1)
    with warnings.catch_warnings():
        # torch.compile looks for the gradient of each tensor in a graph
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf Tensor")
        model = ways.sharded(way, CPU, **usual)
        result = ways.train(model, way, CPU, rank, world, folder)
    apart = ways.deviation(result, ways.train_plain(way, CPU, rank, world))
    assert apart <= way.tolerance, apart
    assert_at_rest(model)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in CUTS else pytest.mark.release) for name in WAYS]
)
def test_every_way_trains_like_the_plain_model(ranks: Ranks, name: str, tmp_path: Path) -> None:
    """On three ranks, which divide no width, unless virtual ranks or replicas need two."""
    way = WAYS[name]
    ranks(2 if way.virtual or way.replicas else 3, trains_like_the_plain_model, name, tmp_path)


# model families; units that are chosen automatically


def convnext() -> nn.Module:
    blocks = [models.convnext.CNBlockConfig(*each) for each in ((24, 40, 1), (40, 72, 2), (72, None, 1))]
    return models.ConvNeXt(blocks, stochastic_depth_prob=0.2, num_classes=5)


def vit() -> nn.Module:
    return models.VisionTransformer(16, 4, 3, 3, 27, 50, dropout=0.1, num_classes=5)


QUICK = ["mobilenet_v3_small"]
SLOW = ["densenet121", "efficientnet_v2_s", "mnasnet1_0", "mobilenet_v2", "regnet_x_400mf", "resnet50"]
SLOW += ["regnet_y_400mf", "efficientnet_b0", "resnext50_32x4d", "shufflenet_v2_x1_0", "squeezenet1_0"]
SLOW += ["resnet18", "swin_t", "swin_v2_t"]
FAMILIES = [convnext, vit, *QUICK, *(pytest.param(name, marks=pytest.mark.release) for name in SLOW)]


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@each_rank(2)
def test_losses_and_gradients_of_three_steps_equal_ddp_s(family: Any) -> None:
    """Bit for bit: grouped and depthwise convolutions compute otherwise for weights that lie unaligned."""
    by_name = isinstance(family, str)
    make, size = (partial(models.get_model, family, num_classes=5), 32) if by_name else (family, 16)
    model, replica = sharded_and_replica(make, units=None)
    replica.register_comm_hook(None, mean_in_a_tree)
    found: list[list[torch.Tensor]] = []

    def step(net: nn.Module, number: int) -> None:
        x, y = images(number, n=4, size=size)
        torch.manual_seed(100 * number + dist.get_rank())  # dropout and stochastic depth alike
        loss = F.cross_entropy(net(x), y)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
            loss.backward()
        whole = shardtrain.unsharded(net, grads=True, writeback=False) if net is model else None
        with whole or contextlib.nullcontext():
            found.append([loss.detach(), *(param.grad.clone() for param in net.parameters())])

    for net in (model, replica):
        three_steps(net, sgd(net), step)
    for ours, theirs in zip(found[:3], found[3:], strict=True):
        assert all(map(torch.equal, ours, theirs))


def units_of(model: nn.Module, **options: Any) -> list[str]:
    with torch.device("meta"):
        # Which blocks are chosen; those that are joined are of `test_unit_bytes.py`.
        shardtrain.shard(model, unit_bytes=0, **options)
        return [info.name for info in shardtrain.introspect(model).units][1:]


def test_a_model_of_at_most_2_mib_is_one_unit() -> None:
    """In a larger one modules of at most 64 KiB belong to the root. Explicit units stay as asked."""

    def layers(*widths: int) -> nn.Module:
        return nn.Sequential(*(nn.Linear(256, width, bias=False, device="meta") for width in widths))

    assert units_of(layers(1024, 1024)) == []
    assert units_of(layers(1024, 1024, 64)) == ["0", "1"]
    assert units_of(layers(1024, 1024, 65)) == ["0", "1", "2"]
    assert units_of(layers(2048).half()) == []
    assert units_of(layers(3, 5), units="blocks") == units_of(layers(3, 5), units=[nn.Linear]) == ["0", "1"]


@each_rank(2)
def test_the_only_unit_trains_as_a_replica() -> None:
    """Its modules' calls are not wrapped inside its own: a loss on what one of them returns, on one rank."""

    def step(net: nn.Module, number: int) -> None:
        kept: list[torch.Tensor] = []
        handle = net.stem.register_forward_hook(lambda *call: kept.append(call[2]))
        loss = classify(net, number)
        handle.remove()
        (kept[0].square().mean() if number % 2 == dist.get_rank() else loss).backward()

    model = like_a_replica(step=step, units=[])
    wrapped = mock.Mock(side_effect=Driver.begin_call)
    with mock.patch.object(Driver, "begin_call", lambda *each: wrapped(*each)):
        model(images(0)[0])
    assert wrapped.call_count == 1


class _ScaledGradient(torch.autograd.Function):
    """A function that returns a view, and reads a parameter in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (weight,) = ctx.saved_tensors
        return grad * weight, grad.sum(0)


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 10.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _ScaledGradient.apply(x, self.weight)  # type: ignore[no-any-return, no-untyped-call]


@each_rank(2)
def test_a_view_whose_backward_reads_a_parameter_gathers_it() -> None:
    """A loss on that view alone: the node of its base, which is marked, too, runs too late."""
    kept: list[torch.Tensor] = []

    def make() -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(9, 9), _Scaled(), nn.Linear(9, 9)) for _ in range(4)]
        return nn.Sequential(*blocks)

    def step(net: nn.Module, number: int) -> None:
        kept.clear()
        handle = net[1][1].register_forward_hook(lambda *call: kept.append(call[2]))
        net(torch.full((2, 9), 1.0 + number))
        handle.remove()
        kept[0].square().mean().backward()

    like_a_replica(make, step, units=lambda name, module: name.isdecimal())


@each_rank(2)
def test_gradients_of_empty_pieces_are_those_of_the_parameters_that_are_there_now() -> None:
    """In each step, and after a conversion. They refuse what views of reduced gradients refuse."""
    model = shard(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 3)), units=[nn.Linear])
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        for _ in range(2):
            model(torch.ones(2, 9, dtype=dtype)).sum().backward()
            empty = [param for param in model.parameters() if not len(param)]
            assert empty
            for param in empty:
                grad = param.grad
                assert grad is not None
                assert grad.as_subclass(torch.Tensor).shape == param.shape
                assert grad.dtype == dtype
                with pytest.raises(RuntimeError, match="created in no_grad mode"):
                    grad.add_(param)
            model.zero_grad()


@pytest.mark.long
def test_automatic_units_are_blocks() -> None:
    """Named after the modules that repeat, and none of them large."""

    def inside(prefix: str, *counts: int) -> list[str]:
        return [f"{prefix}{stage}.{block}" for stage, n in enumerate(counts, 1) for block in range(n)]

    def largest(model: nn.Module) -> float:
        infos = shardtrain.introspect(shardtrain.shard(model)).units[1:]
        return max(i.parameters for i in infos) / sum(p.numel() for p in model.parameters())

    with torch.device("meta"):
        assert units_of(models.resnet18(num_classes=10)) == inside("layer", 2, 2, 2, 2)
        assert units_of(models.resnet50()) == [*inside("layer", 3, 4, 6, 3), "fc"]
        encoder = [f"encoder.layers.encoder_layer_{layer}" for layer in range(12)]
        assert [name for name in units_of(models.vit_b_16()) if "encoder_layer" in name] == encoder
        assert units_of(models.vgg11_bn())[-3:] == ["classifier.0", "classifier.3", "classifier.6"]
        for name in ("efficientnet_b0", "densenet121", "swin_t", "vit_b_16", "mobilenet_v3_large"):
            assert largest(models.get_model(name)) < 0.26, name


def test_automatic_units_are_modules_that_are_called() -> None:
    """Not a holder without a forward, nor an embedding, nor a layer whose weight attention reads."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.layers.second(self.layers.first(x))
        return self.attention(x, x, x)[0]

    layers = nn.Module()
    layers.first = nn.Linear(99, 99)
    layers.second = nn.Linear(99, 99)
    attends = Parts(forward, layers=layers, attention=nn.MultiheadAttention(99, 3))
    assert units_of(attends, units="blocks") == ["layers.first", "layers.second", "attention"]

    layers = {"embedding": nn.Embedding(99, 99), "layer": nn.Linear(99, 99), "norm": nn.LayerNorm([99, 99])}
    assert units_of(Parts(None, **layers), units="blocks") == ["layer"]

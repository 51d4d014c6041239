"""`unit_bytes`: neighbours that are called in a row are one unit; any other order of calls is right, too."""

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import shardtrain
from shardtrain import Precision, UnitOptions, comm
from shardtrain.device import unit_bytes_on
from shardtrain.engine.driver import Driver
from shardtrain.engine.unit import Shown

from pool import each_rank
from small import Parts, like_a_replica, raised_soon, sgd
from small import shard as shard_small

MIB = 1 << 20
SIZE = 4 * (9 * 9 + 9)  # bytes of a `Layer`


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(9, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


class Row(nn.Module):
    """Five layers, called in any ``order``; ``self.layers`` is a container of them."""

    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))
        self.head = nn.Linear(9, 3)
        self.order: Sequence[int] = range(count)
        self.call: Callable[..., torch.Tensor] = lambda layer, x: layer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = self.call(self.layers[number], x)
        return self.head(x)


def units_of(model: nn.Module, **options: Any) -> list[str]:
    infos = shardtrain.introspect(shardtrain.shard(model, **options)).units
    return [info.name for info in infos][1:]


def on_meta(make: Callable[[], nn.Module], **options: Any) -> list[str]:
    with torch.device("meta"):
        return units_of(make(), **options)


# which modules are one unit


@pytest.mark.parametrize(
    ("most", "names"),
    [
        (0, ["layers.0", "layers.1", "layers.2", "layers.3", "layers.4"]),
        (2 * SIZE - 1, ["layers.0", "layers.1", "layers.2", "layers.3", "layers.4"]),
        (2 * SIZE, ["layers.0 to 1", "layers.2 to 3", "layers.4"]),
        (4 * SIZE, ["layers.0 to 3", "layers.4"]),
        (MIB, ["layers.0 to 4"]),
    ],
)
def test_neighbours_are_one_unit_up_to_a_number_of_bytes(most: int, names: list[str]) -> None:
    model = Row()
    assert units_of(model, units=[Layer], unit_bytes=most) == names
    inside = shardtrain.introspect(model)
    assert [name for info in inside.units for name in info.modules] == [
        "",
        *(f"layers.{n}" for n in range(5)),
    ]
    assert all(info.bytes <= max(most, SIZE) for info in inside.units[1:])
    assert inside.unit_of_parameter["layers.1.linear.bias"] == next(
        info.name for info in inside.units if "layers.1" in info.modules
    )


def test_bytes_are_counted_in_the_dtype_that_is_gathered() -> None:
    bf16 = Precision(torch.bfloat16)
    assert on_meta(Row, units=[Layer], unit_bytes=SIZE, precision=bf16) == [
        "layers.0 to 1",
        "layers.2 to 3",
        "layers.4",
    ]
    assert len(on_meta(Row, units=[Layer], unit_bytes=SIZE)) == 5


def rows(*layers: nn.Module) -> nn.Module:
    return Parts(None, layers=nn.ModuleList(layers))


def test_only_neighbours_of_one_class_with_equal_options_are_joined() -> None:
    # The linear ones inside are units, and the layers, which have nothing else, are not.
    inside = rows(Layer(), Layer(), nn.Linear(9, 9), Layer())
    names = ["layers.0.linear", "layers.1.linear", "layers.2", "layers.3.linear"]
    assert units_of(inside, units=[Layer, nn.Linear], unit_bytes=MIB) == names
    mixed = rows(nn.Linear(9, 9), nn.Linear(9, 5), nn.Conv1d(9, 9, 1), nn.Linear(9, 9))
    assert units_of(mixed, units=[nn.Linear, nn.Conv1d], unit_bytes=MIB) == [
        "layers.0 to 1",
        "layers.2",
        "layers.3",
    ]
    model = Row()
    kept = UnitOptions(reshard_after_forward=False)
    chosen = {layer: UnitOptions() for layer in model.layers} | {model.layers[2]: kept}
    assert units_of(model, units=chosen, unit_bytes=MIB) == ["layers.0 to 1", "layers.2", "layers.3 to 4"]


def test_attributes_of_a_module_and_children_of_two_containers_are_not_joined() -> None:
    model = Parts(None, left=Layer(), right=Layer(), first=rows(Layer()).layers, second=rows(Layer()).layers)
    assert units_of(model, units=[Layer], unit_bytes=MIB) == ["left", "right", "first.0", "second.0"]
    tied = Row(2)
    tied.layers[1].linear.weight = tied.layers[0].linear.weight
    assert units_of(tied, units=[Layer], unit_bytes=MIB) == ["layers.0 to 1"]
    assert shardtrain.introspect(tied).unit_of_parameter["layers.0.linear.weight"] == "the root"


def test_layers_inside_wrappers_are_neighbours() -> None:
    model = rows(*(checkpoint_wrapper(Layer()) for _ in range(3)))
    inside = "_checkpoint_wrapped_module"
    assert units_of(model, units=[Layer], unit_bytes=MIB) == [f"layers.0.{inside} to 2.{inside}"]


def wide(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(count)))  # 256 KiB each


def test_units_that_nobody_has_named_are_joined_by_default() -> None:
    """Up to 1 MiB on the CPU. Named ones are units as they are."""
    automatic = ["0 to 3", "4 to 7", "8"]
    assert on_meta(lambda: wide(9)) == automatic
    assert on_meta(lambda: wide(9), units="blocks") == automatic
    single = [str(n) for n in range(9)]
    assert on_meta(lambda: wide(9), unit_bytes=0) == single
    assert on_meta(lambda: wide(9), units=[nn.Linear]) == single
    assert on_meta(lambda: wide(9), units=lambda name, module: bool(name)) == single
    assert unit_bytes_on(torch.device("cpu")) == MIB
    assert unit_bytes_on(torch.device("cuda")) == 32 * MIB


@pytest.mark.parametrize("wrong", [-1, 1.5, "1 MiB"])
def test_a_wrong_number_of_bytes_is_refused(wrong: Any) -> None:
    start = re.escape(f"unit_bytes={wrong!r}: expected a number of bytes, 0 to join none, or None")
    with pytest.raises(ValueError, match=f"^{start}$"):
        shardtrain.shard(Row(), units=[Layer], unit_bytes=wrong)


@each_rank(2)
def test_ranks_with_other_units_are_refused() -> None:
    other = 0 if dist.get_rank() else MIB
    text = raised_soon(ValueError, lambda: shard_small(Row(), units=[Layer], unit_bytes=other))
    assert re.match(r"the model to shard differs between ranks: .* in layers.0 to 4", text), text


# calls in any order


def loss_on(net: nn.Module, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return net(torch.randn(4, 9, generator=generator)).square().mean()


def orders(seed: int) -> list[list[int]]:
    """Return three steps' orders of calls of five layers: in a row mostly, some twice, some not at all."""
    draw = random.Random(seed)
    steps = []
    for _ in range(3):
        order = [number for number in range(5) if draw.random() < 0.8] or [0]
        if draw.random() < 0.5:
            order.insert(draw.randrange(len(order)), draw.randrange(5))
        if draw.random() < 0.3:
            draw.shuffle(order)
        steps.append(order)
    return steps if seed % 3 else [steps[0]] * 3  # the schedule expects what the last forward called


CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "plain": lambda layer, x: layer(x),
    "recomputed": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "alone": lambda layer, x: layer(x) + layer(x.detach().flip(0)).mean(),  # each twice in a row
}


@each_rank(2)
@pytest.mark.parametrize("call", CALLS)
def test_calls_in_any_order_train_as_a_replica(call: str) -> None:
    for seed in range(3):
        steps = orders(seed)

        def step(net: nn.Module, number: int, steps: list[list[int]] = steps) -> None:
            net.order = steps[number]
            net.call = CALLS[call]
            loss_on(net, number).backward()

        like_a_replica(Row, step, units=[Layer], unit_bytes=(2 + seed % 2) * SIZE)


# what a unit of several modules costs


@each_rank(2, transport="process_group")
def test_two_units_of_that_many_bytes_are_gathered_at_most_and_once_for_all_modules() -> None:
    most = 2 * SIZE
    model = shard_small(Row(8), units=[Layer], unit_bytes=most)
    inside = shardtrain.introspect(model)
    optimizer = sgd(model)
    for number in range(3):
        inside.take_gathered_peak()
        with comm.meter() as meter:
            loss_on(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    root = inside.units[0].bytes
    peak = inside.take_gathered_peak()
    assert peak.units == 3
    assert peak.bytes <= root + 2 * (most + 8 * 64)  # each parameter begins at a multiple of 64 bytes
    # The root once, four units forward, and backward all but the last, which stays.
    assert meter.calls == {"all_gather": 1 + 4 + 3, "reduce_scatter": 5}


# edits inside forward


@each_rank(2)
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 2, 3], [0]], ids=["expected", "another", "none"])
def test_an_edit_between_two_calls_in_a_row_is_refused(order: list[int]) -> None:
    """The unit stays whole between them. If another call comes than expected, or none, it is refused, too."""
    model = shard_small(Row(4), units=[Layer], unit_bytes=2 * SIZE)
    for number in range(2):
        loss_on(model, number).backward()
    handle = model.layers[0].register_forward_hook(lambda *_: add_one())
    linear = model.layers[0].linear
    driver: Driver = shardtrain.engine.hooks.engine_of(model).driver

    def add_one() -> None:
        assert driver.units[1].shown is Shown.FULL
        with torch.no_grad():
            linear.weight.add_(1)

    model.order = order
    with pytest.raises(ValueError, match=r"^layers.0.linear.weight changed while layers.0 to 1 was whole"):
        loss_on(model, 2)
    handle.remove()
    model.order = range(4)
    loss_on(model, 3).backward()


# names


def test_recordings_have_the_outputs_of_each_module() -> None:
    model = shardtrain.shard(Row(), units=[Layer], unit_bytes=2 * SIZE)
    with shardtrain.recording(model, torch.Tensor.clone) as record:
        model(torch.ones(2, 9)).sum().backward()
    assert {name.partition("#")[0] for name in record.outputs} == {"", *(f"layers.{n}" for n in range(5))}


@each_rank(2)
def test_casts_are_of_every_module() -> None:
    """Inputs of each module, and outputs where the unit's options say so."""
    seen: list[torch.dtype] = []
    model = Row(3)
    options = UnitOptions(Precision(torch.bfloat16, output=torch.float32))
    shard_small(model, units=dict.fromkeys(model.layers, options), unit_bytes=MIB)
    for layer in model.layers:
        layer.linear.register_forward_hook(lambda *call: seen.append(call[2].dtype))
        layer.register_forward_hook(lambda *call: seen.append(call[2].dtype))
    loss_on(model, 0).backward()
    assert seen == 3 * [torch.bfloat16, torch.float32]

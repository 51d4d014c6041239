"""What a step costs: lines of Python, which no other load on the machine changes, and garbage."""

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

import shardtrain
from shardtrain.pieces.parameter import PieceParameter
from shardtrain.plan.transport import Simulated

from pool import each_rank
from small import Parts, shard

Forward = Callable[[Any, torch.Tensor], torch.Tensor]


class Layer(nn.Linear):
    """A unit of its own."""

    def __init__(self) -> None:
        super().__init__(3, 3)


def units(net: Any, x: torch.Tensor) -> torch.Tensor:
    for unit in net.units:
        x = unit(x)
    return x


def recomputed(net: Any, x: torch.Tensor) -> torch.Tensor:
    for unit in net.units:
        x = checkpoint(unit, x, use_reentrant=False)
    return x


def root_layers(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Every third layer is a unit, so that backward comes to the root again and again."""
    for layer in net.layers:
        x = layer(x)
    return x


def stack(forward: Forward, count: int, frozen: bool = False) -> nn.Module:
    layers = nn.ModuleList(Layer() if i % 3 == 1 else nn.Linear(3, 3) for i in range(count))
    for layer in layers if frozen else ():
        if not isinstance(layer, Layer):
            layer.requires_grad_(False)
    parts = (
        {"layers": layers} if forward is root_layers else {"units": nn.ModuleList(Layer() for _ in layers)}
    )
    return Parts(forward, **parts)


def step(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


def lines(action: Callable[[], object]) -> int:
    """Return how many lines of Python ``action`` runs."""
    count = 0

    def trace(frame: object, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def lines_of_steps(*models: nn.Module) -> list[int]:
    """Return how many lines of Python a step of each sharded model runs, not the first one."""
    for model in models:
        step(model)
    return [lines(lambda model=model: step(model)) for model in models]


@pytest.mark.long
@pytest.mark.parametrize(
    ("forward", "frozen", "options"),
    [
        (units, False, {}),
        (recomputed, False, {}),
        (root_layers, False, {}),
        (root_layers, True, {}),
        (units, False, {"unit_bytes": 1 << 20}),
    ],
)
def test_a_step_costs_as_much_per_unit_layer_or_module_in_a_larger_model(
    forward: Forward, frozen: bool, options: dict[str, Any]
) -> None:
    """On a simulated rank, which waits for nobody, so that each step runs the same lines."""
    models = [
        shardtrain.shard(
            stack(forward, count, frozen), units=[Layer], transport=Simulated(0, 2, in_place=True), **options
        )
        for count in (30, 120)
    ]
    few, many = lines_of_steps(*models)
    assert many <= 4.1 * few


@pytest.mark.long
@each_rank(2)
def test_a_step_leaves_no_cycles_and_nothing_else() -> None:
    model = shard(stack(units, 6), units=[Layer])
    for _ in range(8):  # until as much of the past is kept as ever will be
        step(model)
    gc.collect()
    gc.disable()
    try:
        grown = []
        for _ in range(3):
            held = len(gc.get_objects())
            for _ in range(20):
                step(model)
            assert gc.collect() == 0
            grown.append(len(gc.get_objects()) - held)
        # A leak shows every time. Once, a rank that has waited a second may keep what the others report.
        assert min(grown) < 20
    finally:
        gc.enable()


@each_rank(2)
def test_replaced_parameters_leave_no_hooks_behind() -> None:
    model = shard(stack(units, 2), units=[Layer])

    def replace() -> int:
        model.units[0].weight = nn.Parameter(model.units[0].weight.as_subclass(torch.Tensor).detach())
        step(model)
        assert isinstance(model.units[0].weight, PieceParameter)
        gc.collect()
        return sum(isinstance(each, RemovableHandle) for each in gc.get_objects())

    before = replace()
    for _ in range(3):
        assert replace() == before


@each_rank(2)
def test_the_optimizer_of_another_model_costs_nothing_per_parameter() -> None:
    models = [shard(stack(units, 3), units=[Layer]) for _ in range(4)]
    plain = nn.ModuleList(nn.Linear(3, 3) for _ in range(50))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer.step()
    with_models = lines(optimizer.step)
    del models
    gc.collect()
    assert with_models - lines(optimizer.step) <= 4 * 20

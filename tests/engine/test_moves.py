"""Forwards that move weights and change none: every way to move, place and step, against the plain model."""

import contextlib
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import shardtrain
from shardtrain import Precision

from pool import each_rank
from simulated_device import DEVICE, GATES, SimulatedDevice, flatten_weights
from small import mesh, sgd

CPU = torch.device("cpu")
STEPS = 2


@pytest.fixture
def deterministic() -> Iterator[None]:
    """As virtual ranks on a device want kernels."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Flattens:
    """Lets a recurrent network on the CPU move its weights as cuDNN does on a device."""

    def flatten_parameters(self: Any) -> None:
        weights = self._flat_weights
        if weights[0].device != CPU:
            nn.RNNBase.flatten_parameters(self)
            return
        per_layer = (4 if self.bias else 2) + bool(self.proj_size)
        sizes = self.input_size, GATES[self.mode], self.hidden_size, self.proj_size, self.num_layers
        with torch.no_grad():
            flatten_weights(weights, per_layer, *sizes, self.batch_first, self.bidirectional)


class FlatLSTM(Flattens, nn.LSTM):
    pass


class FlatGRU(Flattens, nn.GRU):
    pass


class FlatRNN(Flattens, nn.RNN):
    pass


class Cell(nn.Module):
    """Compute (n, 3, 5) from (n, 3, 5); ``move`` is called with it and the input before it computes."""

    def __init__(self, part: nn.Module, move: Callable[..., object]) -> None:
        super().__init__()
        self.part = part
        self.move = move
        width = 5
        if isinstance(part, nn.RNNBase):
            width = (part.proj_size or part.hidden_size) * (1 + part.bidirectional)
        self.out = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.move(self, x)
        if isinstance(self.part, nn.RNNBase):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "LSTM with projections is not supported with oneDNN")
                return x + self.out(self.part(x)[0])
        if isinstance(self.part, nn.Conv2d):
            return x + self.out(self.part(x[:, None].expand(-1, 3, -1, -1)).mean(1))
        return x + self.out(self.part(x))


class Outer(nn.Module):
    """A unit with a weight of its own, which it moves too, around another unit."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.before = nn.Linear(5, 5)
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        self.before.weight.data = self.before.weight.data.clone()
        return self.cell(self.before(x))


class Net(nn.Module):
    def __init__(self, cells: list[nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 5)
        self.cells = nn.Sequential(*cells)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(self.stem(x)))


def flatten(cell: Any, x: Tensor) -> None:
    cell.part.flatten_parameters()


def clone(cell: Any, x: Tensor) -> None:
    for param in cell.parameters():
        param.data = param.data.clone()


def apply(cell: Any, x: Tensor) -> None:
    cell._apply(torch.clone)


def reorder(cell: Any, x: Tensor) -> None:
    cell.part.to(memory_format=torch.channels_last)


def reorder_and_back(cell: Any, x: Tensor) -> None:
    cell.part.to(memory_format=torch.channels_last)
    cell.part.to(memory_format=torch.contiguous_format)


def convert(cell: Any, x: Tensor) -> None:
    cell.to(x.dtype)


def make_contiguous(cell: Any, x: Tensor) -> None:
    cell.part.weight.data = cell.part.weight.data.contiguous()


def to_and_fro(cell: Any, x: Tensor) -> None:
    cell.double().to(x.dtype)


def twice(cell: Any, x: Tensor) -> None:
    flatten(cell, x)
    clone(cell, x)
    flatten(cell, x)


def stay(cell: Any, x: Tensor) -> None:
    pass


def conv() -> nn.Module:
    return nn.Conv2d(3, 3, 3, padding=1)


def conv_last() -> nn.Module:
    return conv().to(memory_format=torch.channels_last)


class Move(NamedTuple):
    """Say which part cells have, and what is called in forward before it computes."""

    make: Callable[[], nn.Module]
    does: Callable[..., object]


MOVES = {
    "LSTM": Move(lambda: FlatLSTM(5, 7, batch_first=True), flatten),
    "GRU": Move(lambda: FlatGRU(5, 7, batch_first=True), flatten),
    "RNN": Move(lambda: FlatRNN(5, 7, nonlinearity="relu", batch_first=True), flatten),
    "all at once": Move(
        lambda: FlatLSTM(5, 7, 2, batch_first=True, bidirectional=True, proj_size=3), flatten
    ),
    "without biases": Move(lambda: FlatGRU(5, 7, 2, batch_first=True, bias=False), flatten),
    "copied": Move(lambda: nn.Linear(5, 5), clone),
    "copied LSTM": Move(lambda: FlatLSTM(5, 7, batch_first=True), twice),
    "applied": Move(lambda: nn.Linear(5, 5), apply),
    "applied LSTM": Move(lambda: FlatLSTM(5, 7, batch_first=True), apply),
    "channels_last": Move(conv, reorder),
    "channels_last and back": Move(conv, reorder_and_back),
    "contiguous": Move(conv_last, make_contiguous),
    "converted": Move(lambda: nn.Linear(5, 5), convert),
    "converted LSTM": Move(lambda: FlatLSTM(5, 7, batch_first=True), convert),
    "to and fro": Move(lambda: nn.Linear(5, 5), to_and_fro),
    "normed": Move(lambda: weight_norm(nn.Linear(5, 5)), clone),
}
PLACES: dict[str, Any] = {
    "root": {"units": []},
    "unit": {"units": [Cell]},
    "joined": {"units": [Cell], "unit_bytes": 1 << 20},
    "nested": {"units": [Outer, Cell]},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "even": {},
    "whole": {"layout": "whole"},
    "kept": {"reshard_after_forward": False},
    "offload": {"offload": True},
    "bf16": {"precision": Precision(torch.bfloat16)},
    "virtual": {"virtual_ranks": 4},
    "conditional": {},
    "replicas": {},
    "frozen": {},
    "no_sync": {},
    "recomputed": {},
    "recomputed, reentrant": {},
    "evaluated": {},
    "flattened while gradients wait": {},
    "pre-hook": {},
}


def transport() -> dict[str, Any]:
    return {"transport": os.environ["SHARDTRAIN_TEST_TRANSPORT"]}


def build(move: Move, place: str, option: str) -> Net:
    torch.manual_seed(0)
    cells: list[nn.Module] = [Cell(move.make(), move.does) for _ in range(2)]
    if option == "pre-hook":
        for cell in cells:
            cell.move = stay
            cell.register_forward_pre_hook(lambda cell, args: move.does(cell, *args))
    if place == "nested":
        cells = [Outer(cell) for cell in cells]
    net = Net(cells)
    if option == "frozen":
        net.cells[0].requires_grad_(False)
    if option.startswith("recomputed"):
        for cell in cells:
            options = {"preserve_rng_state": False}
            if "reentrant" not in option:
                options["determinism_check"] = "none"  # the simulated device is no other one in C++
            cell.forward = partial(checkpoint, cell.forward, use_reentrant="reentrant" in option, **options)
    return net


def batch(step: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(3, 3, 5, generator=generator), torch.randn(3, 3, 3, generator=generator)


def steps(
    model: nn.Module, option: str, device: torch.device, numbers: range, total: int, is_sharded: bool
) -> list[float]:
    """Train; ``numbers``: of the micro-batches that this model computes of ``total`` per step."""
    optimizer = sgd(model)
    losses = []
    for step in range(STEPS):
        if option == "evaluated":
            model.eval()
            with torch.no_grad():
                model(batch(step, 0)[0].to(device))
            model(batch(step, 0)[0].to(device))  # without a backward
            model.train()
        for number in numbers:
            if option == "flattened while gradients wait":
                for module in model.modules():
                    if isinstance(module, nn.RNNBase):
                        module.flatten_parameters()
            within: Any = contextlib.nullcontext()
            share = total if not is_sharded else len(numbers)
            if is_sharded and option == "virtual":
                within = shardtrain.virtual_rank(model, number, seed=0, step=step)
                share = 1
            elif is_sharded and number != numbers[-1]:
                within = shardtrain.no_sync(model)
            x, y = batch(step, number)
            with within:
                loss = (model(x.to(device)).float() - y.to(device)).square().mean()
                (loss / share).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def deviation(
    move: Move, place: str, option: str, device: torch.device, rank: int, world: int, **usual: Any
) -> float:
    """Return how far losses and weights are from those of the plain model, which moves its weights, too."""
    per_rank = {"virtual": 4 // world, "no_sync": 3, "flattened while gradients wait": 3}.get(option, 1)
    total = world * per_rank
    plain = build(move, place, option)
    plain_losses = steps(plain, option, CPU, range(total), total, False)
    model = build(move, place, option).to(device)
    options = {"unit_bytes": 0, **usual, **PLACES[place], **OPTIONS[option]}
    if option == "conditional":
        options["conditional"] = [model.cells[0]]
    if option == "replicas":
        options["mesh"] = mesh(world, 1)
    sharded = shardtrain.shard(model, **options)
    numbers = range(rank * per_rank, (rank + 1) * per_rank)
    losses = steps(sharded, option, device, numbers, total, True)
    mine = [plain_losses[step * total + number] for step in range(STEPS) for number in numbers]
    off = max(abs(a - b) for a, b in zip(losses, mine, strict=True))
    state = shardtrain.full_state_dict(sharded)
    for name, value in plain.state_dict().items():
        off = max(off, (state[name].float() - value).abs().max().item())
    return off


def off_by_much(move: str, place: str, device: torch.device, world: int, **usual: Any) -> list[str]:
    """Return which options are not as far from the plain model as their precision allows."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = []
    for option in OPTIONS:
        if option == "replicas" and not dist.is_initialized():
            continue
        # Gloo moves tensors of a device in equal intervals.
        if device == DEVICE and world > 1 and option in ("whole", "virtual"):
            continue
        tolerance = 0.05 if option == "bf16" else 1e-5
        off = deviation(MOVES[move], place, option, device, rank, world, **usual)
        if not off <= tolerance:
            found.append(f"{option}: off by {off:.2g}")
    return found


# What shows something of its own by default. With --long each move is tried in one place more per test.
SHORT = [("all at once", "joined"), ("copied LSTM", "nested"), ("channels_last", "unit")]


def cases(first: int, short: list[tuple[str, str]]) -> list[Any]:
    """Return the ``short`` pairs, and long ones: each move in a place, beginning with number ``first``."""
    places = itertools.islice(itertools.cycle(PLACES), first, None)
    turns = [pair for pair in zip(MOVES, places, strict=False) if pair not in short]
    return [*short, *[pytest.param(*pair, marks=pytest.mark.release) for pair in turns]]


@pytest.mark.long
@pytest.mark.parametrize(("move", "place"), cases(0, SHORT))
@each_rank(2)
def test_forwards_that_move_weights(move: str, place: str) -> None:
    assert off_by_much(move, place, CPU, 2, **transport()) == []


@pytest.mark.parametrize(("move", "place"), cases(1, []))
@each_rank(2, transport="auto")
def test_forwards_that_move_weights_over_gloo(move: str, place: str) -> None:
    with SimulatedDevice()(pytest.MonkeyPatch()) as device:
        assert off_by_much(move, place, DEVICE, 2, transport="process_group") == []
        assert list(device.findings) == []


@pytest.mark.parametrize(("move", "place"), cases(2, []))
def test_forwards_that_move_weights_alone(move: str, place: str, deterministic: None) -> None:
    assert off_by_much(move, place, CPU, 1) == []
    with SimulatedDevice()(pytest.MonkeyPatch()) as device:
        assert off_by_much(move, place, DEVICE, 1) == []
        assert list(device.findings) == []


@pytest.mark.parametrize("name", [pytest.param("LSTM", marks=pytest.mark.long), "copied", "channels_last"])
@each_rank(2)
def test_one_rank_alone_may_move_weights(name: str) -> None:
    rank = dist.get_rank()
    move = MOVES[name] if rank == 1 else MOVES[name]._replace(does=stay)
    for place in PLACES:
        assert deviation(move, place, "even", CPU, rank, 2, **transport()) <= 1e-5


def copy_and_change(cell: Any, x: Tensor) -> None:
    clone(cell, x)
    cell.part.bias.data.mul_(2)


def change_in_place(cell: Any, x: Tensor) -> None:
    clone(cell, x)
    with torch.no_grad():
        cell.part.bias.mul_(2)


def change_where_it_lies(cell: Any, x: Tensor) -> None:
    with torch.no_grad():
        cell.part.bias.mul_(2)


def change_and_flatten(cell: Any, x: Tensor) -> None:
    cell.part.bias_hh_l0.data = cell.part.bias_hh_l0.data * 2
    flatten(cell, x)


def convert_and_stay(cell: Any, x: Tensor) -> None:
    cell.part.double()
    cell.part.forward = lambda x: nn.functional.linear(x.double(), cell.part.weight, cell.part.bias).float()


# By how weights move and change: and the names of those that differ.
CHANGES = {
    "of a copy": (Move(lambda: nn.Linear(5, 5), copy_and_change), "part.bias"),
    "where it lies": (Move(lambda: nn.Linear(5, 5), change_where_it_lies), "part.bias"),
    "in place": (Move(lambda: nn.Linear(5, 5), change_in_place), "part.bias"),
    "then flattened": (Move(lambda: FlatLSTM(5, 7, batch_first=True), change_and_flatten), "part.bias_hh_l0"),
    "of dtype": (Move(lambda: nn.Linear(5, 5), convert_and_stay), "part.weight, "),
}


@pytest.mark.parametrize(
    "place", [pytest.param("root", marks=pytest.mark.release), "unit", "joined", "nested"]
)
@pytest.mark.parametrize("change", CHANGES)
@each_rank(1, 2)
def test_weights_that_move_and_change_are_refused(change: str, place: str) -> None:
    move, names = CHANGES[change]
    model = shardtrain.shard(build(move, place, "even"), **{"unit_bytes": 0, **transport(), **PLACES[place]})
    with pytest.raises(ValueError, match=rf"^cells\.0\.(cell\.)?{names}.* changed while .* was whole, which"):
        model(batch(0, 0)[0])
    dist.barrier()  # each rank is refused by itself, and the other may still be on its way there

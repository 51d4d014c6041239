"""Forwards that move weights and change none are right; those that change some are refused by name."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardtrain

from pool import each_rank
from simulated_device import GATES, flatten_weights
from small import like_a_replica, shard

Move = Callable[[Any], object]  # what a `Cell` does before it computes


class FlatLSTM(nn.LSTM):
    """An LSTM that moves its weights into one buffer on the CPU, too, as cuDNN does on a device."""

    def flatten_parameters(self) -> None:
        sizes = self.input_size, GATES[self.mode], self.hidden_size, self.proj_size, self.num_layers
        with torch.no_grad():
            flatten_weights(self._flat_weights, 4, *sizes, self.batch_first, self.bidirectional)


class Cell(nn.Module):
    """A cell from (n, 3, 5) to (n, 3, 5)."""

    def __init__(self, part: nn.Module, move: Move) -> None:
        super().__init__()
        self.part = part
        self.move = move
        self.out = nn.Linear(14 if isinstance(part, nn.LSTM) else 5, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.move(self)
        if isinstance(self.part, nn.LSTM):
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


class Net(nn.Sequential):
    @property
    def cell(self) -> Cell:
        return getattr(self[1], "cell", self[1])


def lstm() -> nn.Module:
    return FlatLSTM(5, 7, 2, batch_first=True, bidirectional=True)


def linear() -> nn.Module:
    return nn.Linear(5, 5)


def conv() -> nn.Module:
    return nn.Conv2d(3, 3, 3, padding=1)


def flatten(cell: Any) -> None:
    cell.part.flatten_parameters()


def clone(cell: Any) -> None:
    for param in cell.parameters():
        param.data = param.data.clone()


def reorder(cell: Any) -> None:
    cell.part.to(memory_format=torch.channels_last)


def to_and_fro(cell: Any) -> None:
    cell.double().float()


def flatten_copies(cell: Any) -> None:
    clone(cell)
    flatten(cell)


PLACES: dict[str, dict[str, Any]] = {
    "root": {"units": []},
    "unit": {"units": [Cell]},
    "joined": {"units": [Cell], "unit_bytes": 1 << 20},
    "nested": {"units": [Outer, Cell]},
    "part": {"units": [FlatLSTM]},  # which the module around it moves, while it is a local shard
}


class Row(NamedTuple):
    make: Callable[[], nn.Module]
    move: Move
    place: str
    does: str = ""  # besides


ROWS = {
    "flattened": Row(lstm, flatten, "joined"),
    "flattened from outside": Row(lstm, flatten, "part"),
    "flattened copies": Row(lstm, flatten_copies, "nested"),
    "copied": Row(linear, clone, "root"),
    "reordered": Row(conv, reorder, "unit"),
    "converted and back": Row(linear, to_and_fro, "unit"),
    "copied, frozen": Row(linear, clone, "unit", does="freezes"),
    "copied, recomputed": Row(linear, clone, "unit", does="recomputes"),
    "flattened in a hook": Row(lstm, flatten, "unit", does="hooks"),
    "copied, evaluated": Row(linear, clone, "nested", does="evaluates"),
    "flattened while gradients wait": Row(lstm, flatten, "part", does="accumulates"),
    "copied by one rank": Row(linear, clone, "nested", does="alone"),
}
DEFAULT = "flattened", "flattened from outside", "converted and back", "copied by one rank"


def build(row: Row) -> Net:
    torch.manual_seed(0)
    cells = [Cell(row.make(), row.move) for _ in range(2)]
    for cell in cells:
        if row.does == "hooks":
            cell.move = lambda _: None
            cell.register_forward_pre_hook(lambda cell, _: row.move(cell))
        if row.does == "recomputes":
            cell.forward = partial(checkpoint, cell.forward, use_reentrant=False, preserve_rng_state=False)
    outer = [Outer(cell) for cell in cells] if row.place == "nested" else cells
    net = Net(nn.Linear(5, 5), *outer, nn.Linear(5, 3))
    net[1].requires_grad_(row.does != "freezes")
    return net


def batch(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(3, 3, 5, generator=generator)


def step(row: Row, net: Net, number: int) -> None:
    is_sharded = hasattr(net, "_shardtrain_engine")
    if row.does == "alone" and dist.get_rank() == 0 and is_sharded:
        net[1].move = lambda _: None
    if row.does == "evaluates":
        with torch.no_grad():
            net(batch(number))
        net(batch(number))  # without a backward
    if row.does == "accumulates":
        with shardtrain.no_sync(net) if is_sharded else contextlib.nullcontext():
            net(batch(number + 9)).square().mean().backward()
        net.cell.part.flatten_parameters()
    net(batch(number)).square().mean().backward()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.long) for name in ROWS]
)
@each_rank(2)
def test_weights_that_move_in_forward_are_unchanged(name: str) -> None:
    row = ROWS[name]
    options = {"unit_bytes": 0, **PLACES[row.place]}
    like_a_replica(partial(build, row), partial(step, row), **options)


def copy_and_change(cell: Any) -> None:
    clone(cell)
    cell.part.bias.data.mul_(2)


def change_in_place(cell: Any) -> None:
    with torch.no_grad():
        cell.part.bias.mul_(2)


def change_and_flatten(cell: Any) -> None:
    cell.part.bias_hh_l0.data = cell.part.bias_hh_l0.data * 2
    flatten(cell)


def convert_and_stay(cell: Any) -> None:
    cell.part.double()
    cell.part.forward = lambda x: nn.functional.linear(x.double(), cell.part.weight, cell.part.bias).float()


WHOLE = " changed while .* was whole, which"
CLOSED = r" in forward outside of a call of 1\.part, .* it, between steps"
# Which weights move and change, where, and what the refusal says.
CHANGES = {
    "of a copy": (Row(linear, copy_and_change, "unit"), rf"^1\.part\.bias{WHOLE}"),
    "in place": (Row(linear, change_in_place, "joined"), rf"^1\.part\.bias{WHOLE}"),
    "in a unit inside": (Row(linear, change_in_place, "nested"), rf"^1\.cell\.part\.bias{WHOLE}"),
    "then flattened": (Row(lstm, change_and_flatten, "root"), rf"^1\.part\.bias_hh_l0, .*{WHOLE}"),
    "of dtype": (Row(linear, convert_and_stay, "unit"), rf"^1\.part\.weight, .*{WHOLE}"),
    "by the module around it": (
        Row(lstm, clone, "part"),
        rf"^1\.part\.weight_ih_l0 was used \(data\){CLOSED}",
    ),
    "reordered around it": (
        Row(lstm, to_and_fro, "part"),
        rf"^1\.part\.weight_ih_l0 was used \(\w+\){CLOSED}",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@each_rank(1, 2)
def test_weights_that_move_and_change_are_refused(change: str) -> None:
    row, message = CHANGES[change]
    model = shard(build(row), **{"unit_bytes": 0, **PLACES[row.place]})
    with pytest.raises(ValueError, match=message):
        model(batch(0))
    dist.barrier()  # each rank is refused by itself, and the other may still be on its way there

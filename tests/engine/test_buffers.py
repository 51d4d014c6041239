"""Virtual ranks: buffers of all kinds are right, or refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardtrain

from small import Block, images, shard

V = 4
Update = Callable[[nn.Module, Tensor], None]
WIDTH = 7
LARGE = 2**53 + 1  # fp64 rounds it


class Keeps(nn.Module):
    """A module that adds ``mean``, which ``update(self, x)`` changes, to what comes in."""

    def __init__(self, update: Update, mean: Tensor) -> None:
        super().__init__()
        self.update = update
        self.register_buffer("mean", mean)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.update(self, x.detach().float().mean((0, 2, 3)))
        shift = torch.view_as_real(self.mean)[..., 0] if self.mean.is_complex() else self.mean
        return x + shift.float().clamp(-1, 1).to(x.dtype).view(1, -1, 1, 1)


class OwnNorm(nn.Module):
    """Normalise by `F.batch_norm` with buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.var, training=self.training)


def replace(keeps: nn.Module, found: Tensor) -> None:
    keeps.mean = 0.9 * keeps.mean + 0.1 * found


def in_place(keeps: nn.Module, found: Tensor) -> None:
    keeps.mean.mul_(0.9).add_(0.1 * found)


def by_numpy(keeps: nn.Module, found: Tensor) -> None:
    keeps.mean.numpy()[:] += 0.1 * found.numpy()


def count_by_two(keeps: nn.Module, _: Tensor) -> None:
    keeps.mean += 2


def negate(keeps: nn.Module, _: Tensor) -> None:
    keeps.mean = -keeps.mean


def exceeds(keeps: nn.Module, found: Tensor) -> None:
    keeps.mean = keeps.mean | (found > found.mean())


def keeps(update: Update, mean: Tensor) -> Callable[[], nn.Module]:
    return lambda: Keeps(update, mean.clone())


ZEROS = torch.zeros(WIDTH)
# What makes a module with each kind of buffer. All are right.
KINDS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": lambda: nn.BatchNorm2d(WIDTH),
    "own BatchNorm": OwnNorm,
    "replaced": keeps(replace, ZEROS),
    "in place": keeps(in_place, ZEROS),
    "NumPy": keeps(by_numpy, ZEROS),
    "complex": keeps(in_place, ZEROS.to(torch.complex64)),
    "int64": keeps(count_by_two, torch.full((WIDTH,), LARGE)),
    "-0.0": keeps(negate, ZEROS),
    "bool": keeps(exceeds, ZEROS.bool()),
    "bf16": keeps(in_place, ZEROS.bfloat16()),
}


class Net(nn.Module):
    """Odd widths, random numbers, a block that is a unit, and a module with one of `KINDS`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3)
        self.block = Block(WIDTH)
        self.drop = nn.Dropout(0.3)
        self.keeps = KINDS[kind]()
        self.fc = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(self.keeps(self.block(self.stem(x))).mean((2, 3))))


def bits(tensors: Any) -> bytes:
    """Return the bits of ``tensors``, one after the other."""
    parts = [each.detach().as_subclass(torch.Tensor).contiguous().view(-1) for each in tensors]
    return b"".join(part.view(torch.uint8).numpy().tobytes() for part in parts)


def buffers_of_kinds(kinds: list[str]) -> list[dict[str, Any]]:
    """Weights and buffers after two steps of each kind's model."""
    found = []
    for kind in kinds:
        torch.manual_seed(0)
        model = shard(Net(kind), units=[Block], virtual_ranks=V)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            for number in shardtrain.introspect(model).virtual_ranks:
                x, y = images(step, number)
                with shardtrain.virtual_rank(model, number, seed=5, step=step):
                    F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        values = {**shardtrain.full_state_dict(model), **dict(model.named_buffers())}
        found.append({name: bits([value]) for name, value in values.items()})
    return found


def test_buffers_that_forward_changes_do_not_depend_on_the_number_of_ranks(on_ranks: Any) -> None:
    kinds = [*KINDS]
    [alone] = on_ranks(1, buffers_of_kinds, kinds)
    for found in on_ranks(2, buffers_of_kinds, kinds):
        for kind, ours, theirs in zip(kinds, alone, found, strict=True):
            assert [name for name, value in ours.items() if theirs[name] != value] == [], kind
    count = torch.frombuffer(bytearray(alone[kinds.index("int64")]["keeps.mean"]), dtype=torch.int64)
    assert count.tolist() == [LARGE + 4] * 7
    # Each of four virtual ranks has negated the zeros of the step before.
    assert alone[kinds.index("-0.0")]["keeps.mean"] == bits([torch.zeros(7)])


def appears(keeps: nn.Module, found: Tensor) -> None:
    keeps.register_buffer("latest", found)


def appears_in_a_child(keeps: nn.Module, found: Tensor) -> None:
    keeps.child = Keeps(in_place, found)


def fills(keeps: nn.Module, found: Tensor) -> None:
    keeps.absent = found


def empties(keeps: nn.Module, _: Tensor) -> None:
    keeps.other = None


def deletes(keeps: nn.Module, _: Tensor) -> None:
    del keeps.other


def widens(keeps: nn.Module, found: Tensor) -> None:
    keeps.mean = found.double()


def grows(keeps: nn.Module, found: Tensor) -> None:
    keeps.other.data = torch.cat([keeps.other, found])


def shares(keeps: nn.Module, found: Tensor) -> None:
    keeps.alias = keeps.alias + found


@pytest.mark.parametrize(
    ("update", "told"),
    [
        (appears, "has registered buffer 0.latest, but each virtual rank must start from the same"),
        (appears_in_a_child, "has registered buffer 0.child.mean, but"),
        (fills, "has registered buffer 0.absent, but"),
        (empties, "has removed buffer 0.other, but"),
        (deletes, "has removed buffer 0.other, but"),
        (
            widens,
            r"replaced buffer 0.mean, \(7,\) torch.float32 on cpu, by \(7,\) torch.float64 on cpu: keep",
        ),
        (grows, r"replaced buffer 0.other, \(2,\) torch.float32 on cpu, by \(9,\) torch.float32"),
        (shares, "replaced buffer 0.alias, which is also buffer 0.mean: change it in place, or"),
    ],
)
def test_buffers_that_have_no_mean_are_refused_by_name(update: Any, told: str) -> None:
    keeps = Keeps(update, torch.zeros(7))
    keeps.register_buffer("absent", None)
    keeps.register_buffer("other", torch.ones(2))
    if update is shares:
        keeps.register_buffer("alias", keeps.mean)
    model = shardtrain.shard(nn.Sequential(keeps, nn.Conv2d(7, 5, 1)), virtual_ranks=2)
    before = {name: value.clone() for name, value in model.named_buffers()}
    x = torch.randn(2, 7, 1, 1)

    def step() -> None:
        with shardtrain.virtual_rank(model, 0):
            model(x).sum().backward()

    for _ in range(2):  # the same again, since nothing is left of the first
        with pytest.raises(ValueError, match=told):
            step()
        assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
        assert keeps.absent is None
        assert all(param.grad is None for param in model.parameters())
        if update is appears_in_a_child:
            del keeps.child


def test_a_step_that_was_abandoned_begins_again() -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), Keeps(replace, torch.zeros(7))
    model = shardtrain.shard(nn.Sequential(*layers), virtual_ranks=4)
    found = []

    def compute(number: int, fails: bool = False) -> None:
        with shardtrain.virtual_rank(model, number, seed=0):
            model(images(0, number)[0]).square().sum().backward()
            if fails:
                raise KeyError

    before = bits(model.buffers())
    saved_buffers = [buffer.clone() for buffer in model.buffers()]
    for abandoned in ([], [0], [0, 1, 2]):
        for number in abandoned:
            compute(number)
        assert bits(model.buffers()) == before or not abandoned
        if len(abandoned) > 1:
            with pytest.raises(KeyError):
                compute(3, fails=True)
            assert bits(model.buffers()) == before
        for number in range(4):
            compute(number)
        found.append(bits([*model.buffers(), *(param.grad for param in model.parameters())]))
        model.zero_grad()
        for buffer, value in zip(model.buffers(), saved_buffers, strict=True):
            buffer.copy_(value)
    assert len({*found}) == 1


def test_what_would_depend_on_the_number_of_ranks_is_refused_between_virtual_ranks() -> None:
    torch.manual_seed(0)
    layers = Keeps(in_place, torch.zeros(7)), nn.Conv2d(7, 5, 1)
    model = shardtrain.shard(nn.Sequential(*layers), virtual_ranks=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 7, 1, 1)

    def compute(number: int, learns: bool = True) -> None:
        with shardtrain.virtual_rank(model, number), torch.set_grad_enabled(learns):
            loss = model(x).sum()
            if learns:
                loss.backward()

    compute(0)
    optimizer.zero_grad()
    with pytest.raises(
        ValueError, match=r"gradient of parameter 1\.weight was cleared while it waits for other"
    ):
        compute(1)
    compute(0)
    model[0].mean += 1
    with pytest.raises(
        ValueError, match=r"buffer 0\.mean was changed between virtual ranks 0 and 1, which start"
    ):
        compute(1)
    model[0].mean -= 1
    compute(0)
    with pytest.raises(
        ValueError, match=r"virtual_rank\(1\) had no backward\(\) outside of no_sync\(\), but"
    ):
        compute(1, learns=False)
    compute(0, learns=False)
    with pytest.raises(ValueError, match=r"virtual_rank\(0\) had no backward\(\)"):
        compute(1)
    for number in range(4):  # statistics alone
        compute(number, learns=False)
    compute(0)
    compute(1)
    with shardtrain.no_sync(model), pytest.raises(ValueError, match="inside no_sync"):
        compute(2)
    compute(2)
    with shardtrain.virtual_rank(model, 3):
        with pytest.raises(ValueError, match="or another virtual_rank"):
            compute(3)
        model(x).sum().backward()

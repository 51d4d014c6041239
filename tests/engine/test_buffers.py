"""Virtual ranks and replays: all kinds of buffers, and the product of what they are combined with."""

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shardtrain
from shardtrain import Precision, ReplayMismatch
from shardtrain.optim import Ema
from shardtrain.recipes.muon import Muon

from small import Block, images, mesh, shard

V = 4
Update = Callable[[nn.Module, Tensor], None]
WIDTH = 7
LARGE = 2**53 + 1  # fp64 rounds it


class Keeps(nn.Module):
    """Add ``mean``, which ``update(self, x)`` changes, to what comes in."""

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


class TrainsAgain(nn.Sequential):
    """Switch stock BatchNorm to training as it is called."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm2d(WIDTH))
        self[0].eval()

    def forward(self, x: Tensor) -> Tensor:
        self[0].train()
        output = super().forward(x)
        self[0].eval()
        return output


def replace(keeps: nn.Module, found: Tensor) -> None:
    keeps.mean = 0.9 * keeps.mean + 0.1 * found


def in_place(keeps: nn.Module, found: Tensor) -> None:
    keeps.mean.mul_(0.9).add_(0.1 * found)


def register(keeps: nn.Module, found: Tensor) -> None:
    keeps._buffers["mean"] = 0.9 * keeps.mean + 0.1 * found


def register_again(keeps: nn.Module, found: Tensor) -> None:
    keeps.register_buffer("mean", 0.9 * keeps.mean + 0.1 * found)


def data(keeps: nn.Module, found: Tensor) -> None:
    keeps.mean.data = 0.9 * keeps.mean + 0.1 * found


def data_in_place(keeps: nn.Module, found: Tensor) -> None:
    keeps.mean.data.mul_(0.9).add_(0.1 * found)


def by_numpy(keeps: nn.Module, found: Tensor) -> None:
    keeps.mean.numpy()[:] += 0.1 * found.numpy()


def rarely(keeps: nn.Module, found: Tensor) -> None:
    if found[0] > 0.1:
        keeps.mean = keeps.mean + found


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
    "none": nn.Identity,
    "BatchNorm": lambda: nn.BatchNorm2d(WIDTH),
    "BatchNorm, train() in forward": TrainsAgain,
    "own BatchNorm": OwnNorm,
    "replaced": keeps(replace, ZEROS),
    "in place": keeps(in_place, ZEROS),
    "_buffers": keeps(register, ZEROS),
    "register_buffer": keeps(register_again, ZEROS),
    ".data": keeps(data, ZEROS),
    ".data in place": keeps(data_in_place, ZEROS),
    "NumPy": keeps(by_numpy, ZEROS),
    "rarely": keeps(rarely, ZEROS),
    "complex": keeps(in_place, ZEROS.to(torch.complex64)),
    "complex, replaced": keeps(replace, ZEROS.to(torch.complex64)),
    "int64": keeps(count_by_two, torch.full((WIDTH,), LARGE)),
    "-0.0": keeps(negate, ZEROS),
    "bool": keeps(exceeds, ZEROS.bool()),
    "fp64": keeps(in_place, ZEROS.double()),
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


# The product of what a step is made of.


class Case(NamedTuple):
    kind: str  # of buffer
    layout: str
    optimizer: str
    bf16: bool
    accumulate: int  # steps of virtual ranks per update
    ema: bool


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05),
    "own": lambda model: torch.optim.RAdam(model.parameters(), lr=0.05),
    "muon": lambda model: Muon(Muon.groups(model), lr=0.05),
}
CASES = [
    Case(*each)
    for each in product(KINDS, ("even", "whole"), OPTIMIZERS, (False, True), (1, 2), (False, True))
    if each[2] != "muon"
]
EACH = len(CASES) // len(KINDS)
# One of each kind. The other values occur in all pairs but a few.
SAMPLE = [CASES[EACH * number + 13 * number % EACH] for number in range(len(KINDS))]
MUON = [case._replace(layout="whole", optimizer="muon") for case in SAMPLE[::5]]
# Ranks, transport, replicas.
PLACES = [
    (1, "auto", 0),
    *((world, transport, 0) for world, transport in product((2, 4), ("process_group", "shared_memory"))),
    *((4, transport, 2) for transport in ("process_group", "shared_memory")),
]


def made(case: Case, transport: str, replicas: int) -> nn.Module:
    torch.manual_seed(0)
    options: dict[str, Any] = {"layout": case.layout, "transport": transport, "virtual_ranks": V}
    if case.bf16:
        options["precision"] = Precision(param=torch.bfloat16)
    if replicas:
        options["mesh"] = mesh(replicas, dist.get_world_size() // replicas)
    return shard(Net(case.kind), units=[Block], **options)


def computing(model: nn.Module, step: int) -> Callable[[int], Tensor]:
    def compute(number: int) -> Tensor:
        with shardtrain.virtual_rank(model, number, seed=5, step=step):
            x, y = images(step, number)
            loss = F.cross_entropy(model(x).float(), y)
            loss.backward()
        return loss

    return compute


def results(cases: list[Case], transport: str, replicas: int, replays: bool) -> list[str]:
    """A digest of each case: gradients, weights, buffers and averages of two updates."""
    found = []
    for case in cases:
        model = made(case, transport, replicas)
        optimizer = OPTIMIZERS[case.optimizer](model)
        ema = Ema(model, 0.5) if case.ema else None
        state = hashlib.sha256()
        for step in range(2 * case.accumulate):
            if replays:
                shardtrain.replay(model, computing(model, step), neighbour=step > 0)
            else:
                for number in shardtrain.introspect(model).virtual_ranks:
                    computing(model, step)(number)
            if step % case.accumulate < case.accumulate - 1:
                continue
            with shardtrain.unsharded(model, grads=True, writeback=False):
                state.update(bits(param.grad.as_subclass(Tensor) for param in model.parameters()))
            shardtrain.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if ema is not None:
                ema.update(step + 1)
        with nullcontext() if ema is None else ema.swapped():
            state.update(bits(shardtrain.full_state_dict(model).values()))
        state.update(bits([*shardtrain.full_state_dict(model).values(), *model.buffers()]))
        found.append(state.hexdigest()[:12])
    return found


def check_product(on_ranks: Any, cases: list[Case], steps: tuple[int, ...]) -> None:
    """Compare with a single rank's results. Each place computes each case, or one of seven per step."""
    [alone] = on_ranks(1, results, cases, "auto", 0, False)
    different = []
    for number, (world, *place) in enumerate(PLACES):
        chosen = [at for at in range(len(cases)) if (at - number) % len(PLACES) in steps]
        given = [cases[at] for at in chosen]
        for found in on_ranks(world, results, given, *place, replays=number % 2 == 0):
            pairs = zip(chosen, found, strict=True)
            different += [(world, place, cases[at]) for at, digest in pairs if digest != alone[at]]
    assert not different


@pytest.mark.release
def test_a_sample_of_the_product_has_the_same_bits_with_and_without_replays(on_ranks: Any) -> None:
    check_product(on_ranks, SAMPLE, (0,))


@pytest.mark.release
def test_muon_has_the_same_bits(on_ranks: Any) -> None:
    check_product(on_ranks, MUON, (0, 3))


@pytest.mark.release
@pytest.mark.parametrize("first", range(0, len(CASES), 64))
def test_an_eighth_of_the_product_has_the_same_bits_with_and_without_replays(
    on_ranks: Any, first: int
) -> None:
    check_product(on_ranks, CASES[first : first + 8], tuple(range(len(PLACES))))


FAULTS = ("forward", "backward", "buffer")


def lie(model: nn.Module, fault: str) -> None:
    """Have this rank compute another output, gradient or buffer from now on."""

    def forward(_: nn.Module, __: Any, found: Tensor) -> Tensor:
        return found * 1.5

    def backward(_: nn.Module, __: Any, found: Tensor) -> None:
        if found.requires_grad:
            found.register_hook(lambda grad: grad * 1.5)

    def buffer(keeps: nn.Module, _: Any, __: Any) -> None:
        next(keeps.buffers()).data.view(torch.uint8)[0] ^= 1

    if fault == "buffer" and [*model.keeps.buffers()]:
        model.keeps.register_forward_hook(buffer)
    else:
        model.block.conv.register_forward_hook(backward if fault == "backward" else forward)


def told_of_lies(cases: list[Case], transport: str, replicas: int) -> list[str]:
    told = []
    for number, case in enumerate(cases):
        model = made(case, transport, replicas)
        shardtrain.replay(model, computing(model, 0), step=0)
        model.zero_grad()
        if dist.get_rank() == number % 4:
            lie(model, FAULTS[number % 3])
        with pytest.raises(ReplayMismatch) as error:
            shardtrain.replay(model, computing(model, 1), step=1)
        told.append(str(error.value))
    return told


def check_lies(on_ranks: Any, cases: list[Case], place: tuple[str, int]) -> None:
    texts = on_ranks(4, told_of_lies, cases, *place)
    assert all(each == texts[0] for each in texts)
    for number, (case, text) in enumerate(zip(cases, texts[0], strict=True)):
        assert f": rank {number % 4} computes wrong. First differs" in text, (case, text)
        if FAULTS[number % 3] == "buffer" and case.kind != "none":
            assert "First differs buffer keeps." in text, (case, text)


def test_a_lie_is_found_in_a_sample_of_the_product(on_ranks: Any) -> None:
    check_lies(on_ranks, SAMPLE[::2], ("shared_memory", 2))


@pytest.mark.release
@pytest.mark.parametrize("place", [place for world, *place in PLACES if world == 4])
@pytest.mark.parametrize("first", range(0, len(CASES), 256))
def test_a_lie_is_found_over_the_product(on_ranks: Any, first: int, place: tuple[str, int]) -> None:
    check_lies(on_ranks, CASES[first : first + 8], place)

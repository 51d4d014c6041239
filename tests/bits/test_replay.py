"""Replays: a neighbour finds each rank that computes wrong, and none that does not."""

import hashlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shardtrain
from shardtrain import Precision, ReplayMismatch
from shardtrain.bits import replay as replays
from shardtrain.bits.replay import digest
from shardtrain.checkpoint.store import steps_in

from small import Block, images, shard
from tiny import QUIET, at_once, final, result_of, run_to_end

V = 4


class Net(nn.Module):
    """A convolution, a sum and a normalisation in each of three units, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3)
        self.drop = nn.Dropout(0.2)
        self.fc = nn.Linear(6, 5)
        self.blocks = nn.Sequential(*(Block(6) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(self.blocks(self.stem(x)).mean((2, 3))))


class Faulty(torch.autograd.Function):
    """A function that scales one channel by 1 + 2^-9: of a tensor, or of its gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, in_backward: bool) -> Tensor:
        ctx.in_backward = in_backward
        return x.clone() if in_backward else Faulty.of(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Faulty.of(grad) if ctx.in_backward else grad, None

    @staticmethod
    def of(x: Tensor) -> Tensor:
        wrong = x.clone()
        wrong[:, 1] *= 1 + 2**-9
        return wrong


def bits_of(tensors: Iterable[Tensor]) -> str:
    plain = [each.detach().as_subclass(Tensor) for each in tensors]
    return hashlib.sha256(b"".join(bytes(each.contiguous().numpy()) for each in plain)).hexdigest()


@contextmanager
def planted(model: nn.Module, fault: int) -> Iterator[str]:
    """Have a module of this rank compute wrong; yield its unit. Every fifth fault depends on the data."""
    block = fault // 3 % 3
    module = [model.blocks[block].conv, model.blocks[block].relu, model.blocks[block].norm][fault % 3]
    by_pattern = fault % 5 == 4
    in_backward = fault % 2 == 1

    def wrong(_: nn.Module, args: Any, found: Tensor) -> Tensor:
        if by_pattern and int(digest(args[0])) % 3:
            return found
        return Faulty.apply(found, in_backward)

    handle = module.register_forward_hook(wrong)
    try:
        yield f"blocks.{block}"
    finally:
        handle.remove()


def step_of(model: nn.Module, step: int) -> Callable[[int], Tensor]:
    def compute(number: int) -> Tensor:
        with shardtrain.virtual_rank(model, number, seed=3, step=step):
            loss = F.cross_entropy(model(images(step, number)[0]).float(), images(step, number)[1])
            loss.backward()
        return loss

    return compute


def prepared(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = shard(Net(), units=[Block], virtual_ranks=V, **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def found(faults: range) -> list[str]:
    """What ranks are told of each fault, or how many replays found nothing."""
    model, _ = prepared()
    world = dist.get_world_size()
    before = bits_of(model.parameters())
    told = []
    for fault in faults:
        with planted(model, fault) if dist.get_rank() == fault % world else nullcontext():
            try:
                for step in range(30):  # a pattern may not be in the first images
                    shardtrain.replay(model, step_of(model, step), step=step)
                    model.zero_grad()
                told.append("nothing")
            except ReplayMismatch as error:
                told.append(str(error))
        assert all(param.grad is None for param in model.parameters())
    assert bits_of(model.parameters()) == before
    return told


def check_found(told: list[list[str]], faults: range, world: int) -> None:
    assert all(texts == told[0] for texts in told)
    for fault, text in zip(faults, told[0], strict=True):
        assert text.startswith("step "), (fault, text)
        rank = fault % world
        unit = f"blocks.{fault // 3 % 3}"
        if world > 2:
            assert f": rank {rank} computes wrong" in text, (fault, text)
        else:
            assert " on ranks 0 and 1: one of them computes wrong" in text, (fault, text)
        # In backward a unit's own gradients after its activation are right.
        first = text.partition("First differs ")[2].partition(", then ")
        assert unit in first[0], (fault, text)
        assert "gradient" in (first[0] if fault % 2 else first[2])


@pytest.mark.parametrize(
    ("world", "faults"),
    [
        pytest.param(2, range(5), marks=pytest.mark.long),
        (4, range(5)),
        *(pytest.param(n, range(25), marks=pytest.mark.release) for n in (2, 4)),
    ],
)
def test_a_lasting_fault_is_found_and_named(ranks: Any, world: int, faults: range) -> None:
    check_found(ranks(world, found, faults), faults, world)


def passing(at: int) -> str:
    """What ranks are told of a fault of rank 0 that comes in its computation number ``at`` alone."""
    model, _ = prepared()
    calls = 0

    def once(_: nn.Module, args: Any, found: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return Faulty.of(found) if calls == at and dist.get_rank() == 0 else found

    model.blocks[1].conv.register_forward_hook(once)
    with pytest.raises(ReplayMismatch) as error:
        shardtrain.replay(model, step_of(model, 0), step=7)
    return str(error.value)


@pytest.mark.parametrize(("world", "at"), [(1, 1), (2, 1), (2, 3)])
def test_a_fault_that_passes_is_found_and_named_by_two_ranks_and_by_one(
    on_ranks: Any, world: int, at: int
) -> None:
    texts = on_ranks(world, passing, at)
    assert len({*texts}) == 1
    number = 0 if at == 1 else 2  # a neighbour's comes after the two of its own
    ranks = "rank 0" if world == 1 else "ranks 0 and 1"
    # Which gradient differs first depends on the kernels: that of the bias may round to the same bits.
    assert re.match(
        f"step 7: virtual rank {number} has other bits on {ranks}: rank 0 computes wrong. First differs the "
        r"output of blocks\.1, then the gradient of fc\.(bias|weight) in the root. There was no update",
        texts[0],
    )


class Forgets(nn.Module):
    """A module that scales by what each call changes, and no buffer holds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.calls = 0
        self.mean = torch.zeros(())
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        kinds: dict[str, Callable[[], Any]] = {
            "counter": lambda: self.calls,
            "attribute": lambda: self.mean,
            "generator": lambda: torch.rand((), generator=self.generator),
            "np.random": lambda: float(np.random.rand()),
        }
        return x * (1 + kinds[self.kind]())


def with_state(neighbour: bool) -> list[str]:
    """What ranks are told of each kind of state."""
    told = []
    for kind in ("counter", "attribute", "generator", "np.random"):
        torch.manual_seed(0)
        layers = (
            nn.Conv2d(3, 6, 3),
            Block(6),
            Forgets(kind),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(6, 5),
        )
        model = shard(nn.Sequential(*layers), units=[Block], virtual_ranks=V)
        with pytest.raises(ReplayMismatch) as error:
            shardtrain.replay(model, step_of(model, 0), step=1, neighbour=neighbour)
        assert all(param.grad is None for param in model.parameters())
        told.append(str(error.value))
    return told


@pytest.mark.parametrize("world", [1, 2])
def test_state_outside_of_buffers_is_refused(on_ranks: Any, world: int) -> None:
    """The first rank alone is told of: all of them differ."""
    causes = (
        r".*Python, a tensor attribute .*, a generator of its own, np\.random, a second model in training"
    )
    first = (
        r"First differs the output of the root, then the gradient of 5\.(weight|bias) in the root\. "
        "There was no"
    )
    for text in on_ranks(world, with_state, False)[0]:
        assert re.match(
            r"step 1: virtual rank 0 had other bits as rank 0 computed it again: results would depend on the "
            rf"number of ranks\. {first} update; usual causes are .*{causes}",
            text,
        ), text
    for text in on_ranks(world, with_state, True)[0]:
        ranks = "rank 0" if world == 1 else "ranks 0 and 1"
        assert re.match(
            rf"step 1: virtual rank 0 has other bits on {ranks}: one of them computes wrong, or no machine "
            rf"does\. {first} update; continue .* If a computation has other bits each time, .*{causes}",
            text,
        ), text


def beside(sharded: bool, virtual: bool, trains: bool) -> str:
    """What ranks are told of a second model in the loss."""
    model, _ = prepared()
    second = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6))
    if sharded:
        shard(second, virtual_ranks=V if virtual else 0)
    second.train(trains)

    def compute(number: int) -> Tensor:
        with shardtrain.virtual_rank(model, number, seed=3):
            x, y = images(0, number)
            logits = model(x)
            with torch.no_grad():
                second(logits)
            loss = F.cross_entropy(logits, y)
            loss.backward()
        return loss

    try:
        shardtrain.replay(model, compute, neighbour=False)
    except ValueError as error:
        return str(error)
    return "right"


@pytest.mark.parametrize("sharded", [False, True])
def test_a_second_model_whose_statistics_change_is_refused(on_ranks: Any, sharded: bool) -> None:
    [told] = on_ranks(1, beside, sharded, virtual=False, trains=True)
    assert told.startswith(
        "buffer running_mean of BatchNorm1d, which is not in the model with virtual ranks, was"
    )
    assert "Call eval() on that module" in told
    assert on_ranks(2, beside, sharded, virtual=False, trains=False) == ["right"] * 2


def gradients_elsewhere(every: int) -> list[Any]:
    """Gradients of what is not sharded, in each step: of an ignored head, and of numbers in the losses."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), Block(6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))
    model = shard(net, units=[Block], virtual_ranks=V, ignored=[net[4]])
    temperature = nn.Parameter(torch.ones(()))
    hidden = nn.Parameter(torch.ones(()))  # of a second loss
    optimizer = torch.optim.SGD([*model.parameters(), temperature, hidden], lr=0.1)
    found = []
    for step in range(3):

        def compute(number: int, step: int = step) -> Tensor:
            with shardtrain.virtual_rank(model, number, seed=3, step=step):
                x, y = images(step, number)
                loss = F.cross_entropy(model(x) / temperature, y)
                loss.backward()
                if step:
                    (hidden * number).backward()
            return loss

        if every and step % every == 0:
            shardtrain.replay(model, compute)
        else:
            for number in shardtrain.introspect(model).virtual_ranks:
                compute(number)
        rest = [*net[4].parameters(), temperature, hidden]
        found.append([param.grad.tolist() for param in rest if param.grad is not None])
        for param in rest:
            if param.grad is not None:
                shardtrain.comm.all_reduce(param.grad)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of parameters that are not sharded: they are reduced here
            optimizer.step()
        if step:  # the second step adds to the gradients of the first
            optimizer.zero_grad()
    return found


def test_a_replay_leaves_no_gradient_in_parameters_that_are_not_sharded(on_ranks: Any) -> None:
    assert on_ranks(2, gradients_elsewhere, 1) == on_ranks(2, gradients_elsewhere, 0)


def test_a_loss_without_its_graph_is_refused() -> None:
    model = shardtrain.shard(nn.Linear(3, 3), virtual_ranks=2)

    def compute(number: int) -> Tensor:
        with shardtrain.virtual_rank(model, number):
            loss = model(torch.ones(1, 3)).sum()
            loss.backward()
        return loss.detach()

    with pytest.raises(
        ValueError, match="has returned a loss without its graph: return that on which backward"
    ):
        shardtrain.replay(model, compute)


class Running(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 2, 3))
        return x


def wrong_statistics(liars: dict[int, float], own: bool) -> str:
    """What ranks are told where ``liars`` compute other statistics, each by its factor; nothing else."""
    torch.manual_seed(0)
    norm = Running() if own else nn.BatchNorm2d(6)
    model = shard(nn.Sequential(nn.Conv2d(3, 6, 3), norm, nn.Conv2d(6, 5, 3)), units=[], virtual_ranks=V)
    factor = liars.get(dist.get_rank(), 1.0)

    def wrong(_: nn.Module, __: Any, found: Tensor) -> None:
        buffer = next(norm.buffers())
        buffer.data.mul_(factor)

    norm.register_forward_hook(wrong)

    def compute(number: int) -> Tensor:
        with shardtrain.virtual_rank(model, number, seed=3):
            loss = model(images(0, number)[0]).square().mean()
            loss.backward()
        return loss

    try:
        shardtrain.replay(model, compute)
    except ReplayMismatch as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("liars", "told"),
    [
        ({2: 1.5}, "virtual rank 2 has other bits on ranks 1 and 2: rank 2 computes wrong"),
        ({1: 1.5, 3: 1.25}, "virtual rank 0 has other bits on ranks 0 and 3: ranks 1 and 3 compute wrong"),
        ({0: 1.5, 1: 1.25}, "virtual rank 0 has other bits on ranks 0 and 3: ranks 0 and 1 compute wrong"),
        (
            {1: 1.5, 3: 1.5},
            "virtual rank 0 has other bits on ranks 0 and 3: one of them computes wrong, or no",
        ),
    ],
)
def test_wrong_statistics_are_found_and_all_that_err_are_named(on_ranks: Any, liars: Any, told: str) -> None:
    for own in (False, True):
        texts = on_ranks(4, wrong_statistics, liars, own)
        assert len({*texts}) == 1
        buffer = "1.mean" if own else "1.running_mean"
        assert texts[0].startswith(told)
        assert f"First differs buffer {buffer}. There was no update" in texts[0]


def trained(every: int, bf16: bool = False, steps: int = 4, **options: Any) -> list[Any]:
    """Bits of each step's gradients, losses and buffers, and of the weights at the end."""
    if bf16:
        options["precision"] = Precision(param=torch.bfloat16)
    model, optimizer = prepared(**options)
    bits: list[Any] = []
    for step in range(steps):
        compute = step_of(model, step)
        with shardtrain.comm.meter() as meter:
            if every and step % every == 0:
                losses = shardtrain.replay(model, compute, step=step)
            else:
                losses = [compute(number) for number in shardtrain.introspect(model).virtual_ranks]
        bits.append((bits_of(losses), bits_of(model.buffers()), torch.rand(1).item()))
        bits.append(bits_of(param.grad.as_subclass(Tensor) for param in model.parameters()))
        bits.append(meter.calls["reduce_scatter"])
        if step != 1:  # a replay finds gradients of the step before, to which its step adds
            optimizer.step()
            optimizer.zero_grad()
    return [*bits, bits_of(shardtrain.full_state_dict(model).values())]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_replay_changes_no_bit_of_a_run(ranks: Any, world: int) -> None:
    assert ranks(world, trained, 2) == ranks(world, trained, 0)


def not_finite(in_backward: bool) -> str:
    model, _ = prepared()
    weight = model.blocks[1].conv.weight
    if dist.get_rank() == 1 and in_backward:
        weight.register_hook(lambda grad: grad * torch.inf)
    elif dist.get_rank() == 1:
        model.blocks[1].norm.register_forward_hook(lambda *found: found[2] * torch.nan)
    with shardtrain.recording(model, lambda tensor: tensor.isfinite().all()) as record:
        for number in shardtrain.introspect(model).virtual_ranks:
            step_of(model, 0)(number)
    return record.first_false()


def test_the_first_that_is_not_finite_is_named(on_ranks: Any) -> None:
    text = "the gradient of blocks.1.conv.weight in blocks.1"
    assert on_ranks(2, not_finite, True) == ["", text]
    text = "the output of blocks.1, then the gradient of fc.bias in the root"
    assert on_ranks(2, not_finite, False) == ["", text]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_a_digest_sees_each_bit(dtype: torch.dtype) -> None:
    values = torch.randn(3, 1000).to(dtype)
    known = digest(values)
    assert digest(values.clone().t().contiguous().t()) == known
    for at in ((0, 0), (1, 500), (2, 999)):
        changed = values.clone()
        changed.view(torch.uint8)[at[0], at[1] * values.itemsize] ^= 1
        assert digest(changed) != known
    with patch.object(replays, "_BLOCK", 700):
        assert digest(values) != known  # in several blocks
        assert dtype is torch.bool or digest(values) != digest(values.flip(0))


def test_mistakes_in_replays_are_named() -> None:
    model = shardtrain.shard(nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"replay\(\) of a model without virtual ranks"):
        shardtrain.replay(model, lambda number: torch.zeros(()))
    with pytest.raises(ValueError, match="is not sharded"), shardtrain.recording(nn.Linear(3, 3), torch.sum):
        pass
    plain = nn.Sequential(nn.Linear(3, 3))
    names = ["0", "head"]
    with pytest.raises(AttributeError, match="head"), shardtrain.recording(plain, torch.sum, names):
        pass
    assert not plain[0]._forward_hooks


@pytest.mark.long
def test_a_run_with_replays_has_the_same_bits(on_ranks: Any, tmp_path: Path) -> None:
    given = ("parallel.virtual_ranks=4", "train.mixup=0.2", "train.cutmix=1", QUIET)
    given = (*given, "augment=photo", "train.clip_grad_norm=1")
    for name, every in (("without", 0), ("with", 3)):
        folder = tmp_path / name
        assert on_ranks(2, run_to_end, str(folder), *given, f"train.replay_every={every}") == ["finished"] * 2
    assert final(tmp_path / "with") == final(tmp_path / "without")
    a, b = (result_of(tmp_path / name) for name in ("with", "without"))
    assert (a["loss/train"], a["acc1/train"]) == (b["loss/train"], b["acc1/train"])


def wears_out() -> None:
    """Have every convolution of the last rank compute wrong from now on."""
    if dist.get_rank() == dist.get_world_size() - 1:

        def wrong(module: nn.Module, _: Any, found: Any) -> Any:
            return Faulty.of(found) if isinstance(module, nn.Conv2d) else found

        GLOBAL.append(nn.modules.module.register_module_forward_hook(wrong))


@at_once
def worn_out(folder: str, *given: str) -> str:
    try:
        return run_to_end(folder, *given, at={5: wears_out})
    finally:
        while GLOBAL:
            GLOBAL.pop().remove()


GLOBAL: list[Any] = []


def test_a_run_stops_before_the_update_where_a_rank_computes_wrong(on_ranks: Any, tmp_path: Path) -> None:
    given = ("parallel.virtual_ranks=4", "train.replay_every=3", "checkpoint.every_steps=1", QUIET)
    endings = on_ranks(4, worn_out, str(tmp_path), *given)
    assert len({*endings}) == 1
    assert endings[0].startswith(
        "ReplayMismatch step 6: virtual rank 0 has other bits on ranks 0 and 3: rank 3 computes wrong. "
        "First differs the output of the root, then the gradient of "
    )
    assert steps_in(tmp_path / "checkpoints")[-1] == 5
    assert on_ranks(2, run_to_end, str(tmp_path), *given) == ["finished"] * 2  # without that machine
    assert "continuing after step 5 of 10" in (tmp_path / "log.txt").read_text()


def test_replays_need_ranks_that_compute_virtual_ones(on_ranks: Any, tmp_path: Path) -> None:
    given = ("parallel.virtual_ranks=2", "train.replay_every=1", "train.max_steps=1", QUIET)
    on_ranks(3, run_to_end, str(tmp_path), *given)
    log = (tmp_path / "log.txt").read_text()
    assert "parallel.virtual_ranks=2 cannot be computed on 3 ranks, only on a power of two" in log
    assert "this run trains without them, so its last bits differ, and replays" in log

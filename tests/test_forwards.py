"""What runs inside units: compiled forwards, activations computed again, and both together."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import VisionTransformer
from torchvision.models.vision_transformer import EncoderBlock

import shardtrain
from shardtrain import comm
from shardtrain.engine.hooks import engine_of
from shardtrain.engine.recompute import require_inductor
from shardtrain.job.step import Step
from shardtrain.plan.memory import memory_of_step

from pool import each_rank
from small import (
    Block,
    OddNet,
    assert_at_rest,
    assert_same_parameters,
    images,
    sgd,
    sharded_and_replica,
)

Inside = Callable[[nn.Module], None]
BF16 = shardtrain.Precision(param=torch.bfloat16, output=torch.float32)


class Dropping(OddNet):
    """With a random draw."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(DroppingBlock(7), DroppingBlock(7))


class Counting(Dropping):
    """With a norm whose statistics depend on how many batches it has seen; torch does not compile that."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm.momentum = None


class DroppingBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.3, self.training)


class Vit(VisionTransformer):
    """On 5×5 images. Without dropout, which aot_eager cannot differentiate behind attention."""

    def __init__(self) -> None:
        super().__init__(5, 1, 2, 3, 9, 19, num_classes=5)


MODELS = {OddNet: Block, Vit: EncoderBlock, Dropping: DroppingBlock, Counting: DroppingBlock}


def compiled(model: nn.Module) -> None:
    shardtrain.compile_units(model, backend="aot_eager")


checkpointed = shardtrain.checkpoint_activations


def both(model: nn.Module) -> None:
    compiled(model)
    checkpointed(model)


@contextlib.contextmanager
def fresh_compiler() -> Iterator[dict[str, int]]:
    """Torch's counts of what it compiles in here, from zero. Nothing compiled is left behind."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        # Torch asks for it itself; by default it keeps the warning from users, too.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf Tensor")
        yield counters["stats"]
    assert not counters["graph_break"]
    torch._dynamo.reset()


def train(model: nn.Module, after: Callable[[int], None] = lambda step: None) -> list[float]:
    """Train three clipped steps of two micro-batches; return this rank's losses."""
    if isinstance(model, DistributedDataParallel):
        no_sync, clip = model.no_sync, partial(nn.utils.clip_grad_norm_, [*model.parameters()])
    else:
        no_sync, clip = (partial(f, model) for f in (shardtrain.no_sync, shardtrain.clip_grad_norm_))
    optimizer, losses = sgd(model), []
    for step in range(3):
        torch.manual_seed(step)
        for micro in range(2):
            x, y = images(2 * step + micro)
            with no_sync() if micro == 0 else contextlib.nullcontext():
                loss = F.cross_entropy(model(x), y)
                (loss / 2).backward()
            losses.append(loss.item())
        clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        after(step)
    return losses


@pytest.mark.parametrize(
    ("make", "inside", "bf16", "reshard"),
    [
        (OddNet, compiled, False, True),
        (Counting, checkpointed, False, True),
        (Vit, both, True, True),
        (Dropping, both, False, False),
        pytest.param(Vit, compiled, False, True, marks=pytest.mark.long),
    ],
)
@each_rank(3, transport="auto")
def test_units_compute_what_others_do(
    make: type[nn.Module], inside: Inside, bf16: bool, reshard: bool
) -> None:
    """Bit for bit, with micro-batches, clipping, dropout, running statistics; and what DDP computes."""
    options = {"precision": BF16 if bf16 else None, "reshard_after_forward": reshard, "units": [MODELS[make]]}
    model, replica = sharded_and_replica(make, **options)
    plain, _ = sharded_and_replica(make, **options)
    with fresh_compiler() as stats:
        inside(model)
        graphs: list[int] = []
        losses = train(model, after=lambda step: graphs.append(stats["unique_graphs"]))
    assert graphs[1] == graphs[2]  # nothing is compiled after the second step
    rounding = 5e-2 if bf16 else 1e-5
    # A compiled backward adds up what comes from attention's inputs in another order.
    exact = make is not Vit or not graphs[2]
    off = {"rtol": 0, "atol": 0} if exact else {"rtol": rounding, "atol": rounding}
    torch.testing.assert_close(losses, train(plain), **off)
    whole = [shardtrain.full_state_dict(each) for each in (model, plain)]
    torch.testing.assert_close(*whole, **off)
    assert losses == pytest.approx(train(replica), rel=rounding)
    assert_same_parameters(model, replica, rounding)


# compiling


@pytest.mark.parametrize("bf16", [pytest.param(False, marks=pytest.mark.long), True])
@each_rank(2, transport="auto")
def test_compiled_units_evaluate(bf16: bool) -> None:
    """Evaluation at several sizes, whole parameters, then training again: few graphs, right results."""
    options = {"precision": BF16 if bf16 else None}
    (model, _), (plain, _) = (sharded_and_replica(OddNet, **options) for _ in range(2))
    with fresh_compiler() as stats:
        compiled(model)
        assert train(model) == train(plain)
        assert stats["unique_graphs"] == 1  # for two equal blocks

        def looks() -> list[torch.Tensor]:
            found = []
            for each in (model, plain):
                each.eval()
                with torch.no_grad():
                    found += [each(images(9, n=n)[0]) for n in (6, 4, 3)]
                    with shardtrain.unsharded(each):
                        found.append(each(images(9)[0]))
                each.train()
            return found

        for _ in range(2):
            found = looks()
            assert all(torch.equal(a, b) for a, b in zip(found[:4], found[4:], strict=True))
        assert stats["unique_graphs"] == 3 + bf16  # evaluation, at any size, and with fp32 parameters
        assert train(model) == train(plain)
        assert stats["unique_graphs"] == 3 + bf16


@each_rank(1, transport="auto")
def test_what_is_computed_again_is_compiled() -> None:
    """What is computed again in backward is compiled, too."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    ran: list[str] = []

    def counting(name: str) -> Any:
        def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
            def run(*args: Any) -> Any:
                ran.append(name)
                return graph(*args)

            return make_boxed_func(run)

        return compiler

    model, _ = sharded_and_replica()
    with fresh_compiler():
        shardtrain.compile_units(
            model, backend=aot_autograd(fw_compiler=counting("forward"), bw_compiler=counting("backward"))
        )
        shardtrain.checkpoint_activations(model)
        model(images(0)[0]).sum().backward()
    assert ran == ["forward"] * 2 + ["forward", "backward"] * 2


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@each_rank(2, transport="auto")
def test_inductor() -> None:
    (model, _), (plain, _) = (sharded_and_replica() for _ in range(2))
    environment = dict(os.environ)
    try:
        with fresh_compiler():
            shardtrain.compile_units(model)
            checkpointed(model)
            assert train(model) == pytest.approx(train(plain), rel=1e-5)
    finally:  # inductor adds to it
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
    whole = [shardtrain.full_state_dict(each) for each in (model, plain)]
    torch.testing.assert_close(*whole, rtol=1e-5, atol=1e-5)


def test_inductor_without_a_compiler() -> None:
    model = shardtrain.shard(OddNet(), units=[Block])
    missing = inductor.patch({"cpp.cxx": ("no-such-compiler",)})
    message = r"needs a C\+\+ compiler, and there is none: install g\+\+"
    with missing, pytest.raises(ValueError, match=message):
        shardtrain.compile_units(model)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="compiling for cuda needs Triton"):
            require_inductor(torch.device("cuda"))


@pytest.mark.long
def test_many_kinds_of_one_class() -> None:
    """More than torch compiles of one function: torch's own units, and one unit with other settings."""
    drops = [nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.05 * i)) for i in range(9)]
    plain = nn.Sequential(nn.Linear(4, 5), *drops, *(nn.Linear(5 + i, 6 + i) for i in range(9)))
    model = shardtrain.shard(copy.deepcopy(plain), units=lambda name, _: name.count(".") == 0)
    with fresh_compiler() as stats:
        compiled(model)
        for x in torch.randn(2, 3, 4):
            torch.manual_seed(0)
            y = model(x)
            torch.manual_seed(0)
            torch.testing.assert_close(y, plain(x))
        assert stats["unique_graphs"] == 19


# checkpointing


@each_rank(3, transport="auto")
def test_checkpointed_units_hold_less_and_move_the_same() -> None:
    """What a step moves, without and with."""
    model, _ = sharded_and_replica(lambda: Deep(6))
    moved, kept = [], []
    for again in (False, True):
        if again:
            checkpointed(model)
        train(model)
        with comm.meter() as meter:
            train(model)
        moved.append(dict(meter.calls) | dict(meter.bytes))
        kept.append(peak_of_activations(model))
        assert_at_rest(model)
    inputs = 32 * 7 * 3 * 3 * 4  # bytes of a block's
    # Each of six blocks keeps two such tensors without; with, one, and both of one block at a time.
    assert kept[0] - kept[1] >= 4 * inputs
    without, with_it = moved[0], moved[1]
    assert without == with_it


class Deep(OddNet):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(7) for _ in range(blocks)))


def peak_of_activations(model: nn.Module) -> int:
    """Bytes, counted tensor by tensor."""
    batch = images(0, n=32)
    step = Step(model, F.cross_entropy, sgd(model), None)
    step([batch])
    return memory_of_step(step, [batch]).most("activations")


def test_a_copy_runs_its_own_forward() -> None:
    model = shardtrain.shard(OddNet(), units=[Block])
    with fresh_compiler():
        both(model)
        twin = copy.deepcopy(model)
        assert all(unit.module.forward.__self__ is unit.module for unit in engine_of(twin).units[1:])
        x, _ = images(0, rank=0)
        expected = model(x)
        with torch.no_grad():
            next(model.parameters()).fill_(math.nan)
        assert torch.equal(twin(x), expected)
        twin(x).sum().backward()
        assert all(param.grad is None for param in model.parameters())


# mistakes


class Elsewhere(nn.Module):
    """Two linear units, one of which does what the test asks."""

    def __init__(self, does: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = Doing(does), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x * 1.0))


class Doing(nn.Module):
    def __init__(self, does: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.does = nn.Linear(4, 4), does
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.does(self, self.linear(x))


def elsewhere(does: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda module, y: y) -> nn.Module:
    return shardtrain.shard(Elsewhere(does), units=lambda name, _: name in ("first", "second"))


def breaks_the_graph(module: nn.Module, y: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return y


def counts(module: nn.Module, y: torch.Tensor) -> torch.Tensor:
    module.count.add_(1)
    return y


def test_a_unit_that_is_not_one_graph() -> None:
    """It is refused, unless several are asked for."""
    x = torch.randn(3, 4)
    model, other = elsewhere(breaks_the_graph), elsewhere(breaks_the_graph)
    expected = other(x)
    with contextlib.suppress(AssertionError), fresh_compiler():  # which finds the break
        shardtrain.compile_units(model, backend="eager")
        with pytest.raises(
            ValueError, match=r"^unit first cannot be compiled as one graph: \w.* do not compile$"
        ):
            model(x)
    with contextlib.suppress(AssertionError), fresh_compiler():
        shardtrain.compile_units(other, backend="eager", fullgraph=False)
        assert torch.equal(other(x), expected)


def test_buffers_that_a_unit_changes() -> None:
    model = elsewhere(counts)
    checkpointed(model)
    with pytest.raises(ValueError, match="the buffer count of unit first changed in place after it began"):
        model(torch.randn(3, 4)).sum().backward()
    with torch.no_grad():
        model(torch.randn(3, 4))


def test_inputs_that_are_changed_afterwards() -> None:
    model = shardtrain.shard(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), units=[nn.Linear])
    checkpointed(model)
    x = torch.randn(3, 4)
    y = model(x)
    x.add_(1)
    with pytest.raises(ValueError, match="inputs of unit 0 changed in place after it began"):
        y.sum().backward()


def test_wrong_order_and_twice() -> None:
    model = elsewhere()
    with pytest.raises(ValueError, match="Linear is not sharded: pass the module that"):
        shardtrain.compile_units(nn.Linear(2, 2))
    compiled(model)
    with pytest.raises(ValueError, match="first is compiled already: compile units once, then checkpoint"):
        compiled(model)
    checkpointed(model)
    for again in (checkpointed, compiled):
        with pytest.raises(ValueError, match="first is checkpointed already"):
            again(model)


@pytest.mark.parametrize(
    "options", [{"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}], ids=str
)
def test_cuda_graphs_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="CUDA graphs read parameters where they lay"):
        shardtrain.compile_units(elsewhere(), **options)


def test_models_without_what_it_takes() -> None:
    alone = shardtrain.shard(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="nothing to compile: the model has no unit besides the root"):
        compiled(alone)
    with pytest.raises(ValueError, match="nothing to checkpoint: the model has no unit besides the root"):
        checkpointed(alone)
    patched = elsewhere()
    patched.second.forward = lambda x: x
    with pytest.raises(ValueError, match="the forward of second is no method of that module, but <function"):
        checkpointed(patched)


def test_parameters_of_two_units() -> None:
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)))
    plain[0][0].weight = plain[1][0].weight
    model = shardtrain.shard(plain, units=lambda name, _: name in ("0", "1"))
    with pytest.raises(ValueError, match="unit 0 cannot be compiled: parameters of its module 0 are shared"):
        compiled(model)
    checkpointed(model)
    model(torch.randn(3, 4)).sum().backward()


def test_units_inside_units() -> None:
    """Only inner ones are concerned: of outer ones all would be gathered at once."""
    model = shardtrain.shard(OddNet(), units=[nn.Sequential, Block])
    checkpointed(model)
    assert [u.name for u in engine_of(model).units if "forward" in vars(u.module)] == ["blocks.0", "blocks.1"]

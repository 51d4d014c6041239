"""What runs inside units: compiled, computed again, both; and options together, as people use them."""

import contextlib
import copy
import os
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models.vision_transformer import EncoderBlock

import shardtrain
from shardtrain import Precision, comm
from shardtrain.engine import api
from shardtrain.engine.recompute import require_inductor
from shardtrain.job.step import Step
from shardtrain.plan.memory import memory_of_step

from pool import each_rank
from small import (
    Block,
    OddNet,
    Parts,
    Vit,
    assert_at_rest,
    assert_same_parameters,
    images,
    like_a_replica,
    mesh,
    sgd,
    sharded_and_replica,
    train_in_micro_batches,
)
from test_transports import assert_replicas_are_equal

Inside = Callable[[nn.Module], None]
BF16 = shardtrain.Precision(param=torch.bfloat16, output=torch.float32)


def dropping() -> nn.Module:
    """With a random draw."""
    net = OddNet()
    net.blocks = nn.Sequential(DroppingBlock(7), DroppingBlock(7))
    return net


def counting() -> nn.Module:
    """With a norm whose statistics depend on how many batches it has seen; torch does not compile that."""
    net = dropping()
    for block in net.blocks:
        block.norm.momentum = None
    return net


class DroppingBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.3, self.training)


MODELS = {OddNet: Block, Vit: EncoderBlock, dropping: DroppingBlock, counting: DroppingBlock}


def compiled(model: nn.Module) -> None:
    shardtrain.compile_units(model, backend="aot_eager")


checkpointed = shardtrain.checkpoint_activations


def both(model: nn.Module) -> None:
    compiled(model)
    checkpointed(model)


def nothing(model: nn.Module) -> None:
    pass


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


@pytest.mark.parametrize(
    ("make", "inside", "bf16", "reshard"),
    [
        (counting, checkpointed, False, True),
        pytest.param(Vit, both, True, True, marks=pytest.mark.long),
        (dropping, both, False, False),
    ],
)
@each_rank(3, transport="auto")
def test_units_compute_what_others_do(
    make: Callable[[], nn.Module], inside: Inside, bf16: bool, reshard: bool
) -> None:
    """Bit for bit, with micro-batches, clipping, dropout, running statistics; and what DDP computes."""
    options = {"precision": BF16 if bf16 else None, "reshard_after_forward": reshard, "units": [MODELS[make]]}
    model, replica = sharded_and_replica(make, **options)
    plain, _ = sharded_and_replica(make, **options)
    with fresh_compiler() as stats:
        inside(model)
        graphs: list[int] = []
        losses = train_in_micro_batches(model, after=lambda step: graphs.append(stats["unique_graphs"]))
    assert graphs[1] == graphs[2]  # nothing is compiled after the second step
    rounding = 5e-2 if bf16 else 1e-5
    # A compiled backward adds up what comes from attention's inputs in another order.
    exact = make is not Vit or not graphs[2]
    off = {"rtol": 0, "atol": 0} if exact else {"rtol": rounding, "atol": rounding}
    torch.testing.assert_close(losses, train_in_micro_batches(plain), **off)
    whole = [shardtrain.full_state_dict(each) for each in (model, plain)]
    torch.testing.assert_close(*whole, **off)
    assert losses == pytest.approx(train_in_micro_batches(replica), rel=rounding)
    assert_same_parameters(model, replica, rounding)


@each_rank(2, transport="auto")
def test_compiled_units_evaluate() -> None:
    """Evaluation at several sizes, whole parameters, then training again: few graphs, right results."""
    (model, _), (plain, _) = (sharded_and_replica(OddNet, precision=BF16) for _ in range(2))
    with fresh_compiler() as stats:
        compiled(model)
        assert train_in_micro_batches(model) == train_in_micro_batches(plain)
        assert stats["unique_graphs"] == 1  # for two equal blocks

        @torch.no_grad()
        def outputs(net: nn.Module) -> list[torch.Tensor]:
            net.eval()
            found = [net(images(9, n=n)[0]) for n in (6, 4, 3)]
            with shardtrain.unsharded(net):
                found.append(net(images(9)[0]))
            net.train()
            return found

        for _ in range(2):
            torch.testing.assert_close(outputs(model), outputs(plain), rtol=0, atol=0)
        assert stats["unique_graphs"] == 4  # evaluation, at any size, and with fp32 parameters
        assert train_in_micro_batches(model) == train_in_micro_batches(plain)
        assert stats["unique_graphs"] == 4


@each_rank(1, transport="auto")
def test_what_is_computed_again_is_compiled() -> None:
    ran: list[int] = []

    def counting(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            ran.append(1)
            return graph(*args)

        return run

    model, _ = sharded_and_replica()
    with fresh_compiler():
        shardtrain.compile_units(model, backend=counting)
        shardtrain.checkpoint_activations(model)
        loss = model(images(0)[0]).sum()
        assert len(ran) == 3
        loss.backward()
    assert len(ran) == 6


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@each_rank(2, transport="auto")
def test_inductor() -> None:
    (model, _), (plain, _) = (sharded_and_replica() for _ in range(2))
    with fresh_compiler(), mock.patch.dict(os.environ):  # inductor adds to it
        shardtrain.compile_units(model)
        checkpointed(model)
        assert train_in_micro_batches(model) == pytest.approx(train_in_micro_batches(plain), rel=1e-5)
    whole = [shardtrain.full_state_dict(each) for each in (model, plain)]
    torch.testing.assert_close(*whole, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton comes with CUDA")
def test_inductor_needs_triton_on_a_gpu() -> None:
    """`test_train.py` has the CPU, where it needs a compiler."""
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


@each_rank(3, transport="auto")
def test_checkpointed_units_hold_less_and_move_the_same() -> None:
    """What a step moves, without and with."""
    model, _ = sharded_and_replica(lambda: OddNet(blocks=6))
    moved, kept, batch = [], [], images(0, n=32)
    for inside in (nothing, checkpointed):
        inside(model)
        train_in_micro_batches(model)
        with comm.meter() as meter:
            train_in_micro_batches(model)
        moved.append(dict(meter.calls) | dict(meter.bytes))
        step = Step(model, F.cross_entropy, sgd(model), None)
        step([batch])
        kept.append(memory_of_step(step, [batch]).most("activations"))
        assert_at_rest(model)
    inputs = 32 * 7 * 3 * 3 * 4  # bytes of a block's
    # Each of six blocks keeps two such tensors without; with, one, and both of one block at a time.
    assert kept[0] - kept[1] >= 4 * inputs
    assert moved[0] == moved[1]


def elsewhere(does: Callable[[Any, torch.Tensor], torch.Tensor] = lambda module, y: y) -> nn.Module:
    """A unit that does what the test asks with the result of a linear layer, and another unit."""
    first = Parts(lambda self, x: does(self, self.linear(x)), linear=nn.Linear(4, 4))
    first.register_buffer("count", torch.zeros(()))
    named = OrderedDict(first=first, second=nn.Linear(4, 4))
    return shardtrain.shard(nn.Sequential(named), units=lambda name, _: name in named)


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
        with pytest.raises(ValueError, match=r"^unit first cannot be .* as one graph: \w.* do not compile$"):
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
    model, x = elsewhere(), torch.randn(3, 4)
    checkpointed(model)
    y = model(x)
    x.add_(1)
    with pytest.raises(ValueError, match="inputs of unit first changed in place after it began"):
        y.sum().backward()


GRAPHS = "CUDA graphs read parameters wher"


@pytest.mark.parametrize(
    ("before", "inside", "message"),
    [
        (compiled, compiled, "first is compiled already: compile units once, then checkpoint"),
        (checkpointed, checkpointed, "first is checkpointed already"),
        (checkpointed, compiled, "first is checkpointed already"),
        (
            lambda model: setattr(model.second, "forward", lambda x: x),
            checkpointed,
            "the forward of second is no method of that module, but <function",
        ),
        (nothing, partial(shardtrain.compile_units, mode="reduce-overhead"), GRAPHS),
        (nothing, partial(shardtrain.compile_units, options={"triton.cudagraphs": True}), GRAPHS),
    ],
)
def test_mistakes_are_refused(before: Inside, inside: Inside, message: str) -> None:
    model = elsewhere()
    before(model)
    with pytest.raises(ValueError, match=message):
        inside(model)


def test_models_without_units() -> None:
    alone = shardtrain.shard(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="nothing to compile: the model has no unit besides the root"):
        compiled(alone)
    with pytest.raises(ValueError, match="nothing to checkpoint: the model has no unit besides the root"):
        checkpointed(alone)


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
    changed = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert changed == ["blocks.0", "blocks.1", "blocks.2"]


# options together


LOW = {"precision": Precision(torch.bfloat16, reduce=torch.float32, output=torch.float32)}
LOW_GRADIENTS = {"precision": Precision(reduce=torch.bfloat16)}
KEPT = {"reshard_after_forward": False}
WHOLE = {"layout": "whole"}
OFFLOAD = {"offload": True}
DEFERRED = {"deferred": True}

# Replicas and ranks of a shard group, what runs inside units, how far from DDP, options.
CASES: dict[str, tuple[tuple[int, int], Inside, float, dict[str, Any]]] = {
    "bf16 gradients, whole, kept": ((1, 3), nothing, 5e-2, LOW_GRADIENTS | WHOLE | KEPT),
    "all": ((2, 2), both, 5e-2, WHOLE | OFFLOAD | LOW | DEFERRED),
    "replicas, recomputed, kept": ((2, 2), checkpointed, 1e-5, KEPT),
}


def trains_like_ddp(name: str) -> None:
    """Over shared memory where the options allow it, else over messages."""
    (replicate, group), inside, rounding, options = CASES[name]
    _, replica = sharded_and_replica()
    torch.manual_seed(0)
    model = shardtrain.deferred(OddNet) if "deferred" in options else OddNet()
    by_messages = "offload" in options
    chosen = {key: value for key, value in options.items() if key != "deferred"}
    chosen["transport"] = "process_group" if by_messages else "shared_memory"
    if replicate > 1:
        chosen["mesh"] = mesh(replicate, group)
    # The CPU stands in for a device that computes while shards are in host memory.
    with mock.patch.object(api, "is_accelerator", return_value="offload" in options):
        model = shardtrain.shard(model, units=[Block], **chosen)
    with fresh_compiler():
        inside(model)
        losses = train_in_micro_batches(model)
    assert losses == pytest.approx(train_in_micro_batches(replica), rel=rounding)
    assert_same_parameters(model, replica, rounding)
    if replicate > 1:
        assert_replicas_are_equal(model)


@pytest.mark.parametrize("name", CASES)
def test_options_together_train_like_ddp(on_ranks: Callable[..., list[Any]], name: str) -> None:
    replicate, group = CASES[name][0]
    on_ranks(replicate * group, trains_like_ddp, name)


def jacobian(net: nn.Module, number: int) -> None:
    """A step with the output and its derivatives along three directions, from jvp inside of vmap."""
    x, _ = images(number, n=2)
    twice = torch.func.jacfwd(lambda scale: (net(x * scale),) * 2, has_aux=True)
    slopes, value = twice(torch.ones(3, 1, 1))
    (slopes.square().mean() + value.square().mean()).backward()


class Smooth(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 7), nn.Tanh(), nn.LayerNorm(7))


@each_rank(1, 3)
def test_derivatives_in_forward_mode_inside_vmap() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Flatten(), Smooth(75), Smooth(7), nn.Linear(7, 5))

    like_a_replica(net, jacobian, units=lambda _, module: isinstance(module, Smooth))

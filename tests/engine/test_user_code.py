"""What users' models and loops do to a sharded model: as a replica averaged by hand, or refused by name."""

import contextlib
import copy
import datetime
import functools
import gc
import os
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardtrain
from shardtrain import comm
from shardtrain.engine.hooks import engine_of
from shardtrain.engine.schedule import UnitCall
from shardtrain.engine.unit import Shown
from shardtrain.guardrails import initialization as initialize

from behaviours.calls import CALLS
from behaviours.rows import Net, Outer, Unit, batch, squares
from behaviours.training import two_forwards
from pool import each_rank
from small import (
    Block,
    OddNet,
    Parts,
    assert_same_parameters,
    classify,
    like_a_replica,
    raised_soon,
    sgd,
    shard,
    sharded_and_replica,
    train,
    train_alike,
)

Step = Callable[[nn.Module, int], Any]


def sharded(**options: Any) -> Any:
    return shard(Net(), **{"units": [Unit], **options})


def is_unit(_: str, module: nn.Module) -> bool:
    return isinstance(module, Unit | Outer | Block)


@pytest.mark.long
@pytest.mark.parametrize("name", CALLS)
@each_rank(3, transport="auto")
def test_what_is_gathered_at_once(name: str) -> None:
    """The rows of the same names compare what it computes."""
    model = shard(CALLS[name](), units=is_unit)
    for number in range(3):
        squares(model, number)
    peak = shardtrain.introspect(model).take_gathered_peak()
    assert peak.units <= (5 if "again" in name or "two others" in name else 3)  # with the root


@pytest.mark.long
@each_rank(2)  # of more, gloo adds up gradients of the replica in an order of its own
def test_several_forwards_of_one_backward_are_reduced_once_and_bit_equal() -> None:
    with comm.meter() as meter:
        model = like_a_replica(Net, two_forwards, units=is_unit, tolerance=0)
    assert meter.calls["reduce_scatter"] == 3 * len(shardtrain.introspect(model).units)


@each_rank(2)
def test_calls_outside_of_the_root_s_forward_leave_nothing() -> None:
    model = sharded()
    x = torch.randn(2, 7)
    for _ in range(30):
        model.blocks[0](x)  # with gradients, and without a backward
    assert not [each for each in gc.get_objects() if isinstance(each, UnitCall)]
    for _ in range(2):
        model.blocks[0](model.blocks[1](x)).sum().backward()
        assert all(param.grad is not None for param in model.blocks[1].parameters())
        sgd(model).step()


def alone(net: Any, number: int) -> torch.Tensor:
    x = torch.full((2, 7), number + 1.0)
    return net.blocks[1](net.blocks[0](net.blocks[1](x))).square().mean()


def of_root(net: nn.Module, number: int) -> torch.Tensor:
    return net(batch(number)).square().mean()


@each_rank(2)
@pytest.mark.parametrize("losses", [(alone, of_root), (of_root, alone), (alone, of_root, alone)])
def test_one_backward_over_calls_of_units_and_of_the_root(losses: list[Any]) -> None:
    def step(net: nn.Module, number: int) -> None:
        sum(loss(net, number) for loss in losses).backward()  # type: ignore[union-attr]

    model = like_a_replica(Net, step, units=[Unit])
    shardtrain.introspect(model).take_gathered_peak()
    step(model, 3)
    assert shardtrain.introspect(model).take_gathered_peak().units <= 3  # with the root


@each_rank(2)
@pytest.mark.parametrize("waits", [False, True])
def test_a_refused_autograd_grad_leaves_gradients_of_earlier_backwards(waits: bool) -> None:
    model, replica = sharded_and_replica(Net, units=[Unit])
    with shardtrain.no_sync(model) if waits else contextlib.nullcontext():
        squares(model, 0)
    with pytest.raises(ValueError, match=r"^torch\.autograd\.grad over parameters of a sharded model"):
        torch.autograd.grad(of_root(model, 1), [*model.parameters()], allow_unused=True)
    squares(model, 2)
    sgd(model).step()
    squares(replica, 0)
    squares(replica, 2)
    sgd(replica).step()
    assert_same_parameters(model, replica)


@each_rank(2, transport="auto")
def test_a_graph_from_before_a_backward_that_failed_is_reduced() -> None:
    model, replica = sharded_and_replica(Net, units=[Unit])
    older = model(batch(0)).square().mean()
    newer = model(batch(1)).square().mean()
    handle = model.head.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        newer.backward()
    handle.remove()
    older.backward()
    replica(batch(0)).square().mean().backward()
    for net in (model, replica):
        sgd(net).step()
    assert_same_parameters(model, replica)


def twice(self: Any, x: torch.Tensor) -> Any:
    if x.shape[1] == 5:
        return self(self.blocks[0](self.stem(x))) + self.head(self.blocks[1](torch.ones(1, 7)))
    return self.head(self.blocks[1](x)) * self.scale


@each_rank(2, transport="auto")
def test_a_root_that_calls_itself() -> None:
    like_a_replica(lambda: Net(root=twice), squares, units=[Unit])


def test_a_backward_inside_a_forward_in_another_dtype() -> None:
    """A vector, whose local shard has the shape of the whole on a single rank."""

    def learn(self: Any, x: torch.Tensor) -> None:
        self.layer(x).sum().backward()

    model = Parts(learn, layer=nn.Linear(3, 3))
    shardtrain.shard(model, precision=shardtrain.Precision(param=torch.bfloat16))(torch.ones(2, 3))
    assert model.layer.bias.grad.dtype is torch.float32


# refusals


@contextlib.contextmanager
def refused(message: str) -> Iterator[None]:
    with pytest.raises(ValueError, match=message):
        yield
    dist.barrier()  # each rank is refused by itself, and the other may still be on its way there


@each_rank(2)
def test_calls_are_refused() -> None:
    model = sharded()
    own = {name: 2 * param for name, param in model.named_parameters()}
    x = (batch(0),)
    norm = model.blocks[0].norm
    declare = shardtrain.forward_method
    of_ddp = (
        "^a sharded model reduces .*: do not wrap it, .* in DistributedDataParallel, .*, Trainer or Fabric"
    )
    uncopied = r"^a sharded model, or one that contains it, cannot be copied: .*; copy before shard\(\), and"
    around = nn.Sequential(model, nn.Linear(3, 3))
    on_cpu = init_device_mesh("cpu", (2,))
    classes = r"^units must be module classes, a callable, a dict of UnitOptions or 'blocks', got \('Unit'"
    linear = nn.Linear(3, 3)
    options = shardtrain.UnitOptions()
    precision = r"^precision must be a shardtrain.Precision, such as Precision\(param=torch.bfloat16\), "
    for message, call in (
        ("^Net is sharded already", lambda: shard(sharded(units=Unit))),
        ("^0 is sharded already", lambda: shard(nn.Sequential(sharded()))),
        ("^0 is sharded already", lambda: shard(nn.Sequential(sharded().blocks[0]))),  # of another model
        ("^the root is a ModuleList, which has no forward", lambda: shard(nn.ModuleList([Net()]))),
        ("^units names ModuleList, but the model has no", lambda: shard(OddNet(), units=[nn.ModuleList])),
        ("^units names LSTM, but the model has no such module", lambda: sharded(units=[nn.LSTM, Unit])),
        (classes, lambda: sharded(units=["Unit"])),
        (classes, lambda: sharded(units="Unit")),
        (r"^units must be module classes, .*, got \(3,\)", lambda: sharded(units=3)),
        ("^units must be module classes, .*, got .Linear", lambda: sharded(units={linear: precision})),
        ("^units=Linear: expected modules inside the one that is", lambda: sharded(units={linear: options})),
        ("^ignored must hold modules and parameters, got str", lambda: sharded(ignored=["head"])),
        ("^ignored must hold modules and parameters, got Tensor", lambda: sharded(ignored=linear.weight)),
        ("^transport must be 'auto', .*, got 'pigeon'", lambda: sharded(transport="pigeon")),
        ("^transport must be 'auto', .*, got 'pigeon'", lambda: comm.open_transport("pigeon")),
        ("^layout must be 'even' or 'whole', got 'odd'", lambda: sharded(layout="odd")),
        (precision, lambda: sharded(precision=torch.bfloat16)),
        ("^parameters without a shape yet: 0.weight, 0.bias", lambda: shard(nn.Sequential(nn.LazyLinear(3)))),
        (r"^load_state_dict\(\) was given the whole ", lambda: model.load_state_dict(Net().state_dict())),
        ("^Net is not sharded: pass the module that shardtrain.shard", lambda: shardtrain.introspect(Net())),
        ("^Net has no method decode", lambda: declare(model, "decode")),
        ("^LayerNorm is neither a sharded model nor one of its units", lambda: declare(norm, "forward")),
        ("^a sharded model cannot be pickled", lambda: pickle.dumps(model)),
        (uncopied, lambda: copy.deepcopy(model)),
        (uncopied, lambda: copy.deepcopy(around)),
        (uncopied, lambda: copy.deepcopy(model.blocks[0])),
        (uncopied, lambda: copy.deepcopy(norm)),
        ("^a sharded model cannot be pickled", lambda: pickle.dumps(around)),
        (of_ddp, lambda: nn.parallel.DistributedDataParallel(model)),
        (of_ddp, lambda: nn.parallel.DistributedDataParallel(around)),
        (of_ddp, lambda: nn.parallel.DistributedDataParallel(model.blocks[0])),
        (of_ddp, lambda: fully_shard(around, mesh=on_cpu)),
        ("^parameter .* was replaced by the result of a computation", lambda: functional_call(model, own, x)),
    ):
        with refused(message):
            call()


class Registered(nn.Linear):
    """A class that hears of its subclasses, and calls itself in its own way."""

    subclasses: ClassVar[list[type]] = []

    def __init_subclass__(cls, *, key: str) -> None:
        Registered.subclasses.append(cls)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) + self.weight.sum()


@each_rank(2)
def test_a_unit_has_another_class_that_looks_like_its_own() -> None:
    """So has a module of the root's own parameters. Calls look ``__call__`` up in the class."""
    model = nn.Sequential(Registered(3, 3), torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3))))
    classes = {module: type(module) for module in model.modules()}
    looks = repr(model)
    shard(model, units=[Registered, torch.fx.GraphModule])
    assert repr(model) == looks
    for module, kind in classes.items():
        assert isinstance(module, kind)
        assert (type(module) is kind) is (module is model[1].get_submodule("0"))
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            assert getattr(type(module), name) == getattr(kind, name)
        assert not {"__call__", "_call_impl", "_compiled_call_impl", "named_modules"} & vars(module).keys()
    assert not Registered.subclasses
    model[1].recompile()  # torch.fx writes methods into the module's class
    model(torch.ones(2, 3)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
    engine_of(model).detach()
    assert {module: type(module) for module in model.modules()} == classes


class Listed(nn.Sequential):
    """Has a state of its own, which is no dict."""

    def __getstate__(self) -> Any:
        return [*self]

    def __setstate__(self, state: Any) -> None:
        self.__init__(*state)


def with_plain_modules() -> tuple[nn.Module, ...]:
    """Return a model, and modules in it that are no unit: around others, with parameters, without."""
    inner = nn.Sequential(nn.Linear(7, 3), nn.BatchNorm1d(3, affine=False))
    unit = nn.Sequential(Listed(inner), nn.LSTM(3, 5))
    return nn.Sequential(unit, nn.Linear(5, 2)), unit[0], inner, inner[0], unit[1], inner[1]


@each_rank(2)
def test_a_module_that_is_no_unit_keeps_its_class() -> None:
    """Methods that do more than before stand in its ``__dict__``: none without sharded parameters inside."""
    model, *plain = with_plain_modules()
    listed, _, linear, _, _ = plain
    classes = [type(module) for module in plain]
    attributes = [{*vars(module)} for module in plain]
    looks = repr(model)
    keys = [*model.state_dict()]
    listed.apply = own = lambda fn: listed  # a user's, which stays
    shard(model, units=lambda name, _: name == "0")
    assert [type(module) for module in plain] == classes
    assert (repr(model), [*model.state_dict()]) == (looks, keys)
    assert listed.__dict__.pop("apply") is own
    lent = [{*vars(module)} - before for module, before in zip(plain, attributes, strict=True)]
    around = {"__getstate__", "apply"}
    holds = {*around, "__deepcopy__", "__reduce_ex__", "reset_parameters"}
    assert lent == [{"__getstate__"}, around, holds, {*holds, "flatten_parameters"}, set()]
    assert linear.reset_parameters.__doc__ == nn.Linear.reset_parameters.__doc__
    engine_of(model).detach()
    assert [{*vars(module)} for module in plain] == attributes


@each_rank(2)
def test_copies_of_a_plain_module_have_no_methods_of_the_sharded_one() -> None:
    model, listed, inner, linear, lstm, norm = with_plain_modules()
    attributes = {*vars(inner)}
    shard(model, units=lambda name, _: name == "0")
    for copied in (copy.copy(norm), copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert vars(copied).keys() == vars(norm).keys()
    assert {*vars(copy.copy(inner))} == attributes
    assert "__getstate__" not in vars(copy.copy(listed))
    for copies in (copy.copy, copy.deepcopy, pickle.dumps):
        for module in (linear, lstm) if copies is copy.copy else (linear, lstm, inner, listed):
            with pytest.raises(ValueError, match=r"^a sharded model"):
                copies(module)


class Marked(torch.Tensor):
    """A tensor subclass, such as those of torchao."""


@each_rank(2, transport="auto")
def test_only_plain_tensors_are_sharded() -> None:
    def make(kind: Callable[[torch.Tensor], nn.Parameter]) -> nn.Module:
        model = nn.Linear(3, 3)
        model.weight = kind(model.weight.data)
        return model

    mesh = init_device_mesh("cpu", (2,))
    for kind, name in (
        (lambda data: nn.Parameter(data.as_subclass(Marked)), "test_user_code.Marked"),
        (lambda data: nn.Parameter(distribute_tensor(data, mesh)), "torch.distributed.tensor.DTensor"),
    ):
        with refused(f"^parameter weight is a {name}, expected a plain torch.Tensor: a"):
            shard(make(kind))
        left = make(kind)
        left.weight.requires_grad_(False)
        shard(left, ignored=[left.weight])
        assert type(left.weight.data).__name__ == name.rpartition(".")[2]
    own = shard(make(type("Own", (nn.Parameter,), {})))
    own(torch.ones(2, 3)).sum().backward()
    assert type(own.weight).__name__ == "Own"


@each_rank(2)
def test_nothing_is_left_of_a_method_called_as_forward_and_a_step_calls_hooks_once() -> None:
    model = sharded()
    block = model.blocks[0]
    shardtrain.forward_method(block, "plain")
    before = {*vars(block)}
    steps = []
    block.plain(torch.ones(2, 7)).sum().backward()
    assert {*vars(block)} == before
    hook = register_optimizer_step_pre_hook(lambda *_: steps.append(1))
    sgd(model).step()
    hook.remove()
    assert steps == [1]


@pytest.mark.long
@each_rank(2)
def test_uses_of_a_sharded_model_are_refused() -> None:
    model = sharded()
    inside = "^a sharded model cannot run inside grad, vjp, jacrev, jvp or jacfwd of torch.func: compute with"
    with refused(inside):
        torch.func.grad(lambda x: model(x).sum())(batch(0))
    with refused(inside):
        torch.func.jacfwd(model)(batch(0))
    with shardtrain.unsharded(model):
        loss = model(batch(0)).sum()
        with refused(r"^backward\(\) inside unsharded"):
            loss.backward()
    for is_alone in (False, True):
        penalty = torch.stack([p.norm() for p in model.parameters()]).norm()
        loss = penalty if is_alone else penalty + model(batch(0)).square().mean()
        with refused("^the gradient of .* comes from its piece, which code outside of the forward of .* has"):
            loss.backward()
        del penalty, loss
    sgd(model).zero_grad()
    model(batch(0)).sum().backward(inputs=[model.blocks[0].norm.weight])
    with pytest.warns(UserWarning, match=r"no gradient has come since forward: backward\(inputs=...\) finds"):
        sgd(model).step()
    table = shard(nn.Sequential(nn.Embedding(10, 3, sparse=True)))
    with refused(r"parameter 0\.weight has a sparse gradient"):
        table(torch.tensor([1, 2])).sum().backward()


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 6))


# By name: what the refusal says, and a use.
OUTSIDE: dict[str, tuple[str, Callable[[Any], object]]] = {
    "a head's weight": ("linear", lambda model: F.linear(model[0](torch.ones(2, 8)), model[1].weight)),
    "a product": ("matmul", lambda model: model[1].weight @ torch.ones(16)),
    "a penalty": ("sum", lambda model: model[1].weight.square().sum()),
}


@each_rank(2, transport="auto")
def test_what_uses_a_whole_parameter_outside_of_forward_is_refused() -> None:
    model = shard(two_layers(), units=[nn.Linear])
    for says, use in OUTSIDE.values():
        with refused(f"^{says} of 1.weight, a parameter at rest, would see this rank's piece alone"):
            use(model)


def resized(model: Any, resize: Callable[[Any], object]) -> None:
    resize(model[1].weight)
    model(torch.ones(2, 8))


@each_rank(2, transport="each")
def test_memory_of_shards_that_is_resized_is_refused() -> None:
    """Ranks that share memory have none that torch resizes."""
    for resize in (
        lambda param: param.untyped_storage().resize_(0),
        lambda param: param.data.untyped_storage().resize_(0),
        lambda param: param.detach().untyped_storage().resize_(8),
    ):
        model = shard(two_layers(), units=[nn.Linear])
        model(torch.ones(2, 8)).sum().backward()
        message = r"not resizable|^the memory of parameter 1\.weight was resized by|^untyped_storage of 1\.w"
        with pytest.raises((ValueError, RuntimeError), match=message):
            resized(model, resize)


@pytest.mark.parametrize(
    "kind",
    [torch.optim.SGD, pytest.param(functools.partial(torch.optim.AdamW, eps=0.1), marks=pytest.mark.long)],
)
@each_rank(2, transport="auto")
def test_a_compiled_step_of_an_optimizer_is_an_optimizer_s_step(kind: Any) -> None:
    model, replica = sharded_and_replica(two_layers, units=[nn.Linear])
    optimizer = kind(model.parameters(), lr=0.1)
    by_hand = kind(replica.parameters(), lr=0.1)
    for step in (optimizer.step, lambda: optimizer.step()):
        compiled = torch.compile(step, backend="eager")
        for number in range(2):
            for net, update in ((model, compiled), (replica, by_hand.step)):
                net(torch.arange(16.0).view(2, 8) / 9 - number).square().mean().backward()
                update()
                net.zero_grad()
    assert_same_parameters(model, replica)


def sent(values: Any) -> None:
    """Put ``values`` into a queue, of which nobody reads."""
    torch.multiprocessing.get_context("spawn").SimpleQueue().put(values)


MOVES: dict[str, Callable[[Any], object]] = {
    "the model": lambda model: model.share_memory(),
    "a parameter": lambda model: model.blocks[1].norm.weight.share_memory_(),
    "its data": lambda model: model.blocks[1].norm.weight.data.share_memory_(),
    "a queue": lambda model: sent(model.blocks[1].norm.weight.data.as_subclass(torch.Tensor)),
    "a queue of all": lambda model: sent(
        {k: p.detach().as_subclass(torch.Tensor) for k, p in model.blocks[1].named_parameters()}
    ),
}


@pytest.mark.parametrize("name", MOVES)
@each_rank(2)
def test_parameters_that_leave_shared_memory_are_named(name: str) -> None:
    """Ranks that exchange messages have memory of their own, which may move."""
    model, replica = sharded_and_replica(Net, units=[Unit])
    optimizers = sgd(model), sgd(replica)

    def step(number: int) -> None:
        for net, optimizer in zip((model, replica), optimizers, strict=True):
            optimizer.zero_grad()
            squares(net, number)
            optimizer.step()

    step(0)
    optimizers[0].zero_grad()
    MOVES[name](model)
    if shardtrain.introspect(model).transport.in_place:
        where = "the root" if name == "the model" else "blocks.1"
        with refused(f"^parameters of {where} have left the memory that ranks share, moved by share_memory"):
            squares(model, 1)
    else:
        step(1)
        assert_same_parameters(model, replica)


@each_rank(2)
def test_edits_are_refused_by_name() -> None:
    model = sharded()
    model.head.weight.data = torch.ones(3)
    with refused(r"head.weight now has shape \(3,\) on"):
        model(batch(0))
    model = sharded()
    model.blocks[0].extra = nn.Parameter(torch.ones(3))
    with refused(r"^parameters attached after shard\(\): blocks.0.extra"):
        model(batch(0))
    model = sharded()
    model.blocks.append(nn.Identity())  # has no parameters
    squares(model, 0)


def edit(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)


@pytest.mark.long
@each_rank(3)
def test_edits_of_whole_parameters_between_forward_and_backward_are_refused() -> None:
    """After a forward with gradients the root is whole, as for CLIP's temperature."""
    changed = r"^scale, stem.weight, .* changed while the root was whole"
    for then in (
        lambda model, loss: model(batch(0)),
        lambda model, loss: loss.backward(),
        lambda model, loss: model.state_dict(),
        lambda model, loss: shardtrain.full_state_dict(model),
        lambda model, loss: sgd(model).step(),
    ):
        model = sharded()
        loss = model(batch(0)).sum()
        edit(model)
        with refused(changed):
            then(model, loss)
    model = sharded()
    before = shardtrain.full_state_dict(model)
    with torch.no_grad():
        model(batch(0))
    edit(model)
    after = shardtrain.full_state_dict(model)
    assert all(torch.equal(after[name], 2 * value) for name, value in before.items())


@pytest.mark.long
@pytest.mark.parametrize("replaced", [False, True])
@each_rank(2)
def test_edits_inside_forward_are_refused(replaced: bool) -> None:
    """A momentum encoder that is updated after it has run; a row of tests/behaviours has one before."""

    def run_then_update(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        with torch.no_grad():
            target = self.blocks[2](x)
            for param, other in zip(self.blocks[2].parameters(), self.blocks[1].parameters(), strict=True):
                if replaced:
                    param.data = 0.9 * param.data + 0.1 * other.data
                else:
                    param.mul_(0.9).add_(other, alpha=0.1)
        return self.head(self.blocks[0](x) + target)

    use = "data" if replaced else "mul_"
    with refused(rf"^blocks\.2\.\S+ was used \({use}\) in forward outside of .* change it, between steps"):
        shard(Net(root=run_then_update), units=[Unit])(batch(0))


@pytest.mark.parametrize("after", [False, True])
@each_rank(2)
def test_edits_of_shards_through_views_inside_forward_are_refused(after: bool) -> None:
    """Those that were made before the forward."""

    def update(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[1](self.stem(x)) if after else self.stem(x)
        for view in self.views:
            view.mul_(2)
        return self.head(x if after else self.blocks[1](x))

    model = shard(Net(root=update), units=[Unit])
    model.views = [param.detach() for param in model.blocks[1].parameters()]
    with refused(r"^forward changed blocks\.1\..* of blocks\.1, .* change or move parameters between"):
        model(batch(0))


class Buffered(nn.LSTM):
    """Moves its weights into one buffer, as cuDNN's do on a GPU: other addresses, the same versions."""

    def flatten_parameters(self) -> None:
        weights = [*self.parameters()]
        buffer = torch.cat([weight.data.flatten() for weight in weights])
        sizes = [shape.numel() for shape in map(torch.Tensor.size, weights)]
        for weight, part, shape in zip(weights, buffer.split(sizes), self.shapes, strict=True):
            weight.data = part.view(shape)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Those of whole weights, as the compiled function computes them."""
        gates = 4 * self.hidden_size
        return [(gates, self.input_size), (gates, self.hidden_size), (gates,), (gates,)]


def flatten_inside(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.lstm.flatten_parameters()
    return net.head(net.lstm(x)[0])


def copy_inside(net: Any, x: torch.Tensor) -> torch.Tensor:
    for param in net.lstm.parameters():
        param.data = param.data.clone()
    return net.head(net.lstm(x)[0])


def reorder_inside(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.conv.to(memory_format=torch.channels_last)
    return net.head(net.lstm(net.conv(x[None, None])[0, 0])[0])


def recurrent(forward: Callable[..., Any]) -> nn.Module:
    conv = nn.Conv2d(1, 4, 3, padding=1)
    return Parts(forward, lstm=Buffered(5, 7), head=nn.Linear(7, 3), conv=conv)


def on_sequences(net: nn.Module, number: int) -> None:
    net(batch(number)).square().mean().backward()


@pytest.mark.parametrize("units", [[], [nn.LSTM], [nn.LSTM, nn.Conv2d]], ids=["root", "lstm", "both"])
@pytest.mark.parametrize("forward", [flatten_inside, copy_inside, reorder_inside])
@each_rank(1, 2)
def test_weights_that_move_inside_forward_are_unchanged(units: Any, forward: Any) -> None:
    """Those of a unit that a parent moves are local shards: only flatten_parameters() leaves them alone."""
    closed = nn.Conv2d in units if forward is reorder_inside else bool(units)
    if closed and forward is not flatten_inside:
        with refused(r"\((data|to)\) in forward outside of a call of (lstm|conv), .* it, between steps"):
            on_sequences(shard(recurrent(forward), units=units), 0)
        return
    model = like_a_replica(lambda: recurrent(forward), on_sequences, units=units)
    model.lstm.flatten_parameters()
    model.lstm.double().float()  # which flattens, too
    on_sequences(model, 0)


@pytest.mark.parametrize("moves", [False, True])
@each_rank(2)
def test_weights_that_move_and_change_inside_forward_are_refused(moves: bool) -> None:
    def flatten_and_change(net: Any, x: torch.Tensor) -> torch.Tensor:
        if moves:
            net.lstm.flatten_parameters()
        net.lstm.bias_hh_l0.data = net.lstm.bias_hh_l0.data * 2
        net.lstm.flatten_parameters()
        return net.head(net.lstm(x)[0])

    with refused(
        "^lstm.bias_hh_l0 changed while the root was whole, .* between steps, inside shardtrain.uns"
    ):
        on_sequences(shard(recurrent(flatten_and_change), units=[]), 0)


def tied_pair() -> Any:
    net = nn.Sequential(nn.Embedding(9, 7), nn.Linear(7, 9, bias=False))
    net[1].weight = net[0].weight
    return net


UNTIED: dict[str, Callable[[Any], object]] = {
    "the second": lambda net: setattr(
        net[1], "weight", nn.Parameter(net[1].weight.as_subclass(torch.Tensor).detach())
    ),
    "the first": lambda net: setattr(
        net[0], "weight", nn.Parameter(net[0].weight.as_subclass(torch.Tensor).detach())
    ),
    "on one rank": lambda net: UNTIED["the second"](net) if dist.get_rank() else None,
    "removed": lambda net: setattr(net[1], "weight", None),
    "each by itself": lambda net: net.to_empty(device="cpu"),
}


@pytest.mark.parametrize("name", UNTIED)
@each_rank(2)
def test_a_tie_that_is_undone_is_refused(name: str) -> None:
    with torch.device("meta" if name == "each by itself" else "cpu"):
        model = shard(tied_pair(), units=[nn.Linear])
    UNTIED[name](model)
    tokens = torch.tensor([[1, 4]])
    if name == "on one rank" and dist.get_rank() == 0:
        return  # the other one ends, which the guard tells this one
    message = "^1.weight is no longer where shard" if name == "removed" else "^0.weight and 1.weight were one"
    with pytest.raises(ValueError, match=message):
        model(tokens)
    model[1].weight = model[0].weight
    if name != "on one rank":
        model(tokens).sum().backward()
        assert model[0].weight.grad is not None


@pytest.mark.long
@each_rank(2)
def test_reset_parameters_draws_what_it_draws_for_the_whole_model() -> None:
    def make() -> nn.Module:
        layers = nn.Conv2d(4, 6, 3), nn.MultiheadAttention(6, 2), nn.Embedding(9, 5, padding_idx=1)
        return nn.Sequential(nn.Linear(70, 30), *layers, nn.BatchNorm2d(5), nn.LSTM(5, 4))

    def reset(net: nn.Module) -> None:
        torch.manual_seed(3)
        for module in net.modules():
            again = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
            if again is not None:
                again()

    with torch.device("meta"):
        model = shard(make(), units=[nn.Linear])
    plain = make()
    reset(model.to_empty(device="cpu"))
    reset(plain)
    torch.testing.assert_close(shardtrain.full_state_dict(model), plain.state_dict(), rtol=0, atol=0)
    with torch.no_grad():
        model[0].weight.zero_()
    reset(model)
    torch.testing.assert_close(shardtrain.full_state_dict(model), plain.state_dict(), rtol=0, atol=0)


def test_an_initialization_without_memory_leaves_local_shards() -> None:
    model = shardtrain.shard(Initialized(), units=[nn.Sequential])
    parts = [*map(initialize._with_unknown, engine_of(model).members[:-1]), MemoryError]
    with mock.patch.object(initialize, "_with_unknown", side_effect=parts), pytest.raises(MemoryError):
        model.init_weights()
    assert all(unit.shown is Shown.SHARD for unit in engine_of(model).units)


class Initialized(nn.Module):
    """Has units, parameters of the root, and methods that initialize, as users write them."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(33, 24)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 70), nn.Linear(70, 24)) for _ in range(2))
        self.mixed = nn.Conv2d(6, 10, 3)
        self.scale = nn.Parameter(torch.ones(7))
        self.head = nn.Linear(24, 33, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[1](self.blocks[0](self.tokens(x))))

    def init_weights(self) -> None:
        for number, block in enumerate(self.blocks):
            nn.init.xavier_uniform_(block[0].weight)
            nn.init.trunc_normal_(block[1].weight, std=0.02 / (1 + number))
        nn.init.normal_(self.scale)
        self.apply(by_type)


def by_type(module: nn.Module) -> None:
    """Initialize by a module's class, also through ``.data``, also parameters of modules inside."""
    if isinstance(module, nn.Linear):
        nn.init.kaiming_normal_(module.weight)
        nn.init.trunc_normal_(module.bias if module.bias is not None else module.weight)
    elif isinstance(module, nn.Embedding):
        module.weight.data.normal_(std=0.02)
        module.weight.data[0].zero_()
    elif isinstance(module, nn.Conv2d):
        nn.init.dirac_(module.weight)
    elif isinstance(module, nn.Sequential):
        nn.init.orthogonal_(module[1].weight)
        module[0].weight.data.mul_(0.5)


INITS: dict[str, Callable[[Any], object]] = {
    "apply": lambda net: net.apply(by_type),
    "apply of parts": lambda net: [part.apply(by_type) for part in net.children()],
    "init_weights": lambda net: net.init_weights(),
}


@pytest.mark.parametrize("name", INITS)
@pytest.mark.parametrize("fully", [False, True])
@each_rank(2)
def test_initialization_draws_what_it_draws_for_the_whole_model(name: str, fully: bool) -> None:
    tied = not fully  # on the meta device, to_empty() unties
    plain = Initialized(tied)
    with torch.device("cpu" if tied else "meta"):
        model = Initialized(tied)
    if fully:
        for block in model.blocks:
            shardtrain.fsdp.fully_shard(block)
        shardtrain.fsdp.fully_shard(model, transport=os.environ["SHARDTRAIN_TEST_TRANSPORT"])
    else:
        shard(model, units=[nn.Sequential])
    if not tied:
        model.to_empty(device="cpu")
    for net in (plain, model):
        for param in net.parameters():
            param.data.fill_(0.25)
    for net in (plain, model) * 2:
        torch.manual_seed(3)
        INITS[name](net)
    whole = shardtrain.full_state_dict(model)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(whole[key], value, rtol=0, atol=0, msg=key)
    assert shardtrain.introspect(model).gathered == (0, 0)


def by_exact_type(module: nn.Module) -> None:
    """Initialize as the example of torch's `nn.Module.apply` does."""
    if type(module) is nn.Linear:
        module.weight.data.fill_(1.0)


@pytest.mark.parametrize("units", [[], [nn.Linear], [nn.Sequential]], ids=["root", "linear", "blocks"])
@each_rank(1, 2)
def test_apply_asks_for_the_class_that_users_know(units: Any) -> None:
    model = shard(Initialized(), units=units)
    model.apply(by_exact_type)
    whole = shardtrain.full_state_dict(model)
    assert whole["head.weight"].eq(1).all()
    assert whole["blocks.1.0.weight"].eq(1).all()
    assert not whole["tokens.weight"].eq(1).any()
    assert "_shardtrain" not in type(model).__name__
    with pytest.raises(ValueError, match="copy"):
        copy.deepcopy(model)


@each_rank(2)
def test_initialization_that_cannot_be_right_is_refused() -> None:
    model = shard(Initialized(), units=[nn.Sequential])
    before = shardtrain.full_state_dict(model)

    def normalize(module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d):
            module.weight.data /= module.weight.data.norm()

    def of_all(module: nn.Module) -> None:
        if module is model:
            nn.init.xavier_normal_(model.blocks[1][0].weight)

    with refused(r"^mixed.weight was given NaN, .* initialize it inside shardtrain.unsharded\(model\)"):
        model.apply(normalize)
    with refused(r"^normal of blocks.1.0.weight, a parameter at rest, would see"):
        model.apply(of_all)
    after = shardtrain.full_state_dict(model)
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    seen: list[int] = []
    model.apply(lambda module: seen.extend(p.numel() for p in module.parameters(recurse=False)))
    assert sum(seen) == sum(value.numel() for value in before.values())


@each_rank(2)
def test_errors_of_users_code_keep_their_reason() -> None:
    def fails(self: Any, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("a", self.inside.weight.shape)

    def mistyped(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x[:, :5])

    for unit, error in ((fails, KeyError), (mistyped, RuntimeError)):
        with pytest.raises(error) as caught:
            shard(Net(unit), units=[Unit])(batch(0))
        assert error is RuntimeError or caught.value.args == ("a", (7, 7))
        dist.barrier()


@each_rank(2)
def test_a_root_that_returns_none_while_an_error_is_handled() -> None:
    def root(self: Any, x: torch.Tensor) -> None:
        self.seen = self.head(self.blocks[0](self.stem(x)))

    model = shard(Net(root=root), units=[Unit])
    try:
        if dist.get_rank() == 0:
            raise KeyError
        model(batch(0))
    except KeyError:
        model(batch(0))
    model.seen.sum().backward()
    assert model.head.weight.grad is not None


@each_rank(2)
def test_optimizers_in_backward_where_a_rank_owns_nothing() -> None:
    def step(net: nn.Module, number: int) -> None:
        net(torch.ones(2, 3) * (1 + dist.get_rank())).sum().backward()

    model = shard(nn.Linear(3, 3, bias=False), layout="whole")
    seen = []
    optimizer = sgd(model)

    def hook(param: torch.Tensor) -> None:
        seen.append(param.grad is not None)
        optimizer.step()
        optimizer.zero_grad()

    model.weight.register_post_accumulate_grad_hook(hook)
    for number in range(2):
        step(model, number)
    assert seen == [len(model.weight) > 0] * 2


@pytest.mark.long
@each_rank(3)
def test_gradients_that_wait_are_not_stepped_with_clipped_or_changed() -> None:
    model, replica = sharded_and_replica()
    optimizer = sgd(model)

    def backward() -> None:
        with shardtrain.no_sync(model):
            classify(model, 0).backward()

    backward()
    waiting = "while gradients wait under no_sync to be reduced: run the last backward outside of no_sync"
    for what, call in {
        "an optimizer's step()": optimizer.step,
        "clip_grad_norm_()": lambda: shardtrain.clip_grad_norm_(model, 1.0),
        "unsharded(grads=True)": lambda: shardtrain.unsharded(model, grads=True).__enter__(),
        "parameters were converted": lambda: classify(model.double(), 0),
    }.items():
        assert raised_soon(ValueError, call).startswith(f"{what} {waiting}")
    model.float()
    model.blocks[2].conv.weight.grad.mul_(2.0)  # of the last unit, so that others have been looked at
    assert "was changed while it waits under no_sync" in raised_soon(ValueError, backward)
    optimizer.zero_grad()
    train_alike(model, replica)


@pytest.mark.long
@each_rank(1, 3)
def test_users_post_accumulate_hooks_fire_once_with_the_reduced_piece() -> None:
    plain = OddNet()
    seen: dict[str, list[tuple[str, torch.Size, bool]]] = {}

    def note(param: torch.Tensor, name: str, when: str) -> None:
        at_rest = shardtrain.introspect(plain).gathered.units == 0
        seen.setdefault(name, []).append((when, param.grad.shape, at_rest))

    for name, param in plain.named_parameters():
        param.register_post_accumulate_grad_hook(functools.partial(note, name=name, when="before"))
    model = shard(plain, units=[Block])
    handles = [
        p.register_post_accumulate_grad_hook(functools.partial(note, name=n, when="after"))
        for n, p in model.named_parameters()
    ]
    pieces = {n: p.shape for n, p in model.named_parameters()}
    with shardtrain.no_sync(model):
        classify(model, 0).backward()
    assert not seen or dist.get_world_size() == 1
    seen.clear()
    classify(model, 0).backward()
    assert seen == {n: [("before", s, True), ("after", s, True)] for n, s in pieces.items()}
    for handle in handles:
        handle.remove()
    seen.clear()
    classify(model, 0).backward()
    assert [w for w, *_ in seen["fc.weight"]] == ["before"]


@pytest.mark.long
@each_rank(1, 3)
def test_a_copy_from_before_shard_is_sharded_too() -> None:
    plain = OddNet()
    replica = nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    averages = [
        AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        for net in (plain, replica.module)
    ]
    model = shard(plain, units=[Block])
    shard(averages[0].module, units=[Block])
    nets = (model, replica)
    optimizers = [sgd(net) for net in nets]
    for step in range(3):
        for net, optimizer, average in zip(nets, optimizers, averages, strict=True):
            train(net, optimizer, 1, start=step)
            average.update_parameters(getattr(net, "module", net))
    ours, theirs = (average.module for average in averages)
    assert_same_parameters(ours, theirs)
    assert isinstance(ours, OddNet)
    assert type(ours).__name__ == "OddNet"
    train(ours, sgd(ours), 2)  # trains by itself,
    assert_same_parameters(model, replica)  # and leaves the other alone
    for net, optimizer in zip(nets, optimizers, strict=True):
        train(net, optimizer, 1)
    assert_same_parameters(model, replica)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam")),
        *((name, {}) for name in ("RMSprop", "Rprop")),
        ("Adagrad", {"lr_decay": 0.1}),
        ("Adam", {"foreach": True}),
        ("AdamW", {"fused": True}),
    ],
)
@each_rank(3, transport="auto")
def test_element_wise_optimizers_equal_ddp_s(name: str, options: dict[str, Any]) -> None:
    """Those with options are built before sharding. AdamW is a row."""

    def make(net: nn.Module) -> torch.optim.Optimizer:
        return getattr(torch.optim, name)(net.parameters(), lr=0.01, **options)

    like_a_replica(optimizer=make, early=bool(options), tolerance=1e-4)


@pytest.mark.long
@each_rank(1, 3)
def test_two_optimizers_with_groups_and_schedules_and_steps_move_nothing() -> None:
    model, replica = sharded_and_replica()
    for net in (model, replica):
        params = list(net.parameters())
        first = torch.optim.AdamW(
            [{"params": [p], "lr": 0.01 * (i + 1)} for i, p in enumerate(params[:3])] + [{"params": []}]
        )
        second = torch.optim.SGD(params[4:], lr=0.05, momentum=0.9)
        schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (first, second)]
        for step in range(3):
            classify(net, step).backward()
            with comm.meter() as meter:
                for optimizer, schedule in zip((first, second), schedules, strict=True):
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad(set_to_none=step == 1)
                list(net.named_parameters())
            assert not meter.calls
            if step == 0:
                first.add_param_group({"params": params[3], "lr": 0.04})
    assert_same_parameters(model, replica)


def linears(place: Callable[[nn.Linear, nn.Linear], object]) -> nn.Sequential:
    """Return two layers, of which ``place`` has decided in which memory their parameters lie."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    place(model[0], model[1])
    return model


def lie_apart(a: nn.Linear, b: nn.Linear) -> None:
    memory = torch.randn(60)
    a.weight.data = memory[:25].view(5, 5)
    b.weight.data = memory[25:50].view(5, 5)
    for layer in (a, b):
        layer.register_buffer("both", memory[50:])


@pytest.mark.parametrize(
    ("place", "pair"),
    [
        (lambda a, b: setattr(b.weight, "data", a.weight.data), "0.weight and 1.weight"),
        (lambda a, b: a.register_buffer("own", a.weight.detach()), "0.weight and 0.own"),
    ],
)
def test_parameters_that_share_memory_are_refused(place: Any, pair: str) -> None:
    """Each would get memory of its own, and no longer be what the other is."""
    with pytest.raises(ValueError, match=f"^{pair} share memory, and sharding would give each its own: tie"):
        shardtrain.shard(linears(place))
    model = linears(place)
    shardtrain.shard(model, ignored=[model[0], model[1]])
    shardtrain.shard(linears(lie_apart))
    shardtrain.shard(linears(lambda a, b: setattr(b, "weight", a.weight)))


@each_rank(2, transport="auto")
def test_a_sparse_buffer_is_named() -> None:
    model = linears(lambda a, _: a.register_buffer("own", torch.eye(3).to_sparse()))
    with pytest.raises(
        ValueError, match=r"^buffer 0.own is sparse, and ranks exchange .*: make it a plain attr"
    ):
        shard(model)


@pytest.mark.parametrize("options", [{}, {"virtual_ranks": 4}])
@each_rank(1, 2)
def test_an_expanded_buffer_is_named(options: Any) -> None:
    model = linears(lambda a, _: a.register_buffer("own", torch.ones(4, 1).expand(4, 4)))
    if dist.get_world_size() == 1 and not options:  # nothing is written to it
        shard(model, **options)
        return
    with pytest.raises(
        ValueError, match=r"^buffer 0.own is expanded: .*\. Register 0.own.contiguous\(\), or"
    ):
        shard(model, **options)


def experts(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.head(self.blocks[dist.get_rank()](self.stem(x)))


def longer_texts(model: nn.Module) -> None:
    with torch.no_grad():
        for _ in range(2 + dist.get_rank()):
            model(batch(0))
    model(batch(0)).sum().backward()


@each_rank(2)
def test_units_and_forwards_of_some_ranks_alone_hear_of_the_ways_out() -> None:
    ways = r"only some ranks call .* conditional=\[module\].*generate\(\) .* shardtrain\.unsharded\(model\)"
    model = shard(Net(root=experts), units=[Unit])
    assert re.search(ways, raised_soon(comm.Diverged, lambda: squares(model, 0)))


@each_rank(2)
def test_forwards_of_some_ranks_alone_hear_of_unsharded() -> None:
    model = sharded()
    text = raised_soon(comm.Diverged, lambda: longer_texts(model))
    assert "(generate() to other lengths) belong into shardtrain.unsharded(model)" in text


@pytest.mark.parametrize("odd", range(3))
@each_rank(3)
def test_a_rank_that_wraps_its_model_in_torch_s_wrapper_is_named_at_once(odd: int) -> None:
    if dist.get_rank() == odd:
        with pytest.raises(RuntimeError, match=f"Rank {odd} has 14 params, while rank"):  # torch's own
            DistributedDataParallel(OddNet())
        return
    text = raised_soon(ValueError, lambda: shard(OddNet()))
    assert text.startswith(
        f"rank {odd} does not call shard(): it has sent 14, as DistributedDataParallel of "
    )


@pytest.mark.long
@each_rank(2)
def test_a_rank_that_does_not_call_shard_is_suspected_at_the_time_out() -> None:
    comm.set_time_out(datetime.timedelta(seconds=2))
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError):  # torch's own
            dist.barrier()
        return
    text = raised_soon(comm.PeerLost, lambda: shard(OddNet()))
    assert text.startswith("shard() has waited in vain for other ranks: every rank must call it")
    assert "a rank that wraps its model in DistributedDataParallel" in text


@each_rank(2)
def test_a_rank_that_skips_its_update_is_told_to_agree() -> None:
    model = sharded()

    def steps() -> None:
        for number in range(2):
            squares(model, number)
            if dist.get_rank() == 0:
                sgd(model).step()

    text = raised_soon(comm.Diverged, steps)
    assert "skip an update on all ranks or on none, by a number that they have all-reduced" in text


@each_rank(3)
def test_models_that_differ_between_ranks_are_refused_on_all() -> None:
    """Those of other shapes are a row."""
    odd = dist.get_world_size() - 1
    last = dist.get_rank() == odd
    frozen = OddNet()
    frozen.fc.requires_grad_(not last)
    start = f"the model to shard differs between ranks: rank {odd} has "
    text = raised_soon(ValueError, lambda: shard(frozen))
    assert f"{start}fc.weight (5, 7) torch.float32 strides (7, 1) frozen in fc where" in text
    chosen = [Block] if last else [nn.Linear]
    assert raised_soon(ValueError, lambda: shard(OddNet(), units=chosen)).startswith(f"{start}fc.weight")


@each_rank(2, transport="auto")
def test_options_that_differ_between_ranks_are_refused() -> None:
    transport = ("shared_memory", "process_group")[dist.get_rank()]
    message = "transport= differs between ranks: rank 1 has 'process_group' where rank 0 has 'shared_memory'"
    with pytest.raises(ValueError, match=message):
        shardtrain.shard(Net(), transport=transport)


def _linear_and_stage(name: str, module: nn.Module) -> bool:
    return name == "0" or isinstance(module, nn.Linear)


@pytest.mark.long
@pytest.mark.parametrize(
    ("units", "home", "layout"),
    [([nn.Linear], "the root", "even"), ([nn.Linear], "the root", "whole"), (_linear_and_stage, "0", "even")],
)
@each_rank(3)
def test_tied_weights_belong_to_the_common_ancestor(units: Any, home: str, layout: str) -> None:
    """And a module reachable by two names is one unit."""

    def make() -> nn.Module:
        stage = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        stage[1].weight = stage[0].weight
        again = nn.Linear(5, 5)
        return nn.Sequential(stage, again, nn.Linear(5, 5), again)

    model = like_a_replica(make, squares, units=units, layout=layout)
    unit_of = shardtrain.introspect(model).unit_of_parameter
    assert unit_of["0.0.weight"] == home
    assert unit_of["1.weight"] == "1"


@pytest.mark.long
@each_rank(3)
def test_a_users_own_group_is_the_one_used() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() == 2:
        return
    plain = OddNet()
    replica = nn.parallel.DistributedDataParallel(copy.deepcopy(plain), process_group=mesh.get_group())
    model = shard(plain, units=[Block], mesh=mesh)
    assert shardtrain.introspect(model).transport.world == 2
    train_alike(model, replica)


@pytest.mark.long
@each_rank(2, 3)
def test_an_account_of_what_is_gathered() -> None:
    """One unit at first, when nothing is known of the order; then two, the next one on its way."""
    world = dist.get_world_size()
    size = world * 64 * -(-(96 + 16) * 4 // (world * 64))  # bytes of 81 and 9 fp32 elements, padded
    for reshard, units in ((True, 2), (False, 7)):
        layers = nn.Sequential(*(nn.Linear(9, 9) for _ in range(7)))
        model = shard(layers, units=[nn.Linear], reshard_after_forward=reshard)
        inside = shardtrain.introspect(model)
        peaks = []
        for _ in range(3):
            out = model(torch.ones(2, 9)).sum()
            peaks.append(inside.take_gathered_peak())
            out.backward()
            peaks.append(inside.take_gathered_peak())
            assert inside.gathered == (0, 0)
        assert peaks[2:] == [(units, units * size)] * 4

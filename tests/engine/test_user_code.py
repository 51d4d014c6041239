"""What users' models and loops do to a sharded model: as a replica averaged by hand, or refused by name."""

import contextlib
import copy
import functools
import gc
import os
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.func import functional_call

import shardtrain
from shardtrain import comm
from shardtrain.engine.hooks import engine_of
from shardtrain.engine.schedule import UnitCall

from behaviours.rows import Net, Unit, batch, squares
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
    train_alike,
)


def sharded(**options: Any) -> Any:
    return shard(Net(), **{"units": [Unit], **options})


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


def linears(place: Callable[[nn.Linear, nn.Linear], object]) -> nn.Sequential:
    """Return two layers, of which ``place`` has decided in which memory their parameters and buffers lie."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    place(model[0], model[1])
    return model


def lie_apart(a: nn.Linear, b: nn.Linear) -> None:
    """Let parameters and buffers share a storage, and no element."""
    memory = torch.randn(60)
    a.weight.data = memory[:25].view(5, 5)
    b.weight.data = memory[25:50].view(5, 5)
    for layer in (a, b):
        layer.register_buffer("both", memory[50:])


class Marked(torch.Tensor):
    """A tensor subclass, such as those of torchao."""


def with_weight(kind: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    model = nn.Linear(3, 3)
    model.weight = nn.Parameter(kind(model.weight.detach()))
    return model


def test_parameters_that_share_a_storage_or_are_tied_are_sharded() -> None:
    shardtrain.shard(linears(lie_apart))
    shardtrain.shard(linears(lambda a, b: setattr(b, "weight", a.weight)))
    shared = linears(lambda a, b: setattr(b.weight, "data", a.weight.data))
    shardtrain.shard(shared, ignored=[shared[0], shared[1]])
    marked = with_weight(lambda data: data.as_subclass(Marked)).requires_grad_(False)
    shardtrain.shard(marked, ignored=[marked.weight])
    assert type(marked.weight.data) is Marked


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
        (
            r"^ranks that differ would hang over transport=MessagesTransport\(...\): call .*guard_world\(\)",
            lambda: sharded(transport=comm.MessagesTransport(dist.group.WORLD)),
        ),
        ("^layout must be 'even' or 'whole', got 'odd'", lambda: sharded(layout="odd")),
        (precision, lambda: sharded(precision=torch.bfloat16)),
        (
            "^0.weight and 1.weight share memory, and sharding would give each its own: tie",
            lambda: shard(linears(lambda a, b: setattr(b.weight, "data", a.weight.data))),
        ),
        (
            "^0.weight and 0.own share memory, and sharding",
            lambda: shard(linears(lambda a, _: a.register_buffer("own", a.weight.detach()))),
        ),
        (
            "^parameter weight is a test_user_code.Marked, expected a plain torch.Tensor: a",
            lambda: shard(with_weight(lambda data: data.as_subclass(Marked))),
        ),
        (
            "^parameter weight is a torch.distributed.tensor.DTensor, expected a plain",
            lambda: shard(with_weight(lambda data: distribute_tensor(data, on_cpu))),
        ),
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
    model(torch.ones(2, 3)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
    engine_of(model).detach()
    assert {module: type(module) for module in model.modules()} == classes


class Listed(nn.Sequential):
    """A container with a state of its own, which is no dict."""

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
    holds = {"apply", "__deepcopy__", "__reduce_ex__", "reset_parameters"}
    assert lent == [set(), {"apply"}, holds, {*holds, "flatten_parameters"}, set()]
    assert linear.reset_parameters.__doc__ == nn.Linear.reset_parameters.__doc__
    engine_of(model).detach()
    assert [{*vars(module)} for module in plain] == attributes


@each_rank(2)
def test_copies_of_a_plain_module_are_refused_if_it_holds_shards() -> None:
    model, listed, inner, linear, lstm, norm = with_plain_modules()
    shard(model, units=lambda name, _: name == "0")
    for copied in (copy.copy(norm), copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert vars(copied).keys() == vars(norm).keys()
    for copies in (copy.copy, copy.deepcopy, pickle.dumps):
        for module in (linear, lstm) if copies is copy.copy else (linear, lstm, inner, listed):
            with pytest.raises(ValueError, match=r"^a sharded model"):
                copies(module)


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
    model.blocks.append(nn.Identity())  # has no parameters
    squares(model, 0)


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


class Initialized(nn.Module):
    """A model with units, root parameters, and methods that initialize, as users write them."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(33, 24)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 70), nn.Linear(70, 24)) for _ in range(2))
        self.mixed = nn.Conv2d(6, 10, 3)
        self.attention = nn.MultiheadAttention(6, 2)
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
    "reset_parameters": lambda net: [part.reset_parameters() for part in (net.tokens, net.mixed)],
    "_reset_parameters": lambda net: net.attention._reset_parameters(),
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
    users = type("Users", (nn.Linear,), {"apply": lambda self, x: self(x)})
    assert shard(users(3, 4)).apply(torch.ones(2, 3)).shape == (2, 4)


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


def on_rank_1(these: Any, others: Any) -> Any:
    return these if dist.get_rank() == 1 else others


def frozen_on_one_rank() -> None:
    model = OddNet()
    model.fc.requires_grad_(dist.get_rank() != 1)
    shard(model)


def another_unit() -> None:
    squares(
        shard(Net(root=lambda self, x: self.head(self.blocks[dist.get_rank()](self.stem(x)))), units=[Unit]),
        0,
    )


def longer_texts() -> None:
    model = sharded()
    with torch.no_grad():
        for _ in range(2 + dist.get_rank()):
            model(batch(0))
    squares(model, 0)


def skipped_updates() -> None:
    model = sharded()
    for number in range(2):
        squares(model, number)
        if dist.get_rank() == 0:
            sgd(model).step()


# What ranks do differently, and what all of them are told.
APART: dict[str, tuple[type[Exception], str, Callable[[], object]]] = {
    "frozen": (
        ValueError,
        r"^the model to shard differs between ranks: rank 1 has fc.weight \(5, 7\) .* frozen in fc",
        frozen_on_one_rank,
    ),
    "units": (
        ValueError,
        "^the model to shard differs between ranks: rank 1 has ",
        lambda: shard(OddNet(), units=on_rank_1([Block], [nn.Linear])),
    ),
    "transport": (
        ValueError,
        "transport= differs between ranks: rank 1 has 'process_group' where rank 0 has 'shared_memory'",
        lambda: shard(Net(), transport=on_rank_1("process_group", "shared_memory")),
    ),
    "unit": (
        comm.Diverged,
        r"only some ranks call .* conditional=\[module\].*generate\(\) .* shardtrain\.unsharded\(model\)",
        another_unit,
    ),
    "forwards": (
        comm.Diverged,
        r"\(generate\(\) to other lengths\) belong into shardtrain.unsharded\(model\)",
        longer_texts,
    ),
    "update": (
        comm.Diverged,
        "what decides to skip an update see numbers that ranks have all-reduced",
        skipped_updates,
    ),
}


@pytest.mark.parametrize("name", APART)
@each_rank(2)
def test_what_ranks_do_apart_is_named_on_all(name: str) -> None:
    error, message, call = APART[name]
    text = raised_soon(error, call)
    assert re.search(message, text), text


@each_rank(2)
def test_users_post_accumulate_hooks_fire_once_at_rest_with_the_reduced_piece() -> None:
    """Whether they were registered before `shard` or after it; under no_sync they do not."""
    model = OddNet()
    seen = list[tuple[str, torch.Size, int]]()

    def note(param: torch.Tensor, name: str) -> None:
        seen.append((name, param.grad.shape, shardtrain.introspect(model).gathered.units))

    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(functools.partial(note, name=name))
    shard(model, units=[Block])
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(functools.partial(note, name=name))
    with shardtrain.no_sync(model):
        classify(model, 0).backward()
    assert not seen
    classify(model, 0).backward()
    assert sorted(seen) == sorted([(name, param.shape, 0) for name, param in model.named_parameters()] * 2)

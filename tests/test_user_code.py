"""What users' models and loops do to a sharded model: as a replica averaged by hand, or refused by name."""

from __future__ import annotations

import copy
import gc
import warnings
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.distributions import Normal
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

import shardtrain
from shardtrain import comm
from shardtrain.engine.calls import Call

from pool import each_rank
from small import assert_same_parameters, average_gradients, raised_soon, sgd, shard
from test_uses import Lars

Step = Callable[[nn.Module, torch.Tensor], Any]


class Unit(nn.Module):
    """A unit of odd sizes, whose forward a scene may replace."""

    def __init__(self, forward: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.inside, self.norm = nn.Linear(7, 7), nn.LayerNorm(7)
        self.does = forward

    def forward(self, x: Any, *rest: Any) -> Any:
        return self.does(self, x, *rest) if self.does else self.plain(x)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inside(x)).relu() + x


class Net(nn.Module):
    """Three units between parameters of the root."""

    def __init__(self, unit: Any = None, root: Any = None, blocks: int = 3) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, 7), nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.blocks = nn.ModuleList(Unit(unit) for _ in range(blocks))
        self.does = root

    def forward(self, x: torch.Tensor) -> Any:
        if self.does:
            return self.does(self, x)
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0].plain(self.stem(x)) * self.scale


class Outer(nn.Module):
    """A unit that calls units which are also called by themselves."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.own = nn.ModuleList(inner), nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for inner in self.inner:
            x = inner(self.own(x))
        return x


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, 5, generator=generator)


def like_a_replica(make: Callable[[], nn.Module], step: Step | None = None, **options: Any) -> nn.Module:
    """Train ``make()`` sharded, and unsharded with gradients averaged by hand; require the same parameters.

    ``step(model, x)`` is one forward and backward.
    """
    torch.manual_seed(0)
    replica = make()
    model = shard(
        copy.deepcopy(replica), **{"units": lambda _, module: isinstance(module, Unit | Outer), **options}
    )
    for net in (replica, model):
        optimizer = sgd(net)
        for number in range(3):
            optimizer.zero_grad()
            if step is None:
                net(batch(number)).square().mean().backward()
            else:
                step(net, batch(number))
            if net is replica:
                average_gradients(net)
            optimizer.step()
    assert_same_parameters(model, replica)
    return model


# calls


def again_inside() -> nn.Module:
    net = Net()
    net.outer = Outer(net.blocks[0], net.blocks[1])

    def root(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.outer(self.blocks[2](self.blocks[0](self.stem(x)))))

    net.does = root
    return net


def shared_between_units() -> nn.Module:
    net = Net()
    net.a, net.b = Outer(net.blocks[0]), Outer(net.blocks[0], net.blocks[1])
    net.does = lambda self, x: self.head(self.b(self.blocks[2](self.a(self.stem(x)))))
    return net


def detached_beside(self: Any, x: torch.Tensor) -> torch.Tensor:
    weight = self.inside.weight
    return F.linear(F.linear(x, weight).tanh(), weight.detach()) + self.norm(x)


def guided(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Follow the gradient of an energy, as guidance does."""
    with torch.enable_grad():
        at = self.stem(x).detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.blocks[0](self.blocks[1](at)).square().sum(), at)
    return self.head(self.blocks[2](self.blocks[1](self.stem(x) - 0.1 * slope)))


def passes_through(self: Any, x: torch.Tensor) -> torch.Tensor:
    """T5's position bias is made by the first block, and returned by all."""
    h, bias = self.stem(x), None
    for block in self.blocks:
        h, bias = block(h, bias)
    return self.head(h)


def with_bias(self: Any, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    bias = self.inside(x).mean(0) if bias is None else bias
    return self.norm(self.inside(x) + bias), bias


def teacher_last(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = self.blocks[0](self.stem(x))
    with torch.no_grad():
        target = self.blocks[2](self.blocks[1](h))
    return self.head(h - target)


CALLS: dict[str, Callable[[], nn.Module]] = {
    "a unit, and again inside another": again_inside,
    "a unit inside two others": shared_between_units,
    "a detached use of a weight beside a normal one": lambda: Net(detached_beside),
    "autograd.grad inside forward": lambda: Net(root=guided),
    "a tensor that passes through all units": lambda: Net(with_bias, passes_through, blocks=7),
    "a teacher without gradients run last": lambda: Net(root=teacher_last),
}


@pytest.mark.parametrize("name", CALLS)
@each_rank(2, 3)
def test_calls(name: str) -> None:
    model = like_a_replica(CALLS[name])
    peak = shardtrain.introspect(model).take_gathered_peak()
    assert peak.units <= (5 if "again" in name or "two others" in name else 3)  # with the root


@each_rank(2)
def test_calls_outside_of_the_root_s_forward_leave_nothing() -> None:
    model = shard(Net(), units=[Unit])
    x = torch.randn(2, 7)
    for _ in range(30):
        model.blocks[0](x)  # with gradients, and without a backward
    assert not [each for each in gc.get_objects() if isinstance(each, Call)]
    model.blocks[0](model.blocks[1](x)).sum().backward()
    assert all(param.grad is not None for param in model.blocks[1].parameters())


@each_rank(2, 3)
def test_a_loss_on_inner_activations_alone() -> None:
    """By a hook, and by an attribute; of a unit in the middle, whose own output has no gradient."""

    def remembers(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.hidden = self.inside(x)
        return self.norm(self.hidden)

    def by_attribute(net: nn.Module, x: torch.Tensor) -> None:
        net(x)
        net.blocks[1].hidden.square().mean().backward()

    def by_hook(net: nn.Module, x: torch.Tensor) -> None:
        kept: list[torch.Tensor] = []
        handle = net.blocks[1].norm.register_forward_hook(lambda module, args, output: kept.append(output))
        net(x)
        handle.remove()
        kept[0].square().mean().backward()

    for step in (by_attribute, by_hook):
        like_a_replica(lambda: Net(remembers), step)


# outputs


def opaque(self: Any, x: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(h=self.plain(x))


def opaque_and_plain(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, SimpleNamespace]:
    h = self.plain(x)
    return h.detach(), SimpleNamespace(h=h)


def chain(take: Callable[[Any], torch.Tensor]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def root(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = take(block(x))
        return self.head(x)

    return root


def distribution(self: Any, x: torch.Tensor) -> Normal:
    h = self.blocks[1](self.blocks[0](self.stem(x)))
    return Normal(self.head(h), self.scale.exp())


def entropy(net: nn.Module, x: torch.Tensor) -> None:
    out = net(x)
    for param in net.parameters():  # clears what an earlier step left, between forward and backward
        param.grad = None
    (-out.log_prob(torch.ones(3)).mean()).backward()


def in_place(net: nn.Module, x: torch.Tensor) -> None:
    out = net(x)
    out.mul_(2).add_(1)
    out.square().mean().backward()


OUTPUTS: dict[str, tuple[Callable[[], nn.Module], Step | None]] = {
    "an object of a unit": (lambda: Net(opaque, chain(lambda out: out.h)), None),
    "a tensor and an object": (lambda: Net(opaque_and_plain, chain(lambda out: out[1].h)), None),
    "an object of the root": (lambda: Net(root=distribution), entropy),
    "work in place on a view": (
        lambda: Net(root=lambda self, x: self.head(self.blocks[0](self.stem(x)))[:, :2]),
        in_place,
    ),
    "a view of a unit's parameter": (
        lambda: Net(lambda self, x: self.inside.weight[:4] * 1.0 + self.inside.weight[:4], None),
        None,
    ),
    "a unit's parameter": (
        lambda: Net(lambda self, x: self.inside.weight[:4], chain(lambda out: out)),
        None,
    ),
    "a root parameter": (
        lambda: Net(root=lambda self, x: (self.head(self.blocks[0](self.stem(x))), self.scale)),
        lambda net, x: (lambda out: (out[0].square().mean() * out[1].exp()).backward())(net(x)),
    ),
    "a root parameter used after forward": (
        Net,
        lambda net, x: (net(x).square().mean() * net.scale.exp() + net.head.bias.sum()).backward(),
    ),
    "None, defaultdict": (
        lambda: Net(
            lambda self, x: defaultdict(list, h=[self.plain(x)], none=None), chain(lambda out: out["h"][0])
        ),
        None,
    ),
}


@pytest.mark.parametrize("name", OUTPUTS)
@each_rank(2, 3)
def test_outputs(name: str) -> None:
    make, step = OUTPUTS[name]
    like_a_replica(make, step)


@each_rank(2)
def test_casts_keep_the_containers_that_units_fill() -> None:
    def collects(self: Any, x: torch.Tensor, into: list[torch.Tensor], by: defaultdict[str, Any]) -> Any:
        into.append(self.plain(x))
        by["n"] += 1
        return into[-1]

    def root(self: Any, x: torch.Tensor) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        count: defaultdict[str, int] = defaultdict(int)
        h = self.stem(x)
        for block in self.blocks:
            h = block(h, kept, count)
        assert count["n"] == len(kept) == 3
        return self.head(kept[0] + kept[1] + kept[2])

    model = shard(Net(collects, root), units=[Unit], precision=shardtrain.Precision(param=torch.bfloat16))
    model(batch(0)).sum().backward()
    assert all(param.grad is not None for param in model.blocks[0].inside.parameters())


# edits


@each_rank(2, 3)
def test_freezing_between_forward_and_backward() -> None:
    def step(net: nn.Module, x: torch.Tensor) -> None:
        out = net(x)
        for param in net.blocks[1].parameters():
            param.requires_grad_(False)
        out.square().mean().backward()
        for param in net.blocks[1].parameters():
            assert param.grad is None
            param.requires_grad_(True)

    like_a_replica(Net, step)


@pytest.mark.parametrize("replaced", [False, True])
@each_rank(2, 3)
def test_a_momentum_encoder_updated_inside_forward(replaced: bool) -> None:
    def moco(self: Any, x: torch.Tensor) -> torch.Tensor:
        query, key = self.blocks[0], self.blocks[1]
        with torch.no_grad():
            for ours, theirs in zip(key.parameters(), query.parameters(), strict=True):
                if replaced:
                    ours.data = 0.9 * ours.data + 0.1 * theirs.data
                else:
                    ours.mul_(0.9).add_(theirs, alpha=0.1)
            x = self.stem(x)
            target = key(x)
        return self.head(query(x) - target)

    like_a_replica(lambda: Net(root=moco))


@each_rank(2)
def test_edits_inside_forward_are_refused_by_name() -> None:
    class Momentum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(5, 7), nn.Linear(5, 7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                for ours, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
                    ours.mul_(0.9).add_(theirs, alpha=0.1)
            return self.query(x) - self.key(x)

    model = shard(Momentum(), units=lambda name, module: False)
    with pytest.raises(ValueError, match=r"forward changed key.weight, key.bias while the root was whole"):
        model(batch(0))
    table = shard(nn.Sequential(nn.Embedding(9, 7, max_norm=0.01), nn.Linear(7, 3)), units=[nn.Embedding])
    with pytest.raises(ValueError, match=r"forward changed 0.weight while 0 was whole.*unsharded\(model\)"):
        table(torch.arange(9))


@each_rank(2)
def test_parameters_replaced_after_shard_are_refused_by_name() -> None:
    def remove_bias(model: nn.Module) -> None:
        model.head.bias = None

    def pruned(model: nn.Module) -> None:
        prune.l1_unstructured(model.head, "weight", amount=0.3)

    def parametrized(model: nn.Module) -> None:
        parametrize.register_parametrization(model.head, "weight", nn.Identity())

    for change, name in ((remove_bias, "head.bias"), (pruned, "head.weight"), (parametrized, "head.weight")):
        model = shard(Net(), units=[Unit])
        change(model)
        with pytest.raises(ValueError, match=f"{name} is no longer where shard.. found it.*before shard"):
            model(batch(0))


@each_rank(2)
def test_an_interrupted_forward_is_forgotten() -> None:
    def interrupt(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            raise KeyboardInterrupt
        return self.plain(x)

    model = shard(Net(interrupt), units=[Unit])
    with pytest.raises(KeyboardInterrupt):
        model(batch(0))
    assert len(shardtrain.full_state_dict(model)) == len(model.state_dict())
    model.eval()
    model(batch(1)).sum().backward()


# gradients


@each_rank(2)
def test_autograd_grad_over_parameters_is_refused() -> None:
    model = shard(Net(), units=[Unit])
    for _ in range(2):
        loss = model(batch(0)).square().mean()
        with pytest.raises(
            ValueError, match=r"autograd.grad over parameters of a sharded model .*head.weight"
        ):
            torch.autograd.grad(loss, list(model.parameters()))
    like_a_replica(Net)


@each_rank(2)
def test_transforms_of_torch_func_are_refused() -> None:
    model = shard(Net(), units=[Unit])
    with pytest.raises(ValueError, match=r"cannot run inside jvp, vmap or another transform"):
        torch.func.vmap(model)(batch(0))
    with pytest.raises(ValueError, match=r"cannot run inside jvp, vmap"), forward_ad.dual_level():
        model(batch(0))


@each_rank(2)
def test_complex_parameters() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))
            self.unused = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.to(torch.complex64) @ self.used).abs()

    model = like_a_replica(Complex)
    assert model.unused.grad is None


# methods


@each_rank(2, 3)
def test_other_methods_than_forward() -> None:
    def step(net: nn.Module, x: torch.Tensor) -> None:
        (net.encode(x).square().mean() + net(x).square().mean()).backward()

    torch.manual_seed(0)
    replica = Net()
    model = shard(copy.deepcopy(replica), units=[Unit])
    shardtrain.forward_method(model, "encode")
    shardtrain.forward_method(model.blocks[0], "plain")
    for net in (replica, model):
        optimizer = sgd(net)
        for number in range(3):
            optimizer.zero_grad()
            step(net, batch(number))
            if net is replica:
                average_gradients(net)
            optimizer.step()
    assert_same_parameters(model, replica)
    with pytest.raises(ValueError, match="Net has no method decode"):
        shardtrain.forward_method(model, "decode")
    with pytest.raises(ValueError, match="LayerNorm is neither a sharded model nor one of its units"):
        shardtrain.forward_method(model.blocks[0].norm, "forward")


class Tied(nn.Module):
    """The root reads the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.blocks = nn.Embedding(97, 7), nn.ModuleList(Unit() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.emb((x * 100).long().abs() % 97).mean(1)
        for block in self.blocks:
            h = block(h)
        return F.linear(h, self.emb.weight)


@each_rank(2)
def test_a_layer_whose_weight_is_read_around_it() -> None:
    model = like_a_replica(Tied, units=None)
    assert "emb" not in [unit.name for unit in shardtrain.introspect(model).units]
    model = shard(Tied(), units=[nn.Embedding])
    way_out = (
        r"emb.weight is this rank's piece while emb does not run, and the forward of Tied reads it: choose"
    )
    with pytest.raises(RuntimeError, match=way_out):
        model(batch(0))


@pytest.mark.parametrize("way", ["model", "units before", "method"])
@each_rank(2)
def test_compiled_models(way: str) -> None:
    torch.manual_seed(0)
    replica = Net()
    net = copy.deepcopy(replica)
    for block in net.blocks if way == "units before" else ():
        block.compile(backend="eager")
    model = shard(net, units=[Unit])
    if way == "method":
        model.compile(backend="eager")
    run = torch.compile(model, backend="eager") if way == "model" else model
    warnings.filterwarnings(
        "ignore", message="The .grad attribute of a Tensor that is not a leaf"
    )  # Dynamo's
    for called, net in ((replica, replica), (run, model)):
        optimizer = sgd(net)
        for number in range(3):
            optimizer.zero_grad()
            called(batch(number)).square().mean().backward()
            if net is replica:
                average_gradients(net)
            optimizer.step()
    assert_same_parameters(model, replica)
    torch.compiler.reset()


# optimizers


@pytest.mark.parametrize("fused", [False, True])
@each_rank(2, 3)
def test_ranks_that_step_differently_are_told(fused: bool) -> None:
    """By torch's own GradScaler, when one rank's gradients overflow."""
    model = shard(Net(), units=[Unit])
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for number in range(2):
        scaler.scale(model(batch(number)).square().mean()).backward()
        if number == 1 and dist.get_rank() == 1:
            for param in model.parameters():
                param.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
    text = raised_soon(comm.Diverged, lambda: model(batch(2)).sum().backward())
    assert "stepping the optimizer" in text
    assert "use shardtrain.GradScaler" in text


@each_rank(2)
def test_groups_chosen_by_dimensions() -> None:
    def groups(net: nn.Module) -> list[int]:
        return [sum(param.ndim >= 2 for param in net.parameters()), sum(p.ndim < 2 for p in net.parameters())]

    expected = groups(Net())
    assert groups(shard(Net(), units=[Unit])) == expected
    assert groups(shard(Net(), units=[Unit], layout="whole")) == expected


@each_rank(2, 3)
def test_an_optimizer_with_state_built_before_shard() -> None:
    torch.manual_seed(0)
    replica = Net()
    net = copy.deepcopy(replica)
    optimizers = [torch.optim.Adagrad(each.parameters(), lr=0.1) for each in (replica, net)]
    model = shard(net, units=[Unit])
    for called, optimizer in zip((replica, model), optimizers, strict=True):
        for number in range(3):
            optimizer.zero_grad()
            called(batch(number)).square().mean().backward()
            if called is replica:
                average_gradients(called)
            optimizer.step()
    assert_same_parameters(model, replica)


@each_rank(2)
def test_a_nan_on_one_rank_is_in_the_largest_gradient() -> None:
    model = shard(Net(), units=[Unit])
    model(batch(0)).sum().backward()
    if dist.get_rank() == 1:
        model.head.weight.grad.fill_(torch.nan)
    assert shardtrain.clip_grad_norm_(model, 1.0, norm_type=torch.inf).isnan()


class Sam(torch.optim.Optimizer):
    """Cannot be built from groups alone."""

    def __init__(self, params: Any, base: type[torch.optim.Optimizer]) -> None:
        super().__init__(params, {})
        self.base = base(self.param_groups)

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


@each_rank(2)
def test_optimizers_in_warm_up_and_those_that_cannot_be_tried() -> None:
    model = shard(Net(), units=[Unit])
    model(batch(0)).sum().backward()
    with pytest.raises(ValueError, match="Lars cannot step on a sharded model: it gives a piece"):
        Lars(model.parameters(), lr=0.0).step()
    with pytest.warns(UserWarning, match=r"Sam cannot be tried on pieces .*ignored"):
        Sam(model.parameters(), torch.optim.SGD).step()

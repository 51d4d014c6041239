"""Optimizers that are not known by name make some steps on pieces, and are right, or refused by name."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)
from torch.distributed.algorithms.model_averaging.utils import average_parameters

import shardtrain
from shardtrain.pieces.piece import Piece

import small
from pool import each_rank


class Own(torch.optim.Optimizer):
    """An optimizer by ``direction(parameter, gradient, state, group)``, which counts in the state."""

    def __init__(self, params: Any, direction: Any = None, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})
        self.direction = direction

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["step"] = state.get("step", 0) + 1
                    param.sub_(self.direction(param, param.grad, state, group), alpha=group["lr"])


# What the message says first, the step that is refused, and a direction.
Direction = Callable[[Tensor, Tensor, dict[str, Any], dict[str, Any]], Tensor]
REFUSED: dict[str, tuple[str, int, Direction]] = {
    "trust ratio": ("div", 1, lambda p, g, s, o: g * (p.norm() / g.norm())),
    "trust ratio after a warm-up": (
        "div",
        70,
        lambda p, g, s, o: g * (p.norm() / g.norm()) if s["step"] > 65 else g,
    ),
    "each 40th step": ("div", 40, lambda p, g, s, o: g / g.norm() if s["step"] % 40 == 0 else g),
    "clips by the root mean square": ("mean", 1, lambda p, g, s, o: g / g.square().mean().sqrt()),
    "its largest element": ("amax", 1, lambda p, g, s, o: g / g.abs().amax()),
    "normalizes by a method": ("float", 1, lambda p, g, s, o: g / max(1.0, float(g.norm()))),
    "centralization of filters": (
        "mean",
        1,
        lambda p, g, s, o: g - g.mean((1, 2, 3), keepdim=True) if p.ndim == 4 else g,
    ),
    "more elements than so many": ("numel", 1, lambda p, g, s, o: g * (0.1 if p.numel() > 1000 else 1.0)),
    "longer than so many rows": ("shape", 1, lambda p, g, s, o: g * (0.1 if p.shape[0] > 100 else 1.0)),
    "a step size from sums": ("sum", 1, lambda p, g, s, o: g * float((g * p).sum())),
    "noise": ("randn_like", 1, lambda p, g, s, o: g + 0.01 * torch.randn_like(p)),
    "a momentum's norm": ("mul", 1, lambda p, g, s, o: kept(g, s) * s["kept"].norm()),
    "a momentum's norm, later": (
        "mul",
        70,
        lambda p, g, s, o: kept(g, s) * (s["kept"].norm() if s["step"] > 65 else 1.0),
    ),
    "rows": ("an index", 1, lambda p, g, s, o: g * g[0].sign()),
    "finite or not": ("all", 1, lambda p, g, s, o: g if torch.isfinite(g).all() else g * 0),
    "memory": ("data_ptr", 1, lambda p, g, s, o: g * float(g.data_ptr() > 0)),
    "memory of the parameter": ("data_ptr", 1, lambda p, g, s, o: g * float(p.data_ptr() > 0)),
    "a kernel": ("scaled", 1, lambda p, g, s, o: scaled(g, 1.0)),
}


def kept(grad: Tensor, state: dict[str, Any]) -> Tensor:
    state["kept"] = state["kept"].mul(0.9).add_(grad) if "kept" in state else grad.clone()
    momentum: Tensor = state["kept"]
    return momentum


@torch.library.custom_op("tests_of_steps::scaled", mutates_args=())
def scaled(values: Tensor, by: float) -> Tensor:
    return values * by


def model(**options: Any) -> nn.Module:
    """A single rank has pieces only with virtual ranks."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(40, 30), nn.Conv2d(16, 32, 3))
    return shardtrain.shard(layers, **{"virtual_ranks": 2, **options})


def with_gradients(net: nn.Module) -> nn.Module:
    for param in net.parameters():
        param.grad = torch.full_like(param, 0.5)
    return net


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_whole_parameters_is_refused_by_its_name(name: str) -> None:
    words, at, direction = REFUSED[name]
    net = with_gradients(model())
    optimizer = Own(net.parameters(), direction, lr=1e-6)
    for _ in range(at - 1):
        optimizer.step()
    check_refused(optimizer, words, at)


def check_refused(optimizer: torch.optim.Optimizer, words: str, at: int) -> None:
    name = type(optimizer).__name__
    with pytest.raises(ValueError, match=rf"^{name} cannot step on a sharded model: .*{words}\b") as caught:
        optimizer.step()
    assert ("its steps 66 to 69 were not looked at" in str(caught.value)) is (at == 70)
    assert "shard(..., layout='whole')" in str(caught.value)
    assert "shardtrain.trusted(optimizer)" in str(caught.value)


def lamb(param: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> Tensor:
    """As people write it: with an if, beside max() of a number and a tensor as timm's Adafactor has."""
    norms = param.pow(2).sum().sqrt(), kept(grad, state).norm()
    ratio = norms[0] / norms[1] if norms[0] > 0 and norms[1] > 0 else 1.0
    return state["kept"] * ratio * max(1e-3, state["kept"].square().mean().sqrt())


# With layout="whole": functions of one parameter are right, what they decide included. Numbers do not leave.
WHOLE: dict[str, Direction] = {
    "LAMB": lamb,
    **{
        name: REFUSED[name][2]
        for name in REFUSED
        if name not in ("noise", "a step size from sums", "a kernel", "normalizes by a method")
    },
}
LEAVES: dict[str, Direction] = {
    "randn_like": REFUSED["noise"][2],
    "float": lambda p, g, s, o: g / max(1.0, float(g.norm())),
    "item": lambda p, g, s, o: g * (g * p).sum().item(),
}


@pytest.mark.parametrize(
    ("layout", "virtual"), [("whole", 2), ("even", 0)], ids=["pieces are whole", "a rank has all"]
)
@pytest.mark.parametrize("name", WHOLE)
def test_where_a_rank_has_whole_parameters_it_is_right(name: str, layout: Any, virtual: int) -> None:
    net = with_gradients(model(layout=layout, virtual_ranks=virtual))
    torch.manual_seed(0)
    plain = with_gradients(nn.Sequential(nn.Linear(40, 30), nn.Conv2d(16, 32, 3)))
    for each in (net, plain):
        optimizer = Own(each.parameters(), WHOLE[name], lr=1e-4)
        for _ in range(102):
            optimizer.step()
    expected = dict(plain.state_dict())
    torch.testing.assert_close(shardtrain.full_state_dict(net), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", LEAVES)
def test_a_number_of_a_whole_parameter_may_leave_by_the_user_s_word(name: str) -> None:
    """Without it nothing tells that the number changes that parameter alone."""
    net = with_gradients(model(layout="whole"))
    with pytest.raises(ValueError, match=rf"^Own cannot step .*{name} of .*shardtrain\.trusted\(optimizer\)"):
        Own(net.parameters(), LEAVES[name]).step()
    optimizer = Own(net.parameters(), LEAVES[name])
    assert shardtrain.trusted(optimizer) is optimizer
    optimizer.step()


class Deciding(torch.optim.SGD):
    """An optimizer that looks at parameters one after another, and may decide about others."""

    def __init__(self, params: Any, when: str) -> None:
        super().__init__(params, lr=0.1)
        self.when = when

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = self.param_groups[0]["params"]
        are_finite = True
        for param in params:
            if self.when != "each at its turn":
                are_finite = are_finite and bool(param.grad.isfinite().all())
            if self.when == "ends the step":
                return
            if self.when != "all before":
                param.mul_(0.5)
        for param in params:
            if are_finite and self.when != "each at its turn":
                param.sub_(param.grad)


@pytest.mark.parametrize("when", ["all before", "each, and returns", "ends the step"])
def test_what_a_parameter_may_decide_about_others_is_refused(when: str) -> None:
    net = with_gradients(model(layout="whole"))
    told = "^Deciding cannot step .*an if or while of numbers of one parameter, which may decide about others"
    with pytest.raises(ValueError, match=told):
        Deciding(net.parameters(), when).step()
    Deciding(net.parameters(), "each at its turn").step()


def test_a_kernel_steps_by_the_user_s_word() -> None:
    net = with_gradients(model())
    before = shardtrain.full_state_dict(net)
    shardtrain.trusted(Own(net.parameters(), REFUSED["a kernel"][2], lr=0.5)).step()
    for name, value in shardtrain.full_state_dict(net).items():
        torch.testing.assert_close(value, before[name] - 0.25)


class Looking(torch.optim.SGD):
    """SGD that notes in which steps it sees pieces, and asks in step ``asks`` for all gradients' norm."""

    def __init__(self, params: Any, asks: int = 0, calls_base: bool = True) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.asks = asks
        self.calls_base = calls_base
        self.number = 0
        self.on_pieces = list[int]()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.number += 1
        param = self.param_groups[0]["params"][0]
        kinds = {isinstance(param.data, Piece), isinstance(param.grad, Piece)}
        kinds |= {isinstance(state["momentum_buffer"], Piece) for state in self.state.values()}
        assert len(kinds) == 1, self.number
        self.on_pieces += [self.number] if True in kinds else []
        if self.number == self.asks:
            grads = [param.grad for group in self.param_groups for param in group["params"]]
            torch.stack([grad.norm() for grad in grads]).norm().item()
        if self.calls_base:
            super().step()


EARLY = [*range(1, 21)]


@pytest.mark.parametrize("calls_base", [False, True])
@each_rank(2, transport="shared")
def test_the_first_steps_round_ones_and_each_101st_are_made_on_pieces(calls_base: bool) -> None:
    net = with_gradients(small.shard(nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3)), units=[nn.Linear]))
    torch.optim.SGD(net.parameters())  # from now on torch calls hooks in a step of the base class, too
    optimizer = Looking(net[0].parameters(), calls_base=calls_base)
    for _ in range(110):
        optimizer.step()
    optimizer.add_param_group({"params": [*net[1].parameters()]})  # new to it
    for _ in range(100):
        optimizer.step()
    round_ones = [30, 31, 32, 33, 40, 41, 50, 51, 60, 61, 64, 65, 70, 71, 80, 81, 90, 91, 100]
    later = [128, 129, 200, 201, 202]
    assert optimizer.on_pieces == [*EARLY, 21, *round_ones, 101, *sorted({*range(111, 131), *later})]
    for state in optimizer.state.values():
        assert type(state["momentum_buffer"]) is Tensor


@each_rank(2, transport="shared")
def test_one_that_asks_for_a_norm_of_all_stays_on_pieces() -> None:
    net = with_gradients(small.shard(nn.Linear(5, 6)))
    optimizer = Looking(net.parameters(), asks=20)
    for _ in range(30):
        optimizer.step()
    assert optimizer.on_pieces == [*range(1, 31)]


@each_rank(2, transport="shared")
def test_torch_s_own_and_trusted_ones_see_plain_tensors() -> None:
    net = with_gradients(small.shard(nn.Linear(5, 6)))
    optimizer = shardtrain.trusted(Looking(net.parameters()))
    optimizer.step()
    assert optimizer.on_pieces == []
    assert type(net.weight.grad) is Piece


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one of the same parameters."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base

    def step(self, closure: Any = None) -> None:
        self.base.step()


def test_one_that_is_called_by_one_that_is_trusted_is_not_trusted() -> None:
    net = with_gradients(model())
    base = Looking(net.parameters())
    shardtrain.trusted(Wrapper(base)).step()
    assert base.on_pieces == [1]


TORCH_S = "SGD Adam AdamW NAdam RAdam Adamax Adagrad Adadelta RMSprop Rprop ASGD"


@pytest.mark.parametrize("name", TORCH_S.split())
def test_torch_s_element_wise_optimizers_are_right_on_pieces(name: str) -> None:
    """A subclass is not known by name. So the list of those that are known is right, too."""
    kind = getattr(torch.optim, name)
    weights = []
    for each in (kind, type("Sub", (kind,), {})):
        net = with_gradients(model())
        optimizer = each(net.parameters(), lr=0.01, foreach=False)
        for _ in range(3):
            optimizer.step()
        weights.append(shardtrain.full_state_dict(net))
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_a_step_that_fails_by_itself_leaves_no_pieces_of_state() -> None:
    def fails(param: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> Tensor:
        kept(grad, state)
        if state["step"] == 2:
            raise KeyError("of its own")
        return grad

    net = with_gradients(model())
    optimizer = Own(net.parameters(), fails)
    optimizer.step()
    with pytest.raises(KeyError):
        optimizer.step()
    with torch.no_grad():
        net[0](torch.ones(40))
    for state in optimizer.state.values():
        assert type(state["kept"]) is Tensor
    assert net[0].weight.numel() + 0 == 1200


class Hooking(torch.optim.SGD):
    """SGD that registers a hook of its own steps."""

    def __init__(self, params: Any, kind: str = "pre", norms: bool = True) -> None:
        super().__init__(params, lr=0.1)
        register = self.register_step_pre_hook if kind == "pre" else self.register_step_post_hook
        register(self.divide)
        self.norms = norms

    @staticmethod
    @torch.no_grad()
    def divide(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.div_(param.norm().clamp_min(1e-3) if optimizer.norms else 2.0)


@pytest.mark.parametrize("kind", ["pre", "post"])
@each_rank(2, transport="shared")
def test_hooks_that_a_class_registers_see_pieces(kind: str) -> None:
    net = with_gradients(small.shard(nn.Linear(5, 6)))
    Hooking(net.parameters(), kind=kind, norms=False).step()
    with pytest.raises(ValueError, match=r"clamp_min of weight, a parameter at rest, would see"):
        Hooking(net.parameters(), kind=kind).step()


@each_rank(2)
def test_averagers_of_parameters_are_refused() -> None:
    """Pieces of different elements would be averaged."""
    net = small.shard(nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3)), units=[nn.Linear])
    net(torch.ones(2, 5)).sum().backward()
    before = shardtrain.full_state_dict(net)
    hierarchical = HierarchicalModelAverager(OrderedDict([(2, 2)]), warmup_steps=0)
    for averager in (PeriodicModelAverager(2, warmup_steps=0), hierarchical):
        with pytest.raises(ValueError, match=r"^all_reduce\(\) of .* would combine pieces of different elem"):
            averager.average_parameters(net.parameters())
    with pytest.raises(ValueError, match=r"^all_reduce\(\) of .* would combine pieces of different elements"):
        average_parameters(nn.Sequential(net).parameters(), dist.group.WORLD)
    assert all(map(torch.equal, before.values(), shardtrain.full_state_dict(net).values()))


class Tail(torch.optim.AdamW):
    """AdamW that averages weights after ``super().step()``."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                slow = state.setdefault("slow", param.detach().clone())
                if int(state["step"]) % 5 == 0:
                    slow.lerp_(param, 0.5)
                    param.copy_(slow)


def test_state_that_the_rest_of_a_step_makes_is_plain() -> None:
    net = with_gradients(model())
    torch.optim.AdamW(net.parameters())  # from now on torch calls hooks in its step, also inside of another
    optimizer = Tail(net.parameters())
    optimizer.step()
    for state in optimizer.state.values():
        assert type(state["slow"]) is Tensor

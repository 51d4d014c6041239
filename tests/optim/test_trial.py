"""Optimizers that are right on whole parameters alone are refused before their first step."""

import math
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
from torch.distributed.optim import PostLocalSGDOptimizer

import shardtrain

import small
from pool import each_rank


class Own(torch.optim.Optimizer):
    """Steps each parameter by ``direction(parameter, gradient, state, group)``, which counts in the state."""

    def __init__(self, params: Any, direction: Any = None, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "direction": direction, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["step"] = state.get("step", 0) + 1
                    # Plain tensors, as averages of gradients are.
                    grad = torch.zeros_like(param).add_(param.grad)
                    param.sub_(group["direction"](param, grad, state, group), alpha=group["lr"])


def plain(param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    return grad


def trust_after_a_warm_up(param: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> Tensor:
    return grad * (param.norm() / grad.norm() if state["step"] > 500 else 1.0)


def clips_spikes(param: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> Tensor:
    """Clip by the root mean square of the gradient, where that is three times the largest so far."""
    rms = grad.square().mean().sqrt() if grad.numel() else grad.sum()
    before = group.setdefault("seen", {}).get(id(param), rms)
    group["seen"][id(param)] = torch.maximum(before, rms)
    return grad * (before / rms if rms > 3 * before else 1.0)


def rescales_large_matrices(param: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> Tensor:
    """By the size alone, which is below the limit for each piece and for most matrices."""
    return grad * (0.1 if param.numel() > 100_000 else 1.0)


def rescales_flat_vectors(param: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> Tensor:
    return grad / max(1.0, float(grad.norm())) if param.ndim == 1 else grad


def filters_by_their_mean(param: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> Tensor:
    return grad - grad.mean((1, 2, 3), keepdim=True) if param.ndim == 4 else grad


def small_pieces_alone(param: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> Tensor:
    """As a kernel that has another path for small tensors, which pieces are on many ranks."""
    return grad * (0.5 if 0 < param.numel() < 10_000 and param.shape[0] > 1000 else 1.0)


def adapts_its_step(param: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> Tensor:
    """As D-Adaptation does: a step size that begins tiny, and grows with sums over all elements."""
    group["sum"] = group.get("sum", 0.0) + float((grad * param).sum())
    group["d"] = max(group.get("d", 1e-9), 1e-12 * abs(group["sum"]))
    return group["d"] * grad


def averages_a_norm(param: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> Tensor:
    """Keep a number that begins to count later than a trial can see."""
    state["norm"] = 0.9 * state.get("norm", torch.zeros(())) + grad.norm()
    return grad * (state["norm"] if state["step"] == 77 else 1.0)


def scales_a_state(param: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> Tensor:
    """Keep a state that counts later than a trial can see."""
    state["kept"] = grad / (1e-8 + grad.norm())
    return grad + (state["kept"] if state["step"] == 77 else 0.0)


def model(**options: Any) -> nn.Module:
    layers = nn.Linear(400, 300), nn.Conv2d(16, 32, 3)
    net = shardtrain.shard(nn.Sequential(*layers), **options)
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    return net


class Attributed(torch.optim.SGD):
    """Has an option that is no default of its groups."""

    def __init__(self, params: Any, lr: float = 0.1, normalizes: bool = False) -> None:
        super().__init__(params, lr)
        self.normalizes = normalizes

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for param in group["params"] if self.normalizes else ():
                param.div_(param.norm().clamp_min(1))


OTHER = [
    trust_after_a_warm_up,
    clips_spikes,
    rescales_large_matrices,
    rescales_flat_vectors,
    filters_by_their_mean,
    small_pieces_alone,
    adapts_its_step,
    averages_a_norm,
    scales_a_state,
]


@pytest.mark.parametrize("direction", OTHER)
def test_what_depends_on_whole_parameters_is_refused(direction: Callable[..., Tensor]) -> None:
    net = model()
    optimizer = Own(net.parameters(), direction)
    with pytest.raises(
        ValueError, match=r"^Own cannot step on a sharded model: it.* use shard\(\.\.\., layout='whole'\)"
    ):
        optimizer.step()


def test_an_option_that_is_an_attribute_of_the_optimizer_counts() -> None:
    net = model()
    Attributed(net.parameters()).step()
    with pytest.raises(ValueError, match=r"^Attributed cannot step on a sharded model: it gives"):
        Attributed(net.parameters(), normalizes=True).step()


def test_noise_that_is_small_beside_a_spike_counts() -> None:
    def adds_noise(param: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> Tensor:
        return grad + 0.01 * torch.randn_like(param)

    with pytest.raises(ValueError, match=r"^Own cannot step on a sharded model: it gives"):
        Own(model().parameters(), adds_noise).step()


def test_an_optimizer_that_fails_on_pieces_without_a_text_is_refused() -> None:
    def requires_a_matrix(param: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> Tensor:
        if param.shape[1:] == (1,):
            raise NotImplementedError
        return grad

    with pytest.raises(ValueError, match=r"cannot step on a sharded model: NotImplementedError\. A rank"):
        Own(model().parameters(), requires_a_matrix).step()


@pytest.mark.parametrize("virtual", [0, 2])
@pytest.mark.parametrize("direction", [each for each in OTHER if each is not adapts_its_step] + [plain])
def test_where_a_rank_has_whole_parameters_it_is_right(
    direction: Callable[..., Tensor], virtual: int
) -> None:
    net = model(layout="whole", virtual_ranks=virtual)
    Own(net.parameters(), direction).step()


@pytest.mark.parametrize("layout", ["even", "whole"])
def test_a_number_over_all_parameters_is_named(layout: Any) -> None:
    net = model(layout=layout)
    named = r"^Own cannot step on a sharded model: its '(sum|d)' depends on what a rank holds"
    with pytest.raises(ValueError, match=named):
        Own(net.parameters(), adapts_its_step).step()


def test_options_that_are_equal_to_a_count_of_steps_are_left() -> None:
    """A trial sets counts of steps; were this one set, too, the trial would take hours."""

    def repeats(param: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> Tensor:
        assert group["rounds"] <= 10
        return grad

    for rounds in range(1, 11):
        net = model()
        Own(net.parameters(), repeats, rounds=rounds).step()


def test_an_optimizer_is_tried_once_with_the_same_options() -> None:
    """Such as one for each parameter; and again with others."""
    net = nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(4)))
    shardtrain.shard(net)
    tried = []

    def counts(param: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> Tensor:
        tried.append(param.shape)
        return grad

    steps = []
    for param in net.parameters():
        param.grad = torch.ones_like(param)
        Own([param], counts).step()
        steps.append(len(tried))
    assert steps[1:] == [steps[0] + number for number in (1, 2, 3)]
    Own(net.parameters(), counts, lr=1.0, other=math.pi).step()
    assert len(tried) > 2 * steps[0]


class Sometimes(torch.optim.Optimizer):
    """Normalizes each ``every``-th gradient. It counts steps as ``counts`` says."""

    def __init__(self, params: Any, every: int = 10, counts: str = "state") -> None:
        super().__init__(params, {"lr": 0.1, "every": every})
        self.counts = counts
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            steps = group.get("steps", self.steps)
            for param in group["params"]:
                grad = torch.zeros_like(param).add_(param.grad)
                state = self.state[param]
                if self.counts in ("state", "before"):
                    steps = state.setdefault("step", torch.zeros(()) if self.counts == "state" else 0)
                if (int(steps) + (self.counts != "before")) % group["every"] == 0 and steps:
                    grad /= grad.norm()
                param.sub_(grad, alpha=group["lr"])
                if "step" in state:
                    state["step"] += 1
            if self.counts == "group":
                group["steps"] = steps + 1
        self.steps += 1


@pytest.mark.parametrize("counts", ["state", "before", "group", "attribute"])
@pytest.mark.parametrize("every", [2, 7, 10, 11, 13, 50, 100, 128, 1000, 1024, 10_000])
def test_what_comes_every_so_many_steps_is_refused(every: int, counts: str) -> None:
    net = nn.Sequential(nn.Linear(40, 30))
    shardtrain.shard(net)
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    optimizer = Sometimes(net.parameters(), every, counts)
    with pytest.raises(ValueError, match=r"^Sometimes cannot step on a sharded model: it gives a piece"):
        optimizer.step()


def test_counts_that_begin_elsewhere_count() -> None:
    """Such as those of an optimizer that goes on from a checkpoint."""
    optimizer = Sometimes(model().parameters(), 1000, "attribute")
    optimizer.steps = 12_345
    with pytest.raises(ValueError, match=r"^Sometimes cannot step on a sharded model: it gives a piece"):
        optimizer.step()


def test_an_optimizer_whose_later_steps_cannot_be_imitated_is_said_to_be_tried_in_its_first() -> None:
    def reads_a_table(param: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> Tensor:
        return grad * [1.0] * 100 if state["step"] > 100 else grad

    with pytest.warns(
        UserWarning, match=r"^Own was tried on .* in its first steps only: .* \(TypeError: .*\)\. "
    ):
        Own(model().parameters(), reads_a_table).step()


class Hooked(torch.optim.SGD):
    """Registers a hook of its own steps."""

    def __init__(self, params: Any, lr: float = 0.1, kind: str = "pre", norms: bool = True) -> None:
        super().__init__(params, lr)
        register = self.register_step_pre_hook if kind == "pre" else self.register_step_post_hook
        register(self.divide)
        self.kind = kind
        self.norms = norms

    @staticmethod
    @torch.no_grad()
    def divide(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                assert param.isfinite().all()
                param.div_(param.norm().clamp_min(1e-3) if optimizer.norms else 2.0)


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_hooks_that_a_class_registers_are_tried(kind: str) -> None:
    Hooked(model().parameters(), kind=kind, norms=False).step()
    with pytest.raises(ValueError, match=r"^Hooked cannot step on a sharded model: it gives a piece"):
        Hooked(model().parameters(), kind=kind).step()


@pytest.mark.parametrize("kind", ["pre", "post"])
@each_rank(2)
def test_hooks_that_a_class_registers_see_plain_parameters(kind: str) -> None:
    """They were tried; a piece would refuse their check that all elements are finite."""
    net = small.shard(nn.Linear(5, 6))
    before = [param.detach().clone() for param in net.parameters()]
    net(torch.ones(2, 5)).sum().backward()
    Hooked(net.parameters(), lr=0.0, kind=kind, norms=False).step()
    for param, old in zip(net.parameters(), before, strict=True):
        assert torch.equal(param, old / 2)


@each_rank(2)
def test_optimizers_and_averagers_that_average_parameters_are_refused() -> None:
    """Pieces of different elements would be averaged."""
    net = small.shard(nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3)), units=[nn.Linear])
    net(torch.ones(2, 5)).sum().backward()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    before = shardtrain.full_state_dict(net)
    hierarchical = HierarchicalModelAverager(OrderedDict([(2, 2)]), warmup_steps=0)
    for averager in (PeriodicModelAverager(2, warmup_steps=0), hierarchical):
        with pytest.raises(ValueError, match=r"^averages of a sharded model's parameters .*: leave them out"):
            averager.average_parameters(net.parameters())
        message = r"^PostLocalSGDOptimizer owns, averages or broadcasts whole parameters"
        with pytest.raises(ValueError, match=message):
            PostLocalSGDOptimizer(inner, averager).step()
    with pytest.raises(ValueError, match=r"^averages of a sharded model's parameters"):
        average_parameters(nn.Sequential(net).parameters(), dist.group.WORLD)
    assert all(map(torch.equal, before.values(), shardtrain.full_state_dict(net).values()))
    inner.step()

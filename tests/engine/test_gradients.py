"""Gradients on a rank: what is right on pieces, or on whole gradients of one owner; all else is refused."""

import copy
import itertools
import math
import pickle
import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.dlpack import to_dlpack

import shardtrain
from shardtrain import checkpoint, comm
from shardtrain.pieces import functions as element_wise
from shardtrain.pieces.piece import Piece

from pool import each_rank
from small import Block, OddNet, Parts, classify, raised_soon, shard, sharded_and_replica

SEES = "would see this rank's piece alone: call torch's or shardtrain's clip_grad_norm_ for the norm of all "


def small() -> nn.Module:
    """Return a model of which each rank of two has pieces, and of some parameters no element."""
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1))


def with_gradients(**options: Any) -> nn.Module:
    model = shard(small(), **options)
    model(torch.arange(10.0).view(2, 5)).square().sum().backward()
    return model


def quietly(call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return call()


def without_classes(call: Callable[[], object]) -> object:
    with torch._C.DisableTorchFunctionSubclass():
        return call()


# Torch 2.11 has one address for reading and writing.
READ_ADDRESS = "const_data_ptr" if hasattr(torch.Tensor, "const_data_ptr") else "data_ptr"

# By name: the function that the refusal names, and a use; `test_snippets.py` has more, and
# `test_the_promise_is_as_wide_as_the_list` all functions. From "vmap" on none asks by `__torch_function__`.
LOOKS: dict[str, tuple[str, Callable[[Tensor], object]]] = {
    "centred rows (GC)": ("mean", lambda g: g - g.mean(dim=-1, keepdim=True)),
    "softmax": ("softmax", lambda g: torch.softmax(g, -1)),
    "max of a row": ("max", lambda g: g.max(-1)),
    "lists of maxima": ("foreach_max", lambda g: torch._foreach_max([g])),
    "a row": ("an index", lambda g: g[0]),
    "the padding row": ("an index", lambda g: g.__setitem__(0, 0.0)),
    "noise in place": ("normal", lambda g: g.normal_()),
    "a larger tensor": ("mul", lambda g: g[None] * torch.ones(3, *(1 for _ in g.shape))),
    "a number": ("item", lambda g: g.norm().item()),
    "by keyword": ("sum", lambda g: torch.sum(input=g)),
    "an operator": ("sum", lambda g: torch.ops.aten.sum(g)),
    "a count of a mask": ("sum", lambda g: torch.isclose(g, torch.zeros_like(g)).sum()),
    "some of the memory": ("as_strided", lambda g: g.as_strided((1,), (1,))),
    "its storage": ("untyped_storage", lambda g: torch.empty(0).set_(g.untyped_storage())),
    "its address": ("data_ptr", lambda g: g.data_ptr()),
    "its address, to read": (READ_ADDRESS, lambda g: getattr(g, READ_ADDRESS)()),
    "memory of a device": ("cuda_array_interface", lambda g: g.__cuda_array_interface__),
    "vmap": ("sum", lambda g: torch.vmap(lambda row: row.abs().sum())(g.view(-1, 1))),
    "torch.func": ("sum", lambda g: torch.func.grad(lambda values: values.square().sum())(g)),
    "a new tensor": ("to_copy", lambda g: quietly(lambda: torch.tensor(g, dtype=torch.double))),
    "a new one of a norm": ("detach", lambda g: quietly(lambda: torch.tensor(g.norm()))),
    "torch.Tensor": ("sum", lambda g: torch.Tensor(g).sum()),
    "new_tensor": ("sum", lambda g: quietly(lambda: g.new_tensor(g)).sum()),
    "pickle": ("pickle", pickle.dumps),
    "a pickle of a copy": ("pickle", lambda g: pickle.dumps(g.clone())),
    "copy.copy": ("sum", lambda g: copy.copy(g).sum()),
    "a parameter": ("requires_grad", lambda g: nn.Parameter(g)),
    "another's memory": ("set", lambda g: torch.empty(0).set_(g)),
    "no class asked": ("sum", lambda g: without_classes(lambda: g.sum())),
    "dlpack": ("dlpack_device", lambda g: torch.from_dlpack(g)),
    "compiled code": ("sum", lambda g: torch.compile(lambda values: values.sum(), backend="eager")(g)),
    "a grid of the other": ("cat", lambda g: torch.cat([g, torch.zeros(1, *g.shape[1:])])),
}


@each_rank(2, transport="auto")
def test_what_combines_elements_is_refused_alike_on_all_ranks() -> None:
    model = with_gradients()
    assert any(0 in param.shape for param in model.parameters())
    for param in (model[0].weight, model[1].bias):
        before = param.grad.as_subclass(Tensor).clone()
        for name, (says, look) in LOOKS.items():
            text = raised_soon(ValueError, lambda look=look, grad=param.grad: look(grad))
            assert text.split(" of a gradient ")[0] == says, name
            assert SEES in text or says == "pickle", name
        assert torch.equal(param.grad.as_subclass(Tensor), before)


def test_virtual_ranks_on_one_rank_refuse_what_several_refuse() -> None:
    model = shardtrain.shard(small(), virtual_ranks=2)
    for number in range(2):
        with shardtrain.virtual_rank(model, number):
            model(torch.ones(2, 5)).sum().backward()
    for name, (says, look) in LOOKS.items():
        text = raised_soon(ValueError, lambda look=look: look(model[0].weight.grad))
        assert text.split(" of a gradient ")[0] == says, name


# Right on pieces: `same[name](g)` of a piece is the piece of that of the whole gradient.
SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "arithmetic": lambda g: 2 - (-g + 1) * g / 3.0 ** g.abs(),
    "in place": lambda g: g.clone().mul_(2).add_(g, alpha=0.5).clamp_(-1, 1).neg_(),
    "sign descent": lambda g: g.sign() * g.abs().sqrt(),
    "masks": lambda g: g.clone().masked_fill_(g < 0, 0.0),
    "an index by a mask": lambda g: g.clone().index_put_((g > 0,), torch.tensor(0.5)),
    "an index of all": lambda g: g[...][:].clone(),
    "where": lambda g: torch.where(g.isfinite() & (g != 0), g, 0.0),
    "lists": lambda g: torch._foreach_mul(torch._foreach_abs([g]), 2.0)[0],
    "two tensors": lambda g: torch.max(g, torch.zeros_like(g)) + torch.minimum(g, 2 * g),
    "shapes": lambda g: g.flatten().view_as(g).reshape(g.shape).unsqueeze(0).squeeze(0),
    "dtypes": lambda g: g.double().to(torch.float32).contiguous(),
    "special": lambda g: torch.special.erf(g) + F.relu(g) + torch.special.xlogy(g.abs(), 2.0),
    "copies": lambda g: copy.deepcopy(g).detach(),
    "views of numbers": lambda g: torch.view_as_complex(torch.stack([g, g], -1)).real.clone(),
    "vmap": lambda g: torch.vmap(lambda row: 2 * row)(g.view(-1, 1)).view(g.shape),
    "torch.Tensor": lambda g: torch.Tensor(g) + copy.copy(g).data,
    "compiled code": lambda g: torch.compile(lambda values: values * 2, backend="eager")(g),
    "new ones": lambda g: g.new_zeros(g.shape) + torch.full_like(g, 2.0),
}


@each_rank(2, transport="auto")
def test_what_treats_each_element_by_itself_is_right() -> None:
    model = with_gradients()
    with shardtrain.unsharded(model, grads=True, writeback=False):
        whole = [param.grad.clone() for param in model.parameters()]
    for name, function in SAME.items():
        wanted = [function(grad) for grad in whole]
        kept = [param.grad for param in model.parameters()]
        for param in model.parameters():
            param.grad = function(param.grad)
        with shardtrain.unsharded(model, grads=True, writeback=False):
            for param, grad in zip(model.parameters(), wanted, strict=True):
                torch.testing.assert_close(param.grad, grad, msg=name)
        for param, grad in zip(model.parameters(), kept, strict=True):
            assert type(param.grad) is type(grad), name  # a norm of it is a norm of all
            param.grad = grad


def by_list(grad: Tensor) -> Tensor:
    buffers = [torch.zeros(grad.shape)]
    torch._foreach_add_(buffers, [grad])
    return buffers[0]


def by_index(grad: Tensor) -> Tensor:
    buffer = torch.zeros(grad.shape)
    buffer[...] = grad
    return buffer


def in_a_flat_one(grad: Tensor) -> Tensor:
    flat = torch.zeros(2, *grad.shape)
    flat[1].add_(grad)
    return flat


TAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "add_": lambda g: torch.zeros(g.shape).add_(g),
    "copy_": lambda g: torch.zeros(g.shape).copy_(g),
    "lerp_": lambda g: torch.zeros(g.shape).lerp_(g, 0.1),
    "addcmul_": lambda g: torch.zeros(g.shape).addcmul_(g, g),
    "out": lambda g: torch.mul(g, 2, out=torch.zeros(g.shape)),
    "a list": by_list,
    "an index": by_index,
    "a part of a flat one": in_a_flat_one,
}


@pytest.mark.parametrize("layout", ["even", "whole"])
@each_rank(2, transport="auto")
def test_a_plain_tensor_that_takes_a_gradient_is_a_piece(layout: str) -> None:
    model = with_gradients(layout=layout)
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    for grad in grads:
        for name, take in TAKES.items():
            buffer = take(grad)
            assert isinstance(buffer, Piece), name
            number = raised_soon(ValueError, lambda taken=buffer: taken.sum().item())
            assert SEES in number, name
            others = Piece.on(torch.ones(buffer.shape), grad.owners._replace(elements="others"))
            assert "several gradients" in raised_soon(ValueError, lambda a=buffer, b=others: a + b)


SIZE_LOOKS: dict[str, Callable[[Tensor], object]] = {
    "fan in": lambda g: g / g.shape[-1] ** 0.5,
    "a factor": lambda g: g * (0.1 * g.size(0)),
    "a root": lambda g: math.sqrt(torch.numel(g)),
    "the longest": lambda g: max(g.size(0), 1),
    "many": lambda g: g.numel() > 1,
    "length": lambda g: len(g),
}


@each_rank(2)
def test_sizes_of_a_piece_are_numbers_and_numel_is_the_whole_s() -> None:
    """As those of the parameter at rest; in an optimizer's step on pieces they are refused."""
    model = with_gradients()
    wholes = dict(small().named_parameters())
    for name, param in model.named_parameters():
        grad = param.grad
        assert grad.shape == param.shape == grad.size()
        assert (grad.size(0), grad.stride(), len(grad)) == (param.size(0), param.stride(), len(param))
        assert grad.numel() == grad.nelement() == torch.numel(grad) == wholes[name].numel()
        assert param.numel() == param.nelement() == torch.numel(param) == wholes[name].numel()
        assert grad.numel() * grad.element_size() == wholes[name].nbytes
        assert (grad.flatten() * 2).numel() == wholes[name].numel()
        assert grad.nbytes == param.nbytes == 4 * len(grad)
        assert repr(grad).startswith("Piece(tensor(")
        for count in (
            lambda grad=grad: bool(grad[grad.abs() > 1.0].numel()),
            lambda grad=grad: torch.masked_select(grad, grad > 1.0).abs().shape[0],
        ):
            text = raised_soon(ValueError, count)
            assert " of elements of a gradient that a mask selects would see this rank's piece" in text
        joined = torch.cat([grad, grad])
        assert "several pieces of a gradient would" in raised_soon(ValueError, joined.numel)
    for name, look in SIZE_LOOKS.items():
        optimizer = Looking(model.parameters(), look)
        text = raised_soon(ValueError, optimizer.step)
        says = "Looking cannot step on a sharded model: (shape|size|numel|len) of a gradient would see"
        assert re.match(says, text), name


class Looking(torch.optim.Optimizer):
    """An optimizer that looks at each gradient in a step."""

    def __init__(self, params: Any, look: Callable[[Tensor], object]) -> None:
        super().__init__(params, {})
        self.look = look

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            self.look(param.grad)


@each_rank(2)
def test_a_piece_has_no_rows() -> None:
    """A factor per row of (4, -1) would multiply other elements on each rank."""
    model = shard(nn.Linear(8, 12))
    model(torch.ones(2, 8)).sum().backward()
    grad = model.weight.grad
    for look in (
        lambda: grad.view(4, -1) * torch.ones(4, 1),
        lambda: grad.reshape(-1, 4, 1),
        lambda: grad.flatten().unflatten(0, (4, -1)),
        lambda: torch.Tensor.view_as(grad, torch.ones(4, len(model.weight) // 4)),
        lambda: torch.vmap(lambda row: row.view(4, -1))(grad.view(1, -1)),
    ):
        assert " of a gradient into rows would see " in raised_soon(ValueError, look)
    assert grad.view(-1).reshape(1, -1, 1).squeeze().t().shape == (len(model.weight),)


@each_rank(2)
def test_state_that_is_made_of_gradients_is_pickled_as_other_state() -> None:
    """Such as what sharpness-aware minimization keeps between its two backwards, outside of a step."""
    model = with_gradients()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    for param in model.parameters():
        optimizer.state[param]["first"] = param.grad.clone()
    state = pickle.loads(pickle.dumps(optimizer.state_dict()))["state"]
    assert {type(value["first"]) for value in state.values()} == {Tensor}


# What `element_wise.UNSEEN` names: each reads a piece as if it were a whole gradient.
UNSEEN_USES: dict[str, Callable[[Tensor], object]] = {
    "to_dlpack": lambda g: torch.from_dlpack(to_dlpack(g)).sum(),
    "size": lambda g: torch.jit.script(rows_of)(g) * 2,
    "data": lambda g: with_data(g).sum(),
}


def with_data(grad: Tensor) -> Tensor:
    buffer = torch.zeros(grad.shape)
    buffer.data = grad
    return buffer


def rows_of(values: Tensor) -> int:
    return values.size(0)


@each_rank(2)
def test_the_promise_is_as_wide_as_the_list() -> None:
    """All that Python can override is listed or refused; failures.md names sizes, and what is not seen."""
    lines = (Path(__file__).parents[2] / "docs" / "failures.md").read_text().split("\n")
    [refused] = [
        line for line in lines if line.startswith("| all functions of a gradient, and of a parameter")
    ]
    [sizes] = [line for line in lines if line.startswith("| sizes of a gradient")]
    start = next(number for number, line in enumerate(lines) if line.startswith("- Not seen in a gradient"))
    unseen = " ".join([lines[start], *itertools.takewhile(lambda line: line[:1] == " ", lines[start + 1 :])])
    assert "`shardtrain/pieces/functions.py`" in refused
    assert tuple(re.findall("`([a-z_]+)`", sizes.split("|")[1])) == (*element_wise.SIZES, "len")
    assert tuple(re.findall("`([a-z_]+)`", unseen)) == element_wise.UNSEEN == tuple(UNSEEN_USES)

    model = shard(nn.Linear(8, 4, bias=False))  # as many elements on each rank
    model(torch.ones(1, 8)).sum().backward()
    grad = model.weight.grad
    for look in UNSEEN_USES.values():
        assert not isinstance(look(grad), Piece)
    for functions in torch.overrides.get_overridable_functions().values():
        for function in functions:
            # Functions of lists are asked with one.
            args = ([grad],) if function.__name__ in element_wise.JOINING else (grad,)
            listed = element_wise.is_element_wise(function, args, Piece)
            if not listed and function not in element_wise.NORMS:
                text = raised_soon(ValueError, lambda f=function: ask(f, grad))
                assert "piece alone" in text or "leave it out" in text, function


def ask(function: Any, grad: Tensor) -> object:
    return Piece.__torch_function__(function, (Piece,), (grad,), {})


@each_rank(3, transport="auto")
def test_pieces_of_other_elements_are_not_combined() -> None:
    """The second of three ranks holds as many elements of both parameters, but other ones."""
    first, second = (nn.Parameter(torch.ones(96)) for _ in range(2))
    model = shard(Parts(lambda self, x: ((self.first + self.second) * x).sum(), first=first, second=second))
    model(torch.ones(())).backward()
    first = model.first.grad
    second = model.second.grad
    assert [len(first), len(second)] == [[64, 0], [32, 32], [0, 64]][dist.get_rank()]
    for combine in (
        lambda: first + second,
        lambda: first.lerp_(second, 0.5),
        lambda: torch.where(first > 0, first, second),
    ):
        assert raised_soon(ValueError, combine).split(" of ")[1].startswith("several gradients would see")
    torch.testing.assert_close(
        torch.stack([torch.cat([first, second]).norm()]).norm(), torch.tensor(192.0).sqrt()
    )
    if len(first) == len(second):  # what is overwritten is a piece of what was copied
        scratch = first.clone().copy_(second)
        assert torch.equal((scratch + second).plain, 2 * second.plain)


@pytest.mark.parametrize("virtual", [0, 2])
@each_rank(2, transport="auto")
def test_numbers_of_one_owner_are_not_added_and_do_not_leave(virtual: int) -> None:
    """So no clipping by hand, which would be by this rank's parameters; torch's and ours are right."""
    model = shard(OddNet(), units=[Block], layout="whole", virtual_ranks=virtual)
    for number in shardtrain.introspect(model).virtual_ranks if virtual else [0]:
        if virtual:
            with shardtrain.virtual_rank(model, number, seed=1):
                classify(model, 0).backward()
        else:
            classify(model, 0).backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    norm = grads[0].norm()
    assert norm.shape == grads[0].sum().shape == ()
    for look in (
        lambda: sum(grad.norm() ** 2 for grad in grads),
        lambda: sum(grad.square().sum() for grad in grads),
        lambda: max(grad.abs().max() for grad in grads),
        lambda: torch.stack([grad.norm(1) for grad in grads]).sum(),
        lambda: torch.stack([grad.amax() for grad in grads]),
        lambda: sum(grad.data.norm(2).item() ** 2 for grad in grads),
        lambda: float(norm),
        lambda: bool(grads[0].isfinite().all()),
        lambda: grads[0].data.detach().abs().mean().tolist(),
        lambda: grads[0] / grads[1].norm(),
    ):
        text = raised_soon(ValueError, look)
        assert SEES.removeprefix("would see this rank's piece alone") in text
    torch.testing.assert_close(
        nn.utils.clip_grad_norm_(model.parameters(), torch.inf), shardtrain.clip_grad_norm_(model, torch.inf)
    )


# By name: a call of a collective, of torch's (`dist`) or of ours, with a gradient.
COLLECTIVES: dict[str, Callable[[Any, Tensor], object]] = {
    "all_reduce": lambda of, g: of.all_reduce(g),
    "all_reduce of its data": lambda of, g: of.all_reduce(g.data.div_(2)),
    "all_reduce later": lambda of, g: of.all_reduce(g, async_op=True),
    "broadcast": lambda of, g: of.broadcast(g, 0),
    "all_gather": lambda of, g: of.all_gather([torch.empty_like(g.as_subclass(Tensor))] * 2, g),
    "all_gather_into_tensor": lambda of, g: of.all_gather_into_tensor(torch.empty(2 * g.numel()), g),
    "reduce_scatter": lambda of, g: of.reduce_scatter(g, [torch.ones(g.numel())] * 2),
    "reduce_scatter_tensor": lambda of, g: of.reduce_scatter_tensor(torch.empty(g.numel()), g),
    "all_to_all": lambda of, g: of.all_to_all([g, g], [g, g]),
    "all_to_all_single": lambda of, g: of.all_to_all_single(torch.empty(g.numel()), g),
    "gather": lambda of, g: of.gather(g, None if dist.get_rank() else [torch.empty(g.shape)] * 2, 0),
    "scatter": lambda of, g: of.scatter(g, None if dist.get_rank() else [torch.empty(g.shape)] * 2, 0),
    "send": lambda of, g: of.send(g, 1 - dist.get_rank()),
    "a norm of one": lambda of, g: of.all_reduce(g.norm()),
}
TORCH_S: dict[str, Callable[[Any, Tensor], object]] = {
    "reduce": lambda of, g: of.reduce(g, 0),
    "all_reduce_coalesced": lambda of, g: of.all_reduce_coalesced([g]),
    "isend in a batch": lambda of, g: of.batch_isend_irecv([of.P2POp(of.isend, g, 1 - dist.get_rank())]),
    "a group's method": lambda of, g: of.group.WORLD.allreduce([g]).wait(),
    "reduce_scatter of a list": lambda of, g: of.reduce_scatter(torch.empty(g.shape), [g, g]),
    "all_to_all of a list": lambda of, g: of.all_to_all([torch.empty(g.shape)] * 2, [g, g]),
    "functional": lambda _, g: functional_collectives.all_reduce(g, "sum", dist.group.WORLD),
    "with gradients": lambda _, g: dist.nn.functional.all_reduce(g),
}


@pytest.mark.parametrize("layout", ["even", "whole"])
@each_rank(2, transport="auto")
def test_collectives_of_gradients_are_refused(layout: str) -> None:
    """Each rank refuses by itself, before anything is sent; ours by an agreement, where they have one."""
    model = with_gradients(layout=layout)
    grad = next(param.grad for param in model.parameters() if param.grad is not None and param.numel())
    ours = {f"ours: {name}": (comm, call) for name, call in COLLECTIVES.items()}
    theirs = {name: (dist, call) for name, call in {**COLLECTIVES, **TORCH_S}.items()}
    for name, (of, call) in {**ours, **theirs}.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch renames some
            text = raised_soon(ValueError, lambda of=of, call=call: call(of, grad))
        assert "of a gradient would " in text, name
        assert "ranks already, so leave it out" in text or SEES in text, name


@each_rank(2, transport="auto")
def test_owners_of_whole_models_are_refused_by_class() -> None:
    model = with_gradients()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    text = raised_soon(ValueError, optimizer.step)
    assert text.startswith("ZeroRedundancyOptimizer owns, averages or broadcasts whole parameters itself")


class Descent(torch.optim.SGD):
    """A user's optimizer, whose code is no user's code that sees a step from outside."""


@pytest.mark.parametrize("layout", ["even", "whole"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, Descent])
@each_rank(2, transport="auto")
def test_users_code_in_a_step_sees_pieces(kind: type[torch.optim.Optimizer], layout: str) -> None:
    """Hooks of a step and closures, however they are registered; so norms by hand are never one rank's."""
    model = with_gradients(layout=layout)
    params = [*model.parameters()]
    right = shardtrain.clip_grad_norm_(model, torch.inf)
    optimizer = kind(params, lr=0.1)
    saw = list[str]()

    def look(name: str) -> None:
        norms = [param.grad.norm() for param in params if param.grad is not None]
        torch.testing.assert_close(torch.stack(norms).norm().item(), right.item())
        raised_soon(ValueError, lambda: norms[0].item())
        saw.append(name)

    def closure() -> Tensor:
        look("closure")
        return torch.zeros(())

    optimizer.register_step_post_hook(lambda *_: look("after"))
    handle = register_optimizer_step_pre_hook(lambda *_: look("before all"))
    later = register_optimizer_step_post_hook(lambda *_: look("after all"))
    try:
        optimizer.step()
        optimizer.register_step_pre_hook(lambda *_: look("before"))
        optimizer.step(closure)
        optimizer.step(closure=closure)
    finally:
        handle.remove()
        later.remove()
    look("outside")
    both = ["before all", "before"]
    if kind is Descent:  # torch calls the hooks of the class, and of the class that it calls
        assert saw.count("closure") == 2
        return
    assert saw == [
        *("before all", "after", "after all"),
        *(*both, "closure", "after", "after all") * 2,
        "outside",
    ]


def saved_and_loaded(model: nn.Module) -> None:
    folder = tempfile.mkdtemp() if dist.get_rank() == 0 else ""
    [folder, _] = comm.gather_texts(folder, comm.plain_transport())
    checkpoint.save(f"{folder}/new", model)
    checkpoint.load(f"{folder}/new", model)


def changed_whole(model: nn.Module) -> None:
    with shardtrain.unsharded(model), torch.no_grad():
        model[0].weight.div_(model[0].weight.norm())


def failed_forward(model: nn.Module) -> None:
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 6))


def averaged(model: nn.Module) -> None:
    ema = shardtrain.optim.Ema(model, 0.5)
    assert {type(average) for average in ema.averages.values()} == {Tensor}
    ema.update(1)


# By name: how a user's hook of a step uses the model.
HOOKS_USES: dict[str, Callable[[nn.Module], object]] = {
    "state dict": lambda model: model.state_dict(),
    "state dict of a part": lambda model: model[0].state_dict(),
    "whole": changed_whole,
    "full state dict": lambda model: shardtrain.load_full_state_dict(
        model, shardtrain.full_state_dict(model)
    ),
    "evaluation": torch.no_grad()(lambda model: model(torch.ones(1, 5))),
    "forward": lambda model: model(torch.ones(1, 5)),
    "backward": lambda model: model(torch.ones(1, 5)).sum().backward(),
    "failed forward": failed_forward,
    "unit": torch.no_grad()(lambda model: model[0](torch.ones(1, 5))),
    "initialization": lambda model: model.apply(lambda module: None),
    "average": averaged,
    "checkpoint": saved_and_loaded,
}


@pytest.mark.parametrize("use", HOOKS_USES)
@each_rank(2, transport="auto")
def test_parameters_are_pieces_until_a_user_s_hook_of_a_step_ends(use: str) -> None:
    """Also after it has used the model, which does there what it does after the step."""
    torch.manual_seed(0)
    model = with_gradients(units=[nn.Linear])
    torch.manual_seed(0)
    other = with_gradients(units=[nn.Linear])
    weight = model[0].weight
    results = list[object]()

    def hook(*_: Any) -> None:
        results.append(HOOKS_USES[use](model))
        assert "0.weight, a parameter at rest" in raised_soon(ValueError, weight.mean)
        with torch.no_grad():
            weight.mul_(0.5)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(hook)
    optimizer.step()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    expected = HOOKS_USES[use](other)
    with torch.no_grad():
        other[0].weight.mul_(0.5)
    if isinstance(expected, dict):
        assert [type(value) for value in expected.values()] == [type(value) for value in results[0].values()]
        assert all(type(getattr(value, "plain", value)) is Tensor for value in results[0].values())
    after = shardtrain.full_state_dict(other)
    for name, value in shardtrain.full_state_dict(model).items():
        torch.testing.assert_close(value, after[name], rtol=0, atol=0)
    for param, twin in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(*[p.grad.as_subclass(Tensor) for p in (param, twin)], rtol=0, atol=0)


@each_rank(2, transport="auto")
def test_gradients_are_plain_while_torch_s_optimizer_steps_and_pieces_after_one_that_failed() -> None:
    model = with_gradients()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    with patch.object(Piece, "__torch_function__", side_effect=AssertionError("a call of Python")):
        optimizer.step()
    weight = model[0].weight

    def fails() -> None:
        weight.grad.norm().item()

    def fails_in_torch() -> None:
        optimizer.param_groups[0]["lr"] = "none"
        with pytest.raises(TypeError):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1

    assert "piece alone" in raised_soon(ValueError, lambda: optimizer.step(fails))
    assert "piece alone" in raised_soon(ValueError, fails)
    fails_in_torch()
    model(torch.ones(2, 5))
    assert "piece alone" in raised_soon(ValueError, fails)
    fails_in_torch()
    optimizer.register_step_pre_hook(lambda *_: fails())
    assert "piece alone" in raised_soon(ValueError, optimizer.step)


@each_rank(2, transport="each")
def test_gradients_of_a_converted_model_are_summed_in_its_dtype() -> None:
    model = with_gradients()
    model.double()
    model.zero_grad()
    x = torch.arange(10.0, dtype=torch.double).view(2, 5) / 7  # the same on both ranks
    model(x).square().sum().backward()
    plain = small().double()
    plain.load_state_dict(shardtrain.full_state_dict(model))
    plain(x).square().sum().backward()
    with shardtrain.unsharded(model, grads=True):
        for param, right in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad.as_subclass(Tensor), right.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("order", [0.0, -1.0, -math.inf, math.nan])
@each_rank(2)
def test_norms_of_orders_that_are_not_positive_are_refused(order: float) -> None:
    model, _ = sharded_and_replica()
    classify(model, 0).backward()
    with pytest.raises(
        ValueError, match=r"^a norm of order .* cannot be added up over ranks: .* positive norm_type"
    ):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=order)
    with pytest.raises(ValueError, match=r"^norm_type must be positive"):
        shardtrain.clip_grad_norm_(model, 1.0, norm_type=order)


@each_rank(2)
def test_the_norm_of_gradients_that_wait_is_refused_at_the_call() -> None:
    """Torch's functions, too: under no_sync they would return this rank's alone, and only measure."""
    grads = [None, None]
    for number, exists in enumerate((False, True)):  # a reduced gradient, to which others are to be added
        model = shard(OddNet())
        if exists:
            classify(model, 0).backward()
        with shardtrain.no_sync(model):
            classify(model, 1).backward()
        for norm in (nn.utils.clip_grad_norm_, nn.utils.get_total_norm):
            params = [param for param in model.parameters() if param.grad is not None]
            what = params if norm is nn.utils.clip_grad_norm_ else [param.grad for param in params]
            with pytest.raises(ValueError, match="that wait under no_sync would see this rank's alone"):
                norm(what, torch.inf)
        classify(model, 2).backward()
        grads[number] = nn.utils.clip_grad_norm_(model.parameters(), torch.inf)
        # Two sums of squares in orders of their own.
        torch.testing.assert_close(grads[number], shardtrain.clip_grad_norm_(model, torch.inf))
        with shardtrain.no_sync(model):
            classify(model, 1).backward()
        model.zero_grad(set_to_none=exists)
        classify(model, 2).backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), torch.inf).isfinite()


@pytest.mark.parametrize("layout", ["even", "whole"])
@each_rank(2)
def test_a_piece_s_norm_is_not_printed_as_a_number(layout: str) -> None:
    model = shard(OddNet(), layout=layout)
    classify(model, 0).backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    for show in (str.format, lambda form, norm: format(norm, form[2:-1]), lambda _, norm: f"{norm}"):
        for form in ("{:.3f}", "{}"):
            with pytest.raises(ValueError, match=r"format\(\) of a norm of a gradient " + SEES[:30]):
                show(form, grads[0].norm())
    assert f"{grads[0].norm()!r}".startswith("PieceNorm(")
    assert f"{nn.utils.clip_grad_norm_(model.parameters(), torch.inf):.3f}"
    assert f"{grads[0]}".startswith("tensor(")

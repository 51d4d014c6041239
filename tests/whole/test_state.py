"""Whole parameters: looking at them, saving, loading; deferred models; pieces and other packages."""

import copy
import functools
import io
import math
import re
from collections.abc import Callable
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.torch_version import TorchVersion

import shardtrain
from shardtrain import checkpoint, comm
from shardtrain.engine.hooks import engine_of
from shardtrain.pieces.part import Part
from shardtrain.pieces.piece import Piece
from shardtrain.whole.deferred import deferred

from pool import each_rank
from small import (
    Block,
    OddNet,
    Parts,
    assert_at_rest,
    assert_same_parameters,
    classify,
    shard,
    sharded_and_replica,
    train,
    train_alike,
)

loads_pieces = pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 14), reason="DCP of older torch refuses to load into pieces"
)


@pytest.mark.smoke
@pytest.mark.parametrize("writeback", [True, False])
@each_rank(1, 3)
def test_unsharded_keeps_or_drops_edits(writeback: bool) -> None:
    model, replica = sharded_and_replica(lambda: OddNet().to(memory_format=torch.channels_last))
    x = torch.randn(2, 3, 5, 5)
    with shardtrain.unsharded(model, writeback=writeback):
        with comm.meter() as meter, torch.no_grad():
            if dist.get_rank() == dist.get_world_size() - 1:  # a rank may compute alone
                torch.testing.assert_close(model(x), replica.module(x))
        assert not sum(meter.calls.values())
        for (name, ours), theirs in zip(model.named_parameters(), replica.module.parameters(), strict=True):
            assert torch.equal(ours, theirs), name
            assert ours.stride() == theirs.stride(), name
            with torch.no_grad():
                ours.add_(1.0)
                theirs.add_(1.0 if writeback else 0.0)
        model.fc.bias.data = torch.full((5,), 3.0)
        if writeback:
            replica.module.fc.bias.data = torch.full((5,), 3.0)
        with pytest.raises(ValueError, match="cannot be called inside forward, backward or unsharded"):
            shardtrain.full_state_dict(model)
    assert_same_parameters(model, replica, tolerance=0)
    train_alike(model, replica)


@pytest.mark.parametrize("writeback", [True, False])
@each_rank(3)
def test_unsharded_gradients_and_an_edit_of_a_shape(writeback: bool) -> None:
    """Some gradients are replaced by ones with other strides, which each rank lays out as its parameter."""
    model, replica = sharded_and_replica(lambda: OddNet().to(memory_format=torch.channels_last))
    for net in (model, replica):
        train(net, torch.optim.SGD(net.parameters(), 0.0), 1)
    before = [p.grad.clone() for p in model.parameters()]
    with shardtrain.unsharded(model, grads=True, writeback=writeback):
        for ours, theirs in zip(model.parameters(), replica.module.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
            ours.grad.mul_(2.0)
            ours.grad = ours.grad.clone(memory_format=torch.contiguous_format)
    for old, param in zip(before, model.parameters(), strict=True):
        now = param.grad.as_subclass(torch.Tensor)
        expected = (old * 2 if writeback else old).as_subclass(torch.Tensor)
        torch.testing.assert_close(now, expected, rtol=0, atol=0)
    named = "parameter fc.weight or its gradient was given shape (6, 7) while it was whole, expected (5, 7)"
    with pytest.raises(ValueError, match=re.escape(named)), shardtrain.unsharded(model):
        model.fc.weight.data = torch.zeros(6, 7)
    assert_at_rest(model)


@pytest.mark.long
@each_rank(3)
def test_a_state_that_does_not_fit_is_refused_everywhere_and_nothing_is_loaded() -> None:
    torch.manual_seed(7)
    plain = OddNet().state_dict()
    missing = ("fc.weight", "blocks.0.norm.running_mean")
    cases = {
        "fc.weight is missing; blocks.0.norm.running_mean is missing": {
            name: value for name, value in plain.items() if name not in missing
        },
        "extra is unexpected": plain | {"extra": torch.zeros(1)},
        "fc.weight has shape (7, 5), expected (5, 7)": plain | {"fc.weight": plain["fc.weight"].t()},
        "fc.weight is no dense tensor with values": plain | {"fc.weight": plain["fc.weight"].to("meta")},
        "model is no dense tensor with values": {"model": plain},
    }
    model, replica = sharded_and_replica()
    for text, state in cases.items():
        with pytest.raises(ValueError, match=re.escape(f"nothing was loaded: {text}") + "$"):
            shardtrain.load_full_state_dict(model, state if dist.get_rank() == 0 else {})
        assert_same_parameters(model, replica, tolerance=0)


class Further(nn.Linear):
    def get_extra_state(self) -> str:
        return "further"


@pytest.mark.long
@each_rank(2, 3)
def test_what_ranks_hold_alike_stays_as_it_is() -> None:
    """Means of equal values are these, bit for bit. Gloo itself moves neither int16 nor fp8."""
    for dtype, most in ((torch.float, 1), (torch.half, 6e4), (torch.float8_e5m2, 9), (torch.int16, 9)):
        plain = Further(3, 5)
        plain.weight = nn.Parameter(torch.full((5, 3), 3).to(dtype), requires_grad=False)
        plain.table = nn.Buffer((torch.rand(9, 11) * most).to(dtype).t())
        model = shard(copy.deepcopy(plain))
        whole = shardtrain.full_state_dict(model)
        assert whole["_extra_state"] == "further"
        assert torch.equal(whole["table"].double(), plain.table.double())
    with pytest.raises(ValueError, match=r"nothing was loaded: _extra_state is no dense tensor"):
        shardtrain.load_full_state_dict(model, whole)
    with pytest.raises(checkpoint.SaveFailed, match=r"_extra_state has no place in a checkpoint"):
        checkpoint.save("unwritten", model)


class Various(OddNet):
    """Modules with two names, frozen, empty and ignored parameters, a scalar, channels_last, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.fc
        self.first = self.stem
        self.fixed = nn.Parameter(torch.randn(3, 5), requires_grad=False)
        self.nothing = nn.Parameter(torch.zeros(0, 4), requires_grad=False)
        self.left_alone = nn.Linear(3, 2).requires_grad_(False)
        self.to(memory_format=torch.channels_last)


@pytest.mark.smoke
@each_rank(1, 3)
def test_rank_0_s_state_is_loaded_everywhere_into_ignored_parameters_too() -> None:
    def load(state: dict[str, torch.Tensor], **options: bool) -> dict[str, torch.Tensor]:
        shardtrain.load_full_state_dict(model, state if dist.get_rank() == 0 else {}, **options)
        return shardtrain.full_state_dict(model)

    torch.manual_seed(7)
    plain = Various()
    model = Various()
    weight = model.fc.weight
    shape = model.fc.weight.shape
    shard(model, units=[Block], ignored=[model.fc])
    assert weight is model.fc.weight
    assert weight.shape == shape
    plain.blocks[0].norm.running_var.fill_(4.0)
    source = plain.state_dict()
    before = shardtrain.full_state_dict(model)
    lacking = {name: value for name, value in source.items() if not name.startswith(("fc", "again"))}
    with pytest.raises(ValueError, match=r"^nothing was loaded: fc\.weight is missing; fc\.bias is missing$"):
        load(lacking)
    part = {"blocks.0.norm.bias": torch.arange(7.0), "fc.bias": torch.arange(5.0)}
    expected = before | part | {"again.bias": part["fc.bias"]}
    torch.testing.assert_close(load(part | {"other": torch.zeros(1)}, strict=False), expected, rtol=0, atol=0)
    whole = load(source)
    assert list(whole) == list(source)
    torch.testing.assert_close(whole, dict(source), rtol=0, atol=0)


# deferred models


class Usual(nn.Module):
    """What constructors do without looking at values: clones, ties, dtypes, strides, in-place changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(40, 50), std=1.0, a=-1.5, b=1.5))
        self.orthogonal = nn.Linear(31, 17)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(5, 6))
        self.clones = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(6, 2, 10), num_layers=2, enable_nested_tensor=False
        )
        own = torch.Generator().manual_seed(3)
        self.own = nn.Parameter(torch.randn(9, 5, generator=own))
        self.embedding = nn.Embedding(11, 3, padding_idx=2)
        self.tied = nn.Linear(3, 11, bias=False)
        self.tied.weight = self.embedding.weight
        self.wide = nn.Linear(3, 5).double()
        self.register_buffer("table", torch.eye(4)[torch.randperm(4)])
        self.register_buffer("hidden", torch.rand(3), persistent=False)
        self.again = nn.Module()
        self.again.register_buffer("hidden", self.hidden, persistent=False)
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)
        self.last = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        with torch.no_grad():
            self.last.weight.mul_(2).add_(self.wide.weight.mean())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def looks_at_a_value() -> nn.Module:
    model = nn.Linear(5, 3)
    model.rates = torch.linspace(0, 0.1, 3).tolist()
    return model


def keeps_a_plain_tensor() -> nn.Module:
    model = nn.Linear(5, 3)
    model.plain = [torch.arange(5.0) * 2]
    return model


def on_every_rank(make: Callable[[], nn.Module], without_values: bool) -> Any:
    """Ranks have other seeds: rank 0's values count, as without `deferred`."""
    torch.manual_seed(7)
    expected = make()
    after = torch.rand(3)
    torch.manual_seed(7 + dist.get_rank())
    before = torch.get_rng_state()
    model = deferred(make)
    params = dict(model.named_parameters())
    if dist.get_rank() == 0:
        assert torch.equal(torch.rand(3), after)
    else:
        assert all(param.is_meta == without_values for param in params.values())
        assert torch.equal(torch.get_rng_state(), before) == without_values
    model = shard(model, units=None, ignored=[model.wide] if make is Usual else ())
    assert all(params[name] is param for name, param in model.named_parameters())
    assert_same_parameters(model, expected, tolerance=0)
    whole = shardtrain.full_state_dict(model)
    assert list(whole) == list(model.state_dict()) == list(expected.state_dict())
    for name, value in expected.state_dict().items():
        assert (whole[name].dtype, whole[name].stride()) == (value.dtype, value.stride()), name
    for (name, buffer), other in zip(model.named_buffers(), expected.buffers(), strict=True):
        assert torch.equal(buffer, other), name
    return model


@pytest.mark.long
@each_rank(1, 3)
def test_values_are_those_of_the_constructor_on_rank_0() -> None:
    model = on_every_rank(Usual, without_values=True)
    assert model.again.hidden is model.hidden


@pytest.mark.parametrize("make", [looks_at_a_value, keeps_a_plain_tensor])
@each_rank(2, transport="auto")
def test_a_constructor_that_needs_values_runs_everywhere(make: Callable[[], nn.Module]) -> None:
    model = on_every_rank(make, without_values=False)
    assert make is looks_at_a_value or torch.equal(model.plain[0], torch.arange(5.0) * 2)


@each_rank(2, transport="auto")
def test_a_mistake_in_the_constructor_is_raised_on_every_rank() -> None:
    with pytest.raises(TypeError, match="argument"):
        deferred(OddNet, 1, 2, 3)


@each_rank(3, transport="auto")
def test_a_mesh_without_rank_0_is_refused() -> None:
    mesh = DeviceMesh("cpu", [1, 2])
    model = deferred(OddNet)
    if dist.get_rank():
        with pytest.raises(ValueError, match=r"deferred\(\) built the values on rank 0.*not in the mesh"):
            shard(model, mesh=mesh)
    dist.barrier()  # rank 0 stays while the others connect


# state that knows what it is part of: with torch.distributed.checkpoint, FSDP2, plain models


def various(seed: int, **options: Any) -> tuple[nn.Module, nn.Module]:
    """The same model sharded and plain, with values that depend on ``seed``."""
    torch.manual_seed(seed)
    plain = Various()
    plain.blocks[0].norm.running_mean.fill_(seed)
    model = copy.deepcopy(plain)
    return shard(model, ignored=[model.left_alone], **options), plain


def adam(model: nn.Module, lr: float = 0.01, steps: int = 0) -> torch.optim.Optimizer:
    """Two groups, with state of every trainable parameter; train a few steps."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": params[:2], "weight_decay": 0.0}, {"params": params[2:]}]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    train(model, optimizer, steps)
    return optimizer


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    whole = shardtrain.full_state_dict(model)
    expected = dict(plain.state_dict())
    torch.testing.assert_close(whole, expected, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(), (4,), (3, 4), (2, 3, 5), (1, 2, 1, 3), (2, 3, 2, 2)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_every_interval_is_cut_into_few_boxes(shape: tuple[int, ...], channels_last: bool) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    if channels_last and len(shape) == 4:
        whole = whole.contiguous(memory_format=torch.channels_last)
    flat = whole.as_strided((whole.numel(),), (1,))
    for start, stop in combinations_with_replacement(range(whole.numel() + 1), 2):
        part = Part("w", shape, whole.stride(), start, stop)
        held = flat[start:stop].clone()
        found = torch.full(shape, -1)
        boxes = part.boxes(held)
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        for offsets, view in boxes.items():
            where = tuple(slice(at, at + size) for at, size in zip(offsets, view.shape, strict=True))
            found[where] = view
            view.fill_(-2)
        assert held.eq(-2).all()
        assert torch.equal(found, torch.where((whole >= 0) & torch.isin(whole, flat[start:stop]), whole, -1))


@pytest.mark.long
@loads_pieces
@pytest.mark.parametrize("layout", ["even", "whole"])
@each_rank(1, 2, 3, 4)
def test_a_plain_model_reads_it_and_is_read(layout: Any, tmp_path: Path) -> None:
    model, plain = various(1, layout=layout)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "sharded")
    other = {"model": Various().state_dict()}
    dcp.load(other, checkpoint_id=tmp_path / "sharded")
    torch.testing.assert_close(other["model"], plain.state_dict(), rtol=0, atol=0)
    _, plain = various(2, layout=layout)
    dcp.save({"model": plain.state_dict()}, checkpoint_id=tmp_path / "plain")
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "plain")
    assert_same(model, plain)
    model.load_state_dict(state["model"])
    assert_same(model, plain)


def plain_model() -> nn.Module:
    """What FSDP2 shards, too: no scalars."""
    forward = lambda self, x: self.fc(self.conv(x).mean((2, 3)))  # noqa: E731
    return Parts(forward, conv=nn.Conv2d(3, 7, 3), fc=nn.Linear(7, 5))


def fsdp2(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = plain_model()
    fully_shard(model.conv)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def ours(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = shard(plain_model(), units=[nn.Conv2d])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.long
@loads_pieces
@pytest.mark.parametrize("makers", [(fsdp2, ours), (ours, fsdp2), (ours, ours)])
@each_rank(2, 3)
def test_torch_s_state_dict_functions_store_what_fsdp2_stores(makers: Any, tmp_path: Path) -> None:
    """The next step after the load equals the next step of the one that saved."""
    (model, optimizer), (other, its_optimizer) = (make(seed) for seed, make in enumerate(makers))
    train(model, optimizer, 2)
    state = dict(zip(("model", "optim"), dcp_state.get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=tmp_path)
    state = dict(zip(("model", "optim"), dcp_state.get_state_dict(other, its_optimizer), strict=True))
    dcp.load(state, checkpoint_id=tmp_path)
    dcp_state.set_state_dict(
        other, its_optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    expected, found = (train(*each, 3, start=2) for each in ((model, optimizer), (other, its_optimizer)))
    assert found == pytest.approx(expected, rel=1e-5)
    assert all(not isinstance(v, Piece) for s in its_optimizer.state.values() for v in s.values())


@pytest.mark.long
@each_rank(3)
def test_what_stores_tensors_otherwise_is_refused_by_name(tmp_path: Path) -> None:
    model, plain = various(1)
    state = model.state_dict()
    whole = dcp_state.StateDictOptions(full_state_dict=True)
    memory = r"\w*(data_ptr|storage)"
    for says, attempt in (
        ("pickle", lambda: torch.save(state, io.BytesIO())),
        ("pickle", lambda: torch.save(dcp_state.get_model_state_dict(model, options=whole), io.BytesIO())),
        ("numpy", lambda: state["fc.weight"].numpy()),
        ("mean", lambda: state["fc.weight"].mean()),
        ("data_ptr", lambda: dcp.async_save({"model": state}, checkpoint_id=tmp_path / "later")),
        (memory, lambda: safetensors.torch.save(state)),
        (memory, lambda: safetensors.torch.save_model(model, str(tmp_path / "x"))),
    ):
        with pytest.raises(ValueError, match=rf"^{says} of [a-z0-9.]+ .*would see this rank's") as caught:
            attempt()
        out = "save shardtrain.full_state_dict(model), or use torch.distributed.checkpoint.save"
        assert (out in str(caught.value)) is (says == "pickle")
    with pytest.raises(ValueError, match="load_full_state_dict"):
        dcp_state.set_model_state_dict(model, plain.state_dict(), options=whole)
    other, _ = various(1, layout="whole")
    with pytest.raises(ValueError, match=r"load_state_dict\(\) was given "):
        other.load_state_dict(copy.deepcopy(state))


@pytest.mark.long
@each_rank(3)
def test_a_rank_s_own_state_is_copied_stored_and_loaded_again() -> None:
    """An optimizer's by torch.save, for the same number of ranks; a model's by a copy, or while whole."""
    model, _ = various(1)
    optimizer = adam(model, steps=2)
    stored = io.BytesIO()
    torch.save({"mine": optimizer.state_dict()}, stored)
    loaded = torch.load(io.BytesIO(stored.getvalue()), weights_only=True)["mine"]
    kinds = {type(value) for items in loaded["state"].values() for value in items.values()}
    assert kinds == {torch.Tensor, tuple}  # the numbers that say which part it is
    optimizer.load_state_dict(loaded)
    copied = copy.deepcopy(model.state_dict())
    expected = shardtrain.full_state_dict(model)
    for assign in (False, True):
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        model.load_state_dict(copied, assign=assign)
        torch.testing.assert_close(shardtrain.full_state_dict(model), expected, rtol=0, atol=0)
    with shardtrain.unsharded(model):
        torch.save(model.state_dict(), io.BytesIO())


@each_rank(2)
def test_state_dicts_between_forward_and_backward() -> None:
    model, _ = ours(0)
    before = copy.deepcopy(model.state_dict())
    whole = shardtrain.full_state_dict(model)
    loss = model(torch.randn(2, 3, 5, 5)).sum()
    for found, expected in ((model.state_dict(), before), (shardtrain.full_state_dict(model), whole)):
        for name, value in expected.items():
            assert torch.equal(getattr(found[name], "plain", found[name]), getattr(value, "plain", value))
    assert all(isinstance(value, Piece) for value in model.state_dict().values())
    loss.backward()


@each_rank(2)
def test_whole_optimizer_state_is_refused() -> None:
    model, _ = ours(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = shardtrain.optimizer_state_dict(model, optimizer)
    assert state["param_groups"][0]["params"] == ["conv.weight", "conv.bias", "fc.weight", "fc.bias"]
    state["state"]["fc.weight"]["momentum_buffer"] = torch.zeros(5, 7)
    with pytest.raises(ValueError, match=r"state of shape \(5, 7\) for fc.weight, of which a rank has"):
        optimizer.load_state_dict(state)


def of_rank_0(state: Any) -> Any:
    """Return what ``torch.load`` reads of rank 0's file."""
    stored = io.BytesIO()
    torch.save(state, stored)
    pieces = [torch.frombuffer(bytearray(stored.getvalue()), dtype=torch.uint8)]
    size = torch.tensor(len(pieces[0]))
    dist.broadcast(size, 0)
    bytes_of_0 = pieces[0].clone() if dist.get_rank() == 0 else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(bytes_of_0, 0)
    return torch.load(io.BytesIO(bytes_of_0.numpy().tobytes()), weights_only=True)


@pytest.mark.parametrize("layout", ["even", "whole"])
@pytest.mark.parametrize("steps_first", [False, True])
@each_rank(2)
def test_optimizer_state_of_another_rank_is_refused(steps_first: bool, layout: Any) -> None:
    """Also where pieces have one shape; as it is loaded, or before the first step of a new optimizer."""
    torch.manual_seed(0)
    layers = nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False)
    model = shard(nn.Sequential(*layers), layout=layout, units=[nn.Linear])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    state = of_rank_0(optimizer.state_dict())
    before = shardtrain.full_state_dict(model)
    other = torch.optim.AdamW(model.parameters())
    if steps_first:
        other = optimizer
    if dist.get_rank() == 0:
        other.load_state_dict(state)
        other.step()
        keys = [key for items in other.state.values() for key in items]
        assert set(keys) == {"step", "exp_avg", "exp_avg_sq"}
        return

    def load_and_step() -> None:
        other.load_state_dict(state)
        other.step()

    with pytest.raises(
        ValueError,
        match=r"^load_state_dict\(\) was given optimizer state of elements 0:(64|128) of 0.weight \(16, 8\), "
        r"where this rank has (64|128):128 of \(16, 8\): .*save and load one file per rank",
    ):
        load_and_step()
    if steps_first:
        with pytest.raises(
            ValueError, match=r"^load_state_dict\(\) was given optimizer state of elements 0:"
        ):
            other.load_state_dict(state)
    for member in engine_of(model).members:
        assert torch.equal(member.part_of_whole(before[member.name]), member.local_view)


@each_rank(2)
def test_optimizer_state_dict_of_an_optimizer_without_state_between_forward_and_backward() -> None:
    """It makes a step, which would change what backward needs."""
    model, plain = sharded_and_replica()
    optimizer = torch.optim.AdamW(model.parameters())
    loss = classify(model, 0)
    with pytest.raises(
        ValueError, match=r"^optimizer_state_dict\(\) of an optimizer without state makes a step"
    ):
        shardtrain.optimizer_state_dict(model, optimizer)
    with pytest.raises(
        ValueError, match=r"^the gradient of scale was set while it was whole, .* call it before"
    ):
        dcp_state.get_optimizer_state_dict(model, optimizer)
    optimizer.zero_grad()
    loss.backward()
    classify(plain, 0).backward()
    for group in optimizer.param_groups:
        group["lr"] = 0.05  # which torch had set to 0
    optimizer.step()
    torch.optim.AdamW(plain.parameters(), lr=0.05).step()
    assert_same_parameters(model, plain)
    classify(model, 1)
    shardtrain.optimizer_state_dict(model, optimizer)


@pytest.mark.long
@loads_pieces
@each_rank(1, 3)
def test_weights_are_read_from_files_into_shards(tmp_path: Path) -> None:
    torch.manual_seed(5)
    plain = OddNet()
    plain.stem.to(memory_format=torch.channels_last)
    if dist.get_rank() == 0:
        state = {name: value.contiguous() for name, value in plain.state_dict().items()}
        safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    dist.barrier()
    with torch.device("meta"):
        model = OddNet()
    model.stem.to(memory_format=torch.channels_last)
    shard(model)
    model.to_empty(device="cpu")
    dcp.load(model.state_dict(), storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)))
    assert_same_parameters(model, plain)
    wholes = dict(shardtrain.full_weights(model))
    assert sorted(wholes) == sorted(name for name, _ in plain.named_parameters())
    assert all(value.equal(plain.get_parameter(name)) for name, value in wholes.items())
    train(model, torch.optim.SGD(model.parameters(), 0.1))


class Tied(nn.Module):
    """A head that shares the embedding's weight, and a buffer with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("table", torch.arange(3.0))
        self.register_buffer("same_table", self.table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.emb(x))


@each_rank(2)
def test_tied_names_whose_values_differ_are_refused_and_one_alone_is_taken() -> None:
    state = Tied().state_dict()
    weight = state["emb.weight"]
    for order in ("emb", "head"):  # whichever is changed
        model = shard(Tied())
        before = shardtrain.full_state_dict(model)
        with pytest.raises(ValueError, match=r"head\.weight and emb\.weight are one tied tensor here"):
            shardtrain.load_full_state_dict(model, {**state, f"{order}.weight": weight + 1})
        assert torch.equal(shardtrain.full_state_dict(model)["emb.weight"], before["emb.weight"])
    with pytest.raises(ValueError, match="same_table and table are one tied tensor here"):
        shardtrain.load_full_state_dict(model, {**state, "table": torch.ones(3)})
    for name, tensor in (("emb.weight", "head.weight"), ("head.weight", "emb.weight")):
        alone = {key: value for key, value in state.items() if key != name}
        with pytest.raises(ValueError, match=re.escape(f"nothing was loaded: {name} is missing")):
            shardtrain.load_full_state_dict(model, alone)
        alone[tensor] = weight + 2 + len(tensor)
        shardtrain.load_full_state_dict(model, alone, strict=False)
        assert torch.equal(shardtrain.full_state_dict(model)["head.weight"], alone[tensor])
    unknown = torch.full_like(weight, torch.nan)
    shardtrain.load_full_state_dict(model, {**state, "emb.weight": unknown, "head.weight": unknown.clone()})


@each_rank(2)
def test_whole_optimizer_state_by_torch_is_refused() -> None:
    """And a rank's pickled state in the optimizer of an unsharded model is named, as it steps."""
    model = shard(OddNet())
    optimizer = torch.optim.AdamW(model.parameters())
    classify(model, 0).backward()
    optimizer.step()
    for offload in (True, False):
        options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=offload)
        if offload and dist.get_rank():  # where torch returns nothing
            continue
        gather = functools.partial(dcp_state.get_optimizer_state_dict, model, optimizer, options=options)
        with pytest.raises(ValueError, match=r"^\w+ of [a-z0-9.]+ .*would see this rank's piece alone"):
            torch.save(gather(), io.BytesIO())
    assert dcp_state.get_optimizer_state_dict(model, optimizer)["state"]
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    plain = OddNet()
    other = torch.optim.AdamW(plain.parameters())
    other.load_state_dict(torch.load(saved, weights_only=True))
    classify(plain, 0).backward()
    with pytest.raises(
        ValueError, match=r"AdamW was given the state of a sharded model's, which is one rank"
    ):
        other.step()

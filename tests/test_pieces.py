"""State that knows what it is part of: with torch.distributed.checkpoint, FSDP2, plain models; refusals."""

from __future__ import annotations

import copy
import io
import math
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
from torch.distributed.fsdp import fully_shard

import shardtrain
from shardtrain.engine.pieces import LocalPiece, Part

from pool import Ranks, each_rank
from small import OddNet, mesh, shard, train, whole_state
from test_checkpoint import refused, rewrite


class Various(OddNet):
    """Tied, frozen, empty and ignored parameters, a scalar, channels_last, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.fc
        self.fixed = nn.Parameter(torch.randn(3, 5), requires_grad=False)
        self.nothing = nn.Parameter(torch.zeros(0, 4), requires_grad=False)
        self.left_alone = nn.Linear(3, 2).requires_grad_(False)
        self.to(memory_format=torch.channels_last)


def various(seed: int, **options: Any) -> tuple[nn.Module, nn.Module]:
    """The same model sharded and plain, with values that depend on ``seed``."""
    torch.manual_seed(seed)
    plain = Various()
    plain.blocks[0].norm.running_mean.fill_(seed)
    model = copy.deepcopy(plain)
    return shard(model, ignored=[model.left_alone], **options), plain


def adam(model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    """Two groups, with state of every trainable parameter."""
    params = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW([{"params": params[:2], "weight_decay": 0.0}, {"params": params[2:]}], lr=lr)


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    whole = shardtrain.full_state_dict(model)
    for name, value in plain.state_dict().items():
        assert torch.equal(whole[name], value), name


def save(state: dict[str, Any], path: Path) -> None:
    dcp.save(state, checkpoint_id=path)


def load(state: dict[str, Any], path: Path) -> None:
    dcp.load(state, checkpoint_id=path)


@pytest.mark.parametrize("shape", [(), (4,), (3, 4), (2, 3, 5), (1, 2, 1, 3), (2, 3, 2, 2)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_every_interval_is_cut_into_few_boxes(shape: tuple[int, ...], channels_last: bool) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    if channels_last and len(shape) == 4:
        whole = whole.contiguous(memory_format=torch.channels_last)
    flat = whole.as_strided((whole.numel(),), (1,))
    for start, stop in combinations_with_replacement(range(whole.numel() + 1), 2):
        part = Part("w", shape, whole.stride(), start, stop)
        held, found = flat[start:stop].clone(), torch.full(shape, -1)
        boxes = part.boxes(held)
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        for offsets, view in boxes.items():
            where = tuple(slice(at, at + size) for at, size in zip(offsets, view.shape, strict=True))
            found[where] = view
            view.fill_(-2)
        assert held.eq(-2).all()
        assert torch.equal(found, torch.where((whole >= 0) & torch.isin(whole, flat[start:stop]), whole, -1))


@pytest.mark.parametrize("layout", ["even", "whole"])
@each_rank(1, 2, 3, 4)
def test_a_plain_model_reads_it_and_is_read(layout: Any, tmp_path: Path) -> None:
    model, plain = various(1, layout=layout)
    save({"model": model.state_dict()}, tmp_path / "sharded")
    other = {"model": Various().state_dict()}
    load(other, tmp_path / "sharded")
    for name, value in plain.state_dict().items():
        assert torch.equal(other["model"][name], value), name

    _, plain = various(2, layout=layout)
    save({"model": plain.state_dict()}, tmp_path / "plain")
    state = {"model": model.state_dict()}
    load(state, tmp_path / "plain")
    assert_same(model, plain)
    model.load_state_dict(state["model"])
    assert_same(model, plain)


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adam(model)
    train(model, optimizer, 2)
    return optimizer


def resume(path: Path) -> dict[str, torch.Tensor]:
    """Load the model and the optimizer that other ranks saved, as FSDP2's examples do."""
    model, _ = various(3)
    optimizer = adam(model, lr=7.0)
    state = {"model": model.state_dict(), "optim": shardtrain.optimizer_state_dict(model, optimizer)}
    load(state, path)
    optimizer.load_state_dict(state["optim"])
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert all(type(v) is torch.Tensor for s in optimizer.state.values() for v in s.values())
    return whole_state(model, optimizer)


def save_trained(path: Path) -> dict[str, torch.Tensor]:
    model, _ = various(1)
    optimizer = trained(model)
    shardtrain.average_buffers(model)  # else each rank has its own, and DCP stores those of one
    save({"model": model.state_dict(), "optim": shardtrain.optimizer_state_dict(model, optimizer)}, path)
    return whole_state(model, optimizer)


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"), [(3, 2), (1, 3), pytest.param(2, 4, marks=pytest.mark.long)]
)
def test_any_world_size_reads_any_other(
    on_ranks: Ranks, saved_by: int, loaded_by: int, tmp_path: Path
) -> None:
    expected = on_ranks(saved_by, save_trained, tmp_path)[0]
    for found in on_ranks(loaded_by, resume, tmp_path):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=0.0)  # means of buffers round


class Plain(nn.Module):
    """What FSDP2 shards, too: no scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 7, 3), nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.conv(x).mean((2, 3)))


def fsdp2(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Plain()
    fully_shard(model.conv)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def ours(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = shard(Plain(), units=[nn.Conv2d])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.parametrize("makers", [(fsdp2, ours), (ours, fsdp2), (ours, ours)])
@each_rank(2, 3, 4)
def test_torch_s_state_dict_functions_store_what_fsdp2_stores(makers: Any, tmp_path: Path) -> None:
    """The next step after the load equals the next step of the one that saved."""
    (model, optimizer), (other, its_optimizer) = (make(seed) for seed, make in enumerate(makers))
    train(model, optimizer, 2)
    state = dict(zip(("model", "optim"), dcp_state.get_state_dict(model, optimizer), strict=True))
    save(state, tmp_path)
    state = dict(zip(("model", "optim"), dcp_state.get_state_dict(other, its_optimizer), strict=True))
    load(state, tmp_path)
    dcp_state.set_state_dict(
        other, its_optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    expected, found = (train(*each, 3, start=2) for each in ((model, optimizer), (other, its_optimizer)))
    assert found == pytest.approx(expected, rel=1e-5)
    assert all(not isinstance(v, LocalPiece) for s in its_optimizer.state.values() for v in s.values())


@each_rank(2, 3)
def test_what_stores_tensors_otherwise_is_refused_by_name(tmp_path: Path) -> None:
    model, plain = various(1)
    optimizer = trained(model)
    state = model.state_dict()
    out = "save shardtrain.full_state_dict(model), or use torch.distributed.checkpoint.save"
    for attempt in (
        lambda: torch.save(state, io.BytesIO()),
        lambda: torch.save(state["fc.weight"].clone(), io.BytesIO()),
        lambda: safetensors.torch.save(state),
        lambda: safetensors.torch.save_file({"w": state["fixed"].cpu()}, tmp_path / "x.safetensors"),
        lambda: safetensors.torch.save_model(model, str(tmp_path / "x.safetensors")),
        lambda: dcp.async_save({"model": state}, checkpoint_id=tmp_path / "later"),
    ):
        with pytest.raises(ValueError, match=r"a rank's piece of [a-z0-9.]+ must not be ") as caught:
            attempt()
        assert out in str(caught.value)
    whole = dcp_state.StateDictOptions(full_state_dict=True)
    for attempt in (
        lambda: dcp_state.get_model_state_dict(model, options=whole),
        lambda: dcp_state.get_optimizer_state_dict(model, optimizer, options=whole),
    ):
        with pytest.raises(ValueError, match=r"use shardtrain\.full_state_dict"):
            attempt()
    with pytest.raises(ValueError, match="load_full_state_dict"):
        dcp_state.set_model_state_dict(model, plain.state_dict(), options=whole)
    with shardtrain.unsharded(model):
        assert torch.equal(dcp_state.get_model_state_dict(model, options=whole)["fixed"], plain.fixed)
        torch.save(model.state_dict(), io.BytesIO())
    stored = io.BytesIO()
    torch.save(optimizer.state_dict(), stored)
    optimizer.load_state_dict(torch.load(io.BytesIO(stored.getvalue()), weights_only=True))


@each_rank(2, 3)
def test_a_rank_s_own_pieces_are_copied_and_loaded_again() -> None:
    model, plain = various(1)
    state = model.state_dict()
    kept, cloned = copy.deepcopy(state), {name: 0.5 * value for name, value in state.items()}
    assert isinstance(kept["fc.weight"], LocalPiece)
    assert isinstance(cloned["again.weight"], LocalPiece)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert not state["fc.weight"].any()  # it shares memory
    model.load_state_dict(kept)
    assert_same(model, plain)
    model.load_state_dict(kept, assign=True)
    assert type(model.fc.weight) is nn.Parameter
    assert_same(model, plain)
    model.fc.load_state_dict({name: value.clone() for name, value in model.fc.state_dict().items()})
    assert isinstance(model.fc.state_dict(prefix="fc.")["fc.weight"], LocalPiece)
    assert isinstance(copy.deepcopy(model).state_dict()["fc.weight"], LocalPiece)
    assert isinstance(model.state_dict(keep_vars=True)["fc.weight"], nn.Parameter)
    other, _ = various(1, layout="whole")
    with pytest.raises(ValueError, match=r"load_state_dict\(\) was given "):
        other.load_state_dict(kept)


@each_rank(4)
def test_replicas_store_each_part_once(tmp_path: Path) -> None:
    model, plain = various(1, mesh=mesh(2, 2))
    save(model.state_dict(), tmp_path)
    model, _ = various(2, mesh=mesh(2, 2))
    load(model.state_dict(), tmp_path)
    assert_same(model, plain)


@each_rank(2)
def test_state_dicts_between_forward_and_backward() -> None:
    model, _ = ours(0)
    before, whole = copy.deepcopy(model.state_dict()), shardtrain.full_state_dict(model)
    loss = model(torch.randn(2, 3, 5, 5)).sum()
    for found, expected in ((model.state_dict(), before), (shardtrain.full_state_dict(model), whole)):
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert all(isinstance(value, LocalPiece) for value in model.state_dict().values())
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


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "TypeError: 'int' object is not iterable": lambda o: o["groups"][0]["options"].update(betas=5),
    "not enough values to unpack": lambda o: o["groups"][1]["options"].update(betas=[0.9]),
    "group 1 has options or state that cannot be": lambda o: o["groups"][1]["options"].update(lr="fast"),
    "KeyError: 'exp_avg'": lambda o: o["state"]["fc.weight"].pop("exp_avg"),
    "group 0 has options or state": lambda o: o["state"]["scale"].update(step={"value": "many"}),
}


@pytest.mark.parametrize("text", list(FORGERIES))
@each_rank(2, transport="auto")
def test_a_checkpoint_that_asks_for_the_impossible_changes_nothing(text: str, tmp_path: Path) -> None:
    model, _ = various(1)
    shardtrain.checkpoint.save(tmp_path / "one", model, trained(model))
    if dist.get_rank() == 0:
        rewrite(tmp_path / "one", lambda manifest: FORGERIES[text](manifest["optimizer"]))
    dist.barrier()
    other, _ = various(2)
    assert text in refused(tmp_path / "one", other, adam(other))

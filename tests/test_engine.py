"""What the engine promises around a step: memory, traffic, hooks, recovery, and odd models."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import re
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardtrain
from shardtrain import comm
from shardtrain.engine.hooks import engine_of
from shardtrain.engine.shard import ALIGN_BYTES

from pool import each_rank
from small import (
    Block,
    OddNet,
    assert_at_rest,
    assert_same_parameters,
    images,
    sgd,
    shard,
    sharded_and_replica,
    train,
)

Ranks = Callable[..., list[Any]]


# memory and traffic


@each_rank(1, 2, 3, 4)
def test_between_steps_a_rank_holds_its_share_and_nothing_is_gathered() -> None:
    model, _ = sharded_and_replica()
    world = dist.get_world_size()
    before = list(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    for unit, info in zip(engine_of(model).units, shardtrain.introspect(model).units, strict=True):
        assert info.local_bytes < info.bytes / world + ALIGN_BYTES
        params = [param for segment in unit.segments for param in segment.params]
        states = [optimizer.state[param] for param in params]
        for held in (
            [param.grad for param in params],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
        ):
            assert sum(t.nbytes for t in held if t is not None) <= info.local_bytes
    assert_at_rest(model)


@each_rank(2, 3)
@pytest.mark.parametrize("reshard", [True, False])
def test_calls_and_bytes_of_a_step(reshard: bool) -> None:
    """One gather per unit forward and one backward (none for the root), one reduction per unit."""
    model, _ = sharded_and_replica(reshard_after_forward=reshard)
    optimizer = sgd(model)
    train(model, optimizer, 2)
    with comm.meter() as meter:
        train(model, optimizer, 1, start=2)
    infos = shardtrain.introspect(model).units
    world = dist.get_world_size()
    everything = sum(info.local_bytes for info in infos)
    gathered = everything + reshard * sum(info.local_bytes for info in infos[1:])
    assert meter.calls == {"all_gather": 5 if reshard else 3, "reduce_scatter": 3}
    assert meter.bytes == {
        "all_gather": gathered * (world - 1),
        "reduce_scatter": everything * (world - 1),
    }


def waits_for_a_slow_rank() -> tuple[float, set[str]]:
    model, _ = sharded_and_replica()
    train(model, sgd(model), 2)
    dist.barrier()
    with comm.meter() as outer, comm.meter() as meter:
        x, y = images(2)
        loss = F.cross_entropy(model(x), y)
        time.sleep(0.2 * dist.get_rank())
        loss.backward()
    exposed = meter.exposed()
    assert outer.exposed() == pytest.approx(exposed, abs=0.01)
    assert {what.unit for what in exposed} <= {u.title for u in engine_of(model).units} | {"the model"}
    return sum(exposed.values()), {what.kind for what in exposed}


def test_the_meter_says_how_long_a_rank_waited_and_for_what(ranks: Ranks) -> None:
    quick, slow = ranks(2, waits_for_a_slow_rank)
    assert quick[0] > 0.15
    assert slow[0] < quick[0]
    assert quick[1] <= {"all_gather", "reduce_scatter", "fence"}


@each_rank(1)
def test_world_size_1_makes_no_collective_and_no_copy() -> None:
    model, _ = sharded_and_replica()
    gradients: dict[str, int] = {}
    for name, param in model.named_parameters():
        param.register_hook(lambda g, name=name: gradients.__setitem__(name, g.untyped_storage().data_ptr()))
    with comm.meter() as meter:
        x, y = images(0)
        F.cross_entropy(model(x), y).backward()
    assert not meter.calls
    engine = engine_of(model)
    assert all(s.full is s.local for unit in engine.units for s in unit.segments)
    for name, param in model.named_parameters():
        assert param.grad is not None
        assert param.grad.untyped_storage().data_ptr() == gradients[name]


def test_no_process_group_is_world_size_1() -> None:
    torch.manual_seed(0)
    plain = OddNet()
    model = shardtrain.shard(copy.deepcopy(plain), units=[Block])
    x, y = images(0, rank=0)
    for net in (plain, model):
        optimizer = sgd(net)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
    assert_same_parameters(model, plain, tolerance=0)


@each_rank(1, 2)
def test_a_sharded_model_is_freed() -> None:
    model, _ = sharded_and_replica()
    train(model, sgd(model), 1)
    local = weakref.ref(engine_of(model).units[1].segments[0].local.untyped_storage())
    gone = [weakref.ref(model), weakref.ref(model.fc.weight), weakref.ref(engine_of(model))]
    del model, _
    gc.collect()
    assert [w() for w in (*gone, local)] == [None] * 4


@each_rank(2)
def test_slow_movements_change_nothing() -> None:
    model, replica = sharded_and_replica()
    transport = engine_of(model).transport
    for name in ("gather", "reduce"):
        original = getattr(transport, name)

        def late(tag: int, flats: Any, original: Any = original) -> comm.Pending:
            pending = original(tag, flats)
            return comm.Pending(lambda: (time.sleep(0.02), pending.wait())[1])

        setattr(transport, name, late)
    train(model, sgd(model), 2)
    train(replica, sgd(replica), 2)
    assert_same_parameters(model, replica)


# accumulation and clipping


@pytest.mark.parametrize(
    ("quiet", "set_to_none"),
    [
        ([True, True, False], None),
        ([False, False, False], None),
        ([True, False, True, True, False], None),
        ([True, True, False], True),
        ([True, True, False], False),
    ],
)
@each_rank(1, 3)
def test_accumulation_equals_ddp_s(quiet: list[bool], set_to_none: bool | None) -> None:
    """Micro-batches, ``quiet`` ones under no_sync; ``set_to_none`` clears what the first left to wait."""
    model, replica = sharded_and_replica()
    for net, no_sync in ((model, lambda: shardtrain.no_sync(model)), (replica, replica.no_sync)):
        optimizer = sgd(net)
        for step in range(2):
            for micro, silent in enumerate(quiet):
                x, y = images(10 * step + micro)
                with comm.meter() as meter, no_sync() if silent else contextlib.nullcontext():
                    F.cross_entropy(net(x), y).backward()
                if net is model and silent:
                    assert meter.calls["reduce_scatter"] == 0
                if micro == 0 and set_to_none is not None:
                    optimizer.zero_grad(set_to_none=set_to_none)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none is not False)
    assert_same_parameters(model, replica)


@each_rank(1, 3)
def test_clipping_equals_ddp_s() -> None:
    model, replica = sharded_and_replica()
    for norm_type in (1.0, 2.0, 3.0, float("inf")):
        for net in (model, replica):
            net.zero_grad()
            x, y = images(0)
            F.cross_entropy(net(x), y).backward()
        with comm.meter() as meter:
            ours = shardtrain.clip_grad_norm_(model, 0.1, norm_type)
        theirs = nn.utils.clip_grad_norm_(replica.parameters(), 0.1, norm_type)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
        assert meter.calls["all_reduce"] == (dist.get_world_size() > 1)
        assert meter.bytes["all_reduce"] <= 12
        with shardtrain.unsharded(model, grads=True, writeback=False):
            for (name, ours_p), theirs_p in zip(model.named_parameters(), replica.parameters(), strict=True):
                torch.testing.assert_close(ours_p.grad, theirs_p.grad, rtol=1e-4, atol=1e-7, msg=name)


@each_rank(2, 3)
def test_an_infinite_gradient_on_one_rank_is_seen_by_all() -> None:
    model, _ = sharded_and_replica()
    assert shardtrain.clip_grad_norm_(model, 1.0).item() == 0
    x, y = images(0)
    F.cross_entropy(model(x), y).backward()
    if dist.get_rank() == dist.get_world_size() - 1:
        next(p for p in model.parameters() if p.numel()).grad.fill_(float("inf"))
    assert shardtrain.clip_grad_norm_(model, float("inf")).isinf()
    with pytest.raises(RuntimeError, match=r"^the gradient's norm of order 2.0 is inf: nothing was clipped$"):
        shardtrain.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match=r"^norm_type must be positive, got 0.0$"):
        shardtrain.clip_grad_norm_(model, 1.0, norm_type=0.0)


# odd models and odd uses


class Shared(nn.Module):
    """One block called twice; a layer that never runs; a weight tied across units; an unused output."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.never = Block(5), Block(5)
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 3)
        self.tied = nn.Linear(3, 5)
        self.tied.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        x = self.first(x.movedim(1, -1)) + self.tied(x.movedim(1, -1))
        x = self.twice(self.twice(x.movedim(-1, 1)))
        out = self.last(x.mean((2, 3)))
        return {"out": Output(out), "unused": [out * 2]}


@dataclasses.dataclass
class Output:
    logits: torch.Tensor


class FirstOutput(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)["out"].logits


@each_rank(1, 2, 3, 4)
def test_modules_called_twice_or_never_tied_weights_and_nested_outputs() -> None:
    torch.manual_seed(0)
    plain = Shared()
    replica = nn.parallel.DistributedDataParallel(
        FirstOutput(copy.deepcopy(plain)), find_unused_parameters=True
    )
    model = shard(plain, units=[Block, nn.Linear])

    def three_class_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = images(step)
        return x, y % 3

    ours = train(FirstOutput(model), torch.optim.SGD(model.parameters(), 0.05), 3, three_class_batch)
    assert ours == pytest.approx(
        train(replica, torch.optim.SGD(replica.parameters(), 0.05), 3, three_class_batch), rel=1e-5
    )
    assert_same_parameters(model, replica.module.net)
    assert all(p.grad is None for p in model.never.parameters())


@pytest.mark.parametrize("order", ["one backward", "retain_graph", "two backwards"])
@each_rank(2, 3)
def test_other_orders_of_forward_and_backward(order: str) -> None:
    model, replica = sharded_and_replica()
    plain = replica.module  # DDP itself reduces only the first of several backwards
    for net in (model, plain):
        (x, y), (z, w) = images(0), images(1)
        if order == "one backward":
            (F.cross_entropy(net(x), y) + F.cross_entropy(net(z), w)).backward()
        elif order == "retain_graph":
            loss = F.cross_entropy(net(x), y)
            loss.backward(retain_graph=True)
            loss.backward()
        else:
            first, second = F.cross_entropy(net(x), y), F.cross_entropy(net(z), w)
            first.backward()
            second.backward()
    for param in plain.parameters():
        dist.all_reduce(param.grad)
        param.grad.div_(dist.get_world_size())
    sgd(model).step()
    sgd(plain).step()
    assert_same_parameters(model, plain)


class Checkpointed(OddNet):
    """Recomputes each block by itself, or (``together``) both at once and a layer of the root's unit."""

    def __init__(self, together: bool, reentrant: bool) -> None:
        super().__init__()
        self.together, self.reentrant = together, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for part in [self.blocks] if self.together else self.blocks:
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        x = x.mean((2, 3)) * self.scale
        return checkpoint(self.fc, x, use_reentrant=self.reentrant) if self.together else self.fc(x)


@each_rank(2, 3)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_activation_checkpointing_costs_no_extra_gather(together: bool, reentrant: bool) -> None:
    model, replica = sharded_and_replica(lambda: Checkpointed(together, reentrant))
    optimizer = sgd(model)
    losses = train(model, optimizer)
    assert losses == pytest.approx(train(replica, sgd(replica)), rel=1e-5)
    assert_same_parameters(model, replica)
    with comm.meter() as meter:
        train(model, optimizer, 1)
    assert meter.calls == {"all_gather": 5, "reduce_scatter": 3}


@each_rank(1, 3)
def test_frozen_parameters_are_neither_reduced_nor_given_gradients() -> None:
    torch.manual_seed(0)
    plain = OddNet()
    plain.blocks.requires_grad_(False)
    plain.blocks[0].norm.requires_grad_(True)
    model, replica = shard(copy.deepcopy(plain), units=[Block]), nn.parallel.DistributedDataParallel(plain)
    with comm.meter() as meter:
        train(model, sgd(model), 1)
    train(replica, sgd(replica), 1)
    world = dist.get_world_size()
    trainable = sum(p.nbytes for p in plain.parameters() if p.requires_grad)
    assert meter.calls["reduce_scatter"] == 2 * (world > 1)
    assert meter.bytes["reduce_scatter"] <= (world - 1) * (trainable / world + 3 * ALIGN_BYTES)
    assert all(p.grad is None for p in (model.blocks[0].conv.weight, *model.blocks[1].parameters()))
    assert_same_parameters(model, replica)


@each_rank(2, 3)
def test_initial_weights_and_buffers_are_rank_0_s() -> None:
    torch.manual_seed(dist.get_rank())
    model = OddNet()
    model.blocks[0].norm.running_mean.fill_(dist.get_rank())
    torch.manual_seed(0)
    expected = OddNet()
    shard(model)
    assert_same_parameters(model, expected, tolerance=0)
    assert model.blocks[0].norm.running_mean.eq(0).all()


@each_rank(1, 2, 3, 4)
def test_edits_and_conversions_after_sharding_take_effect() -> None:
    model, replica = sharded_and_replica()
    model.to(torch.float64)
    replica = nn.parallel.DistributedDataParallel(replica.module.to(torch.float64))
    with torch.no_grad():
        for net in (model, replica.module):
            for p in net.parameters():
                p.mul_(0.5)

    def wide(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = images(step)
        return x.double(), y

    assert train(model, sgd(model), 3, wide) == pytest.approx(train(replica, sgd(replica), 3, wide), rel=1e-9)
    assert_same_parameters(model, replica, tolerance=1e-9)


@each_rank(2, 3)
def test_a_model_on_the_meta_device_materialises_its_pieces() -> None:
    torch.manual_seed(0)
    expected = OddNet()
    with torch.device("meta"):
        model = OddNet()
    shard(model, units=[Block])
    with pytest.raises(ValueError, match=r"still on the meta device: scale, stem\.weight.*to_empty"):
        model(images(0)[0])
    model.to_empty(device="cpu")
    assert sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in expected.parameters())
    shardtrain.load_full_state_dict(model, expected.state_dict())
    assert_same_parameters(model, expected, tolerance=0)
    replica = nn.parallel.DistributedDataParallel(expected)
    assert train(model, sgd(model)) == pytest.approx(train(replica, sgd(replica)), rel=1e-5)


@each_rank(2, 3)
def test_a_child_called_by_itself_finds_its_parameters() -> None:
    model, replica = sharded_and_replica()
    for net, inner in ((model, model), (replica, replica.module)):
        optimizer = sgd(net)
        for step in range(2):
            x, y = images(step)
            (F.cross_entropy(net(x), y) + inner.blocks[0](torch.ones(2, 7, 3, 3)).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(model.fc(torch.ones(1, 7)), replica.module.fc(torch.ones(1, 7)))
    assert_same_parameters(model, replica)


@each_rank(1, 3)
def test_a_clean_step_after_ctrl_c_and_after_a_refused_backward() -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    model, replica = sharded_and_replica()
    x, _ = images(9)
    handle = model.blocks[1].norm.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    handle.remove()
    out = model(x.requires_grad_()).sum()
    with pytest.raises(ValueError, match=r"^double backward \(create_graph=True\) is not supported"):
        torch.autograd.grad(out, x, create_graph=True)
    # Both forwards have moved the running statistics, which training does not read.
    assert train(model, sgd(model)) == pytest.approx(train(replica, sgd(replica)), rel=1e-5)
    assert_same_parameters(model, replica)


@each_rank(1, 2, 3, 4)
def test_running_statistics_are_averaged() -> None:
    model, _ = sharded_and_replica()
    norm = model.blocks[0].norm
    norm.running_mean.fill_(float(dist.get_rank()))
    norm.num_batches_tracked.fill_(10 + dist.get_rank())
    mean = (dist.get_world_size() - 1) / 2
    saved = shardtrain.full_state_dict(model)
    assert saved["blocks.0.norm.running_mean"].eq(mean).all()
    assert norm.running_mean.eq(dist.get_rank()).all()
    shardtrain.average_buffers(model)
    assert norm.running_mean.eq(mean).all()
    assert norm.num_batches_tracked == 10


# refusals


@each_rank(2, 3)
def test_every_refusal_says_what_is_wrong_on_every_rank() -> None:
    already = shard(OddNet())
    cases: dict[str, Callable[[], object]] = {
        "OddNet is sharded already": lambda: shard(already),
        "0 is sharded already": lambda: shard(nn.Sequential(already)),
        "the root is a ModuleList, which has no forward": lambda: shard(nn.ModuleList([OddNet()])),
        "units names ModuleList, but the model has no": lambda: shard(OddNet(), units=[nn.ModuleList]),
        "units names LSTM, but the model has no such module": lambda: shard(OddNet(), units=[nn.LSTM, Block]),
        "units must be module classes or a callable": lambda: shard(OddNet(), units=["Block"]),
        "units must be module classes or a callable, got ('Block',)": lambda: shard(OddNet(), units="Block"),
        "transport must be 'auto', 'process_group' or 'shared_memory', got 'pigeon'": lambda: shard(
            OddNet(), transport="pigeon"
        ),
        "precision must be a shardtrain.Precision, such as Precision(param=torch.bfloat16), got ": (
            lambda: shard(OddNet(), precision=torch.bfloat16)
        ),
        "load_state_dict() was given the whole ": lambda: already.load_state_dict(OddNet().state_dict()),
        "OddNet is not sharded: pass the module that shardtrain.shard() returned": lambda: (
            shardtrain.introspect(OddNet())
        ),
        "parameter stem.weight now has shape (3,) on this rank, but its local piece has": lambda: (
            setattr(already.stem.weight, "data", torch.zeros(3)) or already(images(0)[0])
        ),
    }
    for start, case in cases.items():
        with pytest.raises(ValueError, match="^" + re.escape(start)):
            case()


def test_a_world_without_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="WORLD_SIZE is 2 but there is no process group"):
        shardtrain.shard(OddNet())


@each_rank(2)
def test_sparse_gradients_are_refused_by_name() -> None:
    model = shard(nn.Sequential(nn.Embedding(10, 3, sparse=True)))
    with pytest.raises(ValueError, match=r"parameter 0\.weight has a sparse gradient"):
        model(torch.tensor([1, 2])).sum().backward()
    dist.barrier()  # each rank is refused by itself, and the other may still be on its way there

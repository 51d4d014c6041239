"""Whole-parameter cuts: each parameter on one rank, and optimizers that need whole parameters on top."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchvision
from torch import nn
from torchvision.models.vision_transformer import EncoderBlock

from shardtrain import comm
from shardtrain.recipes.muon import Muon, hidden_matrices

from pool import each_rank
from small import (
    Block,
    OddNet,
    Vit,
    assert_same_parameters,
    mean_in_a_tree,
    shard,
    sharded_and_replica,
    train,
)


class Clipping(torch.optim.SGD):
    """SGD that clips by the norm of all parameters that it is given, which a rank has only some of."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Clipping])
@each_rank(3)
def test_optimizers_that_look_at_all_parameters_are_refused(kind: Any) -> None:
    two_matrices = nn.Sequential(nn.Linear(7, 7, bias=False), nn.Linear(7, 5, bias=False))
    model = shard(two_matrices, layout="whole", units=[nn.Linear])
    optimizer = kind(model.parameters(), lr=0.1)
    loss = model(torch.ones(2, 7)).square().sum()
    loss.backward()
    if kind is Clipping and all(param.grad is None for param in model.parameters()):
        return  # it has asked for nothing: the others end
    with pytest.raises(
        ValueError, match=f"^{kind.__name__} .*looks at all parameters together cannot be used"
    ):
        optimizer.step(lambda: loss)


def torch_s_muon_and_adamw(model: nn.Module) -> Any:
    matrices = hidden_matrices(model)
    rest = [param for param in model.parameters() if param not in set(matrices)]
    options = {"lr": 0.02, "weight_decay": 0.1}
    muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **options)
    adamw = torch.optim.AdamW(rest, betas=(0.9, 0.95), fused=True, **options)
    muon.register_step_post_hook(lambda *_: adamw.step())
    return SimpleNamespace(zero_grad=model.zero_grad, step=muon.step)


def moves_nothing(optimizer: Muon) -> bool:
    with comm.meter() as meter:
        optimizer.step()
    return not meter.calls


@each_rank(1, 3)
def test_a_vit_on_shards_equals_torch_s_muon_on_the_whole_model() -> None:
    sharded, replica = sharded_and_replica(Vit, units=[EncoderBlock], layout="whole")
    replica.register_comm_hook(None, mean_in_a_tree)
    expected = train(replica, torch_s_muon_and_adamw(replica.module), 5)
    ours = Muon(Muon.groups(sharded), lr=0.02, weight_decay=0.1)
    assert train(sharded, ours, 5) == pytest.approx(expected, rel=1e-6)
    assert_same_parameters(sharded, replica, tolerance=1e-6)
    assert moves_nothing(ours)


def muon(model: nn.Module) -> Muon:
    return Muon(Muon.groups(model), lr=0.02)


@pytest.mark.parametrize(("channels_last", "built_before"), [(True, False), (False, True)])
@each_rank(3)
def test_convolutions_on_shards_equal_unsharded_ones(channels_last: bool, built_before: bool) -> None:
    plain = OddNet().to(memory_format=torch.channels_last) if channels_last else OddNet()
    replica = nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    replica.register_comm_hook(None, mean_in_a_tree)
    before = muon(plain)
    model = shard(plain, units=[Block], layout="whole")
    optimizer = before if built_before else muon(model)
    theirs = muon(replica.module)
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 11]
    assert train(model, optimizer) == pytest.approx(train(replica, theirs), rel=1e-6)
    assert_same_parameters(model, replica, tolerance=1e-6)
    assert moves_nothing(optimizer)
    held = sum(v.numel() for state in optimizer.state.values() for v in state.values() if v.ndim)
    assert held <= 2 * sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0, .*expected at least 0"),
        ({"momentum": 1.0}, r"momentum=1.0, .*expected numbers in \[0, 1\)"),
    ],
)
def test_bad_options_of_muon_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon(nn.Linear(3, 3, bias=False).parameters(), **options)
    with pytest.raises(ValueError, match=r"shape \(3,\): put it into a group with use_muon=False"):
        Muon(nn.Linear(3, 3).parameters())


def test_a_closure_is_called() -> None:
    layer = nn.Linear(3, 3, bias=False)
    assert Muon(layer.parameters()).step(lambda: layer(torch.ones(3)).sum()).requires_grad


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("resnet18", {"conv1.weight", "fc.weight"}),
        ("vit_b_16", {"class_token", "conv_proj.weight", "encoder.pos_embedding", "heads.head.weight"}),
    ],
)
def test_stem_head_and_embeddings_are_adamw_s(name: str, left: set[str]) -> None:
    with torch.device("meta"):
        model = getattr(torchvision.models, name)()
    matrices = set(hidden_matrices(model))
    assert {key for key, p in model.named_parameters() if p.ndim > 1 and p not in matrices} == left

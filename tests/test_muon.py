"""Muon: torch's on the whole model, on shards; filters as matrices; one optimizer with AdamW's part."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from shardtrain import comm
from shardtrain.optim import Muon, muon_groups
from shardtrain.optim.muon import hidden_matrices

from pool import each_rank
from small import Block, OddNet, assert_same_parameters, images, shard, sharded_and_replica, train
from test_parity import mean_in_rank_order


class TinyViT(torchvision.models.VisionTransformer):
    def __init__(self) -> None:
        super().__init__(
            image_size=8, patch_size=4, num_layers=2, num_heads=2, hidden_dim=12, mlp_dim=22, num_classes=5
        )
        nn.init.normal_(self.heads.head.weight)  # torchvision starts it at 0: nothing would flow back


def vit_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return images(step, n=4, size=8)


class Together(torch.optim.Optimizer):
    """torch's own Muon and AdamW, stepped one after the other."""

    def __init__(self, model: nn.Module) -> None:
        matrices = hidden_matrices(model)
        rest = [param for param in model.parameters() if param not in set(matrices)]
        options = {"lr": 0.02, "weight_decay": 0.1}
        self.muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **options)
        self.adamw = torch.optim.AdamW(rest, betas=(0.9, 0.95), fused=True, **options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.muon.zero_grad()
        self.adamw.zero_grad()

    def step(self, closure: Any = None) -> None:
        self.muon.step()
        self.adamw.step()


def moves_nothing(optimizer: Muon) -> bool:
    with comm.meter() as meter:
        optimizer.step()
    return not meter.calls


@each_rank(1, 3)
def test_a_vit_on_shards_equals_torch_s_muon_on_the_whole_model() -> None:
    block = torchvision.models.vision_transformer.EncoderBlock
    sharded, replica = sharded_and_replica(TinyViT, units=[block], layout="whole")
    replica.register_comm_hook(None, mean_in_rank_order)
    expected = train(replica, Together(replica.module), 5, vit_batch)
    ours = Muon(muon_groups(sharded), lr=0.02, weight_decay=0.1)
    assert train(sharded, ours, 5, vit_batch) == pytest.approx(expected, rel=1e-6)
    assert_same_parameters(sharded, replica, tolerance=1e-6)
    assert moves_nothing(ours)


def muon(model: nn.Module) -> Muon:
    return Muon(muon_groups(model), lr=0.02)


@pytest.mark.parametrize(("channels_last", "built_before"), [(True, False), (False, True)])
@each_rank(1, 3, 4)
def test_convolutions_on_shards_equal_unsharded_ones(channels_last: bool, built_before: bool) -> None:
    torch.manual_seed(0)
    plain = OddNet().to(memory_format=torch.channels_last) if channels_last else OddNet()
    replica = nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    replica.register_comm_hook(None, mean_in_rank_order)
    before = muon(plain)
    model = shard(plain, units=[Block], layout="whole")
    optimizer = before if built_before else muon(model)
    theirs = muon(replica.module)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 9]
    assert train(model, optimizer) == pytest.approx(train(replica, theirs), rel=1e-6)
    assert_same_parameters(model, replica, tolerance=1e-6)
    assert moves_nothing(optimizer)
    held = sum(v.numel() for state in optimizer.state.values() for v in state.values() if v.ndim)
    assert held <= 2 * sum(param.numel() for param in model.parameters())


@each_rank(2, transport="auto")
def test_muon_on_pieces_is_refused_with_the_way_out() -> None:
    plain = OddNet()
    before = muon(plain)
    model = shard(plain)
    for optimizer in (before, muon(model)):
        model(images(0)[0]).sum().backward()
        with pytest.raises(ValueError, match=r"Muon cannot step on a sharded.*shard\(..., layout='whole'\)"):
            optimizer.step()


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

"""Options together, as people use them: losses and parameters of DDP, with micro-batches and clipping."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardtrain
from shardtrain import Precision, comm
from shardtrain.engine import api

from small import Block, OddNet, assert_same_parameters, mesh
from test_forwards import both, checkpointed, compiled, fresh_compiler, train
from test_replicated import assert_replicas_are_equal

Inside = Callable[[nn.Module], None]
BF16 = {"precision": Precision(torch.bfloat16, reduce=torch.float32, output=torch.float32)}
INT8 = {"precision": Precision(gather=torch.int8, reduce=torch.int8)}
KEPT = {"reshard_after_forward": False}
WHOLE = {"layout": "whole"}
OFFLOAD = {"offload": True}
DEFERRED = {"deferred": True}

# Replicas and ranks of a shard group, what runs inside units, how far from DDP, options.
CASES: dict[str, tuple[tuple[int, int], Inside, float, dict[str, Any]]] = {
    "replicas, whole, offload, compiled": ((2, 2), compiled, 1e-5, WHOLE | OFFLOAD),
    "int8, compiled": ((1, 2), compiled, 5e-2, INT8),
    "int8, offload, recomputed": ((1, 3), checkpointed, 5e-2, INT8 | OFFLOAD),
    "int8, whole, kept": ((1, 3), lambda _: None, 5e-2, INT8 | WHOLE | KEPT),
    "all but int8": ((2, 2), both, 5e-2, WHOLE | OFFLOAD | BF16 | DEFERRED),
    "replicas, recomputed, kept": ((2, 2), checkpointed, 1e-5, KEPT),
    "replicas, compiled, recomputed, bf16": ((2, 2), both, 5e-2, BF16),
    "whole, compiled": ((1, 3), compiled, 1e-5, WHOLE),
    "deferred, replicas, whole, recomputed": ((2, 2), checkpointed, 1e-5, WHOLE | DEFERRED),
}


def on_the_cpu(link: comm.Transport, *_: object) -> comm.Transport:
    """What ``offload=True`` makes of a transport where there is a device: the CPU stands in for it."""
    return comm.Offloaded(link, torch.device("cpu"))


def trains_like_ddp(name: str) -> None:
    """Over shared memory where the options allow it, else over messages."""
    (replicate, group), inside, rounding, options = CASES[name]
    torch.manual_seed(0)
    plain = OddNet()
    replica = DistributedDataParallel(copy.deepcopy(plain))
    torch.manual_seed(0)
    model = shardtrain.deferred(OddNet) if "deferred" in options else plain
    by_messages = "offload" in options or INT8.items() <= options.items()
    chosen = {key: value for key, value in options.items() if key != "deferred"}
    chosen["transport"] = "process_group" if by_messages else "shared_memory"
    if replicate > 1:
        chosen["mesh"] = mesh(replicate, group)
    with mock.patch.object(api, "_offloaded", on_the_cpu):
        model = shardtrain.shard(model, units=[Block], **chosen)
    with fresh_compiler():
        inside(model)
        losses = train(model)
    assert losses == pytest.approx(train(replica), rel=rounding)
    assert_same_parameters(model, replica, rounding)
    if replicate > 1:
        assert_replicas_are_equal(model)


@pytest.mark.parametrize("name", CASES)
def test_options_together_train_like_ddp(on_ranks: Callable[..., list[Any]], name: str) -> None:
    replicate, group = CASES[name][0]
    on_ranks(replicate * group, trains_like_ddp, name)

"""Options together, as people use them: losses and parameters of DDP, with micro-batches and clipping."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardtrain
from shardtrain import Precision, comm
from shardtrain.comm import Transport
from shardtrain.engine import api

from small import Block, OddNet, assert_same_parameters
from test_forwards import both, checkpointed, compiled, fresh_compiler, train, train_replica
from test_replicated import assert_replicas_are_equal, mesh

Ranks = Callable[..., list[Any]]
BF16 = Precision(torch.bfloat16, reduce=torch.float32, output=torch.float32)
INT8 = Precision(gather=torch.int8, reduce=torch.int8)
CPU = torch.device("cpu")
ROUNDING = {"fp32": 1e-5, "bf16": 5e-2, "int8": 5e-2}


@dataclass(frozen=True)
class Together:
    """``offload``: the CPU stands in for the device, with memory of its own, over messages."""

    replicate: int
    group: int
    inside: Callable[[nn.Module], None] = lambda _: None
    offload: bool = False
    deferred: bool = False
    rounding: str = "fp32"
    options: dict[str, Any] = field(default_factory=dict)


BY_MESSAGES = {
    "replicas, offload": Together(2, 2, offload=True),
    "replicas, whole, offload, compiled": Together(2, 2, compiled, offload=True, options={"layout": "whole"}),
    "whole, offload, bf16": Together(
        1, 3, offload=True, rounding="bf16", options={"layout": "whole", "precision": BF16}
    ),
    "int8, compiled": Together(1, 2, compiled, rounding="int8", options={"precision": INT8}),
    "int8, offload, recomputed": Together(
        1, 3, checkpointed, offload=True, rounding="int8", options={"precision": INT8}
    ),
    "int8, whole, kept": Together(
        1, 3, rounding="int8", options={"precision": INT8, "layout": "whole", "reshard_after_forward": False}
    ),
    "all but int8": Together(
        2,
        2,
        both,
        offload=True,
        deferred=True,
        rounding="bf16",
        options={"layout": "whole", "precision": BF16},
    ),
}
ANY_TRANSPORT = {
    "replicas, whole": Together(2, 2, options={"layout": "whole"}),
    "replicas, compiled": Together(2, 2, compiled),
    "replicas, recomputed, kept": Together(2, 2, checkpointed, options={"reshard_after_forward": False}),
    "replicas, compiled, recomputed, bf16": Together(
        2, 2, both, rounding="bf16", options={"precision": BF16}
    ),
    "whole, compiled": Together(1, 3, compiled, options={"layout": "whole"}),
    "deferred, replicas, whole, recomputed": Together(
        2, 2, checkpointed, deferred=True, options={"layout": "whole"}
    ),
}
CASES = BY_MESSAGES | ANY_TRANSPORT


def on_the_cpu(link: Transport, *_: object) -> Transport:
    """What ``offload=True`` makes of a transport where there is a device."""
    return comm.Offloaded(link, CPU)


def trains_like_ddp(name: str, kind: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    plain = OddNet()
    replica = DistributedDataParallel(copy.deepcopy(plain))
    torch.manual_seed(0)
    model = shardtrain.deferred(OddNet) if case.deferred else plain
    grid = mesh(case.replicate, case.group) if case.replicate > 1 else None
    with mock.patch.object(api, "_offloaded", on_the_cpu):
        model = shardtrain.shard(
            model, units=[Block], mesh=grid, transport=kind, offload=case.offload, **case.options
        )
    rounding = ROUNDING[case.rounding]
    with fresh_compiler():
        case.inside(model)
        losses = train(model)
    assert losses == pytest.approx(train_replica(replica), rel=rounding)
    assert_same_parameters(model, replica, rounding)
    if case.replicate > 1:
        assert_replicas_are_equal(model)


@pytest.mark.parametrize("name", BY_MESSAGES)
def test_over_messages(on_ranks: Ranks, name: str) -> None:
    on_ranks(CASES[name].replicate * CASES[name].group, trains_like_ddp, name, "process_group")


@pytest.mark.parametrize("kind", ["process_group", "shared_memory"])
@pytest.mark.parametrize("name", ANY_TRANSPORT)
def test_over_any_transport(on_ranks: Ranks, name: str, kind: str) -> None:
    on_ranks(CASES[name].replicate * CASES[name].group, trains_like_ddp, name, kind)

"""The judge's rows, here equal to a replica or refused by name; its faults, all caught; its command."""

import contextlib
import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import nn

import shardtrain
from shardtrain.judge.rows import FAULTS, ROWS, outcome
from shardtrain.judge.wrappers import Fully_Shard, Shardtrain, units, with_verbs, wrapper
from shardtrain.recipes import behaviours_of_calls, behaviours_of_state, faults  # noqa: F401
from shardtrain.recipes.behaviours import Net

from pool import each_rank, ended
from small import shard

CANNOT = r"cannot step on a sharded model: .*use shard\(..., layout='whole'\)"
CHANGED = r"forward changed blocks.1\.\S+.* of blocks.1, with which other ranks may compute now"
REFUSED = {
    "SAM: cannot be built from its groups alone": "Sam cannot be tried",
    "Adafactor": f"Adafactor {CANNOT}",
    "Muon": f"Muon {CANNOT}",
    "LARS in a warm-up that begins with a learning rate of 0": f"Lars {CANNOT}",
    "One that looks at whole matrices from 32 × 32 upwards, as timm's Adafactor does": f"From32 {CANNOT}",
    "Torch's `GradScaler`, where one rank's gradients overflow": "use shardtrain.GradScaler",
    "Pruning after wrapping": "head.weight is no longer where shard.. found it.*before shard",
    "`layer.bias = None` after wrapping": "head.bias is no longer where",
    "A module attached after wrapping": "parameters attached after shard",
    "The parent reads a unit's weight": "it read this rank's shard: call the module, choose units .* Shards "
    "were shown by blocks.0.inside.weight, ",
    "A momentum encoder updated inside forward": f"{CHANGED}; change parameters between steps",
    "A momentum encoder replaced inside forward": f"{CHANGED}; change parameters between steps",
    "A penalty on parameters in the same backward": "for a penalty on weights use",
    "An embedding with `max_norm`": "^ValueError: 0.weight changed while 0 was whole",
    "`jvp`": "a sharded model cannot run inside grad, vjp, jacrev, jvp or jacfwd of torch.func",
    "Double backward": "double backward .* is not supported",
    "`autograd.grad` over parameters": "autograd.grad over parameters of a sharded model",
    "`torch.save(model.state_dict())` (`save_pretrained`), loaded into a plain model": "a rank's piece of "
    "0.weight must not be pickled",
    "`get_model_state_dict(full_state_dict=True)`": "a rank's piece of 0.weight must not be used by equal: "
    "only load_state_dict, copy.deepcopy and DCP take it; save shardtrain.full_state_dict",
    "Loading a full state dict without a key: nothing is loaded": "nothing was loaded: head.bias is missing",
    "Loading a full state dict in float64: nothing is loaded": "nothing was loaded: head.bias is torch.f",
    "Models that differ between ranks": "the model to shard differs between ranks",
    "Ranks that run units in another order": "take different paths",
}
# They end in an error that others may have to wait for, or need a time-out: `test_guard.py` has them.
ALONE = [name for name, row in ROWS.items() if row.kind == "Failures" and name[:2] not in ("30", "Mo")]


class Here(Shardtrain):
    """This package over the transport that a test runs with."""

    @staticmethod
    def shard(model: nn.Module, **options: Any) -> nn.Module:
        chosen = units(model)
        return shard(model, **{"units": lambda _, module: module in chosen, **options})


class UnderNames(Fully_Shard):
    """The same by FSDP2's names."""

    def shard(self, model: nn.Module, **options: Any) -> nn.Module:
        return super().shard(model, transport=os.environ["SHARDTRAIN_TEST_TRANSPORT"], **options)


@pytest.mark.parametrize("api", [Here, pytest.param(UnderNames, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", [name for name in ROWS if name not in ALONE])
@each_rank(3)
def test_every_behaviour_is_equal_or_refused(name: str, api: Any) -> None:
    refused = REFUSED.get(name)
    verdict, text = outcome(with_verbs(api()), ROWS[name])
    with contextlib.suppress(RuntimeError):  # where the group has failed, all ranks know
        dist.barrier()  # each rank is refused by itself, and the others may still be on their way there
    assert verdict == ("refused" if refused else "equal"), text
    assert re.search(refused or "", text), text


@each_rank(2, transport="auto")
def test_options_that_differ_between_ranks_are_refused() -> None:
    transport = ("shared_memory", "process_group")[dist.get_rank()]
    message = "transport= differs between ranks: rank 1 has 'process_group' where rank 0 has 'shared_memory'"
    with pytest.raises(ValueError, match=message):
        shardtrain.shard(Net(), transport=transport)


ABSENT = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="not installed")


@pytest.mark.parametrize("short", ["fsdp2", "fsdp1", "ddp", pytest.param("accelerate", marks=ABSENT)])
@each_rank(2, transport="auto")
def test_peers_train_as_a_replica_does(short: str) -> None:
    with patch.dict(os.environ):  # accelerate leaves variables behind
        for name in ("Training equals a replica's", "Two micro-batches, the first in `no_sync`"):
            assert outcome(wrapper(short), ROWS[name]).verdict == "equal"


MINE = """
import torch.distributed as dist

def shard(model):
    dist.barrier()
    return model

def clip_grad_norm_(model, max_norm, norm_type=2.0):
    raise NotImplementedError("clipping is not supported")
"""


@pytest.mark.long
def test_the_command_prints_a_table_of_verdicts(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    rows = ['only="^AdamW|^Clipping by the norm"', "limit_s=15"]
    done = ended(2, "-m", "shardtrain.judge", "wrapper=mine.shard", *rows, "out=here", folder=tmp_path)
    assert set(done.codes) == {0}, done.errors
    found = json.loads((tmp_path / "here/judge.json").read_text())["found"]
    verdicts = {name: outcomes["mine.shard"][0] for name, outcomes in found.items()}
    assert verdicts["AdamW"] == "wrong"
    assert "| AdamW | **wrong**: " in done.output
    assert verdicts["Clipping by the norm: the norms, and what follows"] == "refused"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "wrapper=nowhere.shard",
            "wrapper=nowhere.shard: No module named 'nowhere'; expected shardtr",
        ),
        (
            "wrapper=fsdp3",
            "wrapper=fsdp3: .*; expected shardtrain, .*, ddp, accelerate, deepspeed or PACKAGE.FUNCTION",
        ),
        (
            "mutants=true rows=shardtrain.recipes.behaviours",
            r"mutants=true: rows=\['shardtrain.recipes.behaviours'\] have no faults; add shardtrain.recip",
        ),
        ("rows=nowhere", "rows=nowhere: No module named 'nowhere'; expected modules that register rows"),
    ],
)
def test_a_name_that_is_none_is_refused(argument: str, message: str, tmp_path: Path) -> None:
    done = ended(1, "-m", "shardtrain.judge", *argument.split(), folder=tmp_path)
    assert done.codes == [2]
    assert re.search(message, done.errors)


@pytest.mark.long
def test_every_fault_is_caught_by_the_command(tmp_path: Path) -> None:
    done = ended(2, "-m", "shardtrain.judge", "mutants=true", "out=here", folder=tmp_path, timeout=500)
    assert set(done.codes) == {0}, done.output
    assert done.output.count("#") == len(FAULTS) - 1

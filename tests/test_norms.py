"""Norms of every parameter against a plain model's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from shardtrain import comm
from shardtrain.job.config import from_hydra
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.hydra_app import compose
from shardtrain.job.launch import Context
from shardtrain.job.schema import UserError
from shardtrain.monitor import open_monitor
from shardtrain.monitor.watch import Norms
from shardtrain.train.loop import train

from small import Block, OddNet, average_gradients, images, sgd, shard

CPU = torch.device("cpu")


def _norms() -> tuple[list[dict[str, float]], dict[str, float]]:
    """What is taken after each of three steps, and what a plain model has in the third."""
    torch.manual_seed(0)
    plain = OddNet()
    model = OddNet()
    model.load_state_dict(plain.state_dict())
    optimizer, other = sgd(shard(model, units=[Block])), sgd(plain)
    job: Any = SimpleNamespace(model=model, optimizer=optimizer, first_step=4, steps=7)
    norms, taken, expected = Norms(job, log_every=5), [], {}
    for step in range(3):
        x, y = images(step)
        for each, its in ((model, optimizer), (plain, other)):
            its.zero_grad()
            F.cross_entropy(each(x), y).backward()
        average_gradients(plain)
        before = {name: param.detach().clone() for name, param in plain.named_parameters()}
        if step != 1:  # as where a scaled gradient overflows: Muon is not called then
            other.step()
            optimizer.step()
        taken.append(norms.take(5 + step))
        for name, param in plain.named_parameters():
            assert param.grad is not None
            expected[f"norms/gradient/{name}"] = param.grad.norm().item()
            expected[f"norms/weight/{name}"] = param.detach().norm().item()
            expected[f"norms/update/{name}"] = (param.detach() - before[name]).norm().item()
    return taken, expected


def test_norms_are_those_of_whole_parameters(ranks: Any) -> None:
    for world in (1, 3):
        for taken, expected in ranks(world, _norms):
            assert [bool(found) for found in taken] == [True, False, True]  # steps 5 and 7, the last
            assert taken[2] == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_norms_need_tensorboard(tmp_path: Path) -> None:
    raw = compose(["+recipe=resnet", "monitor.norms=true", "monitor.tensorboard=false"])
    assert raw is not None
    job: Any = None
    opening = open_monitor(from_hydra(raw), Context(RankInfo(0, 1, 0, 1), CPU, tmp_path), job, job)
    with (
        pytest.raises(UserError, match=r"norms=true: norms are for plots alone, so monitor.tensorboard"),
        opening,
    ):
        pass


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own
def test_norms_are_plotted_on_request_and_nowhere_else(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tiny = ("data=fake", "data.train_images=24", "data.val_images=5", "data.channels=1", "data.image_size=8")
    steps = ("train.batch_size=12", "train.epochs=1", "train.log_every=2", "checkpoint.keep=0")
    raw = compose(
        ["+recipe=resnet", *tiny, *steps, "monitor.norms=true", "monitor.plan=false", "monitor.progress=none"]
    )
    assert raw is not None
    place = RankInfo(comm.rank(), comm.world_size(), 0, 1)
    train(from_hydra(raw), Context(place, CPU, tmp_path))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    norms = [tag for tag in events.Tags()["scalars"] if tag.startswith("norms/")]
    assert len(norms) == 3 * 62
    weight = events.Scalars("norms/weight/layer4.1.conv2.weight")
    assert [event.step for event in weight] == [2]
    assert weight[0].value > 10 * events.Scalars("norms/update/layer4.1.conv2.weight")[0].value > 0
    for name in ("log.txt", "result.json"):
        assert "norms/" not in (tmp_path / name).read_text()

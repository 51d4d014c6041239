"""The job that a configuration builds, the loop, and evaluation."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor
from torchvision.models import resnet18

from shardtrain import comm, shard
from shardtrain.config.config import Config
from shardtrain.config.errors import UserError
from shardtrain.data import Batch, EvalFeed, Prepare, Share
from shardtrain.data.feed import Arrays
from shardtrain.data.preprocessing import Preprocessing, numbered
from shardtrain.evaluate.__main__ import scores_as_json
from shardtrain.job.build import build, require_logits
from shardtrain.job.evaluation import Evaluation, Scores, evaluate
from shardtrain.job.model import parameter_groups, plain_model

import tiny
from pool import each_rank
from small import Parts
from tiny import CPU

TWO_STEPS = ("data.limit=48", "train.max_steps=2", "train.log_every=1", "checkpoint.keep=0")
TWO_STEPS += ("monitor.writers=[]",)


def configure(*arguments: str) -> Config:
    return tiny.configure(*tiny.SHORT, *TWO_STEPS, *arguments)


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    return tiny.run(str(folder), *TWO_STEPS, *arguments)


@each_rank(2, transport="auto")
def test_an_optimizer_that_is_refused_in_its_first_step_is_a_mistake(tmp_path: Path) -> None:
    told = r"^optim\._target_=torch\.optim.*\.Adafactor: Adafactor cannot step on a sharded model: "
    with pytest.raises(UserError, match=told):
        run(tmp_path, "optim._target_=torch.optim.Adafactor")


@pytest.mark.smoke
def test_repetitions_are_exact_and_settings_count(tmp_path: Path) -> None:
    """A seed changes much, bf16 little, and activations that are computed again change nothing."""
    again = "parallel.activation_checkpoint=true"
    bf16 = "parallel.precision=bf16"
    settings = ("seed=0", "seed=0", again, "seed=1", bf16)
    results = [run(tmp_path / str(n), setting) for n, setting in enumerate(settings)]
    tags = ("loss/train", "loss/val", "grad_norm")
    first, second, recomputed, other, rounded = ([result[tag] for tag in tags] for result in results)
    assert first == second == recomputed
    assert first != other
    assert rounded[0] == pytest.approx(first[0], rel=0.05)
    assert rounded[0] != first[0]


@pytest.mark.long
def test_compiling_without_a_compiler_is_a_mistake() -> None:
    # Not a monkeypatch, whose end these settings do not survive.
    missing = inductor.patch({"cpp.cxx": ("no-such-compiler",)})
    with missing, pytest.raises(UserError, match=r"needs a C\+\+ compiler, and there is none: install g\+\+"):
        build(configure("parallel.compile=true"), 0, 1, CPU)


def test_model_outputs_that_are_no_logits_are_refused() -> None:
    with pytest.raises(UserError, match=r"the model returns \(2, 3\), expected logits for at least 4"):
        require_logits(nn.Linear(5, 3), (2, 5), 4)
    with pytest.raises(UserError, match=r"the model returns tuple, expected logits"):
        require_logits(nn.GRU(5, 3), (2, 5), 2)
    require_logits(nn.Linear(5, 3), (2, 5), 3)
    # A forward that reads a value is not refused for its shape.
    cumulative = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 3))
    require_logits(cumulative, (2, 5), 3)


def test_no_decay_on_norms_and_biases() -> None:
    model = resnet18(num_classes=10)
    optim = configure("optim.weight_decay=0.1").optim
    (group,) = parameter_groups(model, replace(optim, decay_all=True))
    assert (group["weight_decay"], len(group["params"])) == (0.1, 62)
    decayed, exempt = parameter_groups(model, optim)
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.1, 0.0)
    assert {param.ndim for param in decayed["params"]} == {2, 4}
    assert {param.ndim for param in exempt["params"]} == {1}
    assert len(decayed["params"]) + len(exempt["params"]) == 62


def _evaluation() -> Evaluation:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (13, 1, 2, 2), dtype=torch.uint8)
    arrays = Arrays(images, torch.arange(13) % 7)
    how = Preprocessing.of_arrays(numbered(7), (128 / 255,), (64 / 255,), 2)
    model = shard(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 7)), units=[nn.Linear])
    with torch.no_grad():  # a rank's own training batches
        model[1].running_mean += comm.rank() - (comm.world_size() - 1) / 2
    share = Share(1, 1, comm.rank(), comm.world_size())
    with patch("shardtrain.data.feed.EVAL_BATCH", 3):
        feed = EvalFeed(arrays, share, Prepare(how, 2, CPU), workers=0)
    found = evaluate(model, feed)
    assert model.training
    return found


def test_an_evaluation_does_not_depend_on_the_number_of_ranks(on_ranks: Any) -> None:
    alone = on_ranks(1, _evaluation)[0]
    for found in on_ranks(3, _evaluation):
        assert found.scalars() == pytest.approx(alone.scalars(), rel=1e-6)


def test_scores_of_known_logits() -> None:
    logits = torch.tensor([*[[3.0, 2, 1, 0, -1, -2, *[-9] * 5]] * 3, [9.0] * 11])
    batch = Batch(logits, torch.tensor([0, 5, 4, 3]), valid=3)
    model = shard(Parts(lambda self, images: images * self.scale, scale=nn.Parameter(torch.ones(()))))
    evaluation = evaluate(model, [batch])
    total = logits[0].logsumexp(0).item()
    assert evaluation.scores == pytest.approx(Scores(total - (3 - 2 - 1) / 3, 100 / 3, 200 / 3))
    unknown = scores_as_json(3, [Evaluation(Scores(math.nan, 50.0))])
    assert unknown == '{"step": 3, "loss/val": null, "acc1/val": 50.0}'
    assert evaluation.scalars().keys() == {"loss/val", "acc1/val", "acc5/val"}
    for odd in (logits.index_fill(1, torch.tensor(3), math.nan), torch.full_like(logits, math.nan)):
        wrong = evaluate(model, [batch._replace(images=odd, labels=torch.zeros(4, dtype=torch.int64))]).scores
        assert (wrong.acc1, wrong.acc5) == (0, 0)
        assert math.isnan(wrong.loss)
    ten_classes = evaluate(model, [batch._replace(images=logits[:, :10])])
    assert ten_classes.scores.acc5 is None
    assert ten_classes.scalars().keys() == {"loss/val", "acc1/val"}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_scripted_and_traced_parts_are_refused_by_name() -> None:
    told = "model: 1 is scripted or traced, so its forward gathers no parameters; build it"
    for part in (torch.jit.script(nn.Linear(5, 3)), torch.jit.trace(nn.Linear(5, 3), torch.ones(2, 5))):
        built = nn.Sequential(nn.Flatten(), part)
        with patch("shardtrain.job.model.instantiate", return_value=built):
            assert told in tiny.refused(plain_model, {})


@pytest.mark.long
def test_channels_last_reaches_the_activations() -> None:
    job, _ = build(configure("train.channels_last=true"), 0, 1, CPU)
    seen: list[bool] = []
    job.model.layer2.register_forward_hook(
        lambda module, inputs, output: seen.append(output.is_contiguous(memory_format=torch.channels_last))
    )
    job.model(next(iter(job.train)).images)
    assert seen == [True]

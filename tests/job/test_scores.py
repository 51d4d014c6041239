"""Evaluations and their scores, the score that decides, the loss that classes weight, what is no model."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models import resnet18

import shardtrain
from shardtrain import comm, shard
from shardtrain.checkpoint.store import step_name
from shardtrain.config.errors import UserError
from shardtrain.data import Batch, EvalFeed, Prepare, Share
from shardtrain.data.feed import Arrays, DataSet
from shardtrain.data.items import Expected, Items
from shardtrain.data.preprocessing import Preprocessing
from shardtrain.evaluate.__main__ import scores_as_json
from shardtrain.job import losses, pictures, scores
from shardtrain.job.build import build, require_logits
from shardtrain.job.evaluation import Evaluation, Scores, Scoring, evaluate
from shardtrain.job.model import parameter_groups, plain_model
from shardtrain.monitor import Monitor, StepMetrics
from shardtrain.train.loop import train
from shardtrain.train.saving import Best, RunState, Saver
from shardtrain.train.steps import BaseTrainer

from pool import each_rank
from small import Parts
from tiny import CPU, TINY, composed, context, events_of, refused, result_of

IMAGES = 23  # divided by no number of ranks or batches here
NAMES = ("cat", "dog", "bird", "fish", "none")


def small_data() -> DataSet:
    """Return images whose pixels are logits of four of five classes."""
    images = torch.randint(0, 256, (IMAGES, 1, 2, 2), generator=torch.Generator().manual_seed(0))
    arrays = Arrays(images.to(torch.uint8), torch.arange(IMAGES) ** 2 % 4)
    return DataSet(arrays, arrays, "small", Preprocessing.of_arrays(NAMES, (0.0,), (1 / 255,), 2))


def everything(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    """Return all that a function gets as a text, which rank 0 alone keeps, and a number for all ranks."""
    return {"seen": repr((logits.tolist(), labels.tolist())), "sum": logits.sum()}


def scored(virtual: int = 0) -> tuple[scores.Results, dict[str, float]]:
    """Evaluate a model whose buffers are those of a rank's own training batches."""
    data = small_data()
    world = comm.world_size()
    share = Share(1, max(1, virtual // world), comm.rank(), world, virtual)
    model = Parts(lambda self, images: self.norm(F.pad(images.flatten(1), (0, 1))), norm=nn.BatchNorm1d(5))
    shard(model, **({"virtual_ranks": virtual} if virtual else {}))
    model.norm.running_mean += comm.rank() - (world - 1) / 2
    feed = EvalFeed(data.val, share, Prepare(data.preprocessing, 2, CPU), workers=0, batch_size=3)
    functions = {"per_class": scores.per_class, "mine.everything": everything}
    evaluation = evaluate(model, feed, Scoring(functions=functions, classes=NAMES))
    return evaluation.results, evaluation.scalars()


def test_scores_do_not_depend_on_the_number_of_ranks(on_ranks: Any) -> None:
    ((alone, scalars),) = on_ranks(1, scored)
    for virtual in (0, 4):
        (first, ours), (other, theirs) = on_ranks(2, scored, virtual)
        assert (first.numbers, first.texts) == (alone.numbers, alone.texts)
        assert np.array_equal(first.pictures["confusion"], alone.pictures["confusion"])
        assert other.numbers == alone.numbers
        assert (other.pictures, other.texts) == ({}, {})
        assert ours == theirs == pytest.approx(scalars, rel=1e-6)


def test_recall_of_known_logits() -> None:
    answers = torch.tensor([0, 0, 1, 1, 1, 5])
    labels = torch.tensor([0, 0, 0, 0, 1, 1])
    results = scores.per_class(F.one_hot(answers, 7).float(), labels, ("cat", "dog", "bird"))
    assert results["recall/cat"] == results["recall/dog"] == results["balanced"] == 50
    assert "recall/bird" not in results  # there is no image of one
    assert results["by class"].splitlines() == [
        "label  images   recall  as cat  as dog  as bird  as other",
        "cat         4  50.00 %       2       2        0         0",
        "dog         2  50.00 %       0       1        0         1",
        "bird        0        –       0       0        0         0",
        "other       0        –       0       0        0         0",
    ]


def test_the_worst_mistakes_are_those_whose_label_got_the_least_probability() -> None:
    logits = torch.tensor([[0.0, 1.0], [0.0, 9.0], [9.0, 0.0], [5.0, 0.0]])
    labels = torch.tensor([0, 0, 0, 1])
    images = Arrays(torch.arange(20.0)[:, None, None, None], torch.zeros(20))
    with patch.object(pictures, "grid") as grid:
        assert [*scores.mistakes_of(logits, labels, images, ["cat", "dog"])] == ["mistakes"]
        assert scores.mistakes_of(logits[2:3], labels[2:3], images, ["cat", "dog"]) == {}
        scores.mistakes_of(-torch.eye(2)[[1] * 20], torch.ones(20, dtype=torch.int64), images, ["cat", "dog"])
    pixels, captions = grid.call_args_list[0].args
    assert pixels.flatten().tolist() == [1, 3, 0]
    assert captions == ["cat\nas dog", "dog\nas cat", "cat\nas dog"]
    assert [len(call.args[1]) for call in grid.call_args_list] == [3, 16]


def test_a_confusion_matrix_is_a_picture() -> None:
    """Rows are labels: the darker a cell, the larger its part."""
    page = pictures.confusion(torch.tensor([[9, 1, 0], [0, 1000, 0], [0, 0, 0]]))
    assert (page.dtype, page.shape) == (np.uint8, (342, 342, 3))
    cells = page[::114, ::114, 0]
    assert (cells == [[26, 230, 255], [255, 0, 255], [255, 255, 255]]).all()
    assert (page[:114, :114] == 26).all()


@pytest.mark.long
def test_what_functions_may_return() -> None:
    logits = torch.zeros(4, 2)
    labels = torch.zeros(4, dtype=torch.int64)

    def called(function: Any) -> scores.Results:
        return scores.results_of({"mine.score": function}, logits, labels, NAMES)

    assert called(lambda logits, labels, classes: {"n": len(classes)}).numbers == {"n": 5.0}
    returned = called(lambda *_: {"text": "lines", "plot": np.zeros((5, 4, 3), np.uint8), "x": math.nan})
    assert returned.texts == {"text": "lines"}
    assert returned.pictures["plot"].shape == (5, 4, 3)
    assert math.isnan(returned.numbers["x"])
    for function, told in (
        (lambda *_: [1, 2], r"TypeError: score is a list, expected a number, a pi"),
        (lambda *_: {"acc1": 2.0}, r"ValueError: there is another score named acc1: choose"),
        (lambda *_: 1 / 0, r"ZeroDivisionError: .*\(.*test_scores.py, line \d+\)"),
    ):
        with pytest.raises(UserError, match=rf"mine.score\]: {told}"):
            called(function)
    both = {"mine.again": lambda *_: 1.0, "mine.f": lambda *_: {"again": 2.0}}
    with pytest.raises(UserError, match=r"mine.f\]: ValueError: there is another score named again"):
        scores.results_of(both, logits, labels, NAMES)


@each_rank(2, transport="auto")
def test_a_function_that_fails_on_rank_0_fails_on_all() -> None:
    with pytest.raises(UserError, match=r"mine.f\]: ZeroDivisionError"):
        scores.results_of({"mine.f": lambda logits, labels: 1 / 0}, torch.ones(1, 1), torch.ones(1), NAMES)


def test_what_is_computed_by_default() -> None:
    assert [*scores.chosen_scores(["per_class"], 50, ())] == ["per_class"]
    assert scores.chosen_scores(["per_class"], 51, ()) == {}
    with pytest.raises(UserError, match=r"scores=\[per_clas\]: expected PACKAGE.* did you mean per_class"):
        scores.chosen_scores(["per_clas"], 5, ())
    job, _ = build(composed(*TINY), 0, 1, CPU)
    assert [*job.scoring.functions] == ["per_class"]


@pytest.mark.long
def test_a_run_by_another_score(tmp_path: Path) -> None:
    """The best step, patience, result.json and what a sweep ranks follow `train.best`."""
    falling = iter([0.0, 5.0, 3.0, 4.0, 6.0])  # the first is the rehearsal's

    def mine(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        return {"mine": next(falling), "shown": np.zeros((2, 3, 3), np.uint8), "lines": "of text"}

    words = ("monitor.scores=[{_target_: mine.mine, higher_is_better: false},per_class]", "allow=[mine]")
    words += ("train.best=mine/val", "train.epochs=9", "train.eval_every=1", "train.patience=2")
    with patch.object(scores, "find_target", lambda *_: mine):
        assert train(composed("+recipe=resnet", *TINY, *words), context(tmp_path)) == 3.0
    result = result_of(tmp_path)
    assert (result["best/mine"], result["best/step"], result["step"]) == (3.0, 10, 20)
    assert (result["best_by"], result["best_is_lowest"]) == ("mine/val", True)
    log = (tmp_path / "log.txt").read_text()
    assert "stopped after step 20: no better mine/val in 2 evaluations" in log
    assert "best mine 3.0000 at step 10" in log
    assert "val, lines:" in log
    assert (tmp_path / "checkpoints" / step_name(10)).exists()  # the best is kept
    tags = events_of(tmp_path).Tags()
    assert {"shown/val", "confusion/val"} <= {*tags["images"]}
    assert {"mine/val", "balanced/val", "recall/val/3"} <= {*tags["scalars"]}


def judged(score: float, best: Best | None, *words: str, loss: float = 1.0) -> Any:
    """Return whether an evaluation with this score is better, and the best after it."""
    saver: Any = Saver.__new__(Saver)
    saver._metrics, saver._monitor, saver._job, saver._trainer = (MagicMock() for _ in range(4))
    saver._config = composed("+recipe=resnet", *TINY, *words)
    saver.best = best
    ranking = {"loss/val": loss, saver._config.train.best: score}
    saver._evaluate = lambda feed: MagicMock(ranking=lambda: ranking)
    train = saver._config.train
    saver._job.scoring = Scoring(is_minimised=train.best == "loss/val")
    better = saver._evaluate_step(7)
    assert saver._monitor.say.called == math.isnan(score + loss)
    return better, saver.best


def test_directions() -> None:
    best = Best(1, 50.0, "acc1/val")
    assert judged(50.0, best) == (False, best)
    assert judged(60.0, best) == (True, Best(7, 60.0, "acc1/val"))
    assert judged(40.0, best, "train.best=loss/val") == (True, Best(7, 40.0, "loss/val"))
    for word in ("recall/val/blossom", "loss_free/val"):  # a class or a score of any name
        assert judged(40.0, best, f"train.best={word}") == (False, best)
        assert judged(60.0, best, f"train.best={word}")[0]
    assert judged(math.nan, None) == (False, None)
    assert judged(math.nan, None, "train.best=loss/val") == (False, None)
    assert judged(-5.0, None)[0]
    assert judged(60.0, best, loss=math.nan) == (False, best)  # some answer is not a number


def error_rate(
    logits: torch.Tensor, labels: torch.Tensor, k: int = 1, *, num_classes: int = 0
) -> dict[str, float]:
    right = (logits.topk(k).indices == labels[:, None]).any(1)
    return {f"error{k}": 1 - float(right.double().mean()), "classes": float(num_classes)}


error_rate.higher_is_better = False  # type: ignore[attr-defined]


def test_a_score_takes_keywords_and_says_what_is_better() -> None:
    """As functions of torchmetrics do: `k` has a default, which names of classes must not replace."""
    entry = {"_target_": "mine.error_rate", "k": 2}
    with patch.object(scores, "find_target", lambda *_: error_rate):
        for chosen, name in ((["mine.error_rate"], "error1"), ([entry], "error2")):
            results = scores.rehearse(scores.chosen_scores(chosen, 10, ()), NAMES)
            assert results.numbers.keys() == {name, "classes"}
            assert results.higher_is_better == {name: False, "classes": False}
        assert results.numbers["classes"] == 10
        with pytest.raises(UserError, match=r"unknown key monitor.scores.kk; did you mean k\?"):
            scores.chosen_scores([{**entry, "kk": 1}], 10, ())
        with pytest.raises(UserError, match=r"monitor.scores: mine.error_rate is there twice"):
            scores.chosen_scores([entry, "mine.error_rate"], 10, ())
        reverse = {**entry, "higher_is_better": True}
        assert scores.chosen_scores([reverse], 10, ())["mine.error_rate"].higher_is_better is True
        message = r"^monitor.scores=\[mine.error_rate\]: higher_is_better=maybe: expected true or false"
        with pytest.raises(UserError, match=message):
            scores.chosen_scores([{**entry, "higher_is_better": "maybe"}], 10, ())
    text = "monitor.scores=[per_class,{_target_:mine.error_rate,k:2}]"
    assert composed(text).monitor.scores == ("per_class", entry)
    job, _ = build(composed(*TINY, "train.best=balanced/val"), 0, 1, CPU)
    assert job.scoring.is_better(2.0, 1.0)
    job, _ = build(composed(*TINY, "train.best=loss/val"), 0, 1, CPU)
    assert job.scoring.is_better(1.0, 2.0)


def test_another_score_begins_anew() -> None:
    config = composed("+recipe=resnet", *TINY, "train.best=loss/val")
    trainer = MagicMock(config=config)
    for tag, kept in (("acc1/val", False), ("loss/val", True)):
        best = Best(1, 50.0, tag)
        saver = Saver(trainer, MagicMock(), RunState(best), MagicMock())
        assert saver.best == (best if kept else None)


WEIGHTS = torch.tensor([1.0, 5.0, 0.5, 2.0, 1.0, 3.0, 0.1, 1.0, 7.0, 1.0])
FOUR = ("data=fake", "data.limit=24", "data.channels=1", "data.image_size=8", "train.batch_size=16")


class Computed(NamedTuple):
    loss: float  # of the step
    gradients: dict[str, torch.Tensor]
    batch: tuple[torch.Tensor, torch.Tensor]  # of this rank


def weighted_step(*words: str) -> Computed:
    config = composed(*TINY, *FOUR, f"train.class_weights={WEIGHTS.tolist()}", *words)
    job, _ = build(config, comm.rank(), comm.world_size(), CPU)
    batches = [*zip(range(job.train.share.accumulate), job.train, strict=False)]
    trainer = BaseTrainer(config, job, StepMetrics(job), Monitor())
    with trainer.metrics.step():
        trainer.gradients(1, iter([batch for _, batch in batches]))
    mean = trainer.metrics.sums[:, 0].sum() / trainer.metrics.scored
    comm.all_reduce(mean)
    with shardtrain.unsharded(job.model, grads=True):
        gradients = {name: param.grad.clone() for name, param in job.model.named_parameters()}
    images, labels = (torch.cat([batch[part] for _, batch in batches]) for part in range(2))
    return Computed(mean.item() / comm.world_size(), gradients, (images, labels))


def torchs_own() -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of torch's own weighted loss over the whole batch."""
    job, _ = build(composed(*TINY, *FOUR), 0, 1, CPU)
    images, labels, _ = next(iter(job.train))
    loss = nn.CrossEntropyLoss(weight=WEIGHTS)(job.model(images), labels)
    loss.backward()
    with shardtrain.unsharded(job.model, grads=True):
        return loss.item(), {name: param.grad.clone() for name, param in job.model.named_parameters()}


def test_the_weighted_loss_does_not_depend_on_the_split(on_ranks: Any) -> None:
    virtual = "parallel.virtual_ranks=4"
    splits = [(2, "train.accumulate=1"), (2, "train.accumulate=4"), (2, virtual), (1, virtual)]
    loss, gradients = torchs_own()
    same_bits: list[dict[str, torch.Tensor]] = []
    for world, word in splits:
        for computed in on_ranks(world, weighted_step, word):
            assert computed.loss == pytest.approx(loss, rel=1e-6), (world, word)
            for name, gradient in computed.gradients.items():
                torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-6)
            if word == virtual:
                same_bits.append(computed.gradients)
    for other in same_bits[1:]:
        assert all(torch.equal(other[name], gradient) for name, gradient in same_bits[0].items())


def test_balanced_weights() -> None:
    labels = torch.tensor([0] * 6 + [1] * 2)
    arrays = Arrays(torch.zeros(8, 1, 2, 2, dtype=torch.uint8), labels)
    how = Preprocessing.of_arrays(("cat", "dog", "none"), (0.0,), (1.0,), 2)
    data = DataSet(arrays, arrays, "small", how)
    assert losses.weights_of("balanced", data).tolist() == pytest.approx([8 / 12, 8 / 4, 1.0])
    assert losses.weights_of(None, data) is None
    told = r"class_weights=\[1.0\]: expected 3 weights, one per class: cat, dog"
    with pytest.raises(UserError, match=told):
        losses.weights_of([1.0], data)
    pairs: Any = [(arrays.images[number], int(label)) for number, label in enumerate(labels)]
    assert losses.class_counts(Items(pairs, "own", 0, Expected((1, 2, 2), 3)), 3).tolist() == [6, 2, 0]


def test_the_validation_loss_is_the_one_that_is_trained() -> None:
    """Weighted over all images, smoothed, and of a loss of one's own."""
    data = small_data()
    logits = F.pad(data.val.images.flatten(1).float() / 64, (0, 1))
    part = nn.Parameter(torch.ones(()))
    model = shard(Parts(lambda self, images: F.pad(images.flatten(1) / 64, (0, 1)) * self.scale, scale=part))
    weights = torch.tensor([1.0, 9.0, 0.5, 2.0, 1.0])
    own = lambda logits, labels: 7 * F.cross_entropy(logits, labels)  # noqa: E731
    weighted = nn.CrossEntropyLoss(weights, label_smoothing=0.1)
    for loss, expected in ((losses.CrossEntropy(weights, 0.1), weighted), (own, own)):
        prepare = Prepare(data.preprocessing, 2, CPU)
        feeds = [
            EvalFeed(data.val, Share(1, 1, 0, 1), prepare, workers=0, batch_size=size) for size in (3, 5)
        ]
        found, again = (evaluate(model, each, Scoring(loss)).scores.loss for each in feeds)
        assert found == again or loss is own
        assert found == pytest.approx(expected(logits, data.val.labels).item(), rel=1e-6)
        one_hot = evaluate(model, feeds[0], Scoring(loss, mixed=True)).scores.loss
        assert one_hot == pytest.approx(found, rel=1e-5)


def test_a_loss_that_fails_is_one_line_before_the_first_step() -> None:
    wrong: list[tuple[Any, str]] = [
        (lambda logits, labels: F.cross_entropy(logits, labels, reduction="none"), r"returned \[4\] w"),
        (lambda logits, labels: float(logits.detach().sum()), "returned a float; expected the mean over the"),
        (lambda logits, labels: logits.detach().sum(), r"returned \[\] without gradients; expected"),
        (lambda logits: logits.sum(), r"TypeError: .* \(.*losses.py, line \d+\)"),
    ]
    called = r"^train.loss, called with logits \[4, 10\] and labels "
    for loss, told in wrong:
        with pytest.raises(UserError, match=rf"{called}int64 \[4\]: {told}"):
            losses.rehearse_loss(loss, NAMES, (4, 10), soft=False, device=CPU)
    with pytest.raises(UserError, match=rf"{called}float32 \[4, 10\]: RuntimeError: "):
        losses.rehearse_loss(F.nll_loss, NAMES, (4, 10), soft=True, device=CPU)


def test_a_weighted_loss_of_torch_is_refused() -> None:
    words = ("train.loss._target_=torch.nn.CrossEntropyLoss", f"train.loss.weight={WEIGHTS.tolist()}")
    text = r"^train.loss: CrossEntropyLoss divides by the weights of each .*; train.class_weights=\[…\] with"
    with pytest.raises(UserError, match=text):
        build(composed(*TINY, *words), 0, 1, CPU)
    with pytest.raises(UserError, match=r"train.class_weights is for train.loss=cross_entropy"):
        composed(*TINY, *words, "train.class_weights=balanced")


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
    optim = composed("optim.weight_decay=0.1").optim
    (group,) = parameter_groups(model, replace(optim, decay_all=True))
    assert (group["weight_decay"], len(group["params"])) == (0.1, 62)
    decayed, exempt = parameter_groups(model, optim)
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.1, 0.0)
    assert {param.ndim for param in decayed["params"]} == {2, 4}
    assert {param.ndim for param in exempt["params"]} == {1}
    assert len(decayed["params"]) + len(exempt["params"]) == 62


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
            assert told in refused(plain_model, {})

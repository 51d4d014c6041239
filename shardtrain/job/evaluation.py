"""The evaluation on the validation images, each counted exactly once on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardtrain import average_buffers, comm, introspect
from shardtrain.data import Batch, EvalFeed
from shardtrain.job import tags
from shardtrain.job.losses import CrossEntropy, Loss, sum_and_weight
from shardtrain.job.scores import Gathering, Results, Score, mistakes_of, results_of
from shardtrain.optim.ema import Ema

FEW_CLASSES = 10  # five guesses among them are right half of the time by chance


class Scores(NamedTuple):
    loss: float  # the mean of the loss that is trained
    acc1: float | None  # percent; None if a user's trainer has other scores
    acc5: float | None = None  # percent; None up to ten classes


class Evaluation(NamedTuple):
    scores: Scores
    ema: Scores | None = None  # of the weights' moving average
    results: Results = Results.nothing()  # of functions of the whole evaluation, of these weights

    @property
    def judged(self) -> Scores:
        """The scores by which checkpoints are ranked: the moving average's if there is one."""
        return self.ema or self.scores

    def ranking(self, part: str = "val") -> dict[str, float]:
        """Return the scores of the weights that are judged, by the tags that `train.best` takes."""
        names = tags.VAL if part == "val" else tags.TEST
        scalars = by_tag(names, self.judged)
        return scalars | {tags.score(part, name): value for name, value in self.results.numbers.items()}

    def scalars(self) -> dict[str, float]:
        """Return the scores by TensorBoard tag."""
        averages = {} if self.ema is None else by_tag(tags.VAL_EMA, self.ema)
        return {**self.ranking(), **by_tag(tags.VAL, self.scores), **averages}


def by_tag(names: Iterable[str], scores: Scores) -> dict[str, float]:
    """Return ``scores`` under ``names``, such as `tags.VAL`, but for those that there are not."""
    return {tag: score for tag, score in zip(names, scores, strict=True) if score is not None}


class Task(Protocol):
    """What is scored of a model that is no classifier of images."""

    def sums(self, outputs: Any, batch: Batch) -> Tensor:
        """Return sums over the first ``batch.valid`` targets: float64 [columns]."""

    def scores_of(self, *totals: float) -> tuple[Scores, Results]:
        """Return the scores of `sums` over all targets."""


class Scoring(NamedTuple):
    """What an evaluation computes."""

    loss: Loss = CrossEntropy()
    mixed: bool = False  # labels are soft, as the loss has them in training
    functions: Mapping[str, Score] = MappingProxyType({})  # of all logits and labels
    classes: Sequence[str] = ()  # names, by label
    is_minimised: bool = False  # the smallest value of `train.best` is the best one
    task: Task | None = None  # None: classes of images

    def is_better(self, score: float, best: float | None) -> bool:
        """Return whether ``score`` is better than the ``best`` so far; NaN never is."""
        if best is None:
            return not math.isnan(score)
        return score < best if self.is_minimised else score > best


CROSS_ENTROPY = Scoring()


def evaluate(
    model: nn.Module,
    feed: Iterable[Batch],
    scoring: Scoring = CROSS_ENTROPY,
    *,
    ema: Ema | None = None,
    before_batch: Callable[[], object] = lambda: None,
) -> Evaluation:
    """Evaluate a sharded model, and its moving average. Collective; leaves the model in training mode.

    ``feed`` yields images r, r + N, r + 2N, … on rank r of N, as `data.EvalFeed` does; with virtual ranks
    those of this rank's virtual ones in turn. Sums are then taken per virtual rank.
    """
    ranks = table_rows(model)

    def run(functions: Mapping[str, Score]) -> tuple[Scores, Results]:
        gathering = Gathering() if functions else None
        sums = _sums_by_batch(model, feed, scoring, gathering, before_batch)
        totals = table_of(_in_parts(sums, len(ranks)), ranks).sum(0).tolist()
        if scoring.task is not None:
            return scoring.task.scores_of(*totals)
        results = Results.nothing()
        if gathering is not None:
            logits, labels = gathering.in_order(int(totals[-1]), len(ranks))
            results = results_of(functions, logits, labels, scoring.classes)
            if isinstance(feed, EvalFeed):
                results.pictures.update(mistakes_of(logits, labels, feed.images, scoring.classes))
        return _scores_of(*totals), results

    if ema is None:
        scores, results = run(scoring.functions)
        return Evaluation(scores, results=results)
    scores, _ = run({})
    with ema.swapped():
        averaged, results = run(scoring.functions)
    return Evaluation(scores, averaged, results)


def _sums_by_batch(
    model: nn.Module,
    feed: Iterable[Batch],
    scoring: Scoring,
    gathering: Gathering | None,
    before_batch: Callable[[], object],
) -> list[Tensor]:
    """Return the sums of each batch, and give all logits and labels to ``gathering``. Collective."""
    average_buffers(model)  # BatchNorm's running statistics differ between ranks before
    model.eval()
    sums = []
    try:
        with torch.no_grad():
            for batch in feed:
                before_batch()
                outputs = model(batch.images)
                if scoring.task is not None:
                    sums.append(scoring.task.sums(outputs, batch))
                    continue
                logits = outputs.float()
                sums.append(_sums(logits[: batch.valid], batch.labels[: batch.valid], scoring))
                if gathering is not None:
                    gathering.add(logits, batch.labels)
    finally:
        model.train()
    return sums


def _in_parts(sums: Sequence[Tensor], parts: int) -> Tensor:
    """Return the totals of the consecutive ``parts`` into which batches fall: [parts, columns]."""
    length = len(sums) // parts
    # Each part is summed by itself, so that its bits do not depend on how many there are.
    totals = [torch.stack([*sums[at : at + length]]).sum(0) for at in range(0, len(sums), length)]
    return torch.stack(totals)


def _scores_of(loss: float, weight: float, first: float, fifth: float, images: float) -> Scores:
    """Return the scores of sums over all images, as `_sums` has them."""
    acc5 = None if math.isnan(fifth) else 100 * fifth / images
    return Scores(loss / weight, 100 * first / images, acc5)


def table_rows(model: nn.Module) -> range:
    """Return this rank's rows in tables of all virtual ranks, or of all ranks."""
    return introspect(model).virtual_ranks or range(comm.rank(), comm.rank() + 1)


def table_of(own: Tensor, rows: range) -> Tensor:
    """Return the table of all ranks, of which this rank's ``rows`` are ``own`` [rows, columns]. Collective.

    Summed over its rows, it does not depend on the number of ranks that compute the virtual ranks.
    """
    table = own.new_zeros(len(rows) * comm.world_size(), own.shape[1])
    table[rows.start : rows.stop] = own
    comm.all_reduce(table)
    return table


def _sums(logits: Tensor, labels: Tensor, scoring: Scoring) -> Tensor:
    """Return sums over the images, float64 [5].

    They are the loss, what divides it, images right in the first guess, in the first five (NaN up to ten
    classes), and all images.
    """
    targets = F.one_hot(labels, logits.shape[1]).float() if scoring.mixed else labels
    right = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
    right &= ~logits.isnan().any(1, keepdim=True)  # topk puts NaN first, and class 0 would often be right
    fifth = right.sum() if logits.shape[1] > FEW_CLASSES else torch.tensor(math.nan)
    parts = [*sum_and_weight(scoring.loss, logits, targets)]
    parts += [right[:, 0].sum(), fifth, torch.tensor(len(labels))]
    return torch.stack([part.to(logits.device, torch.float64) for part in parts])

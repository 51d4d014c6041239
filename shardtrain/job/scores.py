"""Scores of a whole evaluation: functions of all logits and labels, on rank 0.

Rank 0 gathers each batch, and puts the images in their order: the same scores on any number of ranks, as far
as their logits have the same bits. All ranks get the numbers, by which they decide alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shardtrain import comm
from shardtrain.config.errors import UserError, not_valid, reason_with_line
from shardtrain.config.format import aligned
from shardtrain.config.schema import typed
from shardtrain.config.target import find_target, keywords_of
from shardtrain.data.feed import Batches
from shardtrain.job import pictures
from shardtrain.job.pictures import Picture
from shardtrain.launch.ranks import on_rank_0

# Logits [images, classes], labels [images] and, if it has a parameter `classes`, their names → a number, or
# numbers, pictures and texts by name. Its attribute `higher_is_better` (so torchmetrics calls it) says which
# of two numbers is the better one.
Score = Callable[..., Any]

PER_CLASS = "per_class"
MOST_CLASSES = 50  # of which each one has its recall
TAKEN = ("loss", "acc1", "acc5", "mistakes")  # names of what every evaluation has
MOST_PRINTED = 10  # classes whose matrix fits a console
MISTAKES = 16  # images in their picture


class Results(NamedTuple):
    """What functions returned, by name. Ranks other than 0 have the numbers alone."""

    numbers: dict[str, float]
    pictures: dict[str, Picture]
    texts: dict[str, str]
    higher_is_better: dict[str, bool]  # of those numbers whose function says so

    @classmethod
    def nothing(cls) -> Results:
        return cls({}, {}, {}, {})

    def add(self, name: str, value: Any) -> None:
        """Add a result of one of the kinds; raise TypeError for another kind."""
        if isinstance(value, str):
            self.texts[name] = value
        elif np.ndim(value) == 3 and np.shape(value)[2] == 3 and np.asarray(value).dtype == np.uint8:
            self.pictures[name] = np.asarray(value)
        else:
            self.numbers[name] = float(value)


def chosen_scores(
    entries: Sequence[str | Mapping[str, Any]], classes: int, allow: Sequence[str]
) -> dict[str, Score]:
    """Return the functions of `monitor.scores`, by path: an entry is a path, or has it as its ``_target_``.

    Which of two numbers is better an entry says by ``higher_is_better``, or the function itself. Raises
    UserError for a function that is not allowed, or does not take an entry's keywords.
    """
    functions: dict[str, Score] = {}
    for entry in entries:
        node = {"_target_": entry} if isinstance(entry, str) else entry
        path = str(node.get("_target_"))
        if path == PER_CLASS and len(node) == 1:
            if classes <= MOST_CLASSES:
                functions[path] = per_class
            continue
        if "." not in path:
            what = f"monitor.scores=[{path}]: expected PACKAGE.FUNCTION, or _target_ with keywords"
            raise not_valid(what, path, [PER_CLASS])
        if path in functions:
            raise UserError(f"monitor.scores: {path} is there twice; a function of your own can return both")
        function = find_target(path, "monitor.scores", type(None), allow)
        own = {key: value for key, value in node.items() if key != "higher_is_better"}
        keywords = keywords_of({"num_classes": classes, **own}, "monitor.scores", function, 2)
        said = node.get("higher_is_better", getattr(function, "higher_is_better", None))
        score: Any = partial(function, **keywords)
        score.higher_is_better = typed(bool | None, said, f"monitor.scores=[{path}]: higher_is_better")
        functions[path] = score
    return functions


def per_class(logits: Tensor, labels: Tensor, classes: Sequence[str]) -> dict[str, Any]:
    """Return the recall of each class that has images, in percent, their mean, and the confusion matrix.

    The matrix is a picture, and for few classes a text.
    """
    known = len(classes)
    width = known + 1  # a model may have outputs for other classes
    answers = logits.argmax(1).clamp(max=known)
    counts = torch.bincount(labels * width + answers, minlength=width * width).view(width, width)
    names = [*classes, "other"]
    if not counts[:, known].any():
        counts = counts[:known, :known]
        names.pop()
    images = counts.sum(1)
    recalls = 100 * counts.diagonal().double() / images
    results: dict[str, Any] = {"balanced": float(recalls[images > 0].mean())}
    for name, recall, count in zip(names, recalls.tolist(), images.tolist(), strict=True):
        if count:
            results[f"recall/{name}"] = recall
    results["confusion"] = pictures.confusion(counts)
    if len(names) <= MOST_PRINTED:
        results["by class"] = confusion_table(counts, names)
    return results


per_class.higher_is_better = True  # type: ignore[attr-defined]


def mistakes_of(
    logits: Tensor, labels: Tensor, images: Batches, classes: Sequence[str]
) -> dict[str, Picture]:
    """Return a picture of the worst mistakes, if any: images, each above its label, and the answer."""
    names = [*classes, "other"]  # a model may have outputs for other classes
    answers = logits.argmax(1).clamp(max=len(classes))
    wrong = (answers != labels).nonzero()[:, 0]
    # The worst is the one whose label got the least probability.
    order = logits.log_softmax(1)[wrong, labels[wrong]].argsort()
    worst = wrong[order[:MISTAKES]].tolist()
    captions = [f"{names[labels[image]]}\nas {names[answers[image]]}" for image in worst]
    return {"mistakes": pictures.grid(images[worst][0], captions)} if worst else {}


def confusion_table(counts: Tensor, names: Sequence[str]) -> str:
    """Return a confusion matrix as lines of text: a row per label, a column per answer."""
    short = [name if len(name) <= 12 else f"{name[:11]}…" for name in names]
    table = [["label", "images", "recall", *(f"as {name}" for name in short)]]
    for name, row in zip(short, counts.tolist(), strict=True):
        right = row[len(table) - 1]
        recall = f"{100 * right / sum(row):.2f} %" if sum(row) else "–"
        table.append([name, str(sum(row)), recall, *map(str, row)])
    return "\n".join(aligned(table))


def results_of(
    functions: Mapping[str, Score], logits: Tensor, labels: Tensor, classes: Sequence[str]
) -> Results:
    """Call the ``functions``, on rank 0, and give their numbers to all ranks. Collective.

    Raises UserError on every rank if a function fails, or returns something else.
    """
    results = Results.nothing()

    def call_all() -> list[dict[str, Any]]:
        for name, function in functions.items():
            try:
                _call(name, function, (logits, labels, classes), results)
            except Exception as error:  # a user's function raises anything
                raise UserError(f"monitor.scores=[{name}]: {reason_with_line(error)}") from error
        return [results.numbers, results.higher_is_better]

    numbers, directions = on_rank_0(call_all)
    return results._replace(numbers=numbers, higher_is_better=directions)


def _call(path: str, function: Score, arguments: tuple[Any, ...], results: Results) -> None:
    """Add to ``results`` what a function returns."""
    logits, labels, classes = arguments
    named_classes = {"classes": classes} if "classes" in inspect.signature(function).parameters else {}
    with torch.no_grad():
        returned = function(logits, labels, **named_classes)
    higher_is_better = getattr(function, "higher_is_better", None)
    named = returned if isinstance(returned, Mapping) else {path.rpartition(".")[2]: returned}
    for name, value in named.items():
        if name in (*TAKEN, *results.numbers, *results.pictures, *results.texts):
            raise ValueError(f"there is another score named {name}: choose another name")
        try:
            results.add(name, value)
        except (TypeError, ValueError):
            raise TypeError(
                f"{name} is a {type(value).__name__}, expected a number, a picture (uint8 [height, width, "
                "3]) or a text"
            ) from None
        if name in results.numbers and higher_is_better is not None:
            results.higher_is_better[name] = higher_is_better


def rehearse(functions: Mapping[str, Score], classes: Sequence[str]) -> Results:
    """Call the functions on random logits of two images per class, to learn their names early. Collective."""
    labels = torch.arange(2 * len(classes)) % len(classes)
    noise = torch.randn(len(labels), len(classes), generator=torch.Generator().manual_seed(0))
    return results_of(functions, noise + F.one_hot(labels, len(classes)), labels, classes)


class Gathering:
    """The logits and labels of all ranks, gathered on rank 0 batch by batch, in host memory."""

    def __init__(self) -> None:
        self._logits: list[Tensor] = []  # of rank 0: [ranks, batch, classes] each
        self._labels: list[Tensor] = []

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Gather a batch, padding included, of the same size on all ranks. Collective."""
        for own, parts in ((logits, self._logits), (labels, self._labels)):
            whole = _gathered(own.contiguous())
            if whole is not None:
                parts.append(whole)

    def in_order(self, images: int, virtual_ranks: int) -> tuple[Tensor, Tensor]:
        """Return logits and labels of rank 0 in the order of the images, without padding; others' are empty.

        Each rank evaluated its ``virtual_ranks`` one after the other, of V virtual ranks in all. Virtual
        rank v had the images v, v + V, v + 2 V, ….
        """
        if not self._logits:
            return torch.empty(0, 1), torch.empty(0, dtype=torch.int64)
        ordered = [_in_order(parts, virtual_ranks)[:images] for parts in (self._logits, self._labels)]
        return ordered[0], ordered[1]


def _gathered(own: Tensor) -> Tensor | None:
    """Return all ranks' tensors on rank 0, stacked in host memory; None on others. Collective."""
    world = comm.world_size()
    parts = [torch.empty_like(own) for _ in range(world)] if comm.rank() == 0 else None
    if world > 1:
        comm.gather(own, parts)
    else:
        parts = [own]
    return None if parts is None else torch.stack([part.cpu() for part in parts])


def _in_order(parts: Sequence[Tensor], virtual_ranks: int) -> Tensor:
    """Return [ranks, batch, …] of each batch as one tensor in the order of the images."""
    table = torch.stack([*parts]).unflatten(0, (virtual_ranks, -1))  # [virtual, batches, ranks, batch, …]
    # Image number j · V + v is the j-th of virtual rank v; those of one rank are consecutive.
    ordered: Tensor = table.movedim((1, 3, 2, 0), (0, 1, 2, 3)).flatten(0, 3)
    return ordered

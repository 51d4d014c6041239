"""What a training run does after its steps: a hook each. `saving.py` has the one that evaluates and saves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardtrain.job import pictures, tags
from shardtrain.job.evaluate import Evaluation
from shardtrain.monitor import Watch

if TYPE_CHECKING:
    from shardtrain.train.trainer import Trainer

SAMPLES = 16  # images of a micro-batch in the picture


class Hook:
    """Something that a `Trainer` does after each step or evaluation; subclasses override what they need.

    Every rank calls it, so it may call collectives, but on all ranks alike. What it raises ends the run.
    """

    def before_fit(self, trainer: Trainer) -> None:
        """Run before the first step of this process."""

    def after_step(self, trainer: Trainer, step: int, finite: bool) -> None:
        """Run after ``step``, with its gradients. Not ``finite``: these were not, and nothing was updated."""

    def after_evaluation(self, trainer: Trainer, step: int, evaluation: Evaluation) -> None:
        """Run after an evaluation of the validation images."""

    def after_fit(self, trainer: Trainer) -> None:
        """Run after the last step."""


class Samples(Hook):
    """A picture of the first images, as the model gets them."""

    def after_step(self, trainer: Trainer, step: int, finite: bool) -> None:
        batch = trainer.batch
        if step > trainer.job.first_step + 1 or batch is None or not trainer.monitor.writers:
            return
        feed = trainer.job.train
        captions = [pictures.caption(label, feed.classes) for label in batch.labels[:SAMPLES]]
        grid = pictures.grid(batch.images[:SAMPLES], feed.prepare.mean, feed.prepare.std, captions)
        trainer.monitor.picture(tags.SAMPLES, grid)


class Reports(Hook):
    """A report every `train.log_every` steps and after the last one, and profiles on request."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def after_step(self, trainer: Trainer, step: int, finite: bool) -> None:
        trainer.monitor.step(step)
        report = None
        if step % trainer.config.train.log_every == 0 or step == trainer.job.steps:
            report = trainer.metrics.report(step, trainer.norm, self._watch.requested())
            trainer.monitor.log(step, report.scalars)
        self._watch.step_done(step, report)

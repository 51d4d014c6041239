"""The hooks that report steps and picture the first images. `saving.py` has the one that saves."""

from __future__ import annotations

from shardtrain.data import Prepare
from shardtrain.job import pictures, tags
from shardtrain.monitor import Watch
from shardtrain.train.steps import BaseTrainer, Hook

SAMPLES = 16  # images of a micro-batch in the picture


class Samples(Hook):
    """A picture of the first images, as the model gets them."""

    def after_step(self, trainer: BaseTrainer, step: int, finite: bool) -> None:
        batch = trainer.batch
        prepare = trainer.job.train.prepare
        is_first = step == trainer.job.first_step + 1
        if not is_first or batch is None or not trainer.monitor.writers or not isinstance(prepare, Prepare):
            return
        classes = trainer.job.scoring.classes
        captions = [pictures.caption(label, classes) for label in batch.labels[:SAMPLES]]
        pixels = batch.images[:SAMPLES].float() * prepare.std + prepare.mean
        trainer.monitor.picture(tags.SAMPLES, pictures.grid(pixels, captions))


class Reports(Hook):
    """A report every `train.log_every` steps and after the last one, and the profile of some steps."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def after_step(self, trainer: BaseTrainer, step: int, finite: bool) -> None:
        trainer.monitor.step(step)
        report = None
        every = trainer.config.train.log_every or max(1, min(10, trainer.job.steps // 10))
        if step % every == 0 or step == trainer.job.steps:
            report = trainer.metrics.report(step, trainer.norm)
            trainer.monitor.log(step, report.scalars)
        self._watch.step_done(step, report)

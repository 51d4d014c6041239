"""Compare the settings, images and learning rate of a run with those of the checkpoint that it continues.

Its own file, since `resume.py` is about files and locks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from shardtrain.checkpoint.loading import Opened
from shardtrain.job.build import Job, lr_factor
from shardtrain.job.config import Config, Sched
from shardtrain.job.errors import UserError, reading
from shardtrain.job.format import first_of
from shardtrain.job.record import brought_up_to_date
from shardtrain.job.saved import Change, changed_keys
from shardtrain.job.schema import Mark, typed

RATE_TOLERANCE = 0.1  # relative difference of learning rates that needs no warning


def is_path(resume: str) -> bool:
    return resume not in ("auto", "none")


def require_same_run(opened: Opened, config: Config, job: Job) -> None:
    """Raise UserError for a checkpoint that the command's settings do not continue.

    `resume=PATH` continues with other settings, but not with other images, nor without a step to train.
    """
    step = job.first_step
    facts = opened.manifest.facts
    with reading("resume: no run has saved this", "resume=none starts anew"):
        images = facts["position"]["images"]
        saved = brought_up_to_date(facts["config"])
    if step > job.steps:
        raise UserError(
            f"resume: the checkpoint is of step {step}, and this run would end at step {job.steps}; raise "
            "train.epochs or train.max_steps, choose another run.name, or resume=none starts anew"
        )
    changes = changed_keys(saved, asdict(config))
    if images != job.train.sampler.images:
        changes.append(Change("images", images, job.train.sampler.images, Mark.IMAGES))
    changes += _moved_images(facts["position"], job)
    strict = step == job.steps or not is_path(config.resume)
    decisive = [each for each in changes if Mark.IMAGES in each.mark or (strict and each.mark == Mark.NONE)]
    if decisive:
        shown = [each._replace(key=each.key.removesuffix(".name")) for each in decisive]
        texts = [f"{each.key}={each.before}, this one has {each.now}" for each in shown]
        why = ""
        way_out = f"; resume={opened.path} continues it with other settings"
        if any(Mark.IMAGES in each.mark for each in decisive):
            why = ", so its place among the images means nothing here"
            way_out = ""
        elif step == job.steps:
            why = ", and it has no step left to train"
            way_out = ""
        raise UserError(
            f"resume: the checkpoint was saved by a run with {first_of(texts)}{why}; choose another "
            f"run.name, or resume=none starts anew{way_out}"
        )


def validation_warnings(opened: Opened, job: Job) -> list[str]:
    """Return a warning if the validation images differ from those of the checkpoint."""
    others = _other_counts(opened.manifest.facts.get("position", {}), job, "val")
    if not others:
        return []
    said = first_of([f"{name} {old} → {new}" for name, old, new in others])
    return [
        f"warning: the validation images have changed ({said}): scores from here on cannot be compared with "
        "earlier ones, nor with the best"
    ]


def _moved_images(position: Mapping[str, Any], job: Job) -> list[Change]:
    """Return how the labels of the training images differ from those in a checkpoint's ``position``."""
    moved = [
        Change(f"images of class {name}", before, now, Mark.NONE)
        for name, before, now in _other_counts(position, job, "train")
    ]
    saved = position.get("labels", "")
    if not moved and saved and job.labels_digest and saved != job.labels_digest:
        moved.append(Change("labels of the images (their digest)", saved, job.labels_digest, Mark.NONE))
    return moved


def _other_counts(position: Mapping[str, Any], job: Job, part: str) -> list[tuple[str, int, int]]:
    """Compare the numbers of images per class in ``part`` with those saved in ``position``.

    Return name, saved number and number now of each class in which they differ.
    """
    before = position.get("counts", {}).get(part, {})
    now = job.class_counts.get(part, {})
    if not before or not now:
        return []
    names = {**before, **now}
    counts = [(name, before.get(name, 0), now.get(name, 0)) for name in names]
    return [(name, saved, current) for name, saved, current in counts if saved != current]


def rate_warnings(opened: Opened, job: Job, config: Config) -> list[str]:
    """Return a warning if another length of the run makes the learning rate jump."""
    step = job.first_step
    saved = opened.manifest.facts.get("config", {})
    with contextlib.suppress(UserError, KeyError):  # a checkpoint of another version
        train = saved["train"]
        sched: Any = typed(Sched, saved["sched"], "sched")
        if sched != config.sched or saved["optim"]["lr"] != config.optim.lr:
            return []
        epochs = train["epochs"] * job.steps_per_epoch
        usual = lr_factor(sched, min(epochs, train["max_steps"] or epochs), job.steps_per_epoch)
        now = lr_factor(sched, job.steps, job.steps_per_epoch)
        if step == 0 or math.isclose(usual(step), now(step), rel_tol=RATE_TOLERANCE):
            return []
        keys = ("epochs", "max_steps")
        lengths = [(key, train[key], getattr(config.train, key)) for key in keys]
        changed = [
            f"train.{key}={old or 'null'} → {new or 'null'}" for key, old, new in lengths if old != new
        ]
        last = config.optim.lr * usual(step - 1)
        return [
            f"warning: {', '.join(changed)}: the learning rate jumps from {last:.3g} in step {step} to "
            f"{config.optim.lr * now(step):.3g} in step {step + 1}, since sched={sched.name} ends at step "
            f"{job.steps} now; resume={opened.path} run.name=NEW sched=constant sched.warmup_epochs=0 "
            f"optim.lr={last:.3g} goes on at the last rate"
        ]
    return []

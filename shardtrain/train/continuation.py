"""The settings, images and learning rate of a run, compared with those of the checkpoint it continues."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardtrain.checkpoint.loading import Opened
from shardtrain.checkpoint.manifest import NAME
from shardtrain.config.command import CONFIG, OF_THE_COMMAND, require_version
from shardtrain.config.config import Config
from shardtrain.config.errors import UserError, program_configs, reading
from shardtrain.config.format import first_of
from shardtrain.config.marks import Change, changed_keys
from shardtrain.config.schema import Mark
from shardtrain.config.target import GIVEN, given_in_python
from shardtrain.job.build import Job


def is_path(resume: str) -> bool:
    return resume not in ("auto", "none")


def require_same_run(
    opened: Opened, config: Config, job: Job, words: Mapping[str, str], run: Path | None
) -> list[str]:
    """Return a table of what the command changes in the run that it continues.

    Raises UserError for a checkpoint that it does not continue: a key of the run that it leaves out, or names
    with another value although that decides the images of a step, or without `resume=PATH` what is learned.
    `resume=PATH` continues with other settings, but not with other images, nor without a step to train.

    words: the command's, by what they name. run: the directory of the run; None if the checkpoint is another
    run's.
    """
    step = job.first_step
    facts = opened.manifest.facts
    with reading("resume: no run has saved this", "resume=none starts anew"):
        images = facts["position"]["images"]
        saved = facts["config"]
    require_version(saved.get("version"), f"resume: {opened.path}")
    if saved["model"].get("_target_") == GIVEN != config.model.get("_target_"):
        raise given_in_python(f"resume: {opened.path}")
    changes = changed_keys(saved, asdict(config))
    named = named_of(changes, words)
    if left_out := [each for each in changes if each not in named]:
        base = (run or opened.path.parents[1]) / CONFIG
        raise forgotten(left_out, named, words, base if base.is_file() else opened.path / NAME)
    if step > job.steps:
        raise UserError(
            f"resume: the checkpoint is of step {step}, and this run would end at step {job.steps}; raise "
            "train.epochs or train.max_steps, choose another run.name, or resume=none starts anew"
        )
    other_images = _other_labels(facts["position"], job, "train")
    if images != job.train.sampler.images:
        other_images.insert(0, Change("images", images, job.train.sampler.images, Mark.IMAGES))
    strict = step == job.steps or not is_path(config.resume)
    if decisive := refused([*named, *other_images], strict=strict):
        raise _decided(decisive, opened.path, is_over=step == job.steps)
    width = max((len(each.key) for each in named), default=0)
    return [f"changed   {each.key:<{width}}  {each.before} → {each.now}" for each in named]


def refused(changes: Sequence[Change], *, strict: bool) -> list[Change]:
    """Return the changes that no command may make. ``strict``: what is learned may not change either."""
    return [each for each in changes if Mark.IMAGES in each.mark or (strict and each.mark == Mark.NONE)]


def named_of(changes: Sequence[Change], words: Mapping[str, str]) -> list[Change]:
    """Return the changes that ``words`` name. A group names its keys if another file of it is chosen."""
    keys = {each.key for each in changes}
    by_target = ("model", "augment")  # whose files are told apart by what they build
    same = {
        group
        for group in program_configs().GROUPS
        if f"{group}.name" not in keys and not (group in by_target and f"{group}._target_" in keys)
    }
    return [each for each in changes if any(map(each.is_named_by, words.keys() - same))]


def _decided(changes: Sequence[Change], path: Path, *, is_over: bool) -> UserError:
    """Return the error for ``changes`` that may not be made in the run of the checkpoint in ``path``."""
    why = ""
    way_out = f"; resume={path} continues it with other settings"
    if any(Mark.IMAGES in each.mark for each in changes):
        why = ", so its place among the images means nothing here"
        way_out = ""
    elif is_over:
        why = ", and it has no step left to train"
        way_out = ""
    texts = first_of([each.in_words() for each in changes])
    return UserError(
        f"resume: the checkpoint was saved by a run with {texts}{why}; choose another run.name, or "
        f"resume=none starts anew{way_out}"
    )


def forgotten(
    left_out: Sequence[Change], named: Sequence[Change], words: Mapping[str, str], base: Path
) -> UserError:
    """Return the error for keys that a command leaves out, with the line that begins with the run's."""
    line = [f"config={base}"]
    for name, word in words.items():
        if name.partition(".")[0] in OF_THE_COMMAND or any(each.is_named_by(name) for each in named):
            line.append(word)
    return UserError(
        f"resume: the run has {first_of([each.in_words() for each in left_out])}, which the command does not "
        f"name; this continues it: {shlex.join(line)}"
    )


def validation_warnings(opened: Opened, job: Job) -> list[str]:
    """Return a warning if the validation images differ from those of the checkpoint."""
    return [
        f"warning: the validation data have changed ({change.in_words()}): scores from here on cannot be "
        "compared with earlier ones, nor with the best"
        for change in _other_labels(opened.manifest.facts["position"], job, "val")
    ]


def _other_labels(position: Mapping[str, Any], job: Job, part: str) -> list[Change]:
    """Return the change of the labels of ``part`` since a checkpoint's ``position``, where both are known."""
    before = position["labels"].get(part)
    now = job.labels.get(part)
    if not before or not now or before == now:
        return []
    return [Change(f"{part} labels (their digest)", before, now, Mark.NONE)]

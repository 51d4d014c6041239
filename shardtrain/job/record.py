"""Find the record of a run that a command continues, scores or starts from: the run's `config.yaml`.

The command's configuration is then composed from that file, and its words are laid over it, key by key
(`job/hydra_app.py`). No torch here, since `--cfg job` shows the result, too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from shardtrain.job.errors import UserError, path_of, plain_file, reading

CONFIG = "config.yaml"
# What belongs to a command and its process, not to the run.
OF_THE_COMMAND = ("allow", "config", "resume", "dry_run", "eval_only", "run", "device", "threads")
SECTIONS = ("train", "model", "data", "augment", "optim", "sched")
# How images are prepared, and which classes they have.
PREPARED = ("classes", "mean", "std", "image_size", "eval_size", "resize", "interpolation")
STEP = re.compile(r"step-\d{8,}")


class Record(NamedTuple):
    """Hold a run's configuration, nested, as the run has recorded it in the file ``source``."""

    values: Mapping[str, Any]
    source: Path
    evaluates: bool = False  # whether the command scores the run


def record_of(words: Sequence[str]) -> Record | None:
    """Return the record from which the configuration of a command is composed; None for a new run.

    In this order: the file of `config=FILE`, the run or checkpoint of `resume=PATH` in an evaluation, the run
    of this name or directory if it has checkpoints, and that of `resume=PATH`. Raises UserError for a file
    that is no record.
    """
    values = {word.partition("=")[0].lstrip("+"): word.partition("=")[2] for word in words}
    resume = values.get("resume", "auto").strip("'\"")
    evaluates = values.get("eval_only", "").lower() == "true"
    if "config" in values:
        return read_record(path_of("config", values["config"]), f"config={values['config']}")
    files = []
    if resume not in ("none", "auto"):
        files.append(_file_of(path_of("resume", resume)))
    if resume != "none" and (own := _own_directory(values)) is not None and _has_checkpoints(own):
        files.insert(len(files) if evaluates else 0, own / CONFIG)
    present = next((file for file in files if file is not None and os.path.isfile(file)), None)
    if present is None:
        return None
    record = read_record(present, f"the run's record {present}")
    return record and record._replace(evaluates=evaluates)


def read_record(path: Path, where: str) -> Record | None:
    """Return the record in ``path``, a `config.yaml` or a manifest; None for a checkpoint of no run."""
    with reading(where, f"expected the {CONFIG} of a run"):
        text = plain_file(path).read_text(encoding="utf-8")
        if path.suffix == ".json":
            values = json.loads(text)["facts"].get("config")
            if values is None:
                return None
        else:
            values = OmegaConf.to_container(OmegaConf.create(text))
        sections = [values.get(name) for name in SECTIONS] if isinstance(values, dict) else [None]
        if not all(isinstance(section, dict) for section in sections):
            raise ValueError(f"expected the sections {', '.join(SECTIONS)}")
    own = {key: value for key, value in values.items() if key not in OF_THE_COMMAND}
    return Record(brought_up_to_date(own), path)


def brought_up_to_date(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's values with what keys of 0.2.0 and before say in the words of this version."""
    own = dict(values)
    data = dict(own["data"])
    if "split" not in data:  # tables were split by seed, other images by one permutation
        data["split"] = own.get("seed", 0) if data.get("name") == "csv" else None
    if "train_images" in data:
        data["limit"] = data.pop("train_images")
    own["data"] = data
    monitor = dict(own.get("monitor") or {})
    if monitor.pop("tensorboard", False):
        monitor["writers"] = ["tensorboard", *monitor.get("writers", [])]
    mode = own["train"].get("best_mode")
    if mode is not None:
        scores = monitor.get("scores", [])
        monitor["scores"] = [_with_direction(entry, higher_is_better=mode == "max") for entry in scores]
    return {**own, "monitor": monitor}


def _with_direction(entry: Any, *, higher_is_better: bool) -> Any:
    """Return an entry of `monitor.scores` which says what is better, unless it is the program's own."""
    if entry == "per_class":
        return entry
    node = {"_target_": entry} if isinstance(entry, str) else entry
    return {**node, "higher_is_better": higher_is_better}


def laid_over(
    record: Mapping[str, Any], fresh: DictConfig, plain: DictConfig, chosen: Sequence[str], *, evaluates: bool
) -> dict[str, Any]:
    """Return ``record`` with what choices of groups, recipes and `debug` change.

    fresh: composed of the command's choices. plain: of the same groups' files, without a recipe. chosen: the
    sections whose file the command names. Where that is another file than the record's, the section is the
    file's. Otherwise only the keys that a recipe or `debug` sets are. evaluates: another data set's images
    are prepared as the run's were.
    """
    fresh_values = as_values(fresh)
    plain_values = as_values(plain)
    values = {key: value for key, value in record.items() if key not in OF_THE_COMMAND}
    for name, section in fresh_values.items():
        before = record.get(name)
        if name in OF_THE_COMMAND or before is None or (name in chosen and _differ(name, section, before)):
            values[name] = section
            if name == "data" and isinstance(before, dict) and evaluates:
                values[name] = _with_record_of_images(section, before)
        elif isinstance(section, dict) and isinstance(before, dict):
            values[name] = _with_changes(before, section, plain_values.get(name, {}))
        elif section != plain_values.get(name):
            values[name] = section
    loss = fresh_values["train"]["loss"]
    if "train.loss" in chosen and _differ("train.loss", loss, values["train"]["loss"]):
        values["train"] = {**values["train"], "loss": loss}
    return values


def completed(record: Mapping[str, Any], usual: DictConfig, gone: Collection[str]) -> dict[str, Any]:
    """Return an older run's record without keys that have gone, and with the usual values of new ones.

    usual: composed of the record's choices.
    """
    values = {}
    for name, section in {**as_values(usual), **record}.items():
        own = record.get(name, section)
        if isinstance(own, dict):
            own = {key: value for key, value in own.items() if f"{name}.{key}" not in gone}
        # The keys of these are the parameters of a function of the run's own choice.
        if isinstance(own, dict) and name not in ("model", "augment", "optim"):
            own = {**(as_values(usual).get(name) or {}), **own}
        values[name] = own
    return values


def as_values(config: DictConfig) -> dict[str, Any]:
    """Return nested values, whose references to other keys stay as they are written."""
    values: dict[str, Any] = OmegaConf.to_container(config, resolve=False)  # type: ignore[assignment]
    return values


def _with_changes(before: Mapping[str, Any], section: Mapping[str, Any], plain: Any) -> dict[str, Any]:
    usual = plain if isinstance(plain, dict) else {}
    return {**before, **{key: value for key, value in section.items() if usual.get(key) != value}}


def _with_record_of_images(section: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return another data set's section with how the run's images were prepared, where it has such keys."""
    own = {key: before[key] for key in PREPARED if key in before and key in section}
    return {**section, **own}


def _differ(name: str, section: Any, before: Any) -> bool:
    """Return whether two sections are of different files."""
    if name == "augment" or not (isinstance(section, dict) and isinstance(before, dict)):
        return True  # a record does not say which file an augmentation is of
    return any(section.get(key) != before.get(key) for key in ("name", "_target_"))


def _own_directory(values: Mapping[str, str]) -> Path | None:
    """Return the run directory that the words name."""
    name = values.get("run.name", "").strip("'\"")
    if values.get("run.dir"):
        return path_of("run.dir", values["run.dir"].strip("'\""))
    return path_of("run.name", f"outputs/{name}") if name and name != "null" else None


def _has_checkpoints(run: Path) -> bool:
    folder = run / "checkpoints"
    with reading(f"the run {run}", "expected checkpoints that can be read", OSError):
        return folder.is_dir() and any(STEP.fullmatch(name) for name in os.listdir(folder))


def _file_of(path: Path) -> Path | None:
    """Return the file that has the record of ``path``: a run, one of its checkpoints, or `RUN/best`."""
    candidates = []
    with reading(f"the run {path}", "expected one that can be read", OSError):
        folder = path.parent if path.name == "best" and not path.is_dir() else path
        candidates = [folder / name for name in (CONFIG, "manifest.json")]
        return next((file for file in candidates if file.is_file()), None)


def require_record(run: str) -> Path:
    """Return ``run`` as a path. Raises UserError unless it is a run with a record, or a checkpoint of one."""
    path = path_of("run", run)
    if _file_of(path) is None:
        raise UserError(f"run={run}: neither a run with checkpoints nor a checkpoint of a run")
    return path

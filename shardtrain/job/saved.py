"""Compare a configuration with another host's or a checkpoint's, by the marks of its keys."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from shardtrain.job.config import Config
from shardtrain.job.hydra_app import CHOSEN, hints
from shardtrain.job.schema import Mark, flat, marks_of, typed

MARKS = marks_of(Config)


def marked_values(config: Mapping[str, Any]) -> dict[str, tuple[Any, Mark]]:
    """Return the value and the marks of each key of ``config``, nested as by `asdict` or from a checkpoint.

    Keys that a user may choose have their section's marks. Keys that are no more are left out.
    """
    values = {}
    for key, value in flat(config).items():
        section = next((known for known in MARKS if f"{key}.".startswith(f"{known}.")), None)
        if section is not None:
            values[key.replace(".keywords.", ".")] = value, MARKS[section]
    return values


class Change(NamedTuple):
    """Hold a key's value in a checkpoint's configuration, and its value now."""

    key: str
    before: Any
    now: Any
    mark: Mark


def changed_keys(saved: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[Change]:
    """Yield what differs between two configurations, nested as by `asdict`.

    A key that only one has is left out: another version has it, or another choice from its group, which has
    another name. But of a callable's own keywords each counts, such as a model's, or an augmentation's. Where
    one has no such key, its value is the default of the callable's parameter.
    """
    before = marked_values(saved)
    now = marked_values(config)
    for key, (_, mark) in {**before, **now}.items():
        default = None if key in MARKS else _default(config, key)
        old, new = (values.get(key, (default,))[0] for values in (before, now))
        if old != new and (key not in MARKS or (key in before and key in now)):
            yield Change(key, old, new, mark)


def _default(config: Mapping[str, Any], key: str) -> Any:
    """Return the default of a callable's parameter, for a callable that has been imported; else None."""
    section, _, name = key.rpartition(".")
    node: Any = config
    for part in section.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    path = str(node.get("_target_")) if isinstance(node, Mapping) else ""
    module, _, function = path.rpartition(".")
    target = getattr(sys.modules.get(module), function, None)
    parameter = inspect.signature(target).parameters.get(name) if callable(target) else None
    return None if parameter is None or parameter.default is parameter.empty else parameter.default


def as_saved(config: Config, saved: Mapping[str, Any], overrides: Sequence[str]) -> Config:
    """Return ``config`` with a checkpoint's settings in place of all but those that ``overrides`` name.

    Keys that may change are the command's, such as the number of replicas. Keys that have gone are left out.
    """
    gone = hints("gone").keys() - {f"{group}.name" for group in CHOSEN}  # which the group's choice sets now
    given = {text.partition("=")[0].lstrip("+~") for text in overrides}
    sections = asdict(config)
    for section, ours in sections.items():
        before = saved.get(section)
        if section in given or not isinstance(ours, dict) or not isinstance(before, dict):
            continue
        alike = all(ours.get(key) == before.get(key) for key in ("name", "_target_"))
        kept = {key: value for key, value in ours.items() if f"{section}.{key}" in given}
        fixed = {
            key: value
            for key, value in before.items()
            if f"{section}.{key}" not in gone
            and not (alike and Mark.CHANGES in MARKS.get(f"{section}.{key}", Mark.NONE))
        }
        sections[section] = {**(ours if alike else {}), **fixed, **kept}
    completed: Config = typed(Config, sections, "")
    return completed

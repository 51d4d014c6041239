"""Compare a configuration with another host's or a checkpoint's, by the marks of its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from shardtrain.job.config import Config
from shardtrain.job.schema import Mark, flat, marks_of

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


def changed_keys(saved: Mapping[str, Any], config: Mapping[str, Any]) -> list[Change]:
    """Return the keys whose values in a checkpoint's configuration and in ``config`` differ; both are nested.

    A configuration that continues a run is composed from the run's record, so both have the same keys. A key
    of the program that only one has belongs to another version, or to another choice from a group. It does
    not count. A keyword of a callable, such as a model, always counts.
    """
    before = marked_values(saved)
    now = marked_values(config)
    changes = []
    for key, (_, mark) in {**before, **now}.items():
        old = before.get(key, (None, mark))[0]
        new = now.get(key, (None, mark))[0]
        is_in_both = key in before and key in now
        if old != new and (is_in_both or key not in MARKS):
            changes.append(Change(key, old, new, mark))
    return changes

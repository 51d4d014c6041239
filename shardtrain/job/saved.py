"""Compare a configuration with another host's or a checkpoint's, by the marks of its keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def changed_keys(saved: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[Change]:
    """Yield what differs between a checkpoint's configuration and one, both nested as by `asdict`.

    One that continues a run is composed from the run's record, so its keys are the same. A key of the program
    that only one has is another version's, or belongs to a choice from a group which has another name. But of
    a callable's keywords, such as a model's, each counts.
    """
    before = marked_values(saved)
    now = marked_values(config)
    for key, (_, mark) in {**before, **now}.items():
        old, new = (values.get(key, (None,))[0] for values in (before, now))
        if old != new and (key not in MARKS or (key in before and key in now)):
            yield Change(key, old, new, mark)

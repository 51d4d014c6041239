"""The comparison of a configuration with another host's or a checkpoint's, by what each key's mark allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from shardtrain import __version__
from shardtrain.config.config import Config
from shardtrain.config.schema import Mark, flat, marks_of

MARKS = marks_of(Config)


def record_of(config: Config) -> dict[str, Any]:
    """Return what a run's `config.yaml` and its checkpoints hold of ``config``."""
    return {"version": __version__, **asdict(config)}


def marked_values(config: Mapping[str, Any]) -> dict[str, tuple[Any, Mark]]:
    """Return the value and the marks of each key of ``config``, nested as by `asdict` or from a checkpoint.

    Keys that a user may choose have their section's marks.
    """
    values = {}
    for key, value in flat(config).items():
        section = next((known for known in MARKS if f"{key}.".startswith(f"{known}.")), None)
        if section is not None:
            values[key.replace(".keywords.", ".")] = value, MARKS[section]
    return values


class Change(NamedTuple):
    """A key's value in a checkpoint's configuration, and its value now."""

    key: str
    before: Any
    now: Any
    mark: Mark

    def in_words(self) -> str:
        """Return the key as the command line has it, and both values."""
        return f"{self.key.removesuffix('.name')}={self.before}, this one has {self.now}"

    def is_named_by(self, name: str) -> bool:
        """Return whether ``name``, a key or a group, names the key; `""` names all."""
        return not name or f"{self.key}.".startswith(f"{name}.")


def changed_keys(saved: Mapping[str, Any], config: Mapping[str, Any]) -> list[Change]:
    """Return the keys whose values in a checkpoint's configuration and in ``config`` differ; both are nested.

    What belongs to the command does not count. A key of the program that only one has belongs to another
    choice from a group, whose name differs then; a keyword of a callable, such as a model, always counts.
    """
    before = marked_values(saved)
    now = marked_values(config)
    changes = []
    for key, (_, mark) in {**before, **now}.items():
        old = before.get(key, (None, mark))[0]
        new = now.get(key, (None, mark))[0]
        is_in_both = key in before and key in now
        if old != new and (is_in_both or key not in MARKS) and Mark.COMMAND not in mark:
            changes.append(Change(key, old, new, mark))
    return changes

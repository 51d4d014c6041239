"""The conversion of what Hydra has composed to frozen dataclasses.

A field is a `key`: its default, its range (`at_least`, `above`, `at_most`, `below`, `choices`) and its
`mark`; the comment above it is its help. A section with the mark `group` is chosen from several. If its type
is a union of dataclasses, the field ``name`` says which one it is. Conditions between fields are checked in
``__post_init__``. Each message names the key as the user would write it on the command line.
"""

from __future__ import annotations

import enum
import inspect
import math
import operator
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, field, fields, is_dataclass
from types import MappingProxyType, NoneType
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from shardtrain.config.errors import UnknownKey, UserError, not_valid

Frozen = TypeVar("Frozen")

BOUNDS = {
    "at_least": (operator.ge, "at least"),
    "above": (operator.gt, "more than"),
    "at_most": (operator.le, "at most"),
    "below": (operator.lt, "less than"),
}
FIELD = re.compile(r"    (\w+): ")  # a line of a dataclass
MANDATORY = "???"  # Hydra's value of a key that has to be given
OF_ONES_OWN = "a file of your own has the one it changes in its defaults list"
MOST_INT = 1 << 63  # torch's integers are below this
DESCRIPTIONS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


class Mark(enum.Flag):
    """What is special about a key, or about all keys of a section.

    Without a mark all hosts must have the same value, a run continues only with the value that it began with,
    unless the command names the checkpoint (`resume=PATH`), and TensorBoard shows it as a hyperparameter.
    """

    NONE = 0
    PER_HOST = enum.auto()  # may differ between hosts, such as a path
    IMAGES = enum.auto()  # decides which images a step has, so no run can continue with another value
    CHANGES = enum.auto()  # any value can continue a run
    COMMAND = enum.auto()  # belongs to a command, not to the run that it continues
    HIDDEN = enum.auto()  # no hyperparameter


def key(default: Any = MISSING, **demands: Any) -> Any:
    """Declare a key, with its ``default``, its range and its mark; without a default it has to be given."""
    return field(default=default, metadata=demands)


def kinds_of(hint: Any) -> list[Any]:
    """Return the dataclasses of ``hint``, one or a union of them; none for other types."""
    return [kind for kind in typing.get_args(hint) or (hint,) if is_dataclass(kind)]


def defaults_of(cls: Any) -> dict[str, Any]:
    """Return the default values of a dataclass, as Hydra has them; without those of its groups."""
    values: dict[str, Any] = {}
    hints = typing.get_type_hints(cls)
    for entry in fields(cls):
        if kinds := kinds_of(hints[entry.name]):
            default: Any = defaults_of(kinds[0])
        else:
            default = MANDATORY if entry.default is MISSING else entry.default
        if not {"group", "others"} & {*entry.metadata}:
            values[entry.name] = default
    return values


def choices_of(kinds: Iterable[Any]) -> dict[str, Any]:
    """Return the dataclass of each choice from a group; a group without choices has `default` alone."""
    choices: dict[str, Any] = {}
    for kind in kinds:
        names = [entry.metadata["choices"] for entry in fields(kind) if "chosen" in entry.metadata]
        choices |= dict.fromkeys(names[0] if names else ["default"], kind)
    return choices


def comments_of(cls: Any, prefix: str = "") -> dict[str, str]:
    """Return the comment above each key of a dataclass, by full key, those of its sections included."""
    comments: dict[str, str] = {}
    for part in reversed(cls.__mro__[:-1]):
        above: list[str] = []
        for line in inspect.getsource(part).splitlines():
            name = FIELD.match(line)
            if name and above:
                comments[prefix + name[1]] = " ".join(above)
            above = [*above, line.strip("# ")] if line.startswith("    # ") else []
    hints = typing.get_type_hints(cls)
    for entry in fields(cls):
        for kind in kinds_of(hints[entry.name]) if "group" not in entry.metadata else ():
            comments |= comments_of(kind, f"{prefix}{entry.name}.")
    return comments


def marks_of(hint: Any, key: str = "", mark: Mark = Mark.NONE) -> dict[str, Mark]:
    """Return the marks of every key of ``hint``, a dataclass or a union of them, its sections' included."""
    kinds = kinds_of(hint)
    marks = {} if kinds else {key: mark}
    for kind in kinds:
        hints = typing.get_type_hints(kind)
        for entry in fields(kind):
            name = f"{key}.{entry.name}".lstrip(".")
            marks |= marks_of(hints[entry.name], name, mark | entry.metadata.get("mark", Mark.NONE))
    return marks


def flat(values: Any, key: str = "") -> dict[str, Any]:
    """Return the values of nested groups by full key, as JSON holds them."""
    if not isinstance(values, Mapping):
        return {key: list(values) if isinstance(values, tuple) else values}
    result: dict[str, Any] = {}
    for name, value in values.items():
        result |= flat(value, f"{key}.{name}".lstrip("."))
    return result


def checked(raw: DictConfig, cls: type[Frozen]) -> Frozen:
    """Return ``raw`` as the frozen dataclass ``cls``. Raises UserError for wrong names, types and ranges."""
    try:
        values = OmegaConf.to_container(raw, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    config: Frozen = typed(cls, values, "")
    return config


def typed(hint: Any, value: Any, key: str, demands: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return ``value`` as the type ``hint``. Raises UserError, naming ``key``.

    ``demands``: a field's metadata. For a tuple they hold for each item.
    """
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and NoneType in kinds:
        return None
    kind = _kind_of(tuple(each for each in kinds if each is not NoneType), value, key)
    if is_dataclass(kind) and isinstance(value, dict):
        return _section(kind, value, key)
    if typing.get_origin(kind) is tuple:
        return tuple(typed(typing.get_args(kind)[0], item, key, demands) for item in _items(kind, value, key))
    value = _scalar(kind, value, key)
    _require_demands(value, key, demands)
    return value


def _kind_of(kinds: tuple[Any, ...], value: Any, key: str) -> Any:
    """Return the one of ``kinds`` that ``value`` is to be: a dataclass by name, else by its type."""
    if all(is_dataclass(each) for each in kinds[1:]):
        return kinds[0] if len(kinds) == 1 else _variant(kinds, value, key)
    return kinds[-1] if isinstance(value, dict | list | tuple) else kinds[0]


def _items(kind: Any, value: Any, key: str) -> list[Any] | tuple[Any, ...]:
    """Return ``value`` as a list for ``kind``: (float, float) or (float, ...)."""
    items = typing.get_args(kind)
    any_length = Ellipsis in items
    if isinstance(value, list | tuple) and (any_length or len(value) == len(items)):
        return value
    lists = f"a list, as in {key}=[a,b]" if any_length else f"a list of {len(items)} numbers"
    raise UserError(f"{key}={_show(value)}: expected {lists}")


def _scalar(kind: Any, value: Any, key: str) -> Any:
    """Return ``value`` as a number, a text or a dictionary; a whole number may be a float or a text."""
    found = f"{key}={_show(value)}"
    if type(value) is int and kind in (float, int) and abs(value) >= MOST_INT:
        raise UserError(f"{found[:80]}: expected a number below 2^63")
    if type(value) is int and kind in (float, str):
        value = kind(value)
    if type(value) is not (typing.get_origin(kind) or kind):
        hint = f", quoted: '{key}=\"{value}\"'" if kind is str and isinstance(value, float | bool) else ""
        if isinstance(value, str):
            hint = ", not a text; ${oc.decode:…} reads what a text says"
        raise UserError(f"{found}: expected {DESCRIPTIONS.get(kind, 'a group of keys')}{hint}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{found}: expected a finite number")
    return value


def _require_demands(value: Any, key: str, demands: Mapping[str, Any]) -> None:
    """Raise UserError unless ``value`` is within the bounds, and among the choices, that a field declares."""
    if isinstance(value, str):
        if value not in demands.get("choices", [value]):
            raise not_valid(f"{key}={value}", value, demands["choices"])
        return
    for name, (holds, words) in BOUNDS.items():
        if name in demands and not holds(value, demands[name]):
            raise UserError(f"{key}={value}: expected {words} {demands[name]}")


def _section(cls: Any, raw: Mapping[str, Any], path: str) -> Any:
    """Return one dataclass for one mapping. ``path`` is `""` for the whole configuration."""
    prefix = path and f"{path}."
    entries = {entry.name: entry for entry in fields(cls)}
    others = next((name for name, entry in entries.items() if "others" in entry.metadata), None)
    if others is not None:
        unknown = {key: raw[key] for key in raw if key not in entries}
        raw = {**raw, others: {**typed(dict, raw.get(others, {}), f"{prefix}{others}"), **unknown}}
    for key in raw:
        if key not in entries and others is None:
            known = [name for name, entry in entries.items() if "chosen" not in entry.metadata]
            known += getattr(cls, "KEYLESS_GROUPS", ())
            error = not_valid(f"unknown key {prefix}{key}", key, known, prefix)
            raise UnknownKey(f"{prefix}{key}", error)
    hints = typing.get_type_hints(cls)
    values = {}
    for key, entry in entries.items():
        value = raw.get(key, entry.default)
        if value is MISSING or value == MANDATORY:
            value = "PACKAGE.NAME" if key == "_target_" else "VALUE"
            raise UserError(f"{prefix}{key} is missing: add {prefix}{key}={value}")
        values[entry.name] = typed(hints[entry.name], value, prefix + key, entry.metadata)
    return cls(**values)


def _variant(kinds: Iterable[Any], section: Any, key: str) -> Any:
    """Return the dataclass whose choices for ``name`` include the section's name."""
    by_name = choices_of(kinds)
    if isinstance(section, dict) and "name" not in section:
        raise UserError(f"{key} has no name; {OF_ONES_OWN}")
    if not isinstance(section, dict):
        raise UserError(f"{key}={_show(section)}: expected one of {', '.join(by_name)}")
    name = section["name"]
    if name not in [*by_name]:  # a list, since a name may be unhashable
        raise not_valid(f"{key}={name}: {OF_ONES_OWN}", name, by_name)
    return by_name[name]


def _show(value: Any) -> str:
    return "null" if value is None else str(value)

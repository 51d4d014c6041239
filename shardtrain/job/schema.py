"""Typed configurations: frozen dataclasses made from what Hydra has composed, and the user's mistakes.

A field says its range (`at_least`, `above`, `fraction`, `one_of`). A field whose type is a union of
dataclasses takes the one whose field ``name`` has the section's name among its choices. Conditions between
fields are checked in ``__post_init__``. Each message names the key as the user would write it on the command
line.
"""

from __future__ import annotations

import contextlib
import math
import operator
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

Frozen = TypeVar("Frozen")

# What a field's metadata may demand of its value.
BOUNDS = {
    "at_least": (operator.ge, "at least"),
    "above": (operator.gt, "more than"),
    "at_most": (operator.le, "at most"),
    "below": (operator.lt, "less than"),
}
DESCRIPTIONS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


class UserError(ValueError):
    """A mistake of the user's: one clear message, exit code 2, no traceback.

    The message says what was found, what was expected, and what to do.
    """


def nearest(word: str, valid: Iterable[str]) -> str:
    """Return `"; did you mean X?"` for the valid word nearest to ``word``, or `""` when none is near."""
    matches = get_close_matches(word, list(valid), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def not_valid(what: str, word: object, valid: Iterable[str]) -> UserError:
    """Return the error of a ``word`` that is not among the valid ones; ``what`` begins the message."""
    valid = list(valid)
    return UserError(f"{what}{nearest(str(word), valid)} (valid: {', '.join(valid)})")


@contextlib.contextmanager
def writing(key: str, path: Path) -> Iterator[None]:
    """Blame the option ``key``, which says to write to ``path``, for an OSError inside."""
    try:
        yield
    except OSError as error:
        reason = f"cannot write there ({error.strerror})"
        raise UserError(f"{key}={path}: {reason}; choose another {key}") from error


def at_least(bound: float) -> Any:
    """Declare a field whose value may not be below ``bound``."""
    return field(metadata={"at_least": bound})


def above(bound: float, **other_bounds: float) -> Any:
    """Declare a field whose value must be greater than ``bound``."""
    return field(metadata={"above": bound, **other_bounds})


def fraction() -> Any:
    """Declare a field whose value, or each of several, is in [0, 1)."""
    return field(metadata={"at_least": 0, "below": 1})


def one_of(*choices: str) -> Any:
    """Declare a field that takes one of the given words."""
    return field(metadata={"choices": choices})


def checked(raw: DictConfig, cls: type[Frozen]) -> Frozen:
    """Return ``raw`` as the frozen dataclass ``cls``, its names, types and ranges checked."""
    try:
        values = OmegaConf.to_container(raw, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    config = typed(cls, values, "")
    assert isinstance(config, cls)
    return config


def plain(config: Any) -> dict[str, Any]:
    """Return ``config`` as nested dicts, with the keys that users write."""
    return asdict(config, dict_factory=lambda pairs: {_key(name): value for name, value in pairs})


def typed(hint: Any, value: Any, key: str) -> Any:
    """Return ``value`` as the type ``hint``, or raise a UserError that names ``key``."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    if len(kinds) > 1:
        return _section(_variant(kinds, value, key), value, key)
    (kind,) = kinds
    if is_dataclass(kind) and isinstance(value, dict):
        return _section(kind, value, key)
    if typing.get_origin(kind) is tuple:
        return _tuple(typing.get_args(kind), value, key)
    if type(value) is int and kind in (float, str):
        return kind(value)
    if type(value) is not (typing.get_origin(kind) or kind):
        raise UserError(f"{key}={_show(value)}: expected {DESCRIPTIONS.get(kind, 'a group of keys')}")
    return value


def _section(cls: Any, raw: Mapping[Any, Any], path: str) -> Any:
    """Make one dataclass from one mapping. ``path`` is `""` for the whole configuration."""
    prefix, entries = path and f"{path}.", {_key(entry.name): entry for entry in fields(cls)}
    for key in raw:
        if key not in entries:
            valid = [*entries, *getattr(cls, "KEYLESS_GROUPS", ())]
            raise not_valid(f"unknown key {prefix}{key}", key, valid)
    hints, values = typing.get_type_hints(cls), {}
    for name, entry in entries.items():
        if name not in raw and entry.default is MISSING:
            raise UserError(f"{prefix}{name} is missing")
        value = typed(hints[entry.name], raw.get(name, entry.default), prefix + name)
        for each in value if isinstance(value, tuple) else [value]:
            _check_range(each, entry.metadata, prefix + name)
        values[entry.name] = value
    return cls(**values)


def _key(name: str) -> str:
    """Return a field's key: where Python has taken the word (`from`), the field is `from_`."""
    return name.rstrip("_")


def _variant(classes: Iterable[Any], section: Any, key: str) -> Any:
    """Return the dataclass whose field ``name`` may have the section's."""
    by_name = {
        name: cls
        for cls in classes
        for entry in fields(cls)
        if entry.name == "name"
        for name in entry.metadata["choices"]
    }
    if not isinstance(section, dict) or "name" not in section:
        raise UserError(f"{key}={_show(section)}: expected one of {', '.join(by_name)}")
    name = section["name"]
    if name not in by_name:
        raise not_valid(f"{key}.name={_show(name)}", name, by_name)
    return by_name[name]


def _tuple(kinds: tuple[Any, ...], value: Any, key: str) -> tuple[Any, ...]:
    if kinds[-1] is Ellipsis:
        if not isinstance(value, list):
            raise UserError(f"{key}={_show(value)}: expected a list, as in {key}=[a,b]")
        kinds = kinds[:1] * len(value)
    if not isinstance(value, list) or len(value) != len(kinds):
        raise UserError(f"{key}={_show(value)}: expected a list of {len(kinds)} numbers")
    return tuple(typed(kind, item, key) for kind, item in zip(kinds, value, strict=True))


def _check_range(value: Any, demands: Mapping[str, Any], key: str) -> None:
    if value is None:
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{key}={value}: expected a finite number")
    for name, (holds, words) in BOUNDS.items():
        if name in demands and not holds(value, demands[name]):
            raise UserError(f"{key}={value}: expected {words} {demands[name]}")
    if value not in demands.get("choices", [value]):
        raise not_valid(f"{key}={value}", value, demands["choices"])


def _show(value: Any) -> str:
    return "null" if value is None else str(value)

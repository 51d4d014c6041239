"""Typed configurations: the one function that makes frozen dataclasses from what Hydra has composed.

Each message names the key as the user would write it on the command line.
"""

from __future__ import annotations

import contextlib
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

Frozen = TypeVar("Frozen")


def at_least(bound: float) -> Any:
    """A field whose value may not be below `bound`."""
    return field(metadata={"at_least": bound})


def above(bound: float) -> Any:
    """A field whose value must be greater than `bound`."""
    return field(metadata={"above": bound})


def fraction() -> Any:
    """A field in [0, 1), each of several."""
    return field(metadata={"at_least": 0, "below": 1})


def one_of(*choices: str) -> Any:
    """A field that takes one of the given words."""
    return field(metadata={"choices": choices})


def variants(**classes: type) -> dict[str, dict[str, type]]:
    """The metadata of a section whose dataclass depends on its `name`."""
    return {"variants": classes}


def checked(raw: DictConfig, cls: type[Frozen]) -> Frozen:
    """`raw` as the frozen dataclass `cls`, its names, types and ranges checked."""
    try:
        plain = OmegaConf.to_container(raw, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    assert isinstance(plain, dict)
    config = _section(cls, plain, "")
    assert isinstance(config, cls)
    return config


def plain(config: Any) -> dict[str, Any]:
    """`config` as nested dicts, with the keys that users write."""
    return asdict(config, dict_factory=lambda pairs: {_key(name): value for name, value in pairs})


def _key(name: str) -> str:
    """A field's key: where Python has taken the word (`from`), the field is `from_`."""
    return name.rstrip("_")


def _section(cls: type, raw: Mapping[Any, Any], path: str) -> Any:
    """One dataclass from one mapping. `path` is `""` for the whole, `"train."` for a part."""
    names = [_key(entry.name) for entry in fields(cls)]
    for key in raw:
        if key not in names:
            valid = [*names, *getattr(cls, "KEYLESS_GROUPS", ())]
            raise UserError(f"unknown key {path}{key}{nearest(str(key), valid)} (valid: {', '.join(valid)})")
    hints = typing.get_type_hints(cls)
    values = {}
    for entry, name in zip(fields(cls), names, strict=True):
        if name not in raw and entry.default is MISSING:
            raise UserError(f"{path}{name} is missing")
        key = path + name
        value = raw.get(name, entry.default)
        if "variants" in entry.metadata:
            values[entry.name] = _variant(entry.metadata["variants"], value, key)
            continue
        values[entry.name] = typed(hints[entry.name], value, key)
        _check_range(values[entry.name], entry.metadata, key)
    return cls(**values)


def typed(hint: Any, value: Any, key: str) -> Any:
    """`value` as the type `hint` asks for, or a UserError."""
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is tuple:
        return _tuple(hint, value, key)
    if typing.get_origin(hint) is dict and isinstance(value, dict):
        return value
    if isinstance(hint, type) and hasattr(hint, "__dataclass_fields__") and isinstance(value, dict):
        return _section(hint, value, key + ".")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if type(value) is not hint:
        raise UserError(f"{key}={_show(value)}: expected {_describe(hint)}")
    return value


def _variant(variants: Mapping[str, type], value: Any, key: str) -> Any:
    if not isinstance(value, dict) or "name" not in value:
        raise UserError(f"{key}={_show(value)}: expected one of {', '.join(variants)}")
    name = value["name"]
    if name not in variants:
        raise UserError(
            f"{key}.name={_show(name)}{nearest(str(name), variants)} (valid: {', '.join(variants)})"
        )
    return _section(variants[name], value, key + ".")


def _tuple(hint: Any, value: Any, key: str) -> tuple[Any, ...]:
    parts = typing.get_args(hint)
    if parts[-1] is Ellipsis:
        if not isinstance(value, list):
            raise UserError(f"{key}={_show(value)}: expected a list, as in {key}=[a,b]")
        return tuple(typed(parts[0], item, key) for item in value)
    if not isinstance(value, list) or len(value) != len(parts):
        raise UserError(f"{key}={_show(value)}: expected a list of {len(parts)} numbers")
    return tuple(typed(part, item, key) for part, item in zip(parts, value, strict=True))


def _check_range(value: Any, limits: Mapping[str, Any], key: str) -> None:
    if isinstance(value, tuple):
        for each in value:
            _check_range(each, limits, key)
        return
    if value is None:
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{key}={value}: expected a finite number")
    if "at_least" in limits and value < limits["at_least"]:
        raise UserError(f"{key}={value}: expected at least {limits['at_least']}")
    if "above" in limits and value <= limits["above"]:
        raise UserError(f"{key}={value}: expected more than {limits['above']}")
    if "below" in limits and value >= limits["below"]:
        raise UserError(f"{key}={value}: expected less than {limits['below']}")
    if "choices" in limits and value not in limits["choices"]:
        choices = limits["choices"]
        raise UserError(f"{key}={value}{nearest(value, choices)} (valid: {', '.join(choices)})")


def _show(value: Any) -> str:
    return "null" if value is None else str(value)


def _describe(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return names.get(hint, "a group of keys")


# Mistakes of the user's: one clear message, exit code 2, no traceback.


class UserError(ValueError):
    """Something the user can put right. The message says what was found, what was expected, what to do."""


def nearest(word: str, valid: Iterable[str]) -> str:
    """`"; did you mean X?"` for the valid word nearest to `word`, or `""` when none is near."""
    matches = get_close_matches(word, list(valid), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


@contextlib.contextmanager
def writing(key: str, path: Path) -> Iterator[None]:
    """Inside, what cannot be written is a mistake in the option `key`, which says to write to `path`."""
    try:
        yield
    except OSError as error:
        reason = f"cannot write there ({error.strerror})"
        raise UserError(f"{key}={path}: {reason}; choose another {key}") from error

"""Building what a config names in `_target_`.

A `_target_` is code that a file chooses, so only callables that a recipe module itself defines are called:
not what such a module imports, and nothing outside `shardtrain.recipes`. Its annotations say which values are
right, as a dataclass's fields do for the rest of the configuration.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from shardtrain.checked import typed
from shardtrain.errors import UserError, nearest

ALLOWED = "shardtrain.recipes."

# Annotations that are checked, also as the texts that they are in a module which postpones them. What else a
# callable takes it has to check itself.
SIMPLE: dict[object, type] = {
    annotation: kind for kind in (bool, int, float, str) for annotation in (kind, kind.__name__)
}


def build(node: Mapping[str, Any], section: str) -> Any:
    """Calls `node["_target_"]` with the other keys; `section` names the config group in messages."""
    target = _find(str(node.get("_target_")), section)
    valid = inspect.signature(target).parameters
    arguments = {key: value for key, value in node.items() if key != "_target_"}
    for key, value in arguments.items():
        if key not in valid:
            raise UserError(f"unknown key {section}.{key}{nearest(key, valid)} (valid: {', '.join(valid)})")
        if valid[key].annotation in SIMPLE:
            arguments[key] = typed(SIMPLE[valid[key].annotation], value, f"{section}.{key}")
    try:
        return target(**arguments)
    except (ValueError, TypeError) as error:
        raise UserError(f"{section}: {error}") from error


def _find(path: str, section: str) -> Callable[..., Any]:
    module_name, _, name = path.rpartition(".")
    if not path.startswith(ALLOWED):
        raise UserError(f"{section}._target_={path}: only callables of {ALLOWED}* are built")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError:
        raise UserError(f"{section}._target_={path}: there is no module {module_name}") from None
    valid = _own_callables(module)
    if name not in valid:
        raise UserError(
            f"{section}._target_={path}: {module_name} does not define {name}{nearest(name, valid)}"
        )
    return valid[name]


def _own_callables(module: ModuleType) -> dict[str, Callable[..., Any]]:
    return {
        name: value
        for name, value in vars(module).items()
        if callable(value)
        and not name.startswith("_")
        and getattr(value, "__module__", "") == module.__name__
    }

"""The call of what a configuration names by ``_target_``.

The keys of a group with a ``_target_`` are those of its callable. A file can choose it, so it must be in one
of a few packages. Only the command line can add packages.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import hydra.utils
import torch
from hydra.errors import InstantiationException

from shardtrain.config.errors import UserError, advice, not_valid, reading
from shardtrain.config.schema import typed

# Packages in which a ``_target_`` may be, besides those of `allow`.
RECIPES = "shardtrain.recipes"
PACKAGES = {
    "model": (RECIPES, "torchvision.models"),
    "augment": (RECIPES,),
    "optim": ("torch.optim", RECIPES),
    "train.loss": (RECIPES, "torch.nn"),
    "train.hooks": (RECIPES,),
    "data": (RECIPES,),
    "monitor.scores": (RECIPES,),
    "monitor.writers": (RECIPES,),
}

GIVEN = "shardtrain.train.Trainer"  # the `_target_` of a model and of data that a program has given to it
ANNOTATIONS = {kind.__name__: kind for kind in (bool, int, float, str)}
# What a callable raises for values that it cannot take: sizes of 0 or below, too large, of another type.
REFUSALS = (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError, AssertionError, MemoryError)


def instantiate(
    node: Mapping[str, Any],
    section: str,
    kind: type | tuple[type, ...],
    allow: Sequence[str] = (),
    *arguments: Any,
) -> Any:
    """Call ``node["_target_"]`` with ``arguments`` and the node's other keys; return its result, a ``kind``.

    Every ``_target_`` inside of the node is looked at before the first call. Parameters annotated with bool,
    int, float or str are checked; the callable must check the others. ``section`` names the config group in
    messages; ``allow``: the packages that the command line allows.
    """
    path = str(node.get("_target_"))
    target = find_target(path, section, kind, allow)
    keywords = keywords_of(node, section, target, len(arguments))
    for nested in _targets_in([*keywords.values()]):
        find_target(nested, section, object, allow)
    expected = f"{path} does not take these values"
    with reading(section, expected, REFUSALS), _without_traceback():
        made = hydra.utils.instantiate({"_target_": path, "_convert_": "all"}, *arguments, **keywords)
    if not isinstance(made, kind):
        expected = kind.__name__ if isinstance(kind, type) else " or ".join(each.__name__ for each in kind)
        raise UserError(f"{section}._target_={path}: returned a {type(made).__name__}, not a {expected}")
    return made


def _targets_in(value: Any) -> Iterator[str]:
    """Yield each ``_target_`` in nested dictionaries and lists."""
    if isinstance(value, Mapping) and "_target_" in value:
        yield str(value["_target_"])
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _targets_in(item)


@contextlib.contextmanager
def _without_traceback() -> Iterator[None]:
    """Raise what a callable raised inside, in place of Hydra's error about it, whose text is a traceback."""
    try:
        yield
    except InstantiationException as error:
        raise error.__cause__ or error from None


def keywords_of(
    node: Mapping[str, Any], section: str, target: Callable[..., Any], arguments: int = 0
) -> dict[str, Any]:
    """Return those keys of ``node`` that ``target`` takes after ``arguments`` others, with values checked."""
    valid = dict([*inspect.signature(target).parameters.items()][arguments:])
    takes_any = any(each.kind is each.VAR_KEYWORD for each in valid.values())
    # What the data set decides is passed only to callables with such a parameter.
    left_out = ["_target_", "in_channels", "image_size", *([] if takes_any else ["num_classes"])]
    keywords = {key: value for key, value in node.items() if key in valid or key not in left_out}
    for key, value in keywords.items():
        if key not in valid and not takes_any:
            error = not_valid(f"unknown key {section}.{key}", key, valid)
            meant = "" if "did you mean" in str(error) else advice(key)
            raise UserError(f"unknown key {section}.{key}; {meant}") if meant else error
        annotation = valid[key].annotation if key in valid else None
        name = getattr(annotation, "__name__", str(annotation))  # a text with postponed annotations
        if name in ANNOTATIONS:
            keywords[key] = typed(ANNOTATIONS[name], value, f"{section}.{key}")
        elif isinstance(value, list) and "Tensor" in str(annotation):  # such as a loss's weights of classes
            keywords[key] = torch.tensor(typed(tuple[float, ...], value, f"{section}.{key}"))
    return keywords


def find_target(
    path: str, section: str, kind: type | tuple[type, ...], allow: Sequence[str]
) -> Callable[..., Any]:
    """Return the class or function ``path``. Raises UserError unless an allowed package defines it."""
    found = f"{section}._target_={path}"
    if path == GIVEN:
        raise given_in_python(found)
    module_name, _, name = path.rpartition(".")
    if section.startswith("monitor."):
        found = f"{section}=[{path}]"
    if path in ("???", "None"):
        raise UserError(f"{section}._target_ is missing: add {section}._target_=PACKAGE.NAME")
    package = next((each for each in (*PACKAGES[section], *allow) if _inside(each, module_name)), None)
    if package is None:
        known = " and ".join(PACKAGES[section])
        other = path.partition(".")[0]
        raise UserError(
            f"{found}: only builders in {known} are called, unless the command has allow=[{other}]"
        )
    if package in (*sys.stdlib_module_names, "torch", "numpy"):  # torch.load can run code of a file
        raise UserError(f"allow=[{package}]: too much of it runs anything; allow a part, such as torch.nn")
    with reading(found, "expected PACKAGE.NAME", (ImportError, ValueError)):
        module = importlib.import_module(module_name)
        target: Any = getattr(module, name, None)

    def builds(value: Any) -> bool:
        if inspect.isclass(value):
            right = issubclass(value, kind)
        else:  # some functions of recipes start programs; builders are annotated with what they make
            returns = str(getattr(value, "__annotations__", {}).get("return"))
            right = inspect.isfunction(value) and (
                package != RECIPES or returns.endswith(("Module", "DataSet"))
            )
        return right and _inside(package, value.__module__)

    if name.startswith("_") or not builds(target):
        valid = [key for key, value in vars(module).items() if key[0] != "_" and builds(value)]
        raise not_valid(f"{found}: {module_name} has no builder {name}", name, valid)
    return target  # type: ignore[no-any-return]


def given_in_python(where: str) -> UserError:
    """Return the error for a run, ``where``, of whose model and data a program alone knows."""
    return UserError(
        f"{where}: a program has given the model and the data to shardtrain.train.Trainer; there, a hook's "
        "at_end(trainer) can score, predict, or save shardtrain.full_state_dict(trainer.model)"
    )


def _inside(package: str, module: str) -> bool:
    return f"{module}.".startswith(f"{package}.")

"""Methods added to a module: to its class what Python looks up there, to itself all others.

A call looks ``__call__`` up in the class. So modules whose call gathers a unit get another class, as under
FSDP2: a subclass of their own with its name, module and documentation, so that messages, ``repr`` and
``inspect`` show what users wrote. ``isinstance``, ``super()`` and ``torch.compile`` find what they expect;
``type(module) is Block`` is False. All other modules keep their class, and methods that must do more than
before stand in ``__dict__``: what holds shards is neither copied nor pickled.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

# So modules of one class still have one class. Weak, since torch.fx makes a class per module.
_CLASSES: weakref.WeakValueDictionary[tuple[type, ...], type] = weakref.WeakValueDictionary()


class Addition(nn.Module):
    """The base of classes whose methods are added to modules."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Keep a user's ``__init_subclass__`` from seeing classes that the user did not write."""


@contextmanager
def own_class(module: nn.Module) -> Iterator[None]:
    """Give ``module`` the class that it had before `add`, inside: ``type(module) is nn.Linear``."""
    extended_class = module.__class__
    before: Any = next(kind for kind in extended_class.__mro__ if not issubclass(kind, Addition))
    module.__class__ = before
    try:
        yield
    finally:
        module.__class__ = extended_class


def add(module: nn.Module, addition: type[Addition], prefix: str = "") -> None:
    """Put the methods of ``addition`` before those of ``module``'s class, whose name gets ``prefix``."""
    if isinstance(module, addition):
        return
    kind = type(module)
    extended_class = _CLASSES.get((kind, addition))
    if extended_class is None:
        name = prefix + kind.__name__
        described = {
            "__module__": kind.__module__,
            "__qualname__": prefix + kind.__qualname__,
            "__doc__": kind.__doc__,
        }
        extended_class = types.new_class(name, (addition, kind), exec_body=lambda n: n.update(described))
        _CLASSES[kind, addition] = extended_class
    module.__class__ = extended_class


def bind(module: nn.Module, methods: Mapping[str, Callable[..., Any]]) -> list[str]:
    """Let ``module`` alone have ``methods``, which take it first, and return the names of those it got.

    A user's attribute of the same name stays.
    """
    names = [name for name in methods if name not in module.__dict__]
    for name in names:
        module.__dict__[name] = types.MethodType(methods[name], module)
    return names

"""Add methods to a module by another class, as FSDP2 does: a subclass of the module's own class.

A class in the place of attributes of the module: ``copy``, ``pickle``, ``torch.compile`` and ``super()`` find
methods of a class, and nothing is left in the module's ``__dict__``. The new class has the name, module and
documentation of the old one, so that messages, ``repr`` and ``inspect`` show what users wrote. ``isinstance``
and calls of the old class's methods work as before; ``type(module) is Block`` is False.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx, nn

# So modules of one class still have one class. Weak, since torch.fx makes a class per module.
_CLASSES: weakref.WeakValueDictionary[tuple[type, ...], type] = weakref.WeakValueDictionary()


class Addition(nn.Module):
    """Be the base of classes whose methods are added to modules."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Keep a user's ``__init_subclass__`` from seeing classes that the user did not write."""


class _OfGraph(Addition):
    """Let torch.fx write a module's code into the class that it made, since its methods call one another."""

    def recompile(self) -> Any:
        with own_class(self):
            return self.recompile()


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
    if isinstance(module, fx.GraphModule) and addition is not _OfGraph:
        add(module, _OfGraph)
        kind = type(module)
    extended_class = _CLASSES.get((kind, addition))
    if extended_class is None:
        described = {
            "__module__": kind.__module__,
            "__qualname__": prefix + kind.__qualname__,
            "__doc__": kind.__doc__,
        }
        extended_class = types.new_class(
            prefix + kind.__name__, (addition, kind), exec_body=lambda n: n.update(described)
        )
        _CLASSES[kind, addition] = extended_class
    module.__class__ = extended_class

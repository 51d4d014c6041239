"""The modules below a root as they were, to see what a user has attached or taken away since."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from torch import nn


class Node(NamedTuple):
    """One module, with its children and how many parameters it holds."""

    module: nn.Module
    children: tuple[nn.Module | None, ...]
    parameters: int


class Tree:
    """Every module as it is now. None can join them without a change of one of them."""

    def __init__(self, root: nn.Module) -> None:
        self._nodes = [Node(m, tuple(m._modules.values()), len(m._parameters)) for m in root.modules()]

    def has_changed(self) -> bool:
        for module, children, parameters in self._nodes:
            if len(module._parameters) != parameters or tuple(module._modules.values()) != children:
                return True
        return False


def refuse_strangers(root: nn.Module, known: Container[nn.Parameter]) -> None:
    """Look for parameters that are not ``known``.

    Raises:
        ValueError: there are some.
    """
    new = [name for name, param in root.named_parameters() if param not in known]
    if new:
        raise ValueError(
            f"parameters attached after shard(): {', '.join(new)}; nothing would reduce their gradients. "
            "Attach them first, then shard"
        )

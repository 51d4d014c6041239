"""Users' hooks on gradients of sharded parameters, called when there is something to see.

Autograd would call a post-accumulate hook with a gradient that is whole, and this rank's alone. So the engine
takes such hooks from it when a backward begins, and calls each once at the end of a backward that reduces,
when the parameter shows its piece with the reduced gradient, and owners may write: an optimizer may step in
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn


class Postponed:
    """A user's hook in the place where autograd looks for it; does nothing there."""

    def __init__(self, hook: Callable[[torch.Tensor], None]) -> None:
        self.hook = hook

    def __call__(self, param: torch.Tensor) -> None:
        pass


def postpone(params: Iterable[nn.Parameter], ours: Mapping[nn.Parameter, int]) -> None:
    """Take users' hooks from autograd, under the handles that they were given.

    ``ours``: the number of the engine's own hook of each parameter.
    """
    for param in [param for param in params if _are_several(param)]:
        hooks = param._post_accumulate_grad_hooks or {}
        for number, hook in hooks.items():
            if number != ours.get(param) and not isinstance(hook, Postponed):
                hooks[number] = Postponed(hook)


def call(params: Iterable[nn.Parameter]) -> None:
    """Call the hooks that were postponed, those of each parameter once."""
    for param in dict.fromkeys([param for param in params if _are_several(param)]):
        for hook in list((param._post_accumulate_grad_hooks or {}).values()):
            if isinstance(hook, Postponed):
                hook.hook(param)


def _are_several(param: nn.Parameter) -> bool:
    """Whether ``param`` has hooks besides the engine's own."""
    return len(param._post_accumulate_grad_hooks or ()) > 1

"""Users' hooks on gradients, called where what they see is what they mean.

Hooks of parameters (post-accumulate) are called once gradients are reduced. Autograd would call such a hook
with this rank's full gradient, before the reduction. So hooks are replaced when a backward begins, and each
is called once when a backward that reduces ends. Then the parameter shows its local shard with the reduced
gradient, and the hook may step an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from shardtrain import torch_private

Hook = Callable[..., None]


class Postponed:
    """What stands in for a user's hook while autograd runs, and does nothing."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def __call__(self, param: torch.Tensor) -> None:
        pass


def postpone(param: nn.Parameter) -> None:
    """Replace users' hooks of ``param`` by `Postponed` ones. Their handles stay valid."""
    if hooks := param._post_accumulate_grad_hooks:
        for number, hook in hooks.items():
            if not isinstance(hook, Postponed):
                hooks[number] = Postponed(hook)


def call_postponed(params: Iterable[nn.Parameter]) -> None:
    """Call the postponed hooks of ``params``, each once."""
    with torch_private.DisableTorchFunctionSubclass():
        with_hooks = dict.fromkeys([param for param in params if param._post_accumulate_grad_hooks])
    for param in with_hooks:
        for hook in [*(param._post_accumulate_grad_hooks or {}).values()]:
            if isinstance(hook, Postponed):
                hook.hook(param)

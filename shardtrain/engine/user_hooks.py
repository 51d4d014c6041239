"""What keeps the engine's hooks and users' tools apart: users' own hooks, ``torch.compile``, ``torch.func``.

It has its own file because it knows nothing of the engine, and ``hooks.py`` would exceed 400 lines with it.

Autograd would call a user's post-accumulate hook with a gradient that is whole, and this rank's alone. So
such hooks are taken from autograd when a backward begins, and each is called once when one that reduces
ends. Then the parameter shows its piece with the reduced gradient, and the hook may step an optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad

Hook = Callable[..., None]


class OwnHook:
    """A hook of the engine's on a parameter, which stays where autograd looks for it."""


class Postponed:
    """A user's hook in the place where autograd looks for it; does nothing there."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def __call__(self, param: torch.Tensor) -> None:
        pass


def postpone(params: Iterable[nn.Parameter]) -> None:
    """Take users' hooks from autograd, under the handles that they were given."""
    for param in params:
        hooks = param._post_accumulate_grad_hooks or {}
        for number, hook in hooks.items() if len(hooks) > 1 else ():
            if not isinstance(hook, OwnHook | Postponed):
                hooks[number] = Postponed(hook)


def call_postponed(params: Iterable[nn.Parameter]) -> None:
    """Call the hooks that were postponed, those of each parameter once."""
    for param in dict.fromkeys(params):
        for hook in list((param._post_accumulate_grad_hooks or {}).values()):
            if isinstance(hook, Postponed):
                hook.hook(param)


def uncompiled(hook: Hook) -> Hook:
    """Return ``hook`` such that a compiled model breaks its graph there, and runs it as it is.

    Only where Dynamo is at work: elsewhere nobody is to wait until Dynamo is imported.
    """
    broken = _disable_dynamo(hook)

    @functools.wraps(hook)
    def either(*args: Any) -> None:
        if torch.compiler.is_compiling() or get_eval_frame_callback():
            broken(*args)
        else:
            hook(*args)

    return either


def refuse_transforms() -> None:
    """Refuse to run inside ``torch.func``'s transforms, which see pieces where parameters belong."""
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        raise ValueError(
            "a sharded model cannot run inside jvp, vmap or another transform of torch.func: transform an "
            "unsharded copy of it, with the weights of full_state_dict(model)"
        )

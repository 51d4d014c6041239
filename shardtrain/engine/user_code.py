"""Keep the engine right under what users bring: their hooks, compilers, transforms and wrappers.

Autograd would call a user's post-accumulate hook with this rank's full gradient, before the reduction. So
such hooks are replaced when a backward begins, and each is called once when a backward that reduces ends.
Then the parameter shows its piece with the reduced gradient, and the hook may step an optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from shardtrain import torch_private

Hook = Callable[..., None]


class Postponed:
    """Stand in for a user's hook while autograd runs, and do nothing."""

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
    for param in dict.fromkeys(params):
        for hook in list((param._post_accumulate_grad_hooks or {}).values()):
            if isinstance(hook, Postponed):
                hook.hook(param)


def undisturbed(hook: Hook) -> Hook:
    """Return ``hook`` so that ``torch.compile`` breaks the graph there and runs it uncompiled, untransformed.

    Raises ValueError inside ``torch.func``'s grad, jvp and others that wrap all that is computed inside. Uses
    Dynamo only while it compiles or runs compiled code: importing Dynamo takes seconds.
    """
    broken = torch_private.disable_dynamo(hook)

    @functools.wraps(hook)
    def either(*args: Any) -> None:
        if torch.compiler.is_compiling() or torch_private.get_eval_frame_callback():
            broken(*args)
            return
        probe = torch.empty(0, device="cpu")
        if torch.func.debug_unwrap(probe) is not probe:
            raise ValueError(
                "a sharded model cannot run inside grad, vjp, jacrev, jvp or jacfwd of torch.func: compute "
                "with torch.autograd.forward_ad, or transform an unsharded copy of it, with the weights of "
                "full_state_dict(model)"
            )
        hook(*args)

    return either


def tracked(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield what autograd tracks of ``tensor``, or of what vmap wraps, and the tangent of a dual number."""
    tensor = torch.func.debug_unwrap(tensor)
    yield tensor
    tangent = forward_ad.unpack_dual(tensor).tangent
    if tangent is not None:
        yield tangent

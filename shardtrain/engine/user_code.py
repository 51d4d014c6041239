"""What keeps the engine's hooks right under ``torch.compile``, ``torch.func`` and forward-mode AD."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad

from shardtrain import torch_private
from shardtrain.pieces.piece import uncompiled


def undisturbed(hook: Callable[..., None]) -> Callable[..., None]:
    """Return ``hook`` so that ``torch.compile`` breaks the graph there and runs it uncompiled, untransformed.

    Raises ValueError inside ``torch.func``'s grad, jvp and others that wrap all that is computed inside.
    """

    @functools.wraps(hook)
    def untransformed(*args: Any) -> None:
        if _is_transformed():
            raise ValueError(
                "a sharded model cannot run inside grad, vjp, jacrev, jvp or jacfwd of torch.func: compute "
                "with torch.autograd.forward_ad, or transform an unsharded copy of it, with the weights of "
                "full_state_dict(model)"
            )
        hook(*args)

    return uncompiled(untransformed)


def _is_transformed() -> bool:
    """Return whether a transform of ``torch.func`` wraps all that is computed now, as vmap does not."""
    if torch_private.peek_interpreter_stack() is None:
        return False
    probe = torch.empty(0, device="cpu")
    return torch.func.debug_unwrap(probe) is not probe


def is_plain() -> bool:
    """Return whether no transform and no dual number is in use: each tensor is what autograd tracks."""
    return torch_private.peek_interpreter_stack() is None and forward_ad._current_level < 0


def tracked(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield what autograd tracks of ``tensor``, or of what vmap wraps, and the tangent of a dual number."""
    tensor = torch.func.debug_unwrap(tensor)
    yield tensor
    tangent = forward_ad.unpack_dual(tensor).tangent
    if tangent is not None:
        yield tangent

"""Record the calls of units in forward, and the progress of backward among them: data of ``schedule.py``.

It has its own file because it knows nothing of gathers and reductions, and ``schedule.py`` would exceed 400
lines with it.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn

from shardtrain.engine.precision import leaves
from shardtrain.engine.reduce import Reduction
from shardtrain.engine.shard import ShardedParam
from shardtrain.engine.unit import Unit

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)  # hide no tensors


@dataclass(eq=False, slots=True)
class Call:
    """Record an outermost call of a unit's modules. Moments count the begins and ends of all calls.

    ``record``: the ended calls of the same forward, in the order in which they ended. ``hooked``: on some
    rank autograd calls this object before it runs a node that made one of the call's outputs.
    """

    come_to: Callable[[Call], None]  # `Schedule._before_backward`
    unit: Unit
    record: list[Call]
    began: int
    ended: int = sys.maxsize
    depth: int = 1  # how many calls of the unit's modules are nested
    hooked: bool = False

    def hook(self, tensor: torch.Tensor) -> None:
        """Have backward announce the call before it runs the node that made ``tensor``.

        Work in place on a view gives it another node, and leaves its base's.
        """
        # Without gradients the call has only passed on a tensor that has a node.
        for made in (tensor, tensor._base) if torch.is_grad_enabled() else ():
            if made is not None and made.grad_fn is not None:
                made.grad_fn.register_prehook(self)
                self.hooked = True

    def watch(self, output: Any) -> bool:
        """Hook all tensors of ``output``; return whether the unit must stay gathered through backward.

        It must if ``output`` may hide tensors in objects, or contains views of the unit's parameters.
        """
        stays, learns = False, torch.is_grad_enabled()
        # On another rank an output may have a gradient.
        self.hooked |= learns and any(member.param.requires_grad for member in self.unit.members)
        for leaf in leaves(output):
            if isinstance(leaf, torch.Tensor):
                self.hook(leaf)
                stays = stays or self.unit.shows(leaf)
            else:
                stays = stays or (learns and not isinstance(leaf, _PLAIN))
        return stays

    def __call__(self, _: object) -> None:
        self.come_to(self)


@dataclass(eq=False)
class Backward:
    """Hold the progress of one backward."""

    record: list[Call]
    ahead: list[Call]  # calls of the record that backward has not reached, the next one last
    first: dict[Unit, int]  # when each unit's first call began
    order: list[Unit]  # the order in which reductions start
    turn: int = 0  # how many units of `order` have had their turn
    call: Call | None = None  # the call that autograd has reached
    moment: int = sys.maxsize  # backward is done with all that was computed later
    entered: dict[Unit, None] = field(default_factory=dict)  # units whose backward has begun, in order
    current: list[Unit] = field(default_factory=list)  # those of `entered` whose backward is not done
    completed: set[Unit] = field(default_factory=set)  # units all of whose gradients have arrived
    launched: list[Unit] = field(default_factory=list)  # units whose reduction has been started
    under_way: deque[Reduction] = field(default_factory=deque)  # not finished yet, the oldest first
    arriving: dict[ShardedParam, bool] = field(default_factory=dict)  # whose gradient is being accumulated


def calling_frame() -> FrameType:
    """Return the innermost frame in which torch calls a module; the outermost of all if that is compiled."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__") != nn.Module.__module__:
        frame = frame.f_back
    return frame

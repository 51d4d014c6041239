"""Calls of units as forward notes them, and how far a backward has come among them: data of ``schedule.py``.

It has its own file because it knows nothing of gathers and reductions, and ``schedule.py`` would exceed 400
lines with it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn

from shardtrain.engine.precision import leaves
from shardtrain.engine.shard import ShardedParam
from shardtrain.engine.unit import Unit

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)  # hide no tensors


@dataclass(eq=False, slots=True)
class Call:
    """An outermost call of a unit's modules. Moments are counted, and shared by all calls.

    ``record``: the calls of the same forward that have ended, by their ends. ``hooked``: autograd calls this
    before it runs one of the nodes that made what the call has computed.
    """

    come_to: Callable[[Call], None]  # `Schedule._before_backward`
    unit: Unit
    record: list[Call]
    began: int
    ended: int = sys.maxsize
    depth: int = 1  # of the unit's modules, those that are called inside one another
    hooked: bool = False

    def hook(self, tensor: torch.Tensor) -> None:
        """Let backward announce the call before it needs what ``tensor`` was computed from."""
        node = tensor.grad_fn
        if node is not None:  # else it is no result of the call
            node.register_prehook(self)
            self.hooked = True

    def watch(self, output: Any) -> bool:
        """Hook all tensors of ``output``.

        Returns whether the unit must stay in full: ``output`` may hide tensors, or shows its parameters.
        """
        stays, learns = False, torch.is_grad_enabled()
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
    """One backward under way."""

    record: list[Call]
    ahead: list[Call]  # calls of the record that autograd has not come to, the next one last
    first: dict[Unit, int]  # when each unit's first call began
    order: list[Unit]  # in which reductions are started
    turn: int = 0  # of these, how many it has come to
    call: Call | None = None  # the one that autograd has come to
    moment: int = sys.maxsize  # what was computed later is over
    entered: dict[Unit, None] = field(default_factory=dict)  # units whose backward has begun, in that order
    current: list[Unit] = field(default_factory=list)  # those of them that are not over
    completed: set[Unit] = field(default_factory=set)  # units all of whose gradients have arrived
    launched: list[Unit] = field(default_factory=list)  # units whose reduction has been started
    arriving: dict[ShardedParam, bool] = field(default_factory=dict)  # whose gradients are being accumulated


def calling_frame() -> FrameType:
    """Return the innermost frame in which torch calls a module; the outermost of all if that is compiled."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__") != nn.Module.__module__:
        frame = frame.f_back
    return frame

"""Record the calls of units in forward, and the progress of backward among them: data of ``schedule.py``.

Moments count the begins and ends of all calls. Two calls inside the root's::

    moment    1            2         3          4            5
              root begins  A begins  A ends     B begins     B ends

What B computes is computed after moment 4 and before 5. Autograd runs the node that was made last first. So
when it runs a node that was made after moment m and before m + 1, it is done with all that was made later.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from shardtrain.engine.reduce import Reduction
from shardtrain.engine.shard import ShardedParam
from shardtrain.engine.unit import Unit


@dataclass(eq=False, slots=True)
class Call:
    """Record an outermost call of a unit's modules.

    ``marked``: on some rank autograd may run a node that made one of the call's outputs. All ranks then
    gather the unit in backward.
    """

    unit: Unit
    began: int
    ended: int = sys.maxsize
    depth: int = 1  # how many calls of the unit's modules are nested
    marked: bool = False


Record = list[Call]  # the ended calls of one forward, in the order in which they ended


@dataclass(eq=False)
class Backward:
    """Hold the progress of one backward, which descends from the last moment of forward to the first.

    The first four fields are those of the forward whose calls backward is among; see `Schedule._enter`.
    """

    record: Record = field(default_factory=list)
    ahead: Record = field(default_factory=list)  # calls of `record` that are not reached, the next one last
    first: dict[Unit, int] = field(default_factory=dict)  # when each unit's first call began
    order: list[Unit] = field(default_factory=list)  # units by `first`, the next to be completed last
    moment: int = sys.maxsize  # backward is done with all that was computed later
    entered: dict[Unit, None] = field(default_factory=dict)  # units whose backward has begun, in order
    launched: dict[Unit, None] = field(default_factory=dict)  # units whose reduction has been started
    under_way: deque[Reduction] = field(default_factory=deque)  # not finished yet, the oldest first
    before: list[tuple[ShardedParam, Tensor]] = field(default_factory=list)  # gradients put aside meanwhile
    captured: list[str] = field(default_factory=list)  # parameters whose gradient autograd did not keep

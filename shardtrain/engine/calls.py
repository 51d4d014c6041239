"""Record the calls of units in forward, and descend through them in backward.

This is its own file because it is about order alone: it gathers and reduces nothing.

Moments count the begins and ends of all calls. Two calls inside the root's::

    moment    1            2         3          4            5
              root begins  A begins  A ends     B begins     B ends

What B computes is computed after moment 4 and before 5. Autograd runs the node that was made last first. So
when it runs a node that was made after moment m and before m + 1, it is done with all that was made later.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, device, dtype

from shardtrain.engine.reduce import Reduction
from shardtrain.engine.shard import ShardedParam
from shardtrain.engine.unit import Unit

_PLAIN = (type(None), bool, int, float, complex, str, bytes, dtype, device)  # hide no tensors


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

    def mark(self, tensors: Iterable[Tensor], reach: Callable[[Any], None]) -> None:
        """Have autograd call ``reach`` before it runs the nodes that made ``tensors``.

        Work in place on a view gives it another node, and leaves its base's.
        """
        for tensor in tensors:
            for made in (tensor, tensor._base):
                if made is not None and (node := made.grad_fn) is not None:
                    node.register_prehook(reach)
                    self.marked = True

    def hides(self, found: Iterable[Any]) -> bool:
        """Return whether the unit must stay gathered through backward, which its output may not announce.

        It must if the leaves ``found`` in the output may hide tensors in objects, or are views of parameters.
        """
        for leaf in found:
            if self.unit.shows(leaf) if isinstance(leaf, Tensor) else not isinstance(leaf, _PLAIN):
                return True
        return False


Record = list[Call]  # the ended calls of one forward, in the order in which they ended


class Descent:
    """Go down from the last moment of a forward to the first, and say what becomes of its units."""

    def __init__(self) -> None:
        self.record: Record = []
        self.moment = sys.maxsize  # backward is done with all that was computed later
        self._ahead: Record = []  # calls that are not reached, the next one last
        self._first: dict[Unit, int] = {}  # when each unit's first call began
        self._order: list[Unit] = []  # units by `_first`, the next to be completed last

    def enter(self, record: Record, units: Iterable[Unit]) -> None:
        """Begin with the last call of ``record``. ``units`` are those to be completed."""
        self.record, self.moment, self._ahead = record, sys.maxsize, list(record)
        self._first = {call.unit: call.began for call in sorted(record, key=lambda call: -call.began)}
        self._order = sorted(units, key=lambda unit: self._first.get(unit, 0))

    def to(self, moment: int) -> Iterator[tuple[Unit, int, bool]]:
        """Yield units to open, where a call of theirs ended after ``moment`` (True), and to complete (False).

        With each comes the moment that is reached. A unit is complete before its first call began. The order
        depends on ``record`` alone, however many steps are made.
        """
        while self._ahead and self._ahead[-1].ended > moment:
            call = self._ahead.pop()
            if call.marked:
                yield from self._begun_after(call.ended)
                yield call.unit, call.ended, True
        yield from self._begun_after(moment)
        self.moment = moment

    def _begun_after(self, moment: int) -> Iterator[tuple[Unit, int, bool]]:
        while self._order and self._first.get(self._order[-1], 0) > moment:
            yield self._order.pop(), moment, False

    @property
    def following(self) -> Unit | None:
        """The unit that will be opened next."""
        return next((call.unit for call in reversed(self._ahead) if call.marked), None)


@dataclass(eq=False)
class Backward:
    """Hold the progress of one backward."""

    descent: Descent = field(default_factory=Descent)
    entered: dict[Unit, None] = field(default_factory=dict)  # units whose backward has begun, in order
    launched: dict[Unit, None] = field(default_factory=dict)  # units whose reduction has been started
    under_way: deque[Reduction] = field(default_factory=deque)  # not finished yet, the oldest first
    before: list[tuple[ShardedParam, Tensor]] = field(default_factory=list)  # gradients put aside meanwhile
    captured: list[str] = field(default_factory=list)  # parameters whose gradient autograd did not keep

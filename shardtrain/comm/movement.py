"""The movements between ranks, and the names under which meter, trace and guard know each of them."""

from __future__ import annotations

from enum import Enum


class Movement(Enum):
    """What ranks do together.

    ``counted``: its key in `Meter`, as torch calls it. ``traced``: the kind of its span in a `Trace`; empty
    where it has none of its own. ``doing``: what the guard says that a rank is doing. ``number``: stands for
    it in the guard's messages.
    """

    GATHER = "all_gather", "gather", "gathering"
    REDUCE = "reduce_scatter", "reduce", "reducing"
    AVERAGE = "all_reduce", "", "averaging"  # across replicas, as part of a reduction
    ALL_REDUCE = "all_reduce", "", "all-reducing"
    BROADCAST = "broadcast", "", "broadcasting"
    ALL_TO_ALL = "all_to_all", "", "exchanging"
    ENTER = "fence", "", "entering"
    LEAVE = "fence", "", "leaving"
    STEP = "fence", "", "stepping"  # the optimizer, since the last forward
    SHARE = "", "", "sharing"  # memory, between the ranks of a host

    def __init__(self, counted: str, traced: str, doing: str) -> None:
        self.counted, self.traced, self.doing = counted, traced, doing
        self.number = len(type(self).__members__)


# Every unit of every step makes some: on Python 3.11 `Movement.GATHER` takes ten times as long as a global.
MOVEMENTS = tuple(Movement)
GATHER, REDUCE, AVERAGE, ALL_REDUCE, BROADCAST, ALL_TO_ALL, ENTER, LEAVE, STEP, SHARE = Movement

"""When units are gathered, shown, released and reduced: decided here, and carried out by ``driver.py``.

No tensors: events come in, calls of verbs go out. One step over units ``A B C`` and the root ``R`` (the
parameters of no other unit)::

    event                  verbs
    begin                  reshard all
    enter R                gather R, gather A, show R     A followed R in the last forward
    enter A                gather B, show A
    leave A                hide A, release A             both are a `reshard`
    enter B, leave B       gather C, show B, hide B       backward begins with the last two calls
    enter C, leave C       show C, hide C
    leave R, end_forward                                  a loss may use the root's parameters
    begin_backward
    reach (in C)           show C                         B is gathered
    reach (in B)           take C, reshard C, reduce C, gather A, show B
    ...
    end_backward           ..., take R, reshard R, reduce R, finish all

All ranks must start the same movements in the same order, so what is started depends on calls alone, never on
which outputs have a gradient on this rank. Forward gathers units in the order in which they are called, and
records the calls. Moments count the begins and ends of all calls: R begins at 1, A begins at 2 and ends at 3,
B begins at 4 and ends at 5. What B computes is computed after moment 4 and before 5. Autograd runs the node
that was made last first. So when it runs a node that was made after moment m and before m + 1, it is done
with all that was made later, and backward *descends* to m. A unit is gathered where a call of it ended, and
released where that call began. Where its first call began, its gradients are complete: they are taken and
reduced. This holds for nested and repeated calls.

A unit that is called by itself, outside of the root's forward, has a forward of its own. Backward descends
through those that it reaches, the latest first.

Besides the root and units whose call is under way, in forward or backward, at most two units are gathered:
the last two that forward called, or the next one. If the next call is of the unit that was just called, as in
``A A B``, this one stays, too: A and B are gathered between the two calls. The root stays gathered from
forward to backward, and so do units that return objects or views, whose backward no node announces. What
backward computes again stays until backward has passed its call. Where units keep their full vectors after
forward, all may be gathered. Reductions under way hold at most ``room`` bytes, or one.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar


class Facts(Hashable, Protocol):
    """What the schedule knows of a unit. ``keeps``: its full vector stays gathered after forward."""

    @property
    def gradient_bytes(self) -> int: ...

    @property
    def keeps(self) -> bool: ...


U = TypeVar("U", bound=Facts)
U_contra = TypeVar("U_contra", bound=Facts, contravariant=True)


class Actor(Protocol[U_contra]):
    """What does as the schedule decides. Each verb is called only when it changes something.

    ``show`` waits for what ``gather`` has started, and lets parameters show full values. ``hide`` lets them
    show local shards; then ``release`` frees the full vector. ``lend`` lets autograd add to gradients that
    wait, ``take`` takes those that it has made. ``finish`` waits for what ``reduce`` has started.
    """

    def gather(self, unit: U_contra) -> None: ...
    def show(self, unit: U_contra) -> None: ...
    def hide(self, unit: U_contra) -> None: ...
    def release(self, unit: U_contra) -> None: ...
    def lend(self, unit: U_contra) -> None: ...
    def take(self, unit: U_contra) -> None: ...
    def reduce(self, unit: U_contra) -> None: ...
    def finish(self, unit: U_contra) -> None: ...


@dataclass(eq=False, slots=True)
class UnitCall(Generic[U]):
    """An outermost call of a unit.

    ``announced``: on some rank autograd may run a node that made one of the call's outputs. All ranks then
    gather the unit in backward.
    """

    unit: U
    began: int
    ended: int = sys.maxsize
    depth: int = 1  # how many calls of the unit are nested
    announced: bool = False


class Edge(NamedTuple):
    """The end or the beginning of a call. No two edges have one moment."""

    moment: int
    call: UnitCall[Any]
    is_end: bool


@dataclass(eq=False)
class Forward(Generic[U]):
    """The announced calls of one forward, the root's or a unit's own, in the order in which they ended."""

    calls: list[UnitCall[U]] = field(default_factory=list)


@dataclass(eq=False)
class Backward(Generic[U]):
    """The progress of one backward."""

    room: int  # bytes of full gradients whose reductions may be under way
    accumulates: frozenset[U] = frozenset()  # units that it does not reduce
    forward: Forward[U] = field(default_factory=Forward)  # the one that it descends through
    moment: int = sys.maxsize  # it is done with all that was computed later
    edges: list[Edge] = field(default_factory=list)  # ends and begins that are not reached, the next one last
    first: dict[U, int] = field(default_factory=dict)  # when each unit's first call began
    following: dict[int, U] = field(default_factory=dict)  # by moments of ends: the next other unit
    entered: dict[U, None] = field(default_factory=dict)  # units that have been opened, in order
    reduced: dict[U, None] = field(default_factory=dict)  # units whose reduction was started, in order
    reducing: deque[U] = field(default_factory=deque)  # reductions that are not finished, the oldest first
    bytes_reducing: int = 0  # of their full gradients


class Schedule(Generic[U]):
    """The decisions for the ``units`` of one model, the root first; ``act`` does what is decided."""

    def __init__(self, units: Sequence[U], act: Actor[U]) -> None:
        self.units = tuple(units)
        self.root = units[0]
        self.act = act
        self.trains: set[U] = set(units)  # with a parameter that requires a gradient
        self.keeps = {unit for unit in units if unit.keeps}  # these stay gathered after forward
        self.accumulates: frozenset[U] = frozenset()  # the next backward does not reduce these (`no_sync`)
        self.calls: dict[U, UnitCall[U]] = {}  # outermost calls under way
        self.gathered: set[U] = set()  # or being gathered
        self.shown: set[U] = set()
        self.prefetched: dict[U, None] = {}  # gathered, and not shown since
        self.opened: set[U] = set()  # units whose call is under way in backward: they may get gradients
        self.unannounced: dict[U, None] = {}  # gathered until backward: perhaps no node announces it
        self.unreduced: set[U] = set()  # taken and not reduced, as of the end of the last backward
        self.forward: Forward[U] = Forward()  # the latest of the root
        self.recording: Forward[U] = self.forward  # has the calls under way: this, or one called by itself
        self.in_forward = False
        self.backward: Backward[U] | None = None
        self.moment = 0  # the latest at which a call began or ended
        self._order: list[U] = []  # units in the order in which this forward has called them
        self._expected: list[U] = []  # `_order` of the last forward
        self._following: list[U] = []  # see `_next_others`, of `_expected`
        self._alike = False  # whether this forward is like the last one until now
        self._ends: list[U] = []  # units of this forward's announced calls, in the order in which they ended
        self._expected_ends: list[U] = []  # `_ends` of the last forward that announced any
        self._unreached: dict[U, int] = {}  # when a unit's first call began whose backward has not come

    def uncalled(self, unit: U | None) -> list[U]:
        """Return the units that stayed shown for a next call, which is ``unit``'s instead, or none."""
        return [u for u in self.shown if u is not unit and u not in self.calls and u not in self.unannounced]

    # what users change between steps

    def keep_after_forward(self, unit: U, keeps: bool) -> None:
        """Let ``unit`` stay gathered from forward to backward, or not."""
        self.keeps = self.keeps | {unit} if keeps else self.keeps - {unit}

    def accumulate(self, units: Iterable[U]) -> None:
        """Let the next backwards reduce no gradients of ``units``, and those of all others."""
        self.accumulates = frozenset(units)

    def reshard_alone(self, unit: U, trains: set[U]) -> None:
        """Reshard ``unit``, which is called by itself."""
        self.trains = trains
        self.reshard(unit)

    # forward

    def begin_forward(self, trains: set[U]) -> None:
        """Reshard all units as the root is called: gathered values may be from before an update."""
        assert self.backward is None, "a backward computes again: its calls are not recorded"
        self.trains = trains
        for unit in self.units:
            self.reshard(unit)
        self._expected = self._order
        self._following = _next_others(self._expected)
        self._order = []
        if self._ends:  # an evaluation announces nothing
            self._expected_ends = self._ends
        self._ends = []
        self._alike = True
        self.forward = Forward()
        self.recording = self.forward
        self.in_forward = True

    def enter(self, unit: U) -> None:
        """Gather ``unit`` as a call of it begins."""
        if unit in self.calls:
            self.calls[unit].depth += 1
            return
        if not (self.calls or self.in_forward or self.backward):  # called by itself: a forward of its own
            self.recording = Forward()
        self.moment += 1
        self.calls[unit] = UnitCall(unit, self.moment)
        if self.backward is not None:  # which computes something again
            self._open(self.backward, unit)
            return
        if self.in_forward:
            self._compare(self._order, self._expected, unit)
        self._gather(unit)
        if self.in_forward and self._alike:
            self._prefetch()
        self._show(unit)

    def _compare(self, units: list[U], expected: Sequence[U], unit: U) -> None:
        """Append ``unit`` to ``units``. If ``expected`` has another one there, release what waits for it."""
        position = len(units)
        units.append(unit)
        if expected[position : position + 1] != [unit]:
            self._alike = False
            for other in self._in_advance() - {unit}:
                self.reshard(other)

    def _prefetch(self) -> None:
        """Gather what followed in the last forward; where all units keep their full vectors, all of them."""
        if len(self._order) == 1 and self.keeps.issuperset(self.units[1:]):
            for unit in self._expected[1:]:
                self._gather(unit)
        self._gather(self._following[len(self._order) - 1])

    def _in_advance(self) -> set[U]:
        """Return the units that are gathered for what follows, but for those that keep their full vectors."""
        return self.gathered - self.calls.keys() - self.unannounced.keys() - self.keeps

    def announce(self, unit: U) -> None:
        """Note that autograd may run a node that made an output of ``unit``'s call under way."""
        self.calls[unit].announced = True

    def leave(self, unit: U, learns: bool, unannounced: bool = False) -> None:
        """Reshard, hide or keep ``unit`` as a call of it ends, if it is the outermost one.

        ``learns``: a backward may follow. ``unannounced``: perhaps no node announces that it needs the unit.
        """
        call = self.calls[unit]
        if learns and unit in self.trains:  # on another rank an output may have a gradient
            call.announced = True
        call.depth -= 1
        if call.depth:
            return
        del self.calls[unit]
        self.moment += 1
        call.ended = self.moment
        if self.backward is not None:
            return
        if call.announced:
            self._record(call)
        if learns and (unannounced or unit is self.root):  # a loss may use the root's, as CLIP's temperature
            self.unannounced[unit] = None
        if not (self.calls or self.in_forward):
            self.recording = self.forward
        if unit in self.unannounced or self.is_called_next(unit):
            return
        if learns and (unit in self.keeps or self._begins_backward(call)):
            self._hide(unit)
        else:
            self.reshard(unit)

    def _record(self, call: UnitCall[U]) -> None:
        """Note the end of ``call``: backward will descend through it."""
        self._unreached.setdefault(call.unit, call.began)
        self.recording.calls.append(call)
        if self.in_forward and call.unit is not self.root:
            self._compare(self._ends, self._expected_ends, call.unit)

    def is_called_next(self, unit: U) -> bool:
        """Return whether the next call is expected to be ``unit``'s again, so that it stays shown."""
        position = len(self._order)
        following = self._expected[position : position + 1]
        if not (self.in_forward and self._alike and following == [unit]):
            return False
        return len(self._in_advance() | {unit}) <= 2

    def _begins_backward(self, call: UnitCall[U]) -> bool:
        """Return whether ``call``, which has ended, is one of the last two before the root's."""
        if not (self.in_forward and self._alike and call.announced and len(self._in_advance()) <= 2):
            return False
        return len(self._ends) > len(self._expected_ends) - 2

    def end_forward(self, failed: bool) -> None:
        """Release what was gathered and not used, as the root returns or (``failed``) raises."""
        self.in_forward = False
        if failed:
            self.calls.clear()
            self._order = self._expected  # the next forward is compared with the last complete one
            self._ends = self._expected_ends
            self._unreached = {}  # no backward of what it has recorded comes
        for unit in self.units:
            if unit in self.unannounced and not failed:  # of an earlier forward
                self._show(unit)
            elif failed or unit in self.prefetched or unit in self.shown:
                self.reshard(unit)

    def show_unannounced(self, unit: U) -> None:
        """Gather and show ``unit``, until the next backward ends: code outside of its calls uses it."""
        self.unannounced[unit] = None
        self._show(unit)
        self._unreached.setdefault(unit, self.moment)

    def hide_unannounced(self) -> None:
        """Let the parameters of units that stay gathered until backward show local shards."""
        for unit in self.unannounced:
            self._hide(unit)

    def reshard_unannounced(self, unit: U) -> None:
        """Reshard ``unit``, which no longer stays gathered until backward."""
        self.unannounced.pop(unit, None)
        self.reshard(unit)

    # backward

    def begin_backward(self, forward: Forward[U], trains: set[U], room: int) -> None:
        """Begin a backward, whose first node was made in ``forward``. ``room``: see `Backward`."""
        self.trains = trains
        self.backward = Backward(room, self.accumulates)
        for unit in [*self.prefetched]:  # by a forward, inside which this backward runs
            self.reshard(unit)
        for unit in self.unannounced:  # hidden since, or released
            self._show(unit)
        self._descend_into(self.backward, forward)

    def reach(self, forward: Forward[U], moment: int) -> None:
        """Descend to ``moment``: autograd runs a node that was made then, in ``forward``."""
        backward = self.backward
        assert backward is not None
        # Most nodes were made in the same call as the one before; some tensors only passed through a call.
        if moment >= backward.moment:
            return
        self._descend(backward, moment)
        if forward is not backward.forward:  # two forwards, one backward
            self._descend_into(backward, forward)
            self._descend(backward, moment)

    def arrive(self, unit: U) -> None:
        """Gather ``unit`` for a gradient that no output has announced."""
        assert self.backward is not None
        self._open(self.backward, unit)

    def end_backward(self) -> None:
        """Complete all units, start and finish all reductions.

        A unit that got gradients again after its reduction had started is reduced again.
        """
        backward = self.backward
        assert backward is not None
        self._descend(backward, -1)
        for unit in reversed(self.units):
            if unit in self.opened:
                self._complete(backward, unit, has_earlier=False)
        self.unreduced |= self.trains & backward.entered.keys()
        ready = [u for u in reversed(self.units) if u in self.unreduced and u not in backward.accumulates]
        for unit in ready:
            if unit not in backward.reduced:
                self._reduce(backward, unit)
        while backward.reducing:
            self._finish_oldest(backward)
        self.unreduced.difference_update(ready)
        self._end()

    def drop(self) -> None:
        """End a backward that has failed, and forget the gradients that wait."""
        self.opened.clear()
        self.unreduced.clear()
        self._end()

    def _end(self) -> None:
        self.backward = None
        if not self.in_forward:
            self.unannounced.clear()
            self._unreached.clear()
            self.forward = Forward()
            if not self.calls:
                self.recording = self.forward
        for unit in self.units:
            if unit not in self.calls:
                self.reshard(unit)

    def _descend_into(self, backward: Backward[U], forward: Forward[U]) -> None:
        """Continue at the end of ``forward``."""
        ends = [Edge(call.ended, call, True) for call in forward.calls]
        begins = [Edge(call.began, call, False) for call in forward.calls]
        backward.edges = sorted(ends + begins)
        backward.first = {call.unit: call.began for call in reversed(forward.calls)}
        ends = [edge for edge in reversed(backward.edges) if edge.is_end]
        others = _next_others([edge.call.unit for edge in ends])
        backward.following = {edge.moment: other for edge, other in zip(ends, others, strict=True)}
        backward.forward = forward

    def _descend(self, backward: Backward[U], moment: int) -> None:
        """Open units where a call of theirs ended after ``moment``, and close them where it began."""
        edges = backward.edges
        while edges and edges[-1].moment > moment:
            edge = edges.pop()
            unit = edge.call.unit
            if edge.is_end:
                self._gather(unit)
                self._gather(backward.following[edge.moment])
                self._open(backward, unit)
            elif unit in self.opened:
                if edge.moment == backward.first[unit]:
                    self._complete(backward, unit, self._unreached.get(unit, edge.moment) < edge.moment)
                elif next(each.call.unit for each in reversed(edges) if each.is_end) is not unit:
                    self._close(unit)
        backward.moment = moment

    def _open(self, backward: Backward[U], unit: U) -> None:
        """Gather ``unit``, whose parameters may get gradients from now on."""
        self._show(unit)
        if unit in self.unreduced:
            self.act.lend(unit)
        self.opened.add(unit)
        backward.entered[unit] = None

    def _close(self, unit: U) -> None:
        """Release ``unit``, of which an earlier call will be reached: autograd sums the gradients of both."""
        self.opened.discard(unit)
        if unit not in self.calls and unit not in self.unannounced and unit not in self.keeps:
            self.reshard(unit)

    def _complete(self, backward: Backward[U], unit: U, has_earlier: bool) -> None:
        """Take the gradients of ``unit``, release it, and start to reduce them.

        ``has_earlier``: an earlier call, of another forward, is not reached yet; it is reduced after that.
        """
        self.opened.discard(unit)
        reduces = unit in self.trains and unit not in backward.accumulates and not has_earlier
        if reduces:
            self._make_room(backward, unit)  # before `take` allocates another full gradient
        self.act.take(unit)
        if unit not in self.calls and not (has_earlier and unit in self.unannounced):
            self.reshard(unit)
        if reduces:
            self._reduce(backward, unit)

    def _make_room(self, backward: Backward[U], unit: U) -> None:
        """Finish reductions until the full gradient of ``unit`` fits beside those under way."""
        reducing = backward.reducing
        size = unit.gradient_bytes
        while reducing and (unit in reducing or backward.bytes_reducing + size > backward.room):
            self._finish_oldest(backward)

    def _reduce(self, backward: Backward[U], unit: U) -> None:
        self._make_room(backward, unit)
        self.act.reduce(unit)
        backward.reducing.append(unit)
        backward.bytes_reducing += unit.gradient_bytes
        backward.reduced[unit] = None

    def _finish_oldest(self, backward: Backward[U]) -> None:
        unit = backward.reducing.popleft()
        self.act.finish(unit)
        backward.bytes_reducing -= unit.gradient_bytes

    # movements

    def _gather(self, unit: U) -> None:
        if unit not in self.gathered:
            self.gathered.add(unit)
            self.prefetched[unit] = None
            self.act.gather(unit)

    def _show(self, unit: U) -> None:
        if unit not in self.shown:
            self._gather(unit)
            self.prefetched.pop(unit, None)
            self.shown.add(unit)
            self.act.show(unit)

    def _hide(self, unit: U) -> None:
        if unit in self.shown:
            self.shown.remove(unit)
            self.act.hide(unit)

    def reshard(self, unit: U) -> None:
        """Hide and release ``unit``. Its next use gathers it again."""
        self._hide(unit)
        if unit in self.gathered:
            self.gathered.remove(unit)
            self.prefetched.pop(unit, None)
            self.act.release(unit)


def _next_others(units: Sequence[U]) -> list[U]:
    """Return for each of ``units`` the next one that is another; itself if there is none."""
    others = [*units]
    for position in range(len(units) - 2, -1, -1):
        following = units[position + 1]
        others[position] = others[position + 1] if following is units[position] else following
    return others

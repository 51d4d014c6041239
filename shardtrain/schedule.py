"""When units are gathered, prefetched, released and reduced.

One step over units ``A B`` and the root ``R`` (what no unit took)::

    forward   gather R | gather A, prefetch B, compute A, release A | compute B, release B
    backward  gather B, prefetch A, compute, reduce B, release B | compute A, reduce A, release A | reduce R
    end       wait for the last reduction; every parameter shows its local piece again

The root is never released between forward and backward, which would buy nothing. Besides the root at
most two units are gathered at once: the one that computes and the next one. At most one reduction is
under way.

Ranks must start the same movements in the same order. Gathers follow the order in which units run.
Reductions are started in the reverse of the order in which units were first entered in forward. A rank
on which some gradient never comes (a parameter unused there) joins all the same: autograd runs nodes
latest first, so once the backward of a unit begins, every unit entered after it in forward is over, and
what has not arrived there counts as zero. For the same reason frozen parameters, whose last use no
gradient announces, can be released then. And a unit whose outputs the loss does not depend on, here, is
gathered and reduced all the same, when its turn is over: on another rank the loss may depend on them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import nn

from shardtrain import gather
from shardtrain.comm import trace
from shardtrain.comm.meter import waiting
from shardtrain.comm.transport import Transport
from shardtrain.reduce import Reduction
from shardtrain.unit import State, Unit


class Order:
    """The sequence of units seen last time, followed for as long as it repeats itself."""

    def __init__(self) -> None:
        self._expected: list[Unit] = []
        self.seen: list[Unit] = []
        self._repeats = False

    def begin(self) -> None:
        self._expected, self.seen = self.seen, []
        self._repeats = True

    def next_after(self, unit: Unit) -> Unit | None:
        """Note that ``unit`` is entered now; return the unit that will follow if all is as last time."""
        at = len(self.seen)
        self.seen.append(unit)
        self._repeats = self._repeats and at < len(self._expected) and self._expected[at] is unit
        follows = self._repeats and at + 1 < len(self._expected)
        return self._expected[at + 1] if follows else None


class Schedule:
    """The life of all units of one sharded module. ``engine`` calls it from hooks, and nothing else does.

    ``tell_reduced`` is called with every parameter that a backward has given a reduced gradient, at its end.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        transport: Transport,
        reshard_after_forward: bool,
        tell_reduced: Callable[[nn.Parameter], None],
    ) -> None:
        self.units = tuple(units)
        self.root = units[0]
        self.transport = transport
        self.reshard_after_forward = reshard_after_forward
        self._tell_reduced = tell_reduced
        self.reduce_gradients = True  # False inside `no_sync`
        self._reductions = {unit: Reduction(unit, transport) for unit in units}
        self._forward, self._backward = Order(), Order()
        self._depth = dict.fromkeys(units, 0)  # calls of a unit's modules that are under way
        self._in_forward = False  # inside the root module's forward
        self._in_backward = False
        self._entered: dict[Unit, None] = {}  # units whose backward has begun, in that order
        self._current: list[Unit] = []  # those of them that autograd has not left behind
        self._completed: set[Unit] = set()  # units all of whose gradients have arrived
        self._position: dict[Unit, int] = {}  # when forward first entered each unit
        self._to_reduce: deque[Unit] = deque()  # units whose reduction has not been started, in order
        self._launched: list[Unit] = []  # units whose reduction has been started in this backward
        self._left: dict[Unit, None] = {}  # units whose backward must come, in the order forward left them
        self._owed: set[Unit] = set()  # units whose gradients wait under `no_sync`

    def at_rest(self) -> bool:
        """Whether no step is under way, so that every parameter shows its local piece.

        A backward that an exception ended is forgotten here.
        """
        if self._in_backward and not in_autograd():
            self.recover()
        return not (self._in_forward or self._in_backward or self.root.pinned)

    @property
    def under_way(self) -> tuple[str, Unit | None]:
        """What goes on now, for those who watch: the phase, and the unit that computes if it is known."""
        if self._in_backward:
            return "backward", next(reversed([*self._entered]), None)
        if self._in_forward:
            return "forward", next((unit for unit in reversed(self.units) if self._depth[unit]), None)
        return "rest", None

    def _fence(self, what: str) -> None:
        with waiting("fence", "the model", self.root.device):
            self.transport.fence(what)

    # forward

    def outermost(self, unit: Unit) -> bool:
        """Whether just one call of ``unit``'s modules is under way, so that its output leaves the unit."""
        return self._depth[unit] == 1

    def begin_forward(self) -> None:
        """The root module is entered. What was gathered before may be older than the last update.

        A forward still under way was interrupted from the keyboard, which runs no hooks.
        """
        if self._in_backward:
            return
        for unit in self.units:
            self._depth[unit] = 0
            gather.release(unit)
            unit.cast()
        self._fence("entering")
        self._forward.begin()
        self._left.clear()
        self._in_forward = True

    def end_forward(self, failed: bool) -> None:
        """The root module is left, by return or (``failed``) by exception: nothing stays half gathered."""
        if self._in_backward:
            return
        self._in_forward = False
        for unit in self.units:
            if unit.state is State.GATHERING:
                gather.release(unit)
        if not failed:  # an exception is to be heard at once, not after the others
            self._fence("leaving")

    def before_forward(self, unit: Unit) -> None:
        """One of ``unit``'s modules is entered: its parameters must be whole."""
        self._depth[unit] += 1
        if self._depth[unit] > 1:
            return
        if not (self._in_forward or self._in_backward):
            gather.release(unit)  # called by itself: gathered before some update, perhaps
            unit.cast()
            self._fence("entering")
        gather.open_full(unit, self.transport)
        if self._in_forward and not self._in_backward:
            self._prefetch(self._forward.next_after(unit))
        trace.begin("forward", unit.title)

    def after_forward(self, unit: Unit, backward_will_tell: bool, failed: bool) -> None:
        """One of ``unit``'s modules is left.

        ``backward_will_tell``: whether ``before_backward`` is sure to be called before the parameters are
        needed again. If not, they stay in full until the end of backward.
        """
        self._depth[unit] = max(0, self._depth[unit] - 1)
        if not self._depth[unit]:
            trace.end("forward", unit.title)
        if self._depth[unit] or self._in_backward or unit.pinned:
            return
        if not (self._in_forward or failed):
            self._fence("leaving")
        if not backward_will_tell:
            return
        if torch.is_grad_enabled() and not failed and (unit is self.root or not self.reshard_after_forward):
            unit.show_local()
        else:
            gather.release(unit)

    def expect_backward(self, unit: Unit) -> None:
        """Forward leaves ``unit`` now, with outputs whose gradients will announce its backward."""
        if self._in_forward and not self._in_backward:
            self._left.pop(unit, None)
            self._left[unit] = None

    # backward

    @property
    def in_backward(self) -> bool:
        return self._in_backward

    def before_backward(self, unit: Unit) -> None:
        """The gradient of one of ``unit``'s outputs is known: its parameters must be whole."""
        if not self._in_backward:
            self._begin_backward()
        if unit in self._entered:
            gather.open_full(unit, self.transport)
            return
        if unit in self._left:
            self._enter_skipped(unit)
        self._pass_over_units_after(unit)
        gather.open_full(unit, self.transport)
        self._enter(unit)
        self._prefetch(self._backward.next_after(unit))
        trace.begin("backward", unit.title)

    def _enter(self, unit: Unit) -> None:
        self._entered[unit] = None
        self._current.append(unit)

    def _enter_skipped(self, until: Unit | None = None) -> None:
        """Enter units whose outputs have got no gradient on this rank: last left first, down to ``until``."""
        while self._left:
            unit, _ = self._left.popitem()
            if unit is until:
                break
            self.before_backward(unit)

    def _begin_backward(self) -> None:
        """The first sign of a backward.

        Raises:
            ValueError: it is to be differentiated in turn.
        """
        if torch.is_grad_enabled():
            raise ValueError(
                "double backward (create_graph=True) is not supported: the graph would need parameters that "
                "are released when this backward ends; compute gradients of gradients on an unsharded model"
            )
        self._in_backward = True
        self._backward.begin()
        for reduction in self._reductions.values():
            reduction.begin_backward()
        seen = dict.fromkeys(self._forward.seen)
        unseen = [unit for unit in self.units if unit not in seen]
        self._position = {unit: position for position, unit in enumerate([*seen, *unseen])}
        order = [*reversed(seen), *reversed(unseen)]
        self._to_reduce = deque(unit for unit in order if self._reductions[unit].trainable)
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # type: ignore[attr-defined]

    def _pass_over_units_after(self, unit: Unit) -> None:
        """Close every unit that forward entered after ``unit`` was left: autograd is done with it."""
        position = self._position[unit]
        for other in [o for o in self._current if self._position[o] > position and not unit.holds(o)]:
            self._current.remove(other)
            self._complete(other)
            if not self._depth[other]:
                gather.release(other)

    def gradient_arrived(self, unit: Unit, segment: int, index: int) -> None:
        """Autograd has accumulated the gradient of one parameter."""
        if not unit.segments[segment].shows_full:
            return  # a loss on the local pieces themselves: that gradient belongs to this rank alone
        if not self._in_backward:
            self._begin_backward()
        if unit not in self._entered:
            self._enter(unit)
        reduction = self._reductions[unit]
        if reduction.collect(segment, index):
            self._complete(unit)
            # Autograd accumulates a gradient after every use of the parameter that feeds it.
            if reduction.all_trainable and not self._depth[unit]:
                gather.release(unit)

    def _complete(self, unit: Unit) -> None:
        """All gradients of ``unit`` that will come have come; start the reductions whose turn it is."""
        trace.end("backward", unit.title)
        self._reductions[unit].begin_again()
        self._completed.add(unit)
        while self._to_reduce and self._to_reduce[0] in self._completed:
            next_unit = self._to_reduce.popleft()
            if self.reduce_gradients:
                self._launch(next_unit)

    def _launch(self, unit: Unit) -> None:
        self._finish_last()
        self._reductions[unit].launch()
        self._launched.append(unit)

    def _finish_last(self) -> None:
        if self._launched:
            self._reductions[self._launched[-1]].finish()

    def _end_backward(self) -> None:
        """Autograd is done: reduce what had to wait, go back to rest, and tell users."""
        self._enter_skipped()
        if self.reduce_gradients:
            self._reduce_the_rest()
        else:
            self._owed.update(self._entered)
        launched = dict.fromkeys(self._launched)
        self._rest()
        self._fence("leaving")
        given = dict.fromkeys(param for unit in launched for param in self._reductions[unit].give())
        for unit in self._owed:
            self._reductions[unit].show_waiting()
        for param in given:
            self._tell_reduced(param)

    def _reduce_the_rest(self) -> None:
        due = self._owed.union(self._entered)
        late = [unit for unit in self._to_reduce if unit in due]
        again = [unit for unit in self._launched if self._reductions[unit].waiting]
        for unit in [*late, *again]:
            self._launch(unit)
        self._finish_last()
        self._owed.clear()

    def require_reduced(self, what: str) -> None:
        """Refuse ``what`` while gradients wait under `no_sync`.

        Raises:
            ValueError: some do.
        """
        if self._owed:
            raise ValueError(
                f"{what} while gradients wait under no_sync to be reduced: run the last backward outside of "
                "no_sync first, or clear them with zero_grad() and run another one"
            )

    def recover(self) -> None:
        """Forget a backward that did not end: an exception went through it."""
        for reduction in self._reductions.values():
            reduction.drop()
        for unit in self._entered:
            unit.drop_kept_grads()
        self._owed.clear()
        self._rest()

    def _rest(self) -> None:
        self._in_backward = False
        self._entered.clear()
        self._current.clear()
        self._completed.clear()
        self._launched.clear()
        self._left.clear()
        for unit in self.units:
            gather.release(unit)

    def _prefetch(self, unit: Unit | None) -> None:
        if unit is not None and unit.state is State.SHARDED and not unit.pinned:
            gather.launch(unit, self.transport)


def in_autograd() -> bool:
    """Whether this thread is inside a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)

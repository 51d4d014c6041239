"""When units are gathered, prefetched, released and reduced.

One step over units ``A B`` and the root ``R`` (what no unit took)::

    forward   gather R | gather A, prefetch B, compute A, release A | compute B, release B
    backward  gather B, prefetch A, compute, reduce B, release B | compute A, reduce A, release A | reduce R
    end       wait for the last reduction; every parameter shows its local piece again

The root is never released between forward and backward, which would buy nothing. Besides the root at most two
units are gathered at once: the one that computes and the next one. At most one reduction is under way.

Ranks must start the same movements in the same order. Gathers follow the order in which units run. Reductions
are started in the reverse of the order in which forward first entered the units. A rank on which some
gradient never comes (a parameter unused there) joins all the same: autograd runs nodes latest first, so once
the backward of a unit begins, every unit entered after it in forward is over, and what has not arrived there
counts as zero. For the same reason frozen parameters, whose last use no gradient announces, can be released
then. A unit whose outputs the loss does not depend on, here, is gathered and reduced when its turn is over:
on another rank the loss may depend on them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from shardtrain.comm import trace
from shardtrain.comm.meter import waiting
from shardtrain.comm.movement import ENTER, LEAVE, Movement
from shardtrain.engine.reduce import Reduction
from shardtrain.engine.unit import State, Unit


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
        return self._expected[at + 1] if self._repeats and at + 1 < len(self._expected) else None


@dataclass(eq=False)
class Backward:
    """One backward under way."""

    position: dict[Unit, int]  # when forward first entered each unit
    to_reduce: deque[Unit]  # units whose reduction has not been started, in order
    entered: dict[Unit, None] = field(default_factory=dict)  # units whose backward has begun, in that order
    current: list[Unit] = field(default_factory=list)  # those of them that autograd has not left behind
    completed: set[Unit] = field(default_factory=set)  # units all of whose gradients have arrived
    launched: list[Unit] = field(default_factory=list)  # units whose reduction has been started

    def enter(self, unit: Unit) -> None:
        self.entered[unit] = None
        self.current.append(unit)


class Schedule:
    """The life of all units of one sharded module. Hooks call it, and nothing else does.

    ``tell_reduced`` is called at the end of a backward, with the parameters that got a reduced gradient in
    it.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        reshard_after_forward: bool,
        tell_reduced: Callable[[Sequence[nn.Parameter]], None],
    ) -> None:
        self.units = tuple(units)
        self.root = units[0]
        self.reshard_after_forward = reshard_after_forward
        self._tell_reduced = tell_reduced
        self.reduce_gradients = True  # False inside `no_sync`
        self._reductions = {unit: Reduction(unit) for unit in units}
        self._forward_order, self._backward_order = Order(), Order()
        self._depth = dict.fromkeys(units, 0)  # calls of a unit's modules that are under way
        self._in_forward = False  # inside the root module's forward
        self._backward: Backward | None = None
        self._left: dict[Unit, None] = {}  # units whose backward must come, in the order forward left them
        self._unreduced: set[Unit] = set()  # units whose gradients wait under `no_sync`

    @property
    def at_rest(self) -> bool:
        """Whether no step is under way, so that every parameter shows its local piece."""
        return not (self._in_forward or self._backward or self.root.pinned)

    @property
    def under_way(self) -> tuple[str, Unit | None]:
        """The phase of the step, and the unit that computes if it is known."""
        if self._backward:
            return "backward", next(reversed(self._backward.entered), None)
        if self._in_forward:
            return "forward", next((unit for unit in reversed(self.units) if self._depth[unit]), None)
        return "rest", None

    def _fence(self, what: Movement) -> None:
        with waiting(what, "the model", self.root.device):
            self.root.transport.fence(what)

    # forward

    def outermost(self, unit: Unit) -> bool:
        """Return whether just one call of ``unit``'s modules is under way: its output leaves the unit."""
        return self._depth[unit] == 1

    def begin_forward(self) -> None:
        """Start anew as the root module is entered: what was gathered may be older than the last update.

        A forward that is still under way was interrupted from the keyboard, which runs no hooks.
        """
        if self._backward:
            return
        for unit in self.units:
            self._depth[unit] = 0
            unit.release()
            unit.cast()
        self._fence(ENTER)
        self._forward_order.begin()
        self._left.clear()
        self._in_forward = True

    def end_forward(self, failed: bool) -> None:
        """Leave nothing half gathered as the root module returns or (``failed``) raises."""
        if self._backward:
            return
        self._in_forward = False
        for unit in self.units:
            if unit.state is State.GATHERING:
                unit.release()
        if not failed:  # an exception must be heard at once, not after the others
            self._fence(LEAVE)

    def before_forward(self, unit: Unit) -> None:
        """Make ``unit`` whole as one of its modules is entered."""
        self._depth[unit] += 1
        if self._depth[unit] > 1:
            return
        if not (self._in_forward or self._backward):
            unit.release()  # called by itself: gathered before some update, perhaps
            unit.cast()
            self._fence(ENTER)
        unit.open_full()
        if self._in_forward and not self._backward:
            self._prefetch(self._forward_order.next_after(unit))
        trace.begin("forward", unit.title)

    def after_forward(self, unit: Unit, backward_will_tell: bool, failed: bool) -> None:
        """Release ``unit`` as one of its modules is left, if this was the outermost call.

        ``backward_will_tell``: whether ``before_backward`` is sure to be called before the parameters are
        needed again. If not, they stay in full until the end of backward.
        """
        self._depth[unit] = max(0, self._depth[unit] - 1)
        if not self._depth[unit]:
            trace.end("forward", unit.title)
        if self._depth[unit] or self._backward or unit.pinned:
            return
        if not (self._in_forward or failed):
            self._fence(LEAVE)
        if not backward_will_tell:
            return
        if torch.is_grad_enabled() and not failed and (unit is self.root or not self.reshard_after_forward):
            unit.show_local()
        else:
            unit.release()

    def expect_backward(self, unit: Unit) -> None:
        """Note that forward leaves ``unit`` with outputs whose gradients will announce its backward."""
        if self._in_forward and not self._backward:
            self._left.pop(unit, None)
            self._left[unit] = None

    # backward

    @property
    def in_backward(self) -> bool:
        return self._backward is not None

    def before_backward(self, unit: Unit) -> None:
        """Make ``unit`` whole as the gradient of one of its outputs is known."""
        backward = self._backward or self._begin_backward()
        if unit in backward.entered:
            unit.open_full()
            return
        if unit in self._left:
            self._enter_skipped(unit)
        self._pass_over_units_after(backward, unit)
        unit.open_full()
        backward.enter(unit)
        self._prefetch(self._backward_order.next_after(unit))
        trace.begin("backward", unit.title)

    def _enter_skipped(self, until: Unit | None = None) -> None:
        """Enter units whose outputs have got no gradient on this rank: last left first, down to ``until``."""
        while self._left:
            unit, _ = self._left.popitem()
            if unit is until:
                break
            self.before_backward(unit)

    def _begin_backward(self) -> Backward:
        """Prepare at the first sign of a backward.

        Raises ValueError if it is to be differentiated in turn.
        """
        if torch.is_grad_enabled():
            raise ValueError(
                "double backward (create_graph=True) is not supported: the graph would need parameters that "
                "are released when this backward ends; compute gradients of gradients on an unsharded model"
            )
        self._backward_order.begin()
        for reduction in self._reductions.values():
            reduction.begin_backward()
        seen = dict.fromkeys(self._forward_order.seen)
        unseen = [unit for unit in self.units if unit not in seen]
        order = [*reversed(seen), *reversed(unseen)]
        self._backward = backward = Backward(
            position={unit: position for position, unit in enumerate([*seen, *unseen])},
            to_reduce=deque(unit for unit in order if self._reductions[unit].trainable),
        )
        end = partial(self._end_backward, backward)
        torch.autograd.Variable._execution_engine.queue_callback(end)  # type: ignore[attr-defined]
        return backward

    def _pass_over_units_after(self, backward: Backward, unit: Unit) -> None:
        """Close every unit that forward entered after ``unit`` was left: autograd is done with it."""
        position = backward.position
        at = position[unit]
        for other in [o for o in backward.current if position[o] > at and not unit.holds(o)]:
            backward.current.remove(other)
            self._complete(backward, other)
            if not self._depth[other]:
                other.release()

    def gradient_arrived(self, unit: Unit, segment: int, index: int) -> None:
        """Take the gradient that autograd has accumulated in one parameter."""
        if not unit.segments[segment].shows_full:
            return  # a loss on the local pieces themselves: that gradient belongs to this rank alone
        backward = self._backward or self._begin_backward()
        if unit not in backward.entered:
            backward.enter(unit)
        reduction = self._reductions[unit]
        if reduction.collect(segment, index):
            self._complete(backward, unit)
            # Autograd accumulates a gradient after every use of the parameter that feeds it.
            if reduction.all_trainable and not self._depth[unit]:
                unit.release()

    def _complete(self, backward: Backward, unit: Unit) -> None:
        """Start the reductions whose turn it is, now that ``unit`` gets no further gradient."""
        trace.end("backward", unit.title)
        self._reductions[unit].begin_again()
        backward.completed.add(unit)
        while backward.to_reduce and backward.to_reduce[0] in backward.completed:
            next_unit = backward.to_reduce.popleft()
            if self.reduce_gradients:
                self._launch(backward, next_unit)

    def _launch(self, backward: Backward, unit: Unit) -> None:
        self._finish_last(backward)
        self._reductions[unit].launch()
        backward.launched.append(unit)

    def _finish_last(self, backward: Backward) -> None:
        if backward.launched:
            self._reductions[backward.launched[-1]].finish()

    def _end_backward(self, backward: Backward) -> None:
        """Reduce what had to wait, now that autograd is done; return to rest, and tell users."""
        self._enter_skipped()
        if self.reduce_gradients:
            self._reduce_the_rest(backward)
        else:
            self._unreduced.update(backward.entered)
        launched = dict.fromkeys(backward.launched)
        self._rest()
        self._fence(LEAVE)
        given = [param for unit in launched for param in self._reductions[unit].give()]
        for unit in self._unreduced:
            self._reductions[unit].show_waiting()
        self._tell_reduced(given)

    def _reduce_the_rest(self, backward: Backward) -> None:
        due = self._unreduced.union(backward.entered)
        late = [unit for unit in backward.to_reduce if unit in due]
        again = [unit for unit in backward.launched if self._reductions[unit].waiting]
        for unit in [*late, *again]:
            self._launch(backward, unit)
        self._finish_last(backward)
        self._unreduced.clear()

    def require_reduced(self, what: str) -> None:
        """Refuse ``what`` while gradients wait under `no_sync`. Raises ValueError if some do."""
        if self._unreduced:
            raise ValueError(
                f"{what} while gradients wait under no_sync to be reduced: run the last backward outside of "
                "no_sync first, or clear them with zero_grad() and run another one"
            )

    def recover(self) -> None:
        """Forget a backward that an exception ended, if there is one."""
        if self._backward is None or torch._C._current_graph_task_id() != -1:  # still inside autograd
            return
        for reduction in self._reductions.values():
            reduction.drop()
        for unit in self._backward.entered:
            for segment in unit.segments:
                segment.drop_kept_grads()
        self._unreduced.clear()
        self._rest()

    def _rest(self) -> None:
        self._backward = None
        self._left.clear()
        for unit in self.units:
            unit.release()

    def _prefetch(self, unit: Unit | None) -> None:
        if unit is not None and unit.state is State.SHARDED and not unit.pinned:
            unit.launch()

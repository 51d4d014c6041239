"""Schedule gathers, prefetches, releases and reductions of units.

One step over units ``A B C`` and the root ``R`` (the parameters of no other unit)::

    forward   gather R | gather A, prefetch B, compute A, release A | prefetch C, compute B | compute C
    backward  compute C, reduce C, release C | prefetch A, compute B, ... | ..., release A | reduce R
    end       wait for the last reduction; every parameter shows its local piece again

The root and the last two units stay gathered until backward, and so do units that return objects, since no
hook tells when backward needs them. On hosts that share memory inside all do. Where all stay, all are
prefetched at once. Elsewhere at most two others are gathered: the one that computes and the next. Reductions
under way hold at most as many bytes as the largest one, unless all stay and the host waits for messages.

All ranks must start the same collectives in the same order. Forward gathers units in the order in which they
are called, and records each call with the moments at which it began and ended. Backward replays the calls
from the last to the first. Autograd runs the node that was made last first. So once the gradient of a call's
output exists, backward is done with all that was computed after that call. Calls recorded later that had no
gradient are replayed: their units are gathered and reduced at their turn, since another rank's loss may
depend on them. A unit whose calls all began later is released, and gets no further gradient. This holds for
nested calls, repeated calls and frozen parameters.

Reductions start in the reverse of the order in which forward first entered the units. A parameter that is
unused on this rank counts as zero in the mean, and has no gradient if no rank uses it (see ``reduce.py``).
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch

from shardtrain.comm import trace
from shardtrain.comm.trace import ENTER, LEAVE, STEP, Movement, waiting
from shardtrain.engine.calls import Backward, Call, calling_frame
from shardtrain.engine.reduce import Reduction, give
from shardtrain.engine.shard import ShardedParam
from shardtrain.engine.unit import State, Unit
from shardtrain.engine.user_code import call_postponed, postpone


class Schedule:
    """Drive all units of one sharded module. Only hooks call it."""

    def __init__(self, units: Sequence[Unit], reshard_after_forward: bool) -> None:
        self.units = tuple(units)
        self.root = units[0]
        # On hosts that share memory inside a release frees nothing, and another gather is sent.
        only_costs = self.root.transport.in_place and self.root.transport.sends
        self.reshard_after_forward = reshard_after_forward and not only_costs
        self.reduce_gradients = True  # False inside `no_sync`
        self.stepped = False  # whether an optimizer has changed this rank's shards since the last forward
        self._reductions = {unit: Reduction(unit) for unit in units}
        self._reduction_of = {m: each for each in self._reductions.values() for m in each.unit.members}
        # Bytes of full gradients whose reductions may be under way.
        sizes = [reduction.full_bytes for reduction in self._reductions.values()]
        waits = self.root.transport.sends and all(unit.device.type == "cpu" for unit in units)
        self._room = sum(sizes) if waits and not self.reshard_after_forward else max(sizes)
        self._moment = 0
        self._calls: dict[Unit, Call] = {}  # calls under way
        self._record: list[Call] = []  # ended calls of the root's forward; a unit called by itself adds none
        self._entries: list[Unit] = []  # units in the order in which this forward has called them
        self._expected: list[Unit] = []  # `_entries` of the last forward
        self._forward: FrameType | None = None  # the root module's call under way
        self._backward: Backward | None = None
        self._unannounced: set[Unit] = set()  # units kept gathered: perhaps nothing announces their backward
        self._unreduced: set[Unit] = set()  # units whose gradients wait under `no_sync`
        self._pending_since: dict[Unit, int] = {}  # when a unit's first call began that awaits its backward

    @property
    def at_rest(self) -> bool:
        """Whether no step is under way: every parameter shows its local piece."""
        return not (self._forward or self._backward or self.root.pinned)

    @property
    def under_way(self) -> tuple[str, Unit | None]:
        """The phase of the step, and the unit that computes if it is known."""
        if self._backward:
            return "backward", next(reversed(self._backward.entered), None)
        if self._forward:
            return "forward", next((unit for unit in reversed(self.units) if unit in self._calls), None)
        return "rest", None

    @property
    def unanswered(self) -> bool:
        """Whether the last forward prepared for a backward that has not come."""
        return any(call.hooked for call in self._record)

    def _fence(self, what: Movement) -> None:
        if what is ENTER and self.stepped:
            self.root.transport.fence(STEP)
            self.stepped = False
        with waiting(what, "the model", self.root.device):
            self.root.transport.fence(what)

    # forward

    def begin_forward(self) -> None:
        """Release all units as the root module is called, since gathered values may be from before an update.

        A forward that is still under way was interrupted by Ctrl-C, after which torch runs no hooks.
        """
        if self._backward:
            return
        self._calls.clear()
        self._refresh(self.units)
        self.forget_nodes()
        self._entries, self._expected = [], self._entries
        self._record = []
        self._forward = calling_frame()

    def _refresh(self, units: Sequence[Unit]) -> None:
        """Release ``units``, and let their next gathers include changes to local pieces."""
        for unit in units:
            unit.release()
            for segment in unit.segments:
                segment.cast()
        self._fence(ENTER)

    def forget_nodes(self) -> None:
        """Give computations on full parameters and users' computations on pieces different nodes."""
        for unit in self.units if torch.is_grad_enabled() else ():
            for segment in unit.segments:
                segment.forget_nodes()

    def end_forward(self, failed: bool) -> None:
        """Release units that are still being gathered, as the root module returns or (``failed``) raises."""
        if self._backward:
            return
        self._forward = None
        for unit in self.units:
            if unit in self._unannounced and not failed:  # of an earlier forward
                unit.open_full(with_grads=True)
            elif unit.state is State.GATHERING:
                unit.release()
        if not failed:  # an exception must not wait for other ranks
            self.forget_nodes()
            self._fence(LEAVE)

    def before_forward(self, unit: Unit) -> None:
        """Gather ``unit`` as one of its modules is called."""
        if unit in self._calls:
            self._calls[unit].depth += 1
            return
        # Called by itself, perhaps after an update; or changed in this forward, as a momentum encoder is.
        if not self._backward and (not self._forward or unit.take_edits()):
            self._refresh([unit])
        unit.open_full()
        self._moment += 1
        self._calls[unit] = Call(self._before_backward, unit, self._record, self._moment)
        if self._forward and not self._backward:
            self._entries.append(unit)
            at = len(self._entries)
            if self._expected[at - 1 : at] == [unit]:  # as in the last forward
                for following in self._expected[at : at + 1 if self.reshard_after_forward else None]:
                    self._prefetch(following)
        trace.begin("forward", unit.title)

    def call_to_hook(self, unit: Unit) -> Call | None:
        """Return the call of ``unit`` under way; None in backward, which only recomputes."""
        return None if self._backward else self._calls.get(unit)

    def after_forward(self, unit: Unit, output: Any, failed: bool) -> None:
        """Release ``unit`` as one of its modules returns, if this was its outermost call.

        It stays through backward if backward may need it unannounced, or ``output`` shows parameters.
        """
        call = self._calls.get(unit)
        if call is None:  # an error prevented its begin
            return
        stays = not self._backward and call.watch(output)
        call.depth -= 1
        if call.depth:
            return
        del self._calls[unit]
        trace.end("forward", unit.title)
        self._moment += 1
        call.ended = self._moment
        if self._backward:
            return
        if self._forward:
            self._record.append(call)
            if call.hooked:
                self._pending_since[unit] = min(call.began, self._pending_since.get(unit, call.began))
        elif not failed:
            self._fence(LEAVE)
        unit.refuse_edits()
        learns = torch.is_grad_enabled() and not failed
        if learns and (stays or unit is self.root):  # a loss may use the root's, as CLIP's temperature
            self._unannounced.add(unit)
        if unit in self._unannounced:
            unit.open_full(with_grads=True)
            return
        if learns:
            # Backward begins with the last two calls, if this forward is like the one before.
            at_end = bool(self._forward) and len(self._expected) - len(self._entries) in (0, 1)
            stays = (at_end and unit in self._entries[-2:]) or not self.reshard_after_forward
        unit.show_local()
        if not stays:
            unit.release()

    def show_pieces(self) -> None:
        """Show local pieces where a forward without a backward has left full parameters shown."""
        for unit in self._unannounced:
            unit.show_local()

    # backward

    def _before_backward(self, call: Call) -> None:
        """Reach ``call``, since the gradient of one of its outputs exists."""
        backward = self._backward or self._begin_backward(call.record)
        # The latter: a tensor that passed through the call, while autograd is already below it.
        if call is backward.call or call.began > backward.moment:
            return
        if call.record is not backward.record:  # two forwards, one backward
            self._replay(backward, 0)
            backward.record, backward.ahead = call.record, list(call.record)
        self._replay(backward, call.ended)
        self._enter(backward, call)
        backward.call = call

    def _replay(self, backward: Backward, moment: int) -> None:
        """Reach the calls that ended at ``moment`` or later and have not been reached."""
        while backward.ahead and backward.ahead[-1].ended >= moment:
            skipped = backward.ahead.pop()
            if skipped.hooked:
                self._enter(backward, skipped)

    def _enter(self, backward: Backward, call: Call) -> None:
        """Gather the unit of ``call``; complete every unit that was called only after ``call`` ended.

        Collectives and their order are the same whether or not an output's gradient ever arrives.
        """
        unit = call.unit
        if call.ended < backward.moment:
            backward.moment = call.ended
            for other in [other for other in backward.current if backward.first[other] > call.ended]:
                backward.current.remove(other)
                self._complete(backward, other, call.ended)
                needed = other in self._unannounced and other not in backward.completed
                if other not in self._calls and not needed:
                    other.release()
            self._launch_completed(backward)
        unit.open_full(with_grads=True)
        self._begin_unit(backward, unit, call.began)
        self._prefetch(next((c.unit for c in reversed(backward.ahead) if c.hooked), None))

    def _begin_unit(self, backward: Backward, unit: Unit, began: int) -> None:
        if unit not in backward.current:
            backward.first[unit] = min(began, backward.first.get(unit, began))
            backward.current.append(unit)
            backward.entered[unit] = None
            trace.begin("backward", unit.title)

    def _begin_backward(self, record: list[Call]) -> Backward:
        """Prepare for a backward. Raises ValueError inside `unsharded`, and for double backward."""
        if self.root.pinned:
            raise ValueError("backward() inside unsharded() would reduce no gradients: call it outside")
        if torch.is_grad_enabled():
            raise ValueError(
                "double backward (create_graph=True) is not supported: the graph would need parameters that "
                "are released when this backward ends; compute gradients of gradients on an unsharded model"
            )
        postpone(member.param for unit in self.units for member in unit.members)
        for reduction in self._reductions.values():
            reduction.begin_backward()
        first = {call.unit: call.began for call in sorted(record, key=lambda call: -call.began)}
        order = [unit for unit in reversed(self.units) if self._reductions[unit].expected]
        order.sort(key=lambda unit: -first.get(unit, 0))
        self._backward = backward = Backward(record, list(record), first, order)
        end = partial(self._end_backward, backward)
        torch.autograd.Variable._execution_engine.queue_callback(end)  # type: ignore[attr-defined]
        return backward

    def gradient_arrives(self, member: ShardedParam, grad: torch.Tensor) -> None:
        """Prepare a parameter for its next gradient. Raises ValueError if that comes from its piece."""
        unit = self._reduction_of[member].unit
        if grad.shape != member.part.shape or not (member.shows_full or unit in self._unannounced):
            raise ValueError(
                f"the gradient of {member.name} comes from its piece, which code outside of the forward of "
                f"{unit.title} has used: compute that there, or add its gradient to {member.name}.grad after "
                "backward; for a penalty on weights use the optimizer's weight_decay"
            )
        if not member.shows_full:
            unit.open_full(with_grads=True)  # `show_pieces` has shown pieces since forward
        backward = self._backward or self._begin_backward(self._record)
        self._begin_unit(backward, unit, backward.first.get(unit, 0))
        backward.arriving[member] = True
        member.put_grad_away()

    def gradient_arrived(self, member: ShardedParam) -> None:
        """Take the gradient that autograd has accumulated in one parameter."""
        backward, reduction = self._backward, self._reduction_of[member]
        if backward is None or not backward.arriving.pop(member, False) or member.param.grad is None:
            return  # a loss on the local piece, or a parameter frozen since forward
        if reduction.collect(member):
            self._complete(backward, reduction.unit, backward.first[reduction.unit] - 1)
            self._launch_completed(backward)

    def _complete(self, backward: Backward, unit: Unit, moment: int) -> None:
        """Record that ``unit`` gets no further gradient, unless another forward called it by ``moment``."""
        trace.end("backward", unit.title)
        self._reductions[unit].arrived.clear()  # reentrant checkpointing may bring every gradient again
        if self._pending_since.get(unit, sys.maxsize) > moment:
            backward.completed.add(unit)

    def _launch_completed(self, backward: Backward) -> None:
        """Start the reductions whose turn has come, in `order`, but not of units that backward passed by."""
        for unit in backward.order[backward.turn :]:
            passed = unit not in backward.entered and backward.first.get(unit, 0) > backward.moment
            if not passed and unit not in backward.completed:
                break
            backward.turn += 1
            if self.reduce_gradients and not passed:
                self._launch(backward, unit)

    def _launch(self, backward: Backward, unit: Unit) -> None:
        reduction, under_way = self._reductions[unit], backward.under_way
        room = self._room - reduction.full_bytes
        while reduction in under_way or sum(each.full_bytes for each in under_way) > room:
            under_way.popleft().finish()
        reduction.launch()
        under_way.append(reduction)
        backward.launched.append(unit)

    def _end_backward(self, backward: Backward) -> None:
        """Finish all reductions and call users' hooks. Raises ValueError for ``torch.autograd.grad``."""
        if backward.arriving:
            names = ", ".join(member.name for member in backward.arriving)
            self._forget(backward)
            raise ValueError(
                f"torch.autograd.grad over parameters of a sharded model ({names}) would return gradients of "
                "this rank's batch alone; call backward() and read .grad, which holds the mean over ranks"
            )
        self._replay(backward, 0)
        self._unreduced.update(backward.entered)
        if self.reduce_gradients:
            late = [u for u in backward.order if u in self._unreduced and u not in backward.launched]
            again = [unit for unit in backward.launched if self._reductions[unit].waiting]
            for unit in [*late, *again]:
                self._launch(backward, unit)
            for reduction in backward.under_way:
                reduction.finish()
            self._unreduced.clear()
        self._rest()
        self._fence(LEAVE)
        given = give(self._reductions[unit] for unit in dict.fromkeys(backward.launched))
        for unit in self._unreduced:
            self._reductions[unit].show_waiting()
        call_postponed(given)

    def require_reduced(self, what: str) -> None:
        """Raise ValueError, naming ``what``, if gradients wait under `no_sync`."""
        if self._unreduced:
            raise ValueError(
                f"{what} while gradients wait under no_sync to be reduced: run the last backward outside of "
                "no_sync first, or clear them with zero_grad() and run another one"
            )

    # after errors

    def recover(self) -> None:
        """Reset the state of a backward that an exception ended."""
        if self._backward and torch._C._current_graph_task_id() == -1:  # else still inside autograd
            self._forget(self._backward)

    def recover_forward(self) -> None:
        """Call `recover`, and end a forward that Ctrl-C interrupted, after which torch runs no hooks."""
        self.recover()
        if self._forward and all(frame is not self._forward for frame, _ in traceback.walk_stack(None)):
            self._forward = None
            self._calls.clear()
            self._rest()

    def _forget(self, backward: Backward) -> None:
        for reduction in self._reductions.values():
            reduction.drop()
        for member in backward.arriving:
            member.param.grad = None
        self._unreduced.clear()
        self._rest()

    def _rest(self) -> None:
        """End backward, and release all units that no forward under way computes with."""
        self._backward = None
        if not self._forward:
            self._unannounced.clear()
            self._pending_since.clear()
            self._record = []
        for unit in self.units:
            if unit not in self._calls:
                unit.release()

    def _prefetch(self, unit: Unit | None) -> None:
        if unit is not None and unit.state is State.SHARDED:
            unit.launch()

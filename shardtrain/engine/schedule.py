"""Schedule gathers, prefetches, releases and reductions of units.

One step over units ``A B C`` and the root ``R`` (the parameters of no other unit)::

    forward   gather R | gather A, prefetch B, compute A, release A | prefetch C, compute B | compute C
    backward  compute C, reduce C, release C | prefetch A, compute B, ... | ..., release A | reduce R
    end       wait for the last reduction; every parameter shows its local piece again

The root and the last two units stay gathered until backward, and so do units that return objects, since no
hook tells when backward needs them. Where all stay, all are prefetched at once. Elsewhere at most two others
are gathered: the one that computes and the next. Reductions under way hold at most as many bytes as the
largest one, unless all stay and the host waits for messages.

All ranks must start the same collectives in the same order. Forward gathers units in the order in which they
are called, and records the calls. Backward descends through them (see ``calls.py``): a hook on the node of
each call's output tells how far autograd has come. A unit is gathered where a call of it ended, whether or
not its output has a gradient on this rank, since another rank's loss may depend on it. Where its first call
began, its gradients are taken and reduced, and it is released. This holds for nested and repeated calls.

Reductions start in the reverse of the order in which forward first entered the units.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from shardtrain.comm import trace
from shardtrain.comm.trace import ENTER, LEAVE, STEP, Movement, waiting
from shardtrain.engine.calls import Backward, Call, Record
from shardtrain.engine.reduce import Reduction, give
from shardtrain.engine.unit import State, Unit
from shardtrain.engine.user_code import call_postponed, postpone
from shardtrain.engine.virtual import OUTSIDE


class Schedule:
    """Drive all units of one sharded module. Only `Engine` calls it."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = tuple(units)
        self.root = units[0]
        self.micro_batch: int | None = 0  # the number of the virtual rank's among this rank's; None outside
        self.stepped = False  # whether an optimizer has changed this rank's shards since the last forward
        self.reductions = {unit: Reduction(unit) for unit in units}
        # Bytes of full gradients whose reductions may be under way.
        sizes = [reduction.full_bytes for reduction in self.reductions.values()]
        waits = not self.root.transport.in_place and all(unit.device.type == "cpu" for unit in units)
        self._room = sum(sizes) if waits and self._all_stay else max(sizes)
        self._moment = 0
        self.calls: dict[Unit, Call] = {}  # calls under way
        self._record: Record = []  # ended calls of the root's forward; a unit called by itself adds none
        self._entries: list[Unit] = []  # units in the order in which this forward has called them
        self._expected: list[Unit] = []  # `_entries` of the last forward
        self._forward = False  # whether the root module's call is under way
        self._backward: Backward | None = None
        self.kept: dict[Unit, None] = {}  # units kept whole: perhaps nothing announces their backward
        self._waiting: set[Unit] = set()  # units whose gradients wait under `no_sync`
        self.before_conversion = partial(self.require_reduced, "parameters were converted")
        self._pending_since: dict[Unit, int] = {}  # when a unit's first call began that awaits its backward

    @property
    def _all_stay(self) -> bool:
        return not any(unit.options.reshard_after_forward for unit in self.units[1:])

    @property
    def is_idle(self) -> bool:
        """Whether no step is under way: every parameter shows its local piece."""
        return not (self._forward or self._backward or self.root.pinned)

    @property
    def under_way(self) -> tuple[str, Unit | None]:
        """The phase of the step, and the unit that computes if it is known."""
        if self._backward:
            return "backward", next(reversed(self._backward.entered), None)
        if self._forward:
            return "forward", next((unit for unit in reversed(self.units) if unit in self.calls), None)
        return "rest", None

    @property
    def awaits_backward(self) -> bool:
        """Whether the last forward prepared for a backward that has not come."""
        return any(call.marked for call in self._record)

    def _fence(self, what: Movement) -> None:
        if what is ENTER and self.stepped:
            self.root.transport.fence(STEP)
            self.stepped = False
        with waiting(what, "the model", self.root.device):
            self.root.transport.fence(what)

    # forward

    def begin_forward(self) -> None:
        """Release all units as the root module is called, since gathered values may be from before an update.

        Raises ValueError if a parameter was changed while it showed its full value.
        """
        if self._backward:
            return
        self.show_pieces()
        self.refresh(self.units)
        self.forget_nodes()
        self._entries, self._expected = [], self._entries
        self._record, self._forward = [], True

    def refresh(self, units: Sequence[Unit]) -> None:
        """Release ``units``, and let their next gathers include changes to local pieces."""
        for unit in units:
            unit.refresh()
        self._fence(ENTER)

    def forget_nodes(self) -> None:
        """Give computations on full parameters and users' computations on pieces different nodes."""
        for unit in self.units if torch.is_grad_enabled() else ():
            for segment in () if unit.shows_full else unit.segments:
                segment.forget_nodes()

    def end_forward(self, failed: bool) -> None:
        """Release units that are still being gathered, as the root module returns or (``failed``) raises.

        Raises ValueError if a local piece was changed that other ranks may still read.
        """
        if self._backward:
            return
        self._forward = False
        if failed:
            self.calls.clear()
        for unit in self.units:
            if unit in self.kept and not failed:  # of an earlier forward
                unit.open_full(for_forward=True)
            elif unit.state is State.GATHERING or failed:
                unit.release()
            if not failed:
                unit.refuse_edits_inside_forward()
        if not failed:  # an exception must not wait for other ranks
            self.forget_nodes()
            self._fence(LEAVE)

    def pre_forward(self, unit: Unit) -> None:
        """Gather ``unit`` as one of its modules is called."""
        if unit in self.calls:
            self.calls[unit].depth += 1
            return
        if self._forward and not self._backward:
            unit.refuse_edits_inside_forward()
        elif not self._backward:  # called by itself, perhaps after an update
            self.refresh([unit])
        unit.open_full(for_forward=True)
        self._moment += 1
        self.calls[unit] = Call(unit, self._moment)
        if self._backward:  # which computes something again
            self._pre_backward(self._backward, unit)
        elif self._forward:
            self._entries.append(unit)
            at = len(self._entries)
            if self._expected[at - 1 : at] == [unit]:  # as in the last forward
                end = at + 1 if at > 1 or not self._all_stay else None
                for following in self._expected[at:end]:
                    following.prefetch()
        trace.begin("forward", unit.title)

    def mark(self, unit: Unit, tensors: Iterable[torch.Tensor]) -> None:
        """Have backward tell when it reaches the nodes that made ``tensors``, outputs of modules of ``unit``.

        In backward, which only computes again, and without gradients, nothing is marked.
        """
        call = self.calls.get(unit)
        if call is not None and not self._backward and torch.is_grad_enabled():
            call.mark(tensors, partial(self._reach, self._record, unit, self._moment))

    def post_forward(self, unit: Unit, found: Sequence[Any], failed: bool) -> None:
        """Release ``unit`` as one of its modules returns, if this was its outermost call.

        ``found``: the `leaves` of the output. The unit stays through backward if that may need it
        unannounced, or if the output shows parameters.
        """
        call = self.calls.get(unit)
        if call is None:  # an error prevented its begin
            return
        learns = torch.is_grad_enabled() and not (failed or self._backward)
        stays = False
        if learns:
            self.mark(unit, (leaf for leaf in found if isinstance(leaf, torch.Tensor)))
            call.marked |= unit.trains  # on another rank an output may have a gradient
            stays = call.hides(found)
        call.depth -= 1
        if call.depth:
            return
        del self.calls[unit]
        trace.end("forward", unit.title)
        self._moment = call.ended = self._moment + 1
        if self._backward:
            return
        if self._forward:
            self._record.append(call)
            if call.marked:
                self._pending_since.setdefault(unit, call.began)
        elif not failed:
            self._fence(LEAVE)
        unit.refuse_edits()
        if learns and (stays or unit is self.root):  # a loss may use the root's, as CLIP's temperature
            self.kept[unit] = None
        if unit in self.kept:
            return
        if learns:
            # Backward begins with the last two calls, if this forward is like the one before.
            at_end = self._forward and len(self._expected) - len(self._entries) in (0, 1)
            stays = (at_end and unit in self._entries[-2:]) or not unit.options.reshard_after_forward
        unit.show_local()
        if not stays:
            unit.release()

    def refuse_edits(self) -> None:
        """Raise ValueError if a parameter was changed that a forward without a backward has left whole."""
        for unit in self.kept:
            unit.refuse_edits()

    def show_pieces(self) -> None:
        """Show local pieces where a forward without a backward has left full parameters shown.

        Raises ValueError if one of these was changed.
        """
        try:
            self.refuse_edits()
        finally:
            for unit in self.kept:
                unit.show_local()

    # backward

    def _reach(self, record: Record, unit: Unit, moment: int, _: object) -> None:
        """Descend to ``moment``: autograd runs a node that ``unit`` made then, in ``record``'s forward."""
        backward = self._backward or self._begin_backward(record)
        if moment >= backward.descent.moment:  # a tensor that only passed through the call
            return
        self._descend(backward, moment)
        if record is not backward.descent.record:  # two forwards, one backward
            backward.descent.enter(record, [each for each in self.units if each not in backward.launched])
            self._descend(backward, moment)
        if unit not in backward.entered:  # called by itself
            self._pre_backward(backward, unit)

    def _descend(self, backward: Backward, moment: int) -> None:
        for unit, reached, opens in backward.descent.to(moment):
            if opens:
                self._pre_backward(backward, unit)
                if (following := backward.descent.following) is not None:
                    following.prefetch()
            elif unit.is_open:
                self._post_backward(backward, unit, reached)

    def _pre_backward(self, backward: Backward, unit: Unit) -> None:
        """Gather ``unit``, whose parameters may get gradients from now on."""
        unit.open_full()
        if not unit.is_open:
            unit.is_open, backward.entered[unit] = True, None
            trace.begin("backward", unit.title)

    def _post_backward(self, backward: Backward, unit: Unit, moment: int) -> None:
        """Take the gradients of ``unit``, start to reduce them, and release it.

        If it awaits the backward of another forward, which called it by ``moment``, it is reduced after that.
        """
        unit.is_open = False
        trace.end("backward", unit.title)
        self.reductions[unit].take(self.micro_batch or 0, backward.captured)
        awaits = self._pending_since.get(unit, sys.maxsize) <= moment
        if unit not in self.calls and not (awaits and unit in self.kept):
            unit.release()
        if unit.trains and unit.options.reduces and not awaits:
            self._launch(backward, unit)

    def _begin_backward(self, record: Record) -> Backward:
        """Prepare for a backward. Raises ValueError inside `unsharded`, and for double backward."""
        if self.root.pinned:
            raise ValueError("backward() inside unsharded() would reduce no gradients: call it outside")
        if self.micro_batch is None:
            raise ValueError(OUTSIDE)
        if torch.is_grad_enabled():
            raise ValueError(
                "double backward (create_graph=True) is not supported: the graph would need parameters that "
                "are released when this backward ends; compute gradients of gradients on an unsharded model"
            )
        self.refuse_edits()
        backward = Backward()
        for unit in self.units:
            self.reductions[unit].begin_backward()
            for member in unit.members:
                postpone(member.param)
                if (grad := member.param.grad) is not None:
                    backward.before.append((member, grad))
                    member.param.grad = None
        backward.descent.enter(record, self.units)
        self._backward = backward
        end = partial(self._end_backward, backward)
        torch.autograd.Variable._execution_engine.queue_callback(end)  # type: ignore[attr-defined]
        return backward

    def gradient_arrives(self, unit: Unit, name: str, fits: bool) -> None:
        """Open ``unit`` for a gradient of its parameter ``name`` that no output has announced.

        Raises ValueError if the gradient is of a local piece; ``fits``: it has the parameter's shape.
        """
        if not fits or not (unit.shows_full or unit in self.kept):
            raise ValueError(
                f"the gradient of {name} comes from its piece, which code outside of the forward of "
                f"{unit.title} has used: compute that there, or add its gradient to {name}.grad after "
                "backward; for a penalty on weights use the optimizer's weight_decay"
            )
        # The root's, used after forward; or shown as a piece since (`show_pieces`).
        self._pre_backward(self._backward or self._begin_backward(self._record), unit)

    def _launch(self, backward: Backward, unit: Unit) -> None:
        reduction, under_way = self.reductions[unit], backward.under_way
        room = self._room - reduction.full_bytes
        while reduction in under_way or sum(each.full_bytes for each in under_way) > room:
            under_way.popleft().finish()
        reduction.launch()
        under_way.append(reduction)
        backward.launched[unit] = None

    def _end_backward(self, backward: Backward) -> None:
        """Finish all reductions and call users' hooks. Raises ValueError for ``torch.autograd.grad``."""
        self._descend(backward, -1)
        for unit in reversed(self.units):
            if unit.is_open:
                self._post_backward(backward, unit, -1)
        if backward.captured:
            names = ", ".join(backward.captured)
            self.drop_backward()
            raise ValueError(
                f"torch.autograd.grad over parameters of a sharded model ({names}) would return gradients of "
                "this rank's batch alone; call backward() and read .grad, which holds the mean over ranks"
            )
        self._waiting.update(unit for unit in backward.entered if unit.trains)
        ready = [unit for unit in reversed(self.units) if unit in self._waiting and unit.options.reduces]
        late = [unit for unit in ready if unit not in backward.launched]
        again = [unit for unit in backward.launched if self.reductions[unit].waiting]
        for unit in [*late, *again]:
            self._launch(backward, unit)
        for reduction in backward.under_way:
            reduction.finish()
        self._waiting.difference_update(ready)
        self._finish_backward(backward)
        self._fence(LEAVE)
        given = give(self.reductions[unit] for unit in backward.launched)
        for unit in self._waiting:
            self.reductions[unit].show_waiting()
        call_postponed(given)

    def require_reduced(self, what: str) -> None:
        """Raise ValueError, naming ``what``, if gradients wait under `no_sync` or for more virtual ranks."""
        if self._waiting:
            raise ValueError(
                f"{what} while gradients wait under no_sync to be reduced: run the last backward outside of "
                "no_sync first, or clear them with zero_grad() and run another one"
            )

    # after errors

    def reset_failed_backward(self) -> None:
        """Reset the state of a backward that an exception ended, and drop all gradients.

        Those of earlier backwards were put aside, where a `zero_grad` since then did not clear them.
        """
        if self._backward and torch._C._current_graph_task_id() == -1:  # else still inside autograd
            self.drop_backward()

    def drop_backward(self) -> None:
        """End a backward under way, and drop the gradients that wait."""
        for unit in self.units:
            unit.is_open = False
            self.reductions[unit].drop()
        self._waiting.clear()
        self._finish_backward(Backward())

    def _finish_backward(self, backward: Backward) -> None:
        """End ``backward``, and release all units that no forward under way computes with."""
        self._backward = None
        if not self._forward:
            self.kept.clear()
            self._pending_since.clear()
            self._record = []
        for unit in self.units:
            if unit not in self.calls:
                unit.release()
        for member, grad in backward.before:
            member.set_grad(grad)

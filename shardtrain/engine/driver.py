"""What carries out a step: ``schedule.py`` decides, the driver here does it.

The hooks of ``hooks.py`` and autograd call the events here, the schedule the verbs. Each event passes on to
`Schedule` what it needs to decide, and does around it what is no decision: fences between ranks that share
memory, gradients that are put aside, and the moments at which an `Attachment` sees the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from shardtrain import torch_private
from shardtrain.comm import trace
from shardtrain.comm.trace import ADD, ENTER, LEAVE, Movement, waiting
from shardtrain.comm.transport import Pending
from shardtrain.device import synchronize
from shardtrain.engine.attachment import Attachment
from shardtrain.engine.gradient import Mean, Reduction, give
from shardtrain.engine.schedule import Forward, Schedule
from shardtrain.engine.segment import ShardedParam
from shardtrain.engine.unit import Shown, Unit
from shardtrain.pieces.parameter import Shards

BACKWARD = "backward"  # what `work` is told of it
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)  # hide no tensors


class Driver:
    """The events and the verbs of one model's steps."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = tuple(units)
        self.root = units[0]
        self.attachments: Sequence[Attachment] = ()
        self.shards = Shards()
        for unit in units:
            unit.shards = self.shards
        self.reductions = {unit: Reduction(unit) for unit in units}
        self.schedule: Schedule[Unit] = Schedule(units, self)
        self.schedule.accumulate(unit for unit in units if not unit.options.reduces)
        self.micro_batch = 0  # which of this rank's runs now, if it has virtual ranks
        self.asked: dict[str, None] = {}  # parameters without a gradient here: the host asked the device
        # No other rank compares or waits, nor does this one wait for gradients on their way to the host.
        self.is_silent = self.root.channel.silent and not self.root.channel.uploads
        self._has_owners = any(unit.has_owners for unit in units)
        self._reducing: dict[Unit, Pending[list[Mean]]] = {}  # reductions under way
        self._reduced: list[tuple[Reduction, list[Mean]]] = []  # by this backward, in order
        self._put_aside: list[tuple[ShardedParam, torch.Tensor]] = []  # gradients of before this backward
        self._missing: list[str] = []  # parameters whose gradient autograd did not keep
        self._callback: weakref.ref[Callable[[], None]]  # autograd's, which ends this backward

    @property
    def device(self) -> torch.device:
        """The device on which the first parameters compute; the CPU for a model without parameters."""
        return next((unit for unit in self.units if unit.segments), self.root).device

    @property
    def is_idle(self) -> bool:
        """Whether neither the root's forward, a backward nor `unsharded` is under way.

        After a forward the root, among others, may still be whole (see `show_shards`).
        """
        schedule = self.schedule
        return not (schedule.in_forward or schedule.backward or self.root.shown is Shown.PRIVATE)

    @property
    def awaits_backward(self) -> bool:
        """Whether the last forward prepared for a backward that has not come."""
        return bool(self.schedule.forward.calls)

    # parameters that show shards

    def work(self, what: object) -> None:
        """Let parameters have their own classes until `rest`, while ``what`` works on them."""
        self.shards.work.add(what)
        for unit in self.units:
            unit.wake()

    def rest(self, what: object) -> None:
        """Undo `work`, unless something else works, too."""
        self.shards.work.discard(what)
        for unit in self.units:
            unit.rest()

    @contextmanager
    def working(self) -> Iterator[None]:
        """`work` inside."""
        what = object()
        self.work(what)
        try:
            yield
        finally:
            self.rest(what)

    # verbs: what the schedule decides

    def gather(self, unit: Unit) -> None:
        unit.gather()

    def show(self, unit: Unit) -> None:
        unit.show()
        if self.schedule.backward is None:
            for each in self.attachments:
                each.after_show(unit)
        else:
            trace.begin("backward", unit.title)

    def hide(self, unit: Unit) -> None:
        unit.hide()

    def release(self, unit: Unit) -> None:
        unit.release()
        trace.end("backward", unit.title)  # if one has begun

    def lend(self, unit: Unit) -> None:
        self.reductions[unit].lend(self.micro_batch)

    def take(self, unit: Unit) -> None:
        self._missing += self.reductions[unit].take(self.micro_batch)

    def reduce(self, unit: Unit) -> None:
        self._reducing[unit] = self.reductions[unit].reduce()

    def finish(self, unit: Unit) -> None:
        self._reduced.append((self.reductions[unit], self._reducing.pop(unit).wait()))

    # forward

    def begin_forward(self) -> None:
        """Begin a forward as the root module is called."""
        if self.schedule.backward:  # activation checkpointing computes the root again
            return
        with torch_private.DisableTorchFunctionSubclass():
            self.show_shards()
            self.schedule.begin_forward(self._training())
            self._expose(self.units)
        self.shards.in_forward = True

    def reshard_and_cast(self, unit: Unit) -> None:
        """Release ``unit``, and let its next gather include changes of its local shards."""
        with torch_private.DisableTorchFunctionSubclass():
            self.schedule.reshard_alone(unit, self._training())
            self._expose([unit])

    def _expose(self, units: Sequence[Unit]) -> None:
        """Let other ranks read the local shards of ``units``, which forward may not change from now on."""
        # Autocast keeps its casts of weights. Those of an earlier forward lead to a backward that has ended.
        torch.clear_autocast_cache()
        for unit in units:
            unit.cast()
        for each in self.attachments:
            each.before_forward(units)
        self._fence(ENTER)

    def _fence(self, what: Movement) -> None:
        if not self.is_silent:
            with waiting(what, "the model", self.device):
                self.root.channel.fence(what)

    def _training(self) -> set[Unit]:
        return {unit for unit in self.units if unit.trains}

    def end_forward(self, failed: bool) -> None:
        """End the forward as the root module returns or (``failed``) raises."""
        if self.schedule.backward:  # none has begun
            return
        try:
            if not failed:
                self.before_hide(self.schedule.uncalled(None))
        finally:
            self.schedule.end_forward(failed)
            self.shards.in_forward = False
        if failed:  # an exception must not wait for other ranks
            return
        with torch_private.DisableTorchFunctionSubclass():
            for each in self.attachments:
                each.after_forward()
            for unit in self.units:
                unit.rest()
            self._fence(LEAVE)

    def begin_call(self, unit: Unit) -> None:
        """Gather ``unit`` as one of its modules is called."""
        schedule = self.schedule
        is_outermost = unit not in schedule.calls
        if is_outermost and not schedule.backward:
            if not schedule.in_forward:  # called by itself, perhaps after an update
                self.reshard_and_cast(unit)
            self.before_hide(schedule.uncalled(unit))
        schedule.enter(unit)
        if is_outermost:
            trace.begin("forward", unit.title)

    def watch(self, unit: Unit, tensors: Iterable[torch.Tensor]) -> None:
        """Have autograd tell when it reaches the nodes that made ``tensors``, outputs of modules of ``unit``.

        It tells nothing of what backward computes again. Work in place on a view gives it another node, and
        leaves its base's.
        """
        schedule = self.schedule
        if unit not in schedule.calls or schedule.backward or not torch.is_grad_enabled():
            return
        reach = partial(self._reach, schedule.recording, schedule.moment)
        for tensor in tensors:
            node = tensor.grad_fn
            base = tensor._base
            if base is not None and (node_of_base := base.grad_fn) is not None:
                node_of_base.register_prehook(reach)
                schedule.announce(unit)
                # As of a linear layer: the base's node runs next, and this one reads no parameter.
                if node is not None and node.next_functions == ((node_of_base, 0),):
                    continue
            if node is not None:
                node.register_prehook(reach)
                schedule.announce(unit)

    def end_call(self, unit: Unit, outputs: Sequence[Any], failed: bool) -> None:
        """Leave ``unit`` as one of its modules returns ``outputs``, as `leaves`, or (``failed``) raises."""
        schedule = self.schedule
        call = schedule.calls.get(unit)
        if call is None:  # an error prevented its begin
            return
        learns = torch.is_grad_enabled() and not (failed or schedule.backward)
        unannounced = False
        if learns:
            self.watch(unit, (leaf for leaf in outputs if isinstance(leaf, torch.Tensor)))
            unannounced = _may_need_unannounced(unit, outputs)
        if call.depth == 1:
            trace.end("forward", unit.title)
            if not (failed or schedule.backward):
                if not schedule.in_forward:
                    self._fence(LEAVE)
                if not schedule.is_called_next(unit):  # else after its last call in a row
                    self.before_hide([unit])
        schedule.leave(unit, learns, unannounced)

    @contextmanager
    def reducing(self, reduces: bool) -> Iterator[None]:
        """Have backwards inside the block reduce the gradients of all units, or, by False, of none."""
        accumulating = self.schedule.accumulates
        self.schedule.accumulate(() if reduces else self.units)
        try:
            yield
        finally:
            self.schedule.accumulate(accumulating)

    def before_hide(self, units: Iterable[Unit]) -> None:
        """Have attachments see ``units``, with which forward is done."""
        for each in self.attachments:
            each.before_hide(units)

    def show_shards(self) -> None:
        """Show local shards where a forward without a backward has left full parameters shown."""
        try:
            self.before_hide(self.schedule.unannounced)
        finally:
            self.schedule.hide_unannounced()

    # backward

    def _reach(self, forward: Forward[Unit], moment: int, _: object) -> None:
        """Autograd runs a node that was made after ``moment``, in ``forward``."""
        self.reset_failed_backward()
        if self.schedule.backward is None:
            self._begin_backward(forward)
        self.schedule.reach(forward, moment)

    def _begin_backward(self, forward: Forward[Unit]) -> None:
        for each in self.attachments:
            each.before_backward()
        self.work(BACKWARD)
        # First, so that a refusal below is an error in backward, after which all gradients are dropped.
        self.schedule.begin_backward(forward, self._training(), self._room())
        callback = self._end_backward
        self._callback = weakref.ref(callback)
        torch_private.execution_engine.queue_callback(callback)
        for unit in self.units:
            self.reductions[unit].begin_backward()
            for member in unit.members:
                grad = member.take_grad()
                if grad is not None:
                    self._put_aside.append((member, grad))
        if self._put_aside and not self._has_owners:  # else a rank may own no gradient, and not know
            self.root.channel.fence(ADD, "to the gradients of an earlier backward")
        for unit in self.schedule.shown:
            trace.begin("backward", unit.title)

    def _room(self) -> int:
        """Return the bytes of full gradients whose reductions may be under way: as many as the largest one's.

        Where all units keep their full vectors and the host waits for messages, all may be.
        """
        sizes = [unit.gradient_bytes for unit in self.units]
        waits = not self.root.channel.in_place and all(unit.device.type == "cpu" for unit in self.units)
        return sum(sizes) if waits and self.schedule.keeps.issuperset(self.units[1:]) else max(sizes)

    def arrive(self, unit: Unit) -> None:
        """Open ``unit`` for a gradient that no output has announced."""
        # It is the root's, used after forward; or `show_shards` has hidden the unit since.
        self.reset_failed_backward()
        if self.schedule.backward is None:
            self._begin_backward(self.schedule.forward)
        self.schedule.arrive(unit)

    def _end_backward(self) -> None:
        """Finish all reductions, and set the gradients."""
        self.schedule.end_backward()
        for member, grad in self._put_aside:
            member.set_grad(grad)
        self._put_aside = []
        self._fence(LEAVE)
        params, asked = give(self._reduced)
        self.asked.update(dict.fromkeys(asked))
        self._reduced = []
        for unit in self.schedule.unreduced:
            self.reductions[unit].show_waiting()
        if self.schedule.unreduced and self.root.channel.uploads:
            synchronize(self.device)
        missing = self._missing
        self._missing = []
        self.rest(BACKWARD)
        for each in self.attachments:
            each.after_backward(params, missing)

    # after errors

    def reset_failed_backward(self) -> None:
        """Reset the state of a backward that an exception ended, and drop all gradients.

        Those of earlier backwards were put aside, where a `zero_grad` since then did not clear them.
        """
        if self.schedule.backward is None:
            return
        # Autograd forgets its callback if it fails. On an accelerator it may do so a moment later.
        if self._callback() is None or torch_private.current_graph_task_id() == -1:
            self.drop_backward()

    def drop_backward(self) -> None:
        """End a backward under way, and drop the gradients that wait."""
        reducing = [*self._reducing.values()]
        self._reducing.clear()
        self._reduced = []
        for reduction in self.reductions.values():
            reduction.drop()
        self._put_aside = []
        self._missing.clear()
        self.schedule.drop()
        for pending in reducing:
            pending.settle()
        self.rest(BACKWARD)


def _may_need_unannounced(unit: Unit, outputs: Iterable[Any]) -> bool:
    """Return whether a leaf of ``outputs`` may hide tensors in an object, or is a view of a parameter."""
    for leaf in outputs:
        if unit.owns(leaf) if isinstance(leaf, torch.Tensor) else not isinstance(leaf, _PLAIN):
            return True
    return False

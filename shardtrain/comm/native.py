"""The backend's own collectives, movements made of them, and what a process group can do.

Only this file knows what torch renames.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

# Its functions have the default group of the moment of their import as a default argument. Dynamo imports
# them, so the first step of any torch optimizer: a group opened before would live to the interpreter's end,
# and gloo's threads with it, which now and then abort the process there. Now there is no group yet.
import torch.distributed.nn
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch.distributed.constants import default_pg_timeout

from shardtrain import device as devices
from shardtrain.comm.transport import Flat, Gradient, Interval, Pending, intervals, staged
from shardtrain.layout import Layout

# Renamed in torch 2.13. The group's own methods: the functions around them take a third as long again, and
# every unit of every step makes three such calls.
_all_gather = getattr(dist.ProcessGroup, "all_gather_single", None) or dist.ProcessGroup._allgather_base
_reduce_scatter = (
    getattr(dist.ProcessGroup, "reduce_scatter_single", None) or dist.ProcessGroup._reduce_scatter_base
)

# Gloo cannot average, so the sum is divided.
_SUM, _AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG

# Public since torch 2.15.
_set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout


def all_gather(
    output: Tensor, input: Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """Call torch's ``all_gather_into_tensor``."""
    if input.is_complex():
        output, input = torch.view_as_real(output), torch.view_as_real(input)
    return _finished(_all_gather(group, output, input, _gather_options(async_op)), async_op)


def reduce_scatter(
    output: Tensor,
    input: Tensor,
    group: dist.ProcessGroup,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    async_op: bool = False,
) -> dist.Work | None:
    """Call torch's ``reduce_scatter_tensor``."""
    return _finished(_reduce_scatter(group, output, input, _reduce_options(op, async_op)), async_op)


@cache
def _gather_options(async_op: bool) -> AllgatherOptions:
    options = AllgatherOptions()
    options.asyncOp = async_op
    return options


@cache
def _reduce_options(op: dist.ReduceOp.RedOpType, async_op: bool) -> ReduceScatterOptions:
    options = ReduceScatterOptions()
    options.reduceOp, options.asyncOp = op, async_op
    return options


def _finished(work: dist.Work | None, async_op: bool) -> dist.Work | None:
    """Return ``work`` to who waits for it, else None once the current stream may read the results."""
    if async_op or work is None:
        return work
    work.wait()
    return None


def set_time_out(time_out: timedelta) -> None:
    """Set the time-out of whatever any group of this rank begins from now on."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if moves_bytes(group):
            _set_timeout(time_out, group)


def time_out_of(group: dist.ProcessGroup) -> Callable[[], float]:
    """Return a function that returns the time-out of ``group`` at the moment, in seconds."""
    known, device = weakref.ref(group), torch.device("cpu" if has_gloo(group) else device_types(group)[0])

    def seconds() -> float:
        alive = known()
        options = None if alive is None else getattr(alive._get_backend(device), "options", None)
        time_out: timedelta = getattr(options, "_timeout", default_pg_timeout)
        return time_out.total_seconds()

    return seconds


def has_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether CPU tensors can be sent point to point over gloo."""
    return "cpu:gloo" in dist.get_backend_config(group)


def moves_bytes(group: dist.ProcessGroup) -> bool:
    """Return False for torch's fake process group, whose collectives return at once and move nothing."""
    return "fake" not in dist.get_backend_config(group)


def device_types(group: dist.ProcessGroup) -> list[str]:
    """Return the types of device whose tensors the group's backends move, ``["cpu"]`` say."""
    return [part.partition(":")[0] for part in dist.get_backend_config(group).split(",")]


# Movements by the backend's own collectives, NCCL's above all.
#
# On an accelerator they run on a stream of their own. That stream waits for the compute stream when a
# movement starts, and the compute stream waits for an event when its result is needed; until then whatever
# the movement uses is held. So memory is allocated and freed in the compute stream's order alone,
# ``record_stream`` is not needed, and a host that is far ahead of the device takes no more memory than one
# that is not: what a release gives back is available at once to the next gather, which the device starts
# later. Gathers and reductions share the stream: one communicator runs one at a time anyway, in the order of
# starting.


class NativeGradient(NamedTuple):
    """A gradient as backends want it: own interval in place, and room of the same dtype for the mean."""

    full: Tensor
    layout: Layout
    out: Tensor
    interval: Tensor  # where the mean belongs, ``out`` itself unless it has a wider dtype


Moved = TypeVar("Moved", Flat, NativeGradient, Interval)


class Streams:
    """The communication stream of each device; the parts of a group have them in common."""

    def __init__(self) -> None:
        self._of: dict[torch.device, Any] = {}

    def run(self, movements: Callable[[], None], device: torch.device) -> Pending:
        """Run ``movements`` on the communication stream of ``device``, on an accelerator.

        The result holds ``movements``, and so the memory that they use, until it is waited for: given back
        before, the compute stream would write to it while it is still on its way.
        """
        if device not in self._of:
            # Of high priority, so that copies around a collective do not queue behind computation.
            self._of[device] = devices.new_stream(device, priority=-1)
        stream = self._of[device]
        stream.wait_stream(devices.current_stream(device))
        with devices.inside(stream):
            movements()
            done = stream.record_event()

        def finish(held: object = movements) -> None:
            devices.current_stream(device).wait_event(done)

        return Pending(finish)


class Backend:
    """The movements of a `Transport` between all ranks of ``group``, by the group's own collectives."""

    def __init__(self, group: dist.ProcessGroup, streams: Streams) -> None:
        self._group = weakref.ref(group)
        self._streams = streams
        # Dividing by a tensor takes a third of the time that dividing by a number does.
        self._world = torch.tensor(float(group.size()), device="cpu")

    def of(self, group: dist.ProcessGroup) -> Backend:
        """Return the same between other ranks, on the same streams."""
        return Backend(group, self._streams)

    @property
    def group(self) -> dist.ProcessGroup:
        return living(self._group)

    def gather(self, flats: Sequence[Flat]) -> Pending:
        return self._start(self._gather, flats, flats[0].full)

    def reduce(self, gradients: Sequence[Gradient]) -> Pending:
        return self._start(self._reduce, [self._native(each) for each in gradients], gradients[0].full)

    def average(self, values: Sequence[Interval]) -> Pending:
        return self._start(self._average, values, values[0].values)

    def exchange(self, outgoing: Tensor, sizes: Sequence[int], incoming: Tensor) -> Pending:
        equal = [incoming.numel() // len(sizes)] * len(sizes)
        dist.all_to_all_single(incoming, outgoing, equal, [*sizes], group=self.group)
        return Pending()

    def staged(
        self, device: torch.device, start: Callable[[], Pending], finish: Callable[[], None]
    ) -> Pending:
        if not devices.is_accelerator(device):
            return staged(start, finish)

        def both() -> None:
            start().wait()
            finish()

        return self._streams.run(both, device)

    def _start(self, movement: Callable[[Moved], None], items: Sequence[Moved], like: Tensor) -> Pending:
        """Run ``movement`` on each item; where ``like`` is on an accelerator, on the communication stream."""

        def all_of_them() -> None:
            for item in items:
                movement(item)

        if devices.on_accelerator(like):
            return self._streams.run(all_of_them, like.device)
        all_of_them()
        return Pending()

    def _gather(self, flat: Flat) -> None:
        if flat.layout.equal:
            all_gather(flat.full, flat.local, self.group)
        elif moves_bytes(self.group):  # the fake one would copy the input to every output
            dist.all_gather(intervals(flat.full, flat.layout), flat.local, group=self.group)

    def _native(self, gradient: Gradient) -> NativeGradient:
        """Let ``full`` hold this rank's part, too, and the pieces of ``own`` be views of the mean to come."""
        full, own, layout, pieces, _ = gradient
        rank = self.group.rank()
        out = full.new_empty(layout.length(rank))
        wide = own[0].dtype if own else full.dtype
        interval = out if wide == full.dtype else out.new_empty(out.shape, dtype=wide)
        begin = layout.bounds[rank]
        for index, (start, stop, offset) in enumerate(pieces):
            if start < stop:
                end = offset + stop - start
                full[begin + offset : begin + end].copy_(own[index])
                own[index] = interval[offset:end]
        return NativeGradient(full, layout, out, interval)

    def _reduce(self, gradient: NativeGradient) -> None:
        full, layout, out, interval = gradient
        op = _AVG if devices.on_accelerator(full) else _SUM
        if layout.equal:
            reduce_scatter(out, full, self.group, op)
        elif moves_bytes(self.group):
            dist.reduce_scatter(out, intervals(full, layout), op=op, group=self.group)
        if op is _SUM:
            out.div_(self._world)
        if out is not interval:
            interval.copy_(out)

    def _average(self, interval: Interval) -> None:
        values = interval.values.to(interval.wire)
        op = _AVG if devices.on_accelerator(values) else _SUM
        dist.all_reduce(values, op, group=self.group)
        interval.values.copy_(values.div_(self._world) if op is _SUM else values)


def living(group: weakref.ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    """Return ``group``, unless it has been destroyed.

    A model may outlive its group, and must not keep it: gloo's threads would live on with it.
    """
    alive = group()
    if alive is None:
        raise ValueError(
            "the process group over which this model was sharded has been destroyed; finish with the "
            "model before torch.distributed.destroy_process_group()"
        )
    return alive

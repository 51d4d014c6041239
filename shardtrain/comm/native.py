"""The backend's own collectives, movements made of them, and what a process group can do.

Only this file knows what torch renames.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

# Its functions have the default group of the moment of their import as a default argument. Dynamo imports
# them, so the first step of any torch optimizer: a group opened before would live to the interpreter's end,
# and gloo's threads with it, which now and then abort the process there. Now there is no group yet.
import torch.distributed.nn
from torch.distributed.constants import default_pg_timeout

from shardtrain import device as devices
from shardtrain.comm.transport import Flat, Gradient, Interval, Pending, Shipment, intervals

# Renamed in torch 2.13.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Gloo cannot average, so the sum is divided.
_SUM, _AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG

# Public since torch 2.15.
_set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout


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


class Backend:
    """The movements of a `Transport` between all ranks of ``group``, by the group's own collectives.

    On an accelerator they run on a stream of their own. That stream waits for the compute stream when a
    movement starts, and the compute stream waits for an event when its result is needed; until then whatever
    the movement uses is held. So memory is allocated and freed in the compute stream's order alone,
    ``record_stream`` is not needed, and what a release gives back is available at once to the next gather,
    however far the host is ahead of the device. Gathers and reductions share the stream: one communicator
    runs one at a time anyway.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._streams: dict[torch.device, Any] = {}  # the communication stream of each device
        # Dividing by a tensor takes a third of the time that dividing by a number does.
        self._world = torch.tensor(float(group.size()), device="cpu")

    def of(self, group: dist.ProcessGroup) -> Backend:
        """Return the same between other ranks, on the same streams."""
        other = Backend(group)
        other._streams = self._streams
        return other

    @property
    def group(self) -> dist.ProcessGroup:
        return living(self._group)

    def gather(self, flats: Sequence[Flat]) -> Pending:
        return self._run(flats[0].full.device, *(partial(self._gather, flat) for flat in flats))

    def reduce(self, gradients: Sequence[Gradient]) -> Pending:
        return self._run(gradients[0].full.device, *map(self._reduction, gradients))

    def average(self, values: Sequence[Interval]) -> Pending:
        return self._run(values[0].values.device, *(partial(self._average, each) for each in values))

    def exchange(self, shipments: Sequence[Shipment]) -> Pending:
        return self._run(shipments[0].full.device, *(partial(self._exchange, each) for each in shipments))

    def _run(self, device: torch.device, *movements: Callable[[], None]) -> Pending:
        """Run ``movements`` in turn, on an accelerator on the communication stream of ``device``.

        The result holds ``movements``, and so the memory that they use, until it is waited for.
        """
        if device not in self._streams:
            # Of high priority, so that copies around a collective do not queue behind computation.
            self._streams[device] = devices.new_stream(device, priority=-1)
        called = devices.current_stream(device).record_event()
        with devices.inside(self._streams[device]):
            devices.current_stream(device).wait_event(called)
            for movement in movements:
                movement()
            done = devices.current_stream(device).record_event()

        def finish(held: object = movements) -> None:
            devices.current_stream(device).wait_event(done)

        return Pending(finish)

    def _gather(self, flat: Flat) -> None:
        if flat.layout.equal:
            all_gather(flat.full, flat.local, self.group)
        elif moves_bytes(self.group):  # the fake one would copy the input to every output
            dist.all_gather(intervals(flat.full, flat.layout), flat.local, group=self.group)

    def _reduction(self, gradient: Gradient) -> Callable[[], None]:
        """Return the reduction of ``gradient``, and allocate its memory now, in the compute stream's order.

        ``full`` gets this rank's part, too. The pieces of ``own`` become views of the mean to come.
        """
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

        def reduce() -> None:
            op = _AVG if devices.on_accelerator(full) else _SUM
            if layout.equal:
                reduce_scatter(out, full, op, self.group)
            elif moves_bytes(self.group):
                dist.reduce_scatter(out, intervals(full, layout), op=op, group=self.group)
            if op is _SUM:
                out.div_(self._world)
            if out is not interval:
                interval.copy_(out)

        return reduce

    def _exchange(self, shipment: Shipment) -> None:
        full, layout, incoming = shipment
        sizes = [layout.length(rank) for rank in range(layout.world)]
        equal = [incoming.shape[1]] * layout.world
        dist.all_to_all_single(incoming.view(-1), full, equal, sizes, group=self.group)

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

"""Run the backend's own collectives, and tell what a process group can do.

Only this file knows of names that differ between versions of torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

# Import this before any process group exists: its functions capture the default group as a default argument,
# and Dynamo imports it at an optimizer's first step. A captured group would live until the interpreter exits,
# where gloo's threads can abort the process.
import torch.distributed.nn
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from shardtrain import device as devices
from shardtrain import torch_private
from shardtrain.comm.transport import Flat, Gradient, Move, Pending, intervals

# Renamed in torch 2.13.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_SUM = dist.ReduceOp.SUM
_AVG = dist.ReduceOp.AVG

# Backends that average, launch several collectives as one, and move intervals of different lengths. Others,
# such as gloo, are asked for sums of equal intervals only. torch's fake backend moves nothing.
_COMPLETE = ("nccl", "xccl", "fake")


def set_time_out(time_out: timedelta) -> None:
    """Set the time-out of all later collectives of all process groups of this rank."""
    # Public from torch 2.14 on.
    set_timeout = getattr(dist, "set_timeout", None) or torch_private.set_pg_timeout
    for group in list(torch_private.pg_map):
        if moves_bytes(group):
            set_timeout(time_out, group)


def time_out_s(group: dist.ProcessGroup) -> float:
    """Return the current time-out of ``group``'s gloo, in seconds."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    time_out: timedelta = getattr(options, "_timeout", default_pg_timeout)
    return time_out.total_seconds()


def has_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether CPU tensors can be sent point to point over gloo."""
    return "cpu:gloo" in dist.get_backend_config(group)


def moves_bytes(group: dist.ProcessGroup) -> bool:
    """Return False for torch's fake process group, whose collectives return at once and move nothing."""
    return "fake" not in dist.get_backend_config(group)


def device_types(group: dist.ProcessGroup) -> list[str]:
    """Return the types of device whose tensors the group's backends move, such as ``["cpu"]``."""
    return [part.partition(":")[0] for part in dist.get_backend_config(group).split(",")]


class Backend:
    """Run the collectives of a `Transport` between all ranks of ``group`` by the group's own collectives.

    On an accelerator they run on a separate stream. That stream waits for the compute stream when a
    collective starts, and the compute stream waits for an event when the result is needed. Until then all
    tensors of the collective are kept alive. So memory is allocated and freed in the order of the compute
    stream only, ``record_stream`` is not needed, and memory that a release frees is available at once to the
    next gather, however far the host is ahead. Gathers and reductions share the stream, since a communicator
    runs one collective at a time. The segments of a unit move in one launch, whatever their dtypes.

    Gloo moves tensors of an accelerator through host memory, one collective and equal intervals at a time.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._streams: dict[torch.device, Any] = {}  # the communication stream of each device
        self._size = group.size()
        backends = [part.split(":") for part in dist.get_backend_config(group).split(",")]
        self._complete_on = [device for device, backend in backends if backend in _COMPLETE]
        # Dividing by a tensor takes a third of the time of dividing by a number.
        self._world = torch.tensor(float(self._size), device="cpu")

    @property
    def group(self) -> dist.ProcessGroup:
        return living(self._group)

    def _is_complete(self, tensor: Tensor) -> bool:
        return tensor.device.type in self._complete_on

    def _require_equal(self, full: Tensor, equal: bool) -> None:
        """Raise ValueError if the backend cannot move intervals of ``full`` that are not ``equal``."""
        if not (equal or self._is_complete(full)):
            raise ValueError(
                f"the process group's backend moves tensors on {full.device.type} in equal intervals only: "
                "use layout='even' and no virtual_ranks, or a process group of NCCL"
            )

    def gather(self, flats: Sequence[Flat]) -> Pending[None]:
        for flat in flats:
            self._require_equal(flat.full, flat.layout.equal)

        def run() -> None:
            with self._together([flat.full for flat in flats if flat.layout.equal]):
                for full, local, layout, *_ in flats:
                    if layout.equal:
                        all_gather(full, local, self.group)
                    elif moves_bytes(self.group):  # the fake group would copy the input to every output
                        dist.all_gather(intervals(full, layout), local, group=self.group)

        return self._run(flats[0].full.device, run)

    def reduce(self, gradients: Sequence[Gradient]) -> Pending[list[Tensor]]:
        """Start reducing. Means are allocated now, in the compute stream's order."""
        for gradient in gradients:
            self._require_equal(gradient.full, gradient.layout.equal)
        means = [gradient.new_mean() for gradient in gradients]
        pending = self._run(gradients[0].full.device, partial(self._reduce, gradients, means))
        return pending.then(lambda _: means)

    def average(self, gradients: Sequence[Gradient], means: Pending[list[Tensor]]) -> Pending[list[Tensor]]:
        """Start averaging the ``means`` in the stream in which they are computed."""
        narrowed = [gradient for gradient in gradients if gradient.dtype != gradient.full.dtype]
        buffers = [gradient.own.new_empty(len(gradient.own)) for gradient in narrowed]
        averaged = list[Tensor]()

        def run() -> None:
            averaged.extend(means.wait())
            self._average(averaged, [gradient.full.dtype for gradient in gradients], buffers)

        return self._run(gradients[0].full.device, run).then(lambda _: averaged)

    def exchange(self, moves: Sequence[Move]) -> Pending[None]:
        if devices.on_accelerator(moves[0][0][0]):
            self._require_equal(moves[0][0][0], equal=False)

        def run() -> None:
            rank = self.group.rank()
            for outgoing, incoming in moves:
                if outgoing[rank].data_ptr() != incoming[rank].data_ptr():
                    incoming[rank].copy_(outgoing[rank])
                # This rank's own part may have another dtype, so another part takes its place in the call.
                into = [*incoming]
                out = [*outgoing]
                into[rank] = torch.empty_like(out[rank - 1])
                out[rank] = out[rank - 1]
                dist.all_to_all(into, out, group=self.group)

        return self._run(moves[0][0][0].device, run)

    def _run(self, device: torch.device, movement: Callable[[], object]) -> Pending[None]:
        """Run ``movement``, on an accelerator in the communication stream of ``device``.

        The result keeps ``movement``, and so its memory, alive until it is waited for.
        """
        if device not in self._streams:
            # Of high priority, so that copies around a collective do not queue behind computation.
            self._streams[device] = devices.new_stream(device, priority=-1)
        called = devices.current_stream(device).record_event()
        with devices.inside(self._streams[device]):
            devices.current_stream(device).wait_event(called)
            movement()
            done = devices.current_stream(device).record_event()

        def finish(kept_alive: object = movement) -> None:
            devices.current_stream(device).wait_event(done)

        return Pending(finish)

    def _together(self, tensors: Sequence[Tensor]) -> AbstractContextManager[object]:
        """Return a context in which collectives of one kind for ``tensors`` are one launch."""
        if len(tensors) > 1 and devices.on_accelerator(tensors[0]) and self._is_complete(tensors[0]):
            together: AbstractContextManager[object] = torch_private.coalescing_manager(self.group)
            return together
        return nullcontext()

    def _op(self, tensors: Sequence[Tensor]) -> dist.ReduceOp.RedOpType:
        """Return AVG where the backend's mean is exact, else SUM, after which `_widen` divides.

        Gloo has no mean. NCCL multiplies by 1 / world first, in the dtype that is sent. fp16 would underflow,
        while a sum that overflows lowers the scale. bf16 is exact for a power of two. A single rank copies.
        """
        world = self._size
        dtypes = {tensor.dtype for tensor in tensors}
        inexact = torch.float16 in dtypes or (torch.bfloat16 in dtypes and world & (world - 1))
        return _SUM if world == 1 or inexact or not self._is_complete(tensors[0]) else _AVG

    def _reduce(self, gradients: Sequence[Gradient], means: Sequence[Tensor]) -> None:
        """Fill ``means``. A narrower dtype is reduced into ``full`` first, which the caller keeps alive."""
        op = self._op([gradient.full for gradient in gradients])
        outs = list[Tensor]()
        for gradient, mean in zip(gradients, means, strict=True):
            outs.append(mean if mean.dtype == gradient.full.dtype else gradient.own)
        with self._together([gradient.full for gradient in gradients if gradient.layout.equal]):
            for gradient, out in zip(gradients, outs, strict=True):
                if gradient.layout.equal:
                    reduce_scatter(out, gradient.full, op, self.group)
                elif moves_bytes(self.group):
                    dist.reduce_scatter(out, gradient.parts, op=op, group=self.group)
        self._widen(means, outs, op)

    def _widen(self, means: Sequence[Tensor], outs: Sequence[Tensor], op: dist.ReduceOp.RedOpType) -> None:
        """Fill ``means`` from ``outs``, the results of ``op``."""
        for mean, out in zip(means, outs, strict=True):
            if mean is not out:
                mean.copy_(out)
            if op is _SUM and self._size > 1:
                mean.div_(self._world)

    def _average(
        self, means: Sequence[Tensor], dtypes: Sequence[torch.dtype], buffers: Sequence[Tensor]
    ) -> None:
        """Average ``means`` in place, sent as ``dtypes``: by way of ``buffers`` where these differ."""
        following = iter(buffers)
        sent = list[Tensor]()
        for mean, dtype in zip(means, dtypes, strict=True):
            sent.append(mean if mean.dtype == dtype else next(following).copy_(mean))
        op = self._op(sent)
        with self._together(sent):
            for tensor in sent:
                dist.all_reduce(tensor, op, group=self.group)
        self._widen(means, sent, op)


def living(group: weakref.ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    """Return ``group``. Raises ValueError if it has been destroyed.

    A model may outlive its group, and must not keep it alive: gloo's threads would live on with it.
    """
    alive = group()
    if alive is None:
        raise ValueError(
            "the process group over which this model was sharded has been destroyed; finish with the "
            "model before torch.distributed.destroy_process_group()"
        )
    return alive

"""The ranks of a process group: their guard, small collectives, and two ways to move flat vectors.

`ProcessGroupTransport` has what both ways share. `ProcessGroupTransport.on` chooses by the devices of the
vectors, when a model is sharded and when it is moved to another device::

    all on the CPU, over gloo    `MessagesTransport`: point-to-point messages, of ``messages.py``
    any other                    `BackendTransport`: the backend's own collectives

Small collectives, of buffers and norms, are the backend's own in both, since their tensors may lie anywhere.
Over gloo ``reports.py`` guards them all. Collectives that carry no tag are guarded by a hash of each rank's
path.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain import device as devices
from shardtrain import torch_private
from shardtrain.comm import backends
from shardtrain.comm.arithmetic import divisor, merge
from shardtrain.comm.backends import living
from shardtrain.comm.guard import Guard, Paths
from shardtrain.comm.messages import Mailbox, collective_tag, start_exchange, start_reduce_scatter
from shardtrain.comm.reports import Reports
from shardtrain.comm.trace import ENTER, GRAPH, LEAVE, Movement
from shardtrain.comm.transport import Move, Pending, Transport, Vector

T = TypeVar("T")
Finish = Callable[[], T]  # waits for what was started
Start = Callable[[Mailbox, int], Finish[T]]  # starts messages with a tag
Tags = Callable[[int], int]  # from the number of a segment to the tag of its messages

_SUM = dist.ReduceOp.SUM
_AVG = dist.ReduceOp.AVG

_guards: weakref.WeakKeyDictionary[dist.ProcessGroup, Reports] = weakref.WeakKeyDictionary()


def guard_world() -> None:
    """Guard collectives outside of models, too, if the default process group has gloo. Collective."""
    group = dist.group.WORLD
    if group is not None and group.size() > 1 and backends.has_gloo(group):
        _guards[group] = Reports(group)


def guarded(group: object) -> AbstractContextManager[None]:
    """Guard the block as part of the latest collective of ``group``, if that is a group with a guard."""
    reports = _guards.get(group) if isinstance(group, dist.ProcessGroup) else None
    return reports.waiting(reports.paths.end - 1) if reports else nullcontext()


class ProcessGroupTransport(Transport):
    """The ranks of ``group``, or the ``members`` of it, with a guard and small collectives.

    Flat vectors move once `on` has chosen by what. ``guard``: by default the group's, see `guard_world`.
    ``members``: the ranks of a part of the group, this one included; ``rank`` and ``world`` count among them.
    ``backend``: a process group of the members, for the backend's own collectives.
    """

    returns_memory = True
    carries_tags = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        guard: Guard | None = None,
        members: Sequence[int] | None = None,
        backend: dist.ProcessGroup | None = None,
    ) -> None:
        rank = dist.get_rank(group)
        self.rank = rank if members is None else members.index(rank)
        self.world = dist.get_world_size(group) if members is None else len(members)
        self.has_gloo = backends.has_gloo(group)
        self._group = weakref.ref(group)
        self._members = members
        self._backend = weakref.ref(backend or group)
        self._guard = guard or _guards.get(group) or Guard(Paths(rank, ()))  # a model has its own
        self._paths = self._guard.paths
        self.reports = self._guard if isinstance(self._guard, Reports) else None
        self._paths.untagged |= self.reports is None or not self.carries_tags
        self._device_types = backends.device_types(group)

    def on(self, devices: Iterable[torch.device]) -> ProcessGroupTransport:
        by_messages = self.has_gloo and all(device.type in ("cpu", "meta") for device in devices)
        kind = MessagesTransport if by_messages else BackendTransport
        if isinstance(self, kind):
            return self
        return kind(self.group, self._guard, self._members, living(self._backend))

    def part(self, members: Sequence[int], backend: dist.ProcessGroup | None = None) -> ProcessGroupTransport:
        """Return a transport between the ranks ``members`` of the group, this one included, with its guard.

        All ranks of the group make the same collectives, each within its part. Messages need no ``backend``.
        """
        return type(self)(self.group, self._guard, members, backend)

    @property
    def group(self) -> dist.ProcessGroup:
        return living(self._group)

    def open_guard(self) -> Guard:
        return self._guard

    @property
    def notices(self) -> bool:
        """Whether its guard is the best that there is: without gloo ranks are compared at ``LEAVE`` alone."""
        alone = self.world == 1 or not backends.moves_bytes(self.group)
        return self.reports is not None or alone or not self.has_gloo

    def fence(self, what: Movement) -> None:
        """Compare hashes of paths at ``LEAVE``. No rank waits at fences, since none shares memory.

        Where steps are captured, also as they begin: another rank may replay, and has no ``LEAVE``.
        """
        compares = what is LEAVE or (self._paths.captures and what in (ENTER, GRAPH))
        row = self._paths.to_compare() if compares and backends.moves_bytes(self.group) else None
        if row is not None:
            own_row = torch.tensor(row, device=self._device_types[0])
            table = own_row.new_empty(len(row) * self.group.size())
            with self._guard.waiting(self._paths.end - 1):
                backends.all_gather(table, own_row, self.group)
            numbers = table.tolist()
            columns = [numbers[place :: len(row)] for place in range(len(row))]
            self._paths.compare_hashes(dict(enumerate(zip(*columns, strict=True))))

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        with self._handshake(tensor) as moved:
            # As bytes, since gloo does not know all dtypes: neither int16 nor fp8.
            dist.broadcast(moved.view(-1).view(torch.uint8), group=self.group, group_src=src)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        with self._handshake(tensor) as moved:
            dist.all_reduce(moved, getattr(dist.ReduceOp, op.upper()), group=self.group)

    @contextmanager
    def _handshake(self, tensor: Tensor) -> Iterator[Tensor]:
        """Make sure that all ranks call the same collective of the backend, on the yielded tensor.

        Gloo does not check that, so ranks first exchange messages, whose tags match only if the calls do.
        The yielded tensor is ``tensor``, or a contiguous copy of it on a device that the backend supports.
        """
        assert self._members is None, "a part of a group moves by messages and between shards only"
        tensor = tensor.detach()
        is_supported = tensor.device.type in self._device_types
        # Gloo takes as many elements from the first one on, whatever the strides.
        moved = tensor.to(tensor.device if is_supported else self._device_types[0]).contiguous()
        # While a step is recorded nothing moves, and other ranks may not record.
        if self.reports is not None and not self._paths.recording:
            token = torch.zeros(self.world, 1)
            self._send([([token[self.rank]] * self.world, list(token))], self._tags)()
        yield moved
        if moved is not tensor:
            tensor.copy_(moved)

    @property
    def _tags(self) -> Tags:
        """Those of the collective that this rank has posted last."""
        return partial(collective_tag, self._paths.end - 1, self._paths.digest)

    def _send(self, moves: Sequence[Move], tags: Tags) -> Finish[None]:
        """Start ``moves`` by messages."""
        finish_all = self._post([partial(start_exchange, outgoing=a, incoming=b) for a, b in moves], tags)

        def finish() -> None:
            finish_all()

        return finish

    def _post(self, starts: Sequence[Start[T]], tags: Tags) -> Finish[list[T]]:
        """Start the messages of every segment, each with its own tag."""
        mailbox = Mailbox(self.group, self.rank, self.world, self._members, self.reports is not None)
        finishes = [start(mailbox, tags(segment)) for segment, start in enumerate(starts)]
        return lambda: [finish() for finish in finishes]

    # Flat vectors, by whatever moves them. Reductions are in the tree of `merge`.

    def all_gather(self, flats: Sequence[Vector]) -> Pending[None]:
        return Pending(self._send_to_all([(flat.local, flat.parts) for flat in flats], self._tags))

    def reduce_scatter(self, gradients: Sequence[Vector]) -> Pending[list[Tensor]]:
        parts = [gradient.parts for gradient in gradients]
        return Pending(self._combine(parts, [gradient.dtype for gradient in gradients], gradients[0].terms))

    def average(self, gradients: Sequence[Vector], means: Pending[list[Tensor]]) -> Pending[list[Tensor]]:
        """Average a part of every interval on each rank, which then sends it to the others."""
        local_means = means.wait()
        parts = []
        for gradient, mean in zip(gradients, local_means, strict=True):
            sent = mean.to(gradient.full.dtype).tensor_split(self.world)
            own_part = mean.tensor_split(self.world)[self.rank]  # as wide as the mean
            parts.append([*sent[: self.rank], own_part, *sent[self.rank + 1 :]])
        tags = self._tags  # of which the first stage uses one per gradient
        finish_first = self._combine(parts, [gradient.dtype for gradient in gradients], gradients[0].terms)

        def finish() -> list[Tensor]:
            vectors = list[tuple[Tensor, list[Tensor]]]()
            wholes = list[Tensor]()
            for gradient, mean, own_mean in zip(gradients, local_means, finish_first(), strict=True):
                whole = mean if mean.dtype == gradient.full.dtype else mean.to(gradient.full.dtype)
                wholes.append(whole)
                vectors.append((own_mean.to(whole.dtype), [*whole.tensor_split(self.world)]))
            self._send_to_all(vectors, lambda segment: tags(len(gradients) + segment))()
            for whole, mean in zip(wholes, local_means, strict=True):
                if whole is not mean:
                    mean.copy_(whole)
            return local_means

        return Pending(finish)

    def _exchange(self, moves: Sequence[Move], tags: Tags) -> Finish[None]:
        """Start ``moves``."""
        raise NotImplementedError

    def _combine(
        self, parts: Sequence[list[Tensor]], dtypes: Sequence[torch.dtype], terms: int
    ) -> Finish[list[Tensor]]:
        """Start sending each ``parts[r]`` to rank r. Return what waits for the means of ``parts[rank]``.

        ``parts``: for each segment a tensor per rank. ``dtypes``: of the means. ``terms``: see `Vector`.
        """
        raise NotImplementedError

    def _send_to_all(self, vectors: Sequence[tuple[Tensor, Sequence[Tensor]]], tags: Tags) -> Finish[None]:
        """Start sending each vector to every rank, and filling its parts, one per rank, from all ranks'."""
        return self._exchange([([local] * self.world, parts) for local, parts in vectors], tags)


class MessagesTransport(ProcessGroupTransport):
    """A transport of messages over gloo, for CPU tensors. Their tags say of which collective they are."""

    def _exchange(self, moves: Sequence[Move], tags: Tags) -> Finish[None]:
        return self._send(moves, tags)

    def _combine(
        self, parts: Sequence[list[Tensor]], dtypes: Sequence[torch.dtype], terms: int
    ) -> Finish[list[Tensor]]:
        starts = list[Start[Tensor]]()
        for of_segment, dtype in zip(parts, dtypes, strict=True):
            start = partial(start_reduce_scatter, parts=of_segment, dtype=dtype, op=_AVG, terms=terms)
            starts.append(start)
        return self._post(starts, self._tags)


class BackendTransport(ProcessGroupTransport):
    """A transport of the backend's own collectives, which carry no tag.

    On an accelerator they run on a separate stream. That stream waits for the compute stream when a
    collective starts, and the compute stream waits for an event when the result is needed. Until then all
    tensors of the collective are kept alive. So memory is allocated and freed in the order of the compute
    stream only, ``record_stream`` is not needed, and memory that a release frees is available at once to the
    next gather, however far the host is ahead. Gathers and reductions share the stream, since a communicator
    runs one collective at a time. The segments of a unit move in one launch, whatever their dtypes.

    Gloo moves tensors of an accelerator through host memory, one collective and equal intervals at a time.
    """

    carries_tags = False

    @cached_property
    def _streams(self) -> dict[torch.device, Any]:
        """The communication stream of each device."""
        return {}

    @cached_property
    def _complete_on(self) -> list[str]:
        """Types of the devices on which the backend has all collectives."""
        kinds = [kind.split(":") for kind in dist.get_backend_config(self._backend_group).split(",")]
        return [device for device, name in kinds if name in backends.COMPLETE]

    @property
    def _backend_group(self) -> dist.ProcessGroup:
        return living(self._backend)

    @property
    def capturable(self) -> bool:
        return any(device != "cpu" for device in self._complete_on)

    def _is_complete(self, tensor: Tensor) -> bool:
        return tensor.device.type in self._complete_on

    def _require_equal(self, full: Tensor, equal: bool) -> None:
        """Raise ValueError if the backend cannot move intervals of ``full`` that are not ``equal``."""
        if not (equal or self._is_complete(full)):
            raise ValueError(
                f"the process group's backend moves tensors on {full.device.type} in equal intervals only: "
                "use layout='even' and no virtual_ranks, or a process group of NCCL"
            )

    def all_gather(self, flats: Sequence[Vector]) -> Pending[None]:
        for flat in flats:
            self._require_equal(flat.full, flat.layout.equal)

        def run() -> None:
            with self._together([flat.full for flat in flats if flat.layout.equal]):
                for flat in flats:
                    if flat.layout.equal:
                        backends.all_gather(flat.full, flat.local, self._backend_group)
                    # The fake group would copy the input to every output.
                    elif backends.moves_bytes(self._backend_group):
                        dist.all_gather(flat.parts, flat.local, group=self._backend_group)

        return Pending(self._run(flats[0].full.device, run))

    def reduce_scatter(self, gradients: Sequence[Vector]) -> Pending[list[Tensor]]:
        """Start reducing. Means are allocated now, in the compute stream's order."""
        if gradients[0].terms:
            return super().reduce_scatter(gradients)
        for gradient in gradients:
            self._require_equal(gradient.full, gradient.layout.equal)
        means = [gradient.new_mean() for gradient in gradients]
        return Pending(self._run(gradients[0].full.device, partial(self._reduce, gradients, means)))

    def average(self, gradients: Sequence[Vector], means: Pending[list[Tensor]]) -> Pending[list[Tensor]]:
        """Start averaging the ``means`` in the stream in which they are computed."""
        if gradients[0].terms:
            return super().average(gradients, means)
        narrowed = [gradient for gradient in gradients if gradient.dtype != gradient.full.dtype]
        buffers = [gradient.local.new_empty(len(gradient.local)) for gradient in narrowed]
        dtypes = [gradient.full.dtype for gradient in gradients]

        def run() -> list[Tensor]:
            return self._average(means.wait(), dtypes, buffers)

        return Pending(self._run(gradients[0].full.device, run))

    def _exchange(self, moves: Sequence[Move], tags: Tags) -> Finish[None]:
        if devices.on_accelerator(moves[0][0][0]):
            self._require_equal(moves[0][0][0], equal=False)

        def run() -> None:
            for outgoing, incoming in moves:
                if outgoing[self.rank].data_ptr() != incoming[self.rank].data_ptr():
                    incoming[self.rank].copy_(outgoing[self.rank])
                # This rank's own part may have another dtype, so another part takes its place in the call.
                into = [*incoming]
                out = [*outgoing]
                into[self.rank] = torch.empty_like(out[self.rank - 1])
                out[self.rank] = out[self.rank - 1]
                dist.all_to_all(into, out, group=self._backend_group)

        return self._run(moves[0][0][0].device, run)

    def _combine(
        self, parts: Sequence[list[Tensor]], dtypes: Sequence[torch.dtype], terms: int
    ) -> Finish[list[Tensor]]:
        arrived = list[list[Tensor]]()
        for of_segment in parts:
            own_part = of_segment[self.rank]
            arrived.append(
                [own_part if rank == self.rank else torch.empty_like(own_part) for rank in range(self.world)]
            )
        finish_exchange = self._exchange([*zip(parts, arrived, strict=True)], self._tags)

        def finish() -> list[Tensor]:
            finish_exchange()
            means = []
            for incoming, dtype in zip(arrived, dtypes, strict=True):
                mean = torch.empty_like(incoming[self.rank], dtype=dtype)
                merge(incoming, mean, _AVG, terms)
                means.append(mean)
            return means

        return finish

    def _run(self, device: torch.device, movement: Callable[[], T]) -> Finish[T]:
        """Run ``movement``, on an accelerator in the communication stream of ``device``.

        Its memory stays alive until what is returned has been called.
        """
        if device not in self._streams:
            # Of high priority, so that copies around a collective do not queue behind computation.
            self._streams[device] = devices.new_stream(device, priority=-1)
        called = devices.current_stream(device).record_event()
        with devices.inside(self._streams[device]):
            devices.current_stream(device).wait_event(called)
            result = movement()
            done = devices.current_stream(device).record_event()

        def finish(kept_alive: object = movement) -> T:
            devices.current_stream(device).wait_event(done)
            return result

        return finish

    def _together(self, tensors: Sequence[Tensor]) -> AbstractContextManager[object]:
        """Return a context in which collectives of one kind for ``tensors`` are one launch."""
        if len(tensors) > 1 and devices.on_accelerator(tensors[0]) and self._is_complete(tensors[0]):
            together: AbstractContextManager[object] = torch_private.coalescing_manager(self._backend_group)
            return together
        return nullcontext()

    def _op(self, tensors: Sequence[Tensor]) -> dist.ReduceOp.RedOpType:
        """Return AVG where the backend's mean is exact, else SUM, after which `_widen` divides.

        Gloo has no mean. NCCL multiplies by 1 / world first, in the dtype that is sent. fp16 would underflow,
        while a sum that overflows lowers the scale. bf16 is exact for a power of two. A single rank copies.
        """
        world = self.world
        dtypes = {tensor.dtype for tensor in tensors}
        inexact = torch.float16 in dtypes or (torch.bfloat16 in dtypes and world & (world - 1))
        return _SUM if world == 1 or inexact or not self._is_complete(tensors[0]) else _AVG

    def _reduce(self, gradients: Sequence[Vector], means: list[Tensor]) -> list[Tensor]:
        """Fill ``means``, and return them, by way of ``local`` where that is narrower; `_run` keeps it."""
        op = self._op([gradient.full for gradient in gradients])
        outs = list[Tensor]()
        for gradient, mean in zip(gradients, means, strict=True):
            outs.append(mean if mean.dtype == gradient.full.dtype else gradient.local)
        with self._together([gradient.full for gradient in gradients if gradient.layout.equal]):
            for gradient, out in zip(gradients, outs, strict=True):
                if gradient.layout.equal:
                    backends.reduce_scatter(out, gradient.full, op, self._backend_group)
                elif backends.moves_bytes(self._backend_group):
                    dist.reduce_scatter(out, gradient.parts, op=op, group=self._backend_group)
        self._widen(means, outs, op)
        return means

    def _widen(self, means: Sequence[Tensor], outs: Sequence[Tensor], op: dist.ReduceOp.RedOpType) -> None:
        """Fill ``means`` from ``outs``, the results of ``op``."""
        for mean, out in zip(means, outs, strict=True):
            if mean is not out:
                mean.copy_(out)
            if op is _SUM and self.world > 1:
                mean.div_(divisor(self.world, mean))

    def _average(
        self, means: list[Tensor], dtypes: Sequence[torch.dtype], buffers: Sequence[Tensor]
    ) -> list[Tensor]:
        """Average ``means`` in place, and return them. They are sent as ``dtypes``, some from ``buffers``."""
        following = iter(buffers)
        sent = list[Tensor]()
        for mean, dtype in zip(means, dtypes, strict=True):
            sent.append(mean if mean.dtype == dtype else next(following).copy_(mean))
        op = self._op(sent)
        with self._together(sent):
            for tensor in sent:
                dist.all_reduce(tensor, op, group=self._backend_group)
        self._widen(means, sent, op)
        return means

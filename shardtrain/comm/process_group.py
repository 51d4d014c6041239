"""Move bytes over a process group: by NCCL's own collectives, on gloo by point-to-point messages.

Messages are in ``messages.py``, guarded by ``reports.py``, and the backend's own collectives in
``native.py``, guarded by a hash of each rank's path.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain.comm import native
from shardtrain.comm.arithmetic import merge
from shardtrain.comm.guard import Guard, Paths
from shardtrain.comm.messages import Mailbox, collective_tag, start_exchange, start_reduce_scatter
from shardtrain.comm.native import Backend, living
from shardtrain.comm.reports import Reports
from shardtrain.comm.trace import LEAVE, Movement
from shardtrain.comm.transport import Flat, Gradient, Move, Pending, Transport, intervals

T = TypeVar("T")
Start = Callable[[Mailbox, int], Pending[T]]  # starts messages with a tag


class Call(NamedTuple):
    """Identify one stage of a collective: its ``position`` and ``digest`` in the path.

    ``messages``: how many tags earlier stages have used.
    """

    position: int
    digest: int
    messages: int


_guards: weakref.WeakKeyDictionary[dist.ProcessGroup, Reports] = weakref.WeakKeyDictionary()


def guard_world() -> None:
    """Guard collectives outside of models, too, if the default process group has gloo. Collective."""
    group = dist.group.WORLD
    if group is not None and group.size() > 1 and native.has_gloo(group):
        _guards[group] = Reports(group)


def guarded(group: object) -> AbstractContextManager[None]:
    """Guard the block as part of the latest collective of ``group``, if that is a group with a guard."""
    reports = _guards.get(group) if isinstance(group, dist.ProcessGroup) else None
    return reports.waiting(reports.paths.end - 1) if reports else nullcontext()


class ProcessGroupTransport(Transport):
    """Run collectives between the ranks of ``group``, or between those of a `part` of it."""

    def __init__(self, group: dist.ProcessGroup, reports: Reports | None = None) -> None:
        reports = reports or _guards.get(group)  # a model has its own
        self.reports = reports
        self._group = weakref.ref(group)
        self._members: Sequence[int] | None = None  # of a part, its ranks' numbers in the group
        self.rank = dist.get_rank(group)
        self._guard = reports or Guard(Paths(self.rank, ()))
        self._paths = self._guard.paths
        self._paths.untagged |= reports is None
        self.world = dist.get_world_size(group)
        self.has_gloo = native.has_gloo(group)
        self._device_types = native.device_types(group)
        self._backend = Backend(group)

    def part(self, members: Sequence[int], backend: dist.ProcessGroup | None = None) -> ProcessGroupTransport:
        """Return a transport between the ranks ``members`` of the group, this one included, with its guard.

        All ranks of the group make the same collectives, each within its part. ``backend``: a process group
        of the members, for the backend's own collectives; messages need none.
        """
        part = copy.copy(self)
        part._members = members
        part.rank = members.index(self.rank)
        part.world = len(members)
        part._backend = self._backend if backend is None else Backend(backend)
        return part

    @property
    def group(self) -> dist.ProcessGroup:
        return living(self._group)

    @property
    def _mailbox(self) -> Mailbox:
        return Mailbox(self.group, self.rank, self.world, self._members, self.reports is not None)

    def open_guard(self) -> Guard:
        return self._guard

    def fence(self, what: Movement) -> None:
        """Compare hashes of paths at ``LEAVE``. No rank waits at fences, since none shares memory."""
        row = self._paths.to_compare() if what is LEAVE and native.moves_bytes(self.group) else None
        if row is not None:
            own_row = torch.tensor(row, device=self._device_types[0])
            table = own_row.new_empty(2 * self.group.size())
            with self._waiting(self._paths.end - 1):
                native.all_gather(table, own_row, self.group)
            numbers = table.tolist()
            self._paths.compare_hashes(dict(enumerate(zip(numbers[::2], numbers[1::2], strict=True))))

    def all_gather(self, flats: Sequence[Flat]) -> Pending[None]:
        if self._by_messages([flat.full for flat in flats]):
            return self._send_to_all([(flat.local, intervals(flat.full, flat.layout)) for flat in flats])
        return self._own_collectives.gather(flats)

    def reduce_scatter(self, gradients: Sequence[Gradient]) -> Pending[list[Tensor]]:
        by_tree = any(gradient.terms for gradient in gradients)
        if not by_tree and not self._by_messages([gradient.full for gradient in gradients]):
            return self._own_collectives.reduce(gradients)
        parts = [gradient.parts for gradient in gradients]
        return self._combine(parts, [gradient.dtype for gradient in gradients], gradients[0].terms)

    def average(self, gradients: Sequence[Gradient], means: Pending[list[Tensor]]) -> Pending[list[Tensor]]:
        if not (gradients[0].terms or self._by_messages([gradient.full for gradient in gradients])):
            return self._own_collectives.average(gradients, means)
        return self._average_in_two_stages(gradients, means.wait())

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        with self._handshake(tensor) as moved:
            # As bytes, since gloo does not know all dtypes: neither int16 nor fp8.
            dist.broadcast(moved.view(-1).view(torch.uint8), group=self.group, group_src=src)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        with self._handshake(tensor) as moved:
            dist.all_reduce(moved, getattr(dist.ReduceOp, op.upper()), group=self.group)

    @property
    def _own_collectives(self) -> Backend:
        """The backend's own collectives, which carry no tag."""
        self._paths.untagged = True
        return self._backend

    def _by_messages(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether ``tensors`` are sent as messages, not by the backend's own collectives."""
        return self.has_gloo and all(tensor.is_cpu for tensor in tensors)

    def _send_to_all(
        self, vectors: Sequence[tuple[Tensor, Sequence[Tensor]]], call: Call | None = None
    ) -> Pending[None]:
        """Start sending each ``local`` to every rank, and filling ``parts`` from all ranks'.

        ``vectors``: for each segment ``local``, and its ``parts``, one per rank. ``call``: of which
        collective this is a further stage; None begins the current one.
        """
        return self._exchange([([local] * self.world, parts) for local, parts in vectors], call)

    def _combine(
        self, parts: Sequence[list[Tensor]], dtypes: Sequence[torch.dtype], terms: int
    ) -> Pending[list[Tensor]]:
        """Start sending each ``parts[r]`` to rank r. The result is the mean of all ranks' ``parts[rank]``.

        ``parts``: for each segment a list with a tensor per rank. ``dtypes``: of the means. ``terms``: as of
        `Gradient`.
        """
        op = dist.ReduceOp.AVG
        if self._by_messages([of_segment[0] for of_segment in parts]):
            starts = list[Start[Tensor]]()
            for of_segment, dtype in zip(parts, dtypes, strict=True):
                start = partial(start_reduce_scatter, parts=of_segment, dtype=dtype, op=op, terms=terms)
                starts.append(start)
            return self._watched(starts)
        arrived = list[list[Tensor]]()
        for of_segment in parts:
            own_part = of_segment[self.rank]
            arrived.append(
                [own_part if rank == self.rank else torch.empty_like(own_part) for rank in range(self.world)]
            )
        moving = self._exchange([*zip(parts, arrived, strict=True)])

        def finish(_: None) -> list[Tensor]:
            means = []
            for incoming, dtype in zip(arrived, dtypes, strict=True):
                mean = torch.empty_like(incoming[self.rank], dtype=dtype)
                merge(incoming, mean, op, terms)
                means.append(mean)
            return means

        return moving.then(finish)

    def _exchange(self, moves: Sequence[Move], call: Call | None = None) -> Pending[None]:
        """Start ``moves``. ``call``: see `_send_to_all`."""
        if not self._by_messages([outgoing[0] for outgoing, _ in moves]):
            return self._own_collectives.exchange(moves)
        starts = [partial(start_exchange, outgoing=a, incoming=b) for a, b in moves]
        return self._watched(starts, call).then(lambda _: None)

    @property
    def _call(self) -> Call:
        """The collective that this rank has posted last."""
        return Call(self._paths.end - 1, self._paths.digest, 0)

    def _watched(self, starts: Sequence[Start[T]], call: Call | None = None) -> Pending[list[T]]:
        """Start the messages of every segment, each with its own tag, under the guard."""
        call = call or self._call
        mailbox = self._mailbox
        with self._waiting(call.position):
            moving = list[Pending[T]]()
            for index, start in enumerate(starts, call.messages):
                moving.append(start(mailbox, collective_tag(call.position, call.digest, index)))
        together = Pending(lambda: [pending.wait() for pending in moving])
        return together if self.reports is None else self.reports.watch(call.position, together)

    def _waiting(self, position: int) -> AbstractContextManager[None]:
        return nullcontext() if self.reports is None else self.reports.waiting(position)

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
        position = self._paths.end - 1
        if self.reports is not None:
            token = torch.zeros(self.world, 1)
            self._send_to_all([(token[self.rank], list(token))]).wait()
        with self._waiting(position):
            yield moved
        if moved is not tensor:
            tensor.copy_(moved)

    def _average_in_two_stages(
        self, gradients: Sequence[Gradient], means: Sequence[Tensor]
    ) -> Pending[list[Tensor]]:
        """Average a part of every interval on each rank, which then sends it to the others."""
        parts = []
        for gradient, mean in zip(gradients, means, strict=True):
            sent = mean.to(gradient.full.dtype).tensor_split(self.world)
            own_part = mean.tensor_split(self.world)[self.rank]  # as wide as the mean
            parts.append([*sent[: self.rank], own_part, *sent[self.rank + 1 :]])
        second = self._call._replace(messages=len(gradients))
        pending = self._combine(parts, [gradient.dtype for gradient in gradients], gradients[0].terms)

        def finish(own_means: list[Tensor]) -> list[Tensor]:
            vectors = list[tuple[Tensor, list[Tensor]]]()
            wholes = list[Tensor]()
            for gradient, mean, own_mean in zip(gradients, means, own_means, strict=True):
                whole = mean if mean.dtype == gradient.full.dtype else mean.to(gradient.full.dtype)
                wholes.append(whole)
                vectors.append((own_mean.to(whole.dtype), [*whole.tensor_split(self.world)]))
            self._send_to_all(vectors, second).wait()
            for whole, mean in zip(wholes, means, strict=True):
                if whole is not mean:
                    mean.copy_(whole)
            return [*means]

        return pending.then(finish)

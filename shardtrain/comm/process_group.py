"""The process-group transport: NCCL's own collectives, and on gloo point-to-point messages.

Gloo's reduce-scatter is an all-reduce per rank, and its all-gather goes round a ring. Sending every
interval straight to the rank that needs it takes about half the time, and summing happens locally, in
rank order, in fp32 at least: deterministic, and exact for low-precision wires. Two ranks, intervals
``[a0 a1]``::

    gather   rank 0 sends its a0 to rank 1, rank 1 sends its a1 to rank 0
    reduce   rank 0 sends its gradient of a1, rank 1 its gradient of a0; each adds what came to its own

On CUDA both movements run on a stream of their own. That stream waits for the compute stream when a
movement starts, and the compute stream waits for an event when its result is needed. So memory is
allocated and freed in the compute stream's order alone, and ``record_stream`` is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shardtrain.comm.meter import count
from shardtrain.comm.transport import Flat, Pending, Tag
from shardtrain.layout import Layout

# Renamed in torch 2.13, where the old names warn. Only this file knows.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Our messages' tags start here, out of the way of tags that a user's own messages may carry.
_FIRST_TAG = 1 << 20

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class ProcessGroupTransport:
    """Movements between the ranks of ``group``."""

    in_place = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.has_gloo = "gloo" in dist.get_backend_config(group)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def allocate(self, layout: Layout, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return like.new_empty(layout.padded), like.new_empty(layout.length(self.rank))

    def gradient(self, layout: Layout, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(layout.padded)

    def discard(self, gradient: torch.Tensor) -> None:
        pass

    def fence(self, what: str) -> None:
        pass

    def gather(self, tag: Tag, flats: Sequence[Flat]) -> Pending:
        count("all_gather", sum(flat.local.nbytes for flat in flats) * (self.world - 1))
        if self._by_messages(flats):
            return self._gather_by_messages(_FIRST_TAG + tag.number, flats)
        return self._start(self._gather_natively, flats)

    def reduce(self, tag: Tag, flats: Sequence[Flat]) -> Pending:
        away = [flat.full.nbytes - self._own(flat).nbytes for flat in flats]
        count("reduce_scatter", sum(away))
        if self._by_messages(flats):
            return self._reduce_by_messages(_FIRST_TAG + tag.number, flats)
        return self._start(self._reduce_natively, flats)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> None:
        count("broadcast", tensor.nbytes * (self.world - 1) if self.rank == src else 0)
        dist.broadcast(tensor, group=self.group, group_src=src)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        count("all_reduce", 2 * tensor.nbytes * (self.world - 1) // self.world)
        dist.all_reduce(tensor, _OPS[op], group=self.group)

    def _by_messages(self, flats: Sequence[Flat]) -> bool:
        return self.has_gloo and all(flat.full.device.type == "cpu" for flat in flats)

    def _own(self, flat: Flat) -> torch.Tensor:
        return flat.full[flat.layout.interval(self.rank)]

    def _peers(self) -> list[int]:
        """The other ranks, nearest first, so that not all ranks turn to the same one at once."""
        return [(self.rank + step) % self.world for step in range(1, self.world)]

    def _gather_by_messages(self, tag: int, flats: Sequence[Flat]) -> Pending:
        works = []
        for index, flat in enumerate(flats):
            for peer in self._peers():
                into = flat.full[flat.layout.interval(peer)]
                works.append(dist.irecv(into, group=self.group, group_src=peer, tag=tag + index))
            for peer in self._peers():
                works.append(dist.isend(flat.local, group=self.group, group_dst=peer, tag=tag + index))
            self._own(flat).copy_(flat.local)
        return Pending(lambda: _wait_all(works))

    def _reduce_by_messages(self, tag: int, flats: Sequence[Flat]) -> Pending:
        works, finishing = [], []
        for index, flat in enumerate(flats):
            own = self._own(flat)
            inbox = own.new_empty((self.world - 1, own.numel()))
            parts = [own] * self.world
            for row, peer in enumerate(self._peers()):
                parts[peer] = inbox[row]
                works.append(dist.irecv(inbox[row], group=self.group, group_src=peer, tag=tag + index))
            for peer in self._peers():
                out = flat.full[flat.layout.interval(peer)]
                works.append(dist.isend(out, group=self.group, group_dst=peer, tag=tag + index))
            finishing.append((parts, flat.local))

        def finish() -> None:
            _wait_all(works)
            for parts, out in finishing:
                mean_in_rank_order(parts, out)

        return Pending(finish)

    def _gather_natively(self, flat: Flat) -> None:
        _all_gather(flat.full, flat.local, group=self.group)

    def _reduce_natively(self, flat: Flat) -> None:
        out = flat.local if flat.local.dtype == flat.full.dtype else flat.local.to(flat.full.dtype)
        if flat.full.device.type == "cuda":
            _reduce_scatter(out, flat.full, op=dist.ReduceOp.AVG, group=self.group)
        else:
            _reduce_scatter(out, flat.full, group=self.group)
            out.div_(self.world)
        if out is not flat.local:
            flat.local.copy_(out)

    def _start(self, movement: Callable[[Flat], None], flats: Sequence[Flat]) -> Pending:
        """Run ``movement`` on each flat, on the communication stream or at once where there is none."""
        device = flats[0].full.device
        if device.type != "cuda":
            for flat in flats:
                movement(flat)
            return Pending()
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for flat in flats:
                movement(flat)
            done = stream.record_event()
        return Pending(lambda: torch.cuda.current_stream(device).wait_event(done))


def mean_in_rank_order(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """``out = (((parts[0] + parts[1]) + parts[2]) + ...) / len(parts)``, summed in fp32 at least."""
    wide = torch.promote_types(out.dtype, torch.float32)
    total = out if out.dtype == wide else torch.empty_like(out, dtype=wide)
    torch.add(parts[0], parts[1], out=total) if parts[0].dtype == wide else total.copy_(parts[0]).add_(
        parts[1]
    )
    for part in parts[2:]:
        total.add_(part)
    total.div_(len(parts))
    if total is not out:
        out.copy_(total)


def _wait_all(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "every rank of a shard group is a member of it"
        work.wait()

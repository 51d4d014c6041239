"""Ranks of several hosts: shared memory inside a host, messages between hosts.

Each host holds one copy of every full vector, shared by its ranks. Ranks at the same place on their hosts
form a column, and only they exchange messages. Two hosts of two ranks, intervals ``[a b c d]``::

    host 0   rank 0  owns a        column 0: ranks 0 and 2, intervals a and c
             rank 1  owns b        column 1: ranks 1 and 3, intervals b and d
    host 1   rank 2  owns c
             rank 3  owns d

    gather   rank 0 sends a to rank 2, which receives it into host 1's vector, and so on; the vector is
             whole when every rank of the host has received its column
    reduce   rank 0 averages a and c over its host's gradients, sends c to rank 2, and averages its own a
             with what rank 2 sends

So every interval reaches a host once, however many ranks it has, and the bytes between two hosts are those
of two ranks. A mean of means rounds otherwise than a sum in rank order: the bits are the same in every run
on such hosts, but may differ from those of one host in the last place.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from shardtrain.comm.guard import PeerLost
from shardtrain.comm.host_memory import HostMemory, Offer
from shardtrain.comm.meter import count
from shardtrain.comm.process_group import ProcessGroupTransport, guarded, own_interval
from shardtrain.comm.shared_memory import SharedMemoryTransport
from shardtrain.comm.signals import connect
from shardtrain.comm.transport import Flat, Gradient, Pending, Tag, sent_by


class HostsTransport(SharedMemoryTransport):
    """Movements between the ranks of hosts that have equally many; ``inner`` is guarded."""

    def __init__(
        self, inner: ProcessGroupTransport, memory: HostMemory, hosts: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(inner, memory)
        place = memory.ranks.index(self.rank)
        self._column = [ranks[place] for ranks in hosts]
        self._between = inner.part(self._column)

    def reduce(self, tag: Tag, gradients: Sequence[Gradient]) -> Pending:
        """The host's means are made at once, so that messages travel while the next unit computes."""
        count("reduce_scatter", sum(sent_by(gradient, self.rank) for gradient in gradients))
        sets = []
        for turn in self.memory.rounds(tag, gradients):
            for (_, gradient), offer in zip(turn, self.memory.offer(turn), strict=True):
                sets.append(self._host_means(offer, gradient))
        moving = self._between.combine(tag, sets)
        return Pending(lambda: self._await(moving))

    def _host_means(self, offer: Offer, gradient: Gradient) -> list[torch.Tensor]:
        """The host's means of the column's intervals, in its order."""
        others = [gradient.layout.interval(rank) for rank in self._column if rank != self.rank]
        means = self.memory.average(offer, gradient, gradient.layout.interval(self.rank), others)
        means.insert(self._column.index(self.rank), own_interval(gradient, self.rank))
        return means

    def fence(self, what: str) -> None:
        self.inner.fence(what)
        super().fence(what)

    def _gather_in_place(self, tag: Tag, flats: Sequence[Flat]) -> Pending:
        signals = self.memory.signals
        position = signals.post("gathering", tag.number, tag.name)
        spread = [(flat.local, [flat.full[flat.layout.interval(r)] for r in self._column]) for flat in flats]
        moving = self._between.spread(tag, spread)

        def finish() -> None:
            self._await(moving)
            signals.done(position)
            signals.wait_done(position)

        return Pending(finish)

    def _meet(self, kind: str, number: int, name: str) -> None:
        """All hosts meet, in ``inner``."""

    def _await(self, moving: Pending) -> None:
        """Wait for messages. If another host is gone, perhaps because this one strayed: that comes first."""
        try:
            moving.wait()
        except PeerLost:
            self.memory.signals.compare_now()
            raise


Shared = TypeVar("Shared")


def where_possible(kind: str, inner: ProcessGroupTransport, share: Callable[[], Shared]) -> Shared | None:
    """What ``share`` opens; None where ``kind`` does not ask for it, or leaves open what is not possible.

    Collective. That it is not possible is logged, in one line.

    Raises:
        ValueError: ``kind`` is ``"shared_memory"`` and the ranks cannot share memory.
    """
    if kind == "process_group" or (kind == "auto" and not inner.has_gloo):
        return None
    try:
        return share()
    except ValueError as error:
        if kind == "shared_memory":
            raise ValueError(f"transport='shared_memory' is not possible: {error}") from None
        if inner.rank == 0:
            logging.getLogger("shardtrain").info("not sharing memory between ranks: %s", error)
        return None


def open_shared_memory(inner: ProcessGroupTransport) -> SharedMemoryTransport:
    """Let the ranks of ``inner`` share memory with those of their host. Collective; all succeed or all raise.

    Raises:
        ValueError: they cannot, with the reason, on every rank.
    """
    hosts = _hosts(inner)
    own = next(ranks for ranks in hosts if inner.rank in ranks)
    memory = share_memory(inner, own)
    if len(hosts) == 1:
        return SharedMemoryTransport(inner, memory)
    return HostsTransport(guarded(inner), memory, hosts)


def share_memory(inner: ProcessGroupTransport, own: Sequence[int]) -> HostMemory:
    """Memory between the ranks ``own``, this one among them, of one host. Collective over ``inner``.

    Raises:
        ValueError: they cannot, with the reason, on every rank.
    """
    token = torch.zeros(2, dtype=torch.int64)
    if inner.rank == 0:
        token.copy_(torch.frombuffer(bytearray(os.urandom(16)), dtype=torch.int64))
    inner.broadcast(token)
    meeting = f"shardtrain-{token[0].item():x}{token[1].item():x}"
    signals, problem = None, ""
    try:
        signals = connect(inner.rank, own, meeting, lambda: _barrier(inner))
    except OSError as error:
        problem = f"the ranks cannot reach one another on this host: {error}"
    failed = torch.tensor([1 if problem else 0])
    inner.all_reduce(failed, "max")
    if failed.item() or signals is None:
        raise ValueError(problem or "another rank cannot share memory")
    return HostMemory(signals)


def _hosts(inner: ProcessGroupTransport) -> list[list[int]]:
    """The ranks of every host, in the order of their first ranks; the same answer on all ranks.

    Raises:
        ValueError: not every rank can share memory with as many others.
    """
    hosts: dict[int, list[int]] = {}
    for rank, key in enumerate(host_numbers(inner)):
        hosts.setdefault(key, []).append(rank)
    sizes = [len(ranks) for ranks in hosts.values()]
    if max(sizes) == 1:
        raise ValueError("every rank is on a host of its own")
    if min(sizes) != max(sizes):
        raise ValueError(f"the hosts have different numbers of ranks: {', '.join(map(str, sizes))}")
    return list(hosts.values())


def host_numbers(inner: ProcessGroupTransport) -> list[int]:
    """A number of each rank's host, on every rank. Collective.

    Raises:
        ValueError: not every rank can share memory at all.
    """
    able = hasattr(os, "memfd_create") and hasattr(socket, "send_fds")
    keys = torch.zeros(inner.world, dtype=torch.int64)
    digest = hashlib.sha256(host_key().encode()).digest()
    keys[inner.rank] = int.from_bytes(digest[:7], "big") if able else -1
    inner.all_reduce(keys)
    if keys.min() < 0:
        raise ValueError("that needs Linux")
    return keys.tolist()


def host_key() -> str:
    """Equal on ranks that can share memory. ``SHARDTRAIN_HOST_KEY`` overrides it, to simulate hosts."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    default = f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}"
    return os.environ.get("SHARDTRAIN_HOST_KEY", default)


def _barrier(inner: ProcessGroupTransport) -> None:
    inner.all_reduce(torch.zeros(1))

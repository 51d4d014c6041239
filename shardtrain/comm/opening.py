"""The choice of the transport between ranks. All functions are collective, and choose alike on all ranks.

``"auto"`` shares memory where it can. Ranks without gloo use accelerators, and share none. Other ranks
exchange which host they are on::

    all on one host                  `SharedMemoryTransport`
    several hosts, or no sockets     `MessagesTransport`, and one log line says why
    between processes

``"process_group"`` chooses the last of these, and ``"shared_memory"`` raises an error instead of it. Once the
devices of a model's vectors are known, `Channel.place` may choose `BackendTransport` in its place. With
several replicas the same holds for every shard group, which must be on one host to share memory. So a 2-D
mesh with one row per host shares memory inside each host, and averages across hosts by messages. A transport
of another kind is one more entry in `TRANSPORTS`.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist

from shardtrain.comm import backends
from shardtrain.comm.channel import Channel, Ranks, gather_texts, require_same
from shardtrain.comm.process_group import ProcessGroupTransport, guarded
from shardtrain.comm.reports import Reports
from shardtrain.comm.shared_memory import SharedMemoryTransport
from shardtrain.comm.signals import connect
from shardtrain.comm.transport import Alone, Transport
from shardtrain.comm.wrappers import Replicated
from shardtrain.errors import PeerLost


class Opening:
    """The ranks between which an entry of `TRANSPORTS` opens a transport, with the guard of their messages.

    ``process_group``: the transport between ``all_ranks``, for vectors on the CPU if there is gloo.
    ``groups``: the ranks of every shard group; ``own``: of this rank's. ``shards``: the transport between
    these. Raises ValueError if ranks ask for different kinds, PeerLost if some do not come.
    """

    def __init__(
        self,
        kind: str,
        group: dist.ProcessGroup,
        groups: Sequence[Sequence[int]] | None = None,
        inside: dist.ProcessGroup | None = None,
    ) -> None:
        try:
            with guarded(group):
                reports = Reports(group) if backends.has_gloo(group) else None
        except PeerLost:
            raise
        except RuntimeError as error:  # gloo's, which no guard watches
            raise PeerLost(
                "shard() has waited in vain for other ranks: every rank must call it, between the same "
                "collectives; a rank that wraps its model in DistributedDataParallel or fully_shard instead "
                f"waits for something else ({error})"
            ) from error
        self.process_group = ProcessGroupTransport(group, reports).on(())
        self.shards = self.process_group
        self.all_ranks = Ranks(self.process_group)
        if backends.moves_bytes(group):
            require_same([repr(kind)], "transport=", self.all_ranks)
        self.groups = groups or [range(self.all_ranks.world)]
        self.own = next(ranks for ranks in self.groups if self.all_ranks.rank in ranks)
        if len(self.groups) > 1:
            self.shards = self.process_group.part(self.own, inside)


def _shared_memory(opening: Opening, or_messages: bool = False) -> Transport:
    """Return a transport that shares memory between the ranks of a host.

    Where that is not possible, return one by messages if ``or_messages``, otherwise raise ValueError.
    """
    all_ranks = opening.all_ranks
    try:
        _require_shared_hosts(opening)
        signals = connect(all_ranks, opening.own)
    except ValueError as error:
        if not or_messages:
            raise ValueError(f"transport='shared_memory' is not possible: {error}") from None
        if opening.process_group.has_gloo and all_ranks.rank == 0:
            logging.getLogger("shardtrain").info("not sharing memory between ranks: %s", error)
        return opening.shards
    return SharedMemoryTransport(opening.shards, signals)


TRANSPORTS: dict[str, Callable[[Opening], Transport]] = {
    "auto": partial(_shared_memory, or_messages=True),
    "process_group": lambda opening: opening.shards,
    "shared_memory": _shared_memory,
}


def open_transport(
    kind: str = "process_group",
    group: dist.ProcessGroup | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    inside: dist.ProcessGroup | None = None,
    across: dist.ProcessGroup | None = None,
) -> Channel:
    """Open the transport ``kind`` of `TRANSPORTS` between the ranks of ``group`` (default: the world).

    ``groups``: the ranks of every shard group, each a replica, ascending in rows and columns. ``inside``,
    ``across``: the process groups of this rank's shard group and column, for the backend's own collectives.
    Raises ValueError for another kind, if ranks ask for different ones, or if shared memory is not possible.
    """
    if kind not in TRANSPORTS:
        *names, last = map(repr, TRANSPORTS)
        raise ValueError(f"transport must be {', '.join(names)} or {last}, got {kind!r}")
    group = group or (dist.group.WORLD if dist.is_initialized() else None)
    if group is None or group.size() == 1:
        return Channel(Alone())
    opening = Opening(kind, group, groups, inside)
    transport = TRANSPORTS[kind](opening) if len(opening.own) > 1 else Alone()
    if groups is None:
        return Channel(transport, opening.all_ranks)
    column = [ranks[opening.own.index(opening.all_ranks.rank)] for ranks in groups]
    replicas = Channel(opening.process_group.part(column, across))
    return Replicated(Channel(transport), replicas, opening.all_ranks, groups)


def _require_shared_hosts(opening: Opening) -> None:
    """Raise ValueError, on every rank, unless each shard group is on one host. Collective."""
    if not opening.process_group.has_gloo:
        raise ValueError("sharing memory needs gloo, which the process group lacks")
    hosts = ranks_by_host(opening.all_ranks)
    if "" in hosts:
        raise ValueError("sharing memory needs Linux, on every host")
    for ranks in opening.groups:
        if not any(set(ranks) <= set(host) for host in hosts.values()):
            raise ValueError(
                f"the shard group of ranks {', '.join(map(str, ranks))} is on several hosts; pass a 2-D mesh "
                "with one row per host, and memory is shared inside each"
            )


def ranks_by_host(all_ranks: Ranks) -> dict[str, list[int]]:
    """Return the ranks of each host, ascending, by `host_key`, ordered by their first ranks. Collective."""
    hosts: dict[str, list[int]] = {}
    for rank, key in enumerate(gather_texts(host_key(), all_ranks)):
        hosts.setdefault(key, []).append(rank)
    return hosts


def host_key() -> str:
    """Return a text that is equal on ranks that can share memory; empty if this rank cannot.

    ``SHARDTRAIN_HOST_KEY`` overrides it, to simulate hosts.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not (boot.exists() and hasattr(os, "memfd_create")):
        return ""
    # In one namespace of process numbers, by which `connect` knows its peers.
    host = f"{socket.gethostname()} {boot.read_text()} {os.readlink('/proc/self/ns/pid')}"
    return os.environ.get("SHARDTRAIN_HOST_KEY", host)


def plain_transport(group: dist.ProcessGroup | None = None) -> Ranks:
    """Return the ranks of ``group`` (default: the world) for use outside the engine."""
    group = group or dist.group.WORLD
    if group is None or dist.get_world_size(group) < 2:
        return Ranks(Alone())
    return Ranks(ProcessGroupTransport(group))

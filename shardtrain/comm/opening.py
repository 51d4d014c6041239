"""How ranks find out which transport they have between them. All of this is collective, and agreed upon.

``"auto"`` shares memory where it can. Without gloo it does not ask, since there are GPUs; else each rank
tells which host it is on, and::

    all on one host                          `SharedMemoryTransport`
    several hosts of equally many ranks      `HostsTransport`: memory inside a host, messages between hosts
    a host for every rank, or unequal ones,  `ProcessGroupTransport`, and one log line says why
    or no sockets between processes

``"process_group"`` asks for the last of these at once, and ``"shared_memory"`` for an error instead of it.
With several replicas the same is asked of every shard group, which must be on one host. A single rank has
nothing between ranks: `Alone`. Over messages there is a guard wherever these go over gloo.
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
import torch.distributed as dist

from shardtrain.comm.process_group import ProcessGroupTransport
from shardtrain.comm.replicated import ReplicaGroup, Replicated
from shardtrain.comm.reports import Reports
from shardtrain.comm.shared_memory import HostsTransport, SharedMemoryTransport
from shardtrain.comm.signals import Signals, connect
from shardtrain.comm.transport import Alone, Transport


def open_transport(kind: str = "process_group", group: dist.ProcessGroup | None = None) -> Transport:
    """The transport between the ranks of ``group`` (default: the world). Collective.

    Args:
        kind: ``"process_group"``; ``"shared_memory"``; ``"auto"``, which shares memory where it can and
            says in one log line why it cannot.

    Raises:
        ValueError: ``"shared_memory"`` is asked for and the ranks cannot share memory.
    """
    if not dist.is_initialized():
        return Alone()
    group = group or dist.group.WORLD
    assert group is not None
    if dist.get_world_size(group) == 1:
        return Alone()
    inner = ProcessGroupTransport(group)
    return _where_possible(kind, inner, lambda: _open_shared_memory(inner)) or _guarded(inner, None)


def open_replicated(
    kind: str, groups: Sequence[Sequence[int]], inside: dist.ProcessGroup, across: dist.ProcessGroup
) -> Transport:
    """The transport between all ranks of the world, of which each of ``groups`` is a replica. Collective.

    Args:
        kind: as for `open_transport`; memory is shared inside shard groups.
        groups: the ranks of every shard group, in ascending order, as its columns are.
        inside, across: this rank's shard group and column, for the backend's own collectives.

    Raises:
        ValueError: ``"shared_memory"`` is asked for and the ranks of a shard group cannot share memory.
    """
    world = dist.group.WORLD
    assert world is not None, "a mesh has a process group"
    plain = ProcessGroupTransport(world)
    own = next(ranks for ranks in groups if plain.rank in ranks)
    column = [ranks[own.index(plain.rank)] for ranks in groups]
    signals = _where_possible(kind, plain, lambda: _share_in_groups(plain, groups)) if len(own) > 1 else None
    all_ranks = _guarded(plain, signals)
    row = all_ranks.part(own, inside)
    shards: Transport = SharedMemoryTransport(row, signals) if signals is not None else row
    shards = Alone() if len(own) == 1 else shards
    return Replicated(shards, ReplicaGroup(all_ranks.part(column, across)), all_ranks, groups[0])


def _guarded(inner: ProcessGroupTransport, signals: Signals | None) -> ProcessGroupTransport:
    """``inner``'s group with a guard over its messages. Collective; without gloo there are no messages.

    ``signals``: by which this rank waits for some of the others besides.
    """
    if not inner.has_gloo:
        return inner
    abort = signals.abort if signals is not None else lambda: None
    return ProcessGroupTransport(inner.group, Reports(inner.group, abort))


Shared = TypeVar("Shared")


def _where_possible(kind: str, inner: ProcessGroupTransport, share: Callable[[], Shared]) -> Shared | None:
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


def _open_shared_memory(inner: ProcessGroupTransport) -> SharedMemoryTransport:
    """Let the ranks of ``inner`` share memory with those of their host. Collective; all succeed or all raise.

    Raises:
        ValueError: they cannot, with the reason, on every rank.
    """
    hosts = _hosts(inner)
    own = next(ranks for ranks in hosts if inner.rank in ranks)
    signals = _connect(inner, own)
    if len(hosts) == 1:
        return SharedMemoryTransport(inner, signals)
    return HostsTransport(_guarded(inner, signals), signals, hosts)


def _share_in_groups(plain: ProcessGroupTransport, groups: Sequence[Sequence[int]]) -> Signals:
    hosts = _host_numbers(plain)
    for ranks in groups:
        if len({hosts[rank] for rank in ranks}) > 1:
            raise ValueError(f"the shard group of ranks {', '.join(map(str, ranks))} is on several hosts")
    return _connect(plain, next(ranks for ranks in groups if plain.rank in ranks))


def _connect(inner: ProcessGroupTransport, own: Sequence[int]) -> Signals:
    """Connect the ranks ``own``, this one among them, of one host. Collective over ``inner``.

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
    return signals


def _hosts(inner: ProcessGroupTransport) -> list[list[int]]:
    """The ranks of every host, in the order of their first ranks; the same answer on all ranks.

    Raises:
        ValueError: not every rank can share memory with as many others.
    """
    hosts: dict[int, list[int]] = {}
    for rank, key in enumerate(_host_numbers(inner)):
        hosts.setdefault(key, []).append(rank)
    sizes = [len(ranks) for ranks in hosts.values()]
    if max(sizes) == 1:
        raise ValueError("every rank is on a host of its own")
    if min(sizes) != max(sizes):
        raise ValueError(f"the hosts have different numbers of ranks: {', '.join(map(str, sizes))}")
    return list(hosts.values())


def _host_numbers(inner: ProcessGroupTransport) -> list[int]:
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

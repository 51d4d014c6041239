"""The suite that every transport must pass: ours do, one over TCP does, and what is broken is found."""

import re
import socket
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardtrain import comm
from shardtrain.comm.arithmetic import merge
from shardtrain.comm.guard import Guard, Paths
from shardtrain.comm.transport import Pending, Transport, Vector
from shardtrain.transport_check import check_transport, run_checks

from pool import each_rank


class Sockets(Transport):
    """A transport over TCP connections of this host, which nothing else in the package knows."""

    def __init__(self, rank: int, world: int, folder: Path) -> None:
        self.rank = rank
        self.world = world
        self.links: dict[int, socket.socket] = {}
        server = socket.create_server(("127.0.0.1", 0))
        (folder / f".{rank}").write_text(str(server.getsockname()[1]))
        (folder / f".{rank}").rename(folder / str(rank))
        for peer in range(rank):
            while not (folder / str(peer)).exists():
                time.sleep(0.01)
            link = socket.create_connection(("127.0.0.1", int((folder / str(peer)).read_text())))
            link.sendall(struct.pack("i", rank))
            self.links[peer] = link
        for _ in range(rank + 1, world):
            link, _ = server.accept()
            self.links[struct.unpack("i", link.recv(4))[0]] = link
        server.close()

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        """Send ``outgoing[r]`` to rank r, and fill ``incoming[r]``; threads send."""
        senders = []
        for peer, link in self.links.items():
            data = outgoing[peer].contiguous().view(torch.uint8).numpy().tobytes()
            senders.append(threading.Thread(target=link.sendall, args=(data,)))
            senders[-1].start()
        for peer, link in self.links.items():
            target = incoming[peer]
            data = bytearray()
            while len(data) < target.nbytes:
                data += link.recv(target.nbytes - len(data))
            if data:
                target.copy_(torch.frombuffer(data, dtype=target.dtype))
        for sender in senders:
            sender.join()

    def all_gather(self, flats: Sequence[Vector]) -> Pending[None]:
        for full, local, layout, *_ in flats:
            parts = [full[layout.interval(rank)] for rank in range(self.world)]
            parts[self.rank].copy_(local)
            self.exchange([local] * self.world, parts)
        return Pending.done(None)

    def reduce_scatter(self, gradients: Sequence[Vector]) -> Pending[list[torch.Tensor]]:
        means = []
        for gradient in gradients:
            parts = [torch.empty_like(gradient.local) for _ in range(self.world)]
            self.exchange(gradient.parts, parts)
            parts[self.rank] = gradient.local
            means.append(self.mean_of(parts, gradient))
        return Pending.done(means)

    def mean_of(self, parts: Sequence[torch.Tensor], gradient: Vector) -> torch.Tensor:
        mean = gradient.new_mean()
        merge(parts, mean, dist.ReduceOp.AVG, gradient.terms)
        return mean

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        own = tensor.reshape(-1)
        parts = [torch.empty_like(own) for _ in range(self.world)]
        self.exchange([own] * self.world, parts)
        parts[self.rank] = own
        stacked = torch.stack(parts)
        tensor.copy_((stacked.sum(0) if op == "sum" else getattr(stacked, f"a{op}")(0)).view_as(tensor))

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> None:
        flat = tensor.contiguous().view(-1)
        nothing = flat[:0]
        incoming = [flat if rank == src else nothing for rank in range(self.world)]
        self.exchange([flat if self.rank == src else nothing] * self.world, incoming)
        tensor.copy_(flat.view_as(tensor))


def messages(rank: int, world: int, folder: Path) -> Transport:
    return comm.open_transport("process_group").transport


def shared_memory(rank: int, world: int, folder: Path) -> Transport:
    return comm.open_transport("shared_memory").transport


@pytest.mark.parametrize("make", [pytest.param(messages, marks=pytest.mark.long), shared_memory, Sockets])
@each_rank(2, 3, transport="auto")
def test_transports_pass(make: Any, tmp_path: Path) -> None:
    run_checks(make(comm.rank(), comm.world_size(), tmp_path))


class SumsInRankOrder(Sockets):
    def mean_of(self, parts: Sequence[torch.Tensor], gradient: Vector) -> torch.Tensor:
        total = sum(part.float() for part in parts)
        return (total / self.world).to(gradient.dtype)


class ForgetsOthers(Sockets):
    def all_gather(self, flats: Sequence[Vector]) -> Pending[None]:
        for full, local, layout, *_ in flats:
            full[layout.interval(self.rank)].copy_(local)
        return Pending.done(None)


class Unguarded(Sockets):
    def open_guard(self) -> Any:
        return Guard(Paths(self.rank, ()))


BROKEN = {
    SumsInRankOrder: "reduction of torch.float32",
    ForgetsOthers: "gather of torch.float32",
    Unguarded: "ranks gather other units, and nothing says so",
}


@pytest.mark.parametrize("kind", BROKEN)
@each_rank(4, transport="auto")
def test_what_is_broken_is_named(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=re.escape(BROKEN[kind])):
        run_checks(kind(comm.rank(), comm.world_size(), tmp_path))


class MadeIn:
    """A maker of transports of ``kind`` that meet by files in ``folder``."""

    def __init__(self, kind: Any, folder: Path) -> None:
        self.kind = kind
        self.folder = folder

    def __call__(self, rank: int, world: int) -> Transport:
        return self.kind(rank, world, self.folder)


class Silent(Sockets):
    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> None:
        threading.Event().wait()


@pytest.mark.long
def test_ranks_in_processes_of_their_own(tmp_path: Path) -> None:
    for kind in (Sockets, ForgetsOthers):
        (tmp_path / kind.__name__).mkdir()
    check_transport(MadeIn(Sockets, tmp_path / "Sockets"), 2)
    with pytest.raises(AssertionError, match="gather of torch"):
        check_transport(MadeIn(ForgetsOthers, tmp_path / "ForgetsOthers"), 2)


@pytest.mark.long
def test_a_transport_that_hangs_ends_at_the_time_out(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"^ranks \[0, 1\] do not answer"):
        check_transport(MadeIn(Silent, tmp_path), 2, timedelta(seconds=5))

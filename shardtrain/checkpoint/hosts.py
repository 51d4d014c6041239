"""Copy files of checkpoints between hosts whose directories are apart.

On disk all ranks see one directory. In memory (`memory.py`) the ranks of one host do. Then each rank's file
is also copied to a rank of the next host, so that the others have all files when a host is lost. Two hosts of
two ranks, and what their directories hold::

    host 0   ranks 0, 1   files of 0, 1, and copies of 2, 3
    host 1   ranks 2, 3   files of 2, 3, and copies of 0, 1
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch

from shardtrain import comm
from shardtrain.checkpoint.files import Record
from shardtrain.checkpoint.manifest import file_name

CHUNK_BYTES = 16 << 20  # that a rank sends at once
CPU = torch.device("cpu")


class Move(NamedTuple):
    """Describe a copy of ``file``, of so many ``bytes``, from rank ``source``'s directory to ``target``'s."""

    file: str
    bytes: int
    source: int
    target: int


class Hosts(NamedTuple):
    """Say which ranks see one directory: ``ranks`` lists those of each. ``rank``: this one.

    ``device``: of tensors that the process group can send.
    """

    ranks: Sequence[Sequence[int]]
    rank: int
    device: torch.device = CPU

    @property
    def own(self) -> Sequence[int]:
        """The ranks that see this rank's directory."""
        return next(ranks for ranks in self.ranks if self.rank in ranks)

    @property
    def leads(self) -> bool:
        """Whether this rank makes and removes directories for those that see them."""
        return self.rank == self.own[0]

    def copies(self, files: Mapping[str, Record]) -> list[Move]:
        """Return the moves of every rank's file to the next of several hosts."""
        moves = []
        for ranks, others in zip(self.ranks, [*self.ranks[1:], self.ranks[0]], strict=True):
            for number, rank in enumerate(ranks):
                name = file_name(rank)
                moves.append(Move(name, files[name].bytes, rank, others[number % len(others)]))
        return moves

    def missing(self, held: Sequence[set[str]], files: Mapping[str, Record]) -> list[Move]:
        """Return the moves after which each host has all ``files``. ``held``: those that each has now."""
        moves = []
        for have, ranks in zip(held, self.ranks, strict=True):
            for number, name in enumerate(sorted(files.keys() - have)):
                holders = next(ranks for ranks, has in zip(self.ranks, held, strict=True) if name in has)
                source = holders[number % len(holders)]
                target = ranks[number % len(ranks)]
                moves.append(Move(name, files[name].bytes, source, target))
        return moves

    def send(self, directory: Path, moves: Sequence[Move]) -> str:
        """Make ``moves`` between the hosts' ``directory``. Collective: ``moves`` are the same on all ranks.

        Returns what went wrong on this rank, or an empty text. Then its copies are incomplete.
        """
        problems = []
        for wave in _waves(moves):
            with contextlib.ExitStack() as opened:
                files: dict[str, FileIO] = {}
                try:
                    for move in wave:
                        if self.rank in (move.source, move.target):
                            mode = "r" if self.rank == move.source else "w"
                            files[mode] = opened.enter_context(FileIO(directory / move.file, mode))
                except OSError as error:
                    problems.append(f"{move.file}: {error.strerror}")
                for start in range(0, max(move.bytes for move in wave), CHUNK_BYTES):
                    problems += self._send_chunk(wave, start, files)
        return "; ".join(dict.fromkeys(problems))

    def _send_chunk(self, wave: Sequence[Move], start: int, files: Mapping[str, FileIO]) -> Iterator[str]:
        """Move the bytes from ``start`` on of each file, at most a chunk; yield problems.

        A rank with a problem goes on in step with the others, since it takes part in a collective.
        """
        world = sum(map(len, self.ranks))
        sent = [0] * world
        received = [0] * world
        data = bytearray()
        for move in wave:
            size = max(0, min(CHUNK_BYTES, move.bytes - start))
            if self.rank == move.source:
                data = bytearray(size)
                sent[move.target] = size
                if "r" in files and files["r"].readinto(data) != size:
                    yield f"{move.file}: it has less than {move.bytes} bytes"
            if self.rank == move.target:
                received[move.source] = size
        read = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        outgoing = read.to(self.device)
        incoming = torch.empty(sum(received), dtype=torch.uint8, device=self.device)
        comm.all_to_all_single(incoming, outgoing, received, sent)
        block = incoming.cpu().numpy().data
        try:
            while "w" in files and block:  # memory that is nearly full takes only a part
                block = block[files["w"].write(block) :]
        except OSError as error:
            yield f"a copy: {error.strerror}"


def _waves(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """Yield all moves in groups, in each of which a rank sends at most one file and receives at most one."""
    left = list(moves)
    while left:
        wave: list[Move] = []
        for move in left:
            if all(move.source != other.source and move.target != other.target for other in wave):
                wave.append(move)
        yield wave
        left = [move for move in left if move not in wave]

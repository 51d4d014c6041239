"""Copy files of checkpoints between hosts whose directories are apart.

On disk all ranks see one directory. In memory (`memory.py`) the ranks of one host do. Then each rank's file
is also copied to a rank of the next host, so that the others have all files when a host is lost. Two hosts of
two ranks, and what their directories hold::

    host 0   ranks 0, 1   files of 0, 1, and copies of 2, 3
    host 1   ranks 2, 3   files of 2, 3, and copies of 0, 1
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from shardtrain import collectives
from shardtrain.checkpoint.files import Record
from shardtrain.checkpoint.manifest import file_name
from shardtrain.comm.channel import Ranks

ARRIVING = ".arriving-"  # begins the name of a file that is incomplete


class Move(NamedTuple):
    """Describe a copy of ``file``, of so many ``bytes``, from rank ``source``'s directory to ``target``'s."""

    file: str
    bytes: int
    source: int
    target: int


class Hosts(NamedTuple):
    """Say which ranks see one directory: ``ranks`` lists those of each. ``rank``: this one.

    ``group``: all ranks, of a backend that sends CPU tensors; None: the default group.
    """

    ranks: Sequence[Sequence[int]]
    rank: int
    group: collectives.Group | None = None

    @classmethod
    def one(cls, all_ranks: Ranks) -> Hosts:
        """Return the hosts of ranks that all see one directory."""
        return cls([range(all_ranks.world)], all_ranks.rank)

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

    def missing(self, present: Sequence[set[str]], files: Mapping[str, Record]) -> list[Move]:
        """Return the moves after which each host has all ``files``. ``present``: those that each has now."""
        moves = []
        for own, ranks in zip(present, self.ranks, strict=True):
            for number, name in enumerate(sorted(files.keys() - own)):
                index = next(index for index, names in enumerate(present) if name in names)
                holders = self.ranks[index]
                source = holders[number % len(holders)]
                target = ranks[number % len(ranks)]
                moves.append(Move(name, files[name].bytes, source, target))
        return moves

    def send(self, directory: Path, moves: Sequence[Move]) -> str:
        """Make ``moves`` between the hosts' ``directory``: one message per file, from memory to memory.

        Collective: ``moves`` are the same on all ranks. Returns what went wrong on this rank, or an empty
        text. A copy that a kill interrupts has no file's name; one that fails is found when it is verified.
        """
        problems: list[str] = []
        for together in _by_pair(moves):
            outgoing = [torch.empty(0, dtype=torch.uint8)] * sum(map(len, self.ranks))
            incoming = [*outgoing]
            arriving = []
            for move in together:
                if self.rank == move.source:
                    outgoing[move.target] = _attempt(partial(_map_old, directory / move.file), move, problems)
                if self.rank == move.target:
                    path = directory / f"{ARRIVING}{move.file}"
                    incoming[move.source] = _attempt(partial(_map_new, path), move, problems)
                    arriving.append(path)
            collectives.all_to_all(incoming, outgoing, group=self.group)
            for path in arriving:
                with contextlib.suppress(OSError):  # the file stays missing, which a load reports
                    path.replace(directory / path.name.removeprefix(ARRIVING))
        return "; ".join(problems)


def _attempt(mapping: Callable[[int], torch.Tensor], move: Move, problems: list[str]) -> torch.Tensor:
    """Return the mapped file of ``move``, or zeros if it cannot be mapped: the other rank waits for them."""
    try:
        return mapping(move.bytes)
    except OSError as error:
        problems.append(f"{move.file}: {error.strerror}")
        return torch.zeros(move.bytes, dtype=torch.uint8)


def _map_old(path: Path, size: int) -> torch.Tensor:
    if path.stat().st_size != size:
        raise OSError(errno.EIO, f"its size is not {size} bytes")
    return torch.from_file(str(path), size=size, dtype=torch.uint8)


def _map_new(path: Path, size: int) -> torch.Tensor:
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)  # without room, writing to the map would end the process
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def _by_pair(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """Yield all moves in groups, in each of which a rank sends at most one file to each other rank."""
    left = list(moves)
    while left:
        firsts: dict[tuple[int, int], Move] = {}
        for move in left:
            firsts.setdefault((move.source, move.target), move)
        yield [*firsts.values()]
        left = [move for move in left if move not in firsts.values()]

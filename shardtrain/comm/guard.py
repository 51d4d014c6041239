"""Which path every rank takes through the model, compared movement by movement.

All ranks make the same movements in the same order, so the k-th movement of one is the k-th of all. A rank
whose k-th movement differs has taken another path, and every rank says so, with names, before anything that
was moved is used::

    rank 0    0 entering the model    1 gathering the root    2 gathering layer1
    rank 1    0 entering the model    1 gathering the root    2 gathering layer1
    rank 2    0 entering the model    1 gathering the root    2 gathering layer2     <- strays at 2

How ranks tell one another is not decided here: ``signals.py`` announces every movement over Unix sockets,
``reports.py`` tells gloo's ranks where the others are when one has waited too long. Where neither is
possible, ``digests.py`` compares sums of the movements now and then.
"""

from __future__ import annotations

import struct
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardtrain.comm import native
from shardtrain.comm.movement import ENTER, MOVEMENTS, Movement
from shardtrain.comm.transport import Tag

MESSAGE = struct.Struct("<iiqqq64s")  # kind, number, step, value, position, name
GRACE_S = 2.0  # a rank on another path is known: so long for the remaining ranks to say where they are


class PeerLost(RuntimeError):
    """Another rank has ended, or has been silent for too long."""


class Diverged(RuntimeError):
    """Another rank takes another path through the model."""


class Entry(NamedTuple):
    """One movement of one rank in its `Log`; ``value`` is whatever the other ranks need to know about it."""

    kind: int
    number: int
    step: int
    value: int
    name: bytes

    @classmethod
    def of(cls, kind: Movement, number: int, step: int, value: int, name: str) -> Entry:
        text = name.encode()
        return cls(kind.number, number % (1 << 31), step, value, text if len(text) <= 64 else text[-64:])

    @property
    def words(self) -> str:
        """``gathering layer1``"""
        return f"{MOVEMENTS[self.kind].doing} {self.name.decode(errors='replace').rstrip(chr(0))}"

    def packed(self, position: int) -> bytes:
        return MESSAGE.pack(self.kind, self.number, self.step, self.value, position, self.name)


class Log:
    """The movements of one rank, from the first that is still of interest on."""

    def __init__(self) -> None:
        self._movements: deque[Entry] = deque()
        self.first = 0  # position of _movements[0]

    @property
    def end(self) -> int:
        """The position of the next movement."""
        return self.first + len(self._movements)

    def append(self, movement: Entry) -> None:
        self._movements.append(movement)

    def at(self, position: int) -> Entry | None:
        index = position - self.first
        return self._movements[index] if 0 <= index < len(self._movements) else None

    def forget_before(self, position: int) -> None:
        while self.first < position and self._movements:
            self._movements.popleft()
            self.first += 1


class Paths:
    """This rank's movements beside those that the others have told of."""

    def __init__(self, rank: int, others: Iterable[int]) -> None:
        self.rank = rank
        self.step = 0  # forwards begun
        self.own = Log()
        self.theirs = {other: Log() for other in others}

    @property
    def timeout_s(self) -> float:
        """Start-up is given time: ranks read data and build models at speeds of their own."""
        return 120.0 if self.step > 1 else 600.0

    def make(self, kind: Movement, number: int, name: str, value: int = 0) -> tuple[int, bytes]:
        """Note this rank's next movement; its position, and the message that tells the others of it."""
        movement = Entry.of(kind, number, self.step, value, name)
        position = self.own.end
        self.own.append(movement)
        return position, movement.packed(position)

    def difference(self) -> int | None:
        """The first position known at which another rank made another movement than this one."""
        found = []
        for log in self.theirs.values():
            for position in range(max(log.first, self.own.first), min(log.end, self.own.end)):
                theirs, ours = log.at(position), self.own.at(position)
                if theirs and ours and _mark(theirs) != _mark(ours):
                    found.append(position)
                    break
        return min(found, default=None)

    def forget_before(self, position: int) -> None:
        """Forget movements before ``position``, as far as every rank has made them."""
        position = min([position, self.own.end, *(log.end for log in self.theirs.values())])
        for log in (self.own, *self.theirs.values()):
            log.forget_before(position)

    def diverged(self, position: int) -> Diverged:
        """Who makes which movement at ``position``; the odd ones out by name, if most ranks agree."""
        logs = sorted({self.rank: self.own, **self.theirs}.items())
        made = {rank: movement for rank, log in logs if (movement := log.at(position))}
        camps = _camps({rank: _mark(movement) for rank, movement in made.items()})
        shown = [made[ranks[0]] for ranks in camps]
        alike = len({movement.words for movement in shown}) < len(shown)
        told = [
            f"{these(ranks)} {'is' if len(ranks) == 1 else 'are'} {_told(movement, alike)}"
            for ranks, movement in zip(camps, shown, strict=True)
        ]
        head = odd_ones_out({rank: _mark(movement) for rank, movement in made.items()})
        step = min(movement.step for movement in shown)
        return Diverged(f"step {step}: {head}: {', '.join(told)}")

    def lost(self, ranks: Sequence[int], position: int) -> PeerLost:
        """``ranks`` have ended while this one was at ``position``."""
        have = "has" if len(ranks) == 1 else "have"
        return PeerLost(f"{these(ranks)} {have} ended: rank {self.rank} was at {self.where(position)}")

    def silent(self, ranks: Sequence[int], position: int) -> PeerLost:
        """``ranks`` did not come to ``position`` in time."""
        return PeerLost(
            f"rank {self.rank} waited {self.timeout_s:.0f} s for {these(ranks)} at {self.where(position)}"
        )

    def where(self, position: int) -> str:
        """``step 3, gathering layer1``"""
        movement = self.own.at(position)
        return f"step {self.step}, {movement.words if movement else 'an earlier movement'}"


def odd_ones_out(marks: Mapping[int, object]) -> str:
    """Of ranks whose marks are not all equal: ``rank 2 takes another path than ranks 0 and 1``."""
    usual, *others = sorted(_camps(marks), key=len, reverse=True)
    odd = sorted(rank for camp in others for rank in camp)
    if len(usual) == len(others[0]):
        return f"{these(sorted(odd + usual))} take different paths"
    return f"{these(odd)} {'takes' if len(odd) == 1 else 'take'} another path than {these(usual)}"


def _camps(marks: Mapping[int, object]) -> list[list[int]]:
    """The ranks of each mark, in the order of their first ranks."""
    camps: dict[object, list[int]] = {}
    for rank, mark in sorted(marks.items(), key=lambda item: item[0]):
        camps.setdefault(mark, []).append(rank)
    return list(camps.values())


def _mark(movement: Entry) -> tuple[int, int, int]:
    """What must be the same on every rank."""
    return movement.kind, movement.number, movement.step


def _told(movement: Entry, precisely: bool) -> str:
    return (
        f"{movement.words} (number {movement.number}, step {movement.step})" if precisely else movement.words
    )


def these(ranks: Sequence[int]) -> str:
    """``rank 2``, ``ranks 0 and 1``, ``ranks 0, 1 and 3``"""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


# The guard where messages cannot be told apart by tags: on NCCL, and on every backend but gloo.
#
# Each rank keeps a sum over the movements it has made, and the ranks compare their sums in one small
# all-gather: when a forward or a backward of steps 1 and 2 ends, and then of every 100th step. Ranks on
# different paths are told there, if the backend has not stopped at unequal sizes before; between two checks,
# units of equal size that were swapped go unnoticed.

_BASE, _PRIME = 1_000_003, (1 << 61) - 1  # of a polynomial in the movements, which fits 64 bits
EVERY = 100  # steps from one check to the next, once two steps are over


class Digests:
    """A sum over this rank's movements, compared with the others' now and then."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._moves_bytes = native.moves_bytes(group)
        self._step = 0
        self._since = 1  # the first step that has not been checked to its end
        self._digest = 0
        self._made = 0  # movements since the last check

    def add(self, kind: Movement, tag: Tag) -> None:
        self._digest = (self._digest * _BASE + tag.number * len(MOVEMENTS) + kind.number) % _PRIME
        self._made += 1

    def fence(self, what: Movement) -> None:
        """A forward begins (``ENTER``), or a forward or backward is over (``LEAVE``): perhaps check.

        Raises:
            Diverged: the ranks have not made the same movements.
        """
        if what is ENTER:
            self._step += 1
            if not self._made:
                self._since = self._step
        elif self._made and self._moves_bytes and (self._step <= 2 or self._step % EVERY == 0):
            self._check()
            self._digest, self._made = 0, 0
            self._since = self._step

    def _check(self) -> None:
        group = self._group()
        assert group is not None, "a movement has a process group"
        mine = torch.tensor([self._digest, self._made], device=native.device_types(group)[0])
        table = mine.new_empty(2 * group.size())
        native.all_gather(table, mine, group)
        rows = [tuple(row) for row in table.view(-1, 2).tolist()]
        if len(set(rows)) > 1:
            steps = (
                f"step {self._step}" if self._since == self._step else f"steps {self._since} to {self._step}"
            )
            made = [f"rank {rank} made {count}" for rank, (_, count) in enumerate(rows)]
            raise Diverged(
                f"{steps}: {odd_ones_out(dict(enumerate(rows)))}: not the same gathers and reductions in the "
                f"same order ({', '.join(made)})"
            )

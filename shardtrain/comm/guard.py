"""Check that all ranks make the same collectives in the same order.

The k-th collective of one rank is the k-th of every rank. Where one rank's differs, every rank raises
`Diverged`, with names, before it uses what it received::

    rank 0    0 entering the model    1 gathering the root    2 gathering layer1
    rank 1    0 entering the model    1 gathering the root    2 gathering layer1
    rank 2    0 entering the model    1 gathering the root    2 gathering layer2     <- differs at 2

This file compares; how ranks learn of one another's collectives depends on the medium. Ranks of one host
announce every collective over Unix sockets (``signals.py``). Over gloo, a rank that has waited too long
reports its latest collectives (``reports.py``). On NCCL and other backends, whose collectives carry no tag,
`Digests` compares a hash of all collectives now and then.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardtrain.comm import native
from shardtrain.comm.movement import ENTER, MOVEMENTS, Movement
from shardtrain.comm.transport import Tag

MESSAGE = struct.Struct("<qiiqq64s")  # position, then an `Entry`
GRACE_S = 2.0  # once ranks are known to differ: the time that the others have to say where they are


class PeerLost(RuntimeError):
    """Another rank has ended, or has been silent for too long."""


class Diverged(RuntimeError):
    """Another rank takes another path through the model."""


class Entry(NamedTuple):
    """One collective of one rank. ``kind``, ``number`` and ``step`` must be the same on every rank.

    ``kind``: the number of a `Movement`. ``value``: whatever the other ranks need to know about it.
    """

    kind: int
    number: int
    step: int
    value: int
    name: bytes

    @property
    def text(self) -> str:
        """``gathering layer1``"""
        return f"{MOVEMENTS[self.kind].doing} {self.name.decode(errors='replace').rstrip(chr(0))}"

    def packed(self, position: int) -> bytes:
        return MESSAGE.pack(position, *self)


def unpack(data: bytes) -> Iterator[tuple[int, Entry]]:
    """Yield the position and the entry of each message in ``data``."""
    for position, *fields in MESSAGE.iter_unpack(data):
        yield position, Entry(*fields)


class Paths:
    """The latest collectives of this rank, and of the others as far as they are known, by position."""

    def __init__(self, rank: int, others: Iterable[int]) -> None:
        self.rank = rank
        self.step = 0  # forwards begun
        self.end = 0  # position of this rank's next collective
        self.own: dict[int, Entry] = {}
        self.theirs: dict[int, dict[int, Entry]] = {other: {} for other in others}

    @property
    def timeout_s(self) -> float:
        """Longer at start-up: each rank needs a time of its own to read data and to build the model."""
        return 120.0 if self.step > 1 else 600.0

    def add(self, kind: Movement, number: int, name: str, value: int = 0) -> tuple[int, bytes]:
        """Add this rank's next collective. Return its position and the message that announces it."""
        position, self.end = self.end, self.end + 1
        entry = Entry(kind.number, number % (1 << 31), self.step, value, name.encode()[-64:])
        self.own[position] = entry
        return position, entry.packed(position)

    def difference(self) -> int | None:
        """Return the first position at which another rank is known to differ from this one."""
        positions = [
            position
            for log in self.theirs.values()
            for position in log.keys() & self.own.keys()
            if log[position][:3] != self.own[position][:3]
        ]
        return min(positions, default=None)

    def forget_before(self, position: int) -> None:
        """Forget the collectives before ``position`` that every rank has made."""
        logs = [self.own, *self.theirs.values()]
        for made in [each for each in self.own if each < position]:
            if any(made not in log for log in logs):
                return
            for log in logs:
                del log[made]

    def diverged(self, position: int) -> Diverged:
        """Return the error that says which rank makes which collective at ``position``."""
        logs = sorted({self.rank: self.own, **self.theirs}.items())
        made = {rank: log[position] for rank, log in logs if position in log}
        keys = {rank: entry[:3] for rank, entry in made.items()}
        groups = _equal_ranks(keys)
        shown = [made[ranks[0]] for ranks in groups]
        ambiguous = len({entry.text for entry in shown}) < len(shown)
        texts = []
        for ranks, entry in zip(groups, shown, strict=True):
            number = f" (number {entry.number}, step {entry.step})" if ambiguous else ""
            texts.append(f"{named(ranks)} {'is' if len(ranks) == 1 else 'are'} {entry.text}{number}")
        step = min(entry.step for entry in shown)
        return Diverged(f"step {step}: {odd_ones_out(keys)}: {', '.join(texts)}")

    def lost(self, ranks: Sequence[int], position: int) -> PeerLost:
        """Return the error for ``ranks`` that ended while this one was at ``position``."""
        have = "has" if len(ranks) == 1 else "have"
        return PeerLost(f"{named(ranks)} {have} ended: rank {self.rank} was at {self.where(position)}")

    def silent(self, ranks: Sequence[int], position: int) -> PeerLost:
        """Return the error for ``ranks`` that did not come to ``position`` in time."""
        return PeerLost(
            f"rank {self.rank} waited {self.timeout_s:.0f} s for {named(ranks)} at {self.where(position)}"
        )

    def where(self, position: int) -> str:
        """``step 3, gathering layer1``"""
        entry = self.own.get(position)
        return f"step {self.step}, {entry.text if entry else 'an earlier collective'}"


def odd_ones_out(keys: Mapping[int, object]) -> str:
    """Describe ranks whose keys are not all equal: ``rank 2 takes another path than ranks 0 and 1``."""
    most, *others = sorted(_equal_ranks(keys), key=len, reverse=True)
    odd = sorted(rank for ranks in others for rank in ranks)
    if len(most) == len(others[0]):
        return f"{named(sorted(odd + most))} take different paths"
    return f"{named(odd)} {'takes' if len(odd) == 1 else 'take'} another path than {named(most)}"


def _equal_ranks(keys: Mapping[int, object]) -> list[list[int]]:
    """Group the ranks by their keys, in the order of the groups' first ranks."""
    groups: dict[object, list[int]] = {}
    for rank in sorted(keys):
        groups.setdefault(keys[rank], []).append(rank)
    return list(groups.values())


def named(ranks: Sequence[int]) -> str:
    """``rank 2``, ``ranks 0 and 1``, ``ranks 0, 1 and 3``"""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


_BASE, _PRIME = 1_000_003, (1 << 61) - 1  # of the polynomial hash, which fits 64 bits
EVERY = 100  # steps from one check to the next, after the first two steps


class Digests:
    """The guard where collectives carry no tag: a hash of this rank's collectives, compared now and then.

    Ranks compare in one small all-gather, when a forward or a backward of steps 1 and 2 ends, and then of
    every 100th step. A difference is found there, unless the backend stops at unequal sizes before. Between
    two checks, units of equal size that one rank swaps go unnoticed.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._moves_bytes = native.moves_bytes(group)
        self._step = 0
        self._first = 1  # the first step that has not been checked to its end
        self._digest = 0
        self._made = 0  # collectives since the last check

    def add(self, kind: Movement, tag: Tag) -> None:
        self._digest = (self._digest * _BASE + tag.number * len(MOVEMENTS) + kind.number) % _PRIME
        self._made += 1

    def fence(self, what: Movement) -> None:
        """Count the steps that begin (``ENTER``); check at the end of a forward or backward (``LEAVE``).

        Raises:
            Diverged: the ranks have not made the same collectives.
        """
        if what is ENTER:
            self._step += 1
            if not self._made:
                self._first = self._step
        elif self._made and self._moves_bytes and (self._step <= 2 or self._step % EVERY == 0):
            self._check()
            self._digest, self._made = 0, 0
            self._first = self._step

    def _check(self) -> None:
        group = native.living(self._group)
        mine = torch.tensor([self._digest, self._made], device=native.device_types(group)[0])
        table = mine.new_empty(2 * group.size())
        native.all_gather(table, mine, group)
        rows = [tuple(row) for row in table.view(-1, 2).tolist()]
        if len(set(rows)) > 1:
            last = self._step
            steps = f"step {last}" if self._first == last else f"steps {self._first} to {last}"
            made = [f"rank {rank} made {count}" for rank, (_, count) in enumerate(rows)]
            raise Diverged(
                f"{steps}: {odd_ones_out(dict(enumerate(rows)))}: not the same gathers and reductions in the "
                f"same order ({', '.join(made)})"
            )

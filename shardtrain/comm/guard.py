"""Check that all ranks make the same collectives in the same order.

The k-th collective of one rank is the k-th of every rank. Where one rank's differs, every rank raises
`Diverged`, with names, before it uses what it received::

    rank 0    0 entering the model    1 gathering the root    2 gathering layer1
    rank 1    0 entering the model    1 gathering the root    2 gathering layer1
    rank 2    0 entering the model    1 gathering the root    2 gathering layer2     <- differs at 2

This file compares collectives. How ranks learn of one another's depends on the backend. Over gloo and shared
memory, a rank that has waited too long reports its latest collectives (``reports.py``). Over NCCL and other
backends, whose collectives carry no tag, `Digests` compares a hash of all collectives from time to time.
"""

from __future__ import annotations

import itertools
import struct
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardtrain.comm import native
from shardtrain.comm.trace import ENTER, MOVEMENTS, STEP, Movement
from shardtrain.comm.transport import Tag

MESSAGE = struct.Struct("<qiiq64s")  # position, then an `Entry`

_STEP_HINT = (
    ". Ranks must step alike: torch.amp.GradScaler lets each rank decide by itself, use shardtrain.GradScaler"
)

# Why a rank is lost, and how the error says so of one rank and of several.
ENDED, SILENT, ELSEWHERE = range(3)
_STATES = (
    ("has ended", "have ended"),
    ("does not answer", "do not answer"),
    ("waits elsewhere", "wait elsewhere"),
)


class PeerLost(RuntimeError):
    """Tell that another rank has ended, or has been silent for too long."""


class Diverged(RuntimeError):
    """Tell that ranks take different paths through the model."""


class Entry(NamedTuple):
    """Describe one collective of one rank. ``kind``, ``number`` and ``step`` must be equal on all ranks.

    ``kind``: `Movement.number`.
    """

    kind: int
    number: int
    step: int
    name: bytes

    @property
    def text(self) -> str:
        """What the rank is doing, such as ``gathering layer1``."""
        return f"{MOVEMENTS[self.kind].doing} {self.name.decode(errors='replace').rstrip(chr(0))}"


class Paths:
    """Hold the latest collectives of this rank, and those known of the others, by position.

    ``time_out_s``: a function that returns the current time-out in seconds. ``step``: forwards begun.
    ``end``: the position of this rank's next collective. ``difference``: the first position at which ranks
    are known to differ.
    """

    def __init__(self, rank: int, others: Iterable[int], time_out_s: Callable[[], float]) -> None:
        self.rank, self.time_out_s = rank, time_out_s
        self.step = 0
        self.end = 0
        self.own: dict[int, Entry] = {}
        self.theirs: dict[int, dict[int, Entry]] = {other: {} for other in others}
        self.difference: int | None = None

    def add(self, kind: Movement, number: int, name: str) -> int:
        """Add this rank's next collective. Return its position."""
        position, self.end = self.end, self.end + 1
        entry = Entry(kind.number, number % (1 << 31), self.step, name.encode()[-64:])
        self.own[position] = entry
        for log in self.theirs.values():
            if position in log:
                self._compare(position, entry, log[position])
        return position

    def hear(self, rank: int, messages: bytes) -> None:
        """Replace the collectives of another rank by those of its ``messages``."""
        self.theirs[rank] = log = {at: Entry(*fields) for at, *fields in MESSAGE.iter_unpack(messages)}
        for position in log.keys() & self.own.keys():
            self._compare(position, self.own[position], log[position])

    def compare_others(self) -> None:
        """Compare the other ranks with one another, since they may differ at a later position."""
        for one, other in itertools.combinations(self.theirs.values(), 2):
            for position in one.keys() & other.keys():
                self._compare(position, one[position], other[position])

    def _compare(self, position: int, one: Entry, other: Entry) -> None:
        if one[:3] != other[:3] and (self.difference is None or position < self.difference):
            self.difference = position

    def diverged(self, position: int) -> Diverged:
        """Return the error that names each rank's collective at ``position``."""
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
        hint = _STEP_HINT if any(entry.kind == STEP.number for entry in shown) else ""
        return Diverged(f"step {step}: {odd_ones_out(keys)}: {', '.join(texts)}{hint}")

    def lost(
        self, ranks: Sequence[int], position: int, state: int = ENDED, waited_s: float | None = None
    ) -> PeerLost:
        """Return the error for lost ``ranks``, while this rank was, or has waited, at ``position``."""
        verb = _STATES[state][len(ranks) > 1]
        was = "was" if waited_s is None else f"has waited {waited_s:.0f} s"
        return PeerLost(f"{named(ranks)} {verb}: rank {self.rank} {was} at {self.where(position)}")

    def where(self, position: int) -> str:
        """Return a text such as ``step 3, gathering layer1``. Outside of a model there are no steps."""
        entry, step = self.own.get(position), f"step {self.step}" if self.step else "a point between steps"
        return f"{step}, {entry.text if entry else 'an earlier collective'}"


def odd_ones_out(keys: Mapping[int, object]) -> str:
    """Return which ranks' keys differ, such as ``rank 2 takes another path than ranks 0 and 1``."""
    most, *others = sorted(_equal_ranks(keys), key=len, reverse=True)
    odd = sorted(rank for ranks in others for rank in ranks)
    if len(most) == len(others[0]):
        return f"{named(sorted(odd + most))} take different paths"
    return f"{named(odd)} {'takes' if len(odd) == 1 else 'take'} another path than {named(most)}"


def _equal_ranks(keys: Mapping[int, object]) -> list[list[int]]:
    """Return the ranks grouped by equal keys, in the order of the groups' first ranks."""
    groups: dict[object, list[int]] = {}
    for rank in sorted(keys):
        groups.setdefault(keys[rank], []).append(rank)
    return list(groups.values())


def named(ranks: Sequence[int]) -> str:
    """Return a text such as ``rank 2``, ``ranks 0 and 1`` or ``ranks 0, 1 and 3``."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


EVERY = 100  # steps from one check to the next, after the first two steps


class Digests:
    """Guard collectives that carry no tag, by comparing a hash of each rank's collectives.

    Ranks compare in one small all-gather when a forward or a backward ends, in steps 1, 2 and every 100th. A
    difference is found there, unless the backend already fails at unequal sizes. If one rank swaps two units
    of equal size between two checks, nothing notices.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._moves_bytes = native.moves_bytes(group)
        self._step = 0
        self._first = 1  # the first step that has not been checked to its end
        self._digest = 0
        self._made = 0  # collectives since the last check

    def add(self, kind: Movement, tag: Tag) -> None:
        self._digest = hash((self._digest, kind.number, tag.number))  # integers hash alike on all ranks
        self._made += 1

    def fence(self, what: Movement) -> None:
        """Count steps at ``ENTER``; compare at ``LEAVE``, the end of a forward or backward.

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
        rows = {rank: tuple(row) for rank, row in enumerate(table.view(-1, 2).tolist())}
        if len({*rows.values()}) > 1:
            last, made = self._step, [f"rank {rank} made {count}" for rank, (_, count) in rows.items()]
            steps = f"step {last}" if self._first == last else f"steps {self._first} to {last}"
            what = f"not the same gathers and reductions in the same order ({', '.join(made)})"
            raise Diverged(f"{steps}: {odd_ones_out(rows)}: {what}")

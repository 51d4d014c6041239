"""The guard, which checks that all ranks make the same collectives in the same order.

The k-th collective of one rank is the k-th of every rank. Where one rank's differs, every rank raises
`Diverged`, with names, before it uses what it received::

    rank 0    0 entering the model    1 gathering the root    2 gathering layer1
    rank 1    0 entering the model    1 gathering the root    2 gathering layer1
    rank 2    0 entering the model    1 gathering the root    2 gathering layer2     <- differs at 2

Every collective enters the path of its rank before it moves. How ranks compare depends on the transport:

gloo, shared memory    a rank that has waited too long reports its latest collectives (``reports.py``)
NCCL and others        whose collectives carry no tag: from time to time (`Paths.compare_hashes`)
a user's transport     before each collective (`Handshake`)
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import NamedTuple

import torch

from shardtrain.comm import hints
from shardtrain.comm.trace import GRAPH, MOVEMENTS, NOTES, Movement
from shardtrain.errors import Diverged as Diverged
from shardtrain.errors import PeerLost as PeerLost

MESSAGE = struct.Struct("<qiqq64s")  # position, then an `Entry`
KEPT = 256  # collectives in a report: more than a rank can be ahead of another, see `signals.py`
EVERY = 100  # forwards from one comparison of hashes to the next, after the first two
_NOTHING = nullcontext()


class Entry(NamedTuple):
    """One collective of one rank. ``kind``, ``number`` and ``forward`` must be equal on all ranks."""

    kind: int  # `Movement.number`
    number: int  # a hash of the whole name
    forward: int
    name: str  # the end of it

    def pack(self, position: int) -> bytes:
        return MESSAGE.pack(position, *self[:3], self.name.encode()[-64:])

    @property
    def text(self) -> str:
        """What the rank is doing, such as ``gathering layer1``."""
        return f"{MOVEMENTS[self.kind].doing} {self.name}"


class Paths:
    """The latest collectives of this rank, and those known of the others, by position."""

    def __init__(self, rank: int, others: Iterable[int]) -> None:
        self.rank = rank
        self.forward = 0  # the number of the latest, for errors; those of evaluations and micro-batches count
        self.end = 0  # the position of this rank's next collective
        self.digest = 0  # of all its collectives
        self.own: dict[int, Entry] = {}
        self.theirs: dict[int, dict[int, Entry]] = {other: {} for other in others}
        self.difference: int | None = None  # the first position at which ranks are known to differ
        self.untagged = False  # whether some collectives have no tag
        self.captures = False  # whether steps may be captured and replayed
        self.recording = False  # whether one is captured now: nothing runs, and nothing can be compared
        self._compared = 0  # the position up to which hashes are known to be equal
        self._compared_forward = 0  # and the forward

    def add(self, kind: Movement, name: str) -> int:
        """Add this rank's next collective. Return its position."""
        position = self.end
        self.end = self.end + 1
        number = zlib.crc32(name.encode())
        self.digest = hash((self.digest, kind.number, number))  # integers hash alike on all ranks
        self.own[position] = Entry(kind.number, number, self.forward, name[-64:])
        self.own.pop(position - KEPT, None)
        if any(self.theirs.values()):  # only after a rank has waited for long
            self._compare([position])
        return position

    @property
    def latest(self) -> Entry:
        """This rank's latest collective."""
        return self.own[self.end - 1]

    def hear(self, rank: int, messages: bytes) -> None:
        """Replace the known collectives of ``rank`` by those that its ``messages`` report."""
        log = {
            position: Entry(kind, number, forward, name.decode(errors="replace").rstrip("\0"))
            for position, kind, number, forward, name in MESSAGE.iter_unpack(messages)
        }
        self.theirs[rank] = log
        self._compare(log)

    def _compare(self, positions: Iterable[int]) -> None:
        """Compare all ranks at ``positions``, which this rank may not have reached yet."""
        for position in positions:
            entries = [log[position] for log in (self.own, *self.theirs.values()) if position in log]
            is_first = self.difference is None or position < self.difference
            if is_first and len({entry[:3] for entry in entries}) > 1:
                self.difference = position

    def hint_of_fewer(self, position: int) -> str:
        """Return what to do if ranks make fewer collectives than this one, which waits at ``position``."""
        entry = self.own.get(position)
        return hints.UNITS if entry is not None and MOVEMENTS[entry.kind] in hints.OF_FORWARDS else ""

    def diverged(self, position: int) -> Diverged:
        """Return the error that names each rank's collective at ``position``."""
        logs = sorted({self.rank: self.own, **self.theirs}.items())
        entries = {rank: log[position] for rank, log in logs if position in log}
        keys = {rank: entry[:3] for rank, entry in entries.items()}
        groups = _equal_ranks(keys)
        shown = [entries[ranks[0]] for ranks in groups]
        ambiguous = len({entry.text for entry in shown}) < len(shown)
        texts = []
        for ranks, entry in zip(groups, shown, strict=True):
            number = f" (number {entry.number}, forward {entry.forward})" if ambiguous else ""
            texts.append(f"{named(ranks)} {'is' if len(ranks) == 1 else 'are'} {entry.text}{number}")
        forward = min(entry.forward for entry in shown)
        hint = hints.hint({MOVEMENTS[entry.kind] for entry in shown})
        moment = f"forward {forward}" if forward else "outside of forwards"
        return Diverged(f"{moment}: {odd_ones_out(keys)}: {', '.join(texts)}{hint}")

    def to_compare(self) -> tuple[int, int, int] | None:
        """Return digest, number and latest kind of collectives, if ranks compare now; see `compare_hashes`.

        They do not if all collectives carry tags, if there were none, or in most forwards from the third one
        on. A rank that swaps two units of equal size is noticed at the next comparison only.
        """
        count = self.end - self._compared
        is_due = self.forward <= 2 or self.forward % EVERY == 0
        # A replay counts several forwards at once, and may leave the number out.
        is_due |= self.captures and self.forward // EVERY > self._compared_forward // EVERY
        is_due &= not self.recording
        return (self.digest, count, self.latest.kind) if self.untagged and count and is_due else None

    def compare_hashes(self, hashes: Mapping[int, tuple[int, int, int]]) -> None:
        """Raise `Diverged` unless all ranks have the same hash. ``hashes``: by rank, from `to_compare`."""
        last = self.forward
        kinds = {rank: MOVEMENTS[kind] for rank, (_, _, kind) in hashes.items()}
        if GRAPH in kinds.values() and len({*kinds.values()}) > 1:
            doing = [f"{named([rank])} is {kind.doing} a step" for rank, kind in kinds.items()]
            raise Diverged(f"forward {last}: {odd_ones_out(kinds)}: {', '.join(doing)}{hints.CAPTURE}")
        if len({*hashes.values()}) > 1:
            counts = [f"rank {rank} made {number}" for rank, (_, number, _) in hashes.items()]
            first = self._compared_forward + 1
            forwards = f"forwards {first} to {last}" if first < last else f"forward {last}"
            difference = f"not the same gathers and reductions in the same order ({', '.join(counts)})"
            raise Diverged(f"{forwards}: {odd_ones_out(hashes)}: {difference}")
        self._compared = self.end
        self._compared_forward = last

    def where(self, position: int) -> str:
        """Return a text such as ``forward 3, gathering layer1``."""
        entry = self.own.get(position)
        forward = f"forward {self.forward}" if self.forward else "a point outside of forwards"
        return f"{forward}, {entry.text if entry else 'an earlier collective'}"


class Guard:
    """The entries of this rank's collectives in its path, and a watch over its waits. This one only notes."""

    def __init__(self, paths: Paths) -> None:
        self.paths = paths

    def post(self, kind: Movement, name: str) -> int:
        """Post this rank's next collective. Return its position. Raises `Diverged` if ranks are to differ."""
        return self.paths.add(kind, name)

    def waiting(self, position: int) -> AbstractContextManager[None]:
        """Watch the block, in which this rank waits for others at ``position``."""
        return _NOTHING

    def fail(self, position: int, error: RuntimeError) -> None:
        """Raise the cause of ``error``, with the ranks to blame, if this guard knows it."""


class Handshake(Guard):
    """A guard over a transport that has none: paths are compared before each collective, by one all-reduce.

    So no rank sends or reads what others do not expect. Notes are compared with the collective that follows.
    ``all_reduce``: the transport's.
    """

    def __init__(self, rank: int, world: int, all_reduce: Callable[[torch.Tensor, str], None]) -> None:
        super().__init__(Paths(rank, [other for other in range(world) if other != rank]))
        self._world = world
        self._all_reduce = all_reduce

    def post(self, kind: Movement, name: str) -> int:
        position = super().post(kind, name)
        if kind not in NOTES:
            digest = self.paths.digest // 2  # its negative is an int64, too
            extremes = torch.tensor([digest, -digest], device="cpu")
            self._all_reduce(extremes, "max")
            if extremes[0] != -extremes[1]:
                raise self._diverged(position)
        return position

    def _diverged(self, position: int) -> Diverged:
        """Exchange all ranks' paths, and return the error that names the first difference. Collective."""
        path = b"".join(entry.pack(number) for number, entry in self.paths.own.items())
        table = torch.zeros(self._world, KEPT * MESSAGE.size, dtype=torch.uint8, device="cpu")
        table[self.paths.rank, : len(path)] = torch.frombuffer(bytearray(path), dtype=torch.uint8)
        sizes = torch.zeros(self._world, dtype=torch.int64, device="cpu")
        sizes[self.paths.rank] = len(path)
        self._all_reduce(sizes, "max")
        self._all_reduce(table, "max")
        for rank in self.paths.theirs:
            self.paths.hear(rank, table[rank, : int(sizes[rank])].numpy().tobytes())
        first = self.paths.difference
        return self.paths.diverged(position if first is None else first)


def odd_ones_out(keys: Mapping[int, object]) -> str:
    """Return which ranks' keys differ, such as ``rank 2 takes another path than ranks 0 and 1``."""
    most, *others = sorted(_equal_ranks(keys), key=len, reverse=True)
    outliers = sorted(chain.from_iterable(others))
    if len(most) == len(others[0]):
        return f"{named(sorted(outliers + most))} take different paths"
    return f"{named(outliers)} {'takes' if len(outliers) == 1 else 'take'} another path than {named(most)}"


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

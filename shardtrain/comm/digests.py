"""The guard where messages cannot be told apart by tags: on NCCL, and on every backend but gloo.

Each rank keeps a sum over the movements it has made, and the ranks compare their sums in one small
all-gather: when a forward or a backward of steps 1 and 2 ends, and then of every 100th step. Ranks on
different paths are told there, if the backend has not stopped at unequal sizes before; between two checks,
units of equal size that were swapped go unnoticed.
"""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from shardtrain.comm import native
from shardtrain.comm.guard import KINDS, Diverged, odd_ones_out
from shardtrain.comm.transport import Tag

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

    def add(self, kind: str, tag: Tag) -> None:
        self._digest = (self._digest * _BASE + tag.number * len(KINDS) + KINDS.index(kind)) % _PRIME
        self._made += 1

    def fence(self, what: str) -> None:
        """A forward begins (``entering``), or a forward or backward is over (``leaving``): perhaps check.

        Raises:
            Diverged: the ranks have not made the same movements.
        """
        if what == "entering":
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

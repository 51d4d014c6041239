"""Compute several virtual ranks on one rank, so that the number of ranks changes no bit of a run.

A step of V virtual ranks computes V micro-batches. On N ranks, N a divisor of V and both powers of two, rank
r computes those of the virtual ranks r V/N, ..., (r+1) V/N - 1, one after the other. All that could tell one
N from another is a function of the virtual rank:

gradients           summed in one binary tree over V (``gradient.py`` on a rank, ``comm/arithmetic.py``
                    between ranks), in fp32 or wider, and divided by V once
norms               sums over V intervals (``comm/norms.py``), since cuts for N ranks are some of those for V
random numbers      drawn from a seed, the step and the virtual rank
running statistics  each virtual rank starts from the same, and the step's result is the mean over all V

This needs one thread count, one type of processor and one version of torch: kernels sum in other orders on
others.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from shardtrain import device as devices
from shardtrain import torch_private
from shardtrain.comm.arithmetic import merge
from shardtrain.comm.channel import Ranks

OUTSIDE = (
    "backward() outside of virtual_rank(), but each rank computes several virtual ranks: run each of "
    "introspect(model).virtual_ranks inside shardtrain.virtual_rank(model, number)"
)


class Virtual:
    """Keep what virtual ranks change in a step.

    ``count``: V. ``ranks``: the virtual ranks of this rank. ``following``: the one to run next. ``again``:
    the one that a replay computes now, which changes nothing here (see ``replay.py``).
    """

    def __init__(self, module: nn.Module, all_ranks: Ranks, count: int) -> None:
        self.count = count
        self._module = module
        self._all_ranks = all_ranks
        share = count // all_ranks.world
        self.ranks = range(all_ranks.rank * share, (all_ranks.rank + 1) * share)
        self.following = self.ranks.start
        self.again: int | None = None
        self._before: list[tuple[Tensor, Tensor, int]] = []  # buffers, with value and version before the step
        self._statistics: set[int] = set()  # indices of those that BatchNorm changes, without a new version
        self._after: list[dict[int, Tensor]] = []  # what each virtual rank that has run has changed

    def begin(self, number: int) -> None:
        """Begin ``number``'s micro-batch. Raises ValueError unless it is the one that follows."""
        expected = self.following if self.again is None else self.again
        if number != expected:
            raise ValueError(
                f"virtual_rank({number}): expected {expected}; rank {self._all_ranks.rank} computes "
                f"{', '.join(map(str, self.ranks))} in this order"
            )
        if self.again is not None:
            return
        if number == self.ranks.start:
            self._begin_step()
            return
        for index in self._after[-1]:
            buffer, value, _ = self._before[index]
            buffer.copy_(value)

    def _begin_step(self) -> None:
        norms = [m for m in self._module.modules() if isinstance(m, torch_private.NormBase) and m.training]
        statistics = {buffer for norm in norms for buffer in norm._buffers.values()}
        buffers = dict.fromkeys(b for b in self._module.buffers() if not (b.is_meta or b.is_complex()))
        again = len(self.ranks) > 1  # another virtual rank starts from the same values
        self._before = [(each, each.detach().clone() if again else each, each._version) for each in buffers]
        self._statistics = {index for index, buffer in enumerate(buffers) if buffer in statistics}
        self._after = []

    def place(self, number: int) -> tuple[int, bool]:
        """Return the number of this micro-batch among this rank's, and whether it is the last of them."""
        if self.again is not None:
            return 0, False
        return number - self.ranks.start, number + 1 == self.ranks.stop

    def end(self, failed: bool) -> None:
        """End the micro-batch. After this rank's last one, average statistics over all virtual ranks."""
        if self.again is not None:
            return
        self.following = self.ranks.start if failed else self.following + 1
        if failed:
            return
        changed = {i for i, (buffer, _, version) in enumerate(self._before) if buffer._version != version}
        changed |= self._statistics
        self._after.append({index: self._before[index][0].detach().clone() for index in changed})
        if self.following == self.ranks.stop:
            self.following = self.ranks.start
            self._average()

    def _changed(self) -> list[int]:
        """Return the buffers that any virtual rank has changed. Collective where not all are statistics."""
        own = sorted(set().union(*self._after))
        if len(self._statistics) == len(self._before) or self._all_ranks.silent:
            return own
        flags = torch.zeros(len(self._before), dtype=torch.int32, device=self._before[0][0].device)
        flags[own] = 1
        self._all_ranks.all_reduce(flags, "max")
        return [index for index, changed in enumerate(flags.tolist()) if changed]

    def _average(self) -> None:
        """Give each changed buffer its mean over virtual ranks, or the first one's value if it is an integer.

        One all-reduce of a table in fp64 with a row per virtual rank, of which other ranks' are zeros here.
        """
        indices = self._changed()
        if not indices:
            return
        rows = [
            torch.cat([after.get(i, self._before[i][1]).flatten().double() for i in indices])
            for after in self._after
        ]
        table = rows[0].new_zeros(self.count, len(rows[0]))
        table[self.ranks.start : self.ranks.stop] = torch.stack(rows)
        self._all_ranks.all_reduce(table)
        mean = torch.empty_like(table[0])
        merge([*table], mean, ReduceOp.AVG)
        buffers = [self._before[index][0] for index in indices]
        sizes = [buffer.numel() for buffer in buffers]
        for buffer, average, first in zip(buffers, mean.split(sizes), table[0].split(sizes), strict=True):
            buffer.copy_((average if buffer.is_floating_point() else first).view(buffer.shape))


def seed_random_numbers(where: torch.device, *key: int) -> None:
    """Seed random numbers, those of the device ``where`` included, by ``key`` alone."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=7).digest()
    devices.seed(where, int.from_bytes(digest, "little"))

"""How far the ranks' clocks are apart.

Each rank notes when it enters and when it leaves a small all-reduce. Nobody leaves before everybody has
entered, which bounds the difference to rank 0's clock from both sides, whatever the network. Rank 0 enters at
100.000 and leaves at 100.003, rank 1 by its own clock enters at 7.001 and leaves at 7.002::

    rank 1 leaves after rank 0 enters    7.002 + d >= 100.000    d >= 92.998
    rank 1 enters before rank 0 leaves   7.001 + d <= 100.003    d <= 93.002

Several rounds leave the narrowest of these. Ranks of one host share a clock: where no difference is possible,
there is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from shardtrain import comm

ROUNDS = 10


def offsets(clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Seconds to add to every rank's ``clock`` to have rank 0's. Collective."""
    device = comm.control_device()
    met = torch.zeros(comm.world_size(), ROUNDS, 2, dtype=torch.float64, device=device)
    for number in range(ROUNDS):
        entered = clock()
        comm.all_reduce(torch.zeros(1, device=device)).item()
        met[comm.rank(), number] = torch.tensor([entered, clock()], dtype=torch.float64)
    entered_at, left_at = comm.all_reduce(met).cpu().unbind(2)  # each [ranks, rounds]
    least = (entered_at[0] - left_at).amax(1)
    most = (left_at[0] - entered_at).amin(1)
    middle = (least + most) / 2
    return torch.where((least <= 0) & (most >= 0), 0.0, middle).tolist()

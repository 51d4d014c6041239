"""One rank of each host hands tensors to the others there.

A host of ranks 4 and 5: rank 4 has the pieces [a, b]; a stays with it, b goes to rank 5. The pieces are CPU
tensors in any case, and move over gloo, on a group that nothing else uses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

HEADER = 8  # int64: the number of dimensions, then the dimensions


class HostScatter:
    """Between the ranks of this host; ``members[0]`` has what the others get. Creating it is collective."""

    def __init__(self, keys: Sequence[str]) -> None:
        """keys: one for each rank, equal for ranks of one host."""
        hosts = [[rank for rank, key in enumerate(keys) if key == host] for host in dict.fromkeys(keys)]
        groups = [dist.new_group(ranks, backend="gloo") for ranks in hosts]
        self.rank = dist.get_rank()
        self.members, group = next(pair for pair in zip(hosts, groups, strict=True) if self.rank in pair[0])
        assert isinstance(group, dist.ProcessGroup)  # for members; others are given a number
        self._group = group

    @property
    def hands_out(self) -> bool:
        return self.rank == self.members[0]

    def __call__(self, pieces: Sequence[Tensor] | None, dtype: torch.dtype) -> Tensor:
        """This rank's of ``pieces``, which have one shape and are given where ``hands_out``."""
        header = torch.zeros(HEADER, dtype=torch.int64)
        if pieces is not None:
            shape = pieces[0].shape
            header[: len(shape) + 1] = torch.tensor([len(shape), *shape])
        header = self._scatter(header, None if pieces is None else [header.clone() for _ in pieces])
        count, *sizes = header.tolist()
        return self._scatter(torch.empty(sizes[:count], dtype=dtype), pieces)

    def _scatter(self, mine: Tensor, pieces: Sequence[Tensor] | None) -> Tensor:
        contiguous = None if pieces is None else [piece.contiguous() for piece in pieces]
        dist.scatter(mine, contiguous, src=self.members[0], group=self._group)
        return mine

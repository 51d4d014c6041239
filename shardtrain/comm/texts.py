"""Texts between ranks, as bytes in small collectives and never as pickles; and tensors within a host."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain.comm.transport import Ranks


def _encoded(text: str) -> Tensor:
    """Return ``text`` as uint8, 1-D, on the CPU."""
    data = bytearray(text.encode())
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _decoded(data: Tensor) -> str:
    return data.cpu().numpy().tobytes().decode()


def broadcast_text(text: str, ranks: Ranks, device: torch.device, src: int = 0) -> str:
    """Return rank ``src``'s ``text`` on every rank; an empty one where ``src`` is only simulated."""
    data = _encoded(text).to(device)
    length = torch.tensor([data.numel() if ranks.rank == src else 0], device=device)
    ranks.broadcast(length, src)
    if ranks.rank != src:
        data = data.new_empty(int(length.item()))
    if data.numel():
        ranks.broadcast(data, src)
    return _decoded(data)


def gather_texts(text: str, ranks: Ranks, device: torch.device) -> list[str]:
    """Return every rank's ``text``, in rank order, on every rank, by two all-reduces."""
    data = _encoded(text)
    lengths = torch.zeros(ranks.world, dtype=torch.int64)
    lengths[ranks.rank] = data.numel()
    lengths = lengths.to(device)
    ranks.all_reduce(lengths)
    sizes = lengths.tolist()
    joined = torch.zeros(sum(sizes), dtype=torch.uint8)
    joined.split(sizes)[ranks.rank].copy_(data)
    joined = joined.to(device)
    if joined.numel():
        ranks.all_reduce(joined)
    return [_decoded(part) for part in joined.split(sizes)]


def require_same(lines: Sequence[str], what: str, ranks: Ranks, device: torch.device) -> None:
    """Return if all ranks have the same ``lines``. Collective: two all-reduces of one number.

    Raises:
        ValueError: they differ; on every rank, with the first line in which each differs from rank 0.
    """
    digest = zlib.crc32("\n".join(lines).encode())
    low, high = (torch.tensor([digest], device=device) for _ in range(2))
    ranks.all_reduce(low, "min")
    ranks.all_reduce(high, "max")
    if low.item() == high.item():
        return
    first, *others = (text.split("\n") for text in gather_texts("\n".join(lines), ranks, device))
    odd = []
    for rank, text in enumerate(others, 1):
        pairs = zip_longest(text, first, fillvalue="no more")
        theirs, wanted = next(((a, b) for a, b in pairs if a != b), ("", ""))
        odd += [f"rank {rank} has {theirs} where rank 0 has {wanted}"] if theirs != wanted else []
    raise ValueError(f"{what} differs between ranks: {'; '.join(odd)}")


_HEADER = 8  # int64: the number of dimensions, then the dimensions


class HostScatter:
    """Hands tensors from the first rank of this host, ``members[0]``, to the others. Creation is collective.

    A host of ranks 4 and 5: rank 4 has the pieces [a, b]; a stays with it, b goes to rank 5. The pieces are
    CPU tensors in any case, and move over gloo, on a group that nothing else uses.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        """``keys``: one for each rank, equal for ranks of one host."""
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
        """Return this rank's of ``pieces``, which have one shape and are given where ``hands_out``."""
        header = torch.zeros(_HEADER, dtype=torch.int64)
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

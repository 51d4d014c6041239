"""Texts between ranks, as bytes in small collectives and never as pickles."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import zip_longest

import torch
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

"""Texts exchanged between ranks, as bytes in small collectives, never as pickles; ranks that agree."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import zip_longest

import torch

from shardtrain.comm.channel import Ranks


def gather_texts(text: str, ranks: Ranks) -> list[str]:
    """Return every rank's ``text``, in rank order, on every rank. Collective: two all-reduces."""
    data = text.encode()
    lengths = torch.zeros(ranks.world, dtype=torch.int64, device="cpu")
    lengths[ranks.rank] = len(data)
    ranks.all_reduce(lengths)
    sizes = lengths.tolist()
    joined = torch.zeros(sum(sizes), dtype=torch.uint8, device="cpu")
    joined.split(sizes)[ranks.rank].copy_(torch.frombuffer(bytearray(data + b"\0"), dtype=torch.uint8)[:-1])
    if joined.numel():
        ranks.all_reduce(joined)
    return [part.numpy().tobytes().decode() for part in joined.split(sizes)]


def require_same(lines: Sequence[str], subject: str, ranks: Ranks) -> None:
    """Check that all ranks have the same ``lines``. Collective: two all-reduces of one number.

    Raises:
        ValueError: on every rank, with the first line in which each rank differs from rank 0.
    """
    digest = zlib.crc32("\n".join(lines).encode())
    low, high = (torch.tensor([digest], device="cpu") for _ in range(2))
    ranks.all_reduce(low, "min")
    ranks.all_reduce(high, "max")
    if low.item() == high.item():  # fake tensors know their value if it is one number
        return
    first, *others = (text.split("\n") for text in gather_texts("\n".join(lines), ranks))
    differences = []
    for rank, text in enumerate(others, 1):
        pairs = zip_longest(text, first, fillvalue="no more")
        if differing := [pair for pair in pairs if pair[0] != pair[1]]:
            line, wanted = differing[0]
            differences.append(f"rank {rank} has {line} where rank 0 has {wanted}")
    raise ValueError(f"{subject} differs between ranks: {'; '.join(differences)}")

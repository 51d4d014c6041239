"""Who reads images from storage: every rank its own, or one rank of each host for all of them.

`data.read=each` needs nothing else and spreads the work of decoding; what it costs is that every rank opens
files. Where storage is slow to open files or is one machine's for all (NFS), `one_per_host` asks it for as
many streams as there are hosts. Then one rank's workers decode for the whole host, so give it that many more
(`data.workers`), and each batch is copied once more, inside the host. The batches are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from shardtrain.comm import HostScatter
from shardtrain.data.sampler import generator

Loaded = tuple[Tensor, Tensor]  # images, labels


class Lists(Sized, Iterable[Any], Protocol):
    """What to load, batch by batch."""


class InTurn:
    """The first list of each rank, then the second of each, …; every rank has as many."""

    def __init__(self, of_ranks: Sequence[Lists]) -> None:
        self.of_ranks = of_ranks

    def __len__(self) -> int:
        return sum(map(len, self.of_ranks))

    def __iter__(self) -> Iterator[Any]:
        for turn in zip(*self.of_ranks, strict=True):
            yield from turn


class Shared:
    """`count` batches of this rank, which one rank of the host reads; `reading` is where it is that one."""

    def __init__(self, reading: Iterable[Loaded] | None, count: int, scatter: HostScatter) -> None:
        self.reading, self.count, self.scatter = reading, count, scatter

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Loaded]:
        batches = None if self.reading is None else iter(self.reading)
        for _ in range(self.count):
            images = labels = None
            if batches is not None:
                images, labels = zip(*(next(batches) for _ in self.scatter.members), strict=True)
            yield self.scatter(images, torch.uint8), self.scatter(labels, torch.int64)


def reader(
    batches: Any,
    lists: Sequence[Lists],
    scatter: HostScatter | None,
    *,
    rank: int,
    workers: int,
    device: torch.device,
    seed: int,
) -> Iterable[Loaded]:
    """What `lists[rank]` asks `batches` for; `lists` has an entry for every rank."""
    if scatter is None:
        return _loader(batches, lists[rank], workers, device, generator("workers", seed, rank))
    reading = None
    if scatter.hands_out:
        turns = InTurn([lists[member] for member in scatter.members])
        reading = _loader(batches, turns, workers, device, generator("workers", seed, rank))
    return Shared(reading, len(lists[rank]), scatter)


def _loader(
    batches: Any, lists: Lists, workers: int, device: torch.device, random: torch.Generator
) -> DataLoader[Any]:
    """Whole index lists are the loader's samples, so that a data set sees a batch at once."""
    return DataLoader(
        batches,
        sampler=lists,
        batch_size=None,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        generator=random,
    )

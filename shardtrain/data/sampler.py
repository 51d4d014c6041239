"""Which images a rank has in a step: pure functions of the seed and the step.

Nothing here keeps state, so a run can continue exactly where it stopped, on any number of ranks. A global
batch of 12 on 2 ranks with 2 micro-batches is divided, in the order of the epoch's permutation, into

    rank 0: [0 1 2] [3 4 5]      rank 1: [6 7 8] [9 10 11]

With two versions of each image (`data.repeats=2`) an epoch's first twelve are six images. Copies are half a
batch apart, so that they are on different ranks if there are at least two:

    rank 0: [0 1 2] [3 4 5]      rank 1: [0 1 2] [3 4 5]
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Share(NamedTuple):
    """The division of a global batch, and the part of it that is this rank's."""

    batch_size: int  # images, over all ranks and micro-batches
    accumulate: int  # micro-batches per step
    rank: int
    world_size: int
    virtual: int = 0  # virtual ranks, equally many on each rank; 0 without

    @property
    def per_rank(self) -> int:
        return self.batch_size // self.world_size

    @property
    def micro_batch(self) -> int:
        return self.per_rank // self.accumulate

    def of(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of a tensor with one row per image of the global batch."""
        return whole[self.rank * self.per_rank : (self.rank + 1) * self.per_rank]


def generator(*key: int | str) -> torch.Generator:
    """Return a random number generator seeded by ``key`` alone."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


@functools.lru_cache(maxsize=2)  # the loader may be an epoch ahead
def epoch_order(seed: int, epoch: int, images: int, repeats: int = 1) -> Tensor:
    """Return a permutation, or of its beginning each index `repeats` times in a row: int64 [images]."""
    order = torch.randperm(images, generator=generator("order", seed, epoch))
    return order.repeat_interleave(repeats)[:images]


def copies_apart(batch: Tensor, repeats: int) -> Tensor:
    """Reorder a batch so that adjacent copies are as far apart as possible: aabbcc becomes abcabc."""
    return torch.cat([batch[first::repeats] for first in range(repeats)])


class Request(NamedTuple):
    """A micro-batch to be loaded."""

    position: int  # the number of its first image, counted over all ranks from the run's start
    indices: list[int]


class TrainSampler:
    """The requests for this rank's micro-batches, step by step.

    Images after an epoch's last full batch are dropped; every epoch drops other images.
    """

    def __init__(self, images: int, share: Share, seed: int, steps: range, repeats: int = 1) -> None:
        self.images = images
        self.share = share
        self.seed = seed
        self.repeats = repeats
        self.steps = steps
        self.steps_per_epoch = images // share.batch_size

    def __len__(self) -> int:
        return len(self.steps) * self.share.accumulate

    def __iter__(self) -> Iterator[Request]:
        share = self.share
        for step in self.steps:
            position = step * share.batch_size + share.rank * share.per_rank
            for micro_batch in self.indices(step).split(share.micro_batch):
                yield Request(position, micro_batch.tolist())
                position += share.micro_batch

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def indices(self, step: int) -> Tensor:
        """Return the indices of this rank's images in ``step``: int64 [per_rank]."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        order = epoch_order(self.seed, epoch, self.images, self.repeats)
        whole = order[batch * self.share.batch_size :][: self.share.batch_size]
        return self.share.of(copies_apart(whole, self.repeats))


class EvalSampler:
    """Lists of indices that give every image to exactly one rank: rank r has r, r + N, r + 2N, …

    All ranks yield equally many lists of equal length, since a sharded model needs all ranks in every
    forward. The first `valid[i]` indices of the i-th list count; the others are padding with image 0. With
    virtual ranks, a rank yields the lists of its first one, then those of the next one, and so on.
    """

    def __init__(self, images: int, batch_size: int, share: Share) -> None:
        ranks = share.virtual or share.world_size
        first = share.rank * ranks // share.world_size
        longest = len(range(0, images, ranks))
        size = min(batch_size, longest)
        self.lists: list[list[int]] = []
        for rank in range(first, first + ranks // share.world_size):
            own = range(rank, images, ranks)
            self.lists += [[*own[start : start + size]] for start in range(0, longest, size)]
        self.valid = [len(own) for own in self.lists]
        self.batch_size = size

    def __len__(self) -> int:
        return len(self.lists)

    def __iter__(self) -> Iterator[list[int]]:
        for own in self.lists:
            yield [*own, *[0] * (self.batch_size - len(own))]

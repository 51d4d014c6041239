"""From indices to float32 batches on the device.

Images travel as uint8; resizing, normalisation and augmentation are done on the device, a batch at a time.

`data.read` says who reads images from storage. With `each`, every rank reads its own, which spreads the work
of decoding. Where storage is slow to open files, or is one machine's for all (NFS), `one_per_host` opens as
many streams as there are hosts: one rank's workers decode for all ranks of its host (give it that many more
`data.workers`), and each batch is copied once more, inside the host. The batches are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from shardtrain.comm import HostScatter
from shardtrain.device import is_accelerator
from shardtrain.job.data.batches import Batches, DataSet
from shardtrain.job.data.sampler import EvalSampler, Share, TrainSampler, generator, uniform_draws

Augment = Callable[[Tensor, Tensor], Tensor]

EVAL_BATCH = 256  # images of a rank in one forward of an evaluation, at most


class Batch(NamedTuple):
    images: Tensor  # float32 [batch, channels, side, side], about zero mean and unit variance
    labels: Tensor  # int64 [batch]
    valid: int  # the first `valid` images count; the rest fills up an evaluation's last batch


class Prepare:
    """Turns uint8 batches of any device into normalised float32 batches on ours, square with ``side`` pixels.

    Images that come larger or smaller are resized here, on the device and a batch at a time.
    """

    def __init__(self, data: DataSet, side: int, device: torch.device) -> None:
        self.side, self.device = side, device
        self.mean = torch.tensor(data.mean, device=device)[:, None, None]
        self.std = torch.tensor(data.std, device=device)[:, None, None]

    def __call__(self, images: Tensor, side: int | None = None) -> Tensor:
        """side: pixels of these images' sides, if it is not that of all."""
        side = side or self.side
        pixels = images.to(self.device, non_blocking=True).float()
        normal = (pixels - self.mean) / self.std
        if normal.shape[-1] == side and normal.shape[-2] == side:
            return normal
        return F.interpolate(normal, [side, side], mode="bilinear", antialias=True)


class Request(NamedTuple):
    """A micro-batch to be loaded."""

    position: int  # of its first image in the run, counted over all ranks from the start
    side: int  # pixels
    indices: list[int]


class Requests:
    """The micro-batches that a sampler asks for; ``side`` says how large the images of an epoch are."""

    def __init__(self, sampler: TrainSampler, side: Callable[[int], int]) -> None:
        self.sampler, self.side = sampler, side

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Request]:
        share, steps = self.sampler.share, self.sampler.steps
        for index, indices in enumerate(self.sampler):
            step, micro = divmod(index, share.accumulate)
            before = steps[step] * share.batch_size + share.rank * share.per_rank
            yield Request(before + micro * share.micro_batch, self.side_in(steps[step]), indices)

    def side_in(self, step: int) -> int:
        """Return the pixels per side in ``step``."""
        return self.side(step // self.sampler.steps_per_epoch)


class Seeded:
    """Images whose random crops depend on the seed and on their position in the run alone.

    So it does not matter which rank or worker loads them, nor whether the run was interrupted before.
    """

    def __init__(self, data: Batches, seed: int) -> None:
        self.data, self.seed = data, seed

    def __getitem__(self, request: Request) -> tuple[Tensor, Tensor]:
        data = self.data.at(request.side)
        if not data.random:
            return data[request.indices]
        loaded = []
        with torch.random.fork_rng(devices=[]):
            for position, index in enumerate(request.indices, request.position):
                torch.default_generator.manual_seed(generator("image", self.seed, position).initial_seed())
                loaded.append(data[[index]])
        return torch.cat([images for images, _ in loaded]), torch.cat([labels for _, labels in loaded])


class TrainFeed:
    """This rank's micro-batches of the steps from `first_step` to `last_step`, exclusive.

    `repeats`: see `epoch_order`. `side`: from an epoch to its images' pixels of a side; None: always as
    `prepare` says. `scatter`: how one rank of each host hands out what it reads; None: every rank reads.
    """

    def __init__(
        self,
        data: DataSet,
        share: Share,
        prepare: Prepare,
        *,
        augment: Augment | None,
        seed: int,
        workers: int,
        first_step: int,
        last_step: int,
        repeats: int = 1,
        side: Callable[[int], int] | None = None,
        scatter: HostScatter | None = None,
    ) -> None:
        self.share, self.prepare, self.augment, self.seed = share, prepare, augment, seed
        lists = [
            Requests(
                TrainSampler(
                    len(data.train), share._replace(rank=rank), seed, first_step, last_step, repeats
                ),
                side or (lambda epoch: prepare.side),
            )
            for rank in range(share.world_size)
        ]
        self.requests = lists[share.rank]
        self.sampler = self.requests.sampler
        self.loader = reader(
            Seeded(data.train, seed),
            lists,
            scatter,
            rank=share.rank,
            workers=workers,
            device=prepare.device,
            seed=seed,
        )

    def __iter__(self) -> Iterator[Batch]:
        uniform: tuple[Tensor, ...] = ()
        for index, (images, labels) in enumerate(self.loader):
            done, micro = divmod(index, self.share.accumulate)
            step = self.sampler.steps[done]
            batch = self.prepare(images, self.requests.side_in(step))
            if self.augment is not None:
                if micro == 0:
                    uniform = self._draws(step)
                batch = self.augment(batch, uniform[micro].to(self.prepare.device))
            yield Batch(batch, labels.to(self.prepare.device, non_blocking=True), len(labels))

    def _draws(self, step: int) -> tuple[Tensor, ...]:
        draws = int(getattr(self.augment, "draws", 0))
        return torch.split(uniform_draws(self.seed, step, self.share, draws), self.share.micro_batch)


class EvalFeed:
    """This rank's part of the held-out images; as many batches on every rank."""

    def __init__(
        self,
        data: DataSet,
        share: Share,
        prepare: Prepare,
        *,
        workers: int,
        batch_size: int = EVAL_BATCH,
        scatter: HostScatter | None = None,
    ) -> None:
        self.images, self.prepare = data.val, prepare
        ranks = share.world_size
        lists = [EvalSampler(len(data.val), batch_size, rank, ranks) for rank in range(ranks)]
        self.sampler = lists[share.rank]
        self.loader = reader(
            data.val, lists, scatter, rank=share.rank, workers=workers, device=prepare.device, seed=0
        )

    def __iter__(self) -> Iterator[Batch]:
        for index, (images, labels) in enumerate(self.loader):
            labels = labels.to(self.prepare.device, non_blocking=True)
            yield Batch(self.prepare(images), labels, self.sampler.valid(index))


Loaded = tuple[Tensor, Tensor]  # images, labels


class Lists(Sized, Iterable[Any], Protocol):
    """Requests for batches."""


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
    """``count`` batches of this rank, read by one rank of the host; ``reading``: on that rank, its loader."""

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
    """Return what loads the requests of ``lists[rank]``; ``lists`` has an entry for every rank."""
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
    """Return a loader whose samples are whole index lists, so that a data set sees a batch at once."""
    return DataLoader(
        batches,
        sampler=lists,
        batch_size=None,
        num_workers=workers,
        pin_memory=is_accelerator(device),
        generator=random,
    )

"""From indices to float32 batches on the device.

Images travel as uint8. Resizing, normalisation and augmentation are done on the device, a batch at a time.

`data.read` says who reads images from storage. With `each`, every rank reads its own, which spreads the work
of decoding. Where storage is slow to open files, or is one machine's for all (NFS), `one_per_host` opens as
many streams as there are hosts: one rank's workers decode for all ranks of its host (give it that many more
`data.workers`), and each batch is copied once more, inside the host. The batches are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from shardtrain.comm import HostScatter
from shardtrain.device import is_accelerator
from shardtrain.job.data.batches import Batches, DataSet
from shardtrain.job.data.mixing import Draws, Mix
from shardtrain.job.data.sampler import EvalSampler, Request, Share, TrainSampler, generator, uniform_draws

Augment = Callable[[Tensor, Tensor], Tensor]

EVAL_BATCH = 256  # images per rank in one forward of an evaluation, at most


class Batch(NamedTuple):
    images: Tensor  # float32 [batch, channels, side, side], about zero mean and unit variance
    labels: Tensor  # int64 [batch], or float32 [batch, classes] where images are mixed
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
        """side: pixels per side of this batch, if it is not that of all."""
        side = side or self.side
        pixels = images.to(self.device, non_blocking=True).float()
        normal = (pixels - self.mean) / self.std
        if normal.shape[-2:] == (side, side):
            return normal
        return F.interpolate(normal, [side, side], mode="bilinear", antialias=True)


class Seeded:
    """Images whose random crops and changes depend on the seed and on their position in the run alone.

    So it does not matter which rank or worker loads them, nor whether the run was interrupted before.
    """

    def __init__(self, data: Batches, seed: int, change: Callable[[Tensor], Tensor] | None) -> None:
        """change: uint8 [channels, height, width] to the same, with torch's random numbers."""
        self.data, self.seed, self.change = data, seed, change

    def __getitem__(self, request: Request) -> tuple[Tensor, Tensor]:
        data = self.data.at(request.side)
        if not data.random and self.change is None:
            return data[request.indices]
        images, labels = [], []
        with torch.random.fork_rng(devices=[]):
            for position, index in enumerate(request.indices, request.position):
                torch.default_generator.manual_seed(generator("image", self.seed, position).initial_seed())
                (image,), label = data[[index]]
                images.append(self.change(image) if self.change else image)
                labels.append(label)
        return torch.stack(images), torch.cat(labels)


class TrainFeed:
    """This rank's micro-batches of the steps from `first_step` to `last_step`, exclusive.

    `augment`: called with a batch and uniform random numbers [batch, `augment.draws`]; it may have a method
    `image` as well, which changes one image, in the loader's workers. `side`: from an epoch to its images'
    pixels per side; None: always as `prepare` says. `repeats`: see `epoch_order`. `scatter`: how one rank of
    each host hands out what it reads; None: every rank reads.
    """

    def __init__(
        self,
        data: DataSet,
        share: Share,
        prepare: Prepare,
        *,
        augment: Augment | None = None,
        mix: Mix | None = None,
        seed: int,
        workers: int,
        first_step: int,
        last_step: int,
        repeats: int = 1,
        side: Callable[[int], int] | None = None,
        scatter: HostScatter | None = None,
    ) -> None:
        self.share, self.prepare, self.augment, self.mix, self.seed = share, prepare, augment, mix, seed
        side = side or (lambda epoch: prepare.side)
        samplers = [
            TrainSampler(
                len(data.train), share._replace(rank=rank), seed, first_step, last_step, repeats, side
            )
            for rank in range(share.world_size)
        ]
        self.sampler = samplers[share.rank]
        images = Seeded(data.train, seed, getattr(augment, "image", None))
        self.reader = Reader(images, samplers, scatter, share.rank, workers, prepare.device, seed)

    def __iter__(self) -> Iterator[Batch]:
        share, sampler, device = self.share, self.sampler, self.prepare.device
        uniform, mixing = torch.empty(0), None
        for index, (pixels, labels) in enumerate(self.reader):
            done, micro = divmod(index, share.accumulate)
            step = sampler.steps[done]
            if micro == 0:
                uniform = uniform_draws(self.seed, step, share, int(getattr(self.augment, "draws", 0)))
                mixing = self.mix.draws(step) if self.mix else None
            rows = slice(micro * share.micro_batch, (micro + 1) * share.micro_batch)
            images = self.prepare(pixels, sampler.side(step // sampler.steps_per_epoch))
            labels = labels.to(device, non_blocking=True)
            if self.augment:
                images = self.augment(images, uniform[rows].to(device))
            if self.mix and mixing:
                images, labels = self.mix(images, labels, Draws(*(each[rows] for each in mixing)))
            yield Batch(images, labels, len(labels))


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
        ranks = range(share.world_size)
        samplers = [EvalSampler(len(data.val), batch_size, rank, len(ranks)) for rank in ranks]
        self.sampler = samplers[share.rank]
        self.reader = Reader(data.val, samplers, scatter, share.rank, workers, prepare.device, seed=0)

    def __iter__(self) -> Iterator[Batch]:
        for index, (images, labels) in enumerate(self.reader):
            labels = labels.to(self.prepare.device, non_blocking=True)
            yield Batch(self.prepare(images), labels, self.sampler.valid(index))


class InTurn:
    """The first entry of each list, then the second of each, …; all are of one length."""

    def __init__(self, lists: Sequence[Any]) -> None:
        self.lists = lists

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(zip(*self.lists, strict=True))


class Reader:
    """Loads uint8 images and labels as this rank's sampler asks; ``samplers`` has an entry for every rank.

    The loader's samples are whole index lists, so that a data set sees a batch at once. With ``scatter`` the
    first rank of each host loads for all ranks of the host, and hands out the batches.
    """

    def __init__(
        self,
        batches: Any,
        samplers: Sequence[Any],
        scatter: HostScatter | None,
        rank: int,
        workers: int,
        device: torch.device,
        seed: int,
    ) -> None:
        self.count, self.scatter = len(samplers[rank]), scatter
        self.members = [rank] if scatter is None else scatter.members if scatter.hands_out else []
        self.loader = DataLoader(
            batches,
            sampler=InTurn([samplers[member] for member in self.members]),
            batch_size=None,
            num_workers=workers if self.members else 0,
            pin_memory=is_accelerator(device),
            generator=generator("workers", seed, rank),
        )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        loaded = iter(self.loader)
        if self.scatter is None:
            yield from loaded
            return
        for _ in range(self.count):
            images, labels = (
                zip(*islice(loaded, len(self.members)), strict=True) if self.members else (None,) * 2
            )
            yield self.scatter(images, torch.uint8), self.scatter(labels, torch.int64)

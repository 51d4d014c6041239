"""Load images by index, and make float32 batches on the device.

Images are sent as uint8. They are resized, normalised and augmented on the device, one batch at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from shardtrain.device import is_accelerator
from shardtrain.job.config import Images
from shardtrain.job.data.batches import Batches, DataSet
from shardtrain.job.data.mixing import Draws, Mix
from shardtrain.job.data.sampler import (
    EvalSampler,
    Request,
    Share,
    TrainSampler,
    alternating_draws,
    generator,
    uniform_draws,
)
from shardtrain.job.signals import end_with_parent

Augment = Callable[[Tensor, Tensor], Tensor]

EVAL_BATCH = 256  # images per rank in one forward of an evaluation, at most


class Batch(NamedTuple):
    images: Tensor  # float32 [batch, channels, side, side], about zero mean and unit variance
    labels: Tensor  # int64 [batch], or float32 [batch, classes] where images are mixed
    valid: int  # the first `valid` images count; the others pad an evaluation's last batch


class Prepare:
    """Turn uint8 batches into normalised float32 batches on ``device``, square with ``side`` pixels.

    Images of other sizes are resized here, on the device, one batch at a time.
    """

    def __init__(self, data: DataSet, side: int, device: torch.device) -> None:
        self.side, self.device = side, device
        self.mean = torch.tensor(data.mean, device=device)[:, None, None]
        self.std = torch.tensor(data.std, device=device)[:, None, None]

    def __call__(self, images: Tensor, side: int | None = None) -> Tensor:
        """Return normalised images. ``side``: pixels per side of this batch; None: the usual size."""
        side = side or self.side
        pixels = images.to(self.device, non_blocking=True).float()
        normal = (pixels - self.mean) / self.std
        if normal.shape[-2:] == (side, side):
            return normal
        return F.interpolate(normal, [side, side], mode="bilinear", antialias=True)


class Seeded:
    """Draw random crops and changes of images from the seed and their position in the run alone.

    So they do not depend on which rank or worker loads an image, or on interruptions of the run.
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
    """Yield this rank's micro-batches of the ``steps``.

    `augment`: called with a batch and uniform random numbers [batch, `augment.draws`]. It may have a method
    `image`, which changes one image in the loader's workers, and a list `alternates` of columns whose numbers
    belong to each image and move by 1/2 from epoch to epoch.
    """

    def __init__(
        self,
        data: DataSet,
        share: Share,
        keys: Images,
        device: torch.device,
        *,
        seed: int,
        steps: range,
        augment: Augment | None = None,
        mix: Mix | None = None,
    ) -> None:
        self.share, self.augment, self.mix, self.seed = share, augment, mix, seed
        self.prepare = Prepare(data, keys.image_size, device)
        self.sampler = TrainSampler(len(data.train), share, seed, steps, keys.repeats, keys.side_in)
        images = Seeded(data.train, seed, getattr(augment, "image", None))
        self.loader = _loader(images, self.sampler, share.rank, keys.workers, device, seed)

    def __iter__(self) -> Iterator[Batch]:
        share, sampler, device = self.share, self.sampler, self.prepare.device
        uniform, mixing = torch.empty(0), None
        for index, (pixels, labels) in enumerate(self.loader):
            done, micro = divmod(index, share.accumulate)
            step = sampler.steps[done]
            if micro == 0:
                uniform = uniform_draws(self.seed, step, share, int(getattr(self.augment, "draws", 0)))
                for column in getattr(self.augment, "alternates", ()):
                    each = alternating_draws(self.seed, sampler.epoch(step), sampler.images)
                    uniform[:, column] = each[sampler.indices(step)]
                mixing = self.mix.draws(step) if self.mix else None
            rows = slice(micro * share.micro_batch, (micro + 1) * share.micro_batch)
            images = self.prepare(pixels, sampler.side(sampler.epoch(step)))
            labels = labels.to(device, non_blocking=True)
            if self.augment:
                images = self.augment(images, uniform[rows].to(device))
            if self.mix and mixing:
                images, labels = self.mix(images, labels, Draws(*(each[rows] for each in mixing)))
            yield Batch(images, labels, len(labels))


class EvalFeed:
    """Yield batches of this rank's part of images to evaluate, equally many on every rank."""

    def __init__(
        self,
        images: Batches,
        share: Share,
        prepare: Prepare,
        *,
        workers: int,
        batch_size: int = EVAL_BATCH,
    ) -> None:
        self.images, self.prepare = images, prepare
        self.sampler = EvalSampler(len(images), batch_size, share.rank, share.world_size)
        self.loader = _loader(images, self.sampler, share.rank, workers, prepare.device, seed=0)

    def __iter__(self) -> Iterator[Batch]:
        for index, (images, labels) in enumerate(self.loader):
            labels = labels.to(self.prepare.device, non_blocking=True)
            yield Batch(self.prepare(images), labels, self.sampler.valid(index))


def _loader(
    batches: Any, sampler: Any, rank: int, workers: int, device: torch.device, seed: int
) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return a loader of uint8 images and labels in the order of ``sampler``.

    The loader's samples are lists of indices, so that a data set loads a batch at once.
    """
    return DataLoader(
        batches,
        sampler=sampler,
        batch_size=None,
        num_workers=workers,
        pin_memory=is_accelerator(device),
        generator=generator("workers", seed, rank),
        worker_init_fn=end_with_parent if sys.platform == "linux" else None,
    )

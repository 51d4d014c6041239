"""Data sets, their images loaded by index, and float32 batches on the device.

`images, labels = data[[3, 1, 4]]` are uint8 [3, channels, height, width] and int64 [3]. Pixels stay as stored
until they are on the device. There they are normalised, resized, augmented and mixed.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from shardtrain.config.errors import UserError
from shardtrain.data.preprocessing import Preprocessing
from shardtrain.data.sampler import EvalSampler, Request, Share, TrainSampler, generator
from shardtrain.data.workers import PATIENCE_S, arriving
from shardtrain.device import is_accelerator
from shardtrain.launch.signals import end_with_parent

Augment = Callable[[Tensor, Tensor], Tensor]

EVAL_BATCH = 256  # images per rank in one forward of an evaluation, at most


class Batches(Protocol):
    """Images and their labels, loaded by lists of indices."""

    random: bool = False  # whether loading an image draws from torch's random numbers, as for a random crop
    labels: Tensor | None = None  # int64 [count], where labels are known before images are loaded
    in_memory: bool = False  # whether images are there already, so that none can turn out to be unreadable

    def __len__(self) -> int: ...

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]: ...


class DataSet(NamedTuple):
    train: Batches
    val: Batches
    name: str
    preprocessing: Preprocessing
    test: Batches | None = None
    train_as_val: Batches | None = None  # the images of `train` cut as those of `val`, where that differs
    notes: tuple[str, ...] = ()  # lines that a run prints at its start

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, by label."""
        return self.preprocessing.classes

    @property
    def side(self) -> int:
        """Pixels per side of the images as they are. Raises UserError if they are not square."""
        height, width = self.train[[0]][0].shape[2:]
        if height != width:
            raise UserError(f"{self.name}: {height}×{width} pixels; data.image_size=N makes them squares")
        return int(width)

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """The number of images per part and class, where labels are known before images are loaded."""
        parts = {"train": self.train, "val": self.val, "test": self.test}
        counts = {}
        for name, part in parts.items():
            if part is not None and part.labels is not None:
                by_label = part.labels.bincount(minlength=len(self.classes)).tolist()
                counts[name] = dict(zip(self.classes, by_label, strict=True))
        return counts

    @property
    def labels(self) -> dict[str, str]:
        """A digest of the labels of training and validation images; empty where they are not known."""
        return {"train": digest_of(self.train.labels), "val": digest_of(self.val.labels)}


def digest_of(labels: Tensor | None) -> str:
    """Return a digest of ``labels`` in their order; empty without."""
    if labels is None:
        return ""
    numbers = labels.contiguous().view(torch.uint8).numpy()  # NumPy has no bfloat16
    return hashlib.sha256(numbers.tobytes()).hexdigest()[:16]


class Arrays(Batches):
    """Images in memory."""

    in_memory = True

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        """images: uint8 [count, channels, height, width]; labels: int64 [count]."""
        self.images = images
        self.labels: Tensor = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.images[indices], self.labels[indices]


class Chosen(Batches):
    """Images of a ``source``, in the order of ``indices``, int64 [count]."""

    def __init__(self, source: Batches, indices: Tensor) -> None:
        self.source = source
        self.indices = indices
        self.random = source.random
        self.in_memory = source.in_memory
        self.labels = None if source.labels is None else source.labels[indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.source[self.indices[indices].tolist()]


def of_length(source: Batches, count: int) -> Chosen:
    """Return ``count`` images of ``source``: repeated if it has fewer, evenly spaced if it has more."""
    images = len(source)
    order = torch.arange(count)
    # Evenly spaced images come from every class, even if a data set is sorted by class.
    return Chosen(source, order % images if count > images else order * images // count)


class Batch(NamedTuple):
    images: Tensor  # float32 [batch, channels, side, side], about zero mean and unit variance
    labels: Tensor  # int64 [batch], or float32 [batch, classes] where images are mixed
    valid: int  # the first `valid` images count; the others pad an evaluation's last batch


class Prepare:
    """The step from uint8 batches to normalised float32 batches on ``device``, of ``side`` pixels."""

    def __init__(self, preprocessing: Preprocessing, side: int, device: torch.device) -> None:
        self.side = side
        self.device = device
        # Of stored pixels, 0 to 255: to divide each image by 255 would be one more pass over it.
        self.mean = torch.tensor([255 * value for value in preprocessing.mean], device=device)[:, None, None]
        self.std = torch.tensor([255 * value for value in preprocessing.std], device=device)[:, None, None]

    def __call__(self, images: Tensor) -> Tensor:
        pixels = images.to(self.device, non_blocking=True).float()
        normal = (pixels - self.mean) / self.std
        size = (self.side, self.side)
        if normal.shape[-2:] == size:
            return normal
        return F.interpolate(normal, size, mode="bilinear", antialias=True)


class ToDevice:
    """The step to ``device`` for batches that are prepared already, one image after the other."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, images: Tensor) -> Tensor:
        return images.to(self.device, non_blocking=True)


class Seeded:
    """Images whose random crops and changes depend on the seed and their position in the run alone."""

    def __init__(self, data: Batches, seed: int, change: Callable[[Tensor], Tensor] | None) -> None:
        """change: uint8 [channels, height, width] to the same, with torch's random numbers."""
        self.data = data
        self.seed = seed
        self.change = change

    def __getitem__(self, request: Request) -> tuple[Tensor, Tensor]:
        if not self.data.random and self.change is None:
            return self.data[request.indices]
        images = []
        labels = []
        with torch.random.fork_rng(devices=[]):
            for position, index in enumerate(request.indices, request.position):
                torch.default_generator.manual_seed(generator("image", self.seed, position).initial_seed())
                (image,), label = self.data[[index]]
                images.append(self.change(image) if self.change else image)
                labels.append(label)
        return torch.stack(images), torch.cat(labels)


class Mix:
    """Mixup and cutmix: each image of a batch, and its label, is mixed with those of a partner.

    An image's partner is its neighbour in the global batch: 0 and 1, 2 and 3, …. How they are mixed is drawn
    for each image of the global batch from the seed and the step. Each micro-batch has an even number of
    images. So neither depends on the number of ranks and micro-batches (torchvision and timm draw per rank).

    Mixup with 0.7 turns images a, b of classes 3, 5 into 0.7 a + 0.3 b, labelled 0.7 of class 3 and 0.3 of
    class 5. Cutmix puts a box of b into a. A box that covers 30 % gives the same label.
    """

    def __init__(self, mixup: float, cutmix: float, classes: int, share: Share, seed: int) -> None:
        """mixup, cutmix: alpha of Beta(alpha, alpha); 0: off. With both, each image gets one of them."""
        self.mixup = mixup
        self.cutmix = cutmix
        self.classes = classes
        self.share = share
        self.seed = seed

    def draws(self, step: int) -> Tensor:
        """Return the draws for this rank's images of ``step``, counted from 0: float32 [images, 4].

        Columns: the fraction of an image that stays its own; 1 for cutmix, 0 for mixup; the centre of
        cutmix's box, as fractions of height and width.
        """
        images = self.share.batch_size
        random = np.random.default_rng(generator("mix", self.seed, step).initial_seed())
        part_boxed = 0.5 if self.mixup and self.cutmix else float(self.cutmix > 0)
        boxed = random.random(images) < part_boxed
        centres = random.random((images, 2))
        alpha = np.where(boxed, self.cutmix, self.mixup)
        kept = random.beta(alpha, alpha)
        return self.share.of(torch.from_numpy(np.column_stack((kept, boxed, centres))).float())

    def __call__(self, images: Tensor, labels: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Return mixed images, float32 [batch, channels, height, width], and soft labels [batch, classes]."""
        here = draws.to(images.device, non_blocking=True)
        weight = kept_pixels(here, images.shape[2], images.shape[3])
        partner = (torch.arange(len(images), device=images.device) ^ 1).clamp(max=len(images) - 1)
        mixed = torch.lerp(images[partner], images, weight[:, None].to(images.dtype))
        one_hot = F.one_hot(labels, self.classes).float()
        return mixed, torch.lerp(one_hot[partner], one_hot, weight.mean((1, 2))[:, None])


def kept_pixels(draws: Tensor, height: int, width: int) -> Tensor:
    """Return the fraction of each pixel that stays the image's own: float32 [batch, height, width]."""
    kept, boxed, *centres = draws.unbind(1)
    # A box has ``1 - kept`` of the area before it is clipped at the image's edge.
    half = 0.5 * (1 - kept).sqrt()
    inside = torch.ones(len(kept), height, width, dtype=torch.bool, device=kept.device)
    for axis, size in enumerate((height, width)):
        centre = (centres[axis] * size).floor()
        reach = (half * size).floor()
        at = torch.arange(size, device=kept.device)
        within = (at >= (centre - reach)[:, None]) & (at < (centre + reach)[:, None])
        inside &= within[:, :, None] if axis == 0 else within[:, None, :]
    return torch.where(boxed[:, None, None] > 0, 1.0 - inside.float(), kept[:, None, None])


class TrainFeed:
    """This rank's micro-batches of the ``steps``.

    `augment`: called with a batch and random numbers in [0, 1), [batch, `augment.draws`]. It may have a
    method `image`, which changes one image in the loader's workers, and a list `alternates` of columns whose
    numbers belong to each image and move by 1/2 from epoch to epoch.
    """

    def __init__(
        self,
        images: Batches,
        share: Share,
        prepare: Prepare | ToDevice,
        *,
        seed: int,
        steps: range,
        repeats: int = 1,
        workers: int = 0,
        augment: Augment | None = None,
        mix: Mix | None = None,
    ) -> None:
        """repeats: see `epoch_order`. workers: processes that load, besides this one."""
        self.share = share
        self.images = images
        self.prepare = prepare
        self.augment = augment
        self.mix = mix
        self.seed = seed
        self.sampler = TrainSampler(len(images), share, seed, steps, repeats)
        seeded = Seeded(images, seed, getattr(augment, "image", None))
        self.loader = loader_of(seeded, self.sampler, share.rank, workers, prepare.device, seed)

    def __iter__(self) -> Iterator[Batch]:
        size = self.share.micro_batch
        loaded = arriving(self.loader)
        for step in self.sampler.steps:
            uniform = self._uniform(step)
            mixing = self.mix.draws(step) if self.mix else None
            for start in range(0, self.share.per_rank, size):
                pixels, labels = next(loaded)
                images = self.prepare(pixels)
                rows = slice(start, start + size)
                labels = labels.to(self.prepare.device, non_blocking=True)
                if self.augment:
                    images = self.augment(images, uniform[rows].to(self.prepare.device))
                if self.mix and mixing is not None:
                    images, labels = self.mix(images, labels, mixing[rows])
                yield Batch(images, labels, len(labels))

    def of(self, share: Share, step: int) -> TrainFeed:
        """Return another ``share``'s micro-batches in ``step``, counted from 0, loaded without workers."""
        mix = self.mix
        return TrainFeed(
            self.images,
            share,
            self.prepare,
            seed=self.seed,
            steps=range(step, step + 1),
            repeats=self.sampler.repeats,
            augment=self.augment,
            mix=mix and Mix(mix.mixup, mix.cutmix, mix.classes, share, mix.seed),
        )

    def _uniform(self, step: int) -> Tensor:
        """Return random numbers for augmenting this rank's images in ``step``: float32 [per_rank, draws]."""
        draws = int(getattr(self.augment, "draws", 0))
        whole = torch.rand(self.share.batch_size, draws, generator=generator("augment", self.seed, step))
        uniform = self.share.of(whole)
        epoch = self.sampler.epoch(step)
        for column in getattr(self.augment, "alternates", ()):
            by_image = torch.rand(self.sampler.images, generator=generator("alternate", self.seed))
            uniform[:, column] = ((by_image + epoch / 2) % 1)[self.sampler.indices(step)]
        return uniform


class EvalFeed:
    """The batches of this rank's part of images to evaluate, equally many on every (virtual) rank."""

    def __init__(
        self,
        images: Batches,
        share: Share,
        prepare: Prepare | ToDevice,
        workers: int,
        batch_size: int | None = None,
    ) -> None:
        """batch_size: images per rank in one forward, at most; None: `EVAL_BATCH`."""
        self.images = images
        self.prepare = prepare
        self.sampler = EvalSampler(len(images), batch_size or EVAL_BATCH, share)
        self.loader = loader_of(images, self.sampler, share.rank, workers, prepare.device, seed=0)

    def __iter__(self) -> Iterator[Batch]:
        for index, (images, labels) in enumerate(arriving(self.loader)):
            labels = labels.to(self.prepare.device, non_blocking=True)
            yield Batch(self.prepare(images), labels, self.sampler.valid[index])


def loader_of(
    batches: Any, sampler: Any, rank: int, workers: int, device: torch.device, seed: int
) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return a loader in the order of ``sampler``, whose lists of indices a data set loads at once."""
    return DataLoader(
        batches,
        sampler=sampler,
        batch_size=None,
        num_workers=workers,
        timeout=PATIENCE_S if workers else 0,
        pin_memory=is_accelerator(device),
        generator=generator("workers", seed, rank),
        worker_init_fn=end_with_parent if sys.platform == "linux" else None,
    )

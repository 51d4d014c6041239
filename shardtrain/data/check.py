"""The check of `shardtrain.plan … check=true`, which reads each image once, and lists what it cannot read."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from shardtrain.config.config import Images
from shardtrain.config.errors import UserError, reason_with_line
from shardtrain.config.format import counted
from shardtrain.data.feed import Batches, loader_of
from shardtrain.data.workers import arriving

CHUNK = 64  # images that are read at once
REPORTS = 10  # of a part, while it is read


class _Problems:
    """What is wrong with images, by their numbers, in place of the images."""

    def __init__(self, images: Batches, part: str) -> None:
        self.images = images
        self.part = part

    def __getitem__(self, indices: list[int]) -> list[str]:
        problems = []
        for index in indices:
            try:
                self.images[[index]]
            except UserError as error:
                problems.append(" ".join(str(error).split()))
            except Exception as error:  # a user's data set raises anything
                problems.append(f"image {index} of {self.part}: {reason_with_line(error)}")
        return problems


def require_readable(parts: Mapping[str, Batches | None], keys: Images, say: Callable[[str], object]) -> None:
    """Read all images that are not in memory; report by ``say``. Raises UserError if one cannot be read."""
    files = {part: source for part, source in parts.items() if source is not None and not source.in_memory}
    bad = sum(_read(source, part, keys.workers, say) for part, source in files.items())
    if bad:
        images = sum(map(len, files.values()))
        raise UserError(
            f"data={keys.name}: {bad:,} of {counted(images, 'image')} cannot be read; they "
            "are listed above: remove or replace them"
        )


def _read(source: Batches, part: str, workers: int, say: Callable[[str], object]) -> int:
    """Read one part, report each image that cannot be read, and return how many these are."""
    count = len(source)
    chunks = [[*range(start, min(start + CHUNK, count))] for start in range(0, count, CHUNK)]
    loader = loader_of(_Problems(source, part), chunks, 0, workers, torch.device("cpu"), seed=0)
    bad = 0
    every = -(-len(chunks) // REPORTS)
    with torch.random.fork_rng(devices=[]):
        for number, problems in enumerate(arriving(loader), 1):
            bad += len(problems)
            for problem in problems:
                say(problem)
            if number % every == 0 or number == len(chunks):
                say(f"{part}: {min(count, number * CHUNK):,} of {counted(count, 'image')} read")
    return bad

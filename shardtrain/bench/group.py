"""Process groups that the launcher does not make: of a single rank, and of ranks started by a benchmark."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from shardtrain.launch import close_process_group
from shardtrain.place import START_UP, Place


@contextlib.contextmanager
def process_group(place: Place, device: torch.device, meeting: str) -> Iterator[None]:
    """The default group while the block runs, met at ``meeting`` in the launcher's store.

    Unlike `launch.process_group` it makes one for a single rank too, because the peers need it.
    """
    alone = place.world_size == 1
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=dist.HashStore() if alone else PrefixStore(meeting, place.store),  # type: ignore[attr-defined]
        rank=place.rank,
        world_size=place.world_size,
        timeout=START_UP,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield
    finally:
        close_process_group()

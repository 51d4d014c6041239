"""Process groups that the launcher does not make: of a single rank, and of ranks started by a benchmark."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from shardtrain.launch import close_process_group, open_process_group
from shardtrain.place import Place


@contextlib.contextmanager
def process_group(place: Place, device: torch.device, meeting: str) -> Iterator[None]:
    """The default group while the block runs, met at ``meeting`` in the launcher's store.

    Unlike `launch.process_group` it makes one for a single rank too, because the peers need it.
    """
    alone = place.world_size == 1
    store = dist.HashStore() if alone else PrefixStore(meeting, place.store)  # type: ignore[attr-defined]
    open_process_group(place, device, store)
    try:
        yield
    finally:
        close_process_group()

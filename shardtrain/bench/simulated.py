"""A process group of many ranks in one process, whose collectives reach nobody."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from shardtrain.launch import close_process_group


@contextlib.contextmanager
def simulated_group(world: int) -> Iterator[None]:
    """The default group while the block runs, as rank 0 of ``world`` sees it: torch's fake backend."""
    # Importing it registers the backend; torch has it among its own tests' tools, and nowhere else.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        close_process_group()

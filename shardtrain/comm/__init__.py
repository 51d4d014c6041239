"""Bytes between ranks. Only this room and ``collectives/`` call collectives.

Read the files in this order. Each imports only from those before it:

- ``trace``: the kinds of collectives, bytes sent, seconds waited
- ``arithmetic``: sums; ``hints``: what to do where ranks differ; ``guard``: ranks that diverge
- ``transport``: what a transport is; ``channel``: the collectives of a model, over any transport
- ``messages``: collectives by messages; ``backends``: what a process group can do
- ``activity``: whether this process works; ``reports``: the guard over gloo, and ranks that are lost
- ``norms``: norms of what each rank holds, added up over ranks
- ``process_group``: the transports between any ranks
- ``mapping``, ``signals``, ``shared_memory``: ranks of one host that share memory
- ``wrappers``: offload and replicas, around any of these
- ``opening``: the choice among them

The public collectives are names of this module, too: ``from shardtrain import comm as dist`` serves programs
written for ``torch.distributed``. ``collectives/`` defines them, and is loaded at the first use of one.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import torch.distributed as dist

from shardtrain.comm.backends import set_time_out
from shardtrain.comm.channel import Channel, Ranks, gather_texts, require_same
from shardtrain.comm.opening import TRANSPORTS, open_transport, plain_transport, ranks_by_host
from shardtrain.comm.process_group import (
    BackendTransport,
    MessagesTransport,
    ProcessGroupTransport,
    guard_world,
)
from shardtrain.comm.shared_memory import SharedMemoryTransport
from shardtrain.comm.trace import Meter, WaitKey, meter
from shardtrain.comm.transport import Alone, Pending, Transport, Vector
from shardtrain.comm.wrappers import Offloaded
from shardtrain.errors import Diverged, PeerLost

if TYPE_CHECKING:
    from shardtrain.collectives import *  # noqa: F403


def __getattr__(name: str) -> object:
    """Return a public collective."""
    # Not AttributeError, whose text `from shardtrain.comm import ...` does not show.
    if name in ("Flat", "Gradient"):
        raise ValueError(f"shardtrain.comm.{name} was moved; use shardtrain.comm.Vector")
    # Python itself asks any module for names such as __path__: these load no collectives.
    if name.startswith("__") or name not in import_module("shardtrain.collectives").__all__:
        raise AttributeError(f"module 'shardtrain.comm' has no attribute {name!r}")
    return getattr(import_module("shardtrain.collectives"), name)


def __dir__() -> list[str]:
    return [*globals(), *import_module("shardtrain.collectives").__all__]


def rank() -> int:
    """Return this process's rank in the default process group; 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks in the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1

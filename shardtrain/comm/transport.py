"""What the engine asks of a transport: two movements, each started now and finished later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from shardtrain.layout import Layout


class Flat(NamedTuple):
    """One flat vector taking part in a movement, with this rank's interval of it.

    ``full``: 1-D, ``layout.padded`` elements. ``local``: 1-D, ``layout.length(rank)`` elements, same
    device. A gather reads ``local`` and fills ``full``; a reduction reads ``full`` and fills ``local``,
    which may have a wider dtype.
    """

    full: torch.Tensor
    local: torch.Tensor
    layout: Layout


class Pending:
    """A movement under way. ``wait()`` returns once its results may be read by the current stream."""

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class Transport(Protocol):
    """Moves bytes between the ranks of one shard group.

    ``in_place``: the local interval lies inside the full vector, so nothing is copied by a gather and
    nothing can be given back by a release.
    """

    rank: int
    world: int
    in_place: bool

    def gather(self, tag: int, flats: Sequence[Flat]) -> Pending:
        """Start filling every ``full`` from all ranks' ``local``."""

    def reduce(self, tag: int, flats: Sequence[Flat]) -> Pending:
        """Start filling every ``local`` with the mean over ranks of that interval of ``full``."""

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> None:
        """Overwrite ``tensor`` on every rank with rank ``src``'s, and return when that is done."""

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        """Overwrite ``tensor`` on every rank with the ``sum``, ``max`` or ``min`` over ranks."""


class Alone:
    """The transport of a single rank: the interval is the whole vector, and nothing ever moves."""

    rank = 0
    world = 1
    in_place = True

    def gather(self, tag: int, flats: Sequence[Flat]) -> Pending:
        return Pending()

    def reduce(self, tag: int, flats: Sequence[Flat]) -> Pending:
        raise AssertionError("a single rank has nothing to reduce")

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> None:
        pass

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        pass

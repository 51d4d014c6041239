"""Intervals of flat vectors as backends and messages want them: each alone and in one piece."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardtrain.comm.transport import Gradient
from shardtrain.layout import Layout, Piece


def intervals(full: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Every rank's interval of ``full``; views."""
    return [full[layout.interval(rank)] for rank in range(layout.world)]


def pack_own(gradient: Gradient, rank: int) -> torch.Tensor:
    """Let ``gradient.own`` lie in one interval, that of rank ``rank``, if it does not yet; the interval.

    Empty pieces stay as they are: on many ranks most are.
    """
    full, own, layout, pieces, _ = gradient
    length = layout.length(rank)
    interval = _laid_out(own, pieces, length)
    if interval is not None:
        return interval
    interval = full.new_empty(length, dtype=own[0].dtype if own else full.dtype)
    for index, piece in enumerate(pieces):
        if piece.numel:
            own[index] = interval[piece.offset : piece.offset + piece.numel].copy_(own[index])
    return interval


def _laid_out(own: Sequence[torch.Tensor], pieces: Sequence[Piece], length: int) -> torch.Tensor | None:
    """The interval that the pieces are views of, if there is one that is alone in its memory."""
    held = [(part, piece.offset) for part, piece in zip(own, pieces, strict=True) if piece.numel]
    if not held or held[0][0].untyped_storage().nbytes() != length * held[0][0].element_size():
        return None
    first = held[0][0]
    memory = first.untyped_storage()._cdata
    if any(p.untyped_storage()._cdata != memory or p.storage_offset() != offset for p, offset in held):
        return None
    return first.as_strided((length,), (1,), 0)

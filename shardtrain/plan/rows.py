"""The measure for what a flat vector saves: every parameter cut for itself, as FSDP2 does it.

FSDP2 gives each rank as many rows (first dimension) of every parameter as the first rank gets, and pads the
rest. Three ranks, a parameter of 4 rows: 2 rows each, so 6 are held for 4. On many ranks most parameters
have fewer rows than there are ranks, and each rank holds one row of each.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def held_by_rows(parameters: Iterable[Tensor], world: int) -> int:
    """Bytes of a rank's shards of ``parameters``, padding included; a number counts as one row."""
    held = 0
    for parameter in parameters:
        rows = parameter.shape[0] if parameter.dim() else 1
        held += -(-rows // world) * (parameter.nbytes // rows) if rows else 0
    return held

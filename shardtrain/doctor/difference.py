"""The first element in which two tensors differ, and how far apart they are.

Floating-point numbers of one dtype are ordered like the integers that their bits spell, so their distance in
units in the last place (ulps) is a difference of integers. In fp32: 1.0 and the next larger number are 1 ulp
apart, 1.0 and 1.001 are 8,389, 1.0 and -1.0 are 2,130,706,432.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Difference(NamedTuple):
    """Between ``found`` and ``expected``: how many elements differ, and the one that does most."""

    elements: int
    differing: int
    at: tuple[int, ...]
    found: float
    expected: float
    ulps: int
    relative: float  # the largest difference over the largest expected magnitude

    def __str__(self) -> str:
        where = ", ".join(map(str, self.at))
        return (
            f"{self.differing:,} of {self.elements:,} elements differ, most of all [{where}]: "
            f"{self.found:.9g}, expected {self.expected:.9g}, {self.ulps:,} ulps apart"
        )


def difference(found: Tensor, expected: Tensor) -> Difference | None:
    """None where both are equal, element by element; no number equals no number.

    Both: one shape, one dtype.
    """
    equal = (found == expected) | (found.isnan() & expected.isnan())
    if bool(equal.all()):
        return None
    apart = torch.where(equal, 0, (ordered(found) - ordered(expected)).abs())
    at = int(apart.argmax())
    index = tuple(int(part) for part in torch.unravel_index(torch.tensor(at), found.shape))
    gap = (found.double() - expected.double()).abs().nan_to_num(torch.inf).max()
    return Difference(
        elements=found.numel(),
        differing=int((~equal).sum()),
        at=index,
        found=found[index].item(),
        expected=expected[index].item(),
        ulps=int(apart.flatten()[at]),
        relative=float(gap / expected.double().abs().max().clamp(min=torch.finfo(torch.float32).tiny)),
    )


def ordered(values: Tensor) -> Tensor:
    """``values`` as int64 in the same order, consecutive for neighbouring numbers; both zeros are 0."""
    if not values.dtype.is_floating_point:
        return values.long()
    bits = values.contiguous().view(_INTEGERS[values.element_size()]).long()
    lowest = torch.iinfo(_INTEGERS[values.element_size()]).min
    return torch.where(bits < 0, lowest - bits, bits)

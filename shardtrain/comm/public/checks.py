"""What a public collective demands of this rank's own arguments, each refusal in one sentence.

Every sentence says what was expected and what was found. They are raised here, on one rank, as
``ValueError``; ``agreement.py`` brings them to the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardtrain.comm import native
from shardtrain.comm.messages import Mailbox


def tensor(value: object, name: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"expected {name} to be a tensor, found {type(value).__name__}")
    return value


def tensors(value: object, name: str, world: int) -> list[torch.Tensor]:
    """A list of ``world`` tensors."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"expected {name} to be a list of {world} tensors, found {type(value).__name__}")
    if len(value) != world:
        raise ValueError(f"expected {name} to hold {world} tensors, one per rank, found {len(value)}")
    return [tensor(item, f"{name}[{index}]") for index, item in enumerate(value)]


def placement(mailbox: Mailbox, items: Sequence[torch.Tensor]) -> None:
    """All ``items`` are plain tensors on one device, of a type that the group's backend moves."""
    first = items[0].device
    for item in items:
        if item.layout is not torch.strided:
            raise ValueError(f"expected dense tensors, found {item.layout}")
        if item.device != first:
            raise ValueError(f"expected all tensors on one device, found {first} and {item.device}")
    if mailbox.group is not None and first.type not in native.device_types(mailbox.group):
        moved = ", ".join(native.device_types(mailbox.group))
        raise ValueError(f"expected tensors on a device that this group moves ({moved}), found {first}")


def readable(item: torch.Tensor) -> torch.Tensor:
    """``item`` flat, contiguous, outside autograd; complex values as pairs of real ones."""
    plain = item.detach().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    return plain.contiguous().view(-1)


def writable(item: torch.Tensor, name: str) -> torch.Tensor:
    """``item`` itself under a flat view; what cannot be written through one is refused."""
    plain = item.detach()
    if not plain.is_contiguous() or plain.is_conj() or plain.is_neg():
        raise ValueError(f"expected {name} to be contiguous, found strides {item.stride()} of {shape(item)}")
    return (torch.view_as_real(plain) if plain.is_complex() else plain).view(-1)


def one_dtype(*items: torch.Tensor) -> None:
    """torch lets a complex tensor meet its real counterpart, so the flat views are compared."""
    found = dict.fromkeys(item.dtype for item in items)
    if len(found) > 1:
        names = ", ".join(short(dtype) for dtype in found)
        raise ValueError(f"expected all tensors to have one dtype, found {names}")


def splits(sizes: Sequence[int] | None, item: torch.Tensor, name: str, world: int) -> list[int]:
    """Elements for each rank, from rows for each rank: ``[3, 1]`` of a ``[4, 5]`` tensor is ``[15, 5]``."""
    if item.dim() == 0:
        raise ValueError(f"expected {name} to have a first dimension to split, found a tensor without any")
    rows = item.shape[0]
    if not sizes:
        if rows % world:
            raise ValueError(f"expected {name} to have rows for {world} ranks alike, found {shape(item)}")
        sizes = [rows // world] * world
    if len(sizes) != world or any(not isinstance(size, int) or size < 0 for size in sizes):
        raise ValueError(f"expected {world} split sizes of at least 0 for {name}, found {list(sizes)}")
    if sum(sizes) != rows:
        raise ValueError(
            f"expected the split sizes of {name} to add up to its {rows} rows, "
            f"found {list(sizes)}, which add up to {sum(sizes)}"
        )
    row = (item[0] if rows else item).numel() * (2 if item.is_complex() else 1)
    return [size * row for size in sizes]


def shape(item: torch.Tensor) -> str:
    """``float32 [3, 2]``"""
    return f"{short(item.dtype)} {list(item.shape)}"


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

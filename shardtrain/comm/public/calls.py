"""From the arguments of a public collective to a call: what to tell the others, and how to move.

Looks at this rank alone. Whatever does not fit raises ``ValueError`` with what was expected and found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardtrain.comm import native
from shardtrain.comm.arithmetic import check_op, merge, op_name
from shardtrain.comm.messages import Mailbox, start_exchange, start_reduce_scatter
from shardtrain.comm.movement import ALL_TO_ALL, GATHER, REDUCE, Movement
from shardtrain.comm.public.agreement import Claim, by_size
from shardtrain.comm.transport import Pending

Op = dist.ReduceOp.RedOpType


class Call(NamedTuple):
    """A collective with arguments that are good on this rank.

    ``by_messages(window)`` starts it point to point, with room for ``window`` chunks per peer where it
    needs room; ``natively(group=..., async_op=...)`` calls the backend's own.
    """

    movement: Movement
    claim: Claim
    by_messages: Callable[[int], Pending]
    natively: Callable[..., dist.Work | None]


def gather(output: torch.Tensor, input: torch.Tensor, mailbox: Mailbox) -> Call:
    world = mailbox.world
    local, full = tensor(input, "input"), tensor(output, "output")
    placement(mailbox, [local, full])
    read, write = readable(local), writable(full, "output")
    one_dtype(read, write)
    if write.numel() != world * read.numel():
        raise ValueError(
            f"expected output of {world} x {read.numel()} elements for input {shape(local)}, "
            f"found {shape(full)}"
        )
    signature = ("all_gather", read.dtype, list(local.shape), local.device.type)
    text = partial(_text, "all_gather_into_tensor of {}", [local])
    return Call(
        GATHER,
        Claim(signature, [read.nbytes] * world, [read.nbytes] * world, text, _by_messages(mailbox, local)),
        lambda _: start_exchange(mailbox, by_size, [read] * world, _rows(write, world)),
        partial(native.all_gather, write, read),
    )


def reduce_tensor(output: torch.Tensor, input: torch.Tensor, op: Op, mailbox: Mailbox) -> Call:
    world = mailbox.world
    full, local = tensor(input, "input"), tensor(output, "output")
    placement(mailbox, [full, local])
    read, write = readable(full), writable(local, "output")
    one_dtype(read, write)
    check_op(op, full.dtype)
    if read.numel() != world * write.numel():
        raise ValueError(
            f"expected input of {world} x {write.numel()} elements for output {shape(local)}, "
            f"found {shape(full)}"
        )
    parts = _rows(read, world)
    text = partial(_text, f"reduce_scatter_tensor ({op_name(op)}) of {{}}", [full])
    signature = ("reduce_scatter", op_name(op), read.dtype, list(full.shape), full.device.type)
    return Call(
        REDUCE,
        Claim(signature, [write.nbytes] * world, [write.nbytes] * world, text, _by_messages(mailbox, full)),
        lambda window: start_reduce_scatter(mailbox, by_size, parts, write, partial(merge, op=op), window),
        partial(native.reduce_scatter, write, read, op=op),
    )


def reduce_list(output: torch.Tensor, input_list: list[torch.Tensor], op: Op, mailbox: Mailbox) -> Call:
    parts = tensors(input_list, "input_list", mailbox.world)
    local = tensor(output, "output")
    placement(mailbox, [local, *parts])
    reads, write = [readable(part) for part in parts], writable(local, "output")
    one_dtype(*reads, write)
    check_op(op, local.dtype)
    if reads[mailbox.rank].numel() != write.numel():
        raise ValueError(
            f"expected output of the size of input_list[{mailbox.rank}], "
            f"{shape(parts[mailbox.rank])}, found {shape(local)}"
        )
    shapes = [list(part.shape) for part in parts]
    return Call(
        REDUCE,
        Claim(
            ("reduce_scatter", op_name(op), write.dtype, shapes, local.device.type),
            [read.nbytes for read in reads],
            [write.nbytes] * mailbox.world,
            partial(_text, f"reduce_scatter ({op_name(op)}) of a list of {{}}", parts),
            _by_messages(mailbox, local),
        ),
        lambda window: start_reduce_scatter(mailbox, by_size, reads, write, partial(merge, op=op), window),
        partial(dist.reduce_scatter, write, reads, op),
    )


def to_all(output_list: list[torch.Tensor], input_list: list[torch.Tensor], mailbox: Mailbox) -> Call:
    world = mailbox.world
    ins = tensors(input_list, "input_list", world)
    outs = tensors(output_list, "output_list", world)
    placement(mailbox, [*ins, *outs])
    reads = [readable(item) for item in ins]
    writes = [writable(item, f"output_list[{index}]") for index, item in enumerate(outs)]
    return _to_all(
        mailbox,
        reads,
        writes,
        lambda: _text("all_to_all from a list of {}", ins) + _text(" to a list of {}", outs),
        partial(dist.all_to_all, writes, reads),
    )


def to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    mailbox: Mailbox,
) -> Call:
    whole_in, whole_out = tensor(input, "input"), tensor(output, "output")
    placement(mailbox, [whole_in, whole_out])
    read, write = readable(whole_in), writable(whole_out, "output")
    sends = splits(input_split_sizes, whole_in, "input", mailbox.world)
    expects = splits(output_split_sizes, whole_out, "output", mailbox.world)
    return _to_all(
        mailbox,
        list(read.split(sends)),
        list(write.split(expects)),
        lambda: (
            f"all_to_all_single from {shape(whole_in)} split into {sends} "
            f"to {shape(whole_out)} split into {expects} elements"
        ),
        partial(dist.all_to_all_single, write, read, expects, sends),
    )


def _to_all(
    mailbox: Mailbox,
    reads: list[torch.Tensor],
    writes: list[torch.Tensor],
    text: Callable[[], str],
    natively: Callable[..., dist.Work | None],
) -> Call:
    one_dtype(*reads, *writes)
    own = reads[mailbox.rank]
    if own.numel() != writes[mailbox.rank].numel():
        raise ValueError(
            f"expected {own.numel()} elements from itself, as many as it sends itself, "
            f"found room for {writes[mailbox.rank].numel()}"
        )
    return Call(
        ALL_TO_ALL,
        Claim(
            ("all_to_all", own.dtype, own.device.type),
            [read.nbytes for read in reads],
            [write.nbytes for write in writes],
            text,
            _by_messages(mailbox, own),
        ),
        lambda _: start_exchange(mailbox, by_size, reads, writes),
        natively,
    )


def _by_messages(mailbox: Mailbox, item: torch.Tensor) -> bool:
    if mailbox.group is None or mailbox.world == 1:
        return True
    return item.device.type == "cpu" and native.has_gloo(mailbox.group)


def _rows(flat: torch.Tensor, world: int) -> list[torch.Tensor]:
    return list(flat.view(world, -1)) if flat.numel() else [flat] * world


def _text(pattern: str, items: Sequence[torch.Tensor]) -> str:
    where = "" if items[0].device.type == "cpu" else f" on {items[0].device.type}"
    shapes = ", ".join(str(list(item.shape)) for item in items)
    return pattern.format(f"{short(items[0].dtype)} {shapes}{where}")


# What a public collective demands of this rank's own arguments, each refusal in one sentence.
#
# Every sentence says what was expected and what was found. They are raised here, on one rank, as
# ``ValueError``; ``agreement.py`` brings them to the others.


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

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
from shardtrain.comm.public import checks
from shardtrain.comm.public.agreement import Claim, by_size
from shardtrain.comm.transport import Pending

Op = dist.ReduceOp.RedOpType


class Call(NamedTuple):
    """A collective with arguments that are good on this rank.

    ``by_messages(window)`` starts it point to point, with room for ``window`` chunks per peer where it
    needs room; ``natively(group=..., async_op=...)`` calls the backend's own.
    """

    kind: str
    claim: Claim
    by_messages: Callable[[int], Pending]
    natively: Callable[..., dist.Work | None]


def gather(output: torch.Tensor, input: torch.Tensor, mailbox: Mailbox) -> Call:
    world = mailbox.world
    local, full = checks.tensor(input, "input"), checks.tensor(output, "output")
    checks.placement(mailbox, [local, full])
    read, write = checks.readable(local), checks.writable(full, "output")
    checks.one_dtype(read, write)
    if write.numel() != world * read.numel():
        raise ValueError(
            f"expected output of {world} x {read.numel()} elements for input {checks.shape(local)}, "
            f"found {checks.shape(full)}"
        )
    signature = ("all_gather", read.dtype, list(local.shape), local.device.type)
    text = partial(_text, "all_gather_into_tensor of {}", [local])
    return Call(
        "all_gather",
        Claim(signature, [read.nbytes] * world, [read.nbytes] * world, text, _by_messages(mailbox, local)),
        lambda _: start_exchange(mailbox, by_size, [read] * world, _rows(write, world)),
        partial(native.all_gather, write, read),
    )


def reduce_tensor(output: torch.Tensor, input: torch.Tensor, op: Op, mailbox: Mailbox) -> Call:
    world = mailbox.world
    full, local = checks.tensor(input, "input"), checks.tensor(output, "output")
    checks.placement(mailbox, [full, local])
    read, write = checks.readable(full), checks.writable(local, "output")
    checks.one_dtype(read, write)
    check_op(op, full.dtype)
    if read.numel() != world * write.numel():
        raise ValueError(
            f"expected input of {world} x {write.numel()} elements for output {checks.shape(local)}, "
            f"found {checks.shape(full)}"
        )
    parts = _rows(read, world)
    text = partial(_text, f"reduce_scatter_tensor ({op_name(op)}) of {{}}", [full])
    signature = ("reduce_scatter", op_name(op), read.dtype, list(full.shape), full.device.type)
    return Call(
        "reduce_scatter",
        Claim(signature, [write.nbytes] * world, [write.nbytes] * world, text, _by_messages(mailbox, full)),
        lambda window: start_reduce_scatter(mailbox, by_size, parts, write, partial(merge, op=op), window),
        partial(native.reduce_scatter, write, read, op=op),
    )


def reduce_list(output: torch.Tensor, input_list: list[torch.Tensor], op: Op, mailbox: Mailbox) -> Call:
    parts = checks.tensors(input_list, "input_list", mailbox.world)
    local = checks.tensor(output, "output")
    checks.placement(mailbox, [local, *parts])
    reads, write = [checks.readable(part) for part in parts], checks.writable(local, "output")
    checks.one_dtype(*reads, write)
    check_op(op, local.dtype)
    if reads[mailbox.rank].numel() != write.numel():
        raise ValueError(
            f"expected output of the size of input_list[{mailbox.rank}], "
            f"{checks.shape(parts[mailbox.rank])}, found {checks.shape(local)}"
        )
    shapes = [list(part.shape) for part in parts]
    return Call(
        "reduce_scatter",
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
    ins = checks.tensors(input_list, "input_list", world)
    outs = checks.tensors(output_list, "output_list", world)
    checks.placement(mailbox, [*ins, *outs])
    reads = [checks.readable(item) for item in ins]
    writes = [checks.writable(item, f"output_list[{index}]") for index, item in enumerate(outs)]
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
    whole_in, whole_out = checks.tensor(input, "input"), checks.tensor(output, "output")
    checks.placement(mailbox, [whole_in, whole_out])
    read, write = checks.readable(whole_in), checks.writable(whole_out, "output")
    sends = checks.splits(input_split_sizes, whole_in, "input", mailbox.world)
    expects = checks.splits(output_split_sizes, whole_out, "output", mailbox.world)
    return _to_all(
        mailbox,
        list(read.split(sends)),
        list(write.split(expects)),
        lambda: (
            f"all_to_all_single from {checks.shape(whole_in)} split into {sends} "
            f"to {checks.shape(whole_out)} split into {expects} elements"
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
    checks.one_dtype(*reads, *writes)
    own = reads[mailbox.rank]
    if own.numel() != writes[mailbox.rank].numel():
        raise ValueError(
            f"expected {own.numel()} elements from itself, as many as it sends itself, "
            f"found room for {writes[mailbox.rank].numel()}"
        )
    return Call(
        "all_to_all",
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
    return pattern.format(f"{checks.short(items[0].dtype)} {shapes}{where}")

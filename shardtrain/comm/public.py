"""The public collectives: ``torch.distributed``'s names, arguments and results. The engine uses none of them.

``from shardtrain import comm as dist`` runs torch's documented examples. What is different:

- on gloo they are built from messages (``messages.py``), with sums in rank order and fp32 accumulation: about
  twice as fast as gloo's own at tens of megabytes; below one the agreement outweighs that. Stacked outputs
  and uneven lists, which gloo refuses, work;
- arguments that do not fit, on any rank, raise one ``ValueError`` with the same text on every rank
  (``agreement.py``). What the outputs then hold is undefined, those of other calls under way on that group
  too; the group remains usable;
- inputs may be strided; outputs must be contiguous.

Each call has three steps: check this rank's arguments, agree with the others, move. On gloo the last two go
on together. With ``async_op=True`` a thread completes them on gloo, so that they proceed while the caller
computes, and ``wait()`` raises what they raise. On other backends the agreement is reached inside the call,
and the backend's own ``Work`` is returned.

The meter counts the payload that this rank sends, not the agreement: two ranks that gather 8 bytes in all
send 4 each.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp, Work

from shardtrain.comm import native
from shardtrain.comm.agreement import Agreement, Claim, by_size
from shardtrain.comm.arithmetic import check_op, merge, op_name
from shardtrain.comm.messages import WINDOW, Mailbox, start_exchange, start_reduce_scatter
from shardtrain.comm.meter import count
from shardtrain.comm.movement import ALL_TO_ALL, GATHER, REDUCE, Movement
from shardtrain.comm.transport import Pending

Op = dist.ReduceOp.RedOpType
Group = dist.ProcessGroup
P = ParamSpec("P")
R = TypeVar("R")


def _torchs_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Let ``function`` take torch's names of tensors, too: ``output_tensor``, ``output_tensor_list``."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **{name.replace("_tensor", ""): value for name, value in kwargs.items()})  # type: ignore[arg-type]

    return call


@_torchs_keywords
def all_gather_into_tensor(
    output: Tensor, input: Tensor, group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Fill ``output`` with the ``input`` of all ranks, in rank order.

    ``input``: the same shape ``[n, ...]`` and dtype on every rank. ``output``: ``world`` times as many
    elements, as the concatenation ``[world * n, ...]``, the stack ``[world, n, ...]``, or flat.
    Two ranks with ``[1 2]`` and ``[3 4]`` get ``[1 2 3 4]`` or ``[[1 2] [3 4]]``.
    """

    def check(mailbox: Mailbox) -> Call:
        (read,), (write,) = _flat(mailbox, {"input": input}, {"output": output})
        rows = _rows(mailbox.world, ("output", output, write), ("input", input, read))
        own = partial(native.all_gather, write, read)
        return Call(GATHER, [input], [read] * mailbox.world, rows, own)

    return _run("all_gather_into_tensor", check, group, async_op)


@_torchs_keywords
def reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: Op = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Merge ``input_list[r]`` of all ranks with ``op`` into the ``output`` of rank ``r``.

    ``input_list``: ``world`` tensors of one dtype, of the same sizes on every rank but not necessarily
    alike. ``output``: as many elements as ``input_list[rank]``. ``op``: ``SUM``, ``AVG``, ``PRODUCT``,
    ``MIN``, ``MAX`` and, for integers, ``BAND``, ``BOR``, ``BXOR``.
    Two ranks with ``[1] [2 3]`` and ``[10] [20 30]``: rank 0 gets ``[11]``, rank 1 ``[22 33]``.
    """

    def check(mailbox: Mailbox) -> Call:
        inputs, rank = _listed(input_list, "input_list", mailbox.world), mailbox.rank
        reads, (write,) = _flat(mailbox, inputs, {"output": output})
        check_op(op, output.dtype)
        if reads[rank].numel() != write.numel():
            size = f"the size of input_list[{rank}], {_shape([input_list[rank]])}"
            raise ValueError(f"expected output of {size}, found {_shape([output])}")
        own = partial(dist.reduce_scatter, write, reads, op)
        return Call(REDUCE, input_list, reads, [write] * mailbox.world, own, op)

    return _run("reduce_scatter", check, group, async_op)


@_torchs_keywords
def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Op = ReduceOp.SUM, group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Merge the ``input`` of all ranks with ``op``; rank ``r`` gets the ``r``-th part of it.

    ``input``: ``[world * n, ...]`` or ``[world, n, ...]``, the same on every rank. ``output``: ``[n, ...]``.
    Two ranks with ``[1 2 3 4]`` and ``[10 20 30 40]``: rank 0 gets ``[11 22]``, rank 1 ``[33 44]``.
    """

    def check(mailbox: Mailbox) -> Call:
        (read,), (write,) = _flat(mailbox, {"input": input}, {"output": output})
        check_op(op, input.dtype)
        rows = _rows(mailbox.world, ("input", input, read), ("output", output, write))
        own = partial(native.reduce_scatter, write, read, op=op)
        return Call(REDUCE, [input], rows, [write] * mailbox.world, own, op)

    return _run("reduce_scatter_tensor", check, group, async_op)


@_torchs_keywords
def all_to_all(
    output_list: list[Tensor], input_list: list[Tensor], group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Send ``input_list[r]`` to rank ``r`` and fill ``output_list[r]`` with what rank ``r`` sends here.

    Both lists hold ``world`` tensors of one dtype; what one rank sends has as many elements as the other
    expects. Two ranks with ``[1] [2 3]`` and ``[4 5] [6]``: rank 0 gets ``[1] [4 5]``, rank 1
    ``[2 3] [6]``.
    """

    def check(mailbox: Mailbox) -> Call:
        inputs = _listed(input_list, "input_list", mailbox.world)
        reads, writes = _flat(mailbox, inputs, _listed(output_list, "output_list", mailbox.world))
        return Call(ALL_TO_ALL, input_list, reads, writes, partial(dist.all_to_all, writes, reads))

    return _run("all_to_all", check, group, async_op)


@_torchs_keywords
def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Split ``input`` by rows, send the ``r``-th part to rank ``r``, and concatenate what comes.

    Split sizes count rows (first dimension), one per rank; without them all parts have as many rows.
    Two ranks with ``[1 2 3]`` split 1, 2 and ``[4 5 6]`` split 2, 1: rank 0 gets ``[1 4 5]`` into output
    splits 1, 2 and rank 1 ``[2 3 6]`` into 2, 1.
    """

    def check(mailbox: Mailbox) -> Call:
        (read,), (write,) = _flat(mailbox, {"input": input}, {"output": output})
        sends = _splits(input_split_sizes, input, "input", mailbox.world)
        expects = _splits(output_split_sizes, output, "output", mailbox.world)
        own = partial(dist.all_to_all_single, write, read, expects, sends)
        return Call(ALL_TO_ALL, [input], list(read.split(sends)), list(write.split(expects)), own)

    return _run("all_to_all_single", check, group, async_op)


class Call(NamedTuple):
    """A collective whose arguments are good on this rank.

    ``inputs``: as they were given. ``reads[r]``: what rank ``r`` gets. ``writes[r]``: where what it sends
    goes; if ``op`` merges that, all of them are the output. ``own``: the backend's own collective.
    """

    movement: Movement
    inputs: list[Tensor]
    reads: list[Tensor]
    writes: list[Tensor]
    own: Callable[..., Work | None]
    op: Op | None = None

    def claim(self, name: str, mailbox: Mailbox) -> Claim:
        sends, expects = ([part.nbytes for part in parts] for parts in (self.reads, self.writes))
        first, group, rank = self.reads[0], mailbox.group, mailbox.rank
        if sends[rank] != expects[rank] and self.movement is ALL_TO_ALL:
            raise ValueError(
                f"expected {self.reads[rank].numel()} elements from itself, as many as it sends itself, "
                f"found room for {self.writes[rank].numel()}"
            )
        uneven = self.movement is ALL_TO_ALL  # shapes may differ between ranks
        shapes = None if uneven else [list(item.shape) for item in self.inputs]
        alike = self.movement.counted, str(self.op), first.dtype, first.device.type, shapes
        posted = group is None or mailbox.world == 1 or (first.is_cpu and native.has_gloo(group))
        return Claim(alike, sends, expects, partial(self.words, name), posted)

    def words(self, name: str) -> str:
        """Return the call in words: ``reduce_scatter (SUM) of float32 [3], [3]``."""
        merged = "" if self.op is None else f" ({op_name(self.op)})"
        if self.movement is not ALL_TO_ALL:
            return f"{name}{merged} of {_shape(self.inputs)}"
        sends, expects = ([part.numel() for part in parts] for parts in (self.reads, self.writes))
        return f"{name} of {_shape(self.inputs)}, sending {sends} and expecting {expects} elements"

    def start(self, mailbox: Mailbox, window: int) -> Pending:
        """Start it point to point, with room for ``window`` chunks per peer where it needs room."""
        if self.op is None:
            return start_exchange(mailbox, by_size, self.reads, self.writes)
        merged = partial(merge, op=self.op)
        return start_reduce_scatter(mailbox, by_size, self.reads, self.writes[0], merged, window)


def _run(name: str, check: Callable[[Mailbox], Call], group: Group | None, async_op: bool) -> Work | None:
    """Check the arguments, agree with the other ranks, and move."""
    if not dist.is_initialized():
        mailbox = Mailbox(None, rank=0, world=1)
    else:
        mailbox = Mailbox(group or dist.group.WORLD, dist.get_rank(group), dist.get_world_size(group))
    if mailbox.rank < 0:
        warnings.warn(f"{name} called on a rank that does not belong to the given group", stacklevel=4)
        return None
    call = None
    try:
        call = check(mailbox)
        claim = call.claim(name, mailbox)
    # Whatever it is, the others must hear of it, or they would wait for this rank until the time-out.
    except Exception as error:
        call, problem, nothing = None, str(error), [0] * mailbox.world
        claim = Claim((), nothing, nothing, lambda: problem, fault=True)
    agreement, moving = Agreement(mailbox, claim), Pending()

    def finish() -> None:
        try:
            agreement.settle(moving)
        except ValueError as refusal:
            raise ValueError(f"{name} {refusal}") from None
        moving.wait()

    if call is not None:
        sent = [sum(claim.sends) - claim.sends[mailbox.rank]]
        if not claim.posted:
            finish()
            count(call.movement, sent)
            return call.own(group=mailbox.group, async_op=async_op)
        # Calls under way at the same time may have one size and so one tag: all their receives are posted at
        # once, in the order of the calls, and none later.
        moving = call.start(mailbox, sys.maxsize if async_op else WINDOW)
        count(call.movement, sent)
    if async_op:
        return Background(finish)
    finish()
    return None


class Background(Work):
    """Runs ``move`` in a thread of its own.

    gloo's messages do not say whether they have arrived except to a thread that waits for them. So the thread
    is what makes ``is_completed()`` true without a ``wait()``, and merges what arrives while the caller
    computes.
    """

    def __init__(self, move: Callable[[], None]) -> None:
        super().__init__()
        self._end = Future[None]()
        arguments = move, torch.is_inference_mode_enabled()
        Thread(target=self._run, args=arguments, name="shardtrain-collective", daemon=True).start()

    def _run(self, move: Callable[[], None], inference: bool) -> None:
        try:
            # Inference mode belongs to a thread, and tensors made in it may only be written in it.
            with torch.inference_mode(inference):
                move()
        except BaseException as error:
            self._end.set_exception(error)
        else:
            self._end.set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._end.result(None if timeout is None else timeout.total_seconds())
        return True

    def is_completed(self) -> bool:
        return self._end.done()


# What a public collective demands of this rank's own arguments. Each refusal is one sentence that says what
# was expected and what was found, raised here, on one rank; ``agreement.py`` brings it to the others.


def _listed(value: list[Tensor], name: str, world: int) -> dict[str, Tensor]:
    """Return the ``world`` items of a list by their names."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"expected {name} to be a list of {world} tensors, found {type(value).__name__}")
    if len(value) != world:
        raise ValueError(f"expected {name} to hold {world} tensors, one per rank, found {len(value)}")
    return {f"{name}[{index}]": item for index, item in enumerate(value)}


def _flat(
    mailbox: Mailbox, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return flat views to read and to write, of dense tensors of one dtype on a device that can be used."""
    items = {**inputs, **outputs}
    for name, item in items.items():
        if not isinstance(item, Tensor):
            raise ValueError(f"expected {name} to be a tensor, found {type(item).__name__}")
    first = next(iter(items.values())).device
    for item in items.values():
        if item.layout is not torch.strided:
            raise ValueError(f"expected dense tensors, found {item.layout}")
        if item.device != first:
            raise ValueError(f"expected all tensors on one device, found {first} and {item.device}")
    if mailbox.group is not None and first.type not in native.device_types(mailbox.group):
        moved = ", ".join(native.device_types(mailbox.group))
        raise ValueError(f"expected tensors on a device that this group moves ({moved}), found {first}")
    reads = [_readable(item) for item in inputs.values()]
    writes = [_writable(item, name) for name, item in outputs.items()]
    # torch lets a complex tensor meet its real counterpart, so the flat views are compared.
    dtypes = dict.fromkeys(item.dtype for item in (*reads, *writes))
    if len(dtypes) > 1:
        raise ValueError(f"expected all tensors to have one dtype, found {', '.join(map(_short, dtypes))}")
    return reads, writes


def _readable(item: Tensor) -> Tensor:
    """Return ``item`` flat, contiguous, outside autograd; complex values as pairs of real ones."""
    plain = item.detach().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    return plain.contiguous().view(-1)


def _writable(item: Tensor, name: str) -> Tensor:
    """Return ``item`` itself under a flat view; what cannot be written through one is refused."""
    plain = item.detach()
    if not plain.is_contiguous() or plain.is_conj() or plain.is_neg():
        raise ValueError(
            f"expected {name} to be contiguous, found strides {item.stride()} of {_shape([item])}"
        )
    return (torch.view_as_real(plain) if plain.is_complex() else plain).view(-1)


def _splits(sizes: Sequence[int] | None, item: Tensor, name: str, world: int) -> list[int]:
    """Return elements for each rank from rows: ``[3, 1]`` of a ``[4, 5]`` tensor is ``[15, 5]``."""
    if item.dim() == 0:
        raise ValueError(f"expected {name} to have a first dimension to split, found a tensor without any")
    rows = item.shape[0]
    if not sizes:
        if rows % world:
            raise ValueError(f"expected {name} to have rows for {world} ranks alike, found {_shape([item])}")
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


def _rows(world: int, whole: tuple[str, Tensor, Tensor], part: tuple[str, Tensor, Tensor]) -> list[Tensor]:
    """Return each rank's part of ``whole``: of both the name, the tensor as given, and its flat view."""
    elements, flat = part[2].numel(), whole[2]
    if flat.numel() != world * elements:
        raise ValueError(
            f"expected {whole[0]} of {world} x {elements} elements for {part[0]} {_shape([part[1]])}, "
            f"found {_shape([whole[1]])}"
        )
    return list(flat.view(world, -1)) if elements else [flat] * world


def _shape(items: Sequence[Tensor]) -> str:
    """Return ``float32 [3, 2], [3]``."""
    where = "" if items[0].is_cpu else f" on {items[0].device.type}"
    return f"{_short(items[0].dtype)} {', '.join(str(list(item.shape)) for item in items)}{where}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

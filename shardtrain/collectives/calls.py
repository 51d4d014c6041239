"""The public collectives: arguments are checked, ranks agree, and the collective runs.

What differs from ``torch.distributed``'s collectives of these names:

- on gloo they are built from messages (``messages.py``), with sums in a fixed tree and fp32 accumulation:
  about twice as fast as gloo's own at tens of megabytes. Stacked outputs and uneven lists work;
- arguments that do not fit, on any rank, raise one ``ValueError`` with the same text on every rank, before
  any payload moves (``agreement.py``). For that a call needs one more round trip, so it is slower than gloo's
  own below 4 MiB.

With ``async_op=True`` a thread agrees and moves, if the backend is gloo. On other backends ranks agree inside
the call, and the backend's own ``Work`` is returned. The meter counts the payload, not the agreement.
"""

from __future__ import annotations

import functools
import warnings
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp, Work
from torch.utils._pytree import tree_leaves

from shardtrain.collectives.agreement import Row, check_agreement, start_sharing
from shardtrain.comm import backends
from shardtrain.comm.arithmetic import check_op, op_name
from shardtrain.comm.messages import Mailbox, start_exchange, start_reduce_scatter
from shardtrain.comm.process_group import guarded
from shardtrain.comm.trace import ALL_TO_ALL, GATHER, REDUCE, Movement, count
from shardtrain.pieces.piece import refuse_pieces

Op = dist.ReduceOp.RedOpType
Group = dist.ProcessGroup
P = ParamSpec("P")
R = TypeVar("R")

# A rank's part of an argument: all of a tensor, one of its equal parts, some of its rows, or a list's tensor.
Kind = Literal["all", "equal", "rows", "list"]


class Side:
    """An ``argument`` that a call reads or writes. ``rows``: of each rank's part; None: equally many."""

    def __init__(self, name: str, argument: Any, kind: Kind, rows: Sequence[int] | None = None) -> None:
        self.name = name
        self.argument = argument
        self.kind = kind
        self.rows = rows
        self.items: list[Tensor] = []  # its tensors; this and what follows since `check`
        self.flat: list[Tensor] = []  # these as detached vectors, complex values as pairs of real ones
        self.parts: list[Tensor] = []  # each rank's part of these

    def check(self, world: int) -> None:
        """Raise ValueError unless these are dense, contiguous tensors with a part for each rank."""
        name = self.name
        items = self.argument if self.kind == "list" else [self.argument]
        if not isinstance(items, (list, tuple)):
            raise ValueError(f"expected {name} to be a list of {world} tensors, found {type(items).__name__}")
        if self.kind == "list" and len(items) != world:
            raise ValueError(f"expected {name} to hold {world} tensors, one per rank, found {len(items)}")
        for item in items:
            if not isinstance(item, Tensor):
                raise ValueError(f"expected a tensor in {name}, found {type(item).__name__}")
            if item.layout is not torch.strided:
                raise ValueError(f"expected dense tensors, found {item.layout}")
            if not item.is_contiguous() or item.is_conj() or item.is_neg():
                raise ValueError(f"expected {name} to be contiguous, found strides {item.stride()}")
        self.items = [*items]
        tensors = [item.detach() for item in items]
        self.flat = [(torch.view_as_real(t) if t.is_complex() else t).view(-1) for t in tensors]
        self.parts = self._cut(world)

    @property
    def sizes(self) -> list[int]:
        """The bytes of each rank's part."""
        return [part.nbytes for part in self.parts]

    def _cut(self, world: int) -> list[Tensor]:
        """Return the ``parts``. fp32 ``[4, 5]``, split 3, 1 by rows, has parts of 15 and 5 elements."""
        if self.kind == "list":
            return self.flat
        if self.kind == "all":
            return self.flat * world
        first = self.items[0]
        rows = first.shape[0] if self.kind == "rows" and first.dim() else first.numel()
        splits = self.rows or [rows // world] * world
        if not self.rows and rows % world:
            raise ValueError(f"expected {self.name} to have equal parts for {world} ranks, found {self}")
        are_splits = all(isinstance(size, int) and size >= 0 for size in splits)
        if not are_splits or len(splits) != world or sum(splits) != rows:
            wanted = f"{world} split sizes of at least 0 that add up to the {rows} rows of {self.name}"
            raise ValueError(f"expected {wanted}, found {list(splits)}")
        elements = self.flat[0].numel() // max(rows, 1)
        return list(self.flat[0].split([size * elements for size in splits]))

    def __str__(self) -> str:
        """Return dtype and shapes, such as ``float32 [3, 2], [3]``."""
        first = self.items[0]
        shapes = ", ".join(str(list(item.shape)) for item in self.items)
        where = "" if first.is_cpu else f" on {first.device.type}"
        return f"{str(first.dtype).removeprefix('torch.')} {shapes}{where}"


class CollectiveCall(NamedTuple):
    """One call of a collective. ``function``: the backend's, for flat outputs and inputs."""

    name: str
    movement: Movement
    output: Side
    input: Side
    function: Callable[..., Work | None]
    op: Op | None = None


def _torchs_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap ``function`` so that it also takes torch's keywords, such as ``output_tensor``."""

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
    sides = Side("output", output, "equal"), Side("input", input, "all")
    call = CollectiveCall("all_gather_into_tensor", GATHER, *sides, backends.all_gather)
    return _run(call, group, async_op)


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
    sides = Side("output", output, "all"), Side("input_list", input_list, "list")
    function = partial(dist.reduce_scatter, op=op)
    return _run(CollectiveCall("reduce_scatter", REDUCE, *sides, function, op), group, async_op)


@_torchs_keywords
def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Op = ReduceOp.SUM, group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Merge the ``input`` of all ranks with ``op``; rank ``r`` gets the ``r``-th part of it.

    ``input``: ``[world * n, ...]`` or ``[world, n, ...]``, the same on every rank. ``output``: ``[n, ...]``.
    Two ranks with ``[1 2 3 4]`` and ``[10 20 30 40]``: rank 0 gets ``[11 22]``, rank 1 ``[33 44]``.
    """
    sides = Side("output", output, "all"), Side("input", input, "equal")
    function = partial(backends.reduce_scatter, op=op)
    return _run(CollectiveCall("reduce_scatter_tensor", REDUCE, *sides, function, op), group, async_op)


@_torchs_keywords
def all_to_all(
    output_list: list[Tensor], input_list: list[Tensor], group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Send ``input_list[r]`` to rank ``r`` and fill ``output_list[r]`` with what rank ``r`` sends here.

    Both lists hold ``world`` tensors of one dtype; what one rank sends has as many elements as the other
    expects. Two ranks with ``[1] [2 3]`` and ``[4 5] [6]``: rank 0 gets ``[1] [4 5]``, rank 1
    ``[2 3] [6]``.
    """
    sides = Side("output_list", output_list, "list"), Side("input_list", input_list, "list")
    return _run(CollectiveCall("all_to_all", ALL_TO_ALL, *sides, dist.all_to_all), group, async_op)


@_torchs_keywords
def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Split ``input`` by rows, send the ``r``-th part to rank ``r``, and concatenate what arrives.

    Split sizes count rows (first dimension), one per rank; without them all parts have as many rows.
    Two ranks with ``[1 2 3]`` split 1, 2 and ``[4 5 6]`` split 2, 1: rank 0 gets ``[1 4 5]`` into output
    splits 1, 2 and rank 1 ``[2 3 6]`` into 2, 1.
    """
    written = Side("output", output, "rows", output_split_sizes)
    read = Side("input", input, "rows", input_split_sizes)
    call = CollectiveCall("all_to_all_single", ALL_TO_ALL, written, read, dist.all_to_all_single)
    return _run(call, group, async_op)


def _run(call: CollectiveCall, group: Group | None, async_op: bool) -> Work | None:
    """Check the arguments, agree with the other ranks, and run the collective."""
    group = group or dist.group.WORLD
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    if rank < 0:
        warnings.warn(f"{call.name} called on a rank that does not belong to the given group", stacklevel=4)
        return None
    try:
        row = _check(call, group, rank, world)
        count(call.movement, [sum(row.sent) - row.sent[rank]])
    # The others must learn of any error, or they would wait for this rank until the time-out.
    except Exception as error:
        row = Row(str(error), True, 0, [0] * world, [0] * world)
    with guarded(group):
        # Started here, since rows of different ranks meet in the order of the calls, not of the threads.
        rows = start_sharing(row, group, rank)
        on_cpu = row.is_wrong or call.input.items[0].is_cpu
        if not (group is None or world == 1 or (backends.has_gloo(group) and on_cpu)):
            check_agreement(call.name, rows())
            return _backends_own(call)(group=group, async_op=async_op)

        def finish() -> None:
            _move(call, Mailbox(group, rank, world), check_agreement(call.name, rows()))

        if async_op:
            return Background(finish, group)
        finish()
    return None


class Background(Work):
    """A call that runs in a thread, since gloo reports a message only to a thread that waits for it."""

    def __init__(self, move: Callable[[], None], group: Group | None = None) -> None:
        super().__init__()
        self._group = group
        self._end = Future[None]()
        Thread(target=self._run, args=(move, torch.is_inference_mode_enabled()), daemon=True).start()

    def _run(self, move: Callable[[], None], inference: bool) -> None:
        try:
            # Inference mode is per thread, and tensors made in it may only be written in it.
            with torch.inference_mode(inference):
                move()
            self._end.set_result(None)
        except BaseException as error:
            self._end.set_exception(error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        with guarded(self._group):
            self._end.result(None if timeout is None else timeout.total_seconds())
        return True

    def is_completed(self) -> bool:
        return self._end.done()


def _check(call: CollectiveCall, group: Group | None, rank: int, world: int) -> Row:
    """Return the row that describes the call. Its tensors have one dtype, and a device that ``group`` moves.

    Raises:
        ValueError: this rank's arguments do not fit; with what was expected and what was found.
    """
    output = call.output
    input = call.input
    refuse_pieces(call.name, tree_leaves([output.argument, input.argument]))
    output.check(world)
    input.check(world)
    every = [*input.items, *output.items]
    device = input.items[0].device
    dtype = input.items[0].dtype
    other = next((item.device for item in every if item.device != device), None)
    if other is not None:
        raise ValueError(f"expected all tensors on one device, found {device} and {other}")
    if group is not None and device.type not in backends.device_types(group):
        moved = ", ".join(backends.device_types(group))
        raise ValueError(f"expected tensors on a device that this group moves ({moved}), found {device}")
    # torch lets a complex tensor meet its real counterpart.
    if any(item.dtype.to_real() != dtype.to_real() for item in every):
        dtypes = ", ".join(dict.fromkeys(str(item.dtype) for item in every))
        raise ValueError(f"expected all tensors to have one dtype, found {dtypes}")
    if call.movement is REDUCE:
        check_op(call.op, dtype)
    if input.sizes[rank] != output.sizes[rank]:
        fit = f"expected {output.name} to fit {input.name} between {world} ranks"
        raise ValueError(f"{fit}, found {output} for {input}")
    words = f"{call.name}{'' if call.op is None else f' ({op_name(call.op)})'} of {input}"
    # What must be the same on every rank; of an all-to-all, not the shapes.
    same = f"{call.name} of {dtype.to_real()} on {device.type}" if call.movement is ALL_TO_ALL else words
    return Row(words, False, zlib.crc32(same.encode()), input.sizes, output.sizes)


def _move(call: CollectiveCall, mailbox: Mailbox, tag: int) -> None:
    """Run the collective by messages, all with the tag ``tag``.

    An input that shares memory with the output is copied, unless this rank's part is at one place in both.
    """
    outgoing = call.input.parts
    incoming = call.output.parts
    rank = mailbox.rank
    read_storages = {part.untyped_storage().data_ptr() for part in outgoing}
    written_storages = {part.untyped_storage().data_ptr() for part in incoming}
    is_in_place = call.movement is not ALL_TO_ALL and outgoing[rank].data_ptr() == incoming[rank].data_ptr()
    if read_storages & written_storages - {0} and not is_in_place:  # 0: of tensors without elements
        outgoing = [part.clone() for part in outgoing]
    if call.op is None:
        start_exchange(mailbox, tag, outgoing, incoming)()
    else:
        out = incoming[rank]
        start_reduce_scatter(mailbox, tag, outgoing, out.dtype, call.op, out=out)()


def _backends_own(call: CollectiveCall) -> Callable[..., Work | None]:
    """Return the backend's own collective, bound to its tensors."""
    sides = call.output, call.input
    flat = [side.flat if side.kind == "list" else side.flat[0] for side in sides]
    splits = []
    for side in sides:
        if side.kind == "rows":
            splits.append([len(part) for part in side.parts])
    return partial(call.function, *flat, *splits)

"""The segments of a unit: one rank's shard of its parameters (`Segment`), what each shows (`ShardedParam`).

A unit's parameters fall into segments, each of one dtype, one dtype to compute in, one device and one
``requires_grad``, as `shard` finds them. One that is frozen enters no reduction. It has up to three storages:

``local``  this rank's shard: its interval of the flat vector. The optimizer updates it; it is always valid
``wire``   the shard in the dtype that the unit computes in, cast before each forward; mostly ``local`` itself
``full``   the full flat vector in that dtype; a gather fills it from ``wire``, a release empties it. Of ranks
           that share memory it is one, in which each ``wire`` lies: nothing is filled or emptied

With offload, ``local`` lies in host memory, each gather casts a copy of it, and ``full`` is on the device.

At rest each parameter shows its part of ``local``, with that part's gradient. While its unit computes it
shows its shaped view of ``full``. Its ``.grad`` is the user's until a backward begins, which puts it aside.
Autograd then accumulates one of the full shape, until `Reduction.take`. Parameter objects stay the same: only
``.data``, ``.grad`` and the class change, and autograd's version counters do not.

``full`` is one tensor until users convert it. Autograd may have saved a parameter or a view of one, such as
``weight.t()``. Filling the resized storage again makes both valid; a new tensor would leave stale memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from shardtrain.comm.channel import Channel
from shardtrain.comm.transport import Vector
from shardtrain.engine.precision import Precision
from shardtrain.layout import Cut, Layout
from shardtrain.pieces.parameter import Shard, Shards
from shardtrain.pieces.part import Part, dense_stride
from shardtrain.pieces.piece import Owners, Piece

ALIGN_BYTES = 64  # of each parameter: as torch aligns CPU tensors, so that kernels compute the same bits


def plain_name(name: str) -> str:
    """Return ``name`` as state dicts have it, without the part that torch's ``checkpoint_wrapper`` adds."""
    return name.replace("_checkpoint_wrapped_module.", "")


class ParamInfo(NamedTuple):
    """A parameter's name, and every (module, attribute) that holds it, each with a name of its own."""

    name: str
    holders: tuple[tuple[nn.Module, str], ...]
    names: tuple[str, ...]

    @property
    def holder(self) -> nn.Module:
        return self.holders[0][0]

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that all holders hold. Raises ValueError if one has none, or another one."""
        parameters = list[nn.Parameter]()
        for name, (module, attribute) in zip(self.names, self.holders, strict=True):
            parameter = module._parameters.get(attribute)
            if parameter is None:
                raise ValueError(
                    f"{name} is no longer where shard() found it; remove, prune or parametrize parameters "
                    "before shard(), or shard another model, with the weights of full_state_dict(model)"
                )
            parameters.append(parameter)
        first = parameters[0]
        for name, parameter in zip(self.names, parameters, strict=True):
            if parameter is not first:
                raise ValueError(
                    f"{self.names[0]} and {name} were one parameter when shard() was called, and are two "
                    "now: tie them again, one object in both places (after to_empty(), too), or untie them "
                    "before shard()"
                )
        return first


class ShardedParam:
    """One parameter of a segment, which shows its local shard or its full value.

    ``part``: the elements that this rank owns, which begin at ``offset`` in the rank's interval.
    ``local_view``, ``full_view``: views of ``local`` and ``full`` in the shapes that the parameter shows.
    ``owners``: of its pieces. ``marks``: whether there are such; not on a simulated rank, nor on a
    single one without virtual ranks. ``address``: where ``local_view`` lies.
    """

    def __init__(self, info: ParamInfo, part: Part, offset: int) -> None:
        self.info = info
        self.name = info.name
        self.hold(info.parameter)
        self.part = part
        self.offset = offset
        self.address = 0

    def hold(self, param: nn.Parameter) -> None:
        """Switch ``param`` from now on."""
        self.param = param
        self.own_class: type[nn.Parameter] = getattr(param, "own", type(param))
        self.class_at_rest: type[nn.Parameter] | None = None  # unknown

    def describe(self, shards: Shards, unit: str) -> type[nn.Parameter]:
        """Tell ``shards`` what the parameter shows at rest; return its class there. ``unit``: its title."""
        owners = self.owners._replace(subject=f"{self.name}, a parameter at rest,") if self.marks else None
        # One without values keeps its class: torch replaces it to materialise it.
        self.class_at_rest = self.own_class
        if issubclass(self.own_class, nn.Parameter) and not self.param.is_meta:
            self.class_at_rest = shards.add(self.param, Shard(owners, self.name, unit, self.part))
        return self.class_at_rest

    def set_views(self, local: torch.Tensor, full_view: torch.Tensor, owners: Owners, marks: bool) -> None:
        """Set the views to show: the part of this rank's interval ``local`` at rest, and ``full_view``."""
        self.local_view = self.part_of(local)
        self.full_view = full_view
        self.owners = owners
        self.marks = marks
        self.class_at_rest = None
        self.address = address_of(self.local_view)
        if not self.part.numel:
            with torch.no_grad():  # as views of reduced gradients are made
                empty = self.part_of(local)
            self._empty_grad = Piece.on(empty, owners) if marks else empty

    def part_of(self, interval: torch.Tensor) -> torch.Tensor:
        """Return a view of this parameter's part of ``interval``, the rank's, in the shape at rest."""
        return self.part.at_rest(interval, self.offset)

    def part_of_whole(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of ``whole``, in its shape at rest. Raises ValueError for another shape."""
        if whole.shape != self.part.shape:
            raise ValueError(
                f"parameter {self.name} or its gradient was given shape {tuple(whole.shape)} "
                f"while it was whole, expected {self.part.shape}"
            )
        return self.part.at_rest(self.part.of(whole))

    # In a step only these write ``.grad``. At a backward's end `set_grad` puts back what was aside, and
    # `give_grad` adds the mean.

    def take_grad(self) -> torch.Tensor | None:
        """Return ``.grad``, and let it be None."""
        grad = self.param.grad
        if grad is not None:
            self.param.grad = None
        return grad

    def set_grad(self, grad: torch.Tensor) -> None:
        """Set ``.grad``, in the shape at rest, also while the parameter shows its full value."""
        if self.marks and not isinstance(grad, Piece):
            grad = Piece.on(grad, self.owners)
        self._write_grad(grad)

    def lend_grad(self, whole: torch.Tensor) -> None:
        """Let autograd add to ``whole``, of the full shape, in place, until `take_grad`."""
        self.param.grad = whole

    def give_grad(self, value: torch.Tensor) -> None:
        """Add ``value``, a new view of this rank's part in the shape at rest, to the gradient."""
        grad = self.param.grad
        if grad is not None:
            grad.add_(value)
            return
        self.set_grad(value if self.part.numel else self._empty_grad)

    def unmark_grad(self) -> Piece | None:
        """Let ``.grad`` be plain until `mark_grad`; return the piece that it was, if it was one."""
        grad = self.param.grad
        if not isinstance(grad, Piece):
            return None
        self._write_grad(grad.plain)
        return grad

    def mark_grad(self, piece: Piece) -> None:
        """Undo `unmark_grad`, unless ``.grad`` is another by now."""
        if self.param.grad is piece.plain:
            self._write_grad(piece)

    def _write_grad(self, grad: torch.Tensor) -> None:
        param = self.param
        try:
            param.grad = grad
        except RuntimeError:  # torch compares shapes, dtypes and devices with those of a full value
            shown = param.data
            param.data = self.local_view
            param.grad = grad
            param.data = shown


class Segment:
    """The parameters of one unit that share dtypes, device and ``requires_grad``, as one flat vector.

    The constructor is collective: all ranks get rank 0's values, on ``device``.
    """

    def __init__(
        self,
        infos: Sequence[ParamInfo],
        channel: Channel,
        precision: Precision,
        cut: Cut,
        device: torch.device,
    ) -> None:
        params = [info.parameter for info in infos]
        self._precision = precision
        compute = precision.of_parameter(params[0], infos[0].holder)
        narrowest = min(params[0].element_size(), compute.itemsize)
        align = max(1, ALIGN_BYTES // narrowest)
        self.layout: Layout = cut([param.numel() for param in params], align)
        self.spans = self.layout.spans(channel.rank)
        self.members: list[ShardedParam] = []
        # One rank has all of each parameter. Its virtual ranks cut them in the order of memory.
        is_whole = self.layout.whole or (channel.world == 1 and not self.layout.virtual)
        for info, param, (start, stop, offset) in zip(infos, params, self.spans, strict=True):
            part = Part(info.name, tuple(param.shape), dense_stride(param), start, stop, is_whole)
            self.members.append(ShardedParam(info, part, offset))
        self.channel = channel
        like = torch.empty(0, dtype=params[0].dtype, device=device)
        for param in params:
            param.grad = None
        self._allocate(self.from_rank_0(params, like))

    def from_rank_0(self, values: Sequence[torch.Tensor | None], like: torch.Tensor) -> torch.Tensor:
        """Broadcast rank 0's ``values`` of the parameters; return this rank's interval of them (1-D).

        Values of other ranks are ignored. The full vector is freed on return, before the next segment's is
        made. ``like`` has the dtype and device to use; on the meta device nothing is sent.
        """
        full = like.new_zeros(self.layout.padded)
        all_ranks = self.channel.all_ranks
        if not full.is_meta:
            for value, view in zip(values, self.views_of(full), strict=True):
                if value is not None and all_ranks.rank == 0:
                    view.copy_(value.detach())
            all_ranks.broadcast(full)
        interval = full[self.layout.interval(self.channel.rank)]
        return interval if interval.numel() == full.numel() else interval.clone()

    def _allocate(self, local: torch.Tensor) -> None:
        """Allocate the segment's storages, and show ``local``, copied into this rank's interval."""
        first = self.members[0]
        compute = self._precision.of_parameter(first.param, first.info.holder)
        gradient_dtype = self._precision.of_gradient(compute)
        channel = self.channel
        virtual = self.layout.virtual
        # Virtual ranks: where several gradients are summed before they are sent, the sums are not rounded.
        if virtual > channel.world or (virtual and channel.stages):
            gradient_dtype = torch.promote_types(gradient_dtype, local.dtype)
        like = local.new_empty(0, dtype=compute)
        self.full, wire = channel.allocate(self.layout, like, gradient_dtype)
        self.local = wire if compute == local.dtype else torch.empty_like(local, device=wire.device)
        self.wire = self.local if channel.uploads else wire  # each upload casts
        self.local.copy_(local)
        # Of the dtype in which gradients are kept and sent.
        self.like_gradient = self.local.new_empty(0, dtype=gradient_dtype)
        starts = self.layout.starts  # of any rank's part of any parameter, in the flat vector
        self.starts = torch.tensor(starts, dtype=torch.int64, device=self.full.device)
        self.zeros = torch.zeros(len(starts), dtype=gradient_dtype, device=self.full.device)
        self.flat = Vector(self.full, self.wire, self.layout)
        self._storage = self.full.untyped_storage()
        self.memory = self._storage._cdata
        self._releases = not (channel.in_place or self.full.is_meta)
        alone = channel.silent
        if virtual and channel.all_ranks.world == 1:
            alone = type(self.local) is not torch.Tensor  # a plan's fake tensors
        owners = Owners(weakref.ref(channel), self.full.device, self.layout.whole, virtual)
        for member, view, span in zip(self.members, self.views_of(self.full), self.spans, strict=True):
            parts = self.layout.virtual_spans(span, channel.rank) if virtual else ()
            owners_of_member = owners._replace(parts=parts, elements=member.part.elements, part=member.part)
            member.set_views(self.local, view, owners_of_member, not alone)
            become(member.param, member.local_view)
        self.hold_full(False)

    def views_of(self, full: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter's view of the flat vector ``full``, in its own shape."""
        views = list[torch.Tensor]()
        for start, member in zip(self.layout.offsets, self.members, strict=True):
            part = member.part
            views.append(full.as_strided(part.shape, part.stride, full.storage_offset() + start))
        return views

    def cast(self) -> None:
        """Copy ``local`` into ``wire``, while no rank reads it."""
        if self.wire is not self.local:
            self.wire.copy_(self.local)

    def hold_full(self, allocated: bool) -> None:
        """Allocate the memory of ``full``, or free it."""
        if self._releases:
            self._storage.resize_(self.full.nbytes if allocated else 0)

    @property
    def trains(self) -> bool:
        return any(member.param.requires_grad for member in self.members)

    def converts(self, local: torch.Tensor) -> bool:
        """Return whether ``local`` has another dtype or device than this rank's interval."""
        return (local.dtype, local.device) != (self.local.dtype, self.local.device)

    def adopt(self, local: torch.Tensor) -> None:
        """Use ``local``, which is laid out like it, as this rank's interval."""
        if self.converts(local):
            self._allocate(local)
            return
        self.local.copy_(local)
        for member in self.members:
            member.param.data = member.local_view


def address_of(tensor: torch.Tensor) -> int:
    """Return an identifier of where ``tensor`` lies: its address, or an empty one's storage."""
    return tensor.data_ptr() or int(tensor.untyped_storage()._cdata)


def become(param: nn.Parameter, tensor: torch.Tensor) -> None:
    """Make ``param`` hold ``tensor``, also of another type of device, and stay the same object."""
    if param.is_meta == tensor.is_meta:
        param.data = tensor
        return
    fresh = nn.Parameter(tensor, param.requires_grad)
    fresh.__dict__.update(param.__dict__)
    torch.utils.swap_tensors(param, fresh)  # type: ignore[no-untyped-call]

"""A segment: what one rank owns of a unit's parameters, and what these parameters show.

A unit's parameters fall into segments of one dtype and one ``requires_grad``, so that frozen parameters never
enter a reduction. A segment has two or three storages:

``local``  this rank's shard: its interval of the flat vector. The optimizer updates it; it is always valid
``wire``   the shard in the dtype that the unit computes in, cast before each forward; mostly ``local`` itself
``full``   the full flat vector in that dtype; a gather fills it from ``wire``, a release empties it

With offload, ``local`` and ``wire`` lie in host memory and ``full`` on the device that computes.

At rest each parameter shows its piece of ``local`` with that piece's gradient (`shown`). While its unit
computes it shows its shaped view of ``full``, and has no gradient but the one that autograd just hands over.
The parameter objects stay the same: only ``.data`` and ``.grad`` change, and no version counter of autograd.

``full`` is one tensor for the life of the segment. Autograd may have saved a parameter or a view of one, such
as ``weight.t()``. Resizing the storage and filling it again makes both valid again; a new tensor would leave
the view with stale memory.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from shardtrain.comm.norms import GradientPiece, Owners
from shardtrain.comm.transport import Flat, Transport
from shardtrain.engine.deferred_init import InitialValues, become
from shardtrain.engine.precision import Precision
from shardtrain.layout import Cut, Layout, Piece

ALIGN_BYTES = 16  # NCCL's fast path, and 1,024 ranks waste no more than 0.2 % of a ResNet-50


class ParamInfo(NamedTuple):
    """One parameter of a unit: its fully qualified name, and every (module, attribute) that holds it."""

    name: str
    holders: tuple[tuple[nn.Module, str], ...]

    @property
    def holder(self) -> nn.Module:
        """The first module that holds it."""
        return self.holders[0][0]

    @property
    def parameter(self) -> nn.Parameter:
        module, attribute = self.holders[0]
        parameter = module._parameters.get(attribute)
        if parameter is None:
            raise ValueError(
                f"{self.name} is no longer where shard() found it; remove, prune or parametrize parameters "
                "before shard(), or shard another model, with the weights of full_state_dict(model)"
            )
        return parameter


class Segment:
    """The parameters of one unit that share their dtypes and ``requires_grad``, as one flat vector.

    Making one is collective: all ranks get rank 0's values.

    ``compute``: the dtype of ``full``. ``like_gradient``: empty, of the dtype in which gradients are summed
    up. ``traffic``: which movements go as int8. ``owned_elsewhere``: indices of parameters that are whole on
    another rank, so that there is nothing to update here.
    """

    def __init__(
        self,
        infos: Sequence[ParamInfo],
        transport: Transport,
        precision: Precision,
        cut: Cut,
        initial: InitialValues,
    ) -> None:
        self.infos = tuple(infos)
        self.params = [info.parameter for info in infos]
        self.shapes = [param.shape for param in self.params]
        self.strides = [dense_stride(param) for param in self.params]
        self._precision = precision
        self.traffic = precision.traffic(self.params[0], self.infos[0].holder)
        narrowest = min(self.params[0].element_size(), self._compute_dtype().itemsize)
        align = max(1, ALIGN_BYTES // narrowest)
        self.layout: Layout = cut([param.numel() for param in self.params], align)
        self.pieces: tuple[Piece, ...] = self.layout.pieces(transport.rank)
        sizes = zip(self.pieces, self.layout.sizes, strict=True)
        missing = [index for index, (piece, size) in enumerate(sizes) if piece.numel < size]
        self.owned_elsewhere = frozenset(missing if self.layout.whole else ())
        shaped = zip(self.shapes, self.pieces, strict=True)
        self.rest_shapes = [shape_at_rest(shape, piece.numel, self.layout.whole) for shape, piece in shaped]
        self.grads_away: dict[int, torch.Tensor] = {}  # those of local pieces, while parameters are full
        self.shows_full = False
        self._versions: list[int] = []  # of the parameters at the last cast, or when last shown in full
        self.transport = transport
        like = torch.empty(0, dtype=self.params[0].dtype, device=initial.device(self.params[0]))
        self._adopt(self.from_rank_0(self.params, like))
        for param, view in zip(self.params, self.local_views, strict=True):
            param.grad = None
            become(param, view)

    def from_rank_0(self, values: Sequence[torch.Tensor | None], like: torch.Tensor) -> torch.Tensor:
        """Broadcast rank 0's ``values`` of the parameters; return this rank's interval of them.

        Frees the full vector before the next one is made. Other ranks' values are not looked at. ``like``: of
        the dtype and device to use; on the meta device, nothing is sent.
        """
        full = like.new_zeros(self.layout.padded)
        all_ranks = self.transport.all_ranks
        if not full.is_meta:
            for value, view in zip(values, self.views_of(full), strict=True):
                if value is not None and all_ranks.rank == 0:
                    view.copy_(value.detach())
            all_ranks.broadcast(full)
        own = full[self.layout.interval(self.transport.rank)]
        return own if own.numel() == full.numel() else own.clone()

    def _compute_dtype(self) -> torch.dtype:
        return self._precision.of_parameter(self.params[0], self.infos[0].holder)

    def _adopt(self, local: torch.Tensor) -> None:
        """Give the segment memory, and this rank's interval the values of ``local``."""
        self.compute = self._compute_dtype()
        reduced = self._precision.of_gradient(self.compute)
        like = local.new_empty(0, dtype=self.compute)
        self.full, self.wire = self.transport.allocate(self.layout, like, reduced)
        same = self.compute == local.dtype
        self.local = self.wire if same else torch.empty_like(local, device=self.wire.device)
        self.local.copy_(local)
        self.like_gradient = self.local.new_empty(0, dtype=reduced)
        # This rank's piece of a gradient that others own whole; one each, since users may see and change it.
        self.no_grads = [self.full.new_empty(0, dtype=self.local.dtype) for _ in self.pieces]
        other = torch.float16 if local.dtype != torch.float16 else torch.bfloat16
        differs = self.full.dtype != local.dtype or self.full.device != self.local.device  # forgotten anyway
        self._other = None if differs else self.local.new_empty(0, dtype=other)
        owners = Owners(weakref.ref(self.transport), self.full.device, self.layout.whole)
        self._owners = owners if self.transport.all_ranks.world > 1 and not self.transport.silent else None
        self.flat = Flat(self.full, self.wire, self.layout, self.traffic.gather)
        self.full_bytes = self.full.nbytes
        self._storage = self.full.untyped_storage()
        self.memory = self._storage._cdata
        self._releases = not (self.transport.in_place or self.full.is_meta)
        self.full_views = self.views_of(self.full)
        self.local_views = [self.shown(i, self.part_of(self.local, i)) for i in range(len(self.pieces))]
        self._addresses = [_address(view) for view in self.local_views]
        self.empty_full()

    def views_of(self, full: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter's shaped view of a full flat vector."""
        rows = zip(self.layout.offsets, self.layout.sizes, self.shapes, self.strides, strict=True)
        return [full[at : at + size].as_strided(shape, stride) for at, size, shape, stride in rows]

    def part_of(self, local: torch.Tensor, index: int) -> torch.Tensor:
        """Return the piece of parameter ``index`` in an interval that is laid out as ``local`` is; 1-D."""
        piece = self.pieces[index]
        return local[piece.offset : piece.offset + piece.numel]

    def shown(self, index: int, piece: torch.Tensor) -> torch.Tensor:
        """Return a view of ``piece`` (1-D, of parameter ``index`` or its gradient) as it is shown at rest."""
        return shown(piece, self.rest_shapes[index], self.shapes[index], self.strides[index])

    def flattened(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Undo `shown`: 1-D, in the order of the flat vector."""
        return flattened(tensor, self.shapes[index], self.strides[index])

    def cast(self) -> None:
        """Bring ``wire`` up to date with ``local``, while no rank reads it."""
        self._versions = [param._version for param in self.params]
        if self.wire is not self.local:
            self.wire.copy_(self.local)

    def hold_full(self) -> None:
        """Give ``full`` its memory."""
        if self._releases:
            self._storage.resize_(self.full_bytes)

    def empty_full(self) -> None:
        """Give the memory of ``full`` back."""
        if self._releases:
            self._storage.resize_(0)

    def show_full(self) -> None:
        """Show every parameter in full; put the gradients of the local pieces away."""
        if self.shows_full:
            return
        for index, (param, view) in enumerate(zip(self.params, self.full_views, strict=True)):
            if param.grad is not None:
                self.put_grad_away(index)
            param.data = view
        self.shows_full = True
        self._versions = [param._version for param in self.params]

    def put_grad_away(self, index: int) -> None:
        """Let parameter ``index`` have no gradient until it shows its local piece again."""
        grad = self.params[index].grad
        if grad is not None:
            self.grads_away[index] = grad
            self.params[index].grad = None

    def show_grads(self) -> None:
        """Show the gradients of the local pieces, so that users may clear them; parameters stay in full."""
        while self.grads_away:
            index, grad = self.grads_away.popitem()
            param = self.params[index]
            param.data = self.local_views[index]  # torch compares shapes
            param.grad = grad
            param.data = self.full_views[index]

    def show_local(self) -> None:
        """Show every parameter's local piece, with its gradient."""
        for param, view in zip(self.params, self.local_views, strict=True):
            param.data = view
        while self.grads_away:
            index, grad = self.grads_away.popitem()
            self.params[index].grad = grad
        self.shows_full = False

    def forget_nodes(self) -> None:
        """Let autograd make other nodes for what is computed from now on, unless parameters are in full.

        It keeps one node per parameter while a graph holds it, and checks gradients against the shape that
        the parameter had when the node was made. Data of another dtype, for a moment, make it forget the
        node. So a loss on pieces reaches the hook that refuses it by name.
        """
        if self._other is not None and not self.shows_full:
            for param, view in zip(self.params, self.local_views, strict=True):
                param.data = self._other
                param.data = view

    def set_grad(self, index: int, grad: torch.Tensor | None) -> None:
        """Replace the gradient of this rank's piece of parameter ``index``, on show or put away."""
        if grad is not None and self._owners is not None:
            grad = GradientPiece.of(grad, self._owners)
        self.grads_away.pop(index, None)
        self.params[index].grad = None if self.shows_full else grad
        if self.shows_full and grad is not None:
            self.grads_away[index] = grad

    def held_grad(self, index: int) -> torch.Tensor | None:
        """Return the gradient of this rank's piece of parameter ``index``, on show or put away."""
        return self.grads_away.get(index, self.params[index].grad)

    def give_grad(self, index: int, piece: torch.Tensor) -> None:
        """Add ``piece`` (1-D, this rank's part) to the gradient of parameter ``index``."""
        piece, held = self.shown(index, piece), self.held_grad(index)
        if held is not None:
            held.add_(piece)
        else:
            self.set_grad(index, piece)

    def cut_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep this rank's part of state that ``optimizer`` has made of whole parameters, before `shard`."""
        for index, (param, piece) in enumerate(zip(self.params, self.pieces, strict=True)):
            state = optimizer.state.get(param, {})
            for key, value in state.items():
                whole = isinstance(value, torch.Tensor) and value.shape == self.shapes[index]
                if whole and key != "step" and self.rest_shapes[index] != self.shapes[index]:
                    flat = in_memory_order(value, self.strides[index])
                    state[key] = self.shown(index, flat[piece.start : piece.stop].clone())

    # what users change

    def changed(self) -> list[str]:
        """Return the names of parameters that users changed since `cast`, or since they are shown in full."""
        addresses = [_address(view) for view in self.full_views] if self.shows_full else self._addresses
        rows = zip(self.infos, self.params, self._versions, addresses, strict=True)
        return [
            info.name
            for info, param, version, address in rows
            if param._version != version or _address(param) != address
        ]

    def was_replaced(self) -> bool:
        """Return whether a user's ``.to()``, ``to_empty()`` or ``.data =`` gave parameters other storage.

        The old storage is held here, so a new one has another address.
        """
        for info, param, address in zip(self.infos, self.params, self._addresses, strict=True):
            module, attribute = info.holders[0]
            if module._parameters.get(attribute) is not param or _address(param) != address:
                return True
        return False

    def held(self) -> torch.Tensor:
        """Return the pieces that the parameters hold now, laid out as ``local`` is.

        Raises ValueError if a piece has another size than this rank's part, or dtypes or devices differ.
        """
        assert not self.shows_full
        self.params = [info.parameter for info in self.infos]
        first = self.params[0]
        local = first.new_zeros(self.layout.length(self.transport.rank))
        for index, (info, param) in enumerate(zip(self.infos, self.params, strict=True)):
            own = self.shown(index, self.part_of(local, index))
            if not param.is_leaf:
                raise ValueError(
                    f"parameter {info.name} was replaced by the result of a computation, through which "
                    "gradients cannot flow here; do that (torch.func.functional_call) with an unsharded model"
                )
            if param.shape != own.shape:
                raise ValueError(
                    f"parameter {info.name} now has shape {tuple(param.shape)} on this rank, but its local "
                    f"piece has {tuple(own.shape)}; change whole parameters inside "
                    "shardtrain.unsharded(model)"
                )
            if (param.dtype, param.device) != (first.dtype, first.device):
                raise ValueError(
                    f"parameter {info.name} is now {param.dtype} on {param.device}, while "
                    f"{self.infos[0].name} of the same unit is {first.dtype} on {first.device}; "
                    "convert the whole model, or convert it before shard()"
                )
            own.copy_(param.data)
        return local

    def take_over(self, held: torch.Tensor) -> None:
        """Make what `held` returned the local interval."""
        if (held.dtype, held.device) == (self.local.dtype, self.local.device):
            self.local.copy_(held)
        else:
            self._adopt(held)
        self.show_local()

    def copied(self, memo: Mapping[int, Any]) -> Segment:
        """Return a segment over copies of its modules, whose parameters hold copied pieces. Collective.

        ``memo``: from the ids of modules to their copies, as ``copy.deepcopy`` leaves it.
        """
        twin = copy.copy(self)
        twin.infos = tuple(
            ParamInfo(info.name, tuple((memo[id(module)], attribute) for module, attribute in info.holders))
            for info in self.infos
        )
        twin.grads_away = {}
        twin._adopt(twin.held())
        twin.show_local()
        return twin


def _address(tensor: torch.Tensor) -> int:
    """Return where it lies; an empty tensor has no address, so its storage identifies it on all ranks."""
    return tensor.data_ptr() or int(tensor.untyped_storage()._cdata)


# Two forms of a tensor of a parameter's shape, since channels_last has an order of memory of its own:
#
#     flattened   1-D, in the order of the parameter's memory: what moves between ranks and into files
#     shown       in the shape that the parameter has at rest: what an optimizer and its state have
#
# At rest a piece of n elements has as many dimensions as its parameter, (n, 1, 1, 1) for a filter, so that
# parameter groups chosen by ``p.ndim`` are the same before and after `shard`. A scalar's piece has one
# dimension, since it may be empty. The owner of a whole parameter shows it in its own shape.


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether ``stride`` visits each element of ``shape`` once, without gaps (channels_last does)."""
    if 0 in shape:
        return len(stride) == len(shape)
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1 and step != expected:
            return False
        expected *= size
    return True


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return ``tensor``'s strides; if they leave gaps, dense ones in the same order."""
    return torch.empty_like(tensor, device="meta").stride()


def in_memory_order(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Return ``tensor`` as 1-D, in the order of ``stride``; a view when it already lies that way."""
    if tensor.stride() != stride:
        ordered = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
        tensor = ordered.copy_(tensor)
    return tensor if stride == (1,) else tensor.as_strided((tensor.numel(),), (1,))


def shape_at_rest(shape: Sequence[int], numel: int, whole: bool) -> tuple[int, ...]:
    """Return the shape in which ``numel`` elements of a parameter are shown; ``whole``: all or nothing."""
    if whole and shape and numel == math.prod(shape):
        return tuple(shape)
    return numel, *(1 for _ in shape[1:])


def shown(
    piece: torch.Tensor, at_rest: Sequence[int], shape: Sequence[int], stride: tuple[int, ...]
) -> torch.Tensor:
    """Return ``piece`` (1-D, in the order of ``stride``) viewed in the shape ``at_rest``."""
    return piece.as_strided(shape, stride) if tuple(at_rest) == tuple(shape) else piece.view(at_rest)


def flattened(tensor: torch.Tensor, shape: Sequence[int], stride: tuple[int, ...]) -> torch.Tensor:
    """Undo `shown`: 1-D; a view if ``tensor`` lies that way."""
    return in_memory_order(tensor, stride) if tensor.shape == torch.Size(shape) else tensor.reshape(-1)

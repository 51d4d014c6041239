"""The way from full gradients to this rank's interval of their mean. No other file lays gradients out.

take      take a unit's new gradients: one launch copies those of a segment into its flat gradient
reduce    start the reduce-scatter: each owner gets the mean of its interval. The result is a pending mean
give      give each parameter its part of the mean, when backward is over

A single rank without virtual ranks or offload copies and sends nothing: autograd's gradients are the mean.

A parameter without a gradient on this rank may have one on another. If no rank has one, ``.grad`` must stay
None: weight decay and momentum would change a parameter whose gradient is zero. So "none" is sent as
``-0.0``: a sum is ``-0.0`` only where all its terms are. Two ranks, a parameter of two elements::

    rank 0 has none   -0.0 -0.0      rank 0 has none   -0.0 -0.0
    rank 1 has        +0.0  3.0      rank 1 has none   -0.0 -0.0
    mean              +0.0  1.5      mean              -0.0 -0.0    -> no gradient

An existing gradient never begins with ``-0.0``: 0.0 is added to the first element of every rank's part.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial
from itertools import chain

import torch
from torch import nn

from shardtrain.comm.transport import Pending, Vector
from shardtrain.engine.segment import Segment, ShardedParam
from shardtrain.engine.unit import Unit
from shardtrain.pieces.part import strided
from shardtrain.pieces.piece import Piece

# This rank's part of the mean gradient of one parameter: a new view, in the shape at rest; and whether this
# rank has had a gradient of it. Otherwise another rank may have, or none.
Mean = tuple[ShardedParam, torch.Tensor, bool]


class Sum:
    """The sum of gradients of one segment, laid out for a reduction, and its result."""

    def __init__(self, segment: Segment, first: int, full: torch.Tensor | None) -> None:
        self.segment = segment
        self.like = segment.like_gradient
        self.first = first  # the number of the first micro-batch that has added to it
        # The flat gradient; None where nothing moves: the first gradients are then summed in place.
        self.full = full
        self.grads: dict[ShardedParam, torch.Tensor] = {}  # the sums, in the parameters' shapes
        self.unknown: set[ShardedParam] = set()  # only another rank may have a gradient of these
        self._views: dict[ShardedParam, torch.Tensor] = {}
        if full is not None:
            # Each has a version counter of its own, by `.data`, which tells that autograd has added to it.
            views = [view.data for view in segment.views_of(full)]
            self._views = dict(zip(segment.members, views, strict=True))

    def free(self) -> None:
        """Free the flat gradient, until `allocate`: so views of it are made once."""
        assert self.full is not None
        self.full.untyped_storage().resize_(0)
        self.grads.clear()
        self.unknown.clear()

    def allocate(self, first: int) -> Sum:
        """Return it as a new sum, which begins with the micro-batch ``first``."""
        assert self.full is not None
        self.full.untyped_storage().resize_(self.full.nbytes)
        self.first = first
        return self

    def add(self, grads: Mapping[ShardedParam, torch.Tensor]) -> None:
        """Add ``grads``, of the parameters' shapes and strides: copies and sums in one launch each."""
        new = list[torch.Tensor]()
        new_places = list[torch.Tensor]()
        terms = list[torch.Tensor]()
        sums = list[torch.Tensor]()
        for member, grad in grads.items():
            if member in self.grads:
                terms.append(grad)
                sums.append(self.grads[member])
            elif self.full is None:
                self.grads[member] = grad
            else:
                self.grads[member] = self._views[member]
                new.append(grad)
                new_places.append(self._views[member])
        if new:
            torch._foreach_copy_(new_places, new)
        if terms:
            torch._foreach_add_(sums, terms)

    def own_parts(self) -> dict[ShardedParam, torch.Tensor]:
        """Return copies of this rank's parts of the gradients, in the shape at rest, made in one launch.

        With offload they are on their way to the host.
        """
        local = self.segment.local
        if self.full is None:
            return {m: m.part.all_at_rest(grad.to(local.dtype, copy=True)) for m, grad in self.grads.items()}
        own = self.full[self.segment.layout.interval(self.segment.channel.rank)]
        downloads = own.device != local.device
        copy = torch.empty(own.shape, dtype=local.dtype, device=local.device, pin_memory=downloads)
        copy.copy_(own, non_blocking=downloads)
        # Each has a version counter of its own, by `.data`: which of them was changed is told by it.
        return {member: member.part_of(copy).data for member in self.grads}

    def gradient(self, required: Set[ShardedParam]) -> Vector:
        """Return the flat gradient to be reduced, with -0.0 where this rank has no gradient.

        ``required``: parameters of which any rank may have one.
        """
        assert self.full is not None
        segment = self.segment
        # No gradient begins with -0.0, in any rank's part.
        self.full.index_add_(0, segment.starts, segment.zeros)
        for member in segment.members:
            if member not in self.grads:
                self._views[member].fill_(-0.0)
                if member in required and not segment.channel.silent:
                    self.unknown.add(member)
        layout = segment.layout
        own_interval = self.full[layout.interval(segment.channel.rank)]
        return Vector(self.full, own_interval, layout, segment.local.dtype, layout.virtual)

    def means(self, interval: torch.Tensor) -> list[Mean]:
        """Return the means that may exist. ``interval``: this rank's, of the reduced gradient."""
        means = list[Mean]()
        for member in self.segment.members:
            is_certain = member in self.grads
            if is_certain or member in self.unknown:
                # An empty piece lies nowhere: it needs no view per step.
                value = member.part_of(interval) if member.part.numel else member.local_view
                means.append((member, value, is_certain))
        return means

    def own_means(self) -> list[Mean]:
        """Return the gradients of a single rank, which are the means."""
        local = self.segment.local
        values = [member.part.all_at_rest(grad) for member, grad in self.grads.items()]
        if values and values[0].dtype != local.dtype:  # one launch casts all
            interval = local.new_empty(len(local))
            narrow = values
            values = [member.part_of(interval) for member in self.grads]
            torch._foreach_copy_(values, narrow)
        return [(member, value, True) for member, value in zip(self.grads, values, strict=True)]


class Reduction:
    """The gradients of one unit until they are reduced.

    Micro-batches with one number (all, without virtual ranks) add to one sum. With virtual ranks they are
    summed in the tree of ``comm/arithmetic.py``, so that the number of ranks changes no bit. Sums are joined
    once nothing more belongs to them, so that log2 of the number of micro-batches wait at most, and one more
    while a unit adds to it::

        micro-batch   0    1       2         3              sent
        waiting sums  0    0, 1    0+1, 2    0+1, 2, 3      (0+1) + (2+3)
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.divide_by = unit.options.divide_by  # users may change it between steps
        self.arrived: set[str] = set()  # names of parameters for which autograd has had a gradient
        self._virtual = any(segment.layout.virtual for segment in unit.segments)
        # With offload a single rank's gradients move, too: to the host.
        self._moves = self._virtual or unit.channel.all_ranks.world > 1 or unit.channel.uploads
        self._sums: dict[Segment, list[Sum]] = {segment: [] for segment in unit.segments}  # those that wait
        self._expected: list[Segment] = []  # get a gradient in this backward, or hold one of an earlier one
        self._required: set[ShardedParam] = set()  # required a gradient since the last reduction
        self._freed: dict[Segment, Sum] = {}
        self._keeps_views = unit.channel.transport.returns_memory and not self._virtual
        # What autograd adds to in place, and its version before.
        self._lent: dict[ShardedParam, tuple[torch.Tensor, int]] = {}
        # What ``.grad`` shows under `no_sync`, its version, and whether `show_waiting` put it there.
        self._shown: dict[ShardedParam, tuple[torch.Tensor, int, bool]] = {}

    def begin_backward(self) -> None:
        """Expect a gradient of every trainable parameter. Drop a waiting one if a user cleared ``.grad``.

        Raises ValueError if a user changed ``.grad`` in another way, or at all between virtual ranks.
        """
        self.arrived.clear()
        # What was frozen while its gradient waits is reduced with it.
        required = self._required
        self._expected = [s for s in self.unit.segments if s.trains or not required.isdisjoint(s.members)]
        for member, (grad, version, own) in list(self._shown.items()):
            now = member.param.grad
            if isinstance(grad, Piece):
                grad.owners = grad.owners._replace(waits=False)
            if now is grad and now._version == version:
                if own:
                    member.take_grad()
            elif now is None or not now.as_subclass(torch.Tensor).any():
                if self._virtual:
                    raise ValueError(
                        f"the gradient of parameter {member.name} was cleared while it waits for other "
                        "virtual ranks: call zero_grad() between two steps"
                    )
                for total in chain.from_iterable(self._sums.values()):
                    total.grads.pop(member, None)
            else:
                raise ValueError(
                    f"the gradient of parameter {member.name} was changed while it waits "
                    "under no_sync to be reduced; clear it with zero_grad(), or change it once it is reduced"
                )
            del self._shown[member]

    def lend(self, micro_batch: int) -> None:
        """Let autograd add ``micro_batch``'s gradients to the sum that waits, in place, until `take`."""
        for segment in self._expected:
            sums = self._sums[segment]
            if sums and sums[-1].first == micro_batch and segment.full.dtype == sums[-1].like.dtype:
                for member, grad in sums[-1].grads.items():
                    if member not in self._lent:
                        member.lend_grad(grad)
                        self._lent[member] = grad, grad._version

    def take(self, micro_batch: int) -> list[str]:
        """Take ``micro_batch``'s gradients from autograd. Return the names of those that it did not keep.

        Raises ValueError if a gradient is sparse.
        """
        captured = list[str]()
        for segment in self._expected:
            grads: dict[ShardedParam, torch.Tensor] = {}
            for member in segment.members:
                if member.param.requires_grad:
                    self._required.add(member)
                grad = member.take_grad()
                lent, version = self._lent.pop(member, (None, 0))
                if grad is None or (grad is lent and grad._version == version):
                    if member.name in self.arrived and member.param.requires_grad:
                        captured.append(member.name)
                elif grad is not lent:
                    if grad.layout is not torch.strided:
                        raise ValueError(
                            f"parameter {member.name} has a sparse gradient, which cannot be sharded; "
                            "use nn.Embedding(..., sparse=False)"
                        )
                    grads[member] = strided(grad, member.part.stride)
            if grads:
                self._sum_of(segment, micro_batch).add(grads)
        self.arrived.clear()
        return captured

    def _sum_of(self, segment: Segment, micro_batch: int) -> Sum:
        """Return the sum to which ``micro_batch`` adds."""
        sums = self._sums[segment]
        if not sums or sums[-1].first != micro_batch:
            _join(sums, micro_batch)
            sums.append(self._new_sum(segment, micro_batch))
        return sums[-1]

    def _new_sum(self, segment: Segment, micro_batch: int) -> Sum:
        if not self._moves:
            return Sum(segment, micro_batch, None)
        if self._sums[segment]:
            first = self._sums[segment][0].full
            assert first is not None
            return Sum(segment, micro_batch, torch.empty_like(first))
        freed = self._freed.pop(segment, None)
        if freed is not None and freed.like is segment.like_gradient:  # users have not converted the segment
            return freed.allocate(micro_batch)
        return Sum(segment, micro_batch, segment.channel.gradient(segment.layout, segment.like_gradient))

    def show_waiting(self) -> None:
        """Let parameters show this rank's part of the gradient that waits under `no_sync`.

        Otherwise a user's `zero_grad` or change before the next backward would go unnoticed. Of several sums
        the first one's is shown.
        """
        parts: dict[ShardedParam, torch.Tensor] = {}
        for total in chain.from_iterable(self._sums.values()):
            parts = total.own_parts() | parts
        for member, part in parts.items():
            own = member.param.grad is None
            if own:
                member.give_grad(part)
            grad = member.param.grad
            assert grad is not None
            if isinstance(grad, Piece):
                grad.owners = grad.owners._replace(waits=True)
            self._shown[member] = grad, grad._version, own

    def reduce(self) -> Pending[list[Mean]]:
        """Start reducing what has been collected. The result is the mean of each parameter's gradient."""
        sums = [self._complete(segment) for segment in self._expected]
        if not (sums and self._moves):
            self._required.clear()
            return Pending.done([*chain.from_iterable([total.own_means() for total in sums])])
        gradients = [total.gradient(self._required) for total in sums]
        pending = self.unit.channel.reduce(self.unit.title, gradients)
        self._required.clear()
        # Gradients stay alive until the reduction has ended: a stream may still read them.
        return pending.then(partial(self._means, sums))

    def _means(self, sums: Sequence[Sum], intervals: Sequence[torch.Tensor]) -> list[Mean]:
        """Return the means of all parameters. ``intervals``: this rank's, of each reduced gradient."""
        means = list[Mean]()
        for total, interval in zip(sums, intervals, strict=True):
            means += total.means(interval)
            if self._keeps_views:
                total.free()
                self._freed[total.segment] = total
        return means

    def _complete(self, segment: Segment) -> Sum:
        """Return the sum of all that waits, and begin a new one."""
        sums = self._sums[segment]
        _join(sums, sys.maxsize)
        return sums.pop() if sums else self._new_sum(segment, 0)

    def drop(self) -> None:
        """Forget everything, after a backward that failed."""
        self.arrived.clear()
        for member in self.unit.members:
            member.take_grad()
        self._lent.clear()
        self._shown.clear()
        self._required.clear()
        for segment, sums in self._sums.items():
            if sums and sums[0].full is not None:
                segment.channel.transport.discard(sums[0].full)
            sums.clear()


def _join(sums: list[Sum], micro_batch: int) -> None:
    """Join the latest of ``sums`` while they belong to one subtree that ends before ``micro_batch``."""
    while len(sums) > 1:
        left, right = sums[-2:]
        height = (left.first ^ right.first).bit_length()
        if ((left.first >> height) + 1) << height > micro_batch:
            break
        sums.pop()
        left.add(right.grads)


def give(reduced: Iterable[tuple[Reduction, Sequence[Mean]]]) -> tuple[list[nn.Parameter], list[str]]:
    """Give parameters their means, after backward's last fence: add to a gradient put aside, else set it.

    Return these parameters, twice if reduced twice, and the names of those of which the device was asked.
    ``reduced``: what each reduction of this backward returned, in order.

    Where no rank has a gradient, none is set. A rank with an empty part cannot know, and sets an empty one.
    If another rank holds the whole parameter, it sets none, since some optimizers fail on empty gradients,
    but returns the parameter: users' hooks run on all ranks.
    """
    means = list[Mean]()
    for reduction, of_unit in reduced:
        if reduction.divide_by is not None and of_unit:
            values = [value for _, value, _ in of_unit]
            torch._foreach_mul_(values, reduction.unit.channel.all_ranks.world / reduction.divide_by)
        means += of_unit
    # A mean of -0.0 throughout is absent. The host waits for the device once, for the means of all units.
    unsure = [(member, value) for member, value, certain in means if not certain and value.numel()]
    answers = [((value == 0) & torch.signbit(value.real)).all() for _, value in unsure]
    absent = iter(torch.stack([each.to(answers[0].device) for each in answers]).tolist() if answers else [])
    params = list[nn.Parameter]()
    for member, value, is_certain in means:
        exists = is_certain or not (value.numel() and next(absent))
        if exists and (member.part.numel or not member.part.whole):
            member.give_grad(value)
        if exists:
            params.append(member.param)
    return params, [member.name for member, _ in unsure]

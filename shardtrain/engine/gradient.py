"""Reduce full gradients to this rank's interval of the mean. No other file lays gradients out.

take      take a unit's new gradients: one launch copies them into the unit's flat gradient
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
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from shardtrain.comm.transport import Gradient, Pending
from shardtrain.engine.part import in_memory_order
from shardtrain.engine.shard import Segment, ShardedParam
from shardtrain.engine.unit import Unit


class Presence(Enum):
    """Say whether any rank has a gradient of a parameter."""

    HERE = "this rank has one"
    NOWHERE = "no rank has one"
    UNKNOWN = "another rank may have one"


class Mean(NamedTuple):
    """Hold this rank's part (1-D, of the parameter's dtype) of the mean gradient of one parameter."""

    member: ShardedParam
    value: torch.Tensor
    presence: Presence


class Sum:
    """Sum some gradients of one segment.

    ``first``: the number of the first micro-batch that has added to it. ``full``: the flat gradient, in which
    they are laid out; None on a single rank, where the first ones are summed in place. ``grads``: the sum
    (1-D) for each parameter that has had a gradient.
    """

    def __init__(self, first: int, full: torch.Tensor | None) -> None:
        self.first = first
        self.full = full
        self.grads: dict[ShardedParam, torch.Tensor] = {}

    def add(
        self, grads: Iterable[tuple[ShardedParam, torch.Tensor]], places: Mapping[ShardedParam, slice]
    ) -> None:
        """Add ``grads`` (1-D): copies and sums in one launch each. ``places``: of parameters in ``full``."""
        new = list[torch.Tensor]()
        new_places = list[torch.Tensor]()
        terms = list[torch.Tensor]()
        sums = list[torch.Tensor]()
        for member, grad in grads:
            if member in self.grads:
                terms.append(grad)
                sums.append(self.grads[member])
            elif self.full is None:
                self.grads[member] = grad
            else:
                self.grads[member] = self.full[places[member]]
                new.append(grad)
                new_places.append(self.grads[member])
        if new:
            torch._foreach_copy_(new_places, new)
        if terms:
            torch._foreach_add_(sums, terms)


class Collected(NamedTuple):
    """Hold the gradients of one segment that have been collected for one reduction.

    ``presences``: of each parameter. ``gradient``: what is to be reduced. A single rank reduces nothing:
    ``grads`` has the gradients (1-D).
    """

    segment: Segment
    presences: Sequence[Presence]
    grads: Mapping[ShardedParam, torch.Tensor]
    gradient: Gradient | None

    def means(self, interval: torch.Tensor | None) -> list[Mean]:
        """Return each parameter's mean. ``interval``: this rank's interval of the reduced gradient."""
        local = self.segment.local
        means = list[Mean]()
        for member, presence in zip(self.segment.members, self.presences, strict=True):
            if interval is not None:
                value = member.piece_of(interval)
            elif presence is Presence.HERE:
                value = self.grads[member].to(local.dtype)
            else:
                continue
            means.append(Mean(member, value, presence))
        return means


class SegmentGradient:
    """Lay out the gradients of one segment, and sum those of several micro-batches.

    Micro-batches with one number (all, without virtual ranks) add to one sum. Others, numbered 0 to 3, are
    summed in the tree of ``comm/arithmetic.py``, so that the number of ranks changes no bit. Sums are joined
    once nothing more belongs to them, so that log2 of the number of micro-batches wait at most, and one more
    while a unit adds to it::

        micro-batch   0    1       2         3              sent
        waiting sums  0    0, 1    0+1, 2    0+1, 2, 3      (0+1) + (2+3)

    ``expected``: whether a backward brings any gradient.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.members = segment.members
        self.expected = False
        layout = segment.layout
        channel = segment.transport
        # With offload a single rank's gradients move, too: to the host.
        self._moves = channel.all_ranks.world > 1 or layout.virtual > 0 or channel.uploads
        places = zip(self.members, layout.offsets, layout.sizes, strict=True)
        self._places = {member: slice(start, start + size) for member, start, size in places}
        # Where any rank's part of a parameter starts. With virtual ranks, where theirs start, so that the
        # same elements change on any number of ranks.
        cuts = layout.cuts or layout.bounds
        starts = sorted({at for at in (*layout.offsets, *cuts) if at < layout.end})
        self._starts = torch.tensor(starts, dtype=torch.int64, device="cpu")
        self._zeros = torch.zeros(len(starts), device="cpu")
        self._sums: list[Sum] = []

    def _new_full(self) -> torch.Tensor | None:
        if not self._moves:
            return None
        if self._sums:
            first = self._sums[0].full
            assert first is not None
            return torch.empty_like(first)
        return self.segment.transport.gradient(self.segment.layout, self.segment.like_gradient)

    def _join(self, micro_batch: int) -> None:
        """Join the latest sums while they belong to one subtree that ends before ``micro_batch``."""
        while len(self._sums) > 1:
            left, right = self._sums[-2:]
            height = (left.first ^ right.first).bit_length()
            if ((left.first >> height) + 1) << height > micro_batch:
                break
            self._sums.pop()
            left.add(right.grads.items(), self._places)

    def take(self, grads: Iterable[tuple[ShardedParam, torch.Tensor]], micro_batch: int) -> None:
        """Add ``grads`` (each 1-D) of ``micro_batch``."""
        if not self._sums or self._sums[-1].first != micro_batch:
            self._join(micro_batch)
            self._sums.append(Sum(micro_batch, self._new_full()))
        self._sums[-1].add(grads, self._places)

    @property
    def waiting(self) -> list[ShardedParam]:
        """The parameters whose gradients have been collected and not yet sent."""
        collected = dict[ShardedParam, None]()
        for total in self._sums:
            collected |= dict.fromkeys(total.grads)
        return [*collected]

    def own_part(self, member: ShardedParam) -> torch.Tensor:
        """Return a copy of this rank's part (1-D) of a gradient that waits, of the first of several sums.

        With offload it is on its way to the host.
        """
        grad = next(total.grads[member] for total in self._sums if member in total.grads)
        own = grad[member.part.start : member.part.stop]
        local = self.segment.local
        downloads = own.device != local.device
        copy = torch.empty(own.shape, dtype=local.dtype, device=local.device, pin_memory=downloads)
        return copy.copy_(own, non_blocking=downloads)

    def forget(self, member: ShardedParam) -> None:
        """Forget what has been collected for ``member``."""
        for total in self._sums:
            total.grads.pop(member, None)

    def send(self) -> Collected:
        """Return what has been collected, with -0.0 where this rank has no gradient, and begin a new sum."""
        self._join(sys.maxsize)
        total = self._sums[0] if self._sums else Sum(0, self._new_full())
        self._sums.clear()
        if total.full is not None:
            self._mark_starts(total.full)
        segment = self.segment
        absent = Presence.NOWHERE if segment.transport.silent else Presence.UNKNOWN
        presences = list[Presence]()
        for member in self.members:
            if member in total.grads:
                presences.append(Presence.HERE)
                continue
            presences.append(absent if member.param.requires_grad else Presence.NOWHERE)
            if total.full is not None:
                total.full[self._places[member]].fill_(-0.0)
        if total.full is None:
            return Collected(segment, presences, total.grads, None)
        rank = segment.transport.rank
        gradient = Gradient(total.full, segment.layout, rank, segment.local.dtype, segment.layout.virtual)
        return Collected(segment, presences, {}, gradient)

    def _mark_starts(self, full: torch.Tensor) -> None:
        """Add 0.0 where a part starts, so that no gradient begins with -0.0."""
        if self._zeros.dtype != full.dtype or self._zeros.device != full.device:
            self._starts = self._starts.to(full.device)
            self._zeros = full.new_zeros(len(self._starts))
        full.index_add_(0, self._starts, self._zeros)

    def drop(self) -> None:
        """Forget everything, after a backward that failed."""
        if self._sums and (full := self._sums[0].full) is not None:
            self.segment.transport.discard(full)
        self._sums.clear()


class Reduction:
    """Collect the gradients of one unit, and start their reductions.

    ``divide_by``: see `UnitOptions`; users may change it between steps. ``arrived``: names of parameters for
    which autograd has had a gradient. ``_shown``: what ``.grad`` shows under `no_sync`, with its version, and
    whether `show_waiting` put it there.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.divide_by = unit.options.divide_by
        self.gradients = [SegmentGradient(segment) for segment in unit.segments]
        self._gradient_of: dict[ShardedParam, SegmentGradient] = {}
        for gradient in self.gradients:
            self._gradient_of.update(dict.fromkeys(gradient.members, gradient))
        self.arrived: set[str] = set()
        self._shown: dict[ShardedParam, tuple[torch.Tensor, int, bool]] = {}

    def begin_backward(self) -> None:
        """Expect a gradient of every trainable parameter. Drop a waiting one if a user cleared ``.grad``.

        Raises ValueError if a user changed ``.grad`` in another way.
        """
        self.arrived.clear()
        for each in self.gradients:
            each.expected = any(member.param.requires_grad for member in each.members)
        for member, (grad, version, own) in list(self._shown.items()):
            now = member.param.grad
            if now is grad and now._version == version:
                if own:
                    member.take_grad()
            elif now is None or not now.as_subclass(torch.Tensor).any():
                if self._gradient_of[member].segment.layout.virtual:
                    raise ValueError(
                        f"the gradient of parameter {member.name} was cleared while it waits for other "
                        "virtual ranks: call zero_grad() between two steps"
                    )
                self._gradient_of[member].forget(member)
            else:
                raise ValueError(
                    f"the gradient of parameter {member.name} was changed while it waits "
                    "under no_sync to be reduced; clear it with zero_grad(), or change it once it is reduced"
                )
            del self._shown[member]

    def take(self, micro_batch: int, captured: list[str]) -> None:
        """Take ``micro_batch``'s gradients from autograd. Add the names of others to ``captured``.

        Raises ValueError if a gradient is sparse.
        """
        for each in self.gradients:
            grads = []
            for member in each.members if each.expected else ():
                grad = member.take_grad()
                if grad is None:
                    if member.name in self.arrived and member.param.requires_grad:
                        captured.append(member.name)
                    continue
                if grad.layout is not torch.strided:
                    raise ValueError(
                        f"parameter {member.name} has a sparse gradient, which cannot be sharded; "
                        "use nn.Embedding(..., sparse=False)"
                    )
                grads.append((member, in_memory_order(grad, member.part.stride)))
            if grads:
                each.take(grads, micro_batch)
        self.arrived.clear()

    def show_waiting(self) -> None:
        """Let parameters show this rank's part of the gradient that waits under `no_sync`.

        Otherwise a user's `zero_grad` or change before the next backward would go unnoticed.
        """
        for each in self.gradients:
            for member in each.waiting:
                own = member.param.grad is None
                if own:
                    member.give_grad(each.own_part(member))
                grad = member.param.grad
                assert grad is not None
                self._shown[member] = grad, grad._version, own

    def reduce(self) -> Pending[list[Mean]]:
        """Start reducing what has been collected. The result is the mean of each parameter's gradient."""
        collected = [each.send() for each in self.gradients if each.expected]
        gradients = [each.gradient for each in collected if each.gradient is not None]
        if not gradients:
            pending = Pending.done(list[torch.Tensor]())
        else:
            pending = self.unit.transport.reduce(self.unit.title, gradients)
        # Gradients stay alive until the reduction has ended: a stream may still read them.
        return pending.then(partial(self._means, collected))

    def _means(self, collected: Sequence[Collected], intervals: Sequence[torch.Tensor]) -> list[Mean]:
        """Return the means of all parameters. ``intervals``: this rank's, of each reduced gradient."""
        following = iter(intervals)
        means = list[Mean]()
        for each in collected:
            interval = None if each.gradient is None else next(following)
            means += each.means(interval)
        return means

    def drop(self) -> None:
        """Forget everything, after a backward that failed."""
        self.arrived.clear()
        for member in self.unit.members:
            member.take_grad()
        self._shown.clear()
        for each in self.gradients:
            each.drop()


def give(reduced: Iterable[tuple[Reduction, Sequence[Mean]]]) -> list[nn.Parameter]:
    """Set the gradients of parameters to their means, after backward's last barrier; return these parameters.

    ``reduced``: what each reduction of this backward returned, in order. Where no rank has a gradient, none
    is set. A rank with an empty part cannot know, and sets an empty one. If another rank holds the whole
    parameter, it sets none, since some optimizers fail on empty gradients, but returns the parameter: users'
    hooks run on all ranks. One that was reduced twice is returned twice.
    """
    means = list[Mean]()
    for reduction, of_unit in reduced:
        if reduction.divide_by is not None and of_unit:
            values = [mean.value for mean in of_unit]
            torch._foreach_mul_(values, reduction.unit.transport.all_ranks.world / reduction.divide_by)
        means += of_unit
    # A mean of -0.0 throughout is absent. The host waits for the device once, for the means of all units.
    unsure = [mean.value for mean in means if mean.presence is Presence.UNKNOWN and mean.value.numel()]
    answers = [((value == 0) & torch.signbit(value.real)).all() for value in unsure]
    absent = iter(torch.stack([each.to(answers[0].device) for each in answers]).tolist() if answers else [])
    params = list[nn.Parameter]()
    for member, value, presence in means:
        exists = presence is Presence.HERE
        if presence is Presence.UNKNOWN:
            exists = not (value.numel() and next(absent))
        if exists and (member.part.numel or not member.part.whole):
            member.give_grad(value)
        if exists:
            params.append(member.param)
    return params

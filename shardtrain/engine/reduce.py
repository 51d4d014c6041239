"""Reduce full gradients to this rank's averaged interval. No other file makes gradient intervals.

collect  take a parameter's new gradient. The elements that other ranks own go into the unit's flat gradient.
         This rank's own stay in autograd's tensor; on an accelerator one launch copies all gradients
launch   start the reduce-scatter: send every owner its interval, and sum what arrives
finish   wait for it
give     give each parameter its piece of the mean, when backward is over

On a single rank nothing belongs to others, so nothing is copied and nothing is sent.

A parameter without a gradient on this rank may have one on another. If no rank has one, ``.grad`` must stay
None: weight decay and momentum would change a parameter whose gradient is zero. So "none" is sent as
``-0.0``: a sum is ``-0.0`` only where all its terms are. Two ranks, a parameter of two elements::

    rank 0 has none   -0.0 -0.0      rank 0 has none   -0.0 -0.0
    rank 1 has        +0.0  3.0      rank 1 has none   -0.0 -0.0
    mean              +0.0  1.5      mean              -0.0 -0.0    -> no gradient

An existing gradient never begins with ``-0.0``: 0.0 is added to the first element of every piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from shardtrain.comm import trace
from shardtrain.comm.trace import REDUCE, waiting
from shardtrain.comm.transport import Gradient, Pending
from shardtrain.device import on_accelerator
from shardtrain.engine.part import in_memory_order
from shardtrain.engine.shard import Segment
from shardtrain.engine.unit import Unit


class FlatGradient:
    """Collect the gradients of one segment.

    Parameters are given by their index in the segment. ``arrived``: those whose gradient of this backward has
    arrived, ``expected`` in number. ``filled``: those with a gradient of any backward since the last
    reduction (`no_sync`). ``_sent``: for each reduction of this backward, the indices with a gradient on this
    rank, those that may have one on another, and each parameter's own part, which becomes the mean.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment, self.members = segment, segment.members
        self.arrived: set[int] = set()
        self.expected = 0
        self.filled: set[int] = set()
        self._elsewhere, self._cuts = segment.layout.elsewhere(segment.transport.rank)
        # Where any rank's piece of a parameter starts: `send` adds 0.0 there, so that none begins with -0.0.
        layout = segment.layout
        starts = {at for at in (*layout.offsets, *layout.bounds) if at < layout.end}
        self._starts = torch.tensor(sorted(starts), dtype=torch.int64, device="cpu")
        self._zeros = torch.zeros(len(starts), device="cpu")
        self._sent: list[tuple[list[int], list[int], list[torch.Tensor]]] = []
        self._clear()

    def _clear(self) -> None:
        self.filled.clear()
        # What `.grad` shows under `no_sync`: the tensor, its version, whether `show_waiting` put it there.
        self._shown: dict[int, tuple[torch.Tensor, int, bool]] = {}
        self._full: torch.Tensor | None = None
        self._parts: Sequence[torch.Tensor] = ()  # views of `_full`: by `_cuts`, or by parameter if `_whole`
        self._own: dict[int, torch.Tensor] = {}  # by index, this rank's part
        self._whole = False  # whether `_full` takes this rank's own part, too
        self._late: dict[int, torch.Tensor] = {}  # by index, gradients not yet copied into `_full`

    def begin_backward(self) -> None:
        """Expect a gradient of every trainable parameter; check what users did to waiting ones."""
        self.arrived.clear()
        self.expected = sum([member.param.requires_grad for member in self.members])
        while self._shown:
            self._check_waiting(*self._shown.popitem())

    def show_waiting(self) -> None:
        """Let parameters show this rank's part of the gradient that waits under `no_sync`.

        Otherwise a user's `zero_grad` or change before the next backward would go unnoticed.
        """
        self._lay_out()
        for index in self.filled:
            member = self.members[index]
            own = member.held_grad is None
            if own and self._whole:
                part = self._parts[index][member.part.start : member.part.stop]
                self._own[index] = part.to(self.segment.local.dtype)
            if own:
                member.give_grad(self._own[index])
            grad = member.held_grad
            assert grad is not None
            self._shown[index] = grad, grad._version, own

    def _check_waiting(self, index: int, shown: tuple[torch.Tensor, int, bool]) -> None:
        """Drop a waiting gradient if a user cleared ``.grad``. Raises ValueError for any other change."""
        member, (grad, version, own) = self.members[index], shown
        now = member.held_grad
        if now is grad and now._version == version:
            if own:
                member.set_grad(None)
        elif now is None or not now.any():
            self.filled.discard(index)
        else:
            self._shown[index] = shown
            raise ValueError(
                f"the gradient of parameter {member.name} was changed while it waits "
                "under no_sync to be reduced; clear it with zero_grad(), or change it once it is reduced"
            )

    def collect(self, index: int) -> bool:
        """Take the gradient just accumulated in parameter ``index``; return whether all have arrived.

        Raises ValueError if the gradient is sparse.
        """
        member = self.members[index]
        grad, member.param.grad = member.param.grad, None
        member.show_grad()
        assert grad is not None
        if grad.layout is not torch.strided:
            raise ValueError(
                f"parameter {member.name} has a sparse gradient, which cannot be sharded; "
                "use nn.Embedding(..., sparse=False)"
            )
        self.arrived.add(index)
        self._keep(index, in_memory_order(grad, member.part.stride))
        if self._late and len(self.arrived) == self.expected:
            self._lay_out()
        return len(self.arrived) == self.expected

    def _keep(self, index: int, grad: torch.Tensor) -> None:
        """Add or copy ``grad`` (1-D): other ranks' parts into ``_full``, this rank's into ``_own``."""
        member = self.members[index]
        start, stop = member.part.start, member.part.stop
        again, wide = index in self.filled, self.segment.local.dtype
        if self._full is None:
            self._open()
        if self._whole:
            if index in self._late:  # a second gradient in one backward, by reentrant checkpointing
                self._lay_out()
            self._late[index] = grad
            return
        self.filled.add(index)
        for span, part in self._elsewhere[index]:
            given = grad[span] if start < stop else grad
            self._parts[part].add_(given) if again else self._parts[part].copy_(given)
        if again:
            self._own[index].add_(grad[start:stop])
        elif start == stop:
            self._own[index] = member.no_grad
        else:
            own = grad[start:stop]
            # A view of a part would keep the memory of the whole gradient.
            if own.dtype != wide or stop - start < grad.numel():
                own = own.to(wide, copy=True)
            self._own[index] = own

    def _lay_out(self) -> torch.Tensor:
        """Add or copy the gradients of ``_late`` into ``_full``, in one launch each; return ``_full``."""
        new = {index for index in self._late if index not in self.filled}
        for lay_out, indices in ((torch._foreach_copy_, new), (torch._foreach_add_, self._late.keys() - new)):
            if indices:
                lay_out([self._parts[i] for i in indices], [self._late[i] for i in indices])
        self.filled |= new
        self._late.clear()
        return self._open()

    def _open(self) -> torch.Tensor:
        if self._full is None:
            layout, transport = self.segment.layout, self.segment.transport
            self._full = full = transport.gradient(layout, self.segment.like_gradient)
            self._whole = on_accelerator(full) and transport.world > 1
            if self._whole:
                rows = zip(layout.offsets, layout.sizes, strict=True)
                self._parts = [full[at : at + size] for at, size in rows]
            elif self._cuts:
                self._parts = full.split_with_sizes(self._cuts)
        return self._full

    def send(self) -> Gradient:
        """Return the collected gradient, with -0.0 where this rank has none, and begin a new one."""
        segment, transport = self.segment, self.segment.transport
        full = self._lay_out()
        missing = [index for index in range(len(self.members)) if index not in self.filled]
        if transport.world > 1:
            if self._zeros.dtype != full.dtype or self._zeros.device != full.device:
                self._starts, self._zeros = self._starts.to(full.device), full.new_zeros(len(self._starts))
            full.index_add_(0, self._starts, self._zeros)
        # Averages over replicas send this rank's own parts, too.
        if self._own and not self._whole and transport.all_ranks.world > transport.world:
            torch._foreach_add_([own[:1] for own in self._own.values()], 0.0)
        for index in missing:
            size = 0 if self._whole else self.members[index].part.numel
            self._own[index] = full.new_full((size,), -0.0, dtype=segment.local.dtype)
            for part in [index] if self._whole else [part for _, part in self._elsewhere[index]]:
                self._parts[part].fill_(-0.0)
        own = [m.no_grad if self._whole else self._own[i] for i, m in enumerate(self.members)]
        unsure = [i for i in missing if self.members[i].param.requires_grad and not transport.silent]
        self._sent.append((sorted(self.filled), unsure, own))
        mean = segment.local.dtype if self._whole else None
        self._clear()
        return Gradient(full, own, segment.layout, segment.pieces, segment.reduces_int8, mean)

    def give(self, absent: Iterator[bool]) -> list[nn.Parameter]:
        """Give each parameter its piece of the mean if any rank has a gradient; return those that got one.

        ``absent``: for each unsure parameter, whether no rank has a gradient. An empty piece cannot tell, and
        gets an empty gradient; but None if the parameter is whole on another rank, for some optimizers.
        """
        given = []
        for filled, unsure, own in self._sent:
            for index in [*filled, *(i for i in unsure if not next(absent))]:
                member = self.members[index]
                if member.part.numel or not member.part.whole:
                    member.give_grad(own[index])
                    given.append(member.param)
        self._sent.clear()
        return given

    def drop(self) -> None:
        """Forget everything, after a backward that failed."""
        self.arrived.clear()
        self._sent.clear()
        for index, (grad, _, own) in self._shown.items():
            if own and self.members[index].held_grad is grad:
                self.members[index].set_grad(None)
        if self._full is not None:
            self.segment.transport.discard(self._full)
        self._clear()


class Reduction:
    """Reduce one unit: collect its gradients, then run one reduce-scatter at a time."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.gradients = [FlatGradient(segment) for segment in unit.segments]
        self.full_bytes = sum(s.layout.padded * s.like_gradient.itemsize for s in unit.segments)
        self._moving = Pending()
        # Keeps gradients alive until the reduction has ended: a stream may still read them.
        self._under_way: list[Gradient] = []

    def begin_backward(self) -> None:
        """Expect gradients, and note whether any parameter is ``trainable``."""
        for gradient in self.gradients:
            gradient.begin_backward()
        self.trainable = any(gradient.expected for gradient in self.gradients)

    def begin_again(self) -> None:
        """Expect every gradient again in this backward: reentrant checkpointing uses a unit in parts."""
        for gradient in self.gradients:
            gradient.arrived.clear()

    def collect(self, segment: int, index: int) -> bool:
        """Take the gradient of one parameter; return whether it is the unit's last one."""
        last = self.gradients[segment].collect(index)
        return last and all(len(gradient.arrived) == gradient.expected for gradient in self.gradients)

    @property
    def waiting(self) -> bool:
        """Whether anything has been collected and not yet sent."""
        return any(gradient.filled or gradient._late for gradient in self.gradients)

    def show_waiting(self) -> None:
        for gradient in self.gradients:
            gradient.show_waiting()

    def launch(self) -> None:
        """Start reducing what has been collected."""
        trace.begin(REDUCE.traced, self.unit.title)
        self._under_way = [flat.send() for flat in self.gradients if flat.expected]
        self._moving = self.unit.transport.reduce(self.unit.reduce_tag, self._under_way)

    def finish(self) -> None:
        """Wait for the reduction."""
        with waiting(REDUCE, self.unit.title, self.unit.device, self._moving.ended):
            self._moving.wait()
        self._under_way = []

    def drop(self) -> None:
        """Forget everything, after a backward that failed."""
        self._moving.wait()
        self._under_way = []
        for gradient in self.gradients:
            gradient.drop()


def give(reductions: Iterable[Reduction]) -> list[nn.Parameter]:
    """Give parameters their means, after backward's last barrier; return those given one, perhaps twice."""
    gradients = [gradient for reduction in reductions for gradient in reduction.gradients]
    means = [own[index] for each in gradients for _, unsure, own in each._sent for index in unsure]
    # A mean of -0.0 throughout is absent. The host waits for the device once, for the means of all units.
    answers = [((mean == 0) & torch.signbit(mean.real)).all() for mean in means if mean.numel()]
    known = iter(torch.stack([each.to(answers[0].device) for each in answers]).tolist() if answers else [])
    absent = (bool(mean.numel()) and next(known) for mean in means)
    return [param for gradient in gradients for param in gradient.give(absent)]

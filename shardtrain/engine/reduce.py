"""Reduce full gradients to this rank's averaged interval. No other file makes gradient intervals.

take     take a unit's new gradients. One launch copies the elements that other ranks own into the unit's flat
         gradient. This rank's own stay in autograd's tensor; on an accelerator they are copied, too
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

from collections.abc import Iterable

import torch
from torch import nn

from shardtrain.comm import trace
from shardtrain.comm.trace import REDUCE, waiting
from shardtrain.comm.transport import Gradient, Pending
from shardtrain.device import on_accelerator
from shardtrain.engine.part import in_memory_order
from shardtrain.engine.shard import Segment, ShardedParam
from shardtrain.engine.unit import Unit


class FlatGradient:
    """Lay out the gradients of one segment in a full vector, from which other ranks' intervals are sent.

    ``own``: this rank's part of each gradient that has come in any backward since the last reduction
    (`no_sync`). ``expected``: whether a backward brings any. ``sent``: for each reduction of this
    backward, each parameter's own part, which becomes the mean, and whether there is a gradient: None if
    another rank may have one.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment, self.members = segment, segment.members
        self.expected = False
        layout = segment.layout
        self._holds_own = False  # whether `_full` takes this rank's own parts, too: on accelerators
        # Which slice of a gradient goes to which slice of the vector: other ranks' elements, or all.
        self._places: dict[ShardedParam, list[tuple[slice, slice]]] = {}
        # Where any rank's piece of a parameter starts: `send` adds 0.0 there, so that none begins with -0.0.
        starts = {at for at in (*layout.offsets, *layout.bounds) if at < layout.end}
        self._piece_starts = torch.tensor(sorted(starts), dtype=torch.int64, device="cpu")
        self._zeros = torch.zeros(len(starts), device="cpu")
        self.sent: list[tuple[list[torch.Tensor], list[bool | None]]] = []
        self._clear()

    def _clear(self) -> None:
        self.own: dict[ShardedParam, torch.Tensor] = {}
        self._full: torch.Tensor | None = None

    def _open(self) -> torch.Tensor:
        if self._full is None:
            layout, transport = self.segment.layout, self.segment.transport
            self._full = transport.gradient(layout, self.segment.like_gradient)
            rank = None if on_accelerator(self._full) and transport.world > 1 else transport.rank
            if not self._places or self._holds_own != (rank is None):
                self._holds_own = rank is None
                self._places = dict(zip(self.members, layout.elsewhere(rank), strict=True))
        return self._full

    def take(self, grads: Iterable[tuple[ShardedParam, torch.Tensor]]) -> None:
        """Lay out ``grads`` (each 1-D), or add them to waiting ones: copies and sums in one launch each."""
        full = self._open()
        copies, sums = list[tuple[torch.Tensor, torch.Tensor]](), list[tuple[torch.Tensor, torch.Tensor]]()
        for member, grad in grads:
            rows = sums if member in self.own else copies
            rows += [(full[place], grad[span]) for span, place in self._places[member]]
            start, stop = member.part.start, member.part.stop
            if self._holds_own or start == stop:
                self.own[member] = member.no_grad
            elif rows is sums:
                self.own[member].add_(grad[start:stop])
            else:
                # A view of a part would keep the memory of the whole gradient.
                cut = stop - start < grad.numel()
                self.own[member] = (grad[start:stop] if cut else grad).to(self.segment.local.dtype, copy=cut)
        for lay_out, rows in ((torch._foreach_copy_, copies), (torch._foreach_add_, sums)):
            if rows:
                lay_out([place for place, _ in rows], [grad for _, grad in rows])

    def own_part(self, member: ShardedParam) -> torch.Tensor:
        """Return this rank's part (1-D) of a gradient that waits."""
        if not self._holds_own or not member.part.numel:
            return self.own[member]
        [(_, place)] = self._places[member]
        return self._open()[place][member.part.start : member.part.stop].to(self.segment.local.dtype)

    def send(self) -> Gradient:
        """Return the collected gradient, with -0.0 where this rank has none, and begin a new one."""
        segment, transport, full = self.segment, self.segment.transport, self._open()
        if transport.world > 1:
            if self._zeros.dtype != full.dtype or self._zeros.device != full.device:
                self._piece_starts = self._piece_starts.to(full.device)
                self._zeros = full.new_zeros(len(self._piece_starts))
            full.index_add_(0, self._piece_starts, self._zeros)
        # Averages over replicas send this rank's own parts, too.
        if self.own and not self._holds_own and transport.all_ranks.world > transport.world:
            torch._foreach_add_([own[:1] for own in self.own.values()], 0.0)
        there: list[bool | None] = []
        for member in self.members:
            if member in self.own:
                there.append(True)
                continue
            there.append(None if member.param.requires_grad and not transport.silent else False)
            size = 0 if self._holds_own else member.part.numel
            self.own[member] = full.new_full((size,), -0.0, dtype=segment.local.dtype)
            for _, place in self._places[member]:
                full[place].fill_(-0.0)
        own = [self.own[member] for member in self.members]
        self.sent.append((own, there))
        mean = segment.local.dtype if self._holds_own else None
        self._clear()
        return Gradient(full, own, segment.layout, segment.pieces, segment.reduces_int8, mean)

    def drop(self) -> None:
        """Forget everything, after a backward that failed."""
        self.sent.clear()
        if self._full is not None:
            self.segment.transport.discard(self._full)
        self._clear()


class Reduction:
    """Reduce one unit: collect its gradients, then run one reduce-scatter at a time.

    ``arrived``: names of parameters for which autograd has had a gradient. ``_shown``: what ``.grad`` shows
    under `no_sync`, with its version, and whether `show_waiting` put it there.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.flats = [FlatGradient(segment) for segment in unit.segments]
        self._flat_of = {member: flat for flat in self.flats for member in flat.members}
        self.full_bytes = sum(s.layout.padded * s.like_gradient.itemsize for s in unit.segments)
        self.arrived: set[str] = set()
        self._shown: dict[ShardedParam, tuple[torch.Tensor, int, bool]] = {}
        self._moving = Pending()
        # Keeps gradients alive until the reduction has ended: a stream may still read them.
        self._under_way: list[Gradient] = []

    def begin_backward(self) -> None:
        """Expect a gradient of every trainable parameter. Drop a waiting one if a user cleared ``.grad``.

        Raises ValueError if a user changed ``.grad`` in another way.
        """
        self.arrived.clear()
        for flat in self.flats:
            flat.expected = any(member.param.requires_grad for member in flat.members)
        self.unit.trains = any(flat.expected for flat in self.flats)
        for member, (grad, version, own) in list(self._shown.items()):
            now = member.param.grad
            if now is grad and now._version == version:
                if own:
                    member.param.grad = None
            elif now is None or not now.as_subclass(torch.Tensor).any():
                del self._flat_of[member].own[member]
            else:
                raise ValueError(
                    f"the gradient of parameter {member.name} was changed while it waits "
                    "under no_sync to be reduced; clear it with zero_grad(), or change it once it is reduced"
                )
            del self._shown[member]

    def take(self, captured: list[str]) -> None:
        """Take the gradients that autograd has accumulated. Add the names of others to ``captured``.

        Raises ValueError if a gradient is sparse.
        """
        for flat in self.flats:
            grads = []
            for member in flat.members if flat.expected else ():
                param = member.param
                if (grad := param.grad) is None:
                    if member.name in self.arrived and param.requires_grad:
                        captured.append(member.name)
                    continue
                param.grad = None
                if grad.layout is not torch.strided:
                    raise ValueError(
                        f"parameter {member.name} has a sparse gradient, which cannot be sharded; "
                        "use nn.Embedding(..., sparse=False)"
                    )
                grads.append((member, in_memory_order(grad, member.part.stride)))
            if grads:
                flat.take(grads)
        self.arrived.clear()

    @property
    def waiting(self) -> bool:
        """Whether anything has been collected and not yet sent."""
        return any(flat.own for flat in self.flats)

    def show_waiting(self) -> None:
        """Let parameters show this rank's part of the gradient that waits under `no_sync`.

        Otherwise a user's `zero_grad` or change before the next backward would go unnoticed.
        """
        for flat in self.flats:
            for member in flat.own:
                own = member.param.grad is None
                if own:
                    member.give_grad(flat.own_part(member))
                grad = member.param.grad
                assert grad is not None
                self._shown[member] = grad, grad._version, own

    def launch(self) -> None:
        """Start reducing what has been collected."""
        trace.begin(REDUCE.traced, self.unit.title)
        self._under_way = [flat.send() for flat in self.flats if flat.expected]
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
        self.arrived.clear()
        for member in self.unit.members:
            member.param.grad = None
        self._shown.clear()
        for flat in self.flats:
            flat.drop()


def give(reductions: Iterable[Reduction]) -> list[nn.Parameter]:
    """Set the gradients of parameters to their means, after backward's last barrier; return these parameters.

    Where no rank has a gradient, none is set. A rank with an empty piece cannot know, and sets an empty one.
    If another rank holds the whole parameter, it sets none, since some optimizers fail on empty gradients,
    but returns the parameter: users' hooks run on all ranks. One that was reduced twice is returned twice.
    """
    rows: list[tuple[ShardedParam, torch.Tensor, bool | None]] = []
    for flat in [flat for reduction in reductions for flat in reduction.flats]:
        for own, there in flat.sent:
            rows += zip(flat.members, own, there, strict=True)
        flat.sent.clear()
    # A mean of -0.0 throughout is absent. The host waits for the device once, for the means of all units.
    unsure = [mean for _, mean, known in rows if known is None and mean.numel()]
    answers = [((mean == 0) & torch.signbit(mean.real)).all() for mean in unsure]
    absent = iter(torch.stack([each.to(answers[0].device) for each in answers]).tolist() if answers else [])
    given = []
    for member, mean, known in rows:
        exists = known if known is not None else not (mean.numel() and next(absent))
        if exists and (member.part.numel or not member.part.whole):
            member.give_grad(mean)
        if exists:
            given.append(member.param)
    return given

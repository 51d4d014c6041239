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

import sys
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from shardtrain.comm import trace
from shardtrain.comm.trace import REDUCE, waiting
from shardtrain.comm.transport import Gradient, Pending
from shardtrain.device import on_accelerator
from shardtrain.engine.part import in_memory_order
from shardtrain.engine.shard import Segment, ShardedParam
from shardtrain.engine.unit import Unit


@dataclass
class Sum:
    """Hold the sum of some gradients of one segment, from which other ranks' intervals are sent.

    ``first``: the number of the first micro-batch that has added to it. ``full``: the full vector. ``own``:
    this rank's part of each gradient that has come.
    """

    first: int
    full: torch.Tensor
    own: dict[ShardedParam, torch.Tensor]


class FlatGradient:
    """Lay out the gradients of one segment in a full vector, and sum those of several micro-batches.

    Micro-batches with one number (all, without virtual ranks) add to one sum. Others, numbered 0 to 3, are
    summed in the tree of ``comm/arithmetic.py``, so that the number of ranks changes no bit. Sums are joined
    once nothing more belongs to them, so that log2 of the number of micro-batches wait at most, and one more
    while a unit adds to it::

        micro-batch   0    1       2         3              sent
        waiting sums  0    0, 1    0+1, 2    0+1, 2, 3      (0+1) + (2+3)

    ``expected``: whether a backward brings any gradient. ``sent``: for each reduction of this backward, each
    parameter's own part, which becomes the mean, and whether there is a gradient: None if another rank may
    have one.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.members = segment.members
        self.expected = False
        layout = segment.layout
        self._holds_own = False  # whether `_full` takes this rank's own parts, too: on accelerators
        # Which slice of a gradient goes to which slice of the vector: other ranks' elements, or all.
        self._places: dict[ShardedParam, list[tuple[slice, slice]]] = {}
        # Where any rank's piece of a parameter starts: `send` adds 0.0 there, so that none begins with -0.0.
        # With virtual ranks, where theirs start, so that the same elements change on any number of ranks.
        cuts = layout.cuts or layout.bounds
        starts = sorted({at for at in (*layout.offsets, *cuts) if at < layout.end})
        self._piece_starts = torch.tensor(starts, dtype=torch.int64, device="cpu")
        self._zeros = torch.zeros(len(starts), device="cpu")
        # The same places in this rank's own parts. Its own gradient may begin with -0.0 where no other rank
        # has one, which changes nothing but the digests of virtual ranks.
        self._own_starts: list[tuple[ShardedParam, slice]] = []
        for member, offset, piece in zip(self.members, layout.offsets, segment.pieces, strict=True):
            begin = offset + piece.start
            end = offset + piece.stop
            inside = starts[bisect_left(starts, begin) : bisect_left(starts, end)]
            self._own_starts += [(member, slice(at - begin, at - begin + 1)) for at in inside]
        self.sent: list[tuple[list[torch.Tensor], list[bool | None]]] = []
        self._sums: list[Sum] = []

    def _open(self, micro_batch: int) -> Sum:
        """Return the sum to which ``micro_batch`` adds, after joining those that are complete before it."""
        if self._sums and self._sums[-1].first == micro_batch:
            return self._sums[-1]
        self._join(micro_batch)
        if self._sums:
            full = torch.empty_like(self._sums[0].full)
        else:
            layout = self.segment.layout
            transport = self.segment.transport
            full = transport.gradient(layout, self.segment.like_gradient)
            rank = None if on_accelerator(full) and transport.world > 1 else transport.rank
            if not self._places or self._holds_own != (rank is None):
                self._holds_own = rank is None
                self._places = dict(zip(self.members, layout.elsewhere(rank), strict=True))
        self._sums.append(Sum(micro_batch, full, {}))
        return self._sums[-1]

    def _join(self, micro_batch: int) -> None:
        """Join the latest sums while they belong to one subtree that ends before ``micro_batch``."""
        while len(self._sums) > 1:
            left, right = self._sums[-2:]
            height = (left.first ^ right.first).bit_length()
            if ((left.first >> height) + 1) << height > micro_batch:
                break
            self._sums.pop()
            rows = [
                (member, [right.full[place] for _, place in self._places[member]], own)
                for member, own in right.own.items()
            ]
            self._add(left, rows)

    def take(self, grads: Iterable[tuple[ShardedParam, torch.Tensor]], micro_batch: int) -> None:
        """Add ``grads`` (each 1-D) of ``micro_batch``."""
        total = self._open(micro_batch)
        rows = list[tuple[ShardedParam, list[torch.Tensor], torch.Tensor]]()
        for member, grad in grads:
            start = member.part.start
            stop = member.part.stop
            own = grad if stop - start == grad.numel() else grad[start:stop]
            rows.append((member, [grad[span] for span, _ in self._places[member]], own))
        self._add(total, rows)

    def _add(self, total: Sum, rows: Iterable[tuple[ShardedParam, list[torch.Tensor], torch.Tensor]]) -> None:
        """Add gradients to ``total``: copies and sums in one launch each.

        ``rows``: for each parameter the parts that other ranks own, in the order of `_places`, and this
        rank's own part.
        """
        copies = list[tuple[torch.Tensor, torch.Tensor]]()
        sums = list[tuple[torch.Tensor, torch.Tensor]]()
        for member, parts, own in rows:
            pairs = sums if member in total.own else copies
            pairs += [
                (total.full[at], part) for (_, at), part in zip(self._places[member], parts, strict=True)
            ]
            if self._holds_own or not member.part.numel:
                total.own[member] = member.no_grad
            elif pairs is sums:
                sums.append((total.own[member], own))
            else:
                # A view of a part would keep the memory of the whole gradient.
                cut = own.untyped_storage().nbytes() > own.nbytes
                total.own[member] = own.to(self.segment.local.dtype, copy=cut)
        for lay_out, pairs in ((torch._foreach_copy_, copies), (torch._foreach_add_, sums)):
            if pairs:
                lay_out([place for place, _ in pairs], [part for _, part in pairs])

    @property
    def waiting(self) -> list[ShardedParam]:
        """The parameters whose gradients have been collected and not yet sent."""
        return [*dict.fromkeys(member for total in self._sums for member in total.own)]

    def own_part(self, member: ShardedParam) -> torch.Tensor:
        """Return this rank's part (1-D) of a gradient that waits, of the first of several sums."""
        total = next(total for total in self._sums if member in total.own)
        if not self._holds_own or not member.part.numel:
            return total.own[member]
        [(_, place)] = self._places[member]
        return total.full[place][member.part.start : member.part.stop].to(self.segment.local.dtype)

    def forget(self, member: ShardedParam) -> None:
        """Forget what has been collected for ``member``."""
        for total in self._sums:
            total.own.pop(member, None)

    def send(self) -> Gradient:
        """Return the collected gradient, with -0.0 where this rank has none, and begin a new one."""
        self._join(sys.maxsize)
        segment = self.segment
        transport = self.segment.transport
        virtual = self.segment.layout.virtual
        total = self._sums[0] if self._sums else self._open(0)
        full = total.full
        collected = total.own
        if transport.world > 1:
            if self._zeros.dtype != full.dtype or self._zeros.device != full.device:
                self._piece_starts = self._piece_starts.to(full.device)
                self._zeros = full.new_zeros(len(self._piece_starts))
            full.index_add_(0, self._piece_starts, self._zeros)
        # Averages over replicas send this rank's own parts, too.
        if collected and not self._holds_own and (virtual or transport.all_ranks.world > transport.world):
            starts = [collected[member][at] for member, at in self._own_starts if member in collected]
            if starts:
                torch._foreach_add_(starts, 0.0)
        there: list[bool | None] = []
        for member in self.members:
            if member in collected:
                there.append(True)
                continue
            there.append(None if member.param.requires_grad and not transport.silent else False)
            size = 0 if self._holds_own else member.part.numel
            collected[member] = full.new_full((size,), -0.0, dtype=segment.local.dtype)
            for _, place in self._places[member]:
                full[place].fill_(-0.0)
        own = [collected[member] for member in self.members]
        self.sent.append((own, there))
        mean = segment.local.dtype if self._holds_own else None
        self._sums.clear()
        return Gradient(full, own, segment.layout, segment.pieces, mean, virtual)

    def drop(self) -> None:
        """Forget everything, after a backward that failed."""
        self.sent.clear()
        if self._sums:
            self.segment.transport.discard(self._sums[0].full)
        self._sums.clear()


class Reduction:
    """Reduce one unit: collect its gradients, then run one reduce-scatter at a time.

    ``arrived``: names of parameters for which autograd has had a gradient. ``_shown``: what ``.grad`` shows
    under `no_sync`, with its version, and whether `show_waiting` put it there.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.flats = [FlatGradient(segment) for segment in unit.segments]
        self._flat_of = {member: flat for flat in self.flats for member in flat.members}
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
        for member, (grad, version, own) in list(self._shown.items()):
            now = member.param.grad
            if now is grad and now._version == version:
                if own:
                    member.param.grad = None
            elif now is None or not now.as_subclass(torch.Tensor).any():
                if self._flat_of[member].segment.layout.virtual:
                    raise ValueError(
                        f"the gradient of parameter {member.name} was cleared while it waits for other "
                        "virtual ranks: call zero_grad() between two steps"
                    )
                self._flat_of[member].forget(member)
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
                flat.take(grads, micro_batch)
        self.arrived.clear()

    @property
    def waiting(self) -> bool:
        """Whether anything has been collected and not yet sent."""
        return any(flat.waiting for flat in self.flats)

    def show_waiting(self) -> None:
        """Let parameters show this rank's part of the gradient that waits under `no_sync`.

        Otherwise a user's `zero_grad` or change before the next backward would go unnoticed.
        """
        for flat in self.flats:
            for member in flat.waiting:
                own = member.param.grad is None
                if own:
                    member.give_grad(flat.own_part(member))
                grad = member.param.grad
                assert grad is not None
                self._shown[member] = grad, grad._version, own

    def launch(self) -> None:
        """Start reducing what has been collected."""
        trace.begin("reduce", self.unit.title)
        self._under_way = [flat.send() for flat in self.flats if flat.expected]
        self._moving = self.unit.transport.reduce(self.unit.title, self._under_way)
        trace.end("reduce", self.unit.title)

    def finish(self) -> None:
        """Wait for the reduction."""
        with waiting(REDUCE, self.unit.title, self.unit.device):
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
    for unit, flat in [(reduction.unit, flat) for reduction in reductions for flat in reduction.flats]:
        for own, there in flat.sent:
            if unit.options.divide_by is not None:
                torch._foreach_mul_(own, unit.transport.all_ranks.world / unit.options.divide_by)
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

"""A complete FSDP to read in one sitting, as `docs/engine.md` explains it in steps 1 to 4.

    optimizer = torch.optim.AdamW(mini.shard(model).parameters())

One step of a model of blocks 0, 1, 2, on every rank::

    forward   gather 0 | compute 0, gather 1 | compute 1, gather 2 | compute 2
    backward  compute 2, gather 1 | compute 1, gather 0, reduce 2 | compute 0, reduce 1 | reduce 0
    update    each rank its own interval of every block, without communication

It checks nothing: blocks run once per forward, in one order on all ranks, and return tensors in containers.
"""

from __future__ import annotations

from itertools import chain, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

ALIGNMENT = 64  # bytes: kernels choose paths by alignment, so parameters lie as in memory of their own


class Unit:
    """Parameters that are gathered and reduced together: one flat vector, cut into equal intervals."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        dtype = params[0].dtype if params else torch.float32
        step = ALIGNMENT // dtype.itemsize
        self.slices = []
        end = 0
        for param in params:
            self.slices.append(slice(end, end + param.numel()))
            end += -(-param.numel() // step) * step
        length = -(-end // (step * self.world)) * step  # of an interval
        self.full = torch.zeros(length * self.world, dtype=dtype)
        self.whole = self.views(self.full)  # what parameters show while the unit computes
        for view, param in zip(self.whole, params, strict=True):
            view.copy_(param.detach())
        dist.broadcast(self.full, 0)
        self.shard = self.full.chunk(self.world)[self.rank].clone()
        self.local = self.shards_of(self.shard)  # what they show at rest, and what the optimizer updates
        self.gathering: Any = None
        self.release()

    def views(self, full: Tensor) -> list[Tensor]:
        return [full[at].view_as(param) for at, param in zip(self.slices, self.params, strict=True)]

    def shards_of(self, interval: Tensor) -> list[Tensor]:
        """Return this rank's elements of each parameter, with its number of dimensions; some are empty."""
        shards = []
        first = self.rank * len(interval)
        for at, view in zip(self.slices, self.whole, strict=True):
            own = slice(*(min(max(edge - first, 0), len(interval)) for edge in (at.start, at.stop)))
            shards.append(interval[own].view(-1, *[1] * (view.ndim - 1)))
        return shards

    def show(self, tensors: list[Tensor]) -> None:
        """Let parameters show ``tensors``. They stay the same objects, which the optimizer knows."""
        for param, tensor in zip(self.params, tensors, strict=True):
            param.data = tensor

    def gather(self) -> None:
        """Start the all-gather, if released: into the same storage, of which autograd keeps views."""
        if not self.full.untyped_storage().nbytes():
            self.full.untyped_storage().resize_(self.full.nbytes)
            self.gathering = dist.all_gather([*self.full.chunk(self.world)], self.shard, async_op=True)

    def wait(self) -> None:
        """Wait for the all-gather, and show whole parameters."""
        self.gather()
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
            self.show(self.whole)

    def release(self) -> None:
        self.show(self.local)
        self.full.untyped_storage().resize_(0)

    def set_aside(self) -> None:
        """Keep gradients of earlier micro-batches apart: they have local shapes, those to come whole ones."""
        self.kept = [param.grad for param in self.params]
        for param in self.params:
            param.grad = None

    def reduce(self) -> None:
        """Start the reduce-scatter of the gradients, and release.

        A parameter may have no gradient on this rank and one on another, so all ranks send the whole vector.
        "None" travels as -0.0, the one value that no sum changes: -0.0 + x is x, also for x = 0.0, where
        0.0 + -0.0 is 0.0. So a sum is -0.0 only where every rank sent -0.0.
        """
        self.sent = torch.full(self.full.shape, -0.0, dtype=self.shard.dtype)  # kept until it has arrived
        for view, param in zip(self.views(self.sent), self.params, strict=True):
            if param.grad is not None:
                view.copy_(param.grad)
            param.grad = None
        self.release()
        # Every rank's part of this rank's interval, which `finish` adds up. The sum of two numbers has no
        # order. That of four has: (a + b) + (c + d) rounds otherwise than ((a + b) + c) + d, and gloo's own
        # reduce-scatter would choose one.
        self.parts = torch.empty_like(self.sent)
        self.reducing = dist.all_to_all_single(self.parts, self.sent, async_op=True)

    def finish(self) -> None:
        """Wait for the reduction: local gradients are means over ranks, and None if no rank has one."""
        self.reducing.wait()
        parts = list(self.parts.chunk(self.world))
        while len(parts) > 1:  # a balanced tree over ranks, (0 + 1) + (2 + 3)
            parts = [a if b is None else a + b for a, b in zip_longest(parts[::2], parts[1::2])]
        grads = self.shards_of(parts[0] / self.world)
        for param, grad, kept in zip(self.params, grads, self.kept, strict=True):
            # All are -0.0 if no rank has one.
            none = len(grad) > 0 and bool(((grad == 0) & grad.signbit()).all())
            param.grad = kept if none else grad if kept is None else kept + grad
        del self.parts, self.sent, self.reducing


class Schedule:
    """The times at which units are gathered, released and reduced, in the order of the last forward."""

    def __init__(self, root: Unit) -> None:
        self.root = root  # of what is in no block: whole from the model's forward to the end of backward
        self.order: list[Unit] = []  # of the last forward
        self.calls: list[Unit] = []  # of this one
        self.position = -1  # in ``calls``, of the unit whose backward runs
        self.reducing: Unit | None = None

    def begin(self) -> None:
        self.order = self.calls
        self.calls = []
        self.root.wait()

    def enter(self, unit: Unit) -> None:
        """Wait for a unit before its forward, and prefetch the next."""
        self.calls.append(unit)
        unit.wait()
        if len(self.calls) < len(self.order):
            self.order[len(self.calls)].gather()

    def leave(self, unit: Unit, output: Any) -> None:
        """Release a unit after its forward, unless backward begins with it."""
        if not torch.is_grad_enabled() or len(self.calls) != len(self.order):
            unit.release()
        self.watch(output)

    def end(self, output: Any) -> None:
        self.position = len(self.calls)
        if not torch.is_grad_enabled():
            self.root.release()
        self.watch(output)

    def watch(self, output: Any) -> None:
        """Note when backward reaches what was computed last.

        A moment is the number of a call of this forward. A hook on a tensor runs when autograd has its
        gradient, before the backward of what computed it. So the hook on the output of call 1 says that
        backward is done with calls 2, 3, ..., and call 1 comes next. The model's output begins.
        """
        moment = len(self.calls) - 1
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self.descend(moment))

    def descend(self, moment: int) -> None:
        """Bring the units to where backward is, this call: autograd runs what was made last first."""
        if self.position == len(self.calls):
            for unit in [*self.calls, self.root]:
                unit.set_aside()
            # No hook on an output runs after the first call's backward: its input needs no gradient. Autograd
            # calls what is queued during a backward once that whole backward is done.
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        while self.position > moment:
            done = self.calls[self.position] if self.position < len(self.calls) else None
            self.position -= 1  # one by one: other ranks may wait for a unit that got no gradient on this one
            if self.position >= 0:
                self.calls[self.position].wait()
            if self.position >= 1:
                self.calls[self.position - 1].gather()
            self.reduce(done)

    def reduce(self, unit: Unit | None) -> None:
        """Start a reduction, and finish the one before: one at a time overlaps with backward."""
        if unit:
            unit.reduce()
        if self.reducing:
            self.reducing.finish()
        self.reducing = unit

    def end_backward(self) -> None:
        self.descend(-1)
        self.reduce(self.root)
        self.reduce(None)


def members(model: nn.Module) -> list[nn.Module]:
    """Return the outermost members of `nn.Sequential` and `nn.ModuleList`: a model's blocks."""
    if isinstance(model, nn.Sequential | nn.ModuleList):
        return [module for module in model if [*module.parameters()]]
    return [member for child in model.children() for member in members(child)]


def shard(model: nn.Module) -> nn.Module:
    """Shard ``model`` in place, each of its blocks as a unit, what is left as the root's."""
    model.shapes = [param.shape for param in model.parameters()]
    blocks = members(model)
    inside = set(chain.from_iterable(block.parameters() for block in blocks))
    schedule = Schedule(Unit([param for param in model.parameters() if param not in inside]))
    model.register_forward_pre_hook(lambda *_: schedule.begin())
    for block in blocks:
        unit = Unit([*block.parameters()])
        block.register_forward_pre_hook(lambda *_, unit=unit: schedule.enter(unit))
        block.register_forward_hook(lambda *args, unit=unit: schedule.leave(unit, args[-1]))
    model.register_forward_hook(lambda *args: schedule.end(args[-1]))
    return model


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return whole parameters by name, on every rank. Collective."""
    whole = {}
    for (name, param), shape in zip(model.named_parameters(), model.shapes, strict=True):
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, param.detach().flatten())  # rank 0's elements come first
        whole[name] = torch.cat(parts).view(shape)
    return whole

"""Have a neighbour compute a micro-batch again, and compare bits: find machines that compute wrong.

With virtual ranks a micro-batch has the same bits on every rank. In a replayed step each rank also computes
the first virtual rank of the rank after it. Four ranks, V = 8::

    rank         0     1     2     3
    computes     0 1   2 3   4 5   6 7
    and again    2     4     6     0

Every bit of units' outputs, of the loss and of local gradients enters a digest, in the order of computation.
If the digests of a micro-batch differ, all ranks compute it once more, and the majority is right. A replay on
the same rank, as on a single one, finds faults that come and go; a faulty unit errs alike each time.

Sums between ranks come after what is compared. A device that adds up wrong there is not found.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor, nn

from shardtrain import comm, torch_private
from shardtrain.comm.guard import named
from shardtrain.engine.hooks import Engine, engine_of
from shardtrain.engine.introspection import introspect
from shardtrain.errors import ReplayMismatch as ReplayMismatch

_BLOCK = 1 << 16
_FACTOR = 0x5851F42D4C957F2D  # odd, so that no difference is lost in a product
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Record:
    """Hold what was kept of a computation in its order, each under a name and a number: ``fc.weight#0``.

    ``outputs``: of units. ``gradients``: this rank's own, of parameters. ``unit_of``: see `introspect`.
    """

    unit_of: Mapping[str, str]
    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all that was kept, each with its name in words."""
        for key, kept in self.outputs.items():
            yield f"the output of {key.partition('#')[0] or 'the root'}", kept
        for key, kept in self.gradients.items():
            name = key.partition("#")[0]
            yield f"the gradient of {name} in {self.unit_of.get(name, 'no unit')}", kept

    def first_false(self) -> str:
        """Return in words the first that is false of what was kept, and the first such gradient, or ""."""
        return _first([name for name, kept in self.named() if not kept])


def _first(names: Sequence[str]) -> str:
    """Return the first of these names, and the first of a gradient."""
    return ", then ".join(dict.fromkeys([*names[:1], *[name for name in names if "gradient" in name][:1]]))


@contextmanager
def recording(
    module: nn.Module, keep: Callable[[Tensor], Tensor], units: Sequence[str] | None = None
) -> Iterator[Record]:
    """Record the outputs of units and this rank's gradients, as forward and backward inside compute them.

    What is wrong first, such as a value that is not finite, is then the first in the record::

        with shardtrain.recording(model, lambda tensor: tensor.isfinite().all()) as record:
            loss_of(model(images), labels).backward()
        print(record.first_false())  # the output of layer2.0, then the gradient of fc.weight in the root

    Outputs inside units that are compiled are not recorded; those of the units are.

    Args:
        module: what `shard` returned, or any module.
        keep: from a tensor to what is kept of it: a copy, or a number, as later code may change the tensor.
        units: names of the modules whose outputs are recorded; None: those of the sharded module's units.

    Raises:
        ValueError: ``units`` is None and ``module`` is not sharded.
    """
    names = [unit.name for unit in engine_of(module).units] if units is None else units
    record = Record(introspect(module).unit_of_parameter if units is None else {})

    def add(kept: dict[str, Tensor], name: str, found: Tensor) -> None:
        number = next(n for n in itertools.count() if f"{name}#{n}" not in kept)
        kept[f"{name}#{number}"] = keep(found.detach())

    def output(name: str, _: nn.Module, __: object, found: object) -> None:
        if not torch.compiler.is_compiling():
            for leaf in torch_private.tree_leaves(found):
                if isinstance(leaf, Tensor):
                    add(record.outputs, name, leaf)

    with ExitStack() as stack:
        hooks = [module.get_submodule(name).register_forward_hook(partial(output, name)) for name in names]
        for name, param in module.named_parameters():
            if param.requires_grad:
                hooks.append(param.register_hook(partial(add, record.gradients, name)))
        for hook in hooks:
            stack.callback(hook.remove)
        yield record


def digest(tensor: Tensor) -> Tensor:
    """Return a digest of the bits of ``tensor``: int64, 0-dim, on its device.

    A sum modulo 2^64 of all words times odd random numbers. One word's change always changes it.
    """
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().contiguous().view(-1)
    weights = _weights(flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for block in flat.view(_WORDS[flat.itemsize]).split(_BLOCK):
        total = total * _FACTOR + (block.long() * weights[: len(block)]).sum()
    return total


@functools.cache
def _weights(device: torch.device) -> Tensor:
    drawn = torch.Generator().manual_seed(0)
    return (torch.randint(-(1 << 63), (1 << 63) - 1, (_BLOCK,), generator=drawn) | 1).to(device)


def replay(module: nn.Module, compute: Callable[[int], Tensor], *, step: int | None = None) -> list[Tensor]:
    """Compute this rank's virtual ranks, and the first one of the rank after it; compare before any update.

    In a training loop, every 25th step for instance. It costs N/V of a step on N ranks::

        def compute(number):
            with shardtrain.virtual_rank(model, number, seed=0, step=step):
                loss = loss_of(model(images[step][number]), labels[step][number])
                loss.backward()
            return loss

        if step % 25 == 0:
            losses = shardtrain.replay(model, compute, step=step)
        else:
            losses = [compute(number) for number in shardtrain.introspect(model).virtual_ranks]
        optimizer.step()

    Gradients, buffers and random numbers are then as without a replay. Collective.

    Args:
        module: what `shard` returned, given ``virtual_ranks``.
        compute: from the number of any virtual rank to its loss: forward and backward inside `virtual_rank`.
            A function of the number alone, so with a seed where random numbers are drawn.
        step: the number of the step, for the message.

    Returns:
        The losses of this rank's virtual ranks.

    Raises:
        ReplayMismatch: on every rank, before the update, if two ranks computed other bits. It names the step,
            the unit and the parameter that differ first, and the rank that computed wrong, or both where no
            majority of ranks decides: two ranks with a lasting fault. No gradients are left.
        ValueError: `shard` was given no ``virtual_ranks``.
    """
    engine = engine_of(module)
    if engine.virtual is None:
        raise ValueError("replay() of a model without virtual ranks: call shard(..., virtual_ranks=V)")
    own = engine.virtual.ranks
    all_ranks = engine.transport.all_ranks
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    theirs = _again(engine, compute, own.stop % engine.virtual.count, buffers)
    with recording(module, digest) as record:
        first = compute(own.start)
    mine = _lines(engine, record, first)
    losses = [first, *(compute(number) for number in own[1:])]
    short = [hashlib.blake2b(text.encode(), digest_size=8).hexdigest() for text in (mine, theirs)]
    told = [text.split() for text in comm.gather_texts(" ".join(short), all_ranks)]
    for rank, (expected, _) in enumerate(told):
        checker = (rank - 1) % all_ranks.world
        if told[checker][1] != expected:
            number = rank * len(own)
            when = "" if step is None else f"step {step}: "
            pair = comm.gather_texts(mine, all_ranks)[rank], comm.gather_texts(theirs, all_ranks)[checker]
            thirds = comm.gather_texts(_again(engine, compute, number, buffers), all_ranks)
            engine.driver.drop_backward()
            _refuse(f"{when}virtual rank {number} has other bits", (rank, checker), pair, thirds)
    return losses


def _again(
    engine: Engine,
    compute: Callable[[int], Tensor],
    number: int,
    buffers: Sequence[tuple[Tensor, Tensor]],
) -> str:
    """Compute virtual rank ``number`` from these values of ``buffers``, and return its `_lines`.

    Gradients and buffers are then as before.
    """
    assert engine.virtual is not None
    before = [(member.param, member.param.grad) for member in engine.members]
    now = [buffer.detach().clone() for buffer, _ in buffers]
    for param, _ in before:
        param.grad = None
    for buffer, value in buffers:
        buffer.copy_(value)
    engine.virtual.again = number
    try:
        with recording(engine.module, digest) as record:
            return _lines(engine, record, compute(number))
    finally:
        engine.virtual.again = None
        engine.driver.drop_backward()
        for param, grad in before:
            param.grad = grad
        for (buffer, _), value in zip(buffers, now, strict=True):
            buffer.copy_(value)


def _lines(engine: Engine, record: Record, loss: Tensor) -> str:
    """Return a line for each tensor of a computation: its name and its digest."""
    kept = [*record.named()]
    kept.insert(len(record.outputs), ("the loss", digest(loss)))
    digests = torch.stack([each.to(engine.device) for _, each in kept]).tolist()
    return "\n".join(f"{name}\t{each}" for (name, _), each in zip(kept, digests, strict=True))


def _refuse(what: str, pair: tuple[int, int], texts: tuple[str, str], thirds: Sequence[str]) -> NoReturn:
    """Raise `ReplayMismatch`. ``texts``: what the ``pair`` of ranks computed; ``thirds``: all ranks then."""
    [(right, count)] = Counter(thirds).most_common(1)
    odd = [rank for rank, text in zip(pair, texts, strict=True) if text != right]
    if 2 * count > len(thirds) and len(odd) == 1:
        blamed = f"{named(odd)} computes wrong"
    else:
        blamed = "one of them computes wrong, unless the computation is not deterministic"
    lines = zip(*(text.split("\n") for text in texts), strict=False)
    differing = [a.partition("\t")[0] for a, b in lines if a != b] or ["the number of tensors"]
    raise ReplayMismatch(
        f"{what} on {named(sorted({*pair}))}: {blamed}. First differs {_first(differing)}. There was no "
        "update; continue from the last checkpoint, without that machine"
    )

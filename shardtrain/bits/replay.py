"""A micro-batch computed again by a neighbour, whose bits show a machine that computes wrong.

With virtual ranks a micro-batch has the same bits on every rank. In a replayed step each rank also computes
the first virtual rank of the rank after it. Four ranks, V = 8::

    rank         0     1     2     3
    computes     0 1   2 3   4 5   6 7
    and again    2     4     6     0

Every bit of units' outputs, of the loss, of local gradients and of changed buffers enters a digest, in the
order of computation. If the digests of a micro-batch differ, all ranks compute it once more, and the largest
group that agrees is right. A single rank replays its own, and finds faults that come and go.

Sums between ranks come after what is compared. A device that adds up wrong there is not found.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from shardtrain import comm, torch_private
from shardtrain import device as devices
from shardtrain.bits.virtual import Virtual, virtual_of, words
from shardtrain.comm.guard import named
from shardtrain.engine.hooks import Engine, engine_of, engines
from shardtrain.errors import ReplayMismatch as ReplayMismatch
from shardtrain.guardrails.attachment import Guardrails
from shardtrain.whole.introspection import introspect

_BLOCK = 1 << 16
_FACTOR = 0x5851F42D4C957F2D  # odd, so that no difference is lost in a product

CAUSES = (
    "usual causes are state that forward keeps outside of buffers (a counter in Python, a tensor attribute "
    "that is no buffer, a generator of its own, np.random, a second model in training mode), parameters "
    "that are not sharded and differ between ranks, kernels that are not deterministic, or no seed: register "
    "state as a buffer, and draw from torch's generator"
)


@dataclass
class Record:
    """What was kept of a computation in its order, each under a name and a number: ``fc.weight#0``.

    ``outputs``: of units. ``gradients``: this rank's own, of parameters. ``unit_of``: see `introspect`.
    """

    unit_of: Mapping[str, str]
    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all that was kept, each with its name in words."""
        for key, value in self.outputs.items():
            yield f"the output of {key.partition('#')[0] or 'the root'}", value
        for key, value in self.gradients.items():
            name = key.partition("#")[0]
            yield f"the gradient of {name} in {self.unit_of.get(name, 'no unit')}", value

    def first_false(self) -> str:
        """Return in words the first that is false of what was kept, and the first such gradient, or ""."""
        return _first([name for name, value in self.named() if not value])


def _first(names: Sequence[str]) -> str:
    """Return the first of these names, and the first of a gradient."""
    gradients = [name for name in names if name.startswith("the gradient")]
    return ", then ".join(dict.fromkeys([*names[:1], *gradients[:1]]))


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
    names = units
    if names is None:
        names = [*itertools.chain.from_iterable([unit.modules for unit in engine_of(module).units])]
    record = Record(introspect(module).unit_of_parameter if units is None else {})

    def add(values: dict[str, Tensor], name: str, tensor: Tensor) -> None:
        number = next(n for n in itertools.count() if f"{name}#{n}" not in values)
        values[f"{name}#{number}"] = keep(tensor.detach())

    def output(name: str, _: nn.Module, __: object, result: object) -> None:
        if not torch.compiler.is_compiling():
            for leaf in torch_private.tree_leaves(result):
                if isinstance(leaf, Tensor):
                    add(record.outputs, name, leaf)

    with ExitStack() as stack:
        for name in names:
            unit = module.get_submodule(name)
            stack.enter_context(unit.register_forward_hook(partial(output, name)))
        for name, param in module.named_parameters():
            if param.requires_grad:
                stack.enter_context(param.register_hook(partial(add, record.gradients, name)))
        yield record


def digest(tensor: Tensor) -> Tensor:
    """Return a digest of the bits of ``tensor``: int64, 0-dim, on its device.

    A sum modulo 2^64 of all words times odd random numbers. One word's change always changes it.
    """
    flat = words(tensor)
    weights = _weights(flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for block in flat.split(_BLOCK):
        total = total * _FACTOR + (block.long() * weights[: len(block)]).sum()
    return total


@functools.cache
def _weights(device: torch.device) -> Tensor:
    drawn = torch.Generator().manual_seed(0)
    return (torch.randint(-(1 << 63), (1 << 63) - 1, (_BLOCK,), generator=drawn) | 1).to(device)


def replay(
    module: nn.Module,
    compute: Callable[[int], Tensor],
    *,
    step: int | None = None,
    neighbour: bool = True,
) -> list[Tensor]:
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

    Gradients (of all parameters), buffers and random numbers are then as without a replay. Collective.

    Args:
        module: what `shard` returned, given ``virtual_ranks``.
        compute: from the number of any virtual rank to its loss: forward and backward inside `virtual_rank`.
            A function of the number alone, so with a seed where random numbers are drawn.
        step: the number of the step, for the message.
        neighbour: False has each rank compute its own first virtual rank again instead. In a run's first
            step this finds state that forward keeps outside of buffers. The training program does so.

    Returns:
        The losses of this rank's virtual ranks.

    Raises:
        ReplayMismatch: on every rank, before the update, if a virtual rank had other bits when computed
            again. It names step, unit and parameter, and the ranks that computed wrong; or, where no largest
            group of ranks agrees, both and other causes. No gradients are left.
        ValueError: there are no ``virtual_ranks``, ``compute`` returned a loss without its graph, or a module
            outside of this model has changed its buffers.
    """
    engine = engine_of(module)
    virtual = virtual_of(module, "replay()")
    ranks = virtual.ranks
    with changes_elsewhere(module), recording(module, digest) as record:
        first = compute(ranks.start)
    own_lines = _lines(virtual, record, first)
    recompute = partial(_again, engine, compute, _leaves_of(engine, first))
    losses = [first, *(compute(number) for number in ranks[1:])]
    state = devices.random_state(engine.driver.device)
    distance = 1 if neighbour else 0  # from the rank that checks to the one that is checked
    checked_lines = recompute((ranks.start + distance * len(ranks)) % virtual.count)
    if mismatch := _compared(engine, (own_lines, checked_lines), distance, recompute):
        engine.driver.drop_backward()
        raise ReplayMismatch(mismatch if step is None else f"step {step}: {mismatch}")
    devices.set_random_state(engine.driver.device, state)
    return losses


def _compared(
    engine: Engine, texts: tuple[str, str], distance: int, recompute: Callable[[int], str]
) -> str | None:
    """Return in words on which ranks a micro-batch has other bits, or None. Collective.

    ``texts``: this rank's `_lines`, of its own micro-batch and of the one that it checks.
    """
    all_ranks = engine.channel.all_ranks
    short = [hashlib.blake2b(text.encode(), digest_size=8).hexdigest() for text in texts]
    digests = [text.split() for text in comm.gather_texts(" ".join(short), all_ranks)]
    for rank, (expected, _) in enumerate(digests):
        checker = (rank - distance) % all_ranks.world
        if digests[checker][1] != expected:
            number = rank * len(engine.virtual_ranks)
            owner_text = comm.gather_texts(texts[0], all_ranks)[rank]
            checker_text = comm.gather_texts(texts[1], all_ranks)[checker]
            pair = owner_text, checker_text
            if not distance:
                return _judged_alone(number, rank, pair)
            return _judged(number, (rank, checker), pair, comm.gather_texts(recompute(number), all_ranks))
    return None


def _again(engine: Engine, compute: Callable[[int], Tensor], leaves: Iterable[Tensor], number: int) -> str:
    """Compute virtual rank ``number`` of this step again, and return its `_lines`.

    Gradients of parameters and of other ``leaves``, and buffers, are then as before.
    """
    virtual = engine.attached(Virtual)
    members = [member.param for member in engine.members]
    gradients = [(leaf, leaf.grad) for leaf in dict.fromkeys([*members, *leaves])]
    for leaf, _ in gradients:
        leaf.grad = None
    virtual.again = number
    try:
        with recording(engine.module, digest) as record:
            return _lines(virtual, record, compute(number))
    finally:
        virtual.again = None
        engine.driver.drop_backward()
        for leaf, grad in gradients:
            leaf.grad = grad


def _leaves_of(engine: Engine, loss: Tensor) -> list[Tensor]:
    """Return what besides the sharded parameters may have a gradient of ``loss``, such as its graph's leaves.

    Raises ValueError for a loss without a graph.
    """
    if loss.grad_fn is None:
        raise ValueError(
            "compute() has returned a loss without its graph: return that on which backward() was called, "
            "not detached, so that gradients of parameters outside of the model can be put aside"
        )
    leaves = dict.fromkeys(engine.module.parameters())
    for optimizer in engine.attached(Guardrails).optimizers.seen:
        for group in optimizer.param_groups:
            leaves.update(dict.fromkeys(group["params"]))
    seen = {loss.grad_fn}
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)  # of the nodes that accumulate
        if leaf is not None:
            leaves[leaf] = None
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return [*leaves]


@contextmanager
def changes_elsewhere(module: nn.Module) -> Iterator[None]:
    """Raise ValueError if a module that is called inside changes its buffers, and is not in ``module``.

    Nothing averages them over virtual ranks. Those of another model with virtual ranks are averaged.
    """
    inside = set(module.modules())
    for engine in engines():
        if engine.virtual_count:
            inside.update(engine.module.modules())
    values = dict[Tensor, tuple[str, Tensor]]()

    def note(called: nn.Module, _: object) -> None:
        if called in inside:
            return
        for name, buffer in called._buffers.items():
            if buffer is not None and buffer not in values:
                values[buffer] = f"{name} of {type(called).__name__}", words(buffer).clone()

    handle = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()
    for buffer, (title, value) in values.items():
        if not torch.equal(words(buffer), value):
            raise ValueError(
                f"buffer {title}, which is not in the model with virtual ranks, was changed inside "
                "virtual_rank(): its value would depend on the number of ranks. Call eval() on that module, "
                "make it a part of the model before shard(), or shard it with virtual_ranks, too"
            )


def _lines(virtual: Virtual, record: Record, loss: Tensor) -> str:
    """Return a line for each tensor of a computation: its name and its digest."""
    entries = [*record.named()]
    entries.insert(len(record.outputs), ("the loss", digest(loss)))
    entries += [(f"buffer {name}", digest(value)) for name, value in virtual.left.items()]
    numbers = torch.stack([number.to(virtual.driver.device) for _, number in entries]).tolist()
    return "\n".join(f"{name}\t{number}" for (name, _), number in zip(entries, numbers, strict=True))


def _judged(number: int, pair: tuple[int, int], texts: tuple[str, str], thirds: Sequence[str]) -> str:
    """Return in words who computed wrong. ``texts``: what the ``pair`` computed; ``thirds``: all ranks then.

    The largest group of ranks that agree is right. A rank alone is in a group with what it had before. If
    neither of the pair has had these bits, nor repeats its own, what changes is no machine.
    """
    groups = Counter(thirds if len(thirds) > 1 else [*thirds, *texts])
    [(right, count), *others] = groups.most_common(2)
    wrong = {rank for rank, text in enumerate(thirds) if text != right}
    wrong |= {rank for rank, text in zip(pair, texts, strict=True) if text != right}
    repeats = any(thirds[rank] == text for rank, text in zip(pair, texts, strict=True))
    largest = count > 1 and all(count > other for _, other in others)
    if largest and (repeats or right in texts):
        computes = "compute" if len(wrong) > 1 else "computes"
        blamed = f"{named(sorted(wrong))} {computes} wrong"
        advice = "without that machine, unless code, data or versions of software are different there"
    else:
        blamed = "one of them computes wrong, or no machine does"
        advice = f"without that machine. If a computation has other bits each time, {CAUSES}"
    return (
        f"virtual rank {number} has other bits on {named(sorted({*pair}))}: {blamed}. First differs "
        f"{_differing(texts)}. There was no update; continue from the last checkpoint, {advice}"
    )


def _judged_alone(number: int, rank: int, texts: tuple[str, str]) -> str:
    """Return in words what is different where ``rank`` has computed a virtual rank of its own twice."""
    return (
        f"virtual rank {number} had other bits as rank {rank} computed it again: results would depend on the "
        f"number of ranks. First differs {_differing(texts)}. There was no update; {CAUSES}"
    )


def _differing(texts: tuple[str, str]) -> str:
    """Return in words what differs first in two computations' `_lines`."""
    lines = zip(*(text.split("\n") for text in texts), strict=False)
    return _first([a.partition("\t")[0] for a, b in lines if a != b] or ["the number of tensors"])
